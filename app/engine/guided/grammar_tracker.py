"""Grammar state of running requests: which tokens each may draw next. Masks are computed off the step.

    step n       forward | draw token n  -> follow(): consume it and compute mask n+1 in a worker thread
    step n+1     forward (meanwhile)     -> allowed(): mask n+1, or LATE: the row sits this step out

The mask also says whether any text can follow, so a text ends with the row after its last token, which draws nothing.
A state fits a sequence as long as it has consumed exactly what was generated; otherwise it is built again.
GrammarState is the state of one generated text; GrammarTracker owns those of all running requests.

Shape legend: S rows, W words of 32 bits, one bit for each token of the model and one for the end of the text.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from app.common.fault_injection import fault, is_armed
from app.common.llguidance_adapter import GrammarVocabulary
from app.common.types import FinishReason, Request, Sequence
from app.engine.guided.grammar_workers import GrammarWorkers, Job
from app.engine.sampling.sampler_io import LATE, SampledToken

_SLOW_SECONDS = 0.001
"""A mask of so much CPU time will be late: steps leave the request out until its next mask is there."""
_REQUEST_SECONDS, _TOKEN_SECONDS = 0.5, 0.002
"""CPU time that the grammar of one request may take: so much, and so much more for each token."""
_STUCK = "the guide leads where none of this model's tokens can follow"
_TOO_COMPLEX = (
    "the guide is too complex to be followed any further: make it simpler (fewer ways to read the same text, no "
    "repetition of what may be empty, fewer optional fields)"
)
_OVER_BUDGET = (
    "the guide is too complex: following it took {:.1f} s of computing, and {} tokens may take {:.1f} s: make it "
    "simpler (fewer ways to read the same text, smaller repetition counts)"
)


@dataclass(slots=True, eq=False)
class GrammarState:
    """Where one request's text stands in its grammar. Its job alone touches matcher and mask until it is done."""

    request: Request
    mask_W: Tensor
    matcher: Any = None
    consumed: int = 0
    """Generated tokens that the matcher has consumed, or will have when the job is done."""
    job: Job | None = None
    problem: str = ""
    """Why the grammar cannot be followed, for the user."""
    seconds: float = 0.0
    """CPU time that went into it."""
    reported: float = 0.0
    mask_seconds: float = 0.0
    """Of that, what the last mask took."""
    is_slow: bool = False
    """Whether the last mask was expensive: the next one is likely to be."""
    is_late: bool = False
    """Whether a step had to go without the mask that the job computes."""
    verdict: Tensor | SampledToken | None = None
    """[W] of tokens that may follow, or why none is to be drawn; None until the mask was read."""

    @property
    def is_pending(self) -> bool:
        """Whether its job is still to be done."""
        return self.job is not None and not self.job.done

    @property
    def budget(self) -> float:
        """CPU seconds that it may have taken so far."""
        return _REQUEST_SECONDS + _TOKEN_SECONDS * self.consumed


class GrammarMasks:
    """Advances grammar states and reads their masks. advance() may be called from any thread."""

    def __init__(self, load: Callable[[], Items[bytes]], vocab_size: int) -> None:
        """`load` reads the bytes of the tokens, for the first grammar."""
        self._load = load
        self._size = vocab_size
        self._vocabulary_lock = Lock()
        self._known_vocabulary: GrammarVocabulary | None = None
        self._texts_W: Tensor | None = None
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def new_state(self, request: Request, consumed: int) -> GrammarState:
        """A state that is to be advanced by so many tokens."""
        return GrammarState(request, torch.zeros(_words(self._size + 1), dtype=torch.int32), consumed=consumed)

    def advance(self, state: GrammarState, tokens: tuple[int, ...]) -> None:
        """A job: consumes `tokens` and computes the mask behind them."""
        try:
            vocabulary = self._vocabulary()
        except ValueError as error:  # the tokenizer's files cannot be read any more
            state.problem = f"the guide cannot be followed: {error}"
            return
        started = time.thread_time()
        try:
            if state.matcher is None:
                fault("engine.guide", state.request)
                state.matcher = vocabulary.matcher(state.request.grammar)
            fault("engine.mask", state.request)
            for token in tokens:  # one by one: the GIL is kept for as long as a call takes
                state.matcher.consume_token(token)
            if not state.matcher.is_error():
                state.matcher.unsafe_compute_mask_ptr(state.mask_W.data_ptr(), state.mask_W.nbytes)
        finally:
            state.mask_seconds = time.thread_time() - started
            state.seconds += state.mask_seconds

    def read(self, states: Items[GrammarState]) -> None:
        """What each mask that was computed says of the next token."""
        for state in states:
            if state.job and state.job.error:
                raise state.job.error
        followed = [state for state in states if not self._has_failed(state)]
        if not followed:
            return
        end = self._size
        masks_SW = torch.stack([state.mask_W for state in followed])
        may_end_S1 = (masks_SW[:, end // 32] >> end % 32 & 1)[:, None]
        ends_SW = torch.stack([self._ends_of(state.request.stop_ids) for state in followed])
        texts_SW = masks_SW & self._text_bits() & ~ends_SW
        allowed_SW = (texts_SW | ends_SW * may_end_S1)[:, : _words(self._size)]
        answers = zip(followed, allowed_SW, texts_SW.any(-1).tolist(), may_end_S1[:, 0].tolist(), strict=True)
        for state, allowed_W, has_text, may_end in answers:
            state.is_slow = state.mask_seconds > _SLOW_SECONDS
            if state.consumed >= state.request.max_tokens:
                state.verdict = SampledToken(None, finish=FinishReason.LENGTH if has_text else FinishReason.STOP)
            elif has_text:
                state.verdict = allowed_W
            elif may_end:
                state.verdict = SampledToken(None, finish=FinishReason.STOP)
            else:
                state.verdict = SampledToken(None, failure=_STUCK)

    def _has_failed(self, state: GrammarState) -> bool:
        if not state.problem and state.matcher.is_error():
            state.problem = _STUCK if state.matcher.get_error().startswith("NoExtension") else _TOO_COMPLEX
        if not state.problem and state.seconds > state.budget:
            state.problem = _OVER_BUDGET.format(state.seconds, state.consumed, state.budget)
        if state.problem:
            is_full = 0 < state.request.max_tokens <= state.consumed
            state.verdict = (
                SampledToken(None, finish=FinishReason.LENGTH) if is_full else SampledToken(None, failure=state.problem)
            )
        return bool(state.problem)

    def _vocabulary(self) -> GrammarVocabulary:
        with self._vocabulary_lock:
            if self._known_vocabulary is None:
                self._known_vocabulary = GrammarVocabulary(self._load(), self._size)
            return self._known_vocabulary

    def _text_bits(self) -> Tensor:
        """[W]: the tokens that are text."""
        if self._texts_W is None:
            bytes_of = self._vocabulary().bytes_of
            self._texts_W = _bits([i for i, data in enumerate(bytes_of) if data], self._size + 1)
        return self._texts_W

    def _ends_of(self, stop_ids: tuple[int, ...]) -> Tensor:
        if stop_ids not in self._ends:
            self._ends = {stop_ids: _bits(stop_ids, self._size + 1)}  # most requests have the model's
        return self._ends[stop_ids]


def _words(size: int) -> int:
    return -(-size // 32)


def _bits(ids: Items[int], size: int) -> Tensor:
    """[W] with the bits of `ids` set."""
    bits = torch.zeros(_words(size) * 32, dtype=torch.int64)
    bits[list(ids)] = 1
    return (bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)


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
        state.job = Job(state.request.cache_namespace, partial(self._masks.advance, state, tokens), is_long=is_compile)
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
    return bool(sequence.request.grammar) and sequence.request.max_tokens > 0
