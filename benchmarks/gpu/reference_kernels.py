"""Reference implementation of a step's operations on a GPU in plain torch, which the Triton kernels are tested against.

It computes in float64 and rounds where app/engine/gpu/kernels/interface.py says so, so that the order of summation does
not affect the result, and a row has the same bits alone, in any batch and in any chunk. Nothing is read on the host,
and no shape depends on a value. Tests and measurements also run the GPU's engine with it on a CPU. Shape legend: as in
interface.py; N tokens of a tile, G = H / K, L positions.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.gpu.kernels.interface import (
    SPLIT,
    AttentionBatch,
    ExpertMatrices,
    ExpertsSpec,
    HeadsSpec,
    NormSpec,
    RouterSpec,
    RowLookup,
    RowState,
)
from app.engine.gpu.kernels.sample_out import TOP, SampleOut
from app.engine.gpu.kernels.sampling_table import SamplingTable
from app.engine.sampling import parameters as layout
from app.engine.sampling.sampler import ADJUSTMENTS, FILTERS, GREEDY, RowParameters, draw_tokens, philox, score
from model.config import Activation
from model.nn.feed_forward import LEAST_SUM, Routes
from model.nn.layers import ACTIVATIONS, activate_hidden, rotate, xielu
from model.nn.packed_tensors import PackedTensors

_STAGES = frozenset({GREEDY, *(stage.name for stage in ADJUSTMENTS + FILTERS)}) - {"min_tokens"}
"""All but that: the mask of a resident row lacks the tokens that end the text."""


def attention(
    q_THC: Tensor,
    layer_cache: Tensor,
    batch: AttentionBatch,
    window: int | None,
    soft_cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """See Kernels.attention."""
    n_kv_heads, head_dim = layer_cache.shape[3:]
    tokens_XN, positions_XN, valid_XN = _tile_tokens(batch, len(q_THC))
    k_XLKC, v_XLKC, visible_XL = _keys_and_values(layer_cache, batch, window)
    q_XNKGC = q_THC.double()[tokens_XN.clamp(max=len(q_THC) - 1)].unflatten(2, (n_kv_heads, -1))
    scores_XKGNL = torch.einsum("xnkgc,xlkc->xkgnl", q_XNKGC, k_XLKC) * head_dim**-0.5
    if soft_cap is not None:
        scores_XKGNL = soft_cap * torch.tanh(scores_XKGNL / soft_cap)
    visible_XNL = _visible(positions_XN, visible_XL, window) & valid_XN[:, :, None]
    scores_XKGNL = scores_XKGNL.masked_fill(~visible_XNL[:, None, None], float("-inf"))
    if sinks_H is not None:  # one more position, whose weight is left out
        sinks_KG11 = sinks_H.double().view(n_kv_heads, -1, 1, 1)
        scores_XKGNL = torch.cat((scores_XKGNL, sinks_KG11.expand(*scores_XKGNL.shape[:-1], 1)), dim=-1)
    weights_XKGNL = scores_XKGNL.softmax(-1)[..., : k_XLKC.shape[1]]
    weights_XKGNL = weights_XKGNL.masked_fill(~valid_XN[:, None, None, :, None], 0.0)  # padding attends to nothing
    out_XNKGC = torch.einsum("xkgnl,xlkc->xnkgc", weights_XKGNL, v_XLKC)
    return _scatter(out_XNKGC.flatten(2, 3).to(q_THC.dtype), tokens_XN, q_THC)


def _tile_tokens(batch: AttentionBatch, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """[X, N] each: indices in T (`count` for padding), positions (-1 for padding), and whether the token is real."""
    offsets_N = torch.arange(batch.tile_tokens, device=batch.tile_row_X.device)
    valid_XN = (offsets_N < batch.tile_length_X[:, None]) & (batch.tile_row_X[:, None] >= 0)
    tokens_XN = (batch.tile_start_X[:, None] + offsets_N).where(valid_XN, count)
    return tokens_XN, (batch.tile_position_X[:, None] + offsets_N).where(valid_XN, -1), valid_XN


def _keys_and_values(layer_cache: Tensor, batch: AttentionBatch, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """k and v [X, L, K, C] of each tile's sequence, zeros where no token attends to them; and that mask [X, L]."""
    block_size, n_blocks = layer_cache.shape[2], batch.block_table_RB.shape[1]
    length = min(batch.max_splits * SPLIT, n_blocks * block_size)
    key_positions_L = torch.arange(length, device=layer_cache.device)
    stops_X1 = (batch.tile_position_X + batch.tile_length_X)[:, None]
    visible_XL = (key_positions_L < stops_X1) & (batch.tile_row_X[:, None] >= 0)
    if window is not None:
        visible_XL = visible_XL & (key_positions_L > batch.tile_position_X[:, None] - window)
    blocks_XL = batch.block_table_RB[batch.tile_row_X.clamp(min=0).long()][:, key_positions_L // block_size]
    slots_XL = (blocks_XL.long() * block_size + key_positions_L % block_size).where(visible_XL, 0)
    rows_YKC = layer_cache.flatten(1, 2)[:, slots_XL.flatten()].double()
    k_XLKC, v_XLKC = rows_YKC.unflatten(1, slots_XL.shape).masked_fill(~visible_XL[:, :, None, None], 0.0)
    return k_XLKC, v_XLKC, visible_XL


def _visible(positions_XN: Tensor, visible_XL: Tensor, window: int | None) -> Tensor:
    """[X, N, L]: whether a token attends to a position."""
    key_positions_L = torch.arange(visible_XL.shape[1], device=visible_XL.device)
    visible_XNL = visible_XL[:, None] & (key_positions_L <= positions_XN[:, :, None])
    return visible_XNL if window is None else visible_XNL & (key_positions_L > positions_XN[:, :, None] - window)


def _scatter(out_XNHC: Tensor, tokens_XN: Tensor, q_THC: Tensor) -> Tensor:
    """Writes each token's result to its row of q_THC, which it returns. Padding goes to an extra row."""
    rows_THC = torch.cat((q_THC, q_THC[:1]))
    rows_THC[tokens_XN.flatten()] = out_XNHC.flatten(0, 1)
    return q_THC.copy_(rows_THC[:-1])


def look_up(rows_T: Tensor, lengths_T: Tensor, tokens_T: Tensor | None, state: RowState) -> RowLookup:
    """See Kernels.look_up."""
    index_T, positions_T, padding_row = rows_T.long(), lengths_T - 1, len(state.block_table_RB) - 1
    last_T = state.last_token_R[index_T]
    blocks_T = state.block_table_RB[index_T, (positions_T // state.block_size).long()]
    return RowLookup(
        last_T if tokens_T is None else tokens_T.where(tokens_T >= 0, last_T),
        positions_T,
        blocks_T * state.block_size + positions_T % state.block_size,
        rows_T.where(rows_T != padding_row, -1),
    )


def divide_attention(
    batch: AttentionBatch, _n_heads: int, _n_kv_heads: int, _head_dim: int, _window: int | None
) -> AttentionBatch:
    """See Kernels.divide_attention: here there are no programs."""
    return batch


def sample(
    logits_SV: Tensor,
    rows_S: Tensor,
    positions_S: Tensor,
    table: SamplingTable,
    out: SampleOut,
    given_S: Tensor | None = None,
) -> None:
    """See Kernels.sample. Runs every stage on every row; counts the tokens of rows with penalties.

    A row with logits that are not finite, or whose mask allows no token, gets -1 and is not counted.
    """
    rows = _row_parameters(table, rows_S, positions_S)
    seed_low_S1, seed_high_S1 = rows.word(layout.SEED), rows.word(layout.SEED + 1)
    numbers_S1 = device_uniforms(seed_low_S1, seed_high_S1, rows.word(layout.CHOICE), rows.positions_S1)
    tokens_S1, is_valid_S1, raw_SV = draw_tokens(logits_SV, rows, numbers_S1)
    table.last_token_R.index_copy_(0, rows_S.long(), tokens_S1.where(is_valid_S1, 0).squeeze(1).to(torch.int32))
    index_S1 = rows_S.long()[:, None] * table.vocab_size + tokens_S1
    increment_S1 = 2 * ((rows.word(layout.FLAGS) & layout.COUNTED > 0) & is_valid_S1)
    table.counts_RV.view(-1).index_add_(0, index_S1.squeeze(1), increment_S1.to(torch.int32).squeeze(1))
    if given_S is not None:
        tokens_S1 = given_S.long()[:, None]
    out.tokens_S.copy_(tokens_S1.where(is_valid_S1, -1).squeeze(1))
    logprob_S, ids_SN, logprobs_SN = score(raw_SV, tokens_S1, TOP)
    n_top = ids_SN.shape[1]
    out.logprob_S.copy_(logprob_S)
    out.top_ids_SN.fill_(-1)[:, :n_top].copy_(ids_SN)
    out.top_logprobs_SN.fill_(float("-inf"))[:, :n_top].copy_(logprobs_SN)


def _row_parameters(table: SamplingTable, rows_S: Tensor, positions_S: Tensor) -> RowParameters:
    """The parameters of the resident rows of a step, for all stages."""
    words_SW = table.words_RW.index_select(0, rows_S)
    n_generated_S = positions_S - words_SW[:, layout.N_PROMPT]
    is_masked_S1 = (n_generated_S < words_SW[:, layout.MIN_TOKENS])[:, None]
    return RowParameters(
        stages=_STAGES,
        may_wait=False,
        header_SX=words_SW[:, : layout.HEADER_WORDS],
        stop_ids_SN=words_SW[:, :0].long(),
        bias_ids_SN=words_SW[:, layout.BIAS_IDS : layout.BIASES].long(),
        biases_SN=words_SW[:, layout.BIASES :].view(torch.float64),
        positions_S1=positions_S[:, None],
        counts_SV=table.counts_RV.index_select(0, rows_S),
        counted_ids_SN=torch.arange(table.vocab_size, device=rows_S.device).expand(len(rows_S), -1),
        allowed_SX=table.masks_RM.index_select(0, rows_S).where(is_masked_S1, -1),
    )


def device_uniforms(seed_low: Tensor, seed_high: Tensor, choice: Tensor, position: Tensor) -> Tensor:
    """uniforms() as float64, one for each element. Words may be signed; positions are not negative."""
    position = position.long()
    low = 0xFFFFFFFF
    counter = (position & low, position >> 32, choice.long() & low, position * 0)
    first, second, _, _ = philox(counter, (seed_low.long() & low, seed_high.long() & low))
    return ((first >> 5) * 2**26 + (second >> 6)).double() * 2.0**-53


class ReferenceKernels:
    """`Kernels` in plain torch."""

    look_up = staticmethod(look_up)
    divide_attention = staticmethod(divide_attention)
    attention = staticmethod(attention)
    sample = staticmethod(sample)

    def add_norm(
        self, x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec, out_TD: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """See Kernels.add_norm."""
        if delta_TD is not None:
            x_TD = x_TD + delta_TD
        normed_TD = x_TD
        match norm.kind:
            case "rmsnorm":
                normed_TD = _rms_norm(x_TD, norm.weight, norm.eps)
            case "layernorm":
                weight, bias = (None if part is None else part.double() for part in (norm.weight, norm.bias))
                normed_TD = F.layer_norm(x_TD.double(), x_TD.shape[-1:], weight, bias, norm.eps).to(x_TD.dtype)
        return x_TD, normed_TD if out_TD is None else out_TD.copy_(normed_TD)

    def split_heads(
        self,
        qkv_TX: Tensor,
        spec: HeadsSpec,
        positions_T: Tensor,
        rope_PC: Tensor | None,
        layer_cache: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """See Kernels.split_heads."""
        heads_TNC = qkv_TX.unflatten(1, (-1, spec.head_dim))
        q_THC, k_TKC, v_TKC = heads_TNC.split((spec.n_heads, spec.n_kv_heads, spec.n_kv_heads), dim=1)
        if not spec.norms_after:
            q_THC, k_TKC = _normed_heads(q_THC, k_TKC, spec)
        if rope_PC is not None:
            cos_T1F, sin_T1F = rope_PC[positions_T.long()].unsqueeze(1).chunk(2, dim=-1)
            q_THC, k_TKC = rotate(q_THC, cos_T1F, sin_T1F), rotate(k_TKC, cos_T1F, sin_T1F)
        if spec.norms_after:
            q_THC, k_TKC = _normed_heads(q_THC, k_TKC, spec)
        if spec.query_scale_P is not None:
            q_THC = (q_THC * spec.query_scale_P[positions_T.long()][:, None, None]).to(k_TKC.dtype)
        for half_XKC, new_TKC in zip(layer_cache.flatten(1, 2), (k_TKC, v_TKC), strict=True):
            _write_cache(half_XKC, slots_T, new_TKC)
        factored_THC: Tensor = q_THC.contiguous() if spec.q_factor == 1.0 else q_THC * spec.q_factor
        return factored_THC

    def gate(self, hidden_TX: Tensor, activation: Activation, gated: bool, parameters: Tensor | None = None) -> Tensor:
        """See Kernels.gate."""
        if activation == "swiglu_clamped":
            return activate_hidden(activation, hidden_TX.double(), gated=gated).to(hidden_TX.dtype)
        function = ACTIVATIONS[activation] if parameters is None else partial(xielu, curvature_2=parameters)
        if not gated:
            return function(hidden_TX.double()).to(hidden_TX.dtype)
        gate_TF, up_TF = hidden_TX.chunk(2, dim=-1)
        return function(gate_TF.double()).to(hidden_TX.dtype) * up_TF

    def route(self, x_TD: Tensor, router: RouterSpec, tile_rows_T: Tensor) -> Routes:
        """See Kernels.route."""
        experts = router.experts
        bias, choice_bias = (None if each is None else each.double() for each in (router.bias_E, router.choice_bias_E))
        scores_TE = F.linear(x_TD.double(), router.weight_ED.double(), bias).float()
        if experts.score != "softmax_of_chosen":  # rounded: distinct scores may become equal
            wide_TE = scores_TE.double()
            scores_TE = (wide_TE.softmax(-1) if experts.score == "softmax" else wide_TE.sigmoid()).float()
        ranked_TE = scores_TE if choice_bias is None else (scores_TE + choice_bias).float()
        order_TE = ranked_TE.sort(dim=-1, descending=True, stable=True).indices
        ids_TC = order_TE[:, : experts.chosen].sort(dim=-1).values
        weights_TC = scores_TE.double().gather(1, ids_TC)
        if experts.score == "softmax_of_chosen":
            weights_TC = weights_TC.softmax(-1)
        if experts.normalized:
            weights_TC = weights_TC / weights_TC.sum(-1, keepdim=True).clamp(min=LEAST_SUM)
        is_real_T1 = (tile_rows_T >= 0)[:, None]
        ids_TC, weights_TC = ids_TC.where(is_real_T1, -1), (weights_TC * experts.factor).where(is_real_T1, 0.0)
        return Routes(ids_TC.to(torch.int32), weights_TC.float())

    def experts(self, x_TD: Tensor, routes: Routes, experts: ExpertsSpec) -> Tensor:
        """See Kernels.experts. Computes all experts of all tokens, since no shape may depend on a choice."""
        total_TD = torch.zeros_like(x_TD, dtype=torch.float64)
        for expert in range(experts.up.numbers.shape[0]):
            is_chosen_TC = routes.ids_TC == expert
            weight_T1 = routes.weights_TC.double().where(is_chosen_TC, 0.0).sum(1, keepdim=True)
            hidden_TX = self.gate(_product(x_TD, experts.up, expert), experts.activation, experts.gated)
            added_TD = _product(hidden_TX, experts.down, expert).double() * weight_T1
            total_TD = total_TD + added_TD.where(is_chosen_TC.any(1, keepdim=True), 0.0)
        return total_TD.to(x_TD.dtype)


def _product(x_TK: Tensor, matrices: ExpertMatrices, expert: int) -> Tensor:
    """x W^T + b of one expert, rounded."""
    weight, bias_EN = matrices
    if isinstance(weight, PackedTensors):
        n_rows = weight.shape[1]
        numbers = weight.dequantized(x_TK.dtype, slice(expert * n_rows, (expert + 1) * n_rows)).double()
    else:
        numbers = weight[expert].double()
    bias = None if bias_EN is None else bias_EN[expert].double()
    out_TN = x_TK.double() @ numbers.t()
    return (out_TN if bias is None else out_TN + bias).to(x_TK.dtype)


def _normed_heads(q_THC: Tensor, k_TKC: Tensor, spec: HeadsSpec) -> tuple[Tensor, Tensor]:
    if spec.q_norm is not None:
        q_THC = _rms_norm(q_THC, spec.q_norm, spec.eps)
    if spec.k_norm is not None:
        k_TKC = _rms_norm(k_TKC, spec.k_norm, spec.eps)
    return q_THC, k_TKC


def _rms_norm(x_TX: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    normed_TX = F.rms_norm(x_TX.double(), x_TX.shape[-1:], None if weight is None else weight.double(), eps)
    return normed_TX.to(x_TX.dtype)


def _write_cache(cache_XKC: Tensor, slots_T: Tensor, new_TKC: Tensor) -> None:
    """Writes rows to their slots; slot -1 writes nothing.

    Shapes must not depend on values, so slot -1 rewrites the last slot with its own content. That slot belongs to the
    padding block, so no other token of the step writes to it.
    """
    slots_T = slots_T.long()
    valid_T11 = (slots_T >= 0)[:, None, None]
    slots_T = slots_T.where(slots_T >= 0, len(cache_XKC) - 1)
    cache_XKC.index_copy_(0, slots_T, new_TKC.where(valid_T11, cache_XKC[-1]))
