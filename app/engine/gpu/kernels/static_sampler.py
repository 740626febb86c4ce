"""Sampler in plain torch without data-dependent control flow, and Philox random numbers on tensors.

All shapes are static and nothing waits for the device, so it can be captured in a CUDA graph. Every row runs every
filter: it is the reference implementation of the fast triton/sampler.py. docs/sampling.md specifies the order.

Shape legend: S sampled rows, V vocabulary, W words of a row, N most likely tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from app.common.types import MAX_BIASES
from app.engine.gpu.kernels import sampling_state as layout
from app.engine.gpu.kernels.sampling_state import TOP, SampleOut, SamplingTable
from app.engine.sampling.logits_processors import block_sums, inverse_cdf, threshold_in_sorted

# 32-bit words are stored in int64: their products may wrap around, but all 64 bits are correct.

_MASK32 = 0xFFFFFFFF


def uniforms(seed_low: Tensor, seed_high: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """float64 in [0, 1), one for each element. Words may be signed; positions are not negative."""
    k0, k1 = seed_low.long() & _MASK32, seed_high.long() & _MASK32
    c0, c1, c2 = position.long() & _MASK32, position.long() >> 32, choice.long() & _MASK32
    c3 = c0 * 0
    for _ in range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = p1 >> 32 & _MASK32 ^ c1 ^ k0, p1 & _MASK32, p0 >> 32 & _MASK32 ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = k0 + 0x9E3779B9 & _MASK32, k1 + 0xBB67AE85 & _MASK32
    number: Tensor = ((c0 >> 5) * 2**26 + (c1 >> 6)).double() * 2.0**-53
    return number


_NEG_INF = float("-inf")
_FLOAT_MAX = torch.finfo(torch.float32).max
_SMALLEST = 5e-324


class _Words:
    """The packed parameters of each sampled row, as columns."""

    def __init__(self, words_SW: Tensor) -> None:
        self._ints_SW = words_SW
        self._floats_SX = words_SW.view(torch.float64)

    def number(self, index: int) -> Tensor:
        """[S, 1] float64."""
        return self._floats_SX[:, index : index + 1]

    def word(self, index: int) -> Tensor:
        """[S, 1] int64."""
        return self._ints_SW[:, index : index + 1].long()

    @property
    def stops(self) -> Tensor:
        """[S, MAX_STOPS] int64, -1 for unused entries."""
        return self._ints_SW[:, layout.STOPS : layout.BIAS_IDS].long()

    @property
    def biases(self) -> tuple[Tensor, Tensor]:
        """[S, MAX_BIASES] ids, -1 for unused entries, and float64 biases."""
        first = layout.BIASES // 2
        return (
            self._ints_SW[:, layout.BIAS_IDS : layout.BIASES].long(),
            self._floats_SX[:, first : first + MAX_BIASES],
        )


def sample(logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, table: SamplingTable, out: SampleOut) -> None:
    """Samples one token for each row, with log-probabilities, and counts the tokens of rows with penalties.

    positions_S: of the new tokens in their sequences. A row with logits that are not finite gets -1 and is not counted.
    """
    words = _Words(table.words_RW.index_select(0, rows_S))
    raw_SV = logits_SV.float()
    finite_S1 = raw_SV.amax(-1, keepdim=True).isfinite() & raw_SV.amin(-1, keepdim=True).isfinite()
    raw_SV = raw_SV.where(finite_S1, 0.0)
    counts_SV = None if table.counts_RV is None else table.counts_RV.index_select(0, rows_S)
    adjusted_SV = _adjusted(raw_SV, words, positions_S[:, None], counts_SV)
    best_S1, greedy_S1 = adjusted_SV.max(-1, keepdim=True)[0], adjusted_SV.argmax(-1, keepdim=True)
    numbers_S1 = uniforms(
        words.word(layout.SEED), words.word(layout.SEED + 1), words.word(layout.CHOICE), positions_S[:, None]
    )
    # With top_p 0 only the most likely token is left: the one with the lowest id if several tie.
    numbers_S1 = numbers_S1.where(words.number(layout.TOP_P) > 0, 0.0)
    drawn_S1 = inverse_cdf(_weights(adjusted_SV, best_S1, words), numbers_S1)[:, None]
    flags_S1 = words.word(layout.FLAGS)
    chosen_S1 = greedy_S1.where(flags_S1 & layout.GREEDY > 0, drawn_S1)
    out.tokens_S.copy_(chosen_S1.where(finite_S1, -1).squeeze(1))
    if table.counts_RV is not None:
        index_S1 = rows_S.long()[:, None] * table.vocab_size + chosen_S1
        increment_S1 = 2 * ((flags_S1 & layout.COUNTED > 0) & finite_S1)
        table.counts_RV.view(-1).index_add_(0, index_S1.squeeze(1), increment_S1.to(torch.int32).squeeze(1))
    _write_logprobs(raw_SV, chosen_S1, out)


def _adjusted(raw_SV: Tensor, words: _Words, position_S1: Tensor, counts_SV: Tensor | None) -> Tensor:
    """Logits with biases and penalties, and without stop tokens before min_tokens."""
    vocab = raw_SV.shape[1]
    # One more column, for unused entries.
    logits_SX = F.pad(raw_SV, (0, 1))
    ids_SN, biases_SN = words.biases
    ids_SN = ids_SN.where(ids_SN >= 0, vocab)
    logits_SX.scatter_(1, ids_SN, _clamped(logits_SX.gather(1, ids_SN) + biases_SN))
    logits_SV = logits_SX[:, :vocab]
    if counts_SV is not None:
        logits_SV = _penalized(logits_SV, words, counts_SV)
    is_early_S1 = position_S1 - words.word(layout.N_PROMPT) < words.word(layout.MIN_TOKENS)
    ends_SN = words.stops.where((words.stops >= 0) & is_early_S1, vocab)
    is_allowed_SV = torch.ones_like(logits_SX, dtype=torch.bool).scatter_(1, ends_SN, False)[:, :vocab]
    # Allow the stop tokens if no other token is left.
    return logits_SV.where(is_allowed_SV | ~is_allowed_SV.any(-1, keepdim=True), _NEG_INF)


def _penalized(logits_SV: Tensor, words: _Words, counts_SV: Tensor) -> Tensor:
    """Applies penalties; rows without penalties stay unchanged, whatever their counts."""
    r_S1 = words.number(layout.REPETITION)
    repeated_SV = _clamped((logits_SV / r_S1).where(logits_SV > 0, logits_SV * r_S1))
    logits_SV = repeated_SV.where(counts_SV > 0, logits_SV)
    generated_SV = counts_SV >> 1
    penalty_SV = words.number(layout.FREQUENCY) * generated_SV + words.number(layout.PRESENCE)
    return _clamped(logits_SV - penalty_SV).where(generated_SV > 0, logits_SV)


def _clamped(logits: Tensor) -> Tensor:
    """float32, clamped to finite numbers."""
    return logits.clamp(-_FLOAT_MAX, _FLOAT_MAX).float()


def _weights(logits_SV: Tensor, best_S1: Tensor, words: _Words) -> Tensor:
    """See weights() in app/engine/sampling/logits_processors.py."""
    vocab = logits_SV.shape[1]
    ranked = logits_SV.sort(dim=-1, descending=True)
    top_k_S1 = words.word(layout.TOP_K)
    last_S1 = top_k_S1.where((top_k_S1 > 0) & (top_k_S1 < vocab), vocab) - 1
    logits_SV = logits_SV.where(logits_SV >= ranked.values.gather(1, last_S1), _NEG_INF)
    # Subtract the maximum first: a tiny temperature must not turn finite logits into infinities.
    scaled_SV = (logits_SV - best_S1) / words.number(layout.TEMPERATURE).float()
    weights_SV = _typical(scaled_SV.exp(), scaled_SV, words.number(layout.TYPICAL_P))
    top_p_S1 = words.number(layout.TOP_P)
    # Tokens that typical_p removed have weight 0: they add nothing, and are never the last one needed.
    wanted_S1 = (block_sums(weights_SV)[1][:, -1:] * top_p_S1).clamp(min=_SMALLEST)
    least_S1, _ = threshold_in_sorted(weights_SV.gather(1, ranked.indices), wanted_S1)
    weights_SV = weights_SV.where((weights_SV >= least_S1) | (top_p_S1 >= 1), 0.0)
    least_S1 = words.number(layout.MIN_P).float() * weights_SV.amax(-1, keepdim=True)
    return weights_SV.where(weights_SV >= least_S1, 0.0)


def _typical(weights_SV: Tensor, scaled_SV: Tensor, typical_p_S1: Tensor) -> Tensor:
    """Keeps the fewest tokens that reach typical_p, those first whose surprisal is nearest to the entropy."""
    total_S1 = block_sums(weights_SV)[1][:, -1:]
    surprisal_SV = total_S1.log() - scaled_SV
    parts_SV = (surprisal_SV * weights_SV).where(weights_SV > 0, 0.0)
    entropy_S1 = block_sums(parts_SV)[1][:, -1:] / total_S1
    nearness_SV = (-(surprisal_SV - entropy_S1).abs()).where(weights_SV > 0, _NEG_INF)
    ranked = nearness_SV.sort(dim=-1, descending=True)
    least_S1, _ = threshold_in_sorted(ranked.values, total_S1 * typical_p_S1, weights_SV.gather(1, ranked.indices))
    return weights_SV.where((nearness_SV >= least_S1) | (typical_p_S1 >= 1), 0.0)


def _write_logprobs(raw_SV: Tensor, chosen_S1: Tensor, out: SampleOut) -> None:
    """Writes the chosen token's log-probability, and the most likely tokens."""
    logprobs_SV = raw_SV.log_softmax(-1).clamp_(min=-_FLOAT_MAX)
    out.logprob_S.copy_(logprobs_SV.gather(1, chosen_S1).squeeze(1))
    vocab = raw_SV.shape[1]
    bits_SV = (logprobs_SV + 0.0).view(torch.int32)
    # The upper bits are integers in the order of the floats, the lower bits the index from the end: all keys differ,
    # and the lower id comes first.
    order_SV = (bits_SV ^ (bits_SV >> 31 & 0x7FFFFFFF)).long() << 32
    order_SV |= torch.arange(vocab - 1, -1, -1, device=raw_SV.device)
    n_top = min(TOP, vocab)
    ids_SN = vocab - 1 - (order_SV.topk(n_top, dim=-1).values & _MASK32)
    out.top_ids_SN[:, :n_top].copy_(ids_SN)
    out.top_logprobs_SN[:, :n_top].copy_(logprobs_SV.gather(1, ids_SN))
    out.top_ids_SN[:, n_top:].fill_(-1)
    out.top_logprobs_SN[:, n_top:].fill_(_NEG_INF)
