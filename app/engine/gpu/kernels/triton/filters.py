"""Triton sampling filters: top_k, weights, typical_p -> top_p -> min_p, and the search for their thresholds.

A row runs only the filters that it requests, and after a small top_k only over the remaining tokens.

Shape legend: B tokens of a block, N groups of the row (app/engine/gpu/kernels/triton/sampler.py), C tokens of the
scratch buffers. These are [2, C]: first the candidates of a search, then the tokens that top_k kept: int32 keys and
ids, float32 weights and logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.engine.sampling import parameters as layout

# Tokens have a key (an integer, higher for better tokens) and a weight. The threshold is the highest key at which the
# weights of all tokens at or above it reach the target. So the search needs no sort, and tokens with equal keys stay
# together. Each pass over the row divides the range of keys by four. Every few passes the search collects the
# remaining tokens into a scratch buffer of fixed size, if they fit, and finishes in registers. Sums are float64 and
# always added in the same order, without atomics.
#
# Shape legend: B tokens of a block, C tokens of the scratch buffers.

BY_LOGIT = tl.constexpr(0)
"""Each token counts as one; the key is the logit."""
BY_WEIGHT = tl.constexpr(1)
"""The weight is also the key."""
BY_NEARNESS = tl.constexpr(2)
"""The key is higher the nearer the token's surprisal is to the entropy."""
BY_LOGPROB = tl.constexpr(3)
"""Each token counts as one; the key is the reported log-probability."""
NO_KEY = tl.constexpr(-(2**31))
"""Below all other keys."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_FLOAT_MAX = tl.constexpr(3.4028234663852886e38)
_INFINITY_BITS = tl.constexpr(0x7F800000)


@triton.jit
def ordered_bits(x):
    """int32 in the order of float32; both zeros have the same key."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def exp_nonpositive(x):
    """e^x of float32 x <= 0, to 2 units in the last place; 0 below 2^-124. tl.exp alone loses precision far from 0."""
    y = tl.maximum(x.to(tl.float64) * _LOG2_E, -1000.0)
    whole = tl.floor(y)
    value = tl.exp2((y - whole).to(tl.float32)) * tl.exp2(tl.maximum(whole, -125.0).to(tl.float32))
    return tl.where(whole < -124.0, 0.0, value)


@triton.jit
def scaled(x, best, temperature):
    """Subtracts the maximum first: a tiny temperature must not turn finite logits into infinities."""
    return tl.div_rn(x - best, temperature)


@triton.jit
def logprob(x, best, log_sum):
    """Log-probability of a raw logit; subtracts the maximum first. Clamped above -inf for finite logits."""
    return tl.maximum((x.to(tl.float64) - best) - log_sum, -_FLOAT_MAX).to(tl.float32)


@triton.jit
def load_keys(KIND: tl.constexpr, x_ptr, w_ptr, ids, size, best, temperature, first, second):
    """Keys and weights of these tokens.

    first, second: for BY_NEARNESS the log of the total weight and the entropy; for BY_LOGPROB the largest logit and the
    log of the sum of all e^(x - best). float64.
    """
    valid = ids < size
    if KIND == BY_WEIGHT:
        weight = tl.load(w_ptr + ids, mask=valid, other=0.0)
        key = weight.to(tl.int32, bitcast=True)
    elif KIND == BY_NEARNESS:
        weight = tl.load(w_ptr + ids, mask=valid, other=0.0)
        x = tl.load(x_ptr + ids, mask=valid, other=0.0)
        distance = tl.abs((first - scaled(x, best, temperature).to(tl.float64)) - second).to(tl.float32)
        key = tl.where(weight > 0, _INFINITY_BITS - distance.to(tl.int32, bitcast=True), -1)
    else:
        x = tl.load(x_ptr + ids, mask=valid, other=0.0).to(tl.float32)
        weight = tl.where(valid, 1.0, 0.0)
        key = ordered_bits(logprob(x, first, second)) if KIND == BY_LOGPROB else ordered_bits(x)
    return tl.where(valid, key, NO_KEY), weight


@triton.jit
def search_in_registers(key, weight, low, high, target):
    """The threshold among keys in registers, bit by bit: at least `low`, which reaches the target, and below `high`."""
    key, weight = key.to(tl.int64), weight.to(tl.float64)
    bits = ((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    step = (bits * 0 + 1).to(tl.int64) << bits
    while step > 0:
        is_enough = tl.sum(tl.where(key >= low + step, weight, 0.0), 0) >= target
        low = tl.where(is_enough, low + step, low)
        step >>= 1
    return low


@triton.jit
def find_threshold(
    KIND: tl.constexpr,
    x_ptr,
    w_ptr,
    size,
    best,
    temperature,
    first,
    second,
    low,
    high,
    target,
    scratch_ptr,
    scratch_w_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """The threshold of `size` tokens, at least `low` (which reaches the target) and below `high`: int64 keys."""
    above = tl.full((), 0.0, tl.float64)
    passes = 0
    while high - low > 1:
        if passes == 0:
            passes = 4
            count = _collect(
                KIND, x_ptr, w_ptr, size, best, temperature, first, second, low, high, scratch_ptr, scratch_w_ptr, B, C
            )
            if count <= C:
                slots = tl.arange(0, C)
                key = tl.load(scratch_ptr + slots, mask=slots < count, other=NO_KEY)
                weight = tl.load(scratch_w_ptr + slots, mask=slots < count, other=0.0)
                low = search_in_registers(key, weight, low, high, target - above)
                high = low + 1
            tl.debug_barrier()
        else:
            passes -= 1
            quarter, half = low + (high - low) // 4, low + (high - low) // 2
            three_quarters = half + (high - half) // 2
            a, b, c = _weights_above(
                KIND, x_ptr, w_ptr, size, best, temperature, first, second, quarter, half, three_quarters, B
            )
            is_a, is_b, is_c = a >= target, b >= target, c >= target
            low = tl.where(is_c, three_quarters, tl.where(is_b, half, tl.where(is_a, quarter, low)))
            above = tl.where(is_c, above, tl.where(is_b, c, tl.where(is_a, b, a)))
            high = tl.where(is_c, high, tl.where(is_b, three_quarters, tl.where(is_a, half, quarter)))
    return low


@triton.jit
def _weights_above(
    KIND: tl.constexpr, x_ptr, w_ptr, size, best, temperature, first, second, low, middle, high, B: tl.constexpr
):
    """The total weight of the tokens at or above each of three keys."""
    a_B = tl.zeros((B,), tl.float64)
    b_B = tl.zeros((B,), tl.float64)
    c_B = tl.zeros((B,), tl.float64)
    for start in range(0, size, B):
        key, weight = load_keys(KIND, x_ptr, w_ptr, start + tl.arange(0, B), size, best, temperature, first, second)
        a_B += tl.where(key >= low.to(tl.int32), weight, 0.0)
        b_B += tl.where(key >= middle.to(tl.int32), weight, 0.0)
        c_B += tl.where(key >= high.to(tl.int32), weight, 0.0)
    return tl.sum(a_B, 0), tl.sum(b_B, 0), tl.sum(c_B, 0)


@triton.jit
def _collect(
    KIND: tl.constexpr,
    x_ptr,
    w_ptr,
    size,
    best,
    temperature,
    first,
    second,
    low,
    high,
    scratch_ptr,
    scratch_w_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Collects the tokens between the bounds in order. Returns how many there are; more than C do not fit."""
    count = 0
    start = 0
    while (start < size) & (count <= C):
        key, weight = load_keys(KIND, x_ptr, w_ptr, start + tl.arange(0, B), size, best, temperature, first, second)
        is_in_range = (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
        more = tl.sum(is_in_range.to(tl.int32), 0)
        if more > 0:
            index = count + tl.cumsum(is_in_range.to(tl.int32), 0) - 1
            tl.store(scratch_ptr + index, key, mask=is_in_range & (index < C))
            tl.store(scratch_w_ptr + index, weight, mask=is_in_range & (index < C))
        count += more
        start += B
    tl.debug_barrier()
    return count


NEG_INF = tl.constexpr(float("-inf"))
TOP_P = tl.constexpr(layout.TOP_P)
MIN_P = tl.constexpr(layout.MIN_P)
TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
TYPICAL_P = tl.constexpr(layout.TYPICAL_P)
_SMALLEST = tl.constexpr(1e-300)
_MIN_SPARE_WEIGHT = tl.constexpr(1e-30)


@triton.jit
def lower_bound_from_groups(KIND: tl.constexpr, groups_ptr, n_groups, best, log_sum, high, k, N: tl.constexpr):
    """A key that at least k tokens reach, if there are so many: the k-th largest of the groups' maxima. int64.

    high: above all keys. best, log_sum: for log-probabilities.
    """
    at_N = tl.arange(0, N)
    key_N, weight_N = load_keys(KIND, groups_ptr, groups_ptr, at_N, n_groups, 0.0, 1.0, best, log_sum)
    return search_in_registers(key_N, weight_N, high * 0 + NO_KEY + 1, high, k)


@triton.jit
def apply_top_k(
    x_ptr,
    groups_ptr,
    n_groups,
    best,
    k,
    V,
    scratch_ptr,
    scratch_w_ptr,
    B: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """Keeps the logits that reach the k-th largest: in the scratch buffers if they fit, else by setting others to -inf.

    Returns how many tokens remain.
    """
    high = ordered_bits(best).to(tl.int64) + 1
    low = lower_bound_from_groups(BY_LOGIT, groups_ptr, n_groups, 0.0, 0.0, high, k, N)
    least = find_threshold(
        BY_LOGIT, x_ptr, x_ptr, V, 0.0, 1.0, 0.0, 0.0, low, high, k, scratch_ptr, scratch_w_ptr, B, C
    ).to(tl.int32)
    count = 0
    for start in range(0, V, B):
        ids = start + tl.arange(0, B)
        x = tl.load(x_ptr + ids, mask=ids < V, other=NEG_INF)
        is_in_range = (ids < V) & (ordered_bits(x) >= least)
        more = tl.sum(is_in_range.to(tl.int32), 0)
        if more > 0:
            index = count + tl.cumsum(is_in_range.to(tl.int32), 0) - 1
            tl.store(scratch_ptr + C + index, ids, mask=is_in_range & (index < C))
            tl.store(scratch_w_ptr + C + index, x, mask=is_in_range & (index < C))
        count += more
    if count > C:
        for start in range(0, V, B):
            ids = start + tl.arange(0, B)
            x = tl.load(x_ptr + ids, mask=ids < V, other=NEG_INF)
            tl.store(x_ptr + ids, NEG_INF, mask=(ids < V) & (ordered_bits(x) < least))
        count = V
    tl.debug_barrier()
    return count


@triton.jit
def weights_of(x, best, temperature):
    """Weights of logits: 1 for the largest one."""
    return exp_nonpositive(scaled(x, best, temperature))


@triton.jit
def compute_weights(x_ptr, w_ptr, numbers_ptr, best, size, B: tl.constexpr):
    """Writes the weights of `size` tokens, before filters. weigh_kernel does it where top_k does not apply."""
    temperature = tl.load(numbers_ptr + TEMPERATURE).to(tl.float32)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        x = tl.load(x_ptr + ids, mask=ids < size, other=NEG_INF)
        tl.store(w_ptr + ids, weights_of(x, best, temperature), mask=ids < size)
    tl.debug_barrier()


@triton.jit
def least_weight(x_ptr, w_ptr, numbers_ptr, best, size, scratch_ptr, scratch_w_ptr, B: tl.constexpr, C: tl.constexpr):
    """The least weight that the filters keep, of `size` tokens. typical_p sets the weights that it drops to 0."""
    typical_p, top_p = tl.load(numbers_ptr + TYPICAL_P), tl.load(numbers_ptr + TOP_P)
    highest = best * 0 + 1.0
    least = tl.load(numbers_ptr + MIN_P).to(tl.float32) * highest
    if (typical_p < 1) | (top_p < 1):
        total_B = tl.zeros((B,), tl.float64)
        for start in range(0, size, B):
            ids = start + tl.arange(0, B)
            total_B += tl.load(w_ptr + ids, mask=ids < size, other=0.0)
        total = tl.sum(total_B, 0)
        if typical_p < 1:
            total, highest = _apply_typical_p(
                x_ptr, w_ptr, numbers_ptr, size, best, typical_p, total, scratch_ptr, scratch_w_ptr, B, C
            )
            least *= highest
        if top_p < 1:
            # Even all tokens with at most this weight together are not needed.
            spare = (1 - top_p) * total / size * 0.999
            low = tl.where(spare > _MIN_SPARE_WEIGHT, spare, 0.0).to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
            high = highest.to(tl.int32, bitcast=True).to(tl.int64) + 1
            target = tl.maximum(total * top_p, _SMALLEST)
            key = find_threshold(
                BY_WEIGHT, x_ptr, w_ptr, size, 0.0, 1.0, 0.0, 0.0, low, high, target, scratch_ptr, scratch_w_ptr, B, C
            )
            least = tl.maximum(least, key.to(tl.int32).to(tl.float32, bitcast=True))
    return least


@triton.jit
def _apply_typical_p(
    x_ptr,
    w_ptr,
    numbers_ptr,
    size,
    best,
    typical_p,
    total,
    scratch_ptr,
    scratch_w_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """Keeps the fewest tokens that reach typical_p, nearest to the entropy first.

    Returns their total and their largest weight.
    """
    temperature = tl.load(numbers_ptr + TEMPERATURE).to(tl.float32)
    log_total = tl.log(total)
    parts_B = tl.zeros((B,), tl.float64)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        weight = tl.load(w_ptr + ids, mask=ids < size, other=0.0)
        x = tl.load(x_ptr + ids, mask=(ids < size) & (weight > 0), other=0.0)
        parts_B += tl.where(weight > 0, (log_total - scaled(x, best, temperature).to(tl.float64)) * weight, 0.0)
    entropy = tl.sum(parts_B, 0) / total
    low, high = total.to(tl.int64) * 0, total.to(tl.int64) * 0 + _INFINITY_BITS + 1
    least = find_threshold(
        BY_NEARNESS,
        x_ptr,
        w_ptr,
        size,
        best,
        temperature,
        log_total,
        entropy,
        low,
        high,
        tl.maximum(total * typical_p, _SMALLEST),
        scratch_ptr,
        scratch_w_ptr,
        B,
        C,
    ).to(tl.int32)
    total_B = tl.zeros((B,), tl.float64)
    highest_B = tl.zeros((B,), tl.float32)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        key, weight = load_keys(BY_NEARNESS, x_ptr, w_ptr, ids, size, best, temperature, log_total, entropy)
        weight = tl.where(key >= least, weight, 0.0)
        tl.store(w_ptr + ids, weight, mask=ids < size)
        total_B += weight
        highest_B = tl.maximum(highest_B, weight)
    tl.debug_barrier()
    return tl.sum(total_B, 0), tl.max(highest_B, 0)
