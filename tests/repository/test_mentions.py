"""Every path, module, flag, variable and make target that docs, comments, strings and configuration mention exists."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Callable, Iterator
from dataclasses import fields
from fnmatch import fnmatch
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest

from app.access.rate_limiter import RateLimits
from app.api.native.routes import CompleteRequest
from app.common.settings import Settings
from tests.support import ROOT

pytestmark = pytest.mark.slow

HERE = "tests/repository/test_mentions.py"
FOLDERS = ("app", "model", "benchmarks", "tests", "docs", "deploy", "examples")
SUFFIXES = "py|md|h|cpp|js|mjs|css|html|toml|yml|yaml|conf|sh|lock|txt|json"
READ = {"", ".py", ".md", ".h", ".cpp", ".js", ".mjs", ".html", ".toml", ".yml", ".yaml", ".conf", ".sh"}
HISTORY = {"CHANGELOG.md", "docs/train-log.md"}
"""Tell what was. What they name as a path has to exist all the same, so that a reader can follow it."""

# Mentioned but not in the repository: created by a run, an example name, or from another project.
MADE = ("app/engine/cpu/built", "benchmarks/results", "keys/keys.json")
EXAMPLES = ("export.py", "about.md", "chars.py", "compare.py", "gpt.py", "notes.md", "transformer.h")
FOREIGN = ("c10/cuda/CUDAException.cpp", "vendor/llama.cpp", "llama.cpp", "malloc.h", "sitecustomize.py")
FOREIGN += ("version.py",)  # torch's
KNOWN = {*MADE, *EXAMPLES, *FOREIGN}
# Names of tensors and files of Hugging Face; labels of Kubernetes; our examples' local variables.
DOTTED = ("model.safetensors", "model.embed_tokens", "model.layers", "model.norm", "model.__", "app.kubernetes.io")
DOTTED += ("model.name", "model.eval")
# Names in backticks: of libc, OpenMP, PyTorch, FastAPI, Triton, systemd and wheels, a prefix, and phases with spaces.
FOREIGN_NAMES = ("GOMP_SPINCOUNT", "M_ARENA_MAX", "exp_", "solve_dependencies", "disable_licm", "MemoryHigh", "has_")
FOREIGN_NAMES += (
    "StateDirectory",
    "WatchdogSec",
    "manylinux_2_31_aarch64",
    "parentbased_always_on",
    "planning_memory",
    "warming_up",
)
OTHER_CHECKS = ("inkstream_", "INKSTREAM_", "process_", "OTEL_")
"""Names of metrics, which tests/repository/test_monitoring.py checks, and variables."""
# Flags of programs in commands of the docs: docker, kubectl, pip, systemctl, torchrun, ...
# fmt: off
FLAGS = {
    "--install", "--query-gpu", "--tag",
    "--no-deps", "--now", "--strip-unneeded", "--system", "--wheel-dir",
    "--address", "--bind", "--build", "--build-arg", "--cap-drop", "--close", "--constraint", "--detach", "--durations",
    "--directory", "--enable-feature", "--env", "--extra-index-url", "--file", "--find-links", "--from-file", "--head",
    "--help", "--http2", "--include", "--index-url", "--isolation", "--limit", "--local-dir", "--logdir", "--mount",
    "--name", "--no-index", "--push",
    "--nproc-per-node", "--num-gpus", "--only-binary", "--parallel", "--platform", "--profile",
    "--publish", "--python-version", "--read-only", "--require-hashes", "--requirement", "--rm",
    "--security-opt",
    "--shell", "--signal", "--tasks", "--test", "--time", "--tmpfs", "--upgrade", "--version", "--volume", "--wait",
    "--wheels",
}
# fmt: on


@cache
def _files() -> tuple[str, ...]:
    """Files that git tracks, and new ones that are not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    return tuple(name for name in listed if name and (ROOT / name).is_file() and not (ROOT / name).is_symlink())


def _texts(name: str) -> Iterator[tuple[int, str, bool]]:
    """Comments and strings of Python, all of any other file: line, text, and whether it is prose.

    Of the strings in tests the docstrings alone are prose: what else a test names, it makes itself or fails without.
    """
    text = (ROOT / name).read_text()
    if not name.endswith(".py"):
        yield from ((line, text, True) for line, text in enumerate(text.splitlines(), start=1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        is_prose = token.string.startswith('"""') or not name.startswith("tests/")
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            is_prose |= token.type == tokenize.COMMENT
            lines = enumerate(token.string.splitlines(), start=token.start[0])
            yield from ((line, text, is_prose) for line, text in lines)


@cache
def _all_texts() -> tuple[tuple[str, int, str, bool], ...]:
    """File, line, text and whether it is prose, of all files that people read; addresses of the web are left out."""
    files = [name for name in _files() if Path(name).suffix in READ and name != HERE]
    return tuple(
        (name, line, re.sub(r"\w+://\S+", " ", text), is_prose)
        for name in files
        for line, text, is_prose in _texts(name)
    )


@cache
def _exists(path: str, folder: Path) -> bool:
    """Whether it exists relative to the repository, `folder` or a parent of it, or as the end of a file's path."""
    folders = [parent for parent in (folder, *folder.parents) if parent.is_relative_to(ROOT)]
    inner = path.rstrip("/")
    return any(any(parent.glob(path)) for parent in folders) or any(fnmatch(name, f"*/{inner}") for name in _files())


def missing_paths(text: str, folder: Path) -> list[str]:
    """Missing files among the paths in `text` that start with a folder of this repository or have a suffix it uses."""
    found = re.findall(r"(?<![\w.$@/{}<>~*-])((?:\.\./)?(?:[\w*-][\w.*-]*/)+[\w.*-]*)(?![{<])", text)
    found += re.findall(r"(?<![\w./*{}<>$%+-])([\w-]+\.(?:py|md|cpp|h))\b(?![/(\w-])", text)
    paths = [path.rstrip(".") for path in found]
    ours = [p for p in paths if p.split("/")[0] in FOLDERS or re.search(rf"\.({SUFFIXES})$", p)]
    return [p for p in ours if p.rstrip("/") not in KNOWN and not _exists(p, folder)]


@cache
def _defined(module: str) -> frozenset[str] | None:
    """Names at the top level of a module; None if there is no such module."""
    path = ROOT / module.replace(".", "/")
    if path.is_dir():
        path = path / "__init__.py"
        names = {entry.stem for entry in path.parent.iterdir()}
    else:
        path, names = path.with_suffix(".py"), set[str]()
    if not path.is_file():
        return frozenset(names) or None
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                names.add(node.name)
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.alias():
                names.add((node.asname or node.name).partition(".")[0])
    return frozenset(names)


def missing_modules(text: str) -> list[str]:
    """Dotted names below app, model, benchmarks and tests, and imports from these in programs inside strings."""
    wrong = []
    names = re.findall(r"(?<![\w./-])((?:app|model|benchmarks|tests)(?:\.[A-Za-z_]\w*)+)", text)
    for module, imported in re.findall(r"\bfrom ((?:app|model|benchmarks|tests)(?:\.\w+)*) import \(?([\w, ]+)", text):
        names += [f"{module}.{one.split(' as ')[0].strip()}" for one in imported.split(",") if one.strip()]
    for name in names:
        parts = name.split(".")
        n = next((n for n in range(len(parts), 1, -1) if _defined(".".join(parts[:n])) is not None), 1)
        if n < len(parts) and not name.startswith(DOTTED) and parts[n] not in (_defined(".".join(parts[:n])) or ()):
            wrong.append(name)
    return wrong


@cache
def _flags() -> frozenset[str]:
    """Flags of our parsers, and flags that our own code passes to other programs."""
    names = [*Settings.model_fields, *CompleteRequest.model_fields, *(field.name for field in fields(RateLimits))]
    known = {f"--{name.replace('_', '-')}" for name in names}
    for name in (name for name in _files() if name.endswith(".py") and "/test_" not in name):
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                flag = re.match(r"(--[a-z][a-z0-9-]*)(?: [A-Z][\w.]*)?$", node.value)
                known |= {flag[1], flag[1].replace("--", "--no-", 1)} if flag else set()
    return frozenset(known | FLAGS)


def missing_flags(text: str) -> list[str]:
    """Flags, except arrows in drawings (a --event--> b) and CSS variables."""
    text = re.sub(r"--[^`]*-->|var\(--[\w-]+\)", " ", text)
    return [
        flag
        for flag in re.findall(r"(?<![\w-])--[a-z][a-z0-9]*(?:-[a-z0-9]+)*\b(?![-:])", text)
        if flag not in _flags()
    ]


def missing_variables(text: str) -> list[str]:
    """Variables of settings, or other names that our code or a configuration reads."""
    return [name for name in re.findall(r"\bINKSTREAM_[A-Z_]*[A-Z]\b", text) if name not in _variables()]


@cache
def _variables() -> frozenset[str]:
    """Names of settings, and names used as a whole string in Python or expanded by a shell, compose or a snippet."""
    # A variable of Kubernetes; a macro of tests/support/engine/native_sampler.py.
    found = {"INKSTREAM_SERVICE", "INKSTREAM_PORT", "INKSTREAM_TEST_FLAGS"}
    for name in _files():
        if Path(name).suffix in {".py", ".yml", ".yaml", ".js"} and name != HERE:
            found |= set(re.findall(r"[\"'{$](INKSTREAM_[A-Z_]+)(?=[\"'}:?])", (ROOT / name).read_text()))
    return frozenset(found | {f"INKSTREAM_{name.upper()}" for name in Settings.model_fields})


def missing_targets(text: str) -> list[str]:
    """Targets of make that prose or a command mentions."""
    return [name for name in re.findall(r"(?:`|^\s*)make ([a-z][a-z-]*)(?=[` ]|$)", text) if name not in _targets()]


@cache
def _targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@cache
def _code_words() -> tuple[frozenset[str], frozenset[str]]:
    """Words of the code, and pairs of words with a dot between them; a class and a name in it are a pair, too."""
    words, pairs = set[str](), set[str]()
    for name in _files():
        suffix = Path(name).suffix
        if suffix in (READ | {".service"}) - {".md"} and name != HERE:
            text = (ROOT / name).read_text()
            words.update(re.findall(r"[A-Za-z_]\w*", text))
            pairs.update(re.findall(r"(?=\b([A-Za-z_]\w*\.[A-Za-z_]\w*))", text))
            if suffix == ".py":
                classes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef))
                pairs.update(f"{each.name}.{member}" for each in classes for member in _members(each))
    return frozenset(words), frozenset(pairs)


def _members(each: ast.ClassDef) -> Iterator[str]:
    for node in each.body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name), *_]):
                yield name


def missing_identifiers(text: str) -> list[str]:
    """Names in the code that prose quotes: `with_underscores`, `CamelCase`, `called()`, and each pair in `a.b.c`."""
    words, pairs = _code_words()
    wrong = []
    for name, call in re.findall(r"`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)(\([^`]*\))?`", text):
        parts = name.split(".")
        is_code = call or "_" in name or re.search("[a-z][A-Z]", name)
        if (
            len(parts) == 1
            and is_code
            and name not in words
            and not name.startswith(OTHER_CHECKS)
            and name not in FOREIGN_NAMES
        ):
            wrong.append(name)
        if len(parts) > 1 and call:
            wrong += [pair for pair in map(".".join, pairwise(parts)) if pair not in pairs]
    return wrong


CHECKS: dict[str, Callable[[str, Path], list[str]]] = {
    "paths": missing_paths,
    "modules": lambda text, _: missing_modules(text),
    "flags": lambda text, _: missing_flags(text),
    "variables": lambda text, _: missing_variables(text),
    "targets": lambda text, _: missing_targets(text),
    "identifiers": lambda text, _: missing_identifiers(text),
}


def _is_checked(kind: str, name: str) -> bool:
    """History may keep old names. Flags are checked only where they are ours: not in tests and container recipes."""
    if name in HISTORY:
        return kind == "paths"
    if kind == "identifiers":
        return name.endswith(".md")
    if kind == "flags":
        ours = ("app/", "model/", "benchmarks/", "docs/", "weights/", "README.md", "PERFORMANCE.md", "SECURITY.md")
        return name.startswith((*ours, "RELIABILITY.md", "deploy/")) and not name.endswith((".css", ".html", ".js"))
    return True


@pytest.mark.parametrize("kind", CHECKS)
def test_everything_mentioned_exists(kind: str) -> None:
    wrong = [
        f"{name}:{line}: {found}"
        for name, line, text, is_prose in _all_texts()
        if (is_prose or kind == "modules") and _is_checked(kind, name)  # tests patch modules by name
        for found in CHECKS[kind](text, (ROOT / name).parent)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("kind", "text", "found"),
    [
        ("paths", "see app/nowhere.py, docs/ and app/engine/gone/", ["app/nowhere.py", "app/engine/gone/"]),
        ("paths", "engine/startup.py, source/draw.h, app/*.py and engine/absent.py", ["engine/absent.py"]),
        ("paths", "startup.py, but not startap.py", ["startap.py"]),
        ("modules", "python -m app.engine.wurker, app.engine.startup", ["app.engine.wurker"]),
        ("modules", "app.common.types.Request, app.common.types.Nothing", ["app.common.types.Nothing"]),
        ("modules", "'from app.common import logs, lugs'", ["app.common.lugs"]),
        ("flags", "`--weights` and --wights", ["--wights"]),
        ("flags", "a --gone--> b", []),
        ("variables", "INKSTREAM_WEIGHTS, INKSTREAM_WIGHTS", ["INKSTREAM_WIGHTS"]),
        ("identifiers", "`service.gate.visit(caller)`, `RequestHandle.begin()`", ["service.gate", "gate.visit"]),
        (
            "identifiers",
            "`read_body`, `read_boddy`, `RequestHandel`, `is_goone()`",
            ["read_boddy", "RequestHandel", "is_goone"],
        ),
        ("targets", "`make serve` and `make surf`", ["surf"]),
    ],
)
def test_missing_names_are_detected(kind: str, text: str, found: list[str]) -> None:
    assert CHECKS[kind](text, ROOT / "app") == found


def test_every_exception_is_needed() -> None:
    """Outdated exceptions must be removed; a few flags of other programs come and go with examples."""
    everything = "\n".join(text for _, _, text, is_prose in _all_texts() if is_prose)
    assert [name for name in (*KNOWN, *DOTTED, *FLAGS, *FOREIGN_NAMES) if name not in everything] == []


def test_no_advice_installs_our_name_from_an_index() -> None:
    """No index has our package, and a stranger could register its name there. A path or a wheel is fine."""
    names = ("app", "model", "benchmarks", "deploy", "docs", "examples", "README.md", "CONTRIBUTING.md", "Dockerfile")
    name = r"""[^\n`]*?(?<![\w./*-])["']?inkstream(?=[\["'=<>\s`]|$)"""
    advice = re.compile(rf"\b(?:pip|pipx|uv|uvx)\b[^\n`#]*\binstall[ \t]+{name}", re.M)
    assert advice.search("pip install 'inkstream[torch]'") and advice.search("pipx install inkstream")
    assert not advice.search("pipx install dist/inkstream-*.whl") and not advice.search("pip install -e '.[traces]'")
    tracked = subprocess.run(["git", "ls-files", *names], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in tracked.splitlines():
        if Path(path).suffix in READ:
            assert not advice.search((ROOT / path).read_text()), path
