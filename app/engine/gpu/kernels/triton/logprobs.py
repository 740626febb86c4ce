"""Log-probabilities of what was drawn, and the most likely tokens, one Triton program a row; only of rows that ask.

Knows no filters: these are the model's own. Shape legend: S sampled rows, T tiles of a row, B tokens of a tile,
G groups of a tile, C tokens of the room, K tokens to report, L listed ones.
"""

import triton
import triton.language as tl

from app.engine.gpu.kernels.triton.filters import NOTHING, least_of_groups
from app.engine.gpu.kernels.triton.penalties import LOGPROBS, WORDS
from app.engine.gpu.kernels.triton.threshold_search import BY_LOGPROB, NO_KEY, edge, logprob, look, ordered

_LIST = tl.constexpr(32)
"""Room for the tokens to report, and as much again for those that tie with the last of them."""
_FAR = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["tiles"])
def score(
    logits_ptr,
    stride,
    rows_ptr,
    words_ptr,
    tokens_ptr,
    raw_best_ptr,
    raw_sum_ptr,
    groups_ptr,
    room_ptr,
    room_w_ptr,
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
    """logprob [S], and top_ids and top_logprobs [S, K] of rows that want more than the token's own."""
    s = tl.program_id(0).to(tl.int64)
    asked = tl.load(words_ptr + tl.load(rows_ptr + s).to(tl.int64) * WORDS + LOGPROBS)
    token = tl.load(tokens_ptr + s)
    if (asked >= 0) & (token >= 0):
        at_T = tl.arange(0, T)
        best_T = tl.load(raw_best_ptr + s * tiles + at_T, mask=at_T < tiles, other=NOTHING)
        sum_T = tl.load(raw_sum_ptr + s * tiles + at_T, mask=at_T < tiles, other=0.0)
        best = tl.max(best_T, 0).to(tl.float64)
        log_sum = tl.log(tl.sum(sum_T * tl.exp(tl.maximum(best_T.to(tl.float64) - best, -1000.0)), 0))
        logits_ptr += s * stride
        tl.store(logprob_ptr + s, logprob(tl.load(logits_ptr + token).to(tl.float32), best, log_sum))
        if asked > 0:
            room_ptr, room_w_ptr, groups_ptr = room_ptr + 2 * s * C, room_w_ptr + 2 * s * C, groups_ptr + s * tiles * G
            most = tl.minimum(V, K)
            least = _least(logits_ptr, groups_ptr, tiles * G, V, best, log_sum, most, room_ptr, room_w_ptr, B, G * T, C)
            _list(logits_ptr, V, best, log_sum, least, room_ptr, B)
            _report(logits_ptr, best, log_sum, most, room_ptr, top_ids_ptr + s * K, top_logprobs_ptr + s * K, K)


@triton.jit
def _least(
    x_ptr,
    groups_ptr,
    n_groups,
    V,
    best,
    log_sum,
    most,
    room_ptr,
    room_w_ptr,
    B: tl.constexpr,
    N: tl.constexpr,
    C: tl.constexpr,
):
    """The key of the last token to report."""
    kind: tl.constexpr = BY_LOGPROB
    high = ordered(logprob(best, best, log_sum)).to(tl.int64) + 1
    low = least_of_groups(kind, groups_ptr, n_groups, best, log_sum, high, most, N)
    least = edge(kind, x_ptr, x_ptr, V, 0.0, 1.0, best, log_sum, low, high, most, room_ptr, room_w_ptr, B, C)
    tl.debug_barrier()
    return least.to(tl.int32)


@triton.jit
def _list(x_ptr, V, best, log_sum, least, room_ptr, B: tl.constexpr):
    """Ids above the edge, and behind the first 32 places the first ids at the edge; -1 in unused places."""
    places = tl.arange(0, 2 * _LIST)
    tl.store(room_ptr + places, places * 0 - 1)
    tl.debug_barrier()
    above, equal = 0, 0
    for start in range(0, V, B):
        ids = start + tl.arange(0, B)
        key, _ = look(BY_LOGPROB, x_ptr, x_ptr, ids, V, 0.0, 1.0, best, log_sum)
        is_above, is_equal = (key > least).to(tl.int32), (key == least).to(tl.int32)
        more, same = tl.sum(is_above, 0), tl.sum(is_equal, 0)
        if more > 0:
            tl.store(room_ptr + above + tl.cumsum(is_above, 0) - 1, ids, mask=is_above > 0)
        if (same > 0) & (equal < _LIST):
            place = equal + tl.cumsum(is_equal, 0) - 1
            tl.store(room_ptr + _LIST + place, ids, mask=(is_equal > 0) & (place < _LIST))
        above += more
        equal += same
    tl.debug_barrier()


@triton.jit
def _report(x_ptr, best, log_sum, most, room_ptr, top_ids_ptr, top_logprobs_ptr, K: tl.constexpr):
    """The listed in order: the most likely first, the lower id among equals; -1 and -inf behind a small vocabulary."""
    id_L = tl.load(room_ptr + tl.arange(0, 2 * _LIST))
    value_L = logprob(tl.load(x_ptr + id_L, mask=id_L >= 0, other=0.0).to(tl.float32), best, log_sum)
    key_L = tl.where(id_L >= 0, ordered(value_L), NO_KEY)
    is_before_LL = (key_L[:, None] > key_L[None, :]) | (
        (key_L[:, None] == key_L[None, :]) & (id_L[:, None] < id_L[None, :])
    )
    rank_L = tl.sum(is_before_LL.to(tl.int32), 0)
    is_told_L = (id_L >= 0) & (rank_L < most)
    tl.store(top_ids_ptr + rank_L, id_L, mask=is_told_L)
    tl.store(top_logprobs_ptr + rank_L, value_L, mask=is_told_L)
    places = tl.arange(0, _LIST)
    tl.store(top_ids_ptr + places, places * 0 - 1, mask=(places >= most) & (places < K))
    tl.store(top_logprobs_ptr + places, NOTHING, mask=(places >= most) & (places < K))
