"""Chunks with drafts sample several rows: commit() accepts tokens in order, and drops the rows after a wrong draft."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from app.common.types import FinishReason, Request, SamplingParams, StepReport
from app.engine.sampling.sampled_token import MASK_NOT_READY, SampledToken
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence, StepResult
from app.engine.scheduling.block_allocator import BlockAllocator
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.prefix_cache import find_prefix
from app.engine.scheduling.scheduler import NOT_FINITE, Scheduler, StepLimits
from tests.support.engine.guessing_planner import GuessingPlanner
from tests.support.engine.scheduler_simulation import (
    EOS,
    VOCAB,
    Delivered,
    SimulatedDevice,
    Windows,
    drawn_token,
    expected_output,
)

SIZE = 4
"""Tokens of a block."""


class Device(SimulatedDevice):
    """A simulated device with planted results: (request, index of the generated token) -> its sample."""

    def __init__(self, windows: Windows) -> None:
        super().__init__(SIZE, windows)
        self.planted: dict[tuple[str, int], SampledToken] = {}

    def run(self, plan: BatchPlan, **options: Any) -> StepResult:
        result = super().run(plan, **options)
        drawn = {c.sequence.request.id: self._sampled(c, result) for c in plan.chunks if c.samples}
        return StepResult(drawn, result.scores)

    def _sampled(self, chunk: Chunk, result: StepResult) -> tuple[SampledToken, ...]:
        request, rows = chunk.sequence.request, []
        for position, row in zip(chunk.sampled_rows, result.sampled[chunk.sequence.request.id], strict=True):
            planted = self.planted.pop((request.id, position + 1 - len(request.prompt)), row)
            if planted.token is None and planted is not MASK_NOT_READY:
                self.poison.update(self._slots(chunk.sequence, position))
            rows.append(planted)
        return tuple(rows)


class Run:
    """A scheduler that decodes in pairs, a device, and what clients received."""

    def __init__(
        self,
        *requests: Request,
        blocks: int = 64,
        drafts: bool = True,
        windows: Windows = (None,),
        guess: Callable[[Sequence], int] | None = None,
    ) -> None:
        """guess: of the token after the known ones; None guesses right."""
        pools = [BlockPool(blocks, SIZE, window=window) for window in windows]
        self.scheduler = Scheduler(StepLimits(tokens_per_step=64, max_running=8), *pools)
        self.device, self.delivered = Device(windows), Delivered([])
        right = guess or partial(self._next_token, windows)
        if drafts:
            self.scheduler.draft_planner = GuessingPlanner(lambda sequence: [right(sequence)])
        self.plans: list[BatchPlan] = []
        self.failed: dict[str, str] = {}
        self.add(*requests)

    @staticmethod
    def _next_token(windows: Windows, sequence: Sequence) -> int:
        known = [{i: (i, token) for i, token in enumerate(sequence.tokens)}] * len(windows)
        return drawn_token(sequence.request, known, len(sequence.tokens), windows)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.delivered.expect(request)
            self.scheduler.add(request)

    def step(self) -> StepReport:
        plan = self.scheduler.plan()
        assert plan.chunks, "a step without progress"
        self.plans.append(plan)
        report = self.scheduler.commit(plan, self.device.run(plan))
        assert not self.scheduler.violations()
        assert all(
            len(s.tokens) - s.num_computed == 1 for s in self.scheduler.running if s.num_computed and s.num_generated
        )
        self.failed |= {failed.request_id: failed.message for failed in report.failed}
        self.delivered.take(report)
        return report

    def finish(self) -> Run:
        while self.scheduler.has_work:
            self.step()
        assert self.scheduler.pool.counts.active == 0
        return self

    def events(self, name: str) -> list[tuple[int, int | None, FinishReason | None]]:
        return [(event.index, event.token, event.finish) for event in self.delivered.events[name]]


def _request(name: str, length: int = 3, *, first: int = 1, **fields: Any) -> Request:
    return Request(id=name, prompt=tuple(range(first, first + length)), **{"max_tokens": 9, **fields})


def _expected(request: Request, windows: Windows = (None,)) -> list[tuple[int, int | None, FinishReason | None]]:
    return [(each.index, each.token, each.finish) for each in expected_output(request, windows).events[request.id]]


def _tokens(request: Request) -> list[int]:
    return [token for _, token, _ in _expected(request) if token is not None]


def test_rows_of_a_chunk_are_sampled_from_the_given_one_on() -> None:
    scheduler = Scheduler(StepLimits(tokens_per_step=8, max_running=1), BlockPool(1, SIZE))
    scheduler.add(_request("r"))
    waiting = scheduler.waiting[0]
    rows = [Chunk(waiting, *bounds).sampled_rows for bounds in ((0, 2), (0, 3), (2, 3), (2, 5, (7, 8)))]
    assert [list(each) for each in rows] == [[], [2], [2], [2, 3, 4]]


def test_each_row_of_a_pair_is_an_event_with_its_own_index() -> None:
    request = _request("r", max_tokens=7)
    run = Run(request)
    sizes = [len(run.step().events) for _ in range(4)]
    assert sizes == [1, 2, 2, 2], "the prompt's chunk samples its last row only"
    assert run.finish().events("r") == _expected(request)


@pytest.mark.parametrize("place", [0, 1], ids=["first", "second"])
def test_stop_token_ends_a_pair(place: int) -> None:
    tokens = _tokens(_request("r"))
    index = next(i for i in range(1 + place, 9, 2) if tokens.index(tokens[i]) == i)
    request = _request("r", stop_ids=(tokens[index],))
    run = Run(request).finish()
    assert run.events("r") == _expected(request) and len(run.events("r")) == index + 1
    assert run.events("r")[-1][2] is FinishReason.STOP


@pytest.mark.parametrize("max_tokens", [0, 1, 2, 3, 6])
def test_length_may_end_at_either_row_of_a_pair(max_tokens: int) -> None:
    request = _request("r", max_tokens=max_tokens)
    assert Run(request).finish().events("r") == _expected(request)


def test_late_mask_drops_the_second_row_which_a_later_step_computes_again() -> None:
    request = _request("r", grammar="any")
    run = Run(request)
    run.device.planted["r", 2] = MASK_NOT_READY
    assert [len(run.step().events) for _ in range(3)] == [1, 1, 2]
    assert [(c.start, c.stop) for plan in run.plans for c in plan.chunks] == [(0, 3), (3, 5), (4, 6)]
    assert run.finish().events("r") == _expected(request)


def test_late_mask_of_the_first_row_drops_both() -> None:
    request = _request("r", grammar="any")
    run = Run(request)
    run.device.planted["r", 1] = MASK_NOT_READY
    assert [len(run.step().events) for _ in range(3)] == [1, 0, 2]
    assert run.finish().events("r") == _expected(request)


def test_second_row_that_is_not_finite_fails_the_request_after_the_first_token() -> None:
    request, other = _request("r"), _request("other", first=20)
    run = Run(request, other)
    run.device.planted["r", 2] = SampledToken(None)
    run.finish()
    assert run.events("r") == _expected(request)[:2] and run.failed == {"r": NOT_FINITE}
    assert run.events("other") == _expected(other)
    hashes = run.scheduler._allocator._hashes(run.plans[0].chunks[0].sequence, 1)
    assert find_prefix(run.scheduler.pools, hashes) == [[]]


def test_grammar_may_end_at_the_second_row() -> None:
    request = _request("r", grammar="any")
    run = Run(request)
    run.device.planted["r", 2] = SampledToken(None, finish=FinishReason.STOP)
    run.finish()
    assert run.events("r") == [*_expected(request)[:2], (2, None, FinishReason.STOP)]


def test_failure_of_the_second_row_follows_the_token_of_the_first() -> None:
    run = Run(_request("r", grammar="any"))
    run.device.planted["r", 2] = SampledToken(None, failure="too complex")
    run.finish()
    assert len(run.events("r")) == 2 and run.failed == {"r": "too complex"}


def _reuse_after_a_dropped_row() -> None:
    """A pair ends with its first token; the row after it is not finite, and another request gets its block."""
    tokens = _tokens(_request("r", 6))
    run = Run(_request("r", 6, stop_ids=(tokens[1],)), blocks=6)
    run.device.planted["r", 2] = SampledToken(None)
    run.finish()
    assert len(run.events("r")) == 2 and not run.failed
    following = _request("next", 18, first=20, max_tokens=2)
    run.add(following)
    assert run.finish().events("next") == _expected(following)


def test_block_of_a_dropped_row_is_cleared_for_its_next_owner() -> None:
    _reuse_after_a_dropped_row()


def test_dropped_row_whose_block_is_not_cleared_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positive control."""
    monkeypatch.setattr(BlockAllocator, "drop_rows", lambda *_: None)
    with pytest.raises(AssertionError, match="a poisoned block was not cleared"):
        _reuse_after_a_dropped_row()


def test_pair_of_a_cancelled_request_is_dropped() -> None:
    run = Run(_request("r"), _request("other", first=20), blocks=10)
    run.step()
    plan = run.scheduler.plan()
    run.scheduler.mark_launched(plan)
    run.device.planted["r", 1] = run.device.planted["r", 2] = SampledToken(None)
    result = run.device.run(plan)
    run.scheduler.cancel("r")
    report = run.scheduler.commit(plan, result)
    assert [event.request_id for event in report.events] == ["other"] * 2 and not report.failed
    run.delivered.take(report)
    following = _request("next", 12, first=30, max_tokens=4)
    run.add(following)
    assert run.finish().events("next") == _expected(following)


@pytest.mark.parametrize("length", [2, 3], ids=["second row fills the block", "first row fills the block"])
def test_pair_across_the_end_of_a_block_registers_it(length: int) -> None:
    request = _request("r", length)
    run = Run(request)
    assert [len(run.step().events) for _ in range(2)] == [1, 2]
    known = (*request.prompt, *_tokens(request)[:3])
    run.add(Request(id="next", prompt=known, max_tokens=1))
    run.step()
    assert [started.cached_tokens for started in run.plans[-1].started] == [SIZE]


def test_block_that_a_dropped_row_fills_is_not_registered() -> None:
    request = _request("r", 2)
    tokens = _tokens(request)
    run = Run(_request("r", 2, stop_ids=(tokens[1],)))
    run.finish()
    run.add(Request(id="next", prompt=(*request.prompt, *tokens[:3]), max_tokens=1))
    run.step()
    assert [started.cached_tokens for started in run.plans[-1].started] == [0]


def test_preempted_sequence_computes_its_pairs_again() -> None:
    requests = [_request(f"r{i}", 5, first=9 * i, max_tokens=14) for i in range(3)]
    run = Run(*requests, blocks=8).finish()
    assert run.scheduler.preemptions > 0
    assert [run.events(request.id) for request in requests] == [*map(_expected, requests)]
    again = [c for plan in run.plans for c in plan.chunks if c.sequence.preemptions and c.stop - c.start > 2]
    assert any(chunk.stop > len(chunk.sequence.request.prompt) for chunk in again)


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6)])
def test_pairs_give_the_tokens_of_single_rows(windows: Windows) -> None:
    """Also with few blocks, late masks, stop tokens, shared prompts and scored prompts."""
    rng, n_pairs, n_preempted = random.Random(5), 0, 0
    for _ in range(150):
        requests = [
            _request(
                f"r{i}",
                rng.randint(1, 9),
                first=rng.choice([0, 20]),
                max_tokens=rng.randint(0, 12),
                stop_ids=(EOS, *rng.sample(range(VOCAB), 3)),
                grammar=rng.choice(["", "any"]),
                params=SamplingParams(seed=i),
                prompt_logprobs=rng.choice([None, None, 0]),
            )
            for i in range(rng.randint(2, 8))
        ]
        late = {(r.id, rng.randint(0, 9)): MASK_NOT_READY for r in requests if r.grammar}
        runs = [Run(*requests, blocks=rng.randint(6, 8), drafts=each, windows=windows) for each in (False, True)]
        for run in runs:
            run.device.planted = dict(late)
            run.finish()
        single, pairs = ([run.events(request.id) for request in requests] for run in runs)
        assert single == pairs == [_expected(request, windows) for request in requests]
        scores = {request.id: expected_output(request, windows).scores[request.id] for request in requests}
        assert runs[0].delivered.scores == runs[1].delivered.scores == scores
        n_pairs += sum(bool(chunk.drafts) for plan in runs[1].plans for chunk in plan.chunks)
        n_preempted += runs[1].scheduler.preemptions
    assert n_pairs > 1000 and (n_preempted > 20 or None not in windows)  # a window leaves enough blocks


@pytest.mark.parametrize("windows", [(None,), (5,), (None, 6)])
def test_wrong_guesses_change_no_token(windows: Windows) -> None:
    rng, n_steps, n_tokens = random.Random(6), 0, 0
    for _ in range(40):
        requests = [_request(f"r{i}", rng.randint(1, 9), first=9 * i, max_tokens=12) for i in range(rng.randint(1, 6))]
        right = partial(Run._next_token, windows)

        def guess(sequence: Sequence, right: Callable[[Sequence], int] = right) -> int:
            return (right(sequence) + rng.choice([0, 1])) % VOCAB

        run = Run(*requests, blocks=8, windows=windows, guess=guess).finish()
        assert [run.events(r.id) for r in requests] == [_expected(r, windows) for r in requests]
        n_steps += sum(len(plan.chunks) for plan in run.plans)
        n_tokens += sum(len(run.delivered.events[r.id]) for r in requests)
    assert n_tokens / 2 < n_steps < n_tokens, "some guesses were right"


def test_block_of_a_wrong_guess_is_cleared_for_its_next_owner() -> None:
    """Its values may not be finite. The sequence itself overwrites them."""
    run = Run(_request("r", 6, max_tokens=9), blocks=4, guess=lambda _: VOCAB + 1)
    run.step()
    run.step()
    (sequence,) = run.scheduler.running
    assert len(sequence.tokens) == 8 and sequence.num_computed == 7
    dirty = sequence.blocks[0][1]
    run.scheduler.cancel("r")
    run.add(_request("next", 16, first=20, max_tokens=1))
    run.step()
    assert run.plans[-1].clear == ((0, dirty),)
