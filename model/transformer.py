"""The decoder network: token ids and positions in, hidden states and logits out. Knows nothing of batches or caches.

Shape legend: T tokens of a step (all sequences behind one another), D width, H query heads, K kv heads, C head_dim,
F mlp_width, V vocabulary, S rows that want logits. Attention is passed in, so the same weights serve training,
the slow reference and the paged engine.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import Attend
from model.config import ModelConfig


class Decoder(nn.Module):
    """A llama-layout decoder; q, k, v and gate, up are stored fused, so that a block is four matrix products."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = _matrix(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.n_layers))
        self.norm = _vector(config.width)
        self.untied_head = None if config.tied_head else _matrix(config.vocab_size, config.width)
        self.register_buffer("rope_PC", rope_table(config), persistent=False)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, attend: Attend) -> Tensor:
        """Hidden states [T, D] after the final norm, for tokens [T] standing at positions [T] of their sequences."""
        cos_T1F, sin_T1F = self.get_buffer("rope_PC")[positions_T].unsqueeze(1).chunk(2, dim=-1)
        x_TD = F.embedding(tokens_T, self.embedding)
        for block in self.blocks:
            x_TD = block(x_TD, cos_T1F, sin_T1F, attend)
        return F.rms_norm(x_TD, self.norm.shape, self.norm, self.config.norm_eps)

    def head(self, hidden_SD: Tensor) -> Tensor:
        """Logits [S, V] of hidden states [S, D]."""
        return F.linear(hidden_SD, self.embedding if self.untied_head is None else self.untied_head)

    @torch.no_grad()
    def initialise(self, seed: int) -> Decoder:
        """Fill every parameter for training from scratch: normal 0.02, residual outputs zero, norms one."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            elif name.endswith((".out", ".down")):
                parameter.zero_()
            else:
                parameter.normal_(0.0, 0.02, generator=generator)
        return self


class Block(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and added to the residual stream."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        q_width = config.n_heads * config.head_dim
        kv_width = config.n_kv_heads * config.head_dim
        self.norm_attention = _vector(config.width)
        self.qkv = _matrix(q_width + 2 * kv_width, config.width)
        self.out = _matrix(config.width, q_width)
        self.norm_mlp = _vector(config.width)
        self.gate_up = _matrix(2 * config.mlp_width, config.width)
        self.down = _matrix(config.width, config.mlp_width)

    def forward(self, x_TD: Tensor, cos_T1F: Tensor, sin_T1F: Tensor, attend: Attend) -> Tensor:
        config = self.config
        normed_TD = F.rms_norm(x_TD, self.norm_attention.shape, self.norm_attention, config.norm_eps)
        heads_TNC = F.linear(normed_TD, self.qkv).view(len(x_TD), -1, config.head_dim)
        qk_TNC, v_TKC = heads_TNC.tensor_split((config.n_heads + config.n_kv_heads,), dim=1)
        q_THC, k_TKC = rotate(qk_TNC, cos_T1F, sin_T1F).tensor_split((config.n_heads,), dim=1)
        x_TD = x_TD + F.linear(attend(self.layer, q_THC, k_TKC, v_TKC).flatten(1), self.out)
        normed_TD = F.rms_norm(x_TD, self.norm_mlp.shape, self.norm_mlp, config.norm_eps)
        gate_TF, up_TF = F.linear(normed_TD, self.gate_up).chunk(2, dim=-1)
        return x_TD + F.linear(F.silu(gate_TF) * up_TF, self.down)


def rotate(x_TNC: Tensor, cos_T1F: Tensor, sin_T1F: Tensor) -> Tensor:
    """Rotary positions in the half-split layout (element i turns with element i + C/2), computed in float32."""
    first_TNF, second_TNF = x_TNC.chunk(2, dim=-1)
    turned = (first_TNF * cos_T1F - second_TNF * sin_T1F, second_TNF * cos_T1F + first_TNF * sin_T1F)
    return torch.cat(turned, dim=-1).to(x_TNC.dtype)


def rope_table(config: ModelConfig) -> Tensor:
    """[context, head_dim] float32: the cosines of each position's angles, then the sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
    angles = torch.arange(config.context, dtype=torch.float64)[:, None] * config.rope_theta**-exponents
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()


def _matrix(rows: int, columns: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(rows, columns))


def _vector(size: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(size))
