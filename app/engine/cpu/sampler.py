"""Native sampler: the algorithm of app/engine/sampling/sampler.py in one C++ call (source/draw.h).

Parameters that do not change between the steps of a request are packed once, and cached for as long as the request
samples in every step. The two samplers may differ in the last bits of a sum, so a process uses only one of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Items
from ctypes import CDLL, c_char, c_int64, c_void_p
from dataclasses import dataclass
from operator import is_

import numpy as np

from app.common.types import TokenScore
from app.engine.cpu.executor import ThreadPool
from app.engine.cpu.library import address_of
from app.engine.sampling.parameters import SamplingInput, is_counted, pack_header
from app.engine.sampling.sampled_token import SampledToken
from model.number_formats import Array

_TOP = 20
"""Most likely tokens reported for a row, at most: INK_TOP."""


@dataclass(frozen=True, slots=True)
class _PackedParams:
    """InkParams of a request, and all that its address depends on."""

    address: int
    keepalive: tuple[object, ...]
    """The words at `address`; parameters and stop ids of the request: no others have their identities meanwhile."""
    is_counted: bool
    n_top: int
    """Most likely tokens to report; -1 if no log-probabilities are requested."""


class NativeSampler:
    """Samples rows of one vocabulary. Owns the scratch memory of the library; not thread-safe."""

    def __init__(self, library: CDLL, vocab: int, *, pool: ThreadPool | None = None) -> None:
        """pool: the library's threads, which must outlive the sampler; None samples in the calling thread."""
        library.ink_scratch_bytes.restype, library.ink_scratch_bytes.argtypes = c_int64, [c_int64, c_int64]
        library.ink_sample.argtypes = [*[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 2]
        library.ink_logprobs.argtypes = [*[c_void_p] * 3, *[c_int64] * 4, c_void_p]
        library.ink_sample.restype = library.ink_logprobs.restype = None
        self.vocab = vocab
        self._sample, self._logprobs_of = library.ink_sample, library.ink_logprobs
        self._pool = pool
        self._handle = pool.handle if pool else None
        self._scratch = (c_char * library.ink_scratch_bytes(pool.count if pool else 1, vocab))()
        self._params_cache: dict[tuple[int, int, int], _PackedParams] = {}
        self._batch = _Batch([], [])
        self._outputs = _Outputs(0)
        self._logits_SV = np.empty((0, vocab), np.float32)
        self._address = self._stride = 0  # of those logits

    def sample(self, logits_SV: Array, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See app/engine/sampling/sampler.py; for float32 logits."""
        if logits_SV is not self._logits_SV:  # the executor returns the same array for the same number of rows
            self._logits_SV, self._address, self._stride = logits_SV, address_of(logits_SV), _row_stride(logits_SV)
        assert logits_SV.shape == (len(rows), self.vocab)
        batch = self._batch
        if len(rows) != len(batch.rows) or not all(map(is_, rows, batch.rows)):
            batch = self._batch = _Batch([*rows], [self._packed(row) for row in rows])
            # Drop the parameters of requests that do not sample in this step.
            self._params_cache = dict(zip(map(_key, rows), batch.params, strict=True))
        outputs = self._outputs_for(len(rows))
        shape = (self._stride, self.vocab, len(rows), batch.update(self.vocab))
        self._sample(self._handle, self._scratch, self._address, *shape, outputs.address)
        if batch.max_top < 0:
            tokens = outputs.tokens[: len(rows)].tolist()
            if min(tokens, default=0) >= 0:
                return [*map(SampledToken, tokens)]  # faster than a comprehension
            return [SampledToken(token if token >= 0 else None) for token in tokens]
        return outputs.sampled_tokens(batch.n_top)

    def top_logprobs(self, logits_XV: Array, chosen: Items[int], count: int) -> list[TokenScore] | None:
        """See app/engine/execution/runner.py; for float32 logits."""
        if not (np.isfinite(logits_XV.min()) and np.isfinite(logits_XV.max())):
            return None
        assert logits_XV.shape == (len(chosen), self.vocab)
        outputs = self._outputs_for(len(chosen))
        outputs.tokens[: len(chosen)] = array("q", chosen)
        n_top = min(count, self.vocab)
        shape = (_row_stride(logits_XV), self.vocab, len(chosen), n_top)
        self._logprobs_of(self._handle, self._scratch, address_of(logits_XV), *shape, outputs.address)
        return [outputs.score(row, n_top) for row in range(len(chosen))]

    def _packed(self, row: SamplingInput) -> _PackedParams:
        return self._params_cache.get(_key(row)) or _pack(row, self.vocab)

    def _outputs_for(self, rows: int) -> _Outputs:
        if rows > self._outputs.rows:
            self._outputs = _Outputs(max(rows, 2 * self._outputs.rows))
        return self._outputs


class _Batch:
    """InkRow of each row, for as long as the same rows are sampled: then only their tokens grow."""

    def __init__(self, rows: list[SamplingInput], params: list[_PackedParams]) -> None:
        self.rows, self.params = rows, params
        self.n_top = [each.n_top for each in params]
        self.max_top = max(self.n_top, default=-1)
        self._tokens = [row.tokens for row in rows]
        self._counted = [i for i, each in enumerate(params) if each.is_counted]
        self._fields = array("q", bytes(8 * 4 * len(rows)))
        self._fields[0::4] = array("q", [each.address for each in params])
        self._masks = [(i, np.ascontiguousarray(row.allowed)) for i, row in enumerate(rows) if row.allowed is not None]
        for i, mask in self._masks:
            self._fields[4 * i + 3] = address_of(mask)

    def update(self, vocab: int) -> int:
        """The address of the rows, with the tokens as they are now."""
        assert all(mask.dtype == np.int32 and 32 * len(mask) >= vocab for _, mask in self._masks)
        self._fields[2::4] = array("q", [*map(len, self._tokens)])  # faster from a list
        self._keepalive = [_as_array(self._tokens[i]) for i in self._counted]
        for i, tokens in zip(self._counted, self._keepalive, strict=True):
            self._fields[4 * i + 1] = tokens.buffer_info()[0]
        return self._fields.buffer_info()[0]


class _Outputs:
    """InkSamples: output arrays of the library for up to `rows` rows."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.tokens = array("q", bytes(8 * rows))
        self._logprobs = array("d", bytes(8 * rows))
        self._top_ids = array("q", bytes(8 * rows * _TOP))
        self._top_logprobs = array("d", bytes(8 * rows * _TOP))
        each = (self.tokens, self._logprobs, self._top_ids, self._top_logprobs)
        self._addresses = array("q", [memory.buffer_info()[0] for memory in each])
        self.address = self._addresses.buffer_info()[0]

    def sampled_tokens(self, n_top: list[int]) -> list[SampledToken]:
        """The token of each row, with log-probabilities unless its n_top is -1."""
        ids, logprobs = self._top_ids, self._top_logprobs
        rows = zip(self.tokens, self._logprobs, n_top, range(0, _TOP * len(n_top), _TOP), strict=False)
        return [
            SampledToken(token, own, tuple(zip(ids[at : at + n], logprobs[at : at + n], strict=True)))
            if token >= 0 and n >= 0
            else SampledToken(token if token >= 0 else None)
            for token, own, n, at in rows
        ]

    def score(self, row: int, count: int) -> TokenScore:
        """The sampled token's log-probability, and the `count` most likely tokens."""
        if not count:
            return self._logprobs[row], ()
        part = slice(row * _TOP, row * _TOP + count)
        return self._logprobs[row], tuple(zip(self._top_ids[part], self._top_logprobs[part], strict=True))


def _pack(row: SamplingInput, vocab: int) -> _PackedParams:
    p = row.params
    biases = [(token, bias) for token, bias in p.logit_bias if token < vocab]
    stops = [token for token in row.stop_ids if token < vocab]
    words = array("i", pack_header(row, len(biases), len(stops)))
    words.frombytes(array("d", [bias for _, bias in biases]).tobytes())
    words.extend([*(token for token, _ in biases), *stops])
    n_top = -1 if p.logprobs is None else min(p.logprobs, vocab)
    return _PackedParams(words.buffer_info()[0], (words, p, row.stop_ids), is_counted(p), n_top)


def _key(row: SamplingInput) -> tuple[int, int, int]:
    return id(row.params), row.n_prompt, id(row.stop_ids)


def _as_array(tokens: Items[int]) -> array[int]:
    """The ids as int64, as the engine's sequences already have them."""
    return tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)


def _row_stride(logits_SV: Array) -> int:
    """Numbers from one row to the next."""
    assert logits_SV.dtype == np.float32 and (logits_SV.strides[1] == logits_SV.itemsize or not logits_SV.size)
    return logits_SV.strides[0] // logits_SV.itemsize
