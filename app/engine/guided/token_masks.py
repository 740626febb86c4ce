"""The state of one guided text in its grammar, and the masks of the tokens that may follow.

Shape legend: S rows, W words of 32 bits, one bit for each token of the model and one for the end of the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from threading import Lock
from typing import Any

import numpy as np

from app.common.fault_injection import fault
from app.common.llguidance_adapter import GrammarVocabulary
from app.common.types import FinishReason, Request
from app.engine.guided.grammar_workers import Job
from app.engine.sampling.sampled_token import SampledToken
from model.number_formats import Array

_SLOW_SECONDS = 0.001
"""A mask that takes longer on the CPU will be late: steps leave the request out until its next mask is ready."""
_REQUEST_SECONDS, _TOKEN_SECONDS = 0.5, 0.002
"""CPU time that the grammar of one request may take: a constant, and an allowance per generated token."""
_NO_TOKEN_FITS = "the guide leads to a point where none of this model's tokens can follow"
_TOO_COMPLEX = (
    "the guide is too complex to be followed any further: make it simpler (fewer ways to parse the same text, no "
    "repetition of parts that may be empty, fewer optional fields)"
)
_OVER_BUDGET = (
    "the guide is too complex: following it took {:.1f} s of CPU time, but {} tokens may take at most {:.1f} s: make "
    "it simpler (fewer ways to parse the same text, smaller repetition counts)"
)


@dataclass(slots=True, eq=False)
class GrammarState:
    """Position of one request's text in its grammar. Until its job is done, only the job accesses matcher and mask."""

    request: Request
    mask_W: Array
    matcher: Any = None
    consumed: int = 0
    """Generated tokens that the matcher has consumed, or will have consumed when the job is done."""
    job: Job | None = None
    problem: str = ""
    """User-facing reason why the grammar cannot be followed."""
    seconds: float = 0.0
    """CPU time of all jobs."""
    reported: float = 0.0
    """Part of `seconds` that was reported."""
    mask_seconds: float = 0.0
    """CPU time of the last job: consuming tokens and computing the mask."""
    is_slow: bool = False
    """Whether the last mask was expensive, so that the next one probably is, too."""
    is_late: bool = False
    """Whether a step skipped the row because its job was not done."""
    outcome: Array | SampledToken | None = None
    """[W] of tokens that may follow, or the row's result without sampling; None until the mask was read."""
    drafts: tuple[int, ...] = ()
    """Tokens that the step verifies: draft_masks_KW has the masks after each of them once draft_job is done."""
    draft_masks_KW: Array | None = None
    draft_job: Job | None = None
    draft_seconds: float = 0.0
    """CPU time of drafts, which does not count against `budget`: drafts must not make a text fail."""
    has_drafted: bool = False
    """Whether the matcher has ever consumed drafts, and rolled them back."""

    @property
    def is_pending(self) -> bool:
        """Whether the state's job is not done yet."""
        return self.job is not None and not self.job.done

    @property
    def is_drafting(self) -> bool:
        """Whether a thread may still be using the matcher for drafts."""
        return self.draft_job is not None and not self.draft_job.done

    @property
    def budget(self) -> float:
        """Upper limit of `seconds` so far."""
        return _REQUEST_SECONDS + _TOKEN_SECONDS * self.consumed


class GrammarMasks:
    """Advances grammar states and reads their masks. advance() may be called from any thread."""

    def __init__(self, load_token_bytes: Callable[[], Items[bytes]], vocab_size: int) -> None:
        """The first grammar calls `load_token_bytes` to read the bytes of each token."""
        self._load_token_bytes = load_token_bytes
        self._size = vocab_size
        self._vocabulary_lock = Lock()
        self._cached_vocabulary: GrammarVocabulary | None = None
        self._text_mask_W: Array | None = None
        self._stop_masks: dict[tuple[int, ...], Array] = {}

    def new_state(self, request: Request, consumed: int) -> GrammarState:
        """A new state that advance() brings to `consumed` tokens."""
        return GrammarState(request, np.zeros(_words(self._size + 1), np.int32), consumed=consumed)

    def advance(self, state: GrammarState, tokens: tuple[int, ...]) -> None:
        """Work of a job: consumes `tokens` and computes the mask that follows them."""
        try:
            vocabulary = self._vocabulary()
        except ValueError as error:  # the tokenizer's files are no longer readable
            state.problem = f"the guide cannot be followed: {error}"
            return
        started = time.thread_time()
        try:
            if state.matcher is None:
                fault("engine.guide", state.request)
                state.matcher = vocabulary.matcher(state.request.grammar)
            fault("engine.mask", state.request)
            for token in tokens:  # one by one: each call holds the GIL
                state.matcher.consume_token(token)
            if not state.matcher.is_error():
                state.matcher.unsafe_compute_mask_ptr(state.mask_W.ctypes.data, state.mask_W.nbytes)
        finally:
            state.mask_seconds = time.thread_time() - started
            state.seconds += state.mask_seconds

    def read(self, states: Items[GrammarState]) -> None:
        """Sets the outcome of each state from its computed mask."""
        for state in states:
            if state.job and state.job.error:
                raise state.job.error
        valid = [state for state in states if not self._has_failed(state)]
        if not valid:
            return
        outcomes = self._outcomes(
            np.stack([state.mask_W for state in valid]),
            np.stack([self._stop_mask(state.request.stop_ids) for state in valid]),
            [state.request.max_tokens - state.consumed for state in valid],
        )
        for state, outcome in zip(valid, outcomes, strict=True):
            state.is_slow = state.mask_seconds > _SLOW_SECONDS
            state.outcome = outcome

    def allowed_drafts(self, state: GrammarState, drafts: tuple[int, ...]) -> tuple[int, ...]:
        """The drafts up to the first one that the grammar, in a state whose mask was read, does not let follow."""
        text_W, stops = self._text_mask(), state.request.stop_ids
        for count, token in enumerate(drafts):
            if token in stops or not text_W[token // 32] >> token % 32 & 1:
                drafts = drafts[:count]
                break
        if not drafts:
            return ()
        count = state.matcher.validate_tokens([*drafts])
        return drafts[:count] if count > 0 else ()

    def advance_drafts(self, state: GrammarState) -> None:
        """Work of a job: computes the mask after each of state.drafts, and rolls them back. May leave an error."""
        masks_KW, matcher = np.zeros((len(state.drafts), len(state.mask_W)), np.int32), state.matcher
        consumed, started = 0, time.thread_time()
        state.draft_masks_KW = None
        try:
            fault("engine.draft_masks", state.request)
            for token, mask_W in zip(state.drafts, masks_KW, strict=True):
                matcher.consume_token(token)
                consumed += 1
                if matcher.is_error():
                    return
                matcher.unsafe_compute_mask_ptr(mask_W.ctypes.data, mask_W.nbytes)
            matcher.rollback(consumed)
            state.draft_masks_KW = masks_KW
        finally:
            state.draft_seconds += time.thread_time() - started

    def read_drafts(self, state: GrammarState) -> list[Array | SampledToken]:
        """The outcome of the row of each draft, from masks that are computed."""
        assert state.draft_masks_KW is not None
        left = state.request.max_tokens - state.consumed
        ends_W = self._stop_mask(state.request.stop_ids)
        return self._outcomes(
            state.draft_masks_KW,
            np.broadcast_to(ends_W, state.draft_masks_KW.shape),
            [left - number for number in range(1, len(state.drafts) + 1)],
        )

    def _outcomes(self, masks_SW: Array, ends_SW: Array, left: Items[int]) -> list[Array | SampledToken]:
        """What each mask means. ends_SW: the tokens that end a text. left: tokens that the request may still have."""
        end = self._size
        may_end_S1 = (masks_SW[:, end // 32] >> end % 32 & 1)[:, None]
        texts_SW = masks_SW & self._text_mask() & ~ends_SW
        allowed_SW = (texts_SW | ends_SW * may_end_S1)[:, : _words(self._size)]
        n_texts: list[int] = np.count_nonzero(texts_SW, axis=-1).tolist()
        rows = zip(allowed_SW, n_texts, may_end_S1[:, 0].tolist(), left, strict=True)
        return [_outcome(allowed_W, n_text > 0, may_end, tokens > 0) for allowed_W, n_text, may_end, tokens in rows]

    def _has_failed(self, state: GrammarState) -> bool:
        if not state.problem and state.matcher.is_error():
            state.problem = _NO_TOKEN_FITS if state.matcher.get_error().startswith("NoExtension") else _TOO_COMPLEX
        if not state.problem and state.seconds > state.budget:
            state.problem = _OVER_BUDGET.format(state.seconds, state.consumed, state.budget)
        if state.problem:
            is_at_limit = 0 < state.request.max_tokens <= state.consumed
            state.outcome = (
                SampledToken(None, finish=FinishReason.LENGTH)
                if is_at_limit
                else SampledToken(None, failure=state.problem)
            )
        return bool(state.problem)

    def _vocabulary(self) -> GrammarVocabulary:
        with self._vocabulary_lock:
            if self._cached_vocabulary is None:
                self._cached_vocabulary = GrammarVocabulary(self._load_token_bytes(), self._size)
            return self._cached_vocabulary

    def _text_mask(self) -> Array:
        """[W] with the bits of tokens that are text."""
        if self._text_mask_W is None:
            bytes_of = self._vocabulary().bytes_of
            self._text_mask_W = _bits([i for i, data in enumerate(bytes_of) if data], self._size + 1)
        return self._text_mask_W

    def _stop_mask(self, stop_ids: tuple[int, ...]) -> Array:
        if stop_ids not in self._stop_masks:
            self._stop_masks = {stop_ids: _bits(stop_ids, self._size + 1)}  # most requests use the model's stop ids
        return self._stop_masks[stop_ids]


def _outcome(allowed_W: Array, has_text: bool, may_end: int, may_continue: bool) -> Array | SampledToken:
    if not may_continue:
        return SampledToken(None, finish=FinishReason.LENGTH if has_text else FinishReason.STOP)
    if has_text:
        return allowed_W
    if may_end:
        return SampledToken(None, finish=FinishReason.STOP)
    return SampledToken(None, failure=_NO_TOKEN_FITS)


def _words(size: int) -> int:
    return -(-size // 32)


def _bits(ids: Items[int], size: int) -> Array:
    """[W] with the bits of `ids` set."""
    bits = np.zeros(_words(size) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
