"""Names that a pattern matches: all of them, compared with Python's regexes, or none."""

from __future__ import annotations

import itertools
import re

import pytest

from app.guided.finite_patterns import MAX_NAMES, names_of


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("^n$", ["n"]),
        ("^(b|a)$", ["b", "a"]),
        ("^a$|^b$", ["a", "b"]),
        ("^x[0-2_]$", ["x0", "x1", "x2", "x_"]),
        ("^a?b{0,2}$", ["", "b", "bb", "a", "ab", "abb"]),
        (r"^a\.b\$$", ["a.b$"]),
        ("^(?:q|r){2}$", ["qq", "qr", "rq", "rr"]),
        ("^[a-]$", ["a", "-"]),
        ("^é$", ["é"]),
        (r"^\d$", list("0123456789")),
    ],
)
def test_names_of_a_small_pattern_are_listed(pattern: str, names: list[str]) -> None:
    assert names_of(pattern) == names


@pytest.mark.parametrize(
    "pattern",
    [
        *("", "n", "^n", "n$", "^a|b$", "^a+$", "^a*$", "^[^a]$", r"^\w$", "^.$", "^(?=a)a$", "^a{2}?$", "^[a-z]{2}$"),
        *("^a{999}{999}$", "^[a", "^(a", "^a)$", "^a\\", "^(" * 50, "(" * 500, "^[[:alpha:]]$", "^[a&&b]$", "^a|$"),
        r"^\x41$",
    ],
)
def test_other_patterns_stay_patterns(pattern: str) -> None:
    assert names_of(pattern) is None


def test_listed_names_are_exactly_what_the_pattern_matches() -> None:
    parts = ["a", "[ab]", "(a|b)", "b?", "a{1,2}", "(?:ab|c)"]
    texts = ["".join(text) for n in range(7) for text in itertools.product("abc", repeat=n)]
    for first, second in itertools.product(parts, repeat=2):
        for pattern in (f"^{first}{second}$", f"^({first}|{second})$", f"^{first}$|^{second}$"):
            names = names_of(pattern)
            assert names is not None
            assert {*names} == {text for text in texts if re.search(pattern, text)}, pattern
            assert len(names) <= MAX_NAMES
