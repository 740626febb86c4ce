"""Reimplements the notebooks' decoders from torch.nn modules and plain formulas, as an oracle for ours.

Each is built from a Decoder, whose weights it copies.
Shape legend: B sequences, N tokens of each, S tokens of a source, D width, V vocabulary.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.nn.transformer import Attention, Block, CrossAttention, Decoder


def random_decoder(config: ModelConfig) -> Decoder:
    """Weights under which every part matters: no token and no sublayer drowns the others."""
    decoder, generator = Decoder(config), torch.Generator().manual_seed(0)
    for name, parameter in decoder.requires_grad_(False).named_parameters():
        if name.endswith("bias"):
            parameter.normal_(0.0, 0.3, generator=generator)
        elif parameter.ndim == 1:
            parameter.uniform_(0.5, 1.5, generator=generator)
        else:
            parameter.normal_(0.0, 1.5 * parameter.shape[1] ** -0.5, generator=generator)
    return decoder


class Textbook(nn.Module):
    """Post-norm, ReLU, sinusoids, log-softmax."""

    def __init__(self, ours: Decoder) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding)
        self.blocks = nn.TransformerEncoder(*_stack(ours.blocks), enable_nested_tensor=False)
        for theirs, block in zip(self.blocks.layers, ours.blocks, strict=True):
            fill_layer(theirs, block)
        self.head = _head(ours)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        width, length = self.embedding.embedding_dim, tokens_BN.shape[1]
        x_BND = self.embedding(tokens_BN) * math.sqrt(width) + sinusoids(length, width)
        return F.log_softmax(self.head(self.blocks(x_BND, mask=future(length))), dim=-1)


class Standalone(nn.Module):
    """Post-norm, learned positions, q/k/v without bias, scores divided by the root of the width."""

    def __init__(self, ours: Decoder) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding)
        self.position_embedding = nn.Embedding.from_pretrained(ours.position_embedding)
        self.blocks = nn.ModuleList()
        for block in ours.blocks:
            width, mlp_width = block.mlp.up.weight.T.shape
            attention = HeadByHead(
                block.attention, math.sqrt(width), _filled(nn.Linear(width, width), block.attention.out)
            )
            up = _filled(nn.Linear(width, mlp_width), block.mlp.up)
            down = _filled(nn.Linear(mlp_width, width), block.mlp.down)
            norms = (_filled(nn.LayerNorm(width), norm) for norm in (block.norm_attention, block.norm_mlp))
            self.blocks.append(nn.ModuleList([attention, nn.Sequential(up, nn.ReLU(), down), *norms]))
        self.head = _head(ours)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        x_BND = self.embedding(tokens_BN) + self.position_embedding.weight[: tokens_BN.shape[1]]
        for attention, mlp, norm_attention, norm_mlp in self.blocks:
            x_BND = norm_attention(x_BND + attention(x_BND))
            x_BND = norm_mlp(x_BND + mlp(x_BND))
        return self.head(x_BND)


class Toy(nn.Module):
    """One head over one layer, and the residual."""

    def __init__(self, ours: Decoder) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding)
        self.attention = HeadByHead(ours.blocks[0].attention, math.sqrt(2), nn.Identity())
        self.head = _head(ours)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        x_BND = self.embedding(tokens_BN) + sinusoids(tokens_BN.shape[1], 2)
        return self.head(x_BND + self.attention(x_BND))


class ClassroomGPT(nn.Module):
    """Pre-norm, learned positions, exact GELU, fused q/k/v, tied head."""

    def __init__(self, ours: Decoder) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding)
        self.position_embedding = nn.Embedding.from_pretrained(ours.position_embedding)
        layer, depth = _stack(ours.blocks, activation=F.gelu, norm_first=True)
        norm = _filled(nn.LayerNorm(ours.config.width), ours.norm)
        self.blocks = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        for theirs, block in zip(self.blocks.layers, ours.blocks, strict=True):
            fill_layer(theirs, block)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        length = tokens_BN.shape[1]
        x_BND = self.embedding(tokens_BN) + self.position_embedding(torch.arange(length))
        return self.blocks(x_BND, mask=future(length)) @ self.embedding.weight.T


class EncoderDecoder(nn.Module):
    """The original: an encoder of padded sources, a decoder with cross-attention."""

    def __init__(self, ours: Decoder) -> None:
        super().__init__()
        self.embedding = nn.Embedding.from_pretrained(ours.embedding)
        self.encoder = nn.TransformerEncoder(*_stack(ours.encoder_blocks), enable_nested_tensor=False)
        for theirs, block in zip(self.encoder.layers, ours.encoder_blocks, strict=True):
            fill_layer(theirs, block)
        self.decoder = nn.TransformerDecoder(*_stack(ours.blocks, nn.TransformerDecoderLayer))
        for theirs, block in zip(self.decoder.layers, ours.blocks, strict=True):
            fill_layer(theirs, block)
        self.head = _head(ours)

    def forward(self, tokens_BN: Tensor, source_BS: Tensor, real_BS: Tensor) -> Tensor:
        memory_BSD = self.encoder(self._embed(source_BS), src_key_padding_mask=~real_BS)
        mask_NN = future(tokens_BN.shape[1])
        x_BND = self.decoder(self._embed(tokens_BN), memory_BSD, tgt_mask=mask_NN, memory_key_padding_mask=~real_BS)
        return self.head(x_BND)

    def _embed(self, tokens_BX: Tensor) -> Tensor:
        width = self.embedding.embedding_dim
        return self.embedding(tokens_BX) * math.sqrt(width) + sinusoids(tokens_BX.shape[1], width)


class HeadByHead(nn.Module):
    """Causal attention without biases, the softmax written out."""

    def __init__(self, ours: Attention, divisor: float, out: nn.Module) -> None:
        super().__init__()
        width = ours.qkv.weight.shape[1]
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        for theirs, weight in zip((self.q, self.k, self.v), ours.qkv.weight.chunk(3), strict=True):
            theirs.load_state_dict({"weight": weight})
        self.out, self.n_heads, self.divisor = out, ours.n_heads, divisor

    def forward(self, x_BND: Tensor) -> Tensor:
        heads = []
        for q, k, v in zip(*(part(x_BND).chunk(self.n_heads, -1) for part in (self.q, self.k, self.v)), strict=True):
            scores_BNN = (q @ k.mT / self.divisor).masked_fill(future(q.shape[1]), float("-inf"))
            exponentials_BNN = torch.exp(scores_BNN - scores_BNN.amax(-1, keepdim=True))
            heads.append(exponentials_BNN / exponentials_BNN.sum(-1, keepdim=True) @ v)
        return self.out(torch.cat(heads, dim=-1))


def fill_layer(theirs: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer, ours: Block) -> None:
    """Copies a block of ours."""
    attention = ours.attention
    fill_attention(theirs.self_attn, (attention.qkv.weight,), (attention.qkv.bias,), attention.out)
    norms = [ours.norm_attention, ours.norm_mlp]
    if isinstance(theirs, nn.TransformerDecoderLayer):
        fill_cross(theirs.multihead_attn, ours.cross)
        norms.insert(1, ours.norm_cross)
    for number, norm in enumerate(norms, start=1):
        _filled(getattr(theirs, f"norm{number}"), norm)
    _filled(theirs.linear1, ours.mlp.up)
    _filled(theirs.linear2, ours.mlp.down)


def fill_cross(theirs: nn.MultiheadAttention, ours: CrossAttention) -> None:
    """Copies a cross-attention of ours."""
    fill_attention(theirs, (ours.q.weight, ours.kv.weight), (ours.q.bias, ours.kv.bias), ours.out)


def fill_attention(
    theirs: nn.MultiheadAttention, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...], out: nn.Module
) -> None:
    """Copies the parts of an attention: q, k, v behind one another, and the output projection."""
    projections = {"in_proj_weight": torch.cat(weights), "in_proj_bias": torch.cat(biases)}
    theirs.load_state_dict({**projections, "out_proj.weight": out.weight, "out_proj.bias": out.bias})


def sinusoids(length: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / width)), PE(pos, 2i + 1) = cos(the same)."""
    angles = [[position / 10000 ** (2 * i / width) for i in range(width // 2)] for position in range(length)]
    return torch.tensor([[wave(angle) for angle in row for wave in (math.sin, math.cos)] for row in angles])


def future(length: int) -> Tensor:
    """True where a token may not look."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def _stack(
    blocks: nn.ModuleList,
    kind: type[nn.TransformerEncoderLayer | nn.TransformerDecoderLayer] = nn.TransformerEncoderLayer,
    **switches: object,
) -> tuple[nn.Module, int]:
    mlp_width, width = blocks[0].mlp.up.weight.shape
    settings = {"activation": "relu", "dropout": 0.0, "batch_first": True, **switches}
    return kind(width, blocks[0].attention.n_heads, mlp_width, **settings), len(blocks)


def _head(ours: Decoder) -> nn.Linear:
    head = nn.Linear(ours.config.width, ours.config.vocab_size)
    head.load_state_dict({"weight": ours.untied_head, "bias": ours.head_bias})
    return head


def _filled(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    theirs.load_state_dict(ours.state_dict())
    return theirs
