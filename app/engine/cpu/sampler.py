"""Native sampler: app/engine/sampling/sampler.py in one call of C++ (source/draw.h).

Data that does not change between the steps of a request is packed once, and kept for as long as the request samples in
every step. The two samplers may differ in the last bits of a sum, so a process uses only one of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Items
from ctypes import CDLL, c_char, c_int64, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from app.common.types import SamplingParams, TokenScore
from app.engine.sampling.sampler_io import SampledToken, SamplingInput

_TOP = 20
"""Places for the most likely tokens of a row: INK_TOP."""
_PARAMS = struct.Struct("=7d6q")
_ROW_FIELDS = 7


class Pool(Protocol):
    """Threads of the library: app/engine/cpu/compute.py."""

    @property
    def handle(self) -> int:
        """What the library calls them by, until they are closed."""
        ...

    @property
    def count(self) -> int:
        """How many draw at once."""
        ...


@dataclass(frozen=True, slots=True)
class _Packed:
    """InkParams of a request."""

    params: SamplingParams
    address: int
    memory: array[int]
    reads_tokens: bool
    """Whether there are penalties, which need to know what was there before."""
    min_tokens: int
    n_top: int
    """Most likely tokens to report; -1 where no log-probability is asked for."""


class NativeSampler:
    """Draws from rows of one vocabulary. Owns the memory that the library draws in; one call at a time."""

    def __init__(self, library: CDLL, vocab: int, *, pool: Pool | None = None) -> None:
        """pool: the library's threads, which live as long as the sampler; None draws in the thread that calls."""
        for name in ("ink_params_bytes", "ink_row_bytes", "ink_draw_room"):
            getattr(library, name).restype = c_int64
        sizes = (library.ink_params_bytes(), library.ink_row_bytes())
        assert sizes == (_PARAMS.size, 8 * _ROW_FIELDS), f"the library is of another version: {sizes}"
        library.ink_draw_room.argtypes = [c_int64, c_int64]
        library.ink_draw.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5]
        library.ink_score.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 4]
        library.ink_draw.restype = library.ink_score.restype = None
        self.vocab = vocab
        self._draw, self._score = library.ink_draw, library.ink_score
        self._pool = pool
        self._handle = pool.handle if pool else None
        self._room = (c_char * library.ink_draw_room(pool.count if pool else 1, vocab))()
        self._packed: dict[int, _Packed] = {}
        self._answers = _Answers(0)

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """As sampler.sample(), for logits on the CPU."""
        logits_SV = _readable(logits_SV)
        assert logits_SV.shape == (len(rows), self.vocab)
        return self.draw(logits_SV.data_ptr(), rows, logits_SV.stride(0))

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore]:
        """As logprobs.top_logprobs(), for rows of finite logits on the CPU that all ask for as many tokens."""
        logits_XV = _readable(logits_XV)
        assert logits_XV.shape == (len(chosen), self.vocab)
        answers = self._room_for(len(chosen))
        answers.tokens[: len(chosen)] = array("q", chosen)
        most = min(count, self.vocab, _TOP)
        shape = (logits_XV.stride(0), self.vocab, len(chosen), most)
        self._score(self._handle, self._room, logits_XV.data_ptr(), *shape, *answers.addresses)
        return [answers.score(row, most) for row in range(len(chosen))]

    def draw(self, address: int, rows: Items[SamplingInput], stride: int | None = None) -> list[SampledToken]:
        """`address` of float32 [rows, vocab], `stride` numbers from row to row (no more than a row holds)."""
        vocab = self.vocab
        packed: dict[int, _Packed] = {}
        kept: list[object] = []
        fields = array("q")
        tops = []
        for row in rows:
            params = row.params
            known = self._packed.get(id(params))
            if known is None or known.params is not params:
                known = self._packed[id(params)] = _pack(params)
            packed[id(params)] = known
            tops.append(known.n_top)
            tokens, n_prompt = row.tokens, row.n_prompt
            length = len(tokens)
            start = _place(tokens, kept) if known.reads_tokens else 0
            stops, n_stops = 0, 0
            if length - n_prompt < known.min_tokens and row.stop_ids:
                stops, n_stops = _place(row.stop_ids, kept), len(row.stop_ids)
            allowed = 0 if row.allowed is None else _mask(row.allowed, vocab, kept)
            fields.extend((known.address, start, length, n_prompt, stops, n_stops, allowed))
        # Who draws no more is forgotten.
        self._packed = packed
        answers = self._room_for(len(tops))
        shape = (vocab if stride is None else stride, vocab, len(tops), fields.buffer_info()[0])
        self._draw(self._handle, self._room, address, *shape, *answers.addresses)
        if max(tops, default=-1) < 0:
            return [SampledToken(token if token >= 0 else None) for token in answers.tokens[: len(tops)]]
        most = [min(n, vocab, _TOP) for n in tops]
        pairs = enumerate(zip(answers.tokens, most, strict=False))
        return [
            SampledToken(None)
            if token < 0
            else SampledToken(token)
            if n < 0
            else SampledToken(token, *answers.score(row, n))
            for row, (token, n) in pairs
        ]

    def _room_for(self, rows: int) -> _Answers:
        if rows > self._answers.rows:
            self._answers = _Answers(max(rows, 2 * self._answers.rows))
        return self._answers


class _Answers:
    """Memory for what the library says of so many rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tokens = array("q", bytes(8 * rows))
        self._logprobs = array("d", bytes(8 * rows))
        self._top_ids = array("q", bytes(8 * rows * _TOP))
        self._top_logprobs = array("d", bytes(8 * rows * _TOP))
        each = (self.tokens, self._logprobs, self._top_ids, self._top_logprobs)
        self.addresses = tuple(memory.buffer_info()[0] for memory in each)

    def score(self, row: int, count: int) -> TokenScore:
        """The token's log-probability, and the `count` most likely."""
        if not count:
            return self._logprobs[row], ()
        part = slice(row * _TOP, row * _TOP + count)
        return self._logprobs[row], tuple(zip(self._top_ids[part], self._top_logprobs[part], strict=True))


def _pack(p: SamplingParams) -> _Packed:
    n_top = -1 if p.logprobs is None else p.logprobs
    shares = (p.temperature, p.typical_p, p.top_p, p.min_p)
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    numbers = (p.top_k, p.seed, p.choice, p.min_tokens, n_top, len(p.logit_bias))
    memory = array("q", _PARAMS.pack(*shares, *penalties, *numbers))
    # An id too large for the vocabulary changes nothing, nor does one too large for 64 bits.
    memory.extend(min(token, 2**63 - 1) for token, _ in p.logit_bias)
    memory.frombytes(array("d", [bias for _, bias in p.logit_bias]).tobytes())
    is_penalised = p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)
    return _Packed(p, memory.buffer_info()[0], memory, is_penalised, p.min_tokens, n_top)


def _place(tokens: Items[int], kept: list[object]) -> int:
    """Where the ids lie in memory, which `kept` keeps."""
    if not (isinstance(tokens, array) and tokens.typecode == "q"):
        tokens = array("q", tokens)
    kept.append(tokens)
    return tokens.buffer_info()[0]


def _mask(allowed: Tensor, vocab: int, kept: list[object]) -> int:
    assert allowed.dtype == torch.int32 and 32 * len(allowed) >= vocab
    allowed = allowed.contiguous()
    kept.append(allowed)
    return allowed.data_ptr()


def _readable(logits_SV: Tensor) -> Tensor:
    """float32, the numbers of a row side by side."""
    logits_SV = logits_SV.float()
    return logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
