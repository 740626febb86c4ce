"""What the filters leave of one row, by one Triton program: top_k, then weights, then typical_p -> top_p -> min_p.

A row passes over its logits only for what it asks for, and after a small top_k only over the tokens that are left.
Knows no biases, and not how a token is drawn from the weights.

Shape legend: B tokens of a block, N groups of the row (penalties.py), C tokens of the room. The rooms are [2, C]:
what a search takes in, and behind it what top_k has left: int32 keys and ids, float32 weights and logits.
"""

import triton
import triton.language as tl

from app.engine.gpu.kernels import sampling_layout as layout
from app.engine.gpu.kernels.triton.threshold_search import (
    BY_LOGIT,
    BY_NEARNESS,
    BY_WEIGHT,
    NO_KEY,
    edge,
    look,
    ordered,
    power,
    scaled,
    within,
)

NOTHING = tl.constexpr(float("-inf"))
TOP_P = tl.constexpr(layout.TOP_P)
_MIN_P = tl.constexpr(layout.MIN_P)
_TEMPERATURE = tl.constexpr(layout.TEMPERATURE)
_TYPICAL_P = tl.constexpr(layout.TYPICAL_P)
_INFINITE = tl.constexpr(0x7F800000)
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
