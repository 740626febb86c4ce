"""From token events to text: whatever the tokens and stops, the pieces add up to what the whole bytes say."""

from __future__ import annotations

import codecs
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.choice import Choice, Delta, TextRules
from app.engine.types import FinishReason, PromptScores, Request, TokenEvent

PIECES = [b"a", b"b", b"ab", b" ", b"\n", b"stop", b"st", b"op", "\u00e9".encode(), "\U0001f98a".encode(), b"\xf0\x9f",
          b"\xa6\x8a", b"\xc3", b"\xff", b"", b"o s"]  # fmt: skip
EOS = PIECES.index(b"")


class _Table:
    """A tokenizer as far as a choice needs one."""

    strips_first_space = False

    def token_bytes(self, token: int) -> bytes:
        return PIECES[token]


def _run(
    ids: list[int], rules: TextRules, last: FinishReason, prompt: tuple[int, ...] = (0,)
) -> tuple[Choice, list[Delta]]:
    table: Any = _Table()
    scored = 1 if rules.scores_prompt else None
    request = Request(id="r", prompt=prompt, max_tokens=len(ids), stop_ids=(EOS,), prompt_logprobs=scored)
    choice, deltas = Choice(0, request, table, rules, frozenset({EOS})), []
    if rules.scores_prompt:
        choice.take_scores(PromptScores("r", 1, tuple((-1.0, ((t, -1.0),)) for t in prompt[1:])))
    for index, token in enumerate(ids):
        if choice.ended:
            break
        finish = last if index == len(ids) - 1 else None
        deltas += choice.take(TokenEvent("r", index, token, -0.5, ((token, -0.5),), finish))
    return choice, deltas


def _expected(ids: list[int], rules: TextRules) -> tuple[str, str | None]:
    """The text and the stop: the shortest prefix of tokens whose text holds a stop ends it at the earliest one.

    Text of the first min_tokens tokens is not searched.
    """
    whole = b"".join(PIECES[t] for t in ids).decode("utf-8", "replace")
    free = 0
    if rules.min_tokens:
        head = b"".join(PIECES[t] for t in ids[: rules.min_tokens])
        free = len(_complete(head))
    found = [(place, -len(stop), stop) for stop in rules.stops if (place := whole.find(stop, free)) != -1]
    if not found:
        return whole, None
    place, _, stop = min(found)
    return whole[: place + (len(stop) if rules.include_stop else 0)], stop


def _complete(data: bytes) -> str:
    """The characters that are certain after `data`: an unfinished one at its end may go on."""
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
def test_tokens_come_with_their_text_and_say_where_it_begins(
    ids: list[int], rules: TextRules, prompt: list[int]
) -> None:
    echo = b"".join(PIECES[t] for t in prompt).decode("utf-8", "replace")
    rules = TextRules(rules.stops, rules.include_stop, rules.min_tokens, echo=echo, scores_prompt=True)
    choice, deltas = _run(ids, rules, FinishReason.LENGTH, tuple(prompt))
    text = "".join(delta.text for delta in deltas)
    details = [detail for delta in deltas for detail in delta.tokens]
    assert text.startswith(echo)
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
    choice, deltas = _run([*ids, EOS], TextRules(), FinishReason.STOP)
    assert "".join(d.text for d in deltas) == b"".join(PIECES[t] for t in ids).decode("utf-8", "replace")
    assert choice.n_tokens == len(ids) + 1
    assert [d.id for delta in deltas for d in delta.tokens] == [*ids, EOS]
    assert choice.ended is not None and (choice.ended.finish_reason, choice.ended.stop_reason) == ("stop", None)
