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
from tests.repository.test_import_rules import package_rows
from tests.support import ROOT
from tests.tools.repository_metrics import imported_modules, module_of, package_edges, product_files, tree_of

DOCS = ROOT / "docs"
PAGE = (DOCS / "architecture.md").read_text()
INDEX = (DOCS / "index.md").read_text()
FRAMES = {kind.__name__ for kind in (*get_args(Down), *get_args(Up))}

_LINK = r"\[`([\w.]+)`\]\(([\w./-]+)\)"
_HANDOFFS = {
    rf"{_LINK} calls {_LINK}(?:, as {_LINK} wires them)?\.": [(0, 1)],
    rf"{_LINK} is called by {_LINK}\.": [(1, 0)],
    rf"{_LINK} sends {_LINK} over the pipe to {_LINK}\.": [(0, 1), (2, 1)],
    rf"{_LINK} forwards over ASGI to {_LINK}, as {_LINK} wires them\.": [],
}
"""Sentence -> pairs of its names: the body of the first mentions the second."""


class Link(NamedTuple):
    """A name in the code and the file that a link gives for it."""

    name: str
    path: Path


class Step(NamedTuple):
    """One of the ten steps."""

    title: str
    links: list[Link]
    handoffs: list[str]


def _section(title: str) -> str:
    """From a heading of the second level to the next one."""
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def _links(text: str) -> list[Link]:
    return [Link(name, (DOCS / target).resolve()) for name, target in re.findall(_LINK, text)]


def parse_steps(text: str) -> list[Step]:
    """The numbered sections of a page."""
    steps = []
    for title, body in re.findall(r"^### (\d+\. .+)\n((?:(?!##).*\n)*)", text, re.MULTILINE):
        prose, *handoffs = " ".join(body.split()).split("Hand-over: ")
        steps.append(Step(title, _links(prose), [handoff.strip() for handoff in handoffs]))
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

    add(tree_of(path).body, "")
    return found


def is_defined(link: Link) -> bool:
    """Whether the file exists and defines the name; in C++, only functions are found, by text search."""
    if not link.path.is_file():
        return False
    if link.path.suffix == ".py":
        return link.name in _definitions(link.path)
    return bool(re.search(rf"\w[\w *]* \*?{re.escape(link.name)}\(", link.path.read_text()))


def _mentions(link: Link, name: str) -> bool:
    """Whether the body of the definition uses this name."""
    nodes = ast.walk(_definitions(link.path)[link.name])
    return name.rpartition(".")[2] in {getattr(node, "attr", getattr(node, "id", "")) for node in nodes}


def _imports(source: Path, target: Path) -> bool:
    modules = {path: module_of(ROOT, path) for path in product_files(ROOT)}
    return modules[target] in imported_modules(source, set(modules.values()))


def walk(handoff: str) -> list[Link]:
    """The two ends of a hand-over; none if the code has no such connection."""
    links = _links(handoff)
    uses = next((uses for sentence, uses in _HANDOFFS.items() if re.fullmatch(sentence, handoff)), None)
    if uses is None or not all(map(is_defined, links)):
        return []
    is_there = all(_mentions(links[user], links[used].name) for user, used in uses)
    if "over the pipe" in handoff:
        return [links[0], links[2]] if is_there and links[1].name in FRAMES else []
    if "wires them" in handoff:
        is_there = is_there and all(_imports(links[2].path, link.path) for link in links[:2])
    return links[:2] if is_there else []


def test_ten_steps_have_names_and_hand_overs() -> None:
    assert [step.title.partition(".")[0] for step in STEPS] == [str(n) for n in range(1, 11)]
    for step in STEPS:
        assert len(step.links) >= 3 and step.handoffs, step.title


def test_every_name_is_defined_in_its_linked_file() -> None:
    assert len(_links(PAGE)) > 60
    assert [f"{link.name} in {link.path}" for link in _links(PAGE) if not is_defined(link)] == []


def test_each_hand_over_exists_in_the_code_and_leads_to_the_next_step() -> None:
    for step in STEPS:
        for handoff in step.handoffs:
            ends = walk(handoff)
            assert ends, handoff
            assert ends[0].path in {link.path for link in step.links}, f"{step.title} does not mention {ends[0].name}"
    for step, following in pairwise(STEPS):
        ends = walk(step.handoffs[-1])
        assert {*ends} & {*following.links}, f"{step.title} does not lead to {following.title}"


SERVICE, POOL = "[`Service._begin`](../app/serving/service.py)", "../app/engine_client/engine_pool.py"
SEND = "[`Replica._submit`](../app/engine_client/replica.py)"
TAKE = "[`_WorkerLoop._receive`](../app/engine/worker_loop.py)"


@pytest.mark.parametrize(
    "handoff",
    [
        f"{SERVICE} calls [`EnginePool.fail_all`]({POOL}).",  # no such call
        f"{SERVICE} calls [`EnginePool.submits`]({POOL}).",  # no such name
        f"{SERVICE} knows [`EnginePool.submit`]({POOL}).",  # not a kind of hand-over
        f"{SEND} sends [`Cancel`](../app/common/ipc.py) over the pipe to {TAKE}.",  # sends a different frame
        f"{SEND} sends [`FrameDecoder`](../app/common/frames.py) over the pipe to {TAKE}.",  # not a frame
        f"{TAKE} forwards over ASGI to {SERVICE}, as [`create_app`](../app/main.py) wires them.",
    ],
)
def test_hand_over_missing_in_the_code_is_detected(handoff: str) -> None:
    assert walk(f"{SERVICE} calls [`EnginePool.submit`]({POOL}).")
    assert not walk(handoff)


def test_missing_name_is_detected() -> None:
    text = "[`ink_drew`](../app/engine/cpu/source/draw.h) [`Scheduler`](../app/engine/scheduling/schedule.py)"
    assert not any(map(is_defined, _links(text)))


def test_listed_frames_equal_those_of_the_pipe() -> None:
    section = _section("Two processes")
    for direction, row in zip(
        (Down, Up), re.findall(r"^\| to the .*? \| (.+) \|$", section, re.MULTILINE), strict=True
    ):
        assert set(re.findall(r"`(\w+)`", row)) == {kind.__name__ for kind in get_args(direction)}
    assert set(re.findall(r"\w+", section.partition("```text")[2].partition("```")[0])) >= FRAMES


def test_layers_are_drawn_above_their_imports() -> None:
    drawing = _section("Layers").partition("```text")[2].partition("```")[0]
    lines = [re.findall(r"\b(?:app|model)\b[\w.]*", line) for line in drawing.splitlines()]
    layers = {package: row for row, packages in enumerate(lines) for package in packages}
    assert len(layers) == sum(map(len, lines)) > 20
    for edge, imports in package_edges(ROOT).items():
        source, target = (max((p for p in layers if f"{name}.".startswith(f"{p}.")), key=len) for name in edge)
        assert source == target or layers[source] < layers[target], imports


def _defined_in(folder: Path) -> set[str]:
    return {name for path in folder.glob("*.py") for name in _definitions(path)}


def test_table_lists_exactly_the_packages_in_order_with_names_that_they_define() -> None:
    names = {".".join(path.relative_to(ROOT).parent.parts) for path in product_files(ROOT)}
    assert [row[0].strip("`") for row in package_rows()] == sorted(names)
    for package, _, row, _ in package_rows():
        listed = set(re.findall(r"`(\w+)`", row))
        assert listed and listed <= _defined_in(ROOT / package.strip("`").replace(".", "/")), package


def test_every_package_docstring_has_purpose_names_and_invariants() -> None:
    for path in (path for path in product_files(ROOT) if path.name == "__init__.py"):
        text = ast.get_docstring(tree_of(path)) or ""
        purpose, names, invariants = re.split(r"\nMain names: |\nInvariants: ", text)
        assert len(purpose) > 20 and len(invariants) > 20, path
        mentioned = set(re.findall(r"\b[A-Z]\w*[a-z][A-Z]\w*|\b\w+(?=\(\))", names))
        assert mentioned <= _defined_in(path.parent), path


def test_index_lists_every_page_once_by_kind() -> None:
    listed = re.findall(r"^- \[[^\]]+\]\(([^)]+)\): \S.+\.$", INDEX, re.MULTILINE)
    pages = [name for name in listed if "/" not in name]
    assert sorted(pages) == sorted(path.name for path in DOCS.glob("*.md") if path.name != "index.md")
    assert [name for name in listed if not (DOCS / name).is_file()] == []
    assert len(listed) == len(re.findall(r"\]\(", INDEX)), "each link of the index must have its own line"
    assert re.findall(r"^## (.+)$", INDEX, re.MULTILINE) == ["Tutorials", "How-to guides", "Reference", "Explanation"]
