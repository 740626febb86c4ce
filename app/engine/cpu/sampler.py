"""Native sampler: the algorithm of app/engine/sampling/sampler.py in one C++ call (source/draw.h).

Parameters that do not change between the steps of a request are packed once, and cached for as long as the request
samples in every step. The two samplers may differ in the last bits of a sum, so a process uses only one of them.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence as Items
from ctypes import CDLL, c_char, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from app.common.types import SampledToken, SamplingParams, TokenScore
from app.engine.cpu.compute import ThreadPool
from app.engine.sampling.parameters import SamplingInput

_TOP = 20
"""Most likely tokens reported for a row, at most: INK_TOP."""
_PARAMS = struct.Struct("=7d6q")
_ROW_FIELDS = 7


@dataclass(frozen=True, slots=True)
class _PackedParams:
    """InkParams of a request, packed."""

    params: SamplingParams
    address: int
    memory: array[int]
    reads_tokens: bool
    """Whether the request has penalties, which depend on its earlier tokens."""
    min_tokens: int
    n_top: int
    """Most likely tokens to report; -1 if no log-probabilities are requested."""


class NativeSampler:
    """Samples rows of one vocabulary. Owns the scratch memory of the library; not thread-safe."""

    def __init__(self, library: CDLL, vocab: int, *, pool: ThreadPool | None = None) -> None:
        """pool: the library's threads, which must outlive the sampler; None samples in the calling thread."""
        for name in ("ink_params_bytes", "ink_row_bytes", "ink_scratch_bytes"):
            getattr(library, name).restype = c_int64
        sizes = (library.ink_params_bytes(), library.ink_row_bytes())
        assert sizes == (_PARAMS.size, 8 * _ROW_FIELDS), f"the library has other structures: {sizes}"
        library.ink_scratch_bytes.argtypes = [c_int64, c_int64]
        library.ink_sample.argtypes = [c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64, *[c_void_p] * 5]
        library.ink_logprobs.argtypes = [c_void_p, c_void_p, c_void_p, *[c_int64] * 4, *[c_void_p] * 4]
        library.ink_sample.restype = library.ink_logprobs.restype = None
        self.vocab = vocab
        self._sample, self._logprobs_of = library.ink_sample, library.ink_logprobs
        self._pool = pool
        self._handle = pool.handle if pool else None
        self._scratch = (c_char * library.ink_scratch_bytes(pool.count if pool else 1, vocab))()
        self._params_cache: dict[int, _PackedParams] = {}
        self._outputs = _Outputs(0)

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See app/engine/sampling/sampler.py; for logits on the CPU."""
        logits_SV = _contiguous_float32(logits_SV)
        assert logits_SV.shape == (len(rows), self.vocab)
        return self.draw(logits_SV.data_ptr(), rows, logits_SV.stride(0))

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore]:
        """See app/engine/sampling/sampler.py; for rows of finite logits on the CPU that all request `count` tokens."""
        logits_XV = _contiguous_float32(logits_XV)
        assert logits_XV.shape == (len(chosen), self.vocab)
        outputs = self._outputs_for(len(chosen))
        outputs.tokens[: len(chosen)] = array("q", chosen)
        n_top = min(count, self.vocab, _TOP)
        shape = (logits_XV.stride(0), self.vocab, len(chosen), n_top)
        self._logprobs_of(self._handle, self._scratch, logits_XV.data_ptr(), *shape, *outputs.addresses)
        return [outputs.score(row, n_top) for row in range(len(chosen))]

    def draw(self, address: int, rows: Items[SamplingInput], stride: int | None = None) -> list[SampledToken]:
        """Samples from logits [rows, vocab] in float32 at `address`; rows are `stride` numbers apart."""
        vocab = self.vocab
        packed: dict[int, _PackedParams] = {}
        keepalive: list[object] = []
        fields = array("q")
        top_counts = []
        for row in rows:
            params = row.params
            packed_params = self._params_cache.get(id(params))
            if packed_params is None or packed_params.params is not params:
                packed_params = self._params_cache[id(params)] = _pack(params)
            packed[id(params)] = packed_params
            top_counts.append(packed_params.n_top)
            tokens, n_prompt = row.tokens, row.n_prompt
            length = len(tokens)
            start = _address_of(tokens, keepalive) if packed_params.reads_tokens else 0
            stops, n_stops = 0, 0
            if length - n_prompt < packed_params.min_tokens and row.stop_ids:
                stops, n_stops = _address_of(row.stop_ids, keepalive), len(row.stop_ids)
            allowed = 0 if row.allowed is None else _mask_address(row.allowed, vocab, keepalive)
            fields.extend((packed_params.address, start, length, n_prompt, stops, n_stops, allowed))
        # Drop the parameters of requests that do not sample in this step.
        self._params_cache = packed
        outputs = self._outputs_for(len(top_counts))
        shape = (vocab if stride is None else stride, vocab, len(top_counts), fields.buffer_info()[0])
        self._sample(self._handle, self._scratch, address, *shape, *outputs.addresses)
        if max(top_counts, default=-1) < 0:
            return [SampledToken(token if token >= 0 else None) for token in outputs.tokens[: len(top_counts)]]
        counts = [min(n, vocab, _TOP) for n in top_counts]
        pairs = enumerate(zip(outputs.tokens, counts, strict=False))
        return [
            SampledToken(None)
            if token < 0
            else SampledToken(token)
            if n < 0
            else SampledToken(token, *outputs.score(row, n))
            for row, (token, n) in pairs
        ]

    def _outputs_for(self, rows: int) -> _Outputs:
        if rows > self._outputs.rows:
            self._outputs = _Outputs(max(rows, 2 * self._outputs.rows))
        return self._outputs


class _Outputs:
    """Output arrays of the library for up to `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tokens = array("q", bytes(8 * rows))
        self._logprobs = array("d", bytes(8 * rows))
        self._top_ids = array("q", bytes(8 * rows * _TOP))
        self._top_logprobs = array("d", bytes(8 * rows * _TOP))
        each = (self.tokens, self._logprobs, self._top_ids, self._top_logprobs)
        self.addresses = tuple(memory.buffer_info()[0] for memory in each)

    def score(self, row: int, count: int) -> TokenScore:
        """The sampled token's log-probability, and the `count` most likely tokens."""
        if not count:
            return self._logprobs[row], ()
        part = slice(row * _TOP, row * _TOP + count)
        return self._logprobs[row], tuple(zip(self._top_ids[part], self._top_logprobs[part], strict=True))


def _pack(p: SamplingParams) -> _PackedParams:
    n_top = -1 if p.logprobs is None else p.logprobs
    probabilities = (p.temperature, p.typical_p, p.top_p, p.min_p)
    penalties = (p.repetition_penalty, p.presence_penalty, p.frequency_penalty)
    numbers = (p.top_k, p.seed, p.choice, p.min_tokens, n_top, len(p.logit_bias))
    memory = array("q", _PARAMS.pack(*probabilities, *penalties, *numbers))
    # The library ignores ids beyond the vocabulary, so an id beyond 64 bits may be clamped.
    memory.extend(min(token, 2**63 - 1) for token, _ in p.logit_bias)
    memory.frombytes(array("d", [bias for _, bias in p.logit_bias]).tobytes())
    is_penalized = p.repetition_penalty != 1 or bool(p.presence_penalty or p.frequency_penalty)
    return _PackedParams(p, memory.buffer_info()[0], memory, is_penalized, p.min_tokens, n_top)


def _address_of(tokens: Items[int], keepalive: list[object]) -> int:
    """Returns the address of the ids as int64, and appends the array to `keepalive`."""
    if not (isinstance(tokens, array) and tokens.typecode == "q"):
        tokens = array("q", tokens)
    keepalive.append(tokens)
    return tokens.buffer_info()[0]


def _mask_address(allowed: Tensor, vocab: int, keepalive: list[object]) -> int:
    assert allowed.dtype == torch.int32 and 32 * len(allowed) >= vocab
    allowed = allowed.contiguous()
    keepalive.append(allowed)
    return allowed.data_ptr()


def _contiguous_float32(logits_SV: Tensor) -> Tensor:
    """float32, with contiguous rows."""
    logits_SV = logits_SV.float()
    return logits_SV if logits_SV.stride(1) == 1 else logits_SV.contiguous()
