"""Which tokens the guides of running requests allow next. Knows tensors and llguidance's matchers, no queue, no pipe.

A matcher follows one request, token by token: before a draw it says what is allowed, after it what that leaves. It fits
the request as long as it has consumed exactly what was generated; else it is built again from the tokens.
Shape legend: S rows, W words of 32 bits, one bit for each token of the model.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from app.engine.matcher import Vocabulary, executor
from app.engine.result import Drawn
from app.engine.types import Request, Sequence

# Handing eight rows to two threads of two busy cores took 2.4 times as long as one row after the other (2026-11-21).
_ROWS_FOR_THREADS, _CORES_FOR_THREADS = 16, 4
_STUCK = "the guide leads where none of this model's tokens can follow"
_TOO_COMPLEX = "the guide is too complex to be followed any further: make it simpler"


@dataclass(slots=True, eq=False)
class _Followed:
    """A guide on its way. Owned by Guides."""

    request: Request
    matcher: Any
    consumed: int = 0
    allowed_W: Tensor | None = None
    """None until it was computed."""
    complete: bool = False
    """No text can follow."""
    problem: str = ""
    """Why the guide cannot be followed from here, for the user."""

    @property
    def goes_on(self) -> bool:
        """Whether there is room for another token."""
        return self.consumed < self.request.max_tokens

    def consume(self, token: int) -> bool:
        """Whether there is more to follow: no token that ends the text, and no mishap."""
        self.consumed += 1
        self.allowed_W = None
        if token in self.request.stop_ids:
            self.complete = True
        elif not self.matcher.consume_token(token):
            self.problem = _TOO_COMPLEX
        return not (self.complete or self.problem)

    def settle(self, allowed_W: Tensor, *, has_text: bool, may_end: bool) -> None:
        """Takes what llguidance said of the next token."""
        if self.matcher.is_error():
            self.problem = _STUCK if self.matcher.get_error().startswith("NoExtension") else _TOO_COMPLEX
        elif not (has_text or may_end):
            self.problem = _STUCK
        else:
            self.allowed_W = allowed_W
            self.complete = not has_text


class Guides:
    """Owns one matcher for each guided request. prepare() may be called from another thread, nothing else."""

    def __init__(self, load: Callable[[], Items[bytes]], *, vocab_size: int, most: int) -> None:
        """`load` reads the bytes of the tokens, at the first guide; `most` matchers are kept."""
        self._load = load
        self._size = vocab_size
        self._most = most
        self._followed: OrderedDict[str, _Followed] = OrderedDict()
        self._prepared: dict[str, _Followed] = {}
        self._lock = Lock()
        self._ends: dict[tuple[int, ...], Tensor] = {}

    def prepare(self, request: Request) -> None:
        """Compiles the request's guide, which may take its time, so that no step has to wait for it."""
        followed = self._build(request, request.generated)
        with self._lock:
            self._prepared[request.id] = followed

    @property
    def n_prepared(self) -> int:
        """Guides of requests that have not begun."""
        return len(self._prepared)

    def forget(self, request_id: str) -> None:
        """Drops what is kept for a request; nothing where it is gone already."""
        self._followed.pop(request_id, None)
        with self._lock:
            self._prepared.pop(request_id, None)

    def allowed(self, sequences: Items[Sequence]) -> list[Tensor | None]:
        """[W] for each sequence with a guide that can be followed, on the CPU; None allows everything."""
        found = [self._fitting(sequence) if _is_guided(sequence) else None for sequence in sequences]
        while len(self._followed) > max(self._most, len(found)):
            self._followed.popitem(last=False)
        self._compute([each for each in found if each and each.allowed_W is None and not each.problem])
        return [each.allowed_W if each and not each.problem else None for each in found]

    def follow(self, sequences: Items[Sequence], drawn: Items[Drawn]) -> list[Drawn]:
        """Takes in what was drawn from what allowed() said: some tokens complete their guide. Where it could not be
        followed up to here, there is no token."""
        found = [self._followed.get(sequence.request.id) if _is_guided(sequence) else None for sequence in sequences]
        told = [_told(each, result) for each, result in zip(found, drawn, strict=True)]
        moved = [
            each
            for each, result in zip(found, told, strict=True)
            if each and result.token is not None and each.consume(result.token)
        ]
        self._compute(moved)
        for row, each in enumerate(found):
            if each and each.complete:
                told[row] = replace(told[row], complete=True)
            if each and (each.complete or told[row].token is None or not each.goes_on):
                self._followed.pop(each.request.id)
        return told

    @cached_property
    def _vocabulary(self) -> Vocabulary:
        return Vocabulary(self._load(), self._size)

    @cached_property
    def _threads(self) -> Any:
        """An executor; None where there are too few cores for one to help."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        return executor(cores // 2) if cores >= _CORES_FOR_THREADS else None

    @cached_property
    def _texts(self) -> Tensor:
        """The tokens that are text."""
        return _bits([i for i, data in enumerate(self._vocabulary.bytes_of) if data], self._size + 1)

    def _fitting(self, sequence: Sequence) -> _Followed:
        request = sequence.request
        with self._lock:
            if request.id in self._prepared:
                self._followed[request.id] = self._prepared.pop(request.id)
        followed = self._followed.get(request.id)
        if followed is None or followed.request is not request or followed.consumed != sequence.num_generated:
            followed = self._build(request, sequence.tokens[len(request.prompt) :])
            self._followed[request.id] = followed
        self._followed.move_to_end(request.id)
        return followed

    def _build(self, request: Request, tokens: Items[int]) -> _Followed:
        try:
            matcher = self._vocabulary.matcher(request.guide)
        except ValueError as error:  # the tokenizer cannot be read any more
            return _Followed(request, None, problem=f"the guide cannot be followed: {error}")
        followed = _Followed(request, matcher, len(tokens))
        if matcher.is_error() or (tokens and not matcher.consume_tokens(list(tokens))):
            followed.problem = _TOO_COMPLEX
        return followed

    def _compute(self, followed: Items[_Followed]) -> None:
        """What each of them allows now, and whether that is the end."""
        if not followed:
            return
        end = self._vocabulary.end
        masks_SW = torch.empty((len(followed), len(self._texts)), dtype=torch.int32)
        self._fill(masks_SW, [each.matcher for each in followed])
        may_end_S1 = (masks_SW[:, end // 32] >> end % 32 & 1)[:, None]
        ends_SW = torch.stack([self._ends_of(each.request.stop_ids) for each in followed])
        texts_SW = masks_SW & self._texts & ~ends_SW
        allowed_SW = (texts_SW | ends_SW * may_end_S1)[:, : -(-self._size // 32)]
        answers = zip(followed, allowed_SW, texts_SW.any(-1).tolist(), may_end_S1[:, 0].tolist(), strict=True)
        for each, allowed_W, has_text, may_end in answers:
            each.settle(allowed_W, has_text=has_text, may_end=bool(may_end))

    def _fill(self, masks_SW: Tensor, matchers: Items[Any]) -> None:
        start, row_bytes = masks_SW.data_ptr(), masks_SW.shape[1] * 4
        if self._threads and len(matchers) >= _ROWS_FOR_THREADS:
            pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
            self._threads.unsafe_compute_mask_ptr(pairs, start, row_bytes, len(matchers))
        else:
            for row, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(start + row * row_bytes, row_bytes)

    def _ends_of(self, stop_ids: tuple[int, ...]) -> Tensor:
        if stop_ids not in self._ends:
            self._ends = {stop_ids: _bits(stop_ids, self._size + 1)}  # most requests have the model's
        return self._ends[stop_ids]


def _told(followed: _Followed | None, result: Drawn) -> Drawn:
    if followed and followed.problem and result.token is not None:
        return Drawn(None, failure=followed.problem)
    return result


def _is_guided(sequence: Sequence) -> bool:
    return bool(sequence.request.guide) and sequence.request.max_tokens > 0


def _bits(ids: Items[int], size: int) -> Tensor:
    """[W] with the bits of `ids` set."""
    bits = torch.zeros(-(-size // 32) * 32, dtype=torch.int64)
    bits[list(ids)] = 1
    return (bits.view(-1, 32) << torch.arange(32)).sum(-1).to(torch.int32)
