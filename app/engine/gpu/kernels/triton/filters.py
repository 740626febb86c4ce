"""Triton sampling filters: top_k, weights, typical_p -> top_p -> min_p, and the search for their thresholds.

A row passes over its logits only for what it asks for, and after a small top_k only over the tokens that are left.

Shape legend: B tokens of a block, N groups of the row (app/engine/gpu/kernels/triton/sampler.py), C tokens of the
room. The rooms are [2, C]: what a search takes in, and behind it what top_k has left: int32 keys and ids, float32
weights and logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from app.engine.gpu.kernels import sampling_state as layout

# Tokens have a key (an integer, the better the higher) and a weight. The edge is the highest key at which the weights
# of all tokens that reach it amount to what is wanted; so it needs no sort, and equal tokens stay together. The keys
# between the bounds are cut in four by each pass over the row. Every few passes those that are left are taken into a
# room of fixed size, if they fit, and the rest of the search is done in registers. Sums are float64 and always added in
# the same order: nothing is atomic.
#
# Shape legend: B tokens of a block, C tokens of the room.

BY_LOGIT = tl.constexpr(0)
"""Each token counts as one; the key is the logit."""
BY_WEIGHT = tl.constexpr(1)
"""Key and weight are the weight."""
BY_NEARNESS = tl.constexpr(2)
"""The key tells how near the token's surprise is to the entropy."""
BY_LOGPROB = tl.constexpr(3)
"""Each token counts as one; the key is the log-probability as it is reported."""
NO_KEY = tl.constexpr(-(2**31))
"""Below all others."""
_LOG2_E = tl.constexpr(1.4426950408889634)
_LARGEST = tl.constexpr(3.4028234663852886e38)
_INFINITE = tl.constexpr(0x7F800000)


@triton.jit
def ordered(x):
    """int32 in the order of float32; both zeros are one."""
    bits = tl.where(x == 0, 0.0, x).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def power(x):
    """e^x of float32 at most 0, to 2 units in the last place; 0 below 2^-124. tl.exp alone loses digits far from 0."""
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
    """Of a raw logit, the best one out first; above -inf, which a finite logit far below the others may come to."""
    return tl.maximum((x.to(tl.float64) - best) - log_sum, -_LARGEST).to(tl.float32)


@triton.jit
def look(KIND: tl.constexpr, x_ptr, w_ptr, ids, size, best, temperature, first, second):
    """Keys and weights of these tokens.

    first, second: for BY_NEARNESS the log of the whole weight, and the entropy; for BY_LOGPROB the best logit, and the
    log of the sum of all e^(x - best). float64.
    """
    inside = ids < size
    if KIND == BY_WEIGHT:
        weight = tl.load(w_ptr + ids, mask=inside, other=0.0)
        key = weight.to(tl.int32, bitcast=True)
    elif KIND == BY_NEARNESS:
        weight = tl.load(w_ptr + ids, mask=inside, other=0.0)
        x = tl.load(x_ptr + ids, mask=inside, other=0.0)
        distance = tl.abs((first - scaled(x, best, temperature).to(tl.float64)) - second).to(tl.float32)
        key = tl.where(weight > 0, _INFINITE - distance.to(tl.int32, bitcast=True), -1)
    else:
        x = tl.load(x_ptr + ids, mask=inside, other=0.0).to(tl.float32)
        weight = tl.where(inside, 1.0, 0.0)
        key = ordered(logprob(x, first, second)) if KIND == BY_LOGPROB else ordered(x)
    return tl.where(inside, key, NO_KEY), weight


@triton.jit
def within(key, weight, low, high, wanted):
    """The edge among keys in registers, bit by bit: at least `low`, which is known to be enough, below `high`."""
    key, weight = key.to(tl.int64), weight.to(tl.float64)
    bits = ((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
    step = (bits * 0 + 1).to(tl.int64) << bits
    while step > 0:
        is_enough = tl.sum(tl.where(key >= low + step, weight, 0.0), 0) >= wanted
        low = tl.where(is_enough, low + step, low)
        step >>= 1
    return low


@triton.jit
def edge(
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
    wanted,
    room_ptr,
    room_w_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """The edge of `size` tokens, at least `low` (which is known to be enough) and below `high`: int64 keys."""
    above = tl.full((), 0.0, tl.float64)
    passes = 0
    while high - low > 1:
        if passes == 0:
            passes = 4
            count = _take(
                KIND, x_ptr, w_ptr, size, best, temperature, first, second, low, high, room_ptr, room_w_ptr, B, C
            )
            if count <= C:
                places = tl.arange(0, C)
                key = tl.load(room_ptr + places, mask=places < count, other=NO_KEY)
                weight = tl.load(room_w_ptr + places, mask=places < count, other=0.0)
                low = within(key, weight, low, high, wanted - above)
                high = low + 1
            tl.debug_barrier()
        else:
            passes -= 1
            quarter, half = low + (high - low) // 4, low + (high - low) // 2
            most = half + (high - half) // 2
            a, b, c = _sums(KIND, x_ptr, w_ptr, size, best, temperature, first, second, quarter, half, most, B)
            is_a, is_b, is_c = a >= wanted, b >= wanted, c >= wanted
            low = tl.where(is_c, most, tl.where(is_b, half, tl.where(is_a, quarter, low)))
            above = tl.where(is_c, above, tl.where(is_b, c, tl.where(is_a, b, a)))
            high = tl.where(is_c, high, tl.where(is_b, most, tl.where(is_a, half, quarter)))
    return low


@triton.jit
def _sums(KIND: tl.constexpr, x_ptr, w_ptr, size, best, temperature, first, second, low, middle, high, B: tl.constexpr):
    """The weights of all that reach three keys."""
    a_B = tl.zeros((B,), tl.float64)
    b_B = tl.zeros((B,), tl.float64)
    c_B = tl.zeros((B,), tl.float64)
    for start in range(0, size, B):
        key, weight = look(KIND, x_ptr, w_ptr, start + tl.arange(0, B), size, best, temperature, first, second)
        a_B += tl.where(key >= low.to(tl.int32), weight, 0.0)
        b_B += tl.where(key >= middle.to(tl.int32), weight, 0.0)
        c_B += tl.where(key >= high.to(tl.int32), weight, 0.0)
    return tl.sum(a_B, 0), tl.sum(b_B, 0), tl.sum(c_B, 0)


@triton.jit
def _take(
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
    room_ptr,
    room_w_ptr,
    B: tl.constexpr,
    C: tl.constexpr,
):
    """How many keys lie between the bounds; more than C is too many. Takes them into the room, in order."""
    count = 0
    start = 0
    while (start < size) & (count <= C):
        key, weight = look(KIND, x_ptr, w_ptr, start + tl.arange(0, B), size, best, temperature, first, second)
        is_in = (key >= low.to(tl.int32)) & (key < high.to(tl.int32))
        more = tl.sum(is_in.to(tl.int32), 0)
        if more > 0:
            place = count + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(room_ptr + place, key, mask=is_in & (place < C))
            tl.store(room_w_ptr + place, weight, mask=is_in & (place < C))
        count += more
        start += B
    tl.debug_barrier()
    return count


NOTHING = tl.constexpr(float("-inf"))
TOP_P = tl.constexpr(layout.TOP_P)
_MIN_P = tl.constexpr(layout.MIN_P)
_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_TYPICAL_P = tl.constexpr(layout.TYPICAL_P)
_SMALLEST = tl.constexpr(1e-300)
_TELLING = tl.constexpr(1e-30)


@triton.jit
def least_of_groups(KIND: tl.constexpr, groups_ptr, n_groups, best, log_sum, high, k, N: tl.constexpr):
    """A key that at least k tokens reach, if there are as many: the k-th best of the groups' best. int64.

    high: above all keys. best, log_sum: for log-probabilities.
    """
    at_N = tl.arange(0, N)
    key_N, weight_N = look(KIND, groups_ptr, groups_ptr, at_N, n_groups, 0.0, 1.0, best, log_sum)
    return within(key_N, weight_N, high * 0 + NO_KEY + 1, high, k)


@triton.jit
def keep_best(
    x_ptr, groups_ptr, n_groups, best, k, V, room_ptr, room_w_ptr, B: tl.constexpr, N: tl.constexpr, C: tl.constexpr
):
    """How many logits reach the k-th best. If they fit the room they lie there, in order; else all others are -inf."""
    high = ordered(best).to(tl.int64) + 1
    low = least_of_groups(BY_LOGIT, groups_ptr, n_groups, 0.0, 0.0, high, k, N)
    least = edge(BY_LOGIT, x_ptr, x_ptr, V, 0.0, 1.0, 0.0, 0.0, low, high, k, room_ptr, room_w_ptr, B, C).to(tl.int32)
    count = 0
    for start in range(0, V, B):
        ids = start + tl.arange(0, B)
        x = tl.load(x_ptr + ids, mask=ids < V, other=NOTHING)
        is_in = (ids < V) & (ordered(x) >= least)
        more = tl.sum(is_in.to(tl.int32), 0)
        if more > 0:
            place = count + tl.cumsum(is_in.to(tl.int32), 0) - 1
            tl.store(room_ptr + C + place, ids, mask=is_in & (place < C))
            tl.store(room_w_ptr + C + place, x, mask=is_in & (place < C))
        count += more
    if count > C:
        for start in range(0, V, B):
            ids = start + tl.arange(0, B)
            x = tl.load(x_ptr + ids, mask=ids < V, other=NOTHING)
            tl.store(x_ptr + ids, NOTHING, mask=(ids < V) & (ordered(x) < least))
        count = V
    tl.debug_barrier()
    return count


@triton.jit
def weigh(x_ptr, w_ptr, numbers_ptr, best, size, room_ptr, room_w_ptr, B: tl.constexpr, C: tl.constexpr):
    """The weights of `size` tokens, the best logit's 1, 0 for what is filtered out."""
    temperature = tl.load(numbers_ptr + _TEMPERATURE).to(tl.float32)
    typical_p, top_p = tl.load(numbers_ptr + _TYPICAL_P), tl.load(numbers_ptr + TOP_P)
    min_p = tl.load(numbers_ptr + _MIN_P).to(tl.float32)
    total_B = tl.zeros((B,), tl.float64)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        weight = power(scaled(tl.load(x_ptr + ids, mask=ids < size, other=NOTHING), best, temperature))
        tl.store(w_ptr + ids, weight, mask=ids < size)
        total_B += weight
    tl.debug_barrier()
    total, highest = tl.sum(total_B, 0), best * 0 + 1.0
    if typical_p < 1:
        total, highest = _keep_typical(
            x_ptr, w_ptr, size, best, temperature, typical_p, total, room_ptr, room_w_ptr, B, C
        )
    least = min_p * highest
    if top_p < 1:
        # Tokens that weigh no more than this are not needed even all together.
        spare = (1 - top_p) * total / size * 0.999
        low = tl.where(spare > _TELLING, spare, 0.0).to(tl.float32).to(tl.int32, bitcast=True).to(tl.int64)
        high = highest.to(tl.int32, bitcast=True).to(tl.int64) + 1
        wanted = tl.maximum(total * top_p, _SMALLEST)
        key = edge(BY_WEIGHT, x_ptr, w_ptr, size, 0.0, 1.0, 0.0, 0.0, low, high, wanted, room_ptr, room_w_ptr, B, C)
        least = tl.maximum(least, key.to(tl.int32).to(tl.float32, bitcast=True))
    if least > 0:
        for start in range(0, size, B):
            ids = start + tl.arange(0, B)
            tl.store(w_ptr + ids, 0.0, mask=(ids < size) & (tl.load(w_ptr + ids, mask=ids < size, other=0.0) < least))
        tl.debug_barrier()


@triton.jit
def _keep_typical(
    x_ptr, w_ptr, size, best, temperature, typical_p, total, room_ptr, room_w_ptr, B: tl.constexpr, C: tl.constexpr
):
    """Keeps the fewest tokens that reach typical_p, nearest to the entropy first. Their weight, and the highest."""
    log_total = tl.log(total)
    parts_B = tl.zeros((B,), tl.float64)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        weight = tl.load(w_ptr + ids, mask=ids < size, other=0.0)
        x = tl.load(x_ptr + ids, mask=(ids < size) & (weight > 0), other=0.0)
        parts_B += tl.where(weight > 0, (log_total - scaled(x, best, temperature).to(tl.float64)) * weight, 0.0)
    entropy = tl.sum(parts_B, 0) / total
    low, high = total.to(tl.int64) * 0, total.to(tl.int64) * 0 + _INFINITE + 1
    least = edge(
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
        room_ptr,
        room_w_ptr,
        B,
        C,
    ).to(tl.int32)
    total_B = tl.zeros((B,), tl.float64)
    highest_B = tl.zeros((B,), tl.float32)
    for start in range(0, size, B):
        ids = start + tl.arange(0, B)
        key, weight = look(BY_NEARNESS, x_ptr, w_ptr, ids, size, best, temperature, log_total, entropy)
        weight = tl.where(key >= least, weight, 0.0)
        tl.store(w_ptr + ids, weight, mask=ids < size)
        total_B += weight
        highest_B = tl.maximum(highest_B, weight)
    tl.debug_barrier()
    return tl.sum(total_B, 0), tl.max(highest_B, 0)
