"""A resumed choice: whatever its client has, text, ids and log-probabilities are those of the undisturbed choice."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.common.errors import ResumeRefused
from app.common.types import FinishReason, Request, RequestStarted, SampledEvent
from app.generation.completion import Completion, CompletionTimes, State, Timeouts
from app.generation.detokenizer import OutputChoice, TextRules
from app.generation.request import Delta, Finished, ReceivedChoice
from app.generation.resumed_choice import ResumedChoice
from tests.generation.test_detokenizer import _IDS, _PARTS, _RULES, EOS, PIECES, _Table
from tests.support.async_test import async_test

_TABLE: Any = _Table()


def _request(ids: list[int], generated: tuple[int, ...] = ()) -> Request:
    return Request(id="r", prompt=(0,), max_tokens=len(ids), stop_ids=(EOS,), generated=generated)


def _add(choice: OutputChoice, ids: list[int], first: int, *, is_scored: bool) -> list[Delta]:
    """Adds the tokens from index `first` on, as the engine would."""
    deltas = list(choice.first)
    for index in range(first, len(ids)):
        if not choice.ended:
            scores: tuple[Any, ...] = (-0.5, ()) if is_scored else (None, ())
            last = FinishReason.LENGTH if index == len(ids) - 1 else None
            deltas += choice.add(SampledEvent("r", index, ids[index], *scores, last))
    return deltas


def _parts(deltas: list[Delta]) -> tuple[str, list[int], list[Any]]:
    text = "".join(delta.text for delta in deltas)
    return text, [token for delta in deltas for token in delta.ids], [one for delta in deltas for one in delta.tokens]


def _resumed(
    ids: list[int], rules: TextRules, deltas: list[Delta], *, n_fed: int, is_scored: bool, text: str | None = None
) -> tuple[ResumedChoice, list[Delta]]:
    """A choice whose client has these deltas, and whose engine continues from `n_fed` of its ids."""
    own, token_ids, details = _parts(deltas)
    received = ReceivedChoice(
        name="resume.choices[0]",
        text=own if text is None else text,
        token_ids=tuple(token_ids),
        n_logprobs=len(details) if is_scored else None,
    )
    choice = ResumedChoice(received, 0, _request(ids, tuple(token_ids[:n_fed])), _TABLE, rules, None)
    choice.feed()
    return choice, _add(choice, ids, n_fed, is_scored=is_scored)


@given(data=st.data(), ids=_IDS | _PARTS, rules=_RULES, is_scored=st.booleans(), returns_ids=st.booleans())
def test_resumed_choice_completes_what_its_client_has(
    data: st.DataObject, ids: list[int], rules: TextRules, is_scored: bool, returns_ids: bool
) -> None:
    """Cut after any piece; the engine continues from all, some or none of the ids."""
    rules = replace(rules, returns_ids=returns_ids)
    choice = OutputChoice(0, _request(ids), _TABLE, rules)
    whole = _add(choice, ids, 0, is_scored=is_scored)
    cut = data.draw(st.integers(0, len(whole)))
    _, token_ids, details = _parts(whole[:cut])
    n_fed = data.draw(st.integers(0, min(len(token_ids), len(details)) if is_scored else len(token_ids)))
    resumed, rest = _resumed(ids, rules, whole[:cut], n_fed=n_fed, is_scored=is_scored)
    assert _parts(whole[:cut] + rest) == _parts(whole)
    assert (resumed.ended, resumed.n_tokens) == (choice.ended, choice.n_tokens)
    assert all(delta.text or delta.tokens or delta.ids for delta in rest)


@given(ids=st.lists(st.integers(0, 2), min_size=3, max_size=12), at=st.integers(0, 11), is_fed=st.booleans())
def test_another_text_is_refused(ids: list[int], at: int, is_fed: bool) -> None:
    """Positive control: one other character, or a text that is longer than the whole one."""
    rules = TextRules(returns_ids=True)
    whole = _add(OutputChoice(0, _request(ids), _TABLE, rules), ids, 0, is_scored=False)
    text = "".join(PIECES[token].decode() for token in ids)
    at %= len(text)
    for wrong in (f"{text[:at]}?{text[at + 1 :]}", f"{text}?"):
        with pytest.raises(ResumeRefused, match=r"resume\.choices\[0\]") as refused:
            _resumed(ids, rules, whole, n_fed=len(ids) if is_fed else 0, is_scored=False, text=wrong)
        assert refused.value.code == "resume_diverged"


class _Pool:
    """The part of an engine pool that a completion uses."""

    queue: Any = SimpleNamespace(position=lambda _: None)

    def submit(self, _response: Any) -> None:
        pass

    def cancel(self, _request_ids: Any) -> None:
        pass


@pytest.mark.parametrize("end", ["cancel", "deadline"])
@pytest.mark.parametrize(
    ("text", "rules", "piece"),
    [("é", TextRules(), b"\xc3"), ("QQQ", TextRules(stops=("o see",)), b"o s")],
    ids=["half a character", "half a stop string"],
)
@async_test
async def test_end_before_the_received_text_was_compared_is_an_end_and_no_error(
    end: str, text: str, rules: TextRules, piece: bytes
) -> None:
    request = _request([0] * 50)
    received = ReceivedChoice(name="resume.choices[0]", text=text, token_ids=(), n_logprobs=None)
    choice = ResumedChoice(received, 0, request, _TABLE, rules, None)
    choice.feed()
    timeouts = Timeouts(deadline=0.05 if end == "deadline" else 1000, queue=1000, heartbeat=1000)
    pool: Any = _Pool()
    completion = Completion(pool, [request], [choice], timeouts, CompletionTimes())
    completion.submit()
    completion.add_start(0.0, RequestStarted("r", 0))
    completion.add_token("r", 0.0, SampledEvent("r", 0, PIECES.index(piece)))
    if end == "cancel":
        assert completion.cancel()
    for _ in range(1000):
        if completion.state is State.ENDED:
            break
        await asyncio.sleep(0.005)
    assert completion.failure is None
    assert completion.events[-1] == Finished(0, "cancelled" if end == "cancel" else "timeout")


def test_fed_tokens_make_one_delta() -> None:
    ids = [PIECES.index(b"o s")] * 1000
    received = ReceivedChoice(name="resume.choices[0]", text="", token_ids=tuple(ids[:999]), n_logprobs=None)
    choice = ResumedChoice(received, 0, _request(ids, tuple(ids[:999])), _TABLE, TextRules(), None)
    choice.feed()
    assert [delta.text for delta in choice.first] == ["o s" * 999]
