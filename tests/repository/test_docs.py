"""README.md and docs match the code: settings, flags, fields, presets; and commands and programs in them run."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch
import yaml

from app.access.tenant import RateLimits
from app.api.native.routes import CompleteRequest
from app.common.settings import Settings, field_docstrings, grouped_fields
from app.common.version import RELEASE
from app.main import create_app
from benchmarks.service_process import ServiceStartError
from model.nn.transformer import Decoder
from model.presets import PRESET_NAMES, preset
from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.docs_commands import PageReader, commands, commands_of, fences, reason_to_skip
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import shorten_samples
from tests.support.servers import Server

README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()
SETTINGS = (ROOT / "docs/settings.md").read_text()
TRAIN = (ROOT / "docs/train.md").read_text()
_FLAG = r"(?<![\w-])--[a-z][a-z0-9-]*"


def settings_tables() -> str:
    """The tables in docs/settings.md."""
    tables, meanings = [], field_docstrings()
    for title, group in grouped_fields().items():
        rows = [f"## {title.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        for name, field in group.items():
            meaning = " ".join(meanings[name].split())
            rows.append(f"| `--{name.replace('_', '-')}` | {field.default} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def test_settings_tables_match_the_settings() -> None:
    assert settings_tables() in SETTINGS, settings_tables()


def _strings_of_code() -> set[str]:
    """String literals of the Python code, and words of the page's code."""
    found = set[str]()
    for folder in ("app", "benchmarks", "deploy", "inkstream", "model", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            found.update(re.findall(r"[\"']([\w-]+)[^\"'\n]*[\"']", path.read_text()))
    return found.union(*(re.findall(r"\w+", path.read_text()) for path in (ROOT / "app/web").rglob("*.js")))


def test_documented_flags_and_variables_exist() -> None:
    """A flag alone in backticks is ours, or other programs get it in a command of the pages."""
    strings, texts = _strings_of_code(), {page: (ROOT / page).read_text() for page in PAGES}
    names = {*Settings.model_fields, *CompleteRequest.model_fields, *(field.name for field in fields(RateLimits))}
    flags = {f"--{name.replace('_', '-')}" for name in names} | {text for text in strings if text.startswith("--")}
    flags |= {flag.replace("--", "--no-", 1) for flag in flags}
    flags |= {flag for text in texts.values() for each in commands(text) for flag in re.findall(_FLAG, each)}
    variables = {f"INKSTREAM_{name.upper()}" for name in Settings.model_fields} | strings
    unknown = []
    for page, text in texts.items():
        named = {flag for span in re.findall(r"`(--[a-z][^`]*)`", text) for flag in re.findall(_FLAG, span)}
        unknown += [(page, flag) for flag in named - flags]
        unknown += [(page, name) for name in {*re.findall(r"INKSTREAM_[A-Z_]*[A-Z]", text)} - variables]
    assert unknown == []


@pytest.mark.parametrize("of", ["requests", "results"])
def test_every_field_is_explained(of: str, tmp_path: Path) -> None:
    """Fields of all bodies, of events, and of their objects; the rest is only in /docs."""
    schemas = create_app(Settings(weights=tmp_path)).openapi()["components"]["schemas"]
    results = {"StartEvent", "TokenEvent", "Token", "QueueEvent", "DoneEvent", "Usage", "Timings", "Receipt", "Model"}
    names = {name for name in schemas if name.endswith("Request")} if of == "requests" else results
    documented = {field for name in names for field in schemas[name]["properties"]}
    assert len(documented) > 20
    assert {field for field in documented if f"`{field}`" not in API} <= {"object", "created", "owned_by"}


def test_every_error_code_is_explained() -> None:
    sources = [path.read_text() for path in (ROOT / "app").rglob("*.py")]
    codes = {code for source in sources for code in re.findall(r"\bcode=\"([a-z_]+)\"", source)}
    assert len(codes) > 15
    assert {code for code in codes if f"`{code}`" not in API} == set()


def test_every_route_is_explained(tmp_path: Path) -> None:
    paths = create_app(Settings(weights=tmp_path)).openapi()["paths"]
    found = {method.upper() + " " + path for path, methods in paths.items() for method in methods}
    assert len(found) > 10
    assert {route for route in found if f"`{route}" not in API} == set()


def test_presets_have_the_documented_sizes() -> None:
    for name in PRESET_NAMES:
        with torch.device("meta"):
            size = Decoder(preset(name)).n_params
        size_text = f"{size / 1e6:.1f} M" if size >= 100_000 else str(size)
        assert re.search(rf"\| `{name}` \|.*\| {size_text} \|", TRAIN), name


PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
GIVEN = {
    "README.md": ("my-texts/a.txt", "notes.md"),
    "docs/bring-your-model.md": ("my-model/",),
    "docs/quickstarts.md": ("books/a.txt",),
    "docs/reload.md": ("runs/monday/", "runs/tuesday/", "current/"),
}
"""What readers of a page have: texts, and, with a slash at the end, weights."""

OWN_TESTS = {"docs/deploy.md", "docs/extending.md", "docs/train.md"}
"""Pages whose commands have a test file of their own, which runs or holds each of them."""


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OWN_TESTS])
def test_every_command_and_program_of_a_page_runs(
    page: str, server: Server, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs them in order, in a fresh clone, around a tiny model; training takes a few steps, the engine is fake.

    A page says above a block why no test can run it: `<!-- not run: REASON -->`.
    """
    shorten_samples(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for name in GIVEN.get(page, ()):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            (tmp_path / name).symlink_to(weights)
        else:
            (tmp_path / name).write_text(TEXT * 3)
    reader = PageReader(tmp_path, weights, server=server, fake_ms=1)
    try:
        for fence in fences((ROOT / page).read_text()):
            if fence.language in ("python", "js") and not reason_to_skip(fence):
                _check_printed(reader.run_program(fence), fence.text, reader.server)
            for command in commands_of(fence):
                if not reason_to_skip(fence, command):
                    printed = reader.run_command(command)
                    assert "curl -N" not in command or re.search(r"^(event: done|data: \[DONE\])$", printed, re.M)
    finally:
        reader.close()


def _check_printed(printed: str, program: str, server: Server) -> None:
    """Asserts that a program printed exactly the completion of the service with its seed."""
    (max_tokens,) = re.findall(r"max_tokens\"?[=:] ?(\d+)", program)
    (choice,) = fetch_completion(server.url, prompt="Once upon a time", max_tokens=int(max_tokens), seed=7)["choices"]
    assert printed.removesuffix("\n") == choice["text"].removesuffix("\n")


def test_most_commands_and_programs_run() -> None:
    """Otherwise a rule that skips too much would go unnoticed."""
    blocks = [fence for page in PAGES if page not in OWN_TESTS for fence in fences((ROOT / page).read_text())]
    asked = [(fence, command) for fence in blocks for command in commands_of(fence)]
    skipped = [command for fence, command in asked if reason_to_skip(fence, command)]
    assert len(asked) > 70 and len(skipped) < len(asked) * 0.6, skipped


def test_every_block_names_its_language() -> None:
    """Otherwise a command could escape the tests."""
    languages = {"sh", "console", "python", "js", "json", "yaml", "text", "html"}
    found = [(page, fence) for page in PAGES for fence in fences((ROOT / page).read_text())]
    assert [f"{page}:{fence.line}" for page, fence in found if fence.language not in languages] == []


def test_commands_call_programs_of_the_virtual_environment() -> None:
    """In a fresh clone, `inkstream` is not on the path, and the system's Python has none of the packages."""
    bare = r"(inkstream|python3?|pip|hf|ray|serve|torchrun) (?!-m venv)"
    without_clone = {"docs/install.md", "docs/package.md"}
    for page in set(PAGES) - without_clone:
        text = (ROOT / page).read_text()
        assert [command for command in commands(text) if re.match(bare, command)] == [], page
        prose = re.sub(r"^ *```.*?^ *```$", "", text, flags=re.MULTILINE | re.DOTALL)
        assert re.findall(r"`(?:python3?|pip|torchrun) -?\w[^`\n]*`", prose) == [], page


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("curl -N -d '{\"prompt\":1.5}' -H 'content-type: application/json' localhost:8000/complete", "error"),
        (".venv/bin/inkstream keys lost --keys-file keys.json", "lost"),
        ("make serve ARGS=--no-such-flag", "no-such-flag"),
    ],
)
@pytest.mark.slow
def test_failing_command_is_detected(command: str, error: str, server: Server, weights: Path, tmp_path: Path) -> None:
    reader = PageReader(tmp_path, weights, server=server, fake_ms=1)
    with pytest.raises((AssertionError, ServiceStartError), match=error):
        reader.run_command(command)
    reader.close()


def test_constraints_pin_every_dependency_exactly() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    names = re.findall(r'^\s+"([a-z\-]+)(?:\[\w+\])?[>=]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    # ray: nothing installs that extra but make ray, which names its version. triton: a torch for CUDA names its own.
    assert {name for name in names if name not in ("setuptools", "ray", "triton")} <= pinned
    assert pins["torch"] == "2.13.0"


def test_citation_has_the_newest_release() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors", "version", "license"} <= set(citation)
    assert str(citation["version"]) == RELEASE
    assert citation["license"] == "MIT" and citation["title"] == "inkstream"


def test_no_page_installs_our_name_from_an_index() -> None:
    """No index has our package, and a stranger could register its name there. A path or a wheel is fine."""
    advice = re.compile(r"""\binstall[ \t]+[^\n`]*?(?<![\w./*-])["']?inkstream(?=[\["'=<>\s`]|$)""", re.MULTILINE)
    assert advice.search("pip install 'inkstream[torch]'") and advice.search("pipx install inkstream")
    assert not advice.search("pipx install dist/inkstream-*.whl") and not advice.search("pip install -e '.[traces]'")
    files = [ROOT / page for page in PAGES] + [ROOT / "CONTRIBUTING.md", ROOT / "Dockerfile"]
    files += [path for folder in ("app", "model", "benchmarks", "deploy") for path in (ROOT / folder).rglob("*.py")]
    pip = re.compile(r"\b(?:pip|pipx|uv|uvx)\b.*")
    assert [p for p in files for line in pip.findall(p.read_text()) if advice.search(line.partition("#")[0])] == []
