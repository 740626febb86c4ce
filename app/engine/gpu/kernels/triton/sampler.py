"""Triton sampler: penalties, weights, sampling, and log-probabilities, four kernels a step that wait for nothing.

It samples the same tokens as app/engine/sampling/sampler.py; docs/sampling.md specifies both. Rounding may make them
differ: weights are exact to 2 units in the last place of float32, and a GPU adds in another order. The bits of a row
depend on that row alone.

Shape legend: S sampled rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.sample_out import TOP, SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.gpu.kernels.triton.filters import (
    BY_LOGPROB,
    MIN_P,
    NEG_INF,
    NO_KEY,
    TEMPERATURE,
    TOP_P,
    TYPICAL_P,
    apply_top_k,
    compute_weights,
    exp_nonpositive,
    find_threshold,
    least_weight,
    load_keys,
    logprob,
    lower_bound_from_groups,
    ordered_bits,
    weights_of,
)
from app.engine.sampling import parameters as layout

# Each tile of a row is a separate program, so that a single row still uses the whole GPU.
#
# Shape legend: S sampled rows, V vocabulary, B tokens of a tile, G groups of a tile's tokens. The k-th largest of the
# groups' maxima is at most the k-th largest logit: a lower bound where the search for it starts.

FLAGS = tl.constexpr(layout.FLAGS)
GREEDY = tl.constexpr(layout.GREEDY)
LOGPROBS = tl.constexpr(layout.LOGPROBS)
WORDS = tl.constexpr(layout.WORDS)
_BIASES = tl.constexpr(layout.BIASES)
_BIAS_IDS = tl.constexpr(layout.BIAS_IDS)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_MIN_TOKENS = tl.constexpr(layout.MIN_TOKENS)
_N_BIASES = tl.constexpr(layout.N_BIASES)
_N_PROMPT = tl.constexpr(layout.N_PROMPT)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_REPETITION = tl.constexpr(layout.REPETITION)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_NEG_INF = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["tiles"])
def adjust_kernel(
    logits_ptr,
    stride,
    rows_ptr,
    positions_ptr,
    words_ptr,
    numbers_ptr,
    masks_ptr,
    counts_ptr,
    x_ptr,
    best_ptr,
    best_id_ptr,
    raw_best_ptr,
    raw_sum_ptr,
    groups_ptr,
    raw_groups_ptr,
    V,
    tiles,
    COUNTED: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
):
    """Writes adjusted logits x [S, tiles B], and per tile the maximum, its lowest id (-1: not finite) and group maxima.

    For rows with log-probabilities also of the raw logits: the maximum, the sum of e^(x - best), and the group maxima.
    COUNTED is the flag of rows with penalties.
    """
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + s).to(tl.int64)
    words_ptr, numbers_ptr = words_ptr + row * WORDS, numbers_ptr + row * (WORDS // 2)
    flags = tl.load(words_ptr + FLAGS)
    ids = tile * B + tl.arange(0, B)
    valid = ids < V
    raw = tl.load(logits_ptr + s * stride + ids, mask=valid, other=0.0).to(tl.float32)
    is_bad = tl.max((valid & ~(tl.abs(raw) <= _FLOAT_MAX)).to(tl.int32), 0) > 0
    at = s * tiles + tile
    groups = at * G + tl.arange(0, G)
    if tl.load(words_ptr + LOGPROBS) >= 0:
        _summarize_raw(raw, valid, raw_best_ptr + at, raw_sum_ptr + at, raw_groups_ptr + groups, B, G)
    x = _biased(raw, ids, words_ptr, numbers_ptr)
    if (flags & COUNTED) > 0:
        x = _penalized(x, tl.load(counts_ptr + row * V + ids, mask=valid, other=0), numbers_ptr)
    x = tl.where(valid, x, _NEG_INF)
    if tl.load(positions_ptr + s) - tl.load(words_ptr + _N_PROMPT) < tl.load(words_ptr + _MIN_TOKENS):
        word = tl.load(masks_ptr + row * tl.cdiv(V, 32) + ids // 32, mask=valid, other=0)
        x = tl.where(((word >> (ids % 32)) & 1) > 0, x, _NEG_INF)
    best = tl.max(x, 0)
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, tl.where(is_bad, -1, tl.min(tl.where(x == best, ids, V), 0)))
    if (flags & GREEDY) == 0:
        tl.store(x_ptr + at * B + tl.arange(0, B), x)
        tl.store(groups_ptr + groups, tl.max(tl.reshape(x, [B // G, G]), 0))


@triton.jit
def _summarize_raw(raw, valid, best_ptr, sum_ptr, groups_ptr, B: tl.constexpr, G: tl.constexpr):
    """Maximum and sum for log-probabilities. A row that is not finite reports none, so any substitute value will do."""
    raw = tl.where(valid, tl.where(tl.abs(raw) <= _FLOAT_MAX, raw, 0.0), _NEG_INF)
    best = tl.max(raw, 0)
    tl.store(best_ptr, best)
    tl.store(sum_ptr, tl.sum(exp_nonpositive(raw - best).to(tl.float64), 0))
    tl.store(groups_ptr, tl.max(tl.reshape(raw, [B // G, G]), 0))


@triton.jit
def _clamped(x):
    """float32, clamped to finite numbers."""
    return tl.minimum(tl.maximum(x, -_FLOAT_MAX), _FLOAT_MAX).to(tl.float32)


@triton.jit
def _biased(x, ids, words_ptr, numbers_ptr):
    for i in range(tl.load(words_ptr + _N_BIASES)):
        bias = tl.load(numbers_ptr + _BIASES // 2 + i)
        x = tl.where(ids == tl.load(words_ptr + _BIAS_IDS + i), _clamped(x.to(tl.float64) + bias), x)
    return x


@triton.jit
def _penalized(x, counts, numbers_ptr):
    r = tl.load(numbers_ptr + _REPETITION)
    wide = x.to(tl.float64)
    x = tl.where(counts > 0, _clamped(tl.where(x > 0, wide / r, wide * r)), x)
    generated = counts >> 1
    penalty = tl.load(numbers_ptr + _FREQUENCY) * generated.to(tl.float64) + tl.load(numbers_ptr + _PRESENCE)
    return tl.where(generated > 0, _clamped(x.to(tl.float64) - penalty), x)


# Computed from the model's raw logits, before filters. Shape legend: S sampled rows, T tiles of a row, B tokens of a
# tile, G groups of a tile, C tokens of the scratch buffers, K tokens to report, L listed ones.

_LIST_SIZE = tl.constexpr(32)
"""Entries for the tokens above the threshold; a second list of this size holds those that tie with it."""
_INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["tiles"])
def logprobs_kernel(
    logits_ptr,
    stride,
    rows_ptr,
    words_ptr,
    tokens_ptr,
    raw_best_ptr,
    raw_sum_ptr,
    groups_ptr,
    scratch_ptr,
    scratch_w_ptr,
    logprob_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    V,
    tiles,
    K: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Writes logprob [S], and top_ids and top_logprobs [S, K] for rows that request more than the token's own."""
    s = tl.program_id(0).to(tl.int64)
    requested = tl.load(words_ptr + tl.load(rows_ptr + s).to(tl.int64) * WORDS + LOGPROBS)
    token = tl.load(tokens_ptr + s)
    if (requested >= 0) & (token >= 0):
        at_T = tl.arange(0, T)
        best_T = tl.load(raw_best_ptr + s * tiles + at_T, mask=at_T < tiles, other=NEG_INF)
        sum_T = tl.load(raw_sum_ptr + s * tiles + at_T, mask=at_T < tiles, other=0.0)
        best = tl.max(best_T, 0).to(tl.float64)
        log_sum = tl.log(tl.sum(sum_T * tl.exp(tl.maximum(best_T.to(tl.float64) - best, -1000.0)), 0))
        logits_ptr += s * stride
        tl.store(logprob_ptr + s, logprob(tl.load(logits_ptr + token).to(tl.float32), best, log_sum))
        if requested > 0:
            scratch_ptr, scratch_w_ptr, groups_ptr = (
                scratch_ptr + 2 * s * C,
                scratch_w_ptr + 2 * s * C,
                groups_ptr + s * tiles * G,
            )
            most = tl.minimum(V, K)
            least = _report_threshold(
                logits_ptr, groups_ptr, tiles * G, V, best, log_sum, most, scratch_ptr, scratch_w_ptr, B, G * T, C
            )
            _list_tokens(logits_ptr, V, best, log_sum, least, scratch_ptr, B)
            _report(logits_ptr, best, log_sum, most, scratch_ptr, top_ids_ptr + s * K, top_logprobs_ptr + s * K, K)


@triton.jit
def _report_threshold(
    x_ptr,
    groups_ptr,
    n_groups,
    V,
    best,
    log_sum,
    most,
    scratch_ptr,
    scratch_w_ptr,
    B: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The key of the last token to report."""
    kind: tl.constexpr = BY_LOGPROB
    high = ordered_bits(logprob(best, best, log_sum)).to(tl.int64) + 1
    low = lower_bound_from_groups(kind, groups_ptr, n_groups, best, log_sum, high, most, N)
    least = find_threshold(
        kind, x_ptr, x_ptr, V, 0.0, 1.0, best, log_sum, low, high, most, scratch_ptr, scratch_w_ptr, B, C
    )
    tl.debug_barrier()
    return least.to(tl.int32)


@triton.jit
def _list_tokens(x_ptr, V, best, log_sum, least, scratch_ptr, B: tl.constexpr):
    """Lists the ids above the threshold, and from entry 32 on the first ids at the threshold; -1 in unused entries."""
    slots = tl.arange(0, 2 * _LIST_SIZE)
    tl.store(scratch_ptr + slots, slots * 0 - 1)
    tl.debug_barrier()
    above, equal = 0, 0
    for start in range(0, V, B):
        ids = start + tl.arange(0, B)
        key, _ = load_keys(BY_LOGPROB, x_ptr, x_ptr, ids, V, 0.0, 1.0, best, log_sum)
        is_above, is_equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
        more, same = tl.sum(is_above, 0), tl.sum(is_equal, 0)
        if more > 0:
            tl.store(scratch_ptr + above + tl.cumsum(is_above, 0) - 1, ids, mask=is_above > 0)
        if (same > 0) & (equal < _LIST_SIZE):
            index = equal + tl.cumsum(is_equal, 0) - 1
            tl.store(scratch_ptr + _LIST_SIZE + index, ids, mask=(is_equal > 0) & (index < _LIST_SIZE))
        above += more
        equal += same
    tl.debug_barrier()


@triton.jit
def _report(x_ptr, best, log_sum, most, scratch_ptr, top_ids_ptr, top_logprobs_ptr, K: tl.constexpr):
    """Writes the listed tokens in order: most likely first, ties by lower id; -1 and -inf beyond a small vocabulary."""
    id_L = tl.load(scratch_ptr + tl.arange(0, 2 * _LIST_SIZE))
    value_L = logprob(tl.load(x_ptr + id_L, mask=id_L >= 0, other=0.0).to(tl.float32), best, log_sum)
    key_L = tl.where(id_L >= 0, ordered_bits(value_L), NO_KEY)
    is_before_LL = (key_L[:, None] > key_L[None, :]) | (
        (key_L[:, None] == key_L[None, :]) & (id_L[:, None] < id_L[None, :])
    )
    rank_L = tl.sum(is_before_LL.to(tl.int32), 0)
    is_reported_L = (id_L >= 0) & (rank_L < most)
    tl.store(top_ids_ptr + rank_L, id_L, mask=is_reported_L)
    tl.store(top_logprobs_ptr + rank_L, value_L, mask=is_reported_L)
    slots = tl.arange(0, _LIST_SIZE)
    tl.store(top_ids_ptr + slots, slots * 0 - 1, mask=(slots >= most) & (slots < K))
    tl.store(top_logprobs_ptr + slots, NEG_INF, mask=(slots >= most) & (slots < K))


# Shape legend: S sampled rows, T tiles of a row, B tokens of a tile, G groups of a tile, C tokens of the scratch
# buffers.

_CHOICE = tl.constexpr(layout.CHOICE)
_SEED = tl.constexpr(layout.SEED)
_TOP_K = tl.constexpr(layout.TOP_K)
_MASK32 = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _is_cut(words_ptr, V):
    """Whether top_k applies to the row, so that weights follow its search."""
    k = tl.load(words_ptr + _TOP_K)
    return (k > 0) & (k < V)


@triton.jit(do_not_specialize=["tiles"])
def weigh_kernel(
    rows_ptr,
    words_ptr,
    numbers_ptr,
    x_ptr,
    w_ptr,
    best_ptr,
    sums_ptr,
    V,
    tiles,
    B: tl.constexpr,
    T: tl.constexpr,
):
    """Writes the weights of one tile, and the sum of those that min_p keeps; not for greedy rows nor for top_k."""
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + s).to(tl.int64)
    words_ptr, numbers_ptr = words_ptr + row * WORDS, numbers_ptr + row * (WORDS // 2)
    at_T = tl.arange(0, T)
    best = tl.max(tl.load(best_ptr + s * tiles + at_T, mask=at_T < tiles, other=NEG_INF), 0)
    is_drawn = ((tl.load(words_ptr + FLAGS) & GREEDY) == 0) & (tl.abs(best) <= _FLOAT_MAX)
    if is_drawn & ~_is_cut(words_ptr, V):
        at = s * tiles + tile
        ids = at * B + tl.arange(0, B)
        weight = weights_of(tl.load(x_ptr + ids), best, tl.load(numbers_ptr + TEMPERATURE).to(tl.float32))
        tl.store(w_ptr + ids, weight)
        kept = tl.where(weight >= tl.load(numbers_ptr + MIN_P).to(tl.float32), weight, 0.0)
        tl.store(sums_ptr + at, tl.sum(kept.to(tl.float64), 0))


@triton.jit(do_not_specialize=["tiles"])
def sample_kernel(
    rows_ptr,
    positions_ptr,
    words_ptr,
    numbers_ptr,
    counts_ptr,
    x_ptr,
    w_ptr,
    best_ptr,
    best_id_ptr,
    groups_ptr,
    sums_ptr,
    scratch_ptr,
    scratch_w_ptr,
    tokens_ptr,
    last_tokens_ptr,
    V,
    tiles,
    COUNTED: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Writes tokens [S]: -1 if the logits were not finite or the mask allows no token; also as each row's last token.

    Counts the sampled token of rows with penalties.
    """
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    at_T = tl.arange(0, T)
    best_T = tl.load(best_ptr + s * tiles + at_T, mask=at_T < tiles, other=NEG_INF)
    id_T = tl.load(best_id_ptr + s * tiles + at_T, mask=at_T < tiles, other=V)
    best = tl.max(best_T, 0)
    has_token = (tl.min(id_T, 0) >= 0) & (best > NEG_INF)
    token = tl.where(has_token, tl.min(tl.where(best_T == best, id_T, V), 0), -1)
    if has_token & ((flags & GREEDY) == 0):
        number = _uniform(words_ptr, tl.load(positions_ptr + s))
        x_ptr, w_ptr, sums_ptr = x_ptr + s * tiles * B, w_ptr + s * tiles * B, sums_ptr + s * tiles
        groups_ptr, numbers_ptr = groups_ptr + s * tiles * G, numbers_ptr + row * (WORDS // 2)
        scratch_ptr, scratch_w_ptr, k = scratch_ptr + 2 * s * C, scratch_w_ptr + 2 * s * C, tl.load(words_ptr + _TOP_K)
        token = _sample_row(
            x_ptr, w_ptr, numbers_ptr, groups_ptr, sums_ptr, scratch_ptr, scratch_w_ptr, best, k,
            _is_cut(words_ptr, V), number, V, tiles, B, G, T, C,
        )  # fmt: skip
    if has_token & ((flags & COUNTED) > 0):
        counts_ptr += row * V + token
        tl.store(counts_ptr, tl.load(counts_ptr) + 2)
    tl.store(tokens_ptr + s, token)
    tl.store(last_tokens_ptr + row, tl.maximum(token, 0))


@triton.jit
def _sample_row(
    x_ptr,
    w_ptr,
    numbers_ptr,
    groups_ptr,
    sums_ptr,
    scratch_ptr,
    scratch_w_ptr,
    best,
    k,
    is_cut,
    number,
    V,
    tiles,
    B: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """Samples one row that is not greedy; the pointers point to this row."""
    size = V
    if is_cut:
        size = apply_top_k(x_ptr, groups_ptr, tiles * G, best, k, V, scratch_ptr, scratch_w_ptr, B, G * T, C)
        if size < V:
            x_ptr = scratch_w_ptr + C
        compute_weights(x_ptr, w_ptr, numbers_ptr, best, size, B)
    least = least_weight(x_ptr, w_ptr, numbers_ptr, best, size, scratch_ptr, scratch_w_ptr, B, C)
    top_p = tl.load(numbers_ptr + TOP_P)
    if is_cut | (top_p < 1) | (tl.load(numbers_ptr + TYPICAL_P) < 1):
        _sum_tiles(w_ptr, sums_ptr, least, size, B)
    # With top_p 0 only the most likely token is left: the one with the lowest id if several tie.
    index = _inverse_cdf(w_ptr, sums_ptr, tl.where(top_p > 0, number, 0.0), least, size, B, T)
    return tl.load(scratch_ptr + C + index, mask=size < V, other=index)


@triton.jit
def _kept_weights(w_ptr, ids, size, least):
    weight = tl.load(w_ptr + ids, mask=ids < size, other=0.0)
    return tl.where(weight >= least, weight, 0.0).to(tl.float64)


@triton.jit
def _sum_tiles(w_ptr, sums_ptr, least, size, B: tl.constexpr):
    """What weigh_kernel writes, after more filters than min_p."""
    for tile in range(tl.cdiv(size, B)):
        tl.store(sums_ptr + tile, tl.sum(_kept_weights(w_ptr, tile * B + tl.arange(0, B), size, least), 0))
    tl.debug_barrier()


@triton.jit
def _inverse_cdf(w_ptr, sums_ptr, number, least, size, B: tl.constexpr, T: tl.constexpr):
    """First index at which the cumulative weight exceeds the number times the total."""
    at_T = tl.arange(0, T)
    sum_T = tl.load(sums_ptr + at_T, mask=at_T < tl.cdiv(size, B), other=0.0)
    until_T = tl.cumsum(sum_T, 0)
    target = number * tl.max(until_T, 0)
    tile = _first_above(until_T, target, sum_T, at_T)
    target -= tl.sum(tl.where(at_T == tile, until_T - sum_T, 0.0), 0)
    ids = tile * B + tl.arange(0, B)
    weight = _kept_weights(w_ptr, ids, size, least)
    return _first_above(tl.cumsum(weight, 0), target, weight, ids)


@triton.jit
def _first_above(sums, target, weights, ids):
    """First id with a weight whose sum exceeds the target; the last id with a weight if rounding prevents that."""
    first = tl.min(tl.where((sums > target) & (weights > 0), ids, _INT32_MAX), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, ids, 0), 0))


@triton.jit
def _uniform(words_ptr, position):
    """The number in [0, 1) of (seed, choice, position), as in app/engine/sampling/sampler.py, with words that wrap."""
    k0 = tl.load(words_ptr + _SEED).to(tl.uint64) & _MASK32
    k1 = tl.load(words_ptr + _SEED + 1).to(tl.uint64) & _MASK32
    c0, c1 = position.to(tl.uint64) & _MASK32, position.to(tl.uint64) >> 32
    c2 = tl.load(words_ptr + _CHOICE).to(tl.uint64)
    c3 = c2 * 0
    for _ in tl.static_range(10):
        p0, p1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _MASK32, (p0 >> 32) ^ c3 ^ k1, p0 & _MASK32
        k0, k1 = (k0 + 0x9E3779B9) & _MASK32, (k1 + 0xBB67AE85) & _MASK32
    return ((c0 >> 5) * 67108864 + (c1 >> 6)).to(tl.float64) * 1.1102230246251565e-16


WARPS = 8
"""Warps of each program."""


@dataclass(frozen=True, slots=True)
class SamplerTiling:
    """Tile sizes of a row, all powers of two. The results of a search do not depend on them."""

    tile: int = 2048
    """Tokens that a program holds in registers at a time."""
    groups: int = 16
    """Groups of a tile, whose maxima give the lower bound of a search."""
    scratch: int = 2048
    """Tokens that a search can finish without another pass over the row; at least 64."""

    @classmethod
    def of(cls, vocab: int) -> SamplerTiling:
        """Tiling for rows of `vocab` logits."""
        tile = min(2048, max(64, triton.next_power_of_2(vocab)))
        return cls(tile, scratch=tile)


def sample(
    logits_SV: Tensor,
    rows_S: Tensor,
    positions_S: Tensor,
    table: SamplingTable,
    out: SampleOut,
    given_S: Tensor | None = None,
    sizes: SamplerTiling | None = None,
) -> None:
    """See Kernels.sample. The logits of a row must be contiguous."""
    n_rows, vocab = logits_SV.shape
    assert logits_SV.stride(1) == 1 and vocab == table.vocab_size
    if not n_rows:
        return
    sizes = sizes or SamplerTiling.of(vocab)
    tiles = triton.cdiv(vocab, sizes.tile)
    scratch = _Scratch(n_rows, tiles, sizes, logits_SV.device)
    words, numbers = table.words_RW, table.words_RW.view(torch.float64)
    counts = table.counts_RV
    shape = {"B": sizes.tile, "G": sizes.groups}
    counted = {"COUNTED": layout.COUNTED}
    whole = {"T": triton.next_power_of_2(tiles), "C": sizes.scratch}
    adjust_kernel[(n_rows, tiles)](
        *(logits_SV, logits_SV.stride(0), rows_S, positions_S, words, numbers, table.masks_RM, counts, scratch.x),
        *(scratch.best, scratch.best_id, scratch.raw_best, scratch.raw_sum, scratch.groups, scratch.raw_groups),
        *(vocab, tiles),
        **counted,
        **shape,
        num_warps=WARPS,
    )
    weigh_kernel[(n_rows, tiles)](
        *(rows_S, words, numbers, scratch.x, scratch.weights, scratch.best, scratch.sums, vocab, tiles),
        B=sizes.tile,
        T=whole["T"],
        num_warps=WARPS,
    )
    sample_kernel[(n_rows,)](
        *(rows_S, positions_S, words, numbers, counts, scratch.x, scratch.weights, scratch.best, scratch.best_id),
        *(scratch.groups, scratch.sums, scratch.collected, scratch.collected_weights, out.tokens_S),
        *(table.last_token_R, vocab, tiles),
        **counted,
        **shape,
        **whole,
        num_warps=WARPS,
    )
    if given_S is not None:
        out.tokens_S.copy_(given_S.where(out.tokens_S >= 0, -1))
    logprobs_kernel[(n_rows,)](
        *(logits_SV, logits_SV.stride(0), rows_S, words, out.tokens_S, scratch.raw_best, scratch.raw_sum),
        *(scratch.raw_groups, scratch.collected, scratch.collected_weights),
        *(out.logprob_S, out.top_ids_SN, out.top_logprobs_SN, vocab, tiles),
        K=TOP,
        **shape,
        **whole,
        num_warps=WARPS,
    )


class _Scratch:
    """Scratch memory of a step, whose sizes depend on shapes only; a captured graph keeps it."""

    def __init__(self, rows: int, tiles: int, sizes: SamplerTiling, device: torch.device) -> None:
        def buffer(width: int, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.empty(rows, width, dtype=dtype, device=device)

        self.x, self.weights = buffer(tiles * sizes.tile), buffer(tiles * sizes.tile)
        self.best, self.best_id, self.raw_best = buffer(tiles), buffer(tiles, torch.int32), buffer(tiles)
        self.raw_sum, self.sums = buffer(tiles, torch.float64), buffer(tiles, torch.float64)
        self.groups, self.raw_groups = buffer(tiles * sizes.groups), buffer(tiles * sizes.groups)
        # First the tokens that a search collects, then those that top_k keeps.
        self.collected, self.collected_weights = buffer(2 * sizes.scratch, torch.int32), buffer(2 * sizes.scratch)
