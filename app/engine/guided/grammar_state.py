"""Grammar state of one generated text, and the masks of tokens that may follow it.

Shape legend: S rows, W words of 32 bits, one bit for each token of the model and one for the end of the text.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from app.common.fault_injection import fault
from app.common.llguidance_adapter import GrammarVocabulary
from app.common.types import FinishReason, Request
from app.engine.guided.grammar_workers import Job
from app.engine.sampling.sampled_token import SampledToken

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
                state.matcher = vocabulary.matcher(state.request.guide)
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
