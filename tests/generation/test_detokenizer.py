"""Detokenizer: partial characters, stop strings, prompt boundaries; one output for any split of the tokens."""

from __future__ import annotations

import codecs
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.types import FinishReason, PromptScores, Request, SampledEvent
from app.generation.detokenizer import OutputChoice, PromptEcho, StreamDecoder, TextRules
from app.generation.request import Delta
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.sample_tokenizers import KINDS, save


def _cut(data: Any, cuts: list[int]) -> list[Any]:
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    return [data[start:stop] for start, stop in pairwise(bounds)]


@given(st.text(), st.binary(max_size=40), st.lists(st.integers(0, 80)))
def test_bytes_split_anywhere_decode_like_the_codec(text: str, noise: bytes, cuts: list[int]) -> None:
    data = text.encode("utf-8", "replace") + noise + b"ascii"
    ours, codec = StreamDecoder(), codecs.getincrementaldecoder("utf-8")(errors="replace")
    for piece in _cut(data, cuts):
        assert ours.feed(piece) == codec.decode(piece)
    assert ours.flush() == codec.decode(b"", final=True)


PIECES = [b"a", b"b", b"ab", b" ", b"\n", b"stop", b"st", b"op", "\u00e9".encode(), "\U0001f98a".encode(), b"\xf0\x9f",
          b"\xa6\x8a", b"\xc3", b"\xff", b"", b"o s"]  # fmt: skip
EOS = PIECES.index(b"")


class _Table:
    """The part of a tokenizer that an OutputChoice uses."""

    strips_first_space = False
    bytes_of = PIECES

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]


def _run(
    ids: list[int],
    rules: TextRules,
    last: FinishReason | None,
    echo: PromptEcho | None = None,
    *,
    is_scored: bool = True,
) -> tuple[OutputChoice, list[Delta]]:
    table: Any = _Table()
    request = Request(id="r", prompt=(0,), max_tokens=len(ids), stop_ids=(EOS,))
    choice, deltas = OutputChoice(0, request, table, rules, echo), []
    for index, token in enumerate(ids):
        if choice.ended:
            break
        finish = last if index == len(ids) - 1 else None
        scores: tuple[Any, ...] = (-0.5, ((token, -0.5),)) if is_scored else (None, ())
        deltas += choice.add(SampledEvent("r", index, token, *scores, finish))
    return choice, deltas


def _echo(prompt: list[int], scored: int) -> PromptEcho:
    """The echo of a prompt after `scored` of its tokens have been scored."""
    table: Any = _Table()
    text = b"".join(PIECES[t] for t in prompt).decode("utf-8", "replace")
    echo = PromptEcho(text, tuple(prompt), table, is_scored=True)
    echo.add(PromptScores("r", 1, tuple((-1.0, ((t, -1.0),)) for t in prompt[1:scored])))
    return echo


def _expected(ids: list[int], rules: TextRules) -> tuple[str, str | None]:
    """Expected text and stop: the shortest prefix of tokens whose text contains a stop ends at the earliest one.

    Text of the first min_tokens tokens is not searched.
    """
    whole = b"".join(PIECES[t] for t in ids).decode("utf-8", "replace")
    free = 0
    if rules.min_tokens:
        head = b"".join(PIECES[t] for t in ids[: rules.min_tokens])
        free = len(_complete(head))
    found = [(index, -len(stop), stop) for stop in rules.stops if (index := whole.find(stop, free)) != -1]
    if not found:
        return whole, None
    index, _, stop = min(found)
    return whole[: index + (len(stop) if rules.include_stop else 0)], stop


def _complete(data: bytes) -> str:
    """The characters that are final after `data`; an incomplete one at its end may continue."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


_IDS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=25).map(
    lambda ids: [t for t in ids if t != EOS] or [0]
)
_PARTS = st.lists(st.sampled_from([0, 8, 9, 10, 11, 12, 13]), min_size=12, max_size=25)
"""Tokens, most of them parts of characters."""
_RULES = st.builds(
    TextRules,
    stops=st.lists(st.sampled_from(["stop", "st", "ab", "b", "\u00e9", "o s", "\ufffd"]), max_size=3, unique=True).map(
        tuple
    ),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
)


@given(ids=_IDS | _PARTS, rules=_RULES | st.just(TextRules()), is_scored=st.booleans())
def test_pieces_add_up_to_the_text_before_the_earliest_stop(ids: list[int], rules: TextRules, is_scored: bool) -> None:
    """Nearly all tokens take a faster path: tokens without scores in requests without stops."""
    choice, deltas = _run(ids, rules, FinishReason.LENGTH, is_scored=is_scored)
    text, stop = _expected(ids, rules)
    assert "".join(delta.text for delta in deltas) == text
    assert choice.ended is not None
    assert choice.ended.stop_reason == stop
    assert choice.ended.finish_reason == ("length" if stop is None else "stop")
    assert choice.n_tokens == len(ids) or stop
    assert choice.mean_logprob == (-0.5 if is_scored else 0.0)


@given(ids=_IDS | _PARTS, rules=_RULES, is_echoed=st.booleans(), is_scored=st.booleans())
def test_ids_up_to_each_piece_give_the_text_up_to_it(
    ids: list[int], rules: TextRules, is_echoed: bool, is_scored: bool
) -> None:
    """Also the ids of tokens whose text is held back, or that have none; all of them have arrived at the end."""
    rules, prompt = replace(rules, returns_ids=True), [0, 4, 0]
    choice, deltas = _run(ids, rules, FinishReason.LENGTH, _echo(prompt, 3) if is_echoed else None, is_scored=is_scored)
    fed, text = list[int](), ""
    for number, delta in enumerate(deltas):
        fed, text = fed + list(delta.ids), text + delta.text
        is_last = number == len(deltas) - 1
        last = FinishReason.LENGTH if is_last and choice.n_tokens == len(ids) else None
        _, again = _run(fed, rules, last, _echo(prompt, 3) if is_echoed else None, is_scored=is_scored)
        known = "".join(one.text for one in again)
        assert known == text if delta.ids else text.startswith(known) or not fed  # a token's last piece has its id
    assert fed == ids[: choice.n_tokens]
    plain = _run(ids, replace(rules, returns_ids=False), FinishReason.LENGTH, is_scored=is_scored)[1]
    assert not any(delta.ids for delta in plain)


def test_without_tokens_the_mean_log_probability_is_zero() -> None:
    assert _run([], TextRules(), FinishReason.LENGTH)[0].mean_logprob == 0.0


def test_a_token_arrives_with_the_text_that_it_completes() -> None:
    fox, rest = PIECES.index(b"\xf0\x9f"), PIECES.index(b"\xa6\x8a")
    _, deltas = _run([0, fox, rest, 1], TextRules(), FinishReason.LENGTH)
    arrived = [(delta.text, [detail.id for detail in delta.tokens]) for delta in deltas]
    assert arrived == [("a", [0]), ("\U0001f98a", [fox, rest]), ("b", [1])]


@given(ids=_IDS, rules=_RULES, prompt=_IDS)
def test_token_details_have_text_and_offset(ids: list[int], rules: TextRules, prompt: list[int]) -> None:
    echo = _echo(prompt, len(prompt))
    choice, deltas = _run(ids, rules, FinishReason.LENGTH, echo)
    text = "".join(delta.text for delta in deltas)
    details = [detail for delta in deltas for detail in delta.tokens]
    assert text.startswith(echo.text)
    assert [d.id for d in details] == [*prompt, *ids][: len(details)]
    assert [d.logprob for d in details[: len(prompt)]] == [None] + [-1.0] * (len(prompt) - 1)
    assert choice.ended is not None
    if choice.ended.finish_reason == "length":
        assert len(details) == len(prompt) + len(ids)
    sent = 0
    for delta in deltas:
        sent += len(delta.text)
        assert all(detail.offset <= sent for detail in delta.tokens)
    assert [d.offset for d in details] == sorted(d.offset for d in details)
    for detail in details:
        if not rules.stops and (own := PIECES[detail.id].decode("utf-8", "ignore").encode()) == PIECES[detail.id]:
            assert text.startswith(own.decode(), detail.offset)


@given(ids=_IDS)
def test_end_token_is_counted_but_not_shown(ids: list[int]) -> None:
    choice, deltas = _run([*ids, EOS], TextRules(eos_ids=frozenset({EOS})), FinishReason.STOP)
    assert "".join(d.text for d in deltas) == b"".join(PIECES[t] for t in ids).decode("utf-8", "replace")
    assert choice.n_tokens == len(ids) + 1
    assert [d.id for delta in deltas for d in delta.tokens] == [*ids, EOS]
    assert choice.ended is not None and (choice.ended.finish_reason, choice.ended.stop_reason) == ("stop", None)


@given(prompt=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=100), part=st.floats(0, 1))
def test_echo_that_ends_early_returns_the_scored_tokens(prompt: list[int], part: float) -> None:
    scored = max(1, round(part * len(prompt)))
    echo = _echo(prompt, scored)
    table: Any = _Table()
    choice = OutputChoice(3, Request(id="r", prompt=tuple(prompt), max_tokens=1), table, TextRules(), echo)
    deltas = choice.finish("timeout")
    assert "".join(delta.text for delta in deltas) == echo.text
    assert [d.id for delta in deltas for d in delta.tokens] == prompt[:scored]
    assert all(len(delta.tokens) <= 8 and delta.index == 3 for delta in deltas)
    assert choice.finish("timeout") == [], "the echo must appear once"


WITH_A_SPACE_IN_FRONT = ("mistral", "llama2", "words", "unigram")


def _text(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    request = Request(id="r", prompt=tuple(prompt), max_tokens=9)
    choice, text = OutputChoice(0, request, tokenizer, TextRules()), ""
    for index, token in enumerate(ids):
        finish = FinishReason.LENGTH if index == len(ids) - 1 else None
        text += "".join(delta.text for delta in choice.add(SampledEvent("r", index, token, finish=finish)))
    return text


@pytest.mark.parametrize("kind", WITH_A_SPACE_IN_FRONT)
def test_leading_space_is_dropped_at_the_start_of_a_text_and_kept_after_a_prompt(kind: str, tmp_path: Path) -> None:
    save(KINDS[kind][0](), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (ids,) = tokenizer.encode_many(["the fox answered"])
    start = [0 if tokenizer.bos_id is None else tokenizer.bos_id]
    assert _text(tokenizer, start, ids) == "the fox answered"
    assert _text(tokenizer, tokenizer.encode("the moon"), ids) == " the fox answered"


def test_byte_level_text_keeps_leading_spaces(tmp_path: Path) -> None:
    save(KINDS["gpt2"][0](), tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    (ids,) = tokenizer.encode_many([" the fox"])
    assert _text(tokenizer, [0], ids) == " the fox"
