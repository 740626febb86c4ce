"""Drafts of guided text: cut to what the grammar allows, masked row by row, without a trace where they are wrong."""

from __future__ import annotations

from array import array
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.common.types import Request, SamplingParams
from app.engine.execution.engine import Engine
from app.engine.guided import token_masks
from app.engine.guided.grammar_tracker import GrammarTracker
from app.engine.guided.grammar_workers import GrammarWorkers
from app.engine.sampling.sampled_token import MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import Chunk
from app.engine.scheduling.batch_plan import Sequence as EngineSequence
from app.engine.scheduling.scheduler import DraftPlanner
from app.engine.speculation.lookup import LookupProposer
from app.engine.speculation.speculation import Speculation
from app.engine.speculation.step_costs import StepCosts
from app.guided.grammar import grammar_from
from model.tokenizer.tokenizer import Tokenizer
from tests.support.armed_faults import arm_this_process
from tests.support.engine.mixed_requests import Outcome, serve
from tests.support.model.tiny_models import TEXT, VOCAB, tiny_config, tiny_decoder, tiny_engine

TOKENIZER = Tokenizer.train([TEXT], VOCAB)
SCHEMA = {
    "type": "array",
    "minItems": 6,
    "maxItems": 8,
    "items": {
        "type": "object",
        "properties": {"first name": {"enum": ["ann", "bob"]}, "is present": {"type": "boolean"}},
        "required": ["first name", "is present"],
        "additionalProperties": False,
    },
}


def _tracker() -> GrammarTracker:
    return GrammarTracker(lambda: TOKENIZER.bytes_of, vocab_size=VOCAB, max_states=32)


def _grammar(**fields: Any) -> str:
    grammar = grammar_from(*next(iter(fields.items())))
    assert grammar
    return grammar.lark


def _requests(max_tokens: int = 300) -> list[Request]:
    assert TOKENIZER.eos_id is not None
    return [
        Request(
            id=f"r{i}",
            prompt=(5, 6, 7 + i),
            max_tokens=max_tokens,
            params=SamplingParams(temperature=0.5, seed=i, logprobs=1),
            stop_ids=(TOKENIZER.eos_id,) if i % 2 else (),
            grammar=_grammar(json_schema=SCHEMA) if i % 3 else _grammar(regex="(?:abc|abd){10,30}"),
        )
        for i in range(9)
    ]


def _engine(guides: GrammarTracker, *, speculates: bool = True) -> Engine:
    engine = tiny_engine(tiny_decoder(tiny_config(context=1024, n_layers=1)), blocks=400, guides=guides)
    if speculates:
        costs = StepCosts({1: 1.0, 32: 1.5})
        engine.speculate(Speculation(LookupProposer(), costs, allow=guides.allow_drafts))
    return engine


@pytest.fixture(scope="module")
def expected() -> dict[str, Outcome]:
    return serve(_engine(_tracker(), speculates=False), _requests())


def test_guided_text_is_the_same_with_drafts(expected: dict[str, Outcome]) -> None:
    engine = _engine(_tracker())
    assert serve(engine, _requests()) == expected
    assert engine.scheduler.accepted > 150, "JSON repeats its keys"


@pytest.mark.parametrize("max_tokens", [*range(1, 30, 4), 60])
def test_guided_text_ends_at_its_limit_with_drafts(max_tokens: int) -> None:
    """The last token is undecided: the row after it shows how the text ends."""
    requests = _requests(max_tokens)
    expected = serve(_engine(_tracker(), speculates=False), requests)
    assert serve(_engine(_tracker()), requests) == expected


def test_masks_of_drafts_that_fail_leave_the_text_as_it_is(
    expected: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = arm_this_process(tmp_path, monkeypatch)
    faults.arm("engine.draft_masks", "raise", after=5)
    engine = _engine(_tracker())
    assert serve(engine, _requests()) == expected
    assert engine.scheduler.drafted < 9 * 30, "after a failure a request has no more drafts"


def test_drafts_do_not_count_against_the_limits_of_a_grammar(
    expected: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here they take more than a text may. They are paid as work of the request."""
    advance = token_masks.GrammarMasks.advance_drafts

    def take_a_second(self: token_masks.GrammarMasks, state: token_masks.GrammarState) -> None:
        advance(self, state)
        state.draft_seconds += 1.0

    monkeypatch.setattr(token_masks.GrammarMasks, "advance_drafts", take_a_second)
    tracker = _tracker()
    engine = _engine(tracker)
    assert serve(engine, _requests()) == expected
    assert engine.scheduler.accepted > 100
    assert sum(seconds for _, seconds in tracker.take_work()) > 20


def test_grammar_that_fails_after_drafts_is_tried_again_without(
    expected: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a matcher has seen of drafts may count against its limits: a new one has seen only the text."""
    has_failed = token_masks.GrammarMasks._has_failed

    def fails_with_drafts(self: token_masks.GrammarMasks, state: token_masks.GrammarState) -> bool:
        if state.has_drafted and state.consumed > 20:
            state.problem, state.outcome = "too many", SampledToken(None, failure="too many")
            return True
        return has_failed(self, state)

    monkeypatch.setattr(token_masks.GrammarMasks, "_has_failed", fails_with_drafts)
    assert serve(_engine(_tracker()), _requests()) == expected


def test_step_that_goes_on_without_its_drafts_leaves_no_job_that_uses_the_matcher(
    expected: dict[str, Outcome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For lack of a block, for example: the masks of its drafts may be in the works, and may have failed."""
    tracker, n_dropped = _tracker(), 0
    engine = _engine(tracker)
    add_drafts = engine.scheduler._add_drafts

    def add_none(chunks: list[Chunk], planner: DraftPlanner) -> None:
        nonlocal n_dropped
        before = [*chunks]
        add_drafts(chunks, planner)
        for index, chunk in enumerate(chunks):
            if chunk.drafts and index % 2:
                n_dropped += 1
                state = tracker._states[chunk.sequence.request.id]
                assert state.draft_job
                if index % 3:
                    tracker._workers.submit(state.draft_job)
                chunks[index] = before[index]

    monkeypatch.setattr(engine.scheduler, "_add_drafts", add_none)
    faults = arm_this_process(tmp_path, monkeypatch)
    faults.arm("engine.draft_masks", "sleep", seconds=0.002, times=40)
    assert serve(engine, _requests()) == expected
    assert n_dropped > 20


def test_drafts_are_cut_where_the_grammar_ends_them() -> None:
    tracker = _tracker()
    ids = {letter: TOKENIZER.bytes_of.index(letter.encode()) for letter in "abcd"}
    a, b, c, d = ids.values()
    request = Request(id="r", prompt=(5,), max_tokens=9, grammar=_grammar(regex="(?:ab)+c"), stop_ids=(d,))
    sequence = EngineSequence(request=request, tokens=array("q", [5]), arrival=0)
    assert tracker.allow_drafts(sequence, (a,)) == (), "its first mask is not ready"
    while tracker.allowed([sequence])[0] is MASK_NOT_READY:
        tracker.wait(1.0)
    tracker.accept_tokens([sequence], [SampledToken(a)])
    sequence.tokens.append(a)
    while tracker.allowed([sequence])[0] is MASK_NOT_READY:
        tracker.wait(1.0)
    for drafts, count in (
        ((b, a, b, c), 4),
        ((b, c), 2),
        ((b, b), 1),
        ((a,), 0),
        ((b, c, d), 2),
        ((b, 0), 1),
        ((d,), 0),
    ):
        assert tracker.must_wait([sequence]) == [False]
        assert tracker.allow_drafts(sequence, drafts) == drafts[:count]
        if count:
            masks = tracker.allowed_after(sequence, drafts[:count])
            assert len(masks) == count
            assert MASK_NOT_READY not in [mask for mask in masks if isinstance(mask, SampledToken)]


def test_masks_of_drafts_take_no_time_from_other_tenants(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a spare core they are computed within the step."""
    monkeypatch.setattr(GrammarWorkers, "n_spare_cores", 0)
    requests = [replace(request, cache_namespace=f"key {i % 2}") for i, request in enumerate(_requests())]
    expected = serve(_engine(_tracker(), speculates=False), requests)
    engine = _engine(_tracker())
    assert serve(engine, requests) == expected
    n_shared = engine.scheduler.drafted
    engine = _engine(_tracker())
    serve(engine, _requests())
    assert n_shared < engine.scheduler.drafted / 2, "only what runs when the other tenant has ended"


def test_masks_of_a_steps_drafts_take_a_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tracker, planned = _tracker(), list[float]()
    allow = tracker.allow_drafts

    def measured(sequence: EngineSequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        before = tracker._draft_budget
        state = tracker._states.get(sequence.request.id)
        allowed = allow(sequence, drafts)
        if allowed and state:
            planned.append(len(allowed) * state.mask_seconds)
            assert planned[-1] <= before <= 0.002
        return allowed

    monkeypatch.setattr(tracker, "allow_drafts", measured)
    serve(_engine(tracker), _requests())
    assert len(planned) > 20
