"""Import rules: which folder may import which, what each may use from outside, no cycles, docstrings."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import cache
from graphlib import TopologicalSorter

from tests.support import ROOT
from tests.support.longest_files import LONGEST
from tests.tools.repository_metrics import (
    colliding_classes,
    module_of,
    package_edges,
    package_of,
    tree_of,
)

FILES = sorted(p for folder in ("app", "model", "benchmarks", "deploy") for p in (ROOT / folder).rglob("*.py"))

# Third-party packages that each folder imports. torch is for the engine and the network.
OUTSIDE = {
    "app": {"fastapi", "msgspec", "pydantic", "uvicorn"},
    "app.access": {"msgspec"},
    "app.api": {"fastapi", "prometheus_client", "pydantic", "pydantic_core", "starlette"},
    "app.chat": {"jinja2", "msgspec"},
    "app.cli": {"pydantic", "shtab", "torch"},
    "app.common": {"msgspec", "pydantic", "pydantic_settings", "uvloop"},
    "app.engine": {"msgspec", "numpy", "torch"},
    "app.engine.cpu.toolchain": set[str](),
    "app.engine.gpu.kernels.triton": {"torch", "triton"},
    "app.engine.scheduling": {"msgspec"},
    "app.engine_client": {"msgspec"},
    "app.generation": {"msgspec"},
    "app.guided": set[str](),
    "app.http": {"fastapi", "httptools", "msgspec", "opentelemetry", "pydantic", "starlette", "uvicorn"},
    "app.sandbox": set[str](),
    "app.serving": set[str](),
    "app.tokenization": {"msgspec", "tokenizers"},
    "app.__main__": {"benchmarks"},
    "model": {"msgspec", "numpy", "torch"},
    "model.checkpoint": {"httpx2", "huggingface_hub", "msgspec", "numpy", "safetensors", "torch"},
    "model.tokenizer": {"msgspec", "tokenizers"},
    "model.train": {"numpy", "safetensors", "tokenizers", "torch", "tqdm"},
}


def package_rows() -> list[list[str]]:
    """The table of packages in docs/architecture.md: name, purpose, main names, direct neighbors that it may import."""
    rows = re.findall(r"^\| (`(?:app|model)[\w.]*` \| .+) \|$", (ROOT / "docs/architecture.md").read_text(), re.M)
    return [row.split(" | ") for row in rows]


def _layers() -> dict[str, set[str]]:
    """Folder -> folders that it may import; a folder that is not listed belongs to its parent."""
    allowed = {package.strip("`"): re.findall(r"`([\w.]+)`", names) for package, _, _, names in package_rows()}
    layers = {
        package: {name if re.match(r"(app|model)\b", name) else f"app.{name}" for name in names}
        for package, names in {**allowed, "app.__main__": ["cli", "model.train"]}.items()
    }
    while True:
        wider = {name: below.union(*(layers[other] for other in below)) for name, below in layers.items()}
        if wider == layers:
            return layers
        layers = wider


def _named(package: str, names: set[str]) -> str:
    """The listed package of a name: itself, or the nearest listed parent; app is no parent."""
    found = package
    while found and found not in names:
        found = found.rpartition(".")[0]
    assert found and (found != "app" or package == "app"), f"{package} has no place in the layers of this file"
    return found


def _imports(tree: ast.AST) -> set[str]:
    """Modules that a file imports, as written."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, "relative import"
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


MODULE_FILES = {module_of(ROOT, path): path for path in FILES}
PACKAGES = {name: package_of(name, is_package=path.stem == "__init__") for name, path in MODULE_FILES.items()}
PRODUCT = {name: path for name, path in MODULE_FILES.items() if name.partition(".")[0] in ("app", "model")}


@cache
def _graph() -> dict[str, set[str]]:
    """Module -> its imports. A function, because every test process imports this file."""
    return {name: _imports(tree_of(path)) for name, path in MODULE_FILES.items()}


@cache
def _tops() -> dict[str, set[str]]:
    """Module -> packages that it imports from."""
    return {name: {known.partition(".")[0] for known in graph} - {"__future__"} for name, graph in _graph().items()}


def _closure(module: str) -> set[str]:
    """`module`, every project module that it imports directly or indirectly, and the packages of these modules."""
    found, todo = set[str](), [module]
    while todo:
        name = todo.pop()
        if name in _graph() and name not in found:
            found.add(name)
            todo += [*_graph()[name], name.rpartition(".")[0]]
    return found


def test_folders_import_only_from_layers_below() -> None:
    layers = _layers()
    assert [name for name, below in layers.items() if name in below] == [], "the table has a cycle"
    wrong = []
    for (source, target), lines in package_edges(ROOT).items():
        above, below = _named(source, set(layers)), _named(target, set(layers))
        if above != below and below not in layers[above]:
            wrong += lines
    assert wrong == []


def test_the_service_imports_only_files_of_the_model() -> None:
    """Stricter than the layers, for direct imports of a file."""
    known = {name: {found for found in _graph()[name] if found in PRODUCT} for name in PRODUCT}
    for name in (name for name in known if name.startswith("app.")):
        of_model = {PACKAGES[found] for found in known[name] if found.partition(".")[0] == "model"}
        if not name.startswith(("app.engine.", "app.cli.", "app.__main__")):
            assert of_model <= {"model", "model.checkpoint", "model.tokenizer"}, name
        assert not name.startswith("app.api.") or of_model <= {"model.tokenizer"}, name


def test_package_init_files_import_nothing() -> None:
    """tests/repository/test_architecture.py checks its docstring."""
    for init in {path.with_name("__init__.py") for path in PRODUCT.values()}:
        assert init.is_file() and not _imports(tree_of(init)), init


def test_public_class_names_are_unique() -> None:
    assert colliding_classes(ROOT) == {}


def test_folders_import_only_allowed_third_party_packages() -> None:
    """So the API process has no torch, the scheduler is pure, and Triton, which may be missing, stays in its folder.

    Benchmarks are reached through the verb bench alone.
    """
    for name in PRODUCT:
        outside = _tops()[name] - sys.stdlib_module_names - {"app", "model"}
        assert outside <= OUTSIDE[_named(PACKAGES[name], set(OUTSIDE))], name
        if PACKAGES[name] in ("app.engine.scheduling", "model") or name.startswith("model."):
            assert "asyncio" not in _tops()[name], name


def test_only_two_files_wire_the_engine() -> None:
    users = {name for name, known in _graph().items() if "app.engine.startup" in known and name in PRODUCT}
    assert users == {"app.cli.check", "app.engine.__main__"}


def test_kernel_builder_needs_only_python_and_files_of_its_build_stage() -> None:
    """A build stage of the container compiles them before any package is installed."""
    stage = (ROOT / "Dockerfile").read_text().partition("AS kernels")[2].partition("\nFROM")[0]
    copied = {ROOT / word for line in re.findall("^COPY (.+)", stage, re.MULTILINE) for word in line.split()[:-1]}
    for name in _closure("app.cli.compile"):
        path = MODULE_FILES[name]
        assert _tops()[name] <= sys.stdlib_module_names | {"app"}, path
        assert {path, *path.parents} & copied, f"{path} is not copied by the stage that compiles kernels"


def _loads(*modules: str) -> set[str]:
    """The heavy packages that are loaded after importing these modules."""
    program = f"import sys, {', '.join(modules)}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return set(done.stdout.split()) & {"torch", "numpy", "llguidance", "triton"}


def test_the_api_process_never_imports_torch() -> None:
    """Not even through a third-party package. The verb check runs its own engine, and convert reads numbers."""
    others = {"app.cli.check", "app.cli.convert", "app.common.llguidance_adapter", "app.http.tracing"}
    parts = [name for name in PRODUCT if name.startswith("app.") and not name.startswith("app.engine.")]
    parts += [name for name in PRODUCT if PACKAGES[name] == "app.engine.cpu.toolchain"]
    assert _loads(*(n for n in parts if not n.endswith(("_worker", "__main__")) and n not in others)) == set()


def test_engine_loop_and_helper_processes_start_without_torch() -> None:
    assert _loads("app.engine.worker_loop", *(name for name in PRODUCT if name.endswith("_worker"))) <= {"llguidance"}


def test_llguidance_triton_ray_and_opentelemetry_stay_in_their_folders() -> None:
    """The first two may be missing: an adapter and a loader ask for them by name once they are there.

    The program that compiles all kernels is for machines that have Triton.
    """
    kernels = {name for name in _graph() if name.startswith("app.engine.gpu.kernels.triton.")} | {
        "benchmarks.gpu.compilation"
    }
    assert not [name for name, known in _graph().items() if known & kernels and name not in kernels]
    named = [name for name, path in MODULE_FILES.items() if 'import_module("llguidance")' in path.read_text()]
    assert named == ["app.common.llguidance_adapter"]
    users = {outside: {name for name, tops in _tops().items() if outside in tops} for outside in ("triton", "ray")}
    assert users["triton"] and users["triton"] <= kernels
    assert users["ray"] and all(name.startswith("deploy.") for name in users["ray"])
    assert not [name for name, tops in _tops().items() if "llguidance" in tops]
    product = {name for name, tops in _tops().items() if "opentelemetry" in tops and name.startswith("app")}
    assert product == {"app.http.tracing"}


def test_imports_have_no_cycle() -> None:
    TopologicalSorter({name: (names & _graph().keys()) - {name} for name, names in _graph().items()}).prepare()


def test_modules_and_public_names_have_docstrings() -> None:
    """Methods that implement another library's protocol are documented there."""
    for path in FILES:
        tree = tree_of(path)
        assert not tree.body or ast.get_docstring(tree), f"{path} has no docstring"
        owners = [tree, *(n for n in tree.body if isinstance(n, ast.ClassDef) and not n.name.startswith("_"))]
        for node in (node for owner in owners for node in owner.body if "benchmarks" not in path.parts):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                is_public = not node.name.startswith("_") and node.name not in ("forward", "collect")
                assert not is_public or ast.get_docstring(node), f"{path}:{node.lineno} {node.name} has no docstring"


def test_the_adversarial_suite_imports_only_the_standard_library_and_itself() -> None:
    """It is a second opinion: a wrong assumption of the service's code must not be one of the attacks, too."""
    for path in (ROOT / "tests/redteam").glob("*.py"):
        for name in _imports(tree_of(path)):
            assert name.startswith("tests.redteam") or name.partition(".")[0] in sys.stdlib_module_names, (path, name)


def test_longest_test_files_exist_and_are_listed_once() -> None:
    assert [name for name in LONGEST if not (ROOT / "tests" / name).is_file()] == []
    assert len(set(LONGEST)) == len(LONGEST)
