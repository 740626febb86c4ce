"""The walls of the house: who may import whom, how large a file may get, no cycles, no lazy imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from longest import LONGEST

ROOT = Path(__file__).parent.parent
FILES = sorted(p for folder in ("app", "model", "benchmarks", "deploy") for p in (ROOT / folder).rglob("*.py"))
CORE = [
    "params",
    "types",
    "errors",
    "admission",
    "blocks",
    "flight",
    "allocator",
    "queue",
    "limits",
    "dummy",
    "result",
    "scheduler",
    "isolation",
    "device_errors",
    "memory_plan",
    "start_clock",
    "audit",
    "philox",
    "pace",
    "waiting_line",
    "router",
]
SAMPLING = ["sampler", "sampling_row", "masks", "penalties", "candidates", "filters", "inverse", "logprobs"]
DEVICE = ["compute", "kv_cache", "source_cache", "guides", "grammar_state", *SAMPLING]
BUILDER = {f"{name}.py" for name in ("build", "compile", "compiler", "errors", "leash", "level", "recipe", "shelf")}
EVENT_LOOP = ["app.server", "app.main", "app.service", "app.completion", "app.engine.client", "app.api.complete"]
EVENT_LOOP += [
    "app.relay.front",
    "app.relay.replica",
    "app.engine.loop",
    "app.kernels",
    "app.guide",
    "app.guide_checker",
    "app.guide_process",
]


def _name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path) -> set[str]:
    """Modules that a file names in its imports, as written."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{path}: relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def _tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in _imports(path)} - {"__future__"}


GRAPH = {_name(path): _imports(path) for path in FILES}
MODULES = set(GRAPH)


def test_the_model_knows_nothing_of_serving() -> None:
    for path in (ROOT / "model").rglob("*.py"):
        assert not _tops(path) & {"app", "fastapi", "starlette", "pydantic", "asyncio", "uvicorn"}, path


def test_only_the_command_line_knows_how_models_are_trained() -> None:
    outside = [p for p in FILES if "train" not in p.relative_to(ROOT).parts and p != ROOT / "app/__main__.py"]
    assert not [path for path in outside if any(name.startswith("model.train") for name in _imports(path))]


def test_the_pure_core_imports_only_the_standard_library_and_msgspec() -> None:
    for name in CORE:
        path = ROOT / "app/engine" / f"{name}.py"
        assert _tops(path) <= sys.stdlib_module_names | {"msgspec", "app"}, path
        assert "asyncio" not in _tops(path), path
        ours = {m for m in _imports(path) if m.startswith("app.")}
        assert all(m.split(".")[2] in CORE for m in ours if m.startswith("app.engine.")), path


def test_the_builder_of_kernels_needs_nothing_but_python() -> None:
    """A stage of a container compiles them before anything is installed."""
    paths = [*(ROOT / "app/engine/native").glob("*.py"), ROOT / "app/cli/compile.py"]
    for path in (path for path in paths if path.name in BUILDER):
        assert _tops(path) <= sys.stdlib_module_names | {"app"}, path
        ours = {m.split(".")[-1] for m in _imports(path) & MODULES if m.startswith("app.")}
        assert {f"{name}.py" for name in ours} <= BUILDER, path


@pytest.mark.parametrize("name", [*DEVICE, "runner"])
def test_device_code_knows_tensors_the_model_and_the_nouns_only(name: str) -> None:
    path = ROOT / "app/engine" / f"{name}.py"
    assert _tops(path) <= sys.stdlib_module_names | {"torch", "app", "model"}, path
    ours = {m.split(".")[2] for m in _imports(path) if m.startswith("app.engine.")}
    assert ours <= {"params", "types", "result", "philox", "matcher", "dummy", "grammar_workers", *DEVICE}, path


def test_only_the_engine_process_has_both_torch_and_the_pipe() -> None:
    both = [p for p in FILES if "torch" in _tops(p) and "app.engine.frames" in _imports(p)]
    assert both == [ROOT / "app/engine/assembly.py"]
    holding = [p for p in FILES if "app.engine.assembly" in _imports(p) and p.relative_to(ROOT).parts[0] == "app"]
    assert holding == [ROOT / "app/cli/check.py", ROOT / "app/engine/worker.py"]


def test_routes_know_no_torch_and_of_the_model_only_the_tokenizer() -> None:
    allowed = {"model.tokenizer", "model.tokenizer.Tokenizer"}
    for path in (ROOT / "app/api").glob("*.py"):
        names = _imports(path)
        assert "torch" not in _tops(path), path
        assert {n for n in names if n.startswith("model")} <= allowed, path
        internals = {"scheduler", "blocks", "runner", "engine", "worker", "process", "frames", *DEVICE}
        assert not {n.split(".")[2] for n in names if n.startswith("app.engine.")} & internals, path


@pytest.mark.parametrize("module", EVENT_LOOP)
def test_the_api_process_never_imports_torch(module: str) -> None:
    heavy = ["torch", "numpy"] if module == "app.guide_process" else ["torch", "numpy", "llguidance"]
    program = f"import sys, {module}; sys.exit(any(name in sys.modules for name in {heavy}))"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_llguidance_has_one_door() -> None:
    """It may be missing, so only the file that asks first may name it as a module."""
    assert not [path for path in FILES if "llguidance" in _tops(path)]
    named = [path for path in FILES if 'import_module("llguidance")' in path.read_text()]
    assert named == [ROOT / "app/engine/matcher.py"]


def test_triton_is_needed_by_its_kernels_only() -> None:
    """It may be missing: nobody else imports it, nor one of them."""
    kernels = {name for name in MODULES if name.startswith("app.engine.kernels.triton_")}
    assert {name for name, known in GRAPH.items() if any(n.split(".")[0] == "triton" for n in known)} <= kernels
    assert not [name for name, known in GRAPH.items() if known & kernels and name not in kernels]


def test_what_a_step_does_on_a_device_knows_tensors_only() -> None:
    """The network is put together elsewhere, and who is served by whom is nothing to a kernel."""
    for path in (ROOT / "app/engine/kernels").glob("*.py"):
        assert _tops(path) <= sys.stdlib_module_names | {"torch", "triton", "app", "model"}, path
        assert not _imports(path) & {"app.engine.scheduler", "app.engine.engine", "app.engine.kv_cache"}, path


def test_ray_has_one_door() -> None:
    """What a front does with lost replicas knows nothing of it, nor of engines; and no service knows its front."""
    assert [name for name, known in GRAPH.items() if any(n.split(".")[0] == "ray" for n in known)] == [
        "deploy.ray_serve"
    ]
    relay = {name for name in GRAPH if name.startswith("app.relay")}
    for name in relay:
        assert not [n for n in GRAPH[name] if n.startswith(("app.engine", "app.service", "app.main"))], name
    assert {name for name, known in GRAPH.items() if known & relay} - relay == {"deploy.ray_serve"}


def test_imports_have_no_cycle() -> None:
    edges = {name: sorted((names & MODULES) - {name}) for name, names in GRAPH.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"cycle: {' -> '.join((*path, name))}"
        if name not in done:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())


def test_imports_stand_at_the_top() -> None:
    """Except behind what a process begins with: verbs, Ctrl+C while torch is read, and what imports do not need."""
    for path in FILES:
        if path not in (ROOT / "app/__main__.py", ROOT / "app/engine/worker.py", ROOT / "model/train/__main__.py"):
            top = ast.parse(path.read_text()).body
            inner = [n for statement in top for n in ast.walk(statement) if n is not statement]
            assert not [n for n in inner if isinstance(n, ast.Import | ast.ImportFrom)], path


def test_files_and_functions_stay_readable() -> None:
    for path in FILES:
        source = path.read_text()
        assert source.isascii(), path
        assert source.count("\n") <= 600, f"{path} has {source.count(chr(10))} lines"
        tree = ast.parse(source)
        assert not source or ast.get_docstring(tree), f"{path} does not say what it is"
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                assert length <= 60, f"{path}:{node.lineno} {node.name} has {length} lines"


def test_every_public_thing_says_what_it_does() -> None:
    """Methods that only fill in somebody else's protocol are its to explain."""
    kinds = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    for path in (p for p in FILES if p.relative_to(ROOT).parts[0] != "benchmarks"):
        tree = ast.parse(path.read_text())
        owners = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))]
        for node in (node for owner in owners for node in owner.body):
            if isinstance(node, kinds) and not node.name.startswith("_") and node.name not in ("forward", "collect"):
                assert ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


def test_the_files_that_are_begun_first_are_there_once() -> None:
    names = [path.stem for path in (ROOT / "tests").rglob("test_*.py")]
    assert [names.count(name) for name in LONGEST] == [1] * len(set(LONGEST))
