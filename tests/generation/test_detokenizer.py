"""The detokenizer: partial characters and stop strings; the output does not depend on how the input is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from app.generation.detokenizer import StopMatcher, StreamDecoder


def _cut(data: bytes | str, cuts: list[int]) -> list[bytes | str]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(bounds)]


def _decode(pieces: list[bytes]) -> str:
    decoder = StreamDecoder()
    return "".join([*(decoder.feed(piece) for piece in pieces), decoder.flush()])


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_decoding_in_pieces_equals_decoding_at_once(data: bytes, cuts: list[int]) -> None:
    assert _decode(_cut(data, cuts)) == data.decode("utf-8", errors="replace")


def test_an_emoji_split_over_tokens_comes_out_whole_and_once() -> None:
    decoder = StreamDecoder()
    assert [decoder.feed(bytes([byte])) for byte in "\U0001f98a".encode()] == ["", "", "", "\U0001f98a"]


def test_an_unfinished_character_at_the_end_becomes_one_replacement() -> None:
    decoder = StreamDecoder()
    assert decoder.feed("a\U0001f98a".encode()[:-1]) == "a"
    assert decoder.flush() == "\ufffd"


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


def test_nothing_comes_out_behind_a_stop() -> None:
    matcher = StopMatcher(["."])
    assert (matcher.feed("One. Two"), matcher.feed("Three"), matcher.flush()) == ("One", "", "")
