"""The mutation runner (tests/tools/mutants.py): what it changes, and which mutants count as killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import ROOT
from tests.tools.mutants import SUBJECTS, Subject, Tree, mutants, sampled, score

SOURCE = '''"""A module."""

LIMIT: int | None = 3


def grow(size: int | None, *, twice: bool = False) -> int:
    """Adds."""
    assert size is not None and size > 0
    if size < LIMIT and not twice:
        size += 1
    else:
        return size * 2
    return size
'''


def test_all_kinds_of_mutations_are_made_except_in_annotations_and_assertions() -> None:
    changes = [mutant.change for mutant in mutants(SOURCE)]
    assert changes == [
        "3  ->  4",
        "3  ->  2",
        "False  ->  True",
        "if size < LIMIT and (not twice):  ->  if not (size < LIMIT and (not twice)):",
        "if size < LIMIT and (not twice):  ->  branches swapped",
        "size < LIMIT and (not twice)  ->  size < LIMIT or not twice",
        "size < LIMIT  ->  size <= LIMIT",
        "size += 1  ->  size -= 1",
        "size += 1  ->  nothing",
        "1  ->  2",
        "1  ->  0",
        "size * 2  ->  size + 2",
        "2  ->  3",
        "2  ->  1",
    ]
    assert all("assert size is not None and size > 0" in mutant.source for mutant in mutants(SOURCE))


def test_samples_are_deterministic_and_every_subject_exists() -> None:
    for subject in SUBJECTS.values():
        assert all((ROOT / path).exists() for path in (*subject.modules, *subject.tests))
    assert sampled(SOURCE, 5, "a") == sampled(SOURCE, 5, "a") != sampled(SOURCE, 5, "b")
    assert len(sampled(SOURCE, 99, "a")) == len(mutants(SOURCE))


@pytest.mark.slow
def test_survivors_are_distinguished_from_killed_mutants(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    repository, copy = tmp_path / "repository", tmp_path / "copy"
    (repository / "app").mkdir(parents=True)
    copy.mkdir()
    test = "from .size import is_large\n\ndef test_it():\n    assert is_large(4) and not is_large(2)\n"
    files = {"__init__.py": "", "size.py": "def is_large(size):\n    return size > 3\n", "test_size.py": test}
    for name, text in files.items():
        (repository / "app" / name).write_text(text)
    subject = Subject(("app/size.py",), ("app/test_size.py",))
    assert score(Tree(repository, copy), "size", subject, sample=10, seed=0) == (1, 3)
    output = capsys.readouterr().out
    assert "app/size.py:2: size > 3  ->  size >= 3" in output and "size: 1 of 3 mutants killed" in output
    assert (repository / "app/size.py").read_text().endswith("size > 3\n")
