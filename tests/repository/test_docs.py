"""README.md and docs match the code: settings table, fields, presets; and all commands and programs in them run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import yaml

from app.common.settings import Settings, field_docstrings, grouped_fields
from app.common.version import RELEASE
from app.main import create_app
from benchmarks.service_process import ServiceStartError
from model.nn.transformer import Decoder
from model.presets import PRESET_NAMES, preset
from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.docs_commands import PageReader, commands, commands_of, fences
from tests.support.model.tiny_models import TEXT
from tests.support.model.training_runs import shorten_samples
from tests.support.servers import Server

README = (ROOT / "README.md").read_text()
API = (ROOT / "docs/api.md").read_text()
SETTINGS = (ROOT / "docs/settings.md").read_text()
TRAIN = (ROOT / "docs/train.md").read_text()


def settings_tables() -> str:
    """The tables in docs/settings.md."""
    tables, meanings = [], field_docstrings()
    for title, fields in grouped_fields().items():
        rows = [f"## {title.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        for name, field in fields.items():
            meaning = " ".join(meanings[name].split())
            rows.append(f"| `--{name.replace('_', '-')}` | {field.default} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def test_settings_tables_match_the_settings() -> None:
    assert settings_tables() in SETTINGS, settings_tables()


@pytest.mark.parametrize("of", ["requests", "results"])
def test_every_field_is_explained(of: str, tmp_path: Path) -> None:
    """Fields of all bodies, of events, and of their objects; the rest is only in /docs."""
    schemas = create_app(Settings(weights=tmp_path)).openapi()["components"]["schemas"]
    results = {"StartEvent", "TokenEvent", "Token", "QueueEvent", "DoneEvent", "Usage", "Timings", "Receipt", "Model"}
    names = {name for name in schemas if name.endswith("Request")} if of == "requests" else results
    fields = {field for name in names for field in schemas[name]["properties"]}
    assert len(fields) > 20
    assert {field for field in fields if f"`{field}`" not in API} <= {"object", "created", "owned_by"}


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

OWN_TESTS = {
    "docs/deploy.md": "tests/repository/test_deploy.py",
    "docs/extending.md": "tests/repository/test_docs_extending.py",
    "docs/train.md": "tests/repository/test_docs_train.py",
}
"""Pages whose commands have a test file of their own, which runs or holds each of them."""

NO_INDEX = "installs packages from an index"
NO_HUB = "downloads from the Hugging Face Hub; the tests of the hub have one on loopback"
ROOT_USER = "changes the machine as root, and needs systemd; tests/repository/test_systemd.py reads the unit"
NO_RAY = "needs Ray in an environment of its own; make ray starts the same"
NANOGPT = "needs a nanoGPT checkpoint; tests/repository/test_docs_bring_your_model.py runs the same"
EXEMPT = {
    "README.md": {"docker compose up --build --wait": "needs Docker; make container runs it"},
    "docs/bring-your-model.md": {
        '"""export.py CKPT.pt DIR': NANOGPT,
        '"""chars.py META.pkl DIR': NANOGPT,
        '"""gpt.py CKPT.pt DIR': NANOGPT,
        '"""compare.py DIR': NANOGPT,
        ".venv/bin/python export.py": NANOGPT,
        ".venv/bin/python chars.py": NANOGPT,
        ".venv/bin/hf download": NO_HUB,
        ".venv/bin/inkstream check HuggingFaceTB/": NO_HUB,
        ".venv/bin/inkstream serve --weights HuggingFaceTB/": NO_HUB,
        ".venv/bin/inkstream train --init HuggingFaceTB/": NO_HUB,
    },
    "docs/command-line.md": {
        ".venv/bin/inkstream complete -i": "needs a terminal; tests/cli/test_interactive.py has one",
    },
    "docs/install.md": {
        "pip download": "fetches packages from an index",
        "make serve WEIGHT=": "is refused; tests/deploy/test_install.py has it",
    },
    "docs/package.md": {
        "python3 -m pip wheel": "builds a wheel; tests/repository/test_wheel.py does",
        "pipx install": NO_INDEX,
        "inkstream serve": "needs the wheel that pipx has installed",
        "/usr/bin/python3 -m venv /opt/inkstream": ROOT_USER,
        "/opt/inkstream/bin/": ROOT_USER,
        "cp deploy/systemd/": ROOT_USER,
        "systemctl ": ROOT_USER,
        "groupadd ": ROOT_USER,
        "install -": ROOT_USER,
        "chown ": ROOT_USER,
    },
    "docs/kernels.md": {
        ".venv/bin/inkstream compile": "compiles for minutes; tests/cli/test_compile.py has all three",
    },
    "docs/page.md": {
        "make serve PORT=8001 WEIGHTS=finetuned": "needs two services; tests/page/test_page_presets.py starts them",
    },
    "docs/quickstarts.md": {
        "make serve WEIGHTS=HuggingFaceTB/": NO_HUB,
        'curl -d \'{"messages"': "needs the model of the command before it",
        "python3 -m venv .lm-eval": NO_INDEX,
        ".lm-eval/bin/lm_eval": "needs lm-eval and its data; make clients ONLY=lm-eval evaluates the same way",
        ".venv/bin/python -m http.server": "runs until Ctrl+C; tests/examples/test_examples.py serves the page",
    },
    "docs/ray.md": {
        ".venv/bin/python -m pip install": NO_INDEX,
        ".venv/bin/ray start": NO_RAY,
        "INKSTREAM_KEYS_FILE=/srv/keys.json": NO_RAY,
    },
    "docs/security-testing.md": {
        "make redteam": "attacks for minutes; tests/repository/test_redteam.py tries the suite",
        '@attack("many-choices"': "a fragment that shows a pattern",
    },
    "docs/train-log.md": {"import pandas": "pandas is no dependency of this project"},
}
"""Commands and programs that no test here can run, by how they begin, each with the reason. All others run."""


def _exemption(page: str, text: str) -> str | None:
    """The beginning of the exempt command that matches this one."""
    return next((start for start in EXEMPT.get(page, {}) if text.startswith(start)), None)


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if page not in OWN_TESTS])
def test_every_command_and_program_of_a_page_runs(
    page: str, server: Server, weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs them in order, in a fresh clone, around a tiny model; training takes a few steps, the engine is fake."""
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
            if fence.language in ("python", "js") and not _exemption(page, fence.text):
                _check_printed(reader.run_program(fence), fence.text, reader.server)
            for command in commands_of(fence):
                if not _exemption(page, command):
                    printed = reader.run_command(command)
                    assert "curl -N" not in command or re.search(r"^(event: done|data: \[DONE\])$", printed, re.M)
    finally:
        reader.close()


def _check_printed(printed: str, program: str, server: Server) -> None:
    """Asserts that a program printed exactly the completion of the service with its seed."""
    (max_tokens,) = re.findall(r"max_tokens\"?[=:] ?(\d+)", program)
    (choice,) = fetch_completion(server.url, prompt="Once upon a time", max_tokens=int(max_tokens), seed=7)["choices"]
    assert printed.removesuffix("\n") == choice["text"].removesuffix("\n")


def test_every_exempt_command_is_on_its_page() -> None:
    for page, exempt in EXEMPT.items():
        texts = [text for fence in fences((ROOT / page).read_text()) for text in (fence.text, *commands_of(fence))]
        for start in exempt:
            assert any(text.startswith(start) for text in texts), f"{page} no longer has {start}"


def test_commands_are_found_in_every_kind_of_block() -> None:
    page = (
        "```sh\na \\\n  b  # why\n# no command\nc <<END\nx\nEND\n```\n\n```console\n$ d e\nf\n```\n\n```text\ng\n```\n"
    )
    assert commands(page) == ["a    b", "c <<END\nx\nEND", "d e"]


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


def test_quickstarts_have_at_most_fifteen_lines() -> None:
    for section in (ROOT / "docs/quickstarts.md").read_text().split("\n## ")[1:]:
        lines = sum(len(fence.text.splitlines()) for fence in fences(section) if fence.language == "sh")
        assert 1 <= lines <= 15, section


def test_the_front_page_is_short() -> None:
    assert len(README.splitlines()) < 150
    assert "/v1/chat/completions" in README


def test_page_screenshot_is_small() -> None:
    assert len((ROOT / "docs/page.png").read_bytes()) <= 1_500_000


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("curl -N -d '{\"prompt\":1.5}' -H 'content-type: application/json' localhost:8000/complete", "error"),
        (".venv/bin/inkstream keys lost --keys-file keys.json", "lost"),
        ("make serve ARGS=--no-such-flag", "no-such-flag"),
        ("mkdir -p a && rm -rf a", "rm is none of the programs"),
        ("KEY=$(systemctl stop inkstream)", "systemctl is none"),
        ("cp a.txt /etc/a.txt", "/etc is not in the clone"),
        (".venv/bin/python -m pip install openai", "none of the programs"),
        ("curl -O https://example.com/a.txt", "is not this machine"),
    ],
)
@pytest.mark.slow
def test_failing_or_untested_command_is_detected(
    command: str, error: str, server: Server, weights: Path, tmp_path: Path
) -> None:
    reader = PageReader(tmp_path, weights, server=server, fake_ms=1)
    with pytest.raises((AssertionError, ServiceStartError), match=error):
        reader.run_command(command)
    reader.close()


def test_every_dependency_has_a_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    wanted = [line for line in lines if re.match(r'\s+"[a-z\-]+(\[\w+\])?[>=]', line)]
    assert len(wanted) > 15
    assert all("#" in line for line in wanted)


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
