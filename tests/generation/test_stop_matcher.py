"""Stop strings: the earliest wins however the text is split, and names of special tokens match the tokens."""

from __future__ import annotations

import sys
from collections import Counter
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import InvalidRequest
from app.common.types import FinishReason, Request, SampledEvent
from app.generation.detokenizer import OutputChoice, TextRules
from app.generation.stop_matcher import MarkedStops, StopMatcher
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, save


def _cut(text: str, cuts: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[start:stop] for start, stop in pairwise(bounds)]


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


@given(_LETTERS, st.sampled_from([["abba"], ["a", "bb"], ["b"]]), st.lists(st.integers()))
def test_only_a_possible_beginning_of_a_stop_is_held_back(text: str, stops: list[str], cuts: list[int]) -> None:
    matcher, sent, seen = StopMatcher(stops), "", ""
    beginnings = {stop[:length] for stop in stops for length in range(len(stop))}
    for piece in _cut(text, cuts):
        seen += piece
        sent += matcher.feed(piece)
        if matcher.matched is None:
            assert seen.removeprefix(sent) == max(filter(seen.endswith, beginnings), key=len)


def test_long_stops_cost_no_more_per_token_than_short_ones() -> None:
    """A request may have 16 stops of 256 characters, and the matcher runs on the event loop. Counts calls, not time."""

    def calls(stops: list[str]) -> int:
        matcher, counts = StopMatcher(stops), Counter[str]()
        sys.setprofile(lambda _frame, event, _argument: counts.update([event]))
        try:
            for _ in range(100):
                matcher.feed("wxyz")
        finally:
            sys.setprofile(None)
        return counts["c_call"]

    short, long = (calls([chr(97 + number) * length for number in range(16)]) for length in (2, 256))
    assert long <= 4 * short


END, CALL, PLAIN = "<|im_end|>", "<|call|>", "<|eot_id|>"


def _chat_tokenizer(folder: Path, kind: str = "gpt2") -> Tokenizer:
    """A tokenizer with two special tokens, and one added token that is not special."""
    rust = KINDS[kind][0]()
    rust.add_special_tokens([END, CALL])
    rust.add_tokens([PLAIN])
    return Tokenizer.load(save(rust, folder))


def _generated(
    tokenizer: Tokenizer,
    parts: list[str],
    *,
    eos: tuple[str, ...] = (),
    is_scored: bool = False,
    **rules: Any,
) -> tuple[str, str, str | int | None, int, list[int]]:
    """Text, finish reason, stop reason, number of sampled tokens and shown tokens of a choice that samples `parts`."""
    names = tokenizer.special_ids
    encoded = ([names[part]] if part in names else tokenizer.encode_many([part])[0] for part in parts)
    ids = list(chain.from_iterable(encoded))
    end_ids = tuple(tokenizer.special_ids[name] for name in eos)
    stops = rules.pop("stops")
    marked = MarkedStops.of(stops, tokenizer.special_ids)
    text_rules = TextRules(stops=tuple(stops), marked_stops=marked, eos_ids=frozenset(end_ids), **rules)
    prompt = tuple(tokenizer.encode_many(["the"])[0])
    choice = OutputChoice(0, Request(id="r", prompt=prompt, max_tokens=99, stop_ids=end_ids), tokenizer, text_rules)
    text, shown = "", []
    for index, token in enumerate(ids):
        finish = FinishReason.STOP if token in end_ids else FinishReason.LENGTH if index == len(ids) - 1 else None
        scores: tuple[Any, ...] = (-1.0, ()) if is_scored else (None, ())
        for delta in choice.add(SampledEvent("r", index, token, *scores, finish)):
            text += delta.text
            shown += [detail.id for detail in delta.tokens]
        if choice.ended:
            break
    assert choice.ended
    return text, choice.ended.finish_reason, choice.ended.stop_reason, choice.n_tokens, shown


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "llama2", "mistral", "gemma", "unigram"])
@pytest.mark.parametrize("is_scored", [False, True])
def test_a_stop_that_is_a_special_token_ends_the_text_at_the_token(kind: str, is_scored: bool, tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path, kind)
    text, finish, reason, _, shown = _generated(tokenizer, [" fox", END, " moon"], stops=[END], is_scored=is_scored)
    assert (text.lstrip(), finish, reason) == ("fox", "stop", END)
    assert tokenizer.special_ids[END] not in shown
    whole = _generated(tokenizer, [" fox", END, " moon"], stops=["elephant"], is_scored=is_scored)
    without_effect = (" ".join(whole[0].split()), *whole[1:3])
    assert without_effect == ("fox moon", "length", None), "no stop names the token"


@pytest.mark.parametrize(
    ("stop", "parts", "text"),
    [
        (END + CALL, [" fox", END, CALL, " moon"], " fox"),
        (END + CALL, [" fox", END, " moon", END, CALL], " fox moon"),
        (END + "\n", [" fox", END, "\n", " moon"], " fox"),
        (END + "\n", [" fox", END, " moon", END, "\n"], " fox moon"),
        ("\n" + END, [" fox", "\n", " moon", "\n", END], " fox\n moon"),
        ("fox" + CALL + " moon", [" fox", CALL, " moon"], " "),
        (PLAIN, [" fox", PLAIN, " moon"], " fox"),
        (PLAIN + END, [" fox", PLAIN, END, " moon"], " fox"),
    ],
)
def test_stops_join_special_tokens_and_text(stop: str, parts: list[str], text: str, tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    assert _generated(tokenizer, parts, stops=[stop])[:3] == (text, "stop", stop)
    shown = _generated(tokenizer, parts, stops=[stop], include_stop=True)
    assert shown[:3] == (text + stop, "stop", stop)


def test_a_special_stop_waits_for_min_tokens_and_beats_the_end_of_the_text(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    parts = [" fox", END, " moon", END, " sun"]
    head = len(tokenizer.encode_many([" fox"])[0]) + 1
    assert _generated(tokenizer, parts, stops=[END], min_tokens=head)[:3] == (" fox moon", "stop", END)
    assert _generated(tokenizer, parts, stops=[END], eos=(END,))[:3] == (" fox", "stop", END)
    assert _generated(tokenizer, parts, stops=["sun"], eos=(END,))[:3] == (" fox", "stop", None)
    assert _generated(tokenizer, parts, stops=[END, END + " moon"])[2] == END + " moon", "ties go to the longest"


def test_a_character_that_a_special_stop_breaks_off_is_shown_once(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    first = tokenizer.encode_many(["\U0001f98a"])[0][0]
    marked = MarkedStops.of([END], tokenizer.special_ids)
    choice = OutputChoice(
        0, Request(id="r", prompt=(5,), max_tokens=9), tokenizer, TextRules(stops=(END,), marked_stops=marked)
    )
    ids = [first, tokenizer.special_ids[END]]
    deltas = [delta for i, token in enumerate(ids) for delta in choice.add(SampledEvent("r", i, token))]
    assert "".join(delta.text for delta in deltas) == "\ufffd"


def test_a_stop_spelled_by_ordinary_tokens_ends_the_text_too(tmp_path: Path) -> None:
    tokenizer = _chat_tokenizer(tmp_path)
    spelled = ["<", "|", "im", "_", "end", "|", ">", " moon"]
    assert _generated(tokenizer, [" fox", *spelled], stops=[END])[:3] == (" fox", "stop", END)


def test_more_marks_than_there_are_is_an_error() -> None:
    names = {f"<{chr(0x4E00 + i)}>": i for i in range(3000)}
    with pytest.raises(InvalidRequest, match="special tokens"):
        MarkedStops.of(list(names), names)
