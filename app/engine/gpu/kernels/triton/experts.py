"""Triton kernels of mixtures of experts: the choice of a row's experts, rows grouped by expert, and their products.

    route       [T, E] logits, in splits of the width         a program: 16 tokens, 16 experts
    choose      ids and weights of a token's experts          a program: a token
    count       how many tokens each expert has               a program: an expert
    group       tokens by expert, in items of up to B         a program: an expert
    up, down    products of an item with its expert           a program: an item, 64 rows of the matrix
    combine     the sum of a token's experts, by their ids    a program: a token, 1,024 columns

Nothing is read on the host: the grids are those of the most items that so many tokens can have, and programs without an
item return at once. A padding token (row -1) has no experts, and an expert without tokens has no item, so that its
weights are not read.

    an item                          t: tokens of the item, 16 or 64
                 +---------------+
               k |      x^T      |      in steps of BLOCK_K from the first column
          k      +---------------+
        +----+   +---------------+
      n |  W | x | sums, float32 |  + bias of row n, rounded as x is
        +----+   +---------------+

As in quantized_products.py, 64 rows of W fill the matrix unit however few tokens an item has, and both sizes of items
sum in the same order with the same kind of instruction. A column of x^T meets no other column, so the bits of a token
do not depend on the tokens beside it, nor on which of them chose the same expert (to be verified on each GPU model).

Shape legend: T tokens of the step, D width, E experts, C experts of a token, A = T C, I items, F hidden size of an
expert, N rows and K columns of a matrix, Y splits; X columns of a program.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from app.engine.gpu.kernels.interface import (
    COLUMNS,
    ROUTER_LAUNCH,
    ROW_LAUNCH,
    ExpertMatrices,
    ExpertsSpec,
    RouterSpec,
    expert_item_tokens,
    experts_launch,
    power_of_two,
)
from app.engine.gpu.kernels.triton.activations import activate, activate_gated
from app.engine.gpu.kernels.triton.packed_weights import UNPACKED, packed_constants, packed_pointers, packed_tile
from model.nn.feed_forward import LEAST_SUM, Routes
from model.nn.packed_tensors import PackedTensors

ROUTER_SPLIT = 256
"""Columns of the router that a program sums; choose_kernel adds the splits in order."""
_ROUTER_TILE = {"BLOCK_T": 16, "BLOCK_E": 16, "BLOCK_K": 64}
_IDS = 1024
"""Ids that count_kernel and group_kernel look at together."""
_LEAST_KEY = tl.constexpr(-(2**31))
_NAN_KEY = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["n_tokens"])
def route_kernel(
    x_ptr, weight_ptr, logits_ptr, n_tokens,
    N_EXPERTS: tl.constexpr, WIDTH: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The logits [Y, T, E] of some tokens and experts over one split of the width, in float32."""
    token_T = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    expert_E = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    first = tl.program_id(2) * SPLIT
    is_token_T, is_expert_E = token_T < n_tokens, expert_E < N_EXPERTS
    logits_TE = tl.zeros((BLOCK_T, BLOCK_E), tl.float32)
    for start in range(first, tl.minimum(first + SPLIT, WIDTH), BLOCK_K):
        column_K = start + tl.arange(0, BLOCK_K)
        is_column_K = column_K < WIDTH
        x_offset_TK = token_T.to(tl.int64)[:, None] * WIDTH + column_K[None, :]
        x_TK = tl.load(x_ptr + x_offset_TK, mask=is_token_T[:, None] & is_column_K[None, :], other=0.0)
        weight_offset_KE = expert_E[None, :] * WIDTH + column_K[:, None]
        w_KE = tl.load(weight_ptr + weight_offset_KE, mask=is_column_K[:, None] & is_expert_E[None, :], other=0.0)
        logits_TE = tl.dot(x_TK.to(tl.float32), w_KE.to(tl.float32), logits_TE, input_precision="ieee")
    row_T = (tl.program_id(2) * n_tokens + token_T).to(tl.int64) * N_EXPERTS
    out_mask_TE = is_token_T[:, None] & is_expert_E[None, :]
    tl.store(logits_ptr + row_T[:, None] + expert_E[None, :], logits_TE, mask=out_mask_TE)


@triton.jit
def rank_keys(scores_E):
    """Integers in the order of the scores; zeros of both signs are equal, and NaN is the largest, as in torch."""
    bits_E = (scores_E + 0.0).to(tl.int32, bitcast=True)
    keys_E = tl.where(bits_E < 0, bits_E ^ 0x7FFFFFFF, bits_E)
    return tl.where(scores_E != scores_E, _NAN_KEY, keys_E)


@triton.jit
def softmax_of(scores_E, is_part_E):
    """Softmax over a part of the scores; 0 elsewhere."""
    best = tl.max(tl.where(is_part_E, scores_E, float("-inf")), axis=0)
    weights_E = tl.where(is_part_E, tl.exp(scores_E - best), 0.0)
    return weights_E / tl.sum(weights_E, axis=0)


@triton.jit(do_not_specialize=["n_tokens"])
def choose_kernel(
    logits_ptr, bias_ptr, choice_bias_ptr, tile_row_ptr, ids_ptr, weights_ptr, n_tokens, factor,
    N_EXPERTS: tl.constexpr, PADDED: tl.constexpr, CHOSEN: tl.constexpr, SPLITS: tl.constexpr, SCORE: tl.constexpr,
    NORMALIZED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CHOICE_BIAS: tl.constexpr, LEAST_SUM: tl.constexpr,
):  # fmt: skip
    """The experts of one token in the order of their ids, and their weights; -1 and 0 for a padding token."""
    token = tl.program_id(0).to(tl.int64)
    expert_E = tl.arange(0, PADDED)
    is_expert_E = expert_E < N_EXPERTS
    scores_E = tl.load(logits_ptr + token * N_EXPERTS + expert_E, mask=is_expert_E, other=0.0)
    for split in tl.static_range(1, SPLITS):
        row = split * n_tokens + token
        scores_E += tl.load(logits_ptr + row * N_EXPERTS + expert_E, mask=is_expert_E, other=0.0)
    if HAS_BIAS:
        scores_E += tl.load(bias_ptr + expert_E, mask=is_expert_E, other=0.0).to(tl.float32)
    if SCORE == "softmax":
        scores_E = softmax_of(scores_E, is_expert_E)
    if SCORE == "sigmoid":
        scores_E = 1.0 / (1.0 + tl.exp(-scores_E))
    ranked_E = scores_E
    if HAS_CHOICE_BIAS:
        ranked_E += tl.load(choice_bias_ptr + expert_E, mask=is_expert_E, other=0.0).to(tl.float32)
    keys_E = tl.where(is_expert_E, rank_keys(ranked_E), _LEAST_KEY)
    is_chosen_E = expert_E < 0
    for _ in range(CHOSEN):
        is_best_E = keys_E == tl.max(keys_E, axis=0)
        is_next_E = expert_E == tl.min(tl.where(is_best_E, expert_E, PADDED), axis=0)
        is_chosen_E = is_chosen_E | is_next_E
        keys_E = tl.where(is_next_E, _LEAST_KEY, keys_E)
    weights_E = tl.where(is_chosen_E, scores_E, 0.0)
    if SCORE == "softmax_of_chosen":
        weights_E = softmax_of(scores_E, is_chosen_E)
    if NORMALIZED:
        total = tl.sum(weights_E, axis=0)
        weights_E = weights_E / tl.where(total < LEAST_SUM, LEAST_SUM, total)
    place_E = token * CHOSEN + tl.cumsum(is_chosen_E.to(tl.int32), 0) - 1
    is_real = tl.load(tile_row_ptr + token) >= 0
    tl.store(ids_ptr + place_E, tl.where(is_real, expert_E, -1), mask=is_chosen_E)
    tl.store(weights_ptr + place_E, tl.where(is_real, weights_E * factor, 0.0), mask=is_chosen_E)


def route(x_TD: Tensor, router: RouterSpec, tile_rows_T: Tensor) -> Routes:
    """See Kernels.route."""
    assert x_TD.is_contiguous() and router.weight_ED.is_contiguous()
    (n_tokens, width), count, chosen = x_TD.shape, len(router.weight_ED), router.experts.chosen
    splits = triton.cdiv(width, ROUTER_SPLIT)
    logits_YTE = torch.empty(splits, n_tokens, count, dtype=torch.float32, device=x_TD.device)
    grid = (triton.cdiv(n_tokens, _ROUTER_TILE["BLOCK_T"]), triton.cdiv(count, _ROUTER_TILE["BLOCK_E"]), splits)
    route_kernel[grid](
        x_TD, router.weight_ED, logits_YTE, n_tokens,
        N_EXPERTS=count, WIDTH=width, SPLIT=ROUTER_SPLIT, **_ROUTER_TILE, **ROUTER_LAUNCH,
    )  # fmt: skip
    ids_TC = torch.empty(n_tokens, chosen, dtype=torch.int32, device=x_TD.device)
    weights_TC = torch.empty(n_tokens, chosen, dtype=torch.float32, device=x_TD.device)
    bias, choice_bias = (logits_YTE if each is None else each for each in (router.bias_E, router.choice_bias_E))
    choose_kernel[(n_tokens,)](
        logits_YTE, bias, choice_bias, tile_rows_T, ids_TC, weights_TC, n_tokens, router.experts.factor,
        N_EXPERTS=count, PADDED=power_of_two(count), CHOSEN=chosen, SPLITS=splits, SCORE=router.experts.score,
        NORMALIZED=router.experts.normalized, HAS_BIAS=router.bias_E is not None,
        HAS_CHOICE_BIAS=router.choice_bias_E is not None, LEAST_SUM=LEAST_SUM, **ROW_LAUNCH,
    )  # fmt: skip
    return Routes(ids_TC, weights_TC)


class ExpertGroups(NamedTuple):
    """The tokens of a step by expert, int32 on the device.

    A choice is a token's number times C plus the place of the expert among its experts. A place is where a choice comes
    among those of all tokens, sorted by expert.
    """

    count_1: Tensor
    """Number of items."""
    items_I3: Tensor
    """Expert, first place, and number of places of each item."""
    choices_A: Tensor
    """The choice at each place; entries after the last place are not written."""


@triton.jit(do_not_specialize=["n_choices"])
def count_kernel(ids_ptr, counts_ptr, n_choices, IDS: tl.constexpr):
    """How many tokens chose one expert."""
    expert, count = tl.program_id(0), 0
    for first in range(0, n_choices, IDS):
        index_A = first + tl.arange(0, IDS)
        ids_A = tl.load(ids_ptr + index_A, mask=index_A < n_choices, other=-1)
        count += tl.sum((ids_A == expert).to(tl.int32), 0)
    tl.store(counts_ptr + expert, count)


@triton.jit(do_not_specialize=["n_choices"])
def group_kernel(
    ids_ptr, counts_ptr, count_ptr, items_ptr, choices_ptr, n_choices,
    N_EXPERTS: tl.constexpr, PADDED: tl.constexpr, BLOCK_T: tl.constexpr, IDS: tl.constexpr,
):  # fmt: skip
    """Places and items of one expert, which follow those of earlier experts."""
    expert, expert_E = tl.program_id(0), tl.arange(0, PADDED)
    counts_E = tl.load(counts_ptr + expert_E, mask=expert_E < N_EXPERTS, other=0)
    items_E = (counts_E + BLOCK_T - 1) // BLOCK_T
    first_place = tl.sum(tl.where(expert_E < expert, counts_E, 0), 0)
    first_item = tl.sum(tl.where(expert_E < expert, items_E, 0), 0)
    place = first_place
    for first in range(0, n_choices, IDS):
        index_A = first + tl.arange(0, IDS)
        is_own_A = tl.load(ids_ptr + index_A, mask=index_A < n_choices, other=-1) == expert
        until_A = tl.cumsum(is_own_A.to(tl.int32), 0)
        tl.store(choices_ptr + place + until_A - 1, index_A, mask=is_own_A)
        place += tl.sum(is_own_A.to(tl.int32), 0)
    n_items = (place - first_place + BLOCK_T - 1) // BLOCK_T
    for item in range(n_items):
        item_ptr, item_place = items_ptr + 3 * (first_item + item), first_place + item * BLOCK_T
        tl.store(item_ptr, expert)
        tl.store(item_ptr + 1, item_place)
        tl.store(item_ptr + 2, tl.minimum(place - item_place, BLOCK_T))
    if expert == N_EXPERTS - 1:
        tl.store(count_ptr, first_item + n_items)


def group_by_expert(ids_TC: Tensor, n_experts: int) -> ExpertGroups:
    """Groups the tokens of a step by expert."""
    n_choices, block_t = ids_TC.numel(), expert_item_tokens(ids_TC.numel(), n_experts)
    most_items = min(n_choices, n_choices // block_t + n_experts)
    counts_E = ids_TC.new_empty(n_experts)
    groups = ExpertGroups(*(ids_TC.new_empty(size) for size in ((1,), (most_items, 3), (n_choices,))))
    count_kernel[(n_experts,)](ids_TC, counts_E, n_choices, IDS=_IDS, **ROW_LAUNCH)
    group_kernel[(n_experts,)](
        ids_TC, counts_E, *groups, n_choices,
        N_EXPERTS=n_experts, PADDED=power_of_two(n_experts), BLOCK_T=block_t, IDS=_IDS, **ROW_LAUNCH,
    )  # fmt: skip
    return groups


@triton.jit
def product_of(
    x_1T, is_token_T, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
    matrix, row_N, is_row_N,
    N_ROWS: tl.constexpr, N_COLUMNS: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """[N, T] in float32: rows of one matrix times the tokens whose numbers begin at x_1T. BITS 0: it is not packed."""
    row_N = matrix.to(tl.int64) * N_ROWS + row_N
    out_NT = tl.zeros((row_N.shape[0], x_1T.shape[1]), tl.float32)
    for start in range(0, N_COLUMNS, BLOCK_K):
        column_K = start + tl.arange(0, BLOCK_K)
        is_column_K = column_K < N_COLUMNS
        if BITS == 0:
            w_mask_NK = is_row_N[:, None] & is_column_K[None, :]
            w_NK = tl.load(weight_ptr + row_N[:, None] * N_COLUMNS + column_K[None, :], mask=w_mask_NK, other=0)
        else:
            w_NK = packed_tile(
                weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, row_N, is_row_N, start,
                N_COLUMNS, BLOCK_K, BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
            )  # fmt: skip
        x_KT = tl.load(x_1T + column_K[:, None], mask=is_column_K[:, None] & is_token_T[None, :], other=0.0)
        out_NT = tl.dot(w_NK.to(x_KT.dtype), x_KT, out_NT, input_precision="ieee")
    if HAS_BIAS:
        out_NT += tl.load(bias_ptr + row_N, mask=is_row_N, other=0.0).to(tl.float32)[:, None]
    return out_NT


@triton.jit
def expert_up_kernel(
    x_ptr, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
    count_ptr, items_ptr, choices_ptr, out_ptr,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, CHOSEN: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Some hidden numbers of an item, activated: the products with gate and up are rounded, then what follows."""
    if tl.program_id(1) >= tl.load(count_ptr):
        return
    item_ptr = items_ptr + 3 * tl.program_id(1)
    expert, place = tl.load(item_ptr), tl.load(item_ptr + 1)
    token_T = tl.arange(0, BLOCK_T)
    is_token_T = token_T < tl.load(item_ptr + 2)
    token_T = place + token_T
    choice_T = tl.load(choices_ptr + token_T, mask=is_token_T, other=0)
    x_1T = x_ptr + (choice_T // CHOSEN).to(tl.int64)[None, :] * WIDTH
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N = row_N < HIDDEN
    ROWS: tl.constexpr = 2 * HIDDEN if GATED else HIDDEN
    gate_NT = product_of(
        x_1T, is_token_T, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
        expert, row_N, is_row_N, ROWS, WIDTH, HAS_BIAS, BLOCK_K,
        BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
    ).to(out_ptr.dtype.element_ty)  # fmt: skip
    if GATED:
        up_NT = product_of(
            x_1T, is_token_T, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
            expert, HIDDEN + row_N, is_row_N, ROWS, WIDTH, HAS_BIAS, BLOCK_K,
            BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
        ).to(out_ptr.dtype.element_ty)  # fmt: skip
        out_NT = activate_gated(gate_NT, up_NT, bias_ptr, KIND)
    else:
        out_NT = activate(gate_NT.to(tl.float32), bias_ptr, KIND).to(gate_NT.dtype)
    offset_NT = token_T.to(tl.int64)[None, :] * HIDDEN + row_N[:, None]
    tl.store(out_ptr + offset_NT, out_NT, mask=is_row_N[:, None] & is_token_T[None, :])


@triton.jit
def expert_down_kernel(
    hidden_ptr, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
    count_ptr, items_ptr, choices_ptr, out_ptr,
    WIDTH: tl.constexpr, HIDDEN: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    BITS: tl.constexpr, GROUP: tl.constexpr, HAS_UNITS: tl.constexpr, HAS_OFFSETS: tl.constexpr,
    STEP: tl.constexpr, FIRST: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
):  # fmt: skip
    """Some numbers of what an expert computes for the tokens of an item, rounded, in the order of choices."""
    if tl.program_id(1) >= tl.load(count_ptr):
        return
    item_ptr = items_ptr + 3 * tl.program_id(1)
    expert, place = tl.load(item_ptr), tl.load(item_ptr + 1)
    token_T = tl.arange(0, BLOCK_T)
    is_token_T = token_T < tl.load(item_ptr + 2)
    token_T = place + token_T
    choice_T = tl.load(choices_ptr + token_T, mask=is_token_T, other=0)
    x_1T = hidden_ptr + token_T.to(tl.int64)[None, :] * HIDDEN
    row_N = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row_N = row_N < WIDTH
    out_NT = product_of(
        x_1T, is_token_T, weight_ptr, scales_ptr, scale_units_ptr, offsets_ptr, offset_units_ptr, bias_ptr,
        expert, row_N, is_row_N, WIDTH, HIDDEN, HAS_BIAS, BLOCK_K,
        BITS, GROUP, HAS_UNITS, HAS_OFFSETS, STEP, FIRST, LOW, HIGH,
    )  # fmt: skip
    offset_NT = choice_T.to(tl.int64)[None, :] * WIDTH + row_N[:, None]
    tl.store(out_ptr + offset_NT, out_NT.to(out_ptr.dtype.element_ty), mask=is_row_N[:, None] & is_token_T[None, :])


@triton.jit
def combine_kernel(
    outputs_ptr, ids_ptr, weights_ptr, out_ptr, WIDTH: tl.constexpr, CHOSEN: tl.constexpr, COLUMNS: tl.constexpr
):
    """Some columns of one token: the sum of its experts times their weights, in float32; 0 for a padding token."""
    token, column_X = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column_X = column_X < WIDTH
    total_X = tl.zeros((COLUMNS,), tl.float32)
    for choice in range(token * CHOSEN, token * CHOSEN + CHOSEN):
        is_part_X = is_column_X & (tl.load(ids_ptr + choice) >= 0)
        part_X = tl.load(outputs_ptr + choice * WIDTH + column_X, mask=is_part_X, other=0.0).to(tl.float32)
        total_X += part_X * tl.load(weights_ptr + choice)
    tl.store(out_ptr + token * WIDTH + column_X, total_X.to(out_ptr.dtype.element_ty), mask=is_column_X)


def compute_experts(x_TD: Tensor, routes: Routes, experts: ExpertsSpec) -> Tensor:
    """See Kernels.experts."""
    ids_TC, weights_TC = routes
    assert x_TD.is_contiguous() and ids_TC.is_contiguous() and weights_TC.is_contiguous()
    (n_tokens, width), (n_choices, chosen) = x_TD.shape, (ids_TC.numel(), ids_TC.shape[1])
    n_experts, _, hidden = experts.down.numbers.shape
    groups, block_t = group_by_expert(ids_TC, n_experts), expert_item_tokens(n_choices, n_experts)
    hidden_AF, out_AD = (x_TD.new_empty(n_choices, size) for size in (hidden, width))
    sizes = {"WIDTH": width, "HIDDEN": hidden, "BLOCK_T": block_t}
    n_items = len(groups.items_I3)
    for kernel, x, rows, matrices, out, more in (
        (
            expert_up_kernel, x_TD, hidden, experts.up, hidden_AF,
            {"CHOSEN": chosen, "KIND": experts.activation, "GATED": experts.gated},
        ),
        (expert_down_kernel, hidden_AF, width, experts.down, out_AD, {}),
    ):  # fmt: skip
        numbers = matrices.numbers
        packed = numbers.format if isinstance(numbers, PackedTensors) else None
        launch = experts_launch(block_t, x_TD.element_size(), is_packed=packed is not None)
        kernel[(triton.cdiv(rows, launch["BLOCK_N"]), n_items)](
            x, *_pointers(matrices), *groups, out,
            HAS_BIAS=matrices.bias_EN is not None, **(packed_constants(packed) if packed else UNPACKED),
            **sizes, **more, **launch,
        )  # fmt: skip
    out_TD = torch.empty_like(x_TD)
    combine_kernel[(n_tokens, triton.cdiv(width, COLUMNS))](
        out_AD, ids_TC, weights_TC, out_TD, WIDTH=width, CHOSEN=chosen, COLUMNS=COLUMNS, **ROW_LAUNCH
    )
    return out_TD


def _pointers(matrices: ExpertMatrices) -> tuple[Tensor, ...]:
    """packed_pointers() and the bias; a missing array is replaced by one that kernels do not read."""
    numbers, bias = matrices
    if isinstance(numbers, PackedTensors):
        pointers: tuple[Tensor, ...] = packed_pointers(numbers)
    else:
        assert numbers.is_contiguous()
        pointers = (numbers,) * 5
    return (*pointers, pointers[0] if bias is None else bias)
