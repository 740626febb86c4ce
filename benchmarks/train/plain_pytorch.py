"""Baseline: a training step in plain PyTorch, with a model of the same shape.

Shape legend: B windows, N tokens of each, D width, H query heads, K kv heads, C head_dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig


class PlainBlock(nn.Module):
    """Pre-norm attention and SwiGLU with RMSNorm, on [B, N, D]."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = config.n_heads, config.n_kv_heads, config.head_dim
        width, heads, kv = config.width, config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
        self.norm1, self.norm2 = nn.RMSNorm(width, config.norm_eps), nn.RMSNorm(width, config.norm_eps)
        self.q, self.k, self.v = (nn.Linear(width, rows, bias=False) for rows in (heads, kv, kv))
        self.out = nn.Linear(heads, width, bias=False)
        self.gate, self.up = (nn.Linear(width, config.mlp_width, bias=False) for _ in range(2))
        self.down = nn.Linear(config.mlp_width, width, bias=False)

    def forward(self, x_BND: Tensor, cos_NC: Tensor, sin_NC: Tensor) -> Tensor:
        normed = self.norm1(x_BND)
        q, k, v = (part(normed).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (self.q, self.k, self.v))
        q, k = (x * cos_NC + _rotate_half(x) * sin_NC for x in (q, k))
        attended = F.scaled_dot_product_attention(q.to(v.dtype), k.to(v.dtype), v, is_causal=True, enable_gqa=True)
        x_BND = x_BND + self.out(attended.transpose(1, 2).flatten(2))
        normed = self.norm2(x_BND)
        added: Tensor = x_BND + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return added


class PlainDecoder(nn.Module):
    """The llama layout with a tied head."""

    cos_NC: Tensor
    sin_NC: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocab_size, config.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(PlainBlock(config) for _ in range(config.n_layers))
        self.norm = nn.RMSNorm(config.width, config.norm_eps)
        frequencies = config.rope_theta ** -(torch.arange(0, config.head_dim, 2) / config.head_dim)
        angles = torch.outer(torch.arange(config.context), frequencies).repeat(1, 2)
        self.register_buffer("cos_NC", angles.cos())
        self.register_buffer("sin_NC", angles.sin())

    def forward(self, tokens_BN: Tensor, targets_BN: Tensor) -> Tensor:
        length = tokens_BN.shape[1]
        x_BND = self.embedding(tokens_BN)
        for block in self.blocks:
            x_BND = block(x_BND, self.cos_NC[:length], self.sin_NC[:length])
        logits = F.linear(self.norm(x_BND), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets_BN.flatten())


class PlainLoop:
    """Training loop: autocast, gradient accumulation, clipping, AdamW."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, micro_batch: int) -> None:
        self.decoder, self.device, self.dtype = PlainDecoder(config).to(device), device, dtype
        self.micro_batch = micro_batch
        self.optimizer = torch.optim.AdamW(self.decoder.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)

    def step(self, inputs_BN: Tensor, targets_BN: Tensor) -> float:
        """One optimizer step. Returns the mean loss."""
        parts = list(zip(inputs_BN.split(self.micro_batch), targets_BN.split(self.micro_batch), strict=True))
        total = 0.0
        for inputs, targets in parts:
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype != torch.float32):
                loss = self.decoder(inputs.to(self.device), targets.to(self.device)) / len(parts)
            loss.backward()
            total += float(loss.detach())
        nn.utils.clip_grad_norm_(self.decoder.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return total


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
