"""docs/architecture.md matches the code: names, hand-overs, frames, layers, packages. docs/index.md is complete."""

from __future__ import annotations

import ast
import re
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple, get_args

import pytest

from app.common.ipc import Down, Up
from tests.repository.test_import_rules import _layers
from tests.support import ROOT
from tests.tools.repository_metrics import imported_modules, module_of, package_edges, product_files

DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text()
INDEX = (DOCS / "index.md").read_text()

_LINK = r"\[`([\w.]+)`\]\(([\w./-]+)\)"
_NAME = re.compile(_LINK)
_CALLS = re.compile(rf"{_LINK} calls {_LINK}(?:, as {_LINK} wires them)?\.")
_CALLED = re.compile(rf"{_LINK} is called by {_LINK}\.")
_PIPE = re.compile(rf"{_LINK} sends {_LINK} over the pipe to {_LINK}\.")
_ASGI = re.compile(rf"{_LINK} forwards over ASGI to {_LINK}, as {_LINK} wires them\.")


class Link(NamedTuple):
    """A name of the code and the file that a link says it is in."""

    name: str
    path: Path

    @classmethod
    def of(cls, name: str, target: str) -> Link:
        """Targets are relative to docs/."""
        return cls(name, (DOCS / target).resolve())


class Step(NamedTuple):
    """One of the ten."""

    title: str
    links: frozenset[Link]
    handoffs: tuple[str, ...]


def _section(title: str) -> str:
    """From a heading of the second level to the next."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _links(text: str) -> list[Link]:
    return [Link.of(*found) for found in _NAME.findall(text)]


def parse_steps(text: str) -> list[Step]:
    """The numbered sections of a page."""
    steps = []
    for title, body in re.findall(r"^### (\d+\. .+)\n((?:(?!##).*\n)*)", text, re.MULTILINE):
        paragraphs = [" ".join(paragraph.split()) for paragraph in body.split("\n\n")]
        handoffs = [text.removeprefix("Hand-over: ") for text in paragraphs if text.startswith("Hand-over: ")]
        prose = " ".join(text for text in paragraphs if not text.startswith("Hand-over: "))
        steps.append(Step(title, frozenset(_links(prose)), tuple(handoffs)))
    return steps


STEPS = parse_steps(PAGE)


@cache
def _definitions(path: Path) -> dict[str, ast.AST]:
    """Dotted name -> node, of the classes, functions, methods and variables of a Python file."""
    found: dict[str, ast.AST] = {}

    def add(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                found[prefix + node.name] = node
            if isinstance(node, ast.ClassDef):
                add(node.body, f"{prefix}{node.name}.")
            for target in node.targets if isinstance(node, ast.Assign) else ():
                if isinstance(target, ast.Name):
                    found[prefix + target.id] = node

    add(ast.parse(path.read_text()).body, "")
    return found


def is_defined(link: Link) -> bool:
    """Whether the file exists and defines the name; C++ is only searched for a function of this name."""
    if not link.path.is_file():
        return False
    if link.path.suffix == ".py":
        return link.name in _definitions(link.path)
    return bool(re.search(rf"\w[\w *]* \*?{re.escape(link.name)}\(", link.path.read_text()))


def _calls(caller: Link, callee: Link) -> bool:
    """Whether the body of the caller calls something with the callee's name."""
    wanted = callee.name.rpartition(".")[2]
    functions = [node.func for node in ast.walk(_definitions(caller.path)[caller.name]) if isinstance(node, ast.Call)]
    return wanted in {getattr(function, "attr", getattr(function, "id", "")) for function in functions}


def _mentions(link: Link, name: str) -> bool:
    node = _definitions(link.path)[link.name]
    return any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node))


@cache
def _modules() -> dict[Path, str]:
    return {path: module_of(ROOT, path) for path in product_files(ROOT)}


def _knows(source: Path, target: Path) -> bool:
    """Whether a file is the other or imports it."""
    return source == target or _modules()[target] in imported_modules(source, set(_modules().values()))


def _connected(first: Link, second: Link, wiring: list[Link]) -> bool:
    """Whether the first file imports the second, or the wiring imports both."""
    if wiring:
        return all(_knows(wiring[0].path, link.path) for link in (first, second))
    return _knows(first.path, second.path)


def walk(handoff: str) -> tuple[Link, Link] | None:
    """Where a hand-over begins and ends; None if the code has no such connection."""
    links = _links(handoff)
    if not links or not all(is_defined(link) for link in links):
        return None
    first, second, *others = links
    if _PIPE.fullmatch(handoff):
        frame, second = second, others[0]
        is_frame = frame.name in {kind.__name__ for kind in (*get_args(Down), *get_args(Up))}
        good = is_frame and _mentions(first, frame.name) and _mentions(second, frame.name)
    elif _ASGI.fullmatch(handoff):
        good = _connected(first, second, others)
    elif _CALLED.fullmatch(handoff):
        good = _calls(second, first) and _connected(second, first, others)
    else:
        good = bool(_CALLS.fullmatch(handoff)) and _calls(first, second) and _connected(first, second, others)
    return (first, second) if good else None


def test_there_are_ten_steps_with_names_and_a_hand_over() -> None:
    assert [step.title.partition(".")[0] for step in STEPS] == [str(n) for n in range(1, 11)]
    for step in STEPS:
        assert len(step.links) >= 3 and step.handoffs, step.title


def test_every_name_is_defined_in_the_file_that_its_link_leads_to() -> None:
    assert len(_links(PAGE)) > 60
    assert [f"{link.name} in {link.path}" for link in _links(PAGE) if not is_defined(link)] == []


def test_every_link_leads_to_a_file_or_a_heading() -> None:
    headings = {re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in re.findall(r"^#+ (.+)$", PAGE, re.M)}
    for target in re.findall(r"\]\(([^)]+)\)", PAGE):
        assert target[1:] in headings if target.startswith("#") else (DOCS / target).is_file(), target


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.title)
def test_each_hand_over_is_in_the_code(step: Step) -> None:
    for handoff in step.handoffs:
        ends = walk(handoff)
        assert ends, handoff
        assert ends[0].path in {link.path for link in step.links}, f"{step.title} does not tell of {ends[0].name}"


def test_each_step_hands_over_to_the_next() -> None:
    for step, following in pairwise(STEPS):
        ends = walk(step.handoffs[-1])
        assert ends and any(end in following.links for end in ends), f"{step.title} does not lead to {following.title}"


SERVICE, POOL = "[`Service._begin`](../app/serving/service.py)", "../app/engine_client/engine_pool.py"
STEP, CLIENT = "[`Engine.step`](../app/engine/execution/engine.py)", "../app/engine_client/client.py"
SEND, TAKE = f"[`EngineClient._submit`]({CLIENT})", "[`_WorkerLoop._receive`](../app/engine/worker_loop.py)"
GATE, WIRING = "[`AuthMiddleware`](../app/http/auth.py)", "[`create_app`](../app/main.py)"


def test_a_hand_over_that_is_in_the_code_is_walked() -> None:
    assert walk(f"{SERVICE} calls [`EnginePool.submit`]({POOL}).")
    assert walk(f"{SEND} sends [`Submit`](../app/common/ipc.py) over the pipe to {TAKE}.")


@pytest.mark.parametrize(
    "handoff",
    [
        f"{SERVICE} calls [`EnginePool.fail_all`]({POOL}).",  # it does not
        f"{SERVICE} calls [`EnginePool.submits`]({POOL}).",  # no such name
        f"{SERVICE} calls [`EngineClient.submit`]({CLIENT}).",  # a file that the service does not import
        f"{SERVICE} knows [`EnginePool.submit`]({POOL}).",  # no kind of hand-over
        f"{SEND} sends [`Cancel`](../app/common/ipc.py) over the pipe to {TAKE}.",  # it sends another frame
        f"{SEND} sends [`FrameDecoder`](../app/common/ipc.py) over the pipe to {TAKE}.",  # no frame
        f"{GATE} forwards over ASGI to {STEP}, as {WIRING} wires them.",  # the wiring does not import the engine
    ],
)
def test_a_hand_over_that_is_not_in_the_code_is_found(handoff: str) -> None:
    assert walk(handoff) is None


def test_a_name_that_is_not_there_is_found() -> None:
    (step,) = parse_steps("### 1. Plan\n\n[`Scheduler.plans`](../app/engine/scheduling/scheduler.py)\n")
    assert not any(is_defined(link) for link in step.links)
    assert not is_defined(Link.of("ink_drew", "../app/engine/cpu/source/draw.h"))
    assert not is_defined(Link.of("Scheduler", "../app/engine/scheduling/schedule.py"))


def test_the_frames_are_those_of_the_pipe() -> None:
    section = _section("Two processes")
    down, up = re.findall(r"^\| to the .*? \| (.+) \|$", section, re.MULTILINE)
    assert set(re.findall(r"`(\w+)`", down)) == {kind.__name__ for kind in get_args(Down)}
    assert set(re.findall(r"`(\w+)`", up)) == {kind.__name__ for kind in get_args(Up)}
    drawing = section.partition("```text")[2].partition("```")[0]
    for kind in (*get_args(Down), *get_args(Up)):
        assert re.search(rf"\b{kind.__name__}\b", drawing), kind.__name__


def _layer_of(package: str, layers: dict[str, int]) -> str:
    """The package of the drawing that a package belongs to."""
    while package not in layers:
        package = package.rpartition(".")[0]
        assert package, "the drawing of the layers has no place for a package"
    return package


def test_the_layers_are_drawn_above_what_they_import() -> None:
    drawing = _section("Layers").partition("```text")[2].partition("```")[0]
    lines = [re.findall(r"\b(?:app|model)\b[\w.]*", line) for line in drawing.splitlines()]
    layers = {package: row for row, packages in enumerate(lines) for package in packages}
    assert len(layers) == sum(map(len, lines)) > 20
    for (source, target), imports in package_edges(ROOT).items():
        above, below = _layer_of(source, layers), _layer_of(target, layers)
        assert above == below or layers[above] < layers[below], imports


def _packages() -> set[str]:
    """app, model, and two levels of packages below them."""
    names = {".".join(path.relative_to(ROOT).parent.parts) for path in product_files(ROOT)}
    return {name for name in names if name.count(".") <= 2}


def _rows() -> list[list[str]]:
    lines = re.findall(r"^\| (`(?:app|model)[\w.]*` \| .+) \|$", _section("Packages"), re.MULTILINE)
    return [line.split(" | ") for line in lines]


def test_the_table_lists_exactly_the_packages_in_order() -> None:
    listed = [row[0].strip("`") for row in _rows()]
    assert listed == sorted(_packages())


def test_the_names_of_a_package_are_defined_in_it() -> None:
    for package, _, names, _ in _rows():
        folder = ROOT / package.strip("`").replace(".", "/")
        defined = {name for path in folder.glob("*.py") for name in _definitions(path)}
        listed = set(re.findall(r"`(\w+)`", names))
        assert listed and listed <= defined, (package, listed - defined)


def test_every_package_says_its_purpose_its_names_and_its_invariants() -> None:
    for path in (path for path in product_files(ROOT) if path.name == "__init__.py"):
        text = ast.get_docstring(ast.parse(path.read_text())) or ""
        purpose, names, invariants = re.split(r"\nMain names: |\nInvariants: ", text)
        assert len(purpose) > 20 and len(invariants) > 20, path
        defined = {name for file in path.parent.glob("*.py") for name in _definitions(file)}
        mentioned = set(re.findall(r"\b[A-Z]\w*[a-z][A-Z]\w*|\b\w+(?=\(\))", names))
        assert mentioned <= defined, (path, mentioned - defined)


def test_a_package_may_import_what_the_layers_allow() -> None:
    layers = _layers()
    for package, _, _, allowed in _rows():
        names = re.findall(r"`([\w.]+)`", allowed)
        listed = {name if name.split(".")[0] in ("app", "model") else f"app.{name}" for name in names}
        assert listed.union(*(layers[name] for name in listed)) == layers[package.strip("`")], package


def test_the_index_lists_every_page_once_and_no_other() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S.+\.$", INDEX, re.MULTILINE)
    pages = [name for name in listed if "/" not in name]
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "index.md")
    assert [name for name in listed if not (DOCS / name).is_file()] == []
    assert len(listed) == len(re.findall(r"\]\(", INDEX)), "a link of the index is not in a line of its own"


def test_the_index_has_the_four_kinds_of_pages() -> None:
    assert re.findall(r"^## (.+)$", INDEX, re.MULTILINE) == ["Tutorials", "How-to guides", "Reference", "Explanation"]
