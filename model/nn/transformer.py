"""The decoder network: token ids and positions in, hidden states and logits out.

A block consists of attention, cross-attention (if there is an encoder), and feed-forward. The attention function is an
argument (model/nn/attention.py), so the same weights serve training, the reference implementation and the paged engine.
The encoder's source is a sequence like any other, with bidirectional attention.

Shape legend: T tokens of a step (all sequences concatenated), D width, H query heads, K kv heads, N = H + 2 K, C
head_dim, V vocabulary, S tokens of a source, or rows that need logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig, Rope
from model.nn.attention import Attend, CrossAttend
from model.nn.feed_forward import FeedForward, MixtureOfExperts
from model.nn.layers import (
    FastModule,
    Linear,
    RMSNorm,
    make_head_norm,
    make_norm,
    product,
    rotate,
)
from model.positions import query_scale_table, rope_table, sinusoid_table

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines [T, 1, half of the rotated dimensions] of the step's positions."""


class PositionFactors(NamedTuple):
    """What attention multiplies queries and keys by, at the positions of a step."""

    rotations: tuple[Rotation | None, ...]
    """For each of ModelConfig.ropes; then None, for layers without."""
    query_scale_T11: Tensor | None
    """Of ModelConfig.query_scale."""


class Block(FastModule):
    """Sublayers around the residual stream, each with a norm before or after it."""

    def __init__(self, config: ModelConfig, layer: int, *, cross: bool = False) -> None:
        super().__init__()
        self.is_pre, self.is_post = config.has_norm_before, config.norm_position == "post"
        self.parallel, self.residual_scale = config.parallel_residual, config.residual_scale
        rope = config.layer_kind(layer).rope
        self.rope = config.ropes.index(rope) if rope else -1

        def norms(sublayer: nn.Module | None) -> tuple[nn.Module | None, nn.Module | None]:
            """The norm before the sublayer or after the sum, and the norm of its output."""
            has_norm = sublayer and (self.is_pre or self.is_post)
            return make_norm(config) if has_norm else None, make_norm(config) if sublayer and has_output_norm else None

        has_output_norm = config.has_norm_of_output
        self.attention = Attention(config, layer)
        self.norm_attention, self.norm_attention_output = norms(self.attention)
        self.cross = CrossAttention(config, layer) if cross else None
        self.norm_cross, self.norm_cross_output = norms(self.cross)
        has_experts = config.layer_kind(layer).mlp == "experts"
        dense = FeedForward(config, config.mlp_width) if config.mlp_width and not has_experts else None
        self.mlp: FeedForward | MixtureOfExperts | None = MixtureOfExperts(config) if has_experts else dense
        self.norm_mlp, self.norm_mlp_output = norms(None if config.shared_norm else self.mlp)

    def forward(
        self, x_TD: Tensor, factors: PositionFactors, attend: Attend, cross: CrossAttend | None = None
    ) -> Tensor:
        def attention(y_TD: Tensor) -> Tensor:
            attended_TD: Tensor = self.attention(y_TD, factors.rotations[self.rope], factors.query_scale_T11, attend)
            return attended_TD

        norm = self.norm_attention
        if self.parallel and self.mlp and norm:
            attended_TD = self._scaled(attention(norm(x_TD)))
            added_TD: Tensor = x_TD + attended_TD + self._scaled(self.mlp((self.norm_mlp or norm)(x_TD)))
            return added_TD
        x_TD = self._add(x_TD, norm, self.norm_attention_output, attention)
        if cross_attention := self.cross:
            x_TD = self._add(x_TD, self.norm_cross, self.norm_cross_output, lambda y_TD: cross_attention(y_TD, cross))
        if mlp := self.mlp:
            added = mlp.branches() if isinstance(mlp, MixtureOfExperts) else (mlp,)
            x_TD = self._add(x_TD, self.norm_mlp, self.norm_mlp_output, *added)
        return x_TD

    def _add(
        self,
        x_TD: Tensor,
        norm: nn.Module | None,
        norm_output: nn.Module | None,
        *sublayers: Callable[[Tensor], Tensor],
    ) -> Tensor:
        y_TD = norm(x_TD) if self.is_pre and norm else x_TD
        for sublayer in sublayers:
            added_TD = self._scaled(sublayer(y_TD))
            x_TD = x_TD + (norm_output(added_TD) if norm_output else added_TD)
        return norm(x_TD) if self.is_post and norm else x_TD

    def _scaled(self, x_TD: Tensor) -> Tensor:
        return x_TD if self.residual_scale == 1.0 else x_TD * self.residual_scale


class Attention(FastModule):
    """Self-attention; one matrix product computes q, k and v."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        self.q_factor = config.q_factor
        n_rows = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
        self.qkv = Linear(n_rows, config.width, bias=config.qkv_bias)
        self.q_norm, self.k_norm = (make_head_norm(config, size) for size in config.head_norm_sizes)
        self.norms_after = config.qk_norm_after_rope
        self.out = _out_projection(config)
        self.sinks = nn.Parameter(torch.empty(config.n_heads)) if config.sinks else None

    def forward(
        self, x_TD: Tensor, rotation: Rotation | None, query_scale_T11: Tensor | None, attend: Attend
    ) -> Tensor:
        q_THC, k_TKC, v_TKC = self.split_heads(self.qkv(x_TD), rotation, query_scale_T11)
        attended_TD = attend(self.layer, q_THC, k_TKC, v_TKC, self.sinks).flatten(1)
        return attended_TD if self.out is None else self.out(attended_TD)

    def split_heads(
        self, qkv_TX: Tensor, rotation: Rotation | None, query_scale_T11: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, H, C], which are scaled, and keys and values [T, K, C]: what `qkv` computed, normed, rotated."""
        heads_TNC = qkv_TX.view(len(qkv_TX), -1, self.head_dim)
        qk_TNC, v_TKC = heads_TNC.tensor_split((self.n_heads + self.n_kv_heads,), dim=1)
        norms_first = self.q_norm and not self.norms_after
        if rotation and not norms_first:
            qk_TNC = rotate(qk_TNC, *rotation)
        q_THC, k_TKC = qk_TNC.tensor_split((self.n_heads,), dim=1)
        if self.q_norm and self.k_norm:
            q_THC, k_TKC = _normed(self.q_norm, q_THC), _normed(self.k_norm, k_TKC)
        if rotation and norms_first:
            q_THC, k_TKC = rotate(q_THC, *rotation), rotate(k_TKC, *rotation)
        if query_scale_T11 is not None:
            q_THC = (q_THC * query_scale_T11).to(k_TKC.dtype)
        if self.q_factor != 1.0:
            q_THC = q_THC * self.q_factor
        return q_THC, k_TKC, v_TKC


def _normed(norm: RMSNorm, heads_TNC: Tensor) -> Tensor:
    """Each head normed, or all heads of a token together, as the norm has numbers."""
    together = norm.shape[0] != heads_TNC.shape[-1]
    normed: Tensor = norm(heads_TNC.reshape(len(heads_TNC), -1) if together else heads_TNC)
    return normed.view(heads_TNC.shape)


class CrossAttention(FastModule):
    """Attention over an encoder's output; `kv` computes its keys and values once per source."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.n_kv_heads, self.head_dim = config.n_kv_heads, config.head_dim
        self.q_factor = config.q_factor
        self.q = Linear(config.n_heads * config.head_dim, config.width, bias=config.qkv_bias)
        self.kv = Linear(2 * config.n_kv_heads * config.head_dim, config.width, bias=config.qkv_bias)
        self.out = _out_projection(config)

    def forward(self, x_TD: Tensor, cross: CrossAttend | None) -> Tensor:
        assert cross is not None, "a decoder with an encoder needs a source"
        q_THC = self.q(x_TD).view(len(x_TD), -1, self.head_dim)
        if self.q_factor != 1.0:
            q_THC = q_THC * self.q_factor
        attended_TD = cross(self.layer, q_THC).flatten(1)
        return attended_TD if self.out is None else self.out(attended_TD)

    def keys_and_values(self, memory_SD: Tensor) -> tuple[Tensor, Tensor]:
        """k, v [S, K, C] of an encoder's output."""
        k_SKC, v_SKC = self.kv(memory_SD).unflatten(1, (-1, self.head_dim)).chunk(2, dim=1)
        return k_SKC, v_SKC


def _out_projection(config: ModelConfig) -> Linear | None:
    heads_width = config.n_heads * config.head_dim
    return Linear(config.width, heads_width, bias=config.out_bias) if config.out_projection else None


class Decoder(nn.Module):
    """Any decoder that a ModelConfig describes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self._n_ropes = len(config.ropes)
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.embedding = _matrix(config.vocab_size, config.width)
        self.position_embedding = _matrix(config.context, config.width) if config.positions == "learned" else None
        self.encoder_blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_encoder_layers))
        self.encoder_norm = make_norm(config) if config.n_encoder_layers and config.final_norm else nn.Identity()
        cross = config.n_encoder_layers > 0
        self.blocks = nn.ModuleList(Block(config, layer, cross=cross) for layer in range(config.n_layers))
        self.norm = make_norm(config) if config.final_norm else nn.Identity()
        self.untied_head = None if config.tied_head else _matrix(config.vocab_size, config.width)
        self.head_bias = nn.Parameter(torch.empty(config.vocab_size)) if config.head_bias else None
        self.head_product = product
        if not self.embedding.is_meta:
            self.make_tables()

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied head counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def make_tables(self) -> None:
        """Computes the position tables, which are not stored. Call it explicitly for a decoder made on the meta device.

        Computing on the meta device makes torch import its compiler: one second, and 70 MiB permanently.
        """
        for index, rope in enumerate(self.config.ropes):
            rope_PC = torch.from_numpy(rope_table(self.config, rope))
            self.register_buffer(f"rope_{index}_PC", rope_PC, persistent=False)
        is_sinusoidal = self.config.positions == "sinusoidal"
        sinusoids_PD = torch.from_numpy(sinusoid_table(self.config)) if is_sinusoidal else None
        self.register_buffer("sinusoids_PD", sinusoids_PD, persistent=False)
        query_scale_P = torch.from_numpy(query_scale_table(self.config)) if self.config.query_scale else None
        self.register_buffer("query_scale_P", query_scale_P, persistent=False)

    def rope_table(self, rope: Rope) -> Tensor:
        """[context, rotated dimensions] of one of config.ropes: see model/positions.py."""
        return self.get_buffer(f"rope_{self.config.ropes.index(rope)}_PC")

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, cross: CrossAttend | None = None
    ) -> Tensor:
        """Hidden states [T, D] after the final norm, for tokens [T] at positions [T] of their sequences.

        cross: attention over the source; required if config.n_encoder_layers is not 0.
        """
        x_TD, factors = self.embed(tokens_T, positions_T)
        if self.embedding_norm:
            x_TD = self.embedding_norm(x_TD)
        for block in self.blocks:
            x_TD = block(x_TD, factors, attend, cross)
        normed_TD: Tensor = self.norm(x_TD)
        return normed_TD

    def encode(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> list[tuple[Tensor, Tensor]]:
        """Cross-attention k, v [T, K, C] of the sources' tokens [T], for each decoder block."""
        x_TD, factors = self.embed(tokens_T, positions_T)
        for block in self.encoder_blocks:
            x_TD = block(x_TD, factors, attend)
        memory_TD = self.encoder_norm(x_TD)
        return [cross.keys_and_values(memory_TD) for block in self.blocks if (cross := getattr(block, "cross", None))]

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] of hidden states [S, D]."""
        matrix = self.embedding if self.untied_head is None else self.untied_head
        return self.cap_logits(self.head_product(hidden_SD, matrix, self.head_bias))

    def cap_logits(self, logits_SV: Tensor) -> Tensor:
        """Applies config.logit_scale and config.logit_soft_cap."""
        scale, cap = self.config.logit_scale, self.config.logit_soft_cap
        if scale != 1.0:
            logits_SV = logits_SV * scale
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    @torch.no_grad()
    def initialize(self, seed: int) -> Decoder:
        """Initializes parameters for training from scratch: normal 0.02; residual outputs, biases, sinks 0; norms 1.

        Without norms, the deviation is width^-0.5, so that matrices preserve the scale of their input. Before norms of
        outputs, which would raise any small output to the scale of 1, residual outputs are normal, too.
        """
        generator = torch.Generator().manual_seed(seed)
        deviation = self.config.width**-0.5 if self.config.norm == "none" else 0.02
        zeros: tuple[str, ...] = ("bias", "sinks")
        zeros += () if self.config.has_norm_of_output else ("out.weight", "down.weight", "experts.down")
        for name, parameter in self.named_parameters():
            if name.endswith(zeros) or (self.config.norm_offset and parameter.ndim == 1):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, deviation, generator=generator)
        return self

    def embed(self, tokens_T: Tensor, positions_T: Tensor) -> tuple[Tensor, PositionFactors]:
        """The embeddings [T, D] of tokens and positions, and the factors of these positions."""
        x_TD = F.embedding(tokens_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        if self.position_embedding is not None:
            x_TD = x_TD + F.embedding(positions_T, self.position_embedding)
        elif self.config.positions == "sinusoidal":
            x_TD = x_TD + self.get_buffer("sinusoids_PD")[positions_T].to(x_TD.dtype)
        rotations = (*(self._rotation(index, positions_T) for index in range(self._n_ropes)), None)
        query_scale_T11 = None
        if self.config.query_scale:
            query_scale_T11 = self.get_buffer("query_scale_P")[positions_T][:, None, None]
        return x_TD, PositionFactors(rotations, query_scale_T11)

    def _rotation(self, index: int, positions_T: Tensor) -> Rotation:
        cos_T1F, sin_T1F = self.get_buffer(f"rope_{index}_PC")[positions_T].unsqueeze(1).chunk(2, dim=-1)
        return cos_T1F, sin_T1F


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))
