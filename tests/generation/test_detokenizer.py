"""The detokenizer: partial characters and stop strings; the output does not depend on how the input is split."""

from __future__ import annotations

import codecs
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.generation.detokenizer import StopMatcher, StreamDecoder


def _cut(data: Any, cuts: list[int]) -> list[Any]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(bounds)]


@given(st.text(), st.binary(max_size=40), st.lists(st.integers(0, 80)))
def test_bytes_cut_anywhere_decode_as_the_codec_decodes_them(text: str, noise: bytes, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace") + noise + b"ascii"
    ours, codec = StreamDecoder(), codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in _cut(data, cuts):
        assert ours.feed(piece) == codec.decode(piece)
    assert ours.flush() == codec.decode(b"", final=True)


def _by_definition(text: str, stops: list[str]) -> tuple[str, str | None]:
    for index in range(len(text)):
        found = [stop for stop in stops if text.startswith(stop, index)]
        if found:
            return text[:index], max(found, key=len)
    return text, None


_LETTERS = st.text(alphabet="ab\U0001f98a", max_size=14)


@given(
    _LETTERS, st.lists(st.text(alphabet="ab\U0001f98a", min_size=1, max_size=4), max_size=3), st.lists(st.integers())
)
def test_the_earliest_stop_wins_and_ties_go_to_the_longest(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher = StopMatcher(stops)
    out = "".join([*(matcher.feed(piece) for piece in _cut(text, cuts)), matcher.flush()])
    assert (out, matcher.matched) == _by_definition(text, stops)


@given(_LETTERS, st.lists(st.integers()))
def test_only_what_may_still_become_a_stop_is_held_back(text: str, cuts: list[int]) -> None:
    matcher, sent, seen = StopMatcher(["abba"]), "", ""
    for piece in _cut(text, cuts):
        seen += piece
        sent += matcher.feed(piece)
        if matcher.matched is None:
            withheld = seen.removeprefix(sent)
            assert withheld in ("", "a", "ab", "abb")
            assert not any(seen.endswith(longer) for longer in ("a", "ab", "abb") if len(longer) > len(withheld))
