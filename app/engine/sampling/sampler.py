"""The sampler: logits and parameters of each row in, tokens and log-probabilities out. Pure functions on tensors.

Order (docs/sampling.md): log-probabilities of the raw logits; then the stages of logits_processors.py, and the draw.
Rows are independent: the sampled token depends on (seed, choice, position) and the row alone. draw_tokens() serves the
host (TorchSampler) and the reference implementation of the GPU's kernels (app/engine/gpu/kernels).

Random numbers come from Philox 4x32-10 (Salmon et al., 2011), a pure function of (seed, choice, position). On the host
it is computed in plain Python integers for many counters at once: each occupies a lane of 64 bits of one long integer.
A product of two 32-bit words fits into its lane, so one multiplication serves all lanes (6 us a row became 1 us at 32
rows). On a device, the same function computes with tensors of int64, whose low 64 bits are correct if products wrap.

Shape legend: S rows, V vocabulary, N entries of a row, X flattened.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from app.common.types import TokenScore
from app.engine.sampling import parameters as layout
from app.engine.sampling.logits_processors import (
    ADJUSTMENTS,
    FILTERS,
    GREEDY,
    NEG_INF,
    apply_stages,
    inverse_cdf,
    most_likely,
    requested_stages,
)
from app.engine.sampling.parameters import RowParameters
from app.engine.sampling.sampler_io import SampledToken, SamplingInput

_MASK32 = 0xFFFFFFFF
_MIN_FLOAT32 = torch.finfo(torch.float32).min
_PIECE_BYTES = 32 << 20
Word = TypeVar("Word", int, Tensor)


class Draw(NamedTuple):
    """Counter and key of one random number."""

    seed: int
    position: int
    """Position of the token in its sequence."""
    choice: int = 0


def uniforms(draws: Iterable[Draw]) -> list[float]:
    """A number in [0, 1) for each draw: identical on every device, in every batch, and after every restart."""
    words = [
        (d.position & _MASK32, d.position >> 32, d.choice, d.seed & _MASK32, d.seed >> 32 & _MASK32) for d in draws
    ]
    if not words:
        return []
    low, high, choice, key_low, key_high = map(_pack, zip(*words, strict=True))
    first, second, _, _ = philox((low, high, choice, 0), (key_low, key_high), lanes=len(words))
    # 53 bits: the upper 27 of one word, the upper 26 of the next.
    pairs = zip(_unpack(first, len(words)), _unpack(second, len(words)), strict=True)
    return [((a >> 5) * 2**26 + (b >> 6)) * 2.0**-53 for a, b in pairs]


def device_uniforms(seed_low: Tensor, seed_high: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """uniforms() as float64, one for each element. Words may be signed; positions are not negative."""
    position = position.long()
    counter = (position & _MASK32, position >> 32, choice.long() & _MASK32, position * 0)
    first, second, _, _ = philox(counter, (seed_low.long() & _MASK32, seed_high.long() & _MASK32))
    return ((first >> 5) * 2**26 + (second >> 6)).double() * 2.0**-53


def philox(
    counter: tuple[Word, Word, Word, Word], key: tuple[Word, Word], lanes: int = 1
) -> tuple[Word, Word, Word, Word]:
    """Philox 4x32-10 (Salmon et al., SC 2011): four counter words and two key words of 32 bits, in every lane."""
    ones = _pack([1] * lanes)
    mask, weyl0, weyl1 = ones * _MASK32, ones * 0x9E3779B9, ones * 0xBB67AE85
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 & mask ^ c1 ^ k0, p1 & mask, p0 >> 32 & mask ^ c3 ^ k1, p0 & mask
        k0, k1 = k0 + weyl0 & mask, k1 + weyl1 & mask
    return c0, c1, c2, c3


def _pack(words: Iterable[int]) -> int:
    return int.from_bytes(array("Q", words).tobytes(), sys.byteorder)


def _unpack(packed: int, lanes: int) -> array[int]:
    words = array("Q")
    words.frombytes(packed.to_bytes(8 * lanes, sys.byteorder))
    return words


class Drawn(NamedTuple):
    """Result of draw_tokens(), on the device."""

    tokens_S1: Tensor
    """Ids of the vocabulary, also for rows without a result."""
    is_valid_S1: Tensor
    """False if the logits were not finite, or if a grammar allowed no token of this vocabulary."""
    raw_SV: Tensor
    """float32 logits for score(): those of the model, or 0 in rows that are not finite."""


def draw_tokens(logits_SV: Tensor, rows: RowParameters, numbers_S1: Tensor) -> Drawn:
    """One token for each row, drawn with its number in [0, 1); greedy ties go to the lowest id."""
    raw_SV = logits_SV.float()
    # amax and amin propagate NaN; isfinite() over all logits would take most of the time.
    is_valid_S1 = raw_SV.amax(-1, keepdim=True).isfinite() & raw_SV.amin(-1, keepdim=True).isfinite()
    if not (rows.may_wait and is_valid_S1.all()):
        raw_SV = raw_SV.where(is_valid_S1, 0.0)
    logits_SV = apply_stages(raw_SV, rows, ADJUSTMENTS).logits_SV
    is_valid_S1 = is_valid_S1 & (logits_SV.amax(-1, keepdim=True) > NEG_INF)
    tokens_S1 = logits_SV.argmax(-1, keepdim=True) if GREEDY in rows.stages else None
    if tokens_S1 is None or "temperature" in rows.stages:
        # top_p 0 keeps the best token alone, the lowest id among equals.
        numbers_S1 = numbers_S1.where(rows.number(layout.TOP_P) > 0, 0.0)
        drawn_S1 = inverse_cdf(apply_stages(logits_SV, rows, FILTERS).weights_SV, numbers_S1)
        is_greedy_S1 = rows.word(layout.FLAGS) & layout.GREEDY > 0
        tokens_S1 = drawn_S1 if tokens_S1 is None else tokens_S1.where(is_greedy_S1, drawn_S1)
    return Drawn(tokens_S1, is_valid_S1, raw_SV)


def score(raw_SV: Tensor, tokens_S1: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability [S] of each row's token; ids and log-probabilities [S, N] of the `count` most likely tokens.

    For finite logits. Most likely first, the lower id first among equals; a token has one log-probability in both.
    """
    # log_softmax instead of subtracting logsumexp, which sums a single long row in another order than a batch.
    # Clamped above -inf, which a finite logit far below the others could reach.
    logprobs_SV = raw_SV.log_softmax(-1).clamp_(min=_MIN_FLOAT32)
    ids_SN = most_likely(logprobs_SV, count)
    return logprobs_SV.gather(1, tokens_S1).squeeze(1), ids_SN, logprobs_SV.gather(1, ids_SN)


def top_logprobs(logits_XV: Tensor, chosen_X: Tensor, counts: Items[int]) -> list[TokenScore]:
    """For each row of finite logits: the chosen token's log-probability, and the `count` most likely tokens."""
    own_X, ids_XN, values_XN = score(logits_XV.float(), chosen_X[:, None], max(counts))
    table = zip(own_X.tolist(), counts, ids_XN.tolist(), values_XN.tolist(), strict=True)
    return [(own, tuple(zip(ids[:n], values[:n], strict=True))) for own, n, ids, values in table]


class TorchSampler:
    """A `Sampler` of app/engine/execution/runner.py, on any device."""

    def sample(self, logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
        """See sample(). Processes rows in pieces to bound the memory of its copies, up to 20 of them in float32."""
        piece = max(1, _PIECE_BYTES // (4 * logits_SV.shape[1]))
        pieces = (slice(start, start + piece) for start in range(0, len(rows), piece))
        return [token for part in pieces for token in sample(logits_SV[part], rows[part])]

    def top_logprobs(self, logits_XV: Tensor, chosen: Items[int], count: int) -> list[TokenScore]:
        """See top_logprobs()."""
        return top_logprobs(logits_XV, torch.tensor(chosen, device=logits_XV.device), [count] * len(chosen))


def sample(logits_SV: Tensor, rows: Items[SamplingInput]) -> list[SampledToken]:
    """One token for each row; a row with non-finite logits gets no token."""
    device = logits_SV.device
    numbers = uniforms(Draw(row.params.seed, row.position, row.params.choice) for row in rows)
    numbers_S1 = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
    drawn = draw_tokens(logits_SV, row_parameters(rows, logits_SV.shape[1], device), numbers_S1)
    requested = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
    scores: dict[int, TokenScore] = {}
    if requested:
        raw_XV, tokens_X = (x if len(requested) == len(rows) else x[requested] for x in (drawn.raw_SV, drawn.tokens_S1))
        counts = [rows[i].params.logprobs or 0 for i in requested]
        scores = dict(zip(requested, top_logprobs(raw_XV, tokens_X.squeeze(1), counts), strict=True))
    pairs = zip(drawn.tokens_S1.squeeze(1).tolist(), drawn.is_valid_S1.squeeze(1).tolist(), strict=True)
    return [
        SampledToken(token, *scores.get(i, ())) if is_valid else SampledToken(None)
        for i, (token, is_valid) in enumerate(pairs)
    ]


def row_parameters(rows: Items[SamplingInput], vocab: int, device: torch.device | str) -> RowParameters:
    """Uploads the parameters of rows that the host samples."""
    header = bytearray(b"".join(map(layout.pack_header, rows)))
    stop_ids = [[token for token in row.stop_ids if token < vocab] if row.params.min_tokens else [] for row in rows]
    biases = [[(token, bias) for token, bias in row.params.logit_bias if token < vocab] for row in rows]
    counts_SV, counted_ids_SN = _counts(rows, vocab, device)
    return RowParameters(
        stages=requested_stages(rows),
        may_wait=True,
        header_SX=torch.frombuffer(header, dtype=torch.int32).view(len(rows), -1).to(device),
        stop_ids_SN=_table(stop_ids, -1, torch.int64, device),
        bias_ids_SN=_table([[token for token, _ in each] for each in biases], -1, torch.int64, device),
        biases_SN=_table([[bias for _, bias in each] for each in biases], 0.0, torch.float64, device),
        positions_S1=torch.tensor([row.position for row in rows], device=device)[:, None],
        counts_SV=counts_SV,
        counted_ids_SN=counted_ids_SN,
        allowed_SX=_masks(rows, device),
    )


def _table(rows: Items[Items[float]], filler: float, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """[S, N]: rows padded to equal length."""
    most = max(map(len, rows))
    return torch.tensor([[*row, *[filler] * (most - len(row))] for row in rows], dtype=dtype, device=device)


def _counts(
    rows: Items[SamplingInput], vocab: int, device: torch.device | str
) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """counts_SV and counted_ids_SN of RowParameters."""
    tokens = [row.tokens if layout.is_counted(row.params) else () for row in rows]
    if not any(tokens):
        return None, None
    most = max(map(len, tokens))
    ids = array("q")
    for each in tokens:
        ids.extend(each if isinstance(each, array) else array("q", each))
        ids.extend([-1] * (most - len(each)))
    ids_SN = torch.frombuffer(ids, dtype=torch.int64).view(len(rows), most).to(device)
    n_prompt_S1 = torch.tensor([row.n_prompt for row in rows], device=device)[:, None]
    # One more column, for unused entries.
    counts_SX = torch.zeros(len(rows), vocab + 1, dtype=torch.int32, device=device)
    index_SN = ids_SN.where(ids_SN >= 0, vocab) + torch.arange(len(rows), device=device)[:, None] * (vocab + 1)
    is_generated_SN = torch.arange(most, device=device) >= n_prompt_S1
    layout.count_tokens(counts_SX.view(-1), index_SN.view(-1), is_generated_SN.view(-1))
    return counts_SX[:, :vocab], ids_SN.clamp(min=0)  # a token that was not counted stays as it is


def _masks(rows: Items[SamplingInput], device: torch.device | str) -> Tensor | None:
    masks = [row.allowed for row in rows]
    example = next((mask for mask in masks if mask is not None), None)
    if example is None:
        return None
    every_token = torch.full_like(example, -1)
    return torch.stack([every_token if mask is None else mask for mask in masks]).to(device)
