"""What a draw begins with, for each tile of each row's logits: biases, penalties, min_tokens, and the best of the tile.

A row's tiles are programs of their own, so that a single row still keeps a GPU busy. Knows no filters.

Shape legend: S sampled rows, V vocabulary, B tokens of a tile, G groups of a tile's tokens: the k-th best of the
groups' maxima is at most the k-th best logit, where a search for it may begin.
"""

import triton
import triton.language as tl

from app.engine.gpu.kernels import sampling_layout as layout
from app.engine.gpu.kernels.triton.threshold_search import power

FLAGS = tl.constexpr(layout.FLAGS)
GREEDY = tl.constexpr(layout.GREEDY)
LOGPROBS = tl.constexpr(layout.LOGPROBS)
WORDS = tl.constexpr(layout.WORDS)
_BIASES = tl.constexpr(layout.BIASES)
_BIAS_IDS = tl.constexpr(layout.BIAS_IDS)
_FREQUENCY = tl.constexpr(layout.FREQUENCY)
_MAX_STOPS = tl.constexpr(layout.MAX_STOPS)
_MIN_TOKENS = tl.constexpr(layout.MIN_TOKENS)
_N_BIASES = tl.constexpr(layout.N_BIASES)
_N_PROMPT = tl.constexpr(layout.N_PROMPT)
_N_STOPS = tl.constexpr(layout.N_STOPS)
_PRESENCE = tl.constexpr(layout.PRESENCE)
_REPETITION = tl.constexpr(layout.REPETITION)
_STOPS = tl.constexpr(layout.STOPS)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_NOTHING = tl.constexpr(float("-inf"))


@triton.jit(do_not_specialize=["tiles"])
def adjust(
    logits_ptr,
    stride,
    rows_ptr,
    positions_ptr,
    words_ptr,
    numbers_ptr,
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
    """x [S, tiles B] the adjusted logits; of each tile the best, its lowest id (-1: not all finite), and of the groups.

    Of the raw logits, where log-probabilities are asked for, the best, the sum of e^(x - best), and the groups' best.
    COUNTED is the flag of rows with penalties; 0 where there are no counts.
    """
    s, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + s).to(tl.int64)
    words_ptr, numbers_ptr = words_ptr + row * WORDS, numbers_ptr + row * (WORDS // 2)
    flags = tl.load(words_ptr + FLAGS)
    ids = tile * B + tl.arange(0, B)
    inside = ids < V
    raw = tl.load(logits_ptr + s * stride + ids, mask=inside, other=0.0).to(tl.float32)
    is_bad = tl.max((inside & ~(tl.abs(raw) <= _LARGEST)).to(tl.int32), 0) > 0
    at = s * tiles + tile
    groups = at * G + tl.arange(0, G)
    if tl.load(words_ptr + LOGPROBS) >= 0:
        _sum_up(raw, inside, raw_best_ptr + at, raw_sum_ptr + at, raw_groups_ptr + groups, B, G)
    x = _biased(raw, ids, words_ptr, numbers_ptr)
    if (flags & COUNTED) > 0:
        x = _penalised(x, tl.load(counts_ptr + row * V + ids, mask=inside, other=0), numbers_ptr)
    x = tl.where(inside, x, _NOTHING)
    if tl.load(positions_ptr + s) - tl.load(words_ptr + _N_PROMPT) < tl.load(words_ptr + _MIN_TOKENS):
        x = _endless(x, ids, words_ptr, V)
    best = tl.max(x, 0)
    tl.store(best_ptr + at, best)
    tl.store(best_id_ptr + at, tl.where(is_bad, -1, tl.min(tl.where(x == best, ids, V), 0)))
    if (flags & GREEDY) == 0:
        tl.store(x_ptr + at * B + tl.arange(0, B), x)
        tl.store(groups_ptr + groups, tl.max(tl.reshape(x, [B // G, G]), 0))


@triton.jit
def _sum_up(raw, inside, best_ptr, sum_ptr, groups_ptr, B: tl.constexpr, G: tl.constexpr):
    """For log-probabilities. Where a logit is not finite they are not told, so it may count as anything."""
    raw = tl.where(inside, tl.where(tl.abs(raw) <= _LARGEST, raw, 0.0), _NOTHING)
    best = tl.max(raw, 0)
    tl.store(best_ptr, best)
    tl.store(sum_ptr, tl.sum(power(raw - best).to(tl.float64), 0))
    tl.store(groups_ptr, tl.max(tl.reshape(raw, [B // G, G]), 0))


@triton.jit
def _held(x):
    """float32, without infinities."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST).to(tl.float32)


@triton.jit
def _biased(x, ids, words_ptr, numbers_ptr):
    for i in range(tl.load(words_ptr + _N_BIASES)):
        bias = tl.load(numbers_ptr + _BIASES // 2 + i)
        x = tl.where(ids == tl.load(words_ptr + _BIAS_IDS + i), _held(x.to(tl.float64) + bias), x)
    return x


@triton.jit
def _penalised(x, counts, numbers_ptr):
    r = tl.load(numbers_ptr + _REPETITION)
    wide = x.to(tl.float64)
    x = tl.where(counts > 0, _held(tl.where(x > 0, wide / r, wide * r)), x)
    generated = counts >> 1
    penalty = tl.load(numbers_ptr + _FREQUENCY) * generated.to(tl.float64) + tl.load(numbers_ptr + _PRESENCE)
    return tl.where(generated > 0, _held(x.to(tl.float64) - penalty), x)


@triton.jit
def _endless(x, ids, words_ptr, V):
    """Without the tokens that end the text; where nothing else is left they stay (such a row is a single tile)."""
    is_end = ids < 0
    for i in range(tl.load(words_ptr + _N_STOPS)):
        is_end |= ids == tl.load(words_ptr + _STOPS + i)
    has_more = (V > _MAX_STOPS) | (tl.max(((ids < V) & ~is_end).to(tl.int32), 0) > 0)
    return tl.where(is_end & has_more, _NOTHING, x)
