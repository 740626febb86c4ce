"""From token events to text: whatever the tokens and stops, the pieces add up to what the whole bytes say."""

from __future__ import annotations

import codecs
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.common.types import FinishReason, PromptScores, Request, SampledEvent
from app.generation.detokenizer import OutputChoice, PromptEcho, TextRules
from app.generation.request import Delta

PIECES = [b"a", b"b", b"ab", b" ", b"\n", b"stop", b"st", b"op", "\u00e9".encode(), "\U0001f98a".encode(), b"\xf0\x9f",
          b"\xa6\x8a", b"\xc3", b"\xff", b"", b"o s"]  # fmt: skip
EOS = PIECES.index(b"")


class _Table:
    """A tokenizer as far as a choice needs one."""

    strips_first_space = False

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]


def _run(
    ids: list[int], rules: TextRules, last: FinishReason, echo: PromptEcho | None = None
) -> tuple[OutputChoice, list[Delta]]:
    table: Any = _Table()
    request = Request(id="r", prompt=(0,), max_tokens=len(ids), stop_ids=(EOS,))
    choice, deltas = OutputChoice(0, request, table, rules, echo), []
    for index, token in enumerate(ids):
        if choice.ended:
            break
        finish = last if index == len(ids) - 1 else None
        deltas += choice.add(SampledEvent("r", index, token, -0.5, ((token, -0.5),), finish))
    return choice, deltas


def _echo(prompt: list[int], scored: int) -> PromptEcho:
    """A prompt of which so many tokens have been scored."""
    table: Any = _Table()
    text = b"".join(PIECES[t] for t in prompt).decode("utf-8", "replace")
    echo = PromptEcho(text, tuple(prompt), table, is_scored=True)
    echo.add(PromptScores("r", 1, tuple((-1.0, ((t, -1.0),)) for t in prompt[1:scored])))
    return echo


def _expected(ids: list[int], rules: TextRules) -> tuple[str, str | None]:
    """The text and the stop: the shortest prefix of tokens whose text holds a stop ends it at the earliest one.

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
    """The characters that are certain after `data`: an unfinished one at its end may continue."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


_IDS = st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=25).map(
    lambda ids: [t for t in ids if t != EOS] or [0]
)
_RULES = st.builds(
    TextRules,
    stops=st.lists(st.sampled_from(["stop", "st", "ab", "b", "\u00e9", "o s", "\ufffd"]), max_size=3, unique=True).map(
        tuple
    ),
    include_stop=st.booleans(),
    min_tokens=st.integers(0, 5),
)


@given(ids=_IDS, rules=_RULES)
def test_the_pieces_add_up_to_the_text_before_the_earliest_stop(ids: list[int], rules: TextRules) -> None:
    choice, deltas = _run(ids, rules, FinishReason.LENGTH)
    text, stop = _expected(ids, rules)
    assert "".join(delta.text for delta in deltas) == text
    assert choice.ended is not None
    assert choice.ended.stop_reason == stop
    assert choice.ended.finish_reason == ("length" if stop is None else "stop")


@given(ids=_IDS, rules=_RULES, prompt=_IDS)
def test_tokens_come_with_their_text_and_its_place(ids: list[int], rules: TextRules, prompt: list[int]) -> None:
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
def test_the_token_that_ends_a_text_counts_and_is_not_shown(ids: list[int]) -> None:
    choice, deltas = _run([*ids, EOS], TextRules(eos_ids=frozenset({EOS})), FinishReason.STOP)
    assert "".join(d.text for d in deltas) == b"".join(PIECES[t] for t in ids).decode("utf-8", "replace")
    assert choice.n_tokens == len(ids) + 1
    assert [d.id for delta in deltas for d in delta.tokens] == [*ids, EOS]
    assert choice.ended is not None and (choice.ended.finish_reason, choice.ended.stop_reason) == ("stop", None)


@given(prompt=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=100), part=st.floats(0, 1))
def test_an_echo_that_must_end_early_tells_what_was_scored(prompt: list[int], part: float) -> None:
    scored = max(1, round(part * len(prompt)))
    echo = _echo(prompt, scored)
    table: Any = _Table()
    choice = OutputChoice(3, Request(id="r", prompt=tuple(prompt), max_tokens=1), table, TextRules(), echo)
    deltas = choice.finish("timeout")
    assert "".join(delta.text for delta in deltas) == echo.text
    assert [d.id for delta in deltas for d in delta.tokens] == prompt[:scored]
    assert all(len(delta.tokens) <= 8 and delta.index == 3 for delta in deltas)
    assert choice.finish("timeout") == [], "the echo comes once"
