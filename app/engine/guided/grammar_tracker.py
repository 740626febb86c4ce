"""Grammar state of running requests: which tokens each may draw next. Masks are computed off the step.

    step n       forward | draw token n  -> follow(): consume it and compute mask n+1 in a worker thread
    step n+1     forward (meanwhile)     -> allowed(): mask n+1, or LATE: the row sits this step out

The mask also says whether any text can follow, so a text ends with the row after its last token, which draws nothing.
A state fits a sequence as long as it has consumed exactly what was generated; otherwise it is built again.
Shape legend: W words of 32 bits, one bit for each token of the model.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace
from functools import partial

from torch import Tensor

from app.common.fault_injection import is_armed
from app.common.types import Request, Sequence
from app.engine.guided.grammar_state import GrammarMasks, GrammarState
from app.engine.guided.grammar_workers import GrammarWorkers, Job
from app.engine.sampling.sampled_token import LATE, SampledToken

_STEP_SECONDS = 0.002
"""What a step may spend on masks of its rows that are not there when it needs them."""
_LOST_SHARE = 0.02
"""Of the time, what steps may spend beyond that or in vain: where more is lost, they wait for no mask for a while."""
_REPORT_SECONDS = 0.01


class GrammarTracker:
    """Owns the grammar states of running requests. Everything here is called by the engine's thread."""

    def __init__(
        self,
        load: Callable[[], Items[bytes]],
        *,
        vocab_size: int,
        most: int,
        workers: GrammarWorkers | None = None,
    ) -> None:
        """`load` reads the bytes of the tokens, for the first grammar; `most` states of running requests are kept."""
        self._masks = GrammarMasks(load, vocab_size)
        self._most = most
        self._workers = workers or GrammarWorkers()
        self._states: OrderedDict[str, GrammarState] = OrderedDict()
        self._prepared: dict[str, GrammarState] = {}
        self._work: dict[str, float] = {}
        self._patience = _STEP_SECONDS
        self._patience_at = time.monotonic()

    def prepare(self, request: Request) -> Job:
        """Starts to compile the request's grammar and to compute its first mask."""
        state = self._prepared[request.id] = self._build(request, request.generated)
        assert state.job is not None
        return state.job

    @property
    def n_prepared(self) -> int:
        """States of requests that have not begun."""
        return len(self._prepared)

    def forget(self, request_id: str) -> None:
        """Drops what is kept for a request; nothing where it is gone already."""
        for states in (self._states, self._prepared):
            if state := states.pop(request_id, None):
                self._release(state)

    def take_work(self) -> tuple[tuple[str, float], ...]:
        """CPU seconds by request that were not reported yet: when they add up, and at a request's end."""
        for name, state in self._states.items():
            if not state.is_pending and state.seconds - state.reported >= _REPORT_SECONDS:
                self._note_work(name, state)
        work, self._work = tuple(self._work.items()), {}
        return work

    def must_wait(self, sequence: Sequence) -> bool:
        """Whether the sequence's mask is late or likely to be, and steps leave the sequence out until it is there."""
        state = self._states.get(sequence.request.id)
        return state is not None and (state.is_slow or state.is_late) and state.is_pending

    def wait(self, seconds: float) -> None:
        """Waits for the next masks, for an engine that has nothing else to do."""
        pending = [state.job for state in self._states.values() if state.is_pending and state.job]
        self._workers.wait(pending[:1], seconds)

    def allowed(self, sequences: Items[Sequence]) -> list[Tensor | SampledToken | None]:
        """For each sequence the [W] tokens that its grammar allows next, on the CPU, None for all of them; or why no
        token is to be drawn: the mask is late, the text has ended, or the grammar cannot be followed.

        Raises what a job has raised.
        """
        states = [self._state_of(sequence) if _is_guided(sequence) else None for sequence in sequences]
        while len(self._states) > max(self._most, len(sequences)):
            self._release(self._states.popitem(last=False)[1])
        guided = [state for state in states if state]
        self._wait_for(guided)
        self._masks.read([state for state in guided if not state.is_pending and state.verdict is None])
        return [self._verdict(state) if state else None for state in states]

    def follow(self, sequences: Items[Sequence], drawn: Items[SampledToken]) -> list[SampledToken]:
        """Starts to compute the masks that follow what was drawn, which says for a last token that its text may end."""
        return [
            self._follow(sequence, result) if _is_guided(sequence) else result
            for sequence, result in zip(sequences, drawn, strict=True)
        ]

    def _follow(self, sequence: Sequence, result: SampledToken) -> SampledToken:
        state = self._states.get(sequence.request.id)
        if state is None or result.token is None or result.token in sequence.request.stop_ids:
            self.forget(sequence.request.id)
            return result
        state.consumed += 1
        state.verdict = None
        self._submit(state, (result.token,))
        return replace(result, is_undecided=state.consumed >= sequence.request.max_tokens)

    def _state_of(self, sequence: Sequence) -> GrammarState:
        request = sequence.request
        if prepared := self._prepared.pop(request.id, None):
            self._states[request.id] = prepared
        state = self._states.get(request.id)
        if state is None or state.request is not request or state.consumed != sequence.num_generated:
            self.forget(request.id)
            state = self._build(request, sequence.tokens[len(request.prompt) :])
            self._states[request.id] = state
        self._states.move_to_end(request.id)
        return state

    def _build(self, request: Request, tokens: Items[int]) -> GrammarState:
        state = self._masks.new_state(request, len(tokens))
        self._submit(state, tuple(tokens))
        return state

    def _submit(self, state: GrammarState, tokens: tuple[int, ...]) -> None:
        """Where cores are scarce, a mask that is likely to be cheap waits for the step that needs it."""
        is_compile, state.is_late = state.matcher is None, False
        state.job = Job(state.request.salt, partial(self._masks.advance, state, tokens), is_long=is_compile)
        if is_compile or state.is_slow or self._workers.n_spare_cores:
            self._workers.submit(state.job)

    def _wait_for(self, states: Items[GrammarState]) -> None:
        """Takes a little time for masks that are likely to be cheap: computes those that no thread has begun, and waits
        for the others."""
        if is_armed("engine.masks_in_step"):
            for job in [state.job for state in states if state.job]:
                self._workers.submit(job)
                self._workers.wait([job], 60)
        pending = [state for state in states if state.is_pending]
        expected = [state.job for state in pending if state.job and not state.is_slow]
        now = time.monotonic()
        self._patience = min(_STEP_SECONDS, self._patience + (now - self._patience_at) * _LOST_SHARE)
        self._patience_at = now
        if expected and self._patience > 0:
            spent, started = 0.0, time.thread_time()  # of CPU: others on the same cores make no mask expensive
            for job in expected:
                if spent < _STEP_SECONDS:
                    self._workers.run_here(job)
                    spent = time.thread_time() - started
            self._workers.wait([job for job in expected if job.has_started], max(0.0, _STEP_SECONDS - spent))
            is_in_vain = not all(job.done for job in expected)
            self._patience -= max(0.0, spent - _STEP_SECONDS) + _STEP_SECONDS * is_in_vain
        for state in pending:
            if state.is_pending and state.job:
                state.is_late = True
                self._workers.submit(state.job)

    def _verdict(self, state: GrammarState) -> Tensor | SampledToken:
        if state.verdict is None:
            return LATE
        if isinstance(state.verdict, SampledToken):  # the request ends with it
            self.forget(state.request.id)
        return state.verdict

    def _release(self, state: GrammarState) -> None:
        if state.is_pending:
            assert state.job is not None
            self._workers.cancel(state.job)
        self._note_work(state.request.id, state)

    def _note_work(self, name: str, state: GrammarState) -> None:
        seconds = state.seconds
        if seconds > state.reported:
            self._work[name] = self._work.get(name, 0.0) + seconds - state.reported
            state.reported = seconds


def _is_guided(sequence: Sequence) -> bool:
    return bool(sequence.request.guide) and sequence.request.max_tokens > 0
