"""Mutation testing of modules whose bugs are silent: python -m tests.tools.mutants [SUBJECT ...] (make mutants).

Changes a module in one place, in a copy of the tree, and runs its tests: a mutant survives if they pass. A survivor is
code that no test constrains, or an equivalent mutant. The same seed draws the same sample. Exits with 1 below the goal,
and with 2 for an unknown subject.
"""

from __future__ import annotations

import argparse
import ast
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import ROOT

GOAL = 0.85
_COPIED = ("app", "model", "tests")
_LEAST_SECONDS, _TIMES_AS_LONG = 20.0, 4.0
"""Time limit of a mutant, as a multiple of the tests' time without one. A mutant that exceeds it counts as killed."""


@dataclass(frozen=True, slots=True)
class Subject:
    """Modules, and the tests that constrain them."""

    modules: tuple[str, ...]
    tests: tuple[str, ...]


_ENGINE, _PROMISES = "app/engine", "tests/promises"
_SCHEDULING = ("tests/engine/scheduling", f"{_PROMISES}/test_r27_state_machine.py")
SUBJECTS = {
    "scheduler": Subject((f"{_ENGINE}/scheduling/scheduler.py",), _SCHEDULING),
    "allocator": Subject(
        tuple(
            f"{_ENGINE}/scheduling/{name}.py"
            for name in ("block_allocator", "block_pool", "prefix_cache", "steps_in_flight")
        ),
        _SCHEDULING,
    ),
    "sampler": Subject((f"{_ENGINE}/sampling/sampler.py",), ("tests/engine/sampling",)),
    "text": Subject(("app/generation/detokenizer.py",), ("tests/generation",)),
    "quotas": Subject(
        ("app/access/rate_limiter.py", "app/access/worker_turns.py"),
        ("tests/access", "tests/api/test_invalid_input.py", f"{_PROMISES}/test_s04_limits_by_key.py"),
    ),
    "resume": Subject(
        ("app/api/resume_store.py",), ("tests/api/test_resume_store.py", "tests/api/test_resumed_streams.py")
    ),
    "guided": Subject(
        (f"{_ENGINE}/guided/grammar_tracker.py", f"{_ENGINE}/guided/token_masks.py"), ("tests/engine/guided",)
    ),
}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A module with one change."""

    line: int
    change: str
    source: str


_OPERATORS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.And: ast.Or, ast.Or: ast.And,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult, ast.Mod: ast.Add,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
_REMOVED = (ast.Assign, ast.AugAssign, ast.Expr, ast.Raise, ast.Delete, ast.Continue, ast.Break)
_UNTOUCHED = {"annotation", "returns", "decorator_list", "bases"}


def mutants(source: str) -> list[Mutant]:
    """Every mutant of a module: operators, constants, negations, removed statements, swapped branches."""
    found = []
    for index, node in enumerate(_nodes(ast.parse(source))):
        for number, _ in enumerate(_changes(node)):
            tree = ast.parse(source)
            changed = next(each for at, each in enumerate(_nodes(tree)) if at == index)
            before = ast.unparse(changed).partition("\n")[0]
            change = list(_changes(changed))[number]
            change()
            after = ast.unparse(changed).partition("\n")[0] if not isinstance(changed, ast.Pass) else "nothing"
            if (text := ast.unparse(ast.fix_missing_locations(tree))) != ast.unparse(ast.parse(source)):
                made = after if after != before else "branches swapped"
                found.append(Mutant(getattr(node, "lineno", 0), f"{before}  ->  {made}", text))
    return found


def _nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes to mutate: not annotations, decorators, docstrings, assertions, logs and fault points."""
    if isinstance(node, ast.Assert | ast.Import | ast.ImportFrom) or _is_inert(node):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name not in _UNTOUCHED:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _nodes(child)


def _is_inert(node: ast.AST) -> bool:
    if not isinstance(node, ast.Expr):
        return False
    if isinstance(node.value, ast.Constant):
        return True
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).startswith(("fault", "_log."))


def _changes(node: ast.AST) -> Iterator[Callable[[], None]]:
    """Changes that can be made to a node, in place."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OPERATORS:
        yield lambda: node.ops.__setitem__(0, _OPERATORS[type(node.ops[0])]())  # type: ignore[call-overload]
    elif isinstance(node, ast.BinOp | ast.AugAssign | ast.BoolOp) and type(node.op) in _OPERATORS:
        yield lambda: setattr(node, "op", _OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield lambda: setattr(node, "value", node.value + 1)  # type: ignore[operator]
        yield lambda: setattr(node, "value", node.value - 1)  # type: ignore[operator]
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield lambda: setattr(node, "value", not node.value)
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield lambda: setattr(node, "test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.If | ast.IfExp) and node.orelse:
        yield lambda: _swap(node)
    if isinstance(node, _REMOVED):
        yield lambda: _become_pass(node)


def _swap(node: ast.If | ast.IfExp) -> None:
    node.body, node.orelse = node.orelse, node.body


def _become_pass(node: ast.AST) -> None:
    line = node.lineno  # type: ignore[attr-defined]
    node.__class__ = ast.Pass
    node.__dict__.clear()
    node.lineno, node.col_offset = line, 0  # type: ignore[attr-defined]


def sampled(source: str, count: int, seed: str) -> list[Mutant]:
    """A random sample of at most `count` mutants of a module, in order of its lines."""
    every = mutants(source)
    return sorted(random.Random(seed).sample(every, min(count, len(every))), key=lambda mutant: mutant.line)


class Tree:
    """A copy of the repository in which one module at a time is mutated."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root = folder / "tree"
        self.root.mkdir()
        for path in root.iterdir():
            if path.name in _COPIED:
                shutil.copytree(path, self.root / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            elif path.name not in (".git", ".hypothesis", "build"):
                (self.root / path.name).symlink_to(path)

    def passes(self, tests: Sequence[str], seconds: float) -> bool:
        """Whether the tests pass within `seconds`."""
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        variables = {"PYTHONPATH": str(self.root), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command, cwd=self.root, env={**os.environ, **variables}, start_new_session=True,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            return process.wait(seconds) == 0
        except subprocess.TimeoutExpired:
            return False
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def survivors(self, module: str, tests: Sequence[str], tried: Sequence[Mutant], seconds: float) -> list[Mutant]:
        """Mutants that the tests pass."""
        path = self.root / module
        original = path.read_text()
        found = []
        for mutant in tried:
            path.write_text(mutant.source)
            found += [mutant] if self.passes(tests, seconds) else []
        path.write_text(original)
        return found


def score(tree: Tree, name: str, subject: Subject, *, sample: int, seed: int) -> tuple[int, int]:
    """(killed, all) mutants of a subject; prints the survivors."""
    began = time.monotonic()
    assert tree.passes(subject.tests, 600.0), f"{name}: the tests fail without a mutant"
    seconds = max(_LEAST_SECONDS, _TIMES_AS_LONG * (time.monotonic() - began))
    killed = count = 0
    for module in subject.modules:
        each = -(-sample // len(subject.modules))
        tried = sampled((tree.root / module).read_text(), each, f"{seed}/{module}")
        survivors = tree.survivors(module, subject.tests, tried, seconds)
        count, killed = count + len(tried), killed + len(tried) - len(survivors)
        for mutant in survivors:
            print(f"  {module}:{mutant.line}: {mutant.change}", flush=True)
    print(f"{name}: {killed} of {count} mutants killed ({time.monotonic() - began:.0f} s)", flush=True)
    return killed, count


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the subjects; returns the exit status."""
    parser = argparse.ArgumentParser(prog="mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("subjects", nargs="*", metavar="SUBJECT", help=f"{', '.join(SUBJECTS)} (all)")
    parser.add_argument("--sample", type=int, default=40, help="mutants of a subject (40)")
    parser.add_argument("--seed", type=int, default=0, help="another seed draws other mutants (0)")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.subjects if name not in SUBJECTS]:
        parser.error(f"no subject {unknown[0]}: they are {', '.join(SUBJECTS)}")
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(ROOT, Path(folder))
        scores = [
            score(tree, name, SUBJECTS[name], sample=options.sample, seed=options.seed)
            for name in options.subjects or SUBJECTS
        ]
    killed, count = map(sum, zip(*scores, strict=True))
    print(f"{killed / count:.0%} of {count} mutants killed, the goal is {GOAL:.0%}")
    return int(killed / count < GOAL)


if __name__ == "__main__":
    sys.exit(main())
