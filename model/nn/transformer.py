"""The decoder network: token ids and positions in, hidden states and logits out.

Shape legend: T tokens of a step (all sequences behind one another), D width, K kv heads, C head_dim, V vocabulary, S
rows that want logits. Attention is passed in, so the same weights serve training, the slow reference and the paged
engine. A source for the encoder is a sequence like any other, attended to in both directions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.nn.attention import Attend, CrossAttend
from model.nn.block import Block, Rope
from model.nn.layers import make_norm, product, rope_table, sinusoid_table


class Decoder(nn.Module):
    """Any decoder that a ModelConfig describes."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
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
        """Trainable numbers, a tied head counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def make_tables(self) -> None:
        """The numbers of the positions, which no file holds; for a decoder made on the meta device: call it later.

        Computing there, be it only shapes, makes torch import its compiler: a second, and 70 MiB for good.
        """
        kind = self.config.positions
        self.register_buffer("rope_PC", rope_table(self.config) if kind == "rotary" else None, persistent=False)
        sinusoids_PD = sinusoid_table(self.config) if kind == "sinusoidal" else None
        self.register_buffer("sinusoids_PD", sinusoids_PD, persistent=False)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, attend: Attend, cross: CrossAttend | None = None
    ) -> Tensor:
        """Hidden states [T, D] after the final norm, for tokens [T] standing at positions [T] of their sequences.

        cross: how to look at the source; needed where config.n_encoder_layers is not 0.
        """
        x_TD, rope = self._embed(tokens_T, positions_T)
        for block in self.blocks:
            x_TD = block(x_TD, rope, attend, cross)
        normed_TD: Tensor = self.norm(x_TD)
        return normed_TD

    def encode(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> list[tuple[Tensor, Tensor]]:
        """For each decoder block the cross-attention's k, v [T, K, C] over the sources' tokens [T]."""
        x_TD, rope = self._embed(tokens_T, positions_T)
        for block in self.encoder_blocks:
            x_TD = block(x_TD, rope, attend)
        memory_TD = self.encoder_norm(x_TD)
        return [cross.keys_and_values(memory_TD) for block in self.blocks if (cross := getattr(block, "cross", None))]

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] of hidden states [S, D]."""
        matrix = self.embedding if self.untied_head is None else self.untied_head
        return self.capped(self.head_product(hidden_SD, matrix, self.head_bias))

    def capped(self, logits_SV: Tensor) -> Tensor:
        """As the model bends what its head gives."""
        cap = self.config.logit_soft_cap
        return logits_SV if cap is None else cap * torch.tanh(logits_SV / cap)

    @torch.no_grad()
    def initialise(self, seed: int) -> Decoder:
        """Fill every parameter for training from scratch: normal 0.02, residual outputs and biases 0, norms 1.

        Where no norm brings the stream to a size, matrices keep the size of what they are given.
        """
        generator = torch.Generator().manual_seed(seed)
        deviation = self.config.width**-0.5 if self.config.norm == "none" else 0.02
        for name, parameter in self.named_parameters():
            if name.endswith(("bias", "out.weight", "down.weight")):
                parameter.zero_()
            elif parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, deviation, generator=generator)
        return self

    def _embed(self, tokens_T: Tensor, positions_T: Tensor) -> tuple[Tensor, Rope | None]:
        x_TD = F.embedding(tokens_T, self.embedding)
        if self.config.embedding_scale != 1.0:
            x_TD = x_TD * self.config.embedding_scale
        match self.config.positions:
            case "rotary":
                cos_T1F, sin_T1F = self.get_buffer("rope_PC")[positions_T].unsqueeze(1).chunk(2, dim=-1)
                return x_TD, (cos_T1F, sin_T1F)
            case "sinusoidal":
                return x_TD + self.get_buffer("sinusoids_PD")[positions_T].to(x_TD.dtype), None
            case "learned":
                assert self.position_embedding is not None
                return x_TD + F.embedding(positions_T, self.position_embedding), None
        return x_TD, None


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))
