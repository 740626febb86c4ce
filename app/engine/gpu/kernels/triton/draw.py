"""The draw of each row, one Triton program a row: greedy at once; else the filters, and the place of its number.

Knows no biases and no log-probabilities. Shape legend: S sampled rows, T tiles of a row, B tokens of a tile, G groups
of a tile, C tokens of the room.
"""

import triton
import triton.language as tl

from app.engine.gpu.kernels import sampling_layout as layout
from app.engine.gpu.kernels.triton.filters import NOTHING, TOP_P, keep_best, weigh
from app.engine.gpu.kernels.triton.penalties import FLAGS, GREEDY, WORDS

_CHOICE = tl.constexpr(layout.CHOICE)
_SEED = tl.constexpr(layout.SEED)
_TOP_K = tl.constexpr(layout.TOP_K)
_FAR = tl.constexpr(2**31 - 1)
_MASK32 = tl.constexpr(0xFFFFFFFF)


@triton.jit(do_not_specialize=["tiles"])
def draw(
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
    room_ptr,
    room_w_ptr,
    tokens_ptr,
    V,
    tiles,
    COUNTED: tl.constexpr,
    B: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """tokens [S]: -1 where the logits were not finite. Counts what was drawn for rows that ask for it."""
    s = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + s).to(tl.int64)
    words_ptr += row * WORDS
    flags = tl.load(words_ptr + FLAGS)
    at_T = tl.arange(0, T)
    best_T = tl.load(best_ptr + s * tiles + at_T, mask=at_T < tiles, other=NOTHING)
    id_T = tl.load(best_id_ptr + s * tiles + at_T, mask=at_T < tiles, other=V)
    best = tl.max(best_T, 0)
    is_finite = tl.min(id_T, 0) >= 0
    token = tl.where(is_finite, tl.min(tl.where(best_T == best, id_T, V), 0), -1)
    if is_finite & ((flags & GREEDY) == 0):
        number = _uniform(words_ptr, tl.load(positions_ptr + s))
        x_ptr, w_ptr, sums_ptr = x_ptr + s * tiles * B, w_ptr + s * tiles * B, sums_ptr + s * tiles
        groups_ptr, numbers_ptr = groups_ptr + s * tiles * G, numbers_ptr + row * (WORDS // 2)
        room_ptr, room_w_ptr, k = room_ptr + 2 * s * C, room_w_ptr + 2 * s * C, tl.load(words_ptr + _TOP_K)
        token = _drawn(
            x_ptr, w_ptr, numbers_ptr, groups_ptr, sums_ptr, room_ptr, room_w_ptr, best, k, number, V, tiles, B, G, T, C
        )
    if is_finite & ((flags & COUNTED) > 0):
        counts_ptr += row * V + token
        tl.store(counts_ptr, tl.load(counts_ptr) + 2)
    tl.store(tokens_ptr + s, token)


@triton.jit
def _drawn(
    x_ptr,
    w_ptr,
    numbers_ptr,
    groups_ptr,
    sums_ptr,
    room_ptr,
    room_w_ptr,
    best,
    k,
    number,
    V,
    tiles,
    B: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
):
    """One row that is not greedy; the pointers are those of the row."""
    size = V
    if (k > 0) & (k < V):
        size = keep_best(x_ptr, groups_ptr, tiles * G, best, k, V, room_ptr, room_w_ptr, B, G * T, C)
    is_few = size < V
    if is_few:
        x_ptr = room_w_ptr + C
    weigh(x_ptr, w_ptr, numbers_ptr, best, size, room_ptr, room_w_ptr, B, C)
    # top_p 0 is the best token alone, the lowest id among equals.
    number = tl.where(tl.load(numbers_ptr + TOP_P) > 0, number, 0.0)
    place = _place(w_ptr, sums_ptr, number, size, B, T)
    return tl.load(room_ptr + C + place, mask=is_few, other=place)


@triton.jit
def _place(w_ptr, sums_ptr, number, size, B: tl.constexpr, T: tl.constexpr):
    """Where the sum of the weights first exceeds the number times the whole sum."""
    tiles = tl.cdiv(size, B)
    for tile in range(tiles):
        ids = tile * B + tl.arange(0, B)
        tl.store(sums_ptr + tile, tl.sum(tl.load(w_ptr + ids, mask=ids < size, other=0.0).to(tl.float64), 0))
    tl.debug_barrier()
    at_T = tl.arange(0, T)
    sum_T = tl.load(sums_ptr + at_T, mask=at_T < tiles, other=0.0)
    until_T = tl.cumsum(sum_T, 0)
    target = number * tl.max(until_T, 0)
    tile = _first_above(until_T, target, sum_T, at_T)
    target -= tl.sum(tl.where(at_T == tile, until_T - sum_T, 0.0), 0)
    ids = tile * B + tl.arange(0, B)
    weight = tl.load(w_ptr + ids, mask=ids < size, other=0.0).to(tl.float64)
    return _first_above(tl.cumsum(weight, 0), target, weight, ids)


@triton.jit
def _first_above(sums, target, weights, ids):
    """Of those with a weight. Rounding may reach the last sum; then the last that adds to it."""
    first = tl.min(tl.where((sums > target) & (weights > 0), ids, _FAR), 0)
    return tl.minimum(first, tl.max(tl.where(weights > 0, ids, 0), 0))


@triton.jit
def _uniform(words_ptr, position):
    """The number in [0, 1) of (seed, choice, position): app/engine/sampling/philox.py, with words that wrap."""
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
