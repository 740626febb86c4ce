"""Our decoders against the notebooks' own, written of torch.nn modules; attention against its formula.

The preset gpt is GPT-2, which tests/model/train/test_run.py compares with transformers.
Shape legend: B sequences, N tokens of each, S tokens of a source, D width, V vocabulary, H query heads, K kv heads, C
head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.config import ModelConfig
from model.nn import attention
from model.nn.attention import CausalAttend, EncoderAttend, MemoryAttend
from model.nn.transformer import Attention, Block, CrossAttention, Decoder
from model.presets import preset
from model.train.step.attention import TrainingAttend

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Differences measured here are below 1e-5."""
NOTICED = 5e-4
"""How far any other architecture stands off; the two GELUs lie 9e-4 apart, the others 0.1 and more."""


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
        for attend, mlp, norm_attention, norm_mlp in self.blocks:
            x_BND = norm_attention(x_BND + attend(x_BND))
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
    """Copies the weights of one of this project's blocks."""
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
    """Copies the weights of one of this project's cross-attentions."""
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
) -> tuple[nn.Module, int]:
    mlp_width, width = blocks[0].mlp.up.weight.shape
    layer = kind(width, blocks[0].attention.n_heads, mlp_width, dropout=0.0, activation="relu", batch_first=True)
    return layer, len(blocks)


def _head(ours: Decoder) -> nn.Linear:
    head = nn.Linear(ours.config.width, ours.config.vocab_size)
    head.load_state_dict({"weight": ours.untied_head, "bias": ours.head_bias})
    return head


def _filled(theirs: nn.Module, ours: nn.Module) -> nn.Module:
    theirs.load_state_dict(ours.state_dict())
    return theirs


CASES = {
    "textbook": (replace(preset("textbook"), vocab_size=300, n_layers=2), Textbook),
    "standalone": (replace(preset("standalone"), vocab_size=300), Standalone),
    "toy": (preset("toy"), Toy),
}
CROSS = replace(preset("cross"), vocab_size=300)
SOURCE_LENGTHS = (9, 1, 20)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def pair(name: str) -> tuple[Decoder, nn.Module]:
    """A decoder with random weights, and its reference."""
    config, reference = CASES[name]
    decoder = random_decoder(config)
    theirs = reference(decoder).eval()
    assert sum(p.numel() for p in theirs.parameters()) == decoder.n_params
    return decoder, theirs


def distance(name: str, length: int, **switches: Any) -> float:
    """How far our outputs, with `switches` changed, are from the reference's at most."""
    decoder, theirs = pair(name)
    changed = Decoder(replace(decoder.config, **switches))
    changed.load_state_dict(decoder.state_dict())
    tokens_BN = random_tokens(decoder.config, 2, length)
    ours_BNV = outputs(changed, tokens_BN)
    if isinstance(theirs, Textbook):
        ours_BNV = F.log_softmax(ours_BNV, dim=-1)
    return float((ours_BNV - theirs(tokens_BN)).abs().max())


def random_tokens(config: ModelConfig, batch: int, length: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


def outputs(decoder: Decoder, tokens_BN: Tensor, cross: MemoryAttend | None = None) -> Tensor:
    """Logits [B, N, V]."""
    batch, length = tokens_BN.shape
    attend = CausalAttend(length, decoder.config.sliding_window)
    hidden_TD = decoder(tokens_BN.flatten(), torch.arange(length).repeat(batch), attend, cross)
    return decoder.head(hidden_TD).unflatten(0, (batch, length))


@pytest.mark.parametrize("length", [1, 2, 33, 150])
@pytest.mark.parametrize("name", ["textbook", "standalone"])
def test_a_notebook_decoder_is_its_reference(name: str, length: int) -> None:
    assert distance(name, length) < TOLERANCE


@pytest.mark.parametrize("length", [1, 2, 6])
def test_the_toy_decoder_is_its_reference(length: int) -> None:
    assert distance("toy", length) < TOLERANCE


@pytest.mark.parametrize(
    ("name", "switches"),
    [
        ("textbook", {"norm_position": "pre"}),
        ("textbook", {"activation": "gelu"}),
        ("textbook", {"embedding_scale": 1.0}),
        ("textbook", {"attention_scale": "width"}),
        ("textbook", {"positions": "none"}),
        ("standalone", {"attention_scale": "head_dim"}),
        ("toy", {"positions": "none"}),
    ],
)
def test_any_other_architecture_is_noticed(name: str, switches: dict[str, Any]) -> None:
    assert distance(name, 6, **switches) > NOTICED


@pytest.mark.parametrize("name", ["textbook", "standalone", "toy"])
def test_a_causal_mask_that_is_one_off_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.masked_positions
    assert distance(name, 6, sliding_window=6) < TOLERANCE  # a window of everything: with a mask, not is_causal
    monkeypatch.setattr(attention, "masked_positions", lambda positions, *rest: right(positions + 1, *rest))
    assert distance(name, 6, sliding_window=6) > NOTICED


@pytest.fixture(scope="module")
def cross_decoder() -> Decoder:
    return random_decoder(CROSS)


def real_tokens() -> Tensor:
    """[B, S] True where a source of SOURCE_LENGTHS has a token."""
    return torch.arange(max(SOURCE_LENGTHS)) < torch.tensor(SOURCE_LENGTHS)[:, None]


def translate(decoder: Decoder, tokens_BN: Tensor, source_BS: Tensor, real_BS: Tensor) -> Tensor:
    """Logits [B, N, V] over sources, padded where `real` is False."""
    positions_T = torch.arange(source_BS.shape[1]).repeat(len(source_BS))
    kv = decoder.encode(source_BS.flatten(), positions_T, EncoderAttend(real_BS))
    return outputs(decoder, tokens_BN, MemoryAttend(kv, real_BS))


@pytest.mark.parametrize("length", [1, 12, 33])
def test_the_decoder_with_an_encoder_is_its_reference(cross_decoder: Decoder, length: int) -> None:
    theirs, real_BS = EncoderDecoder(cross_decoder).eval(), real_tokens()
    assert sum(p.numel() for p in theirs.parameters()) == cross_decoder.n_params
    tokens_BN, source_BS = random_tokens(CROSS, 3, length), random_tokens(CROSS, *real_BS.shape)
    expected_BNV = theirs(tokens_BN, source_BS, real_BS)
    ours_BNV = translate(cross_decoder, tokens_BN, source_BS, real_BS)
    assert (ours_BNV - expected_BNV).abs().max() < TOLERANCE
    everything_BNV = translate(cross_decoder, tokens_BN, source_BS, torch.ones_like(real_BS))
    assert (everything_BNV - expected_BNV).abs().amax((1, 2))[:2].min() > NOTICED


def test_what_stands_in_the_padding_changes_no_bit(cross_decoder: Decoder) -> None:
    real_BS = real_tokens()
    tokens_BN, source_BS = random_tokens(CROSS, 3, 12), random_tokens(CROSS, *real_BS.shape)
    other_BS = source_BS.where(real_BS, (source_BS + 1) % CROSS.vocab_size)
    one, other = (translate(cross_decoder, tokens_BN, source, real_BS) for source in (source_BS, other_BS))
    assert torch.equal(one, other)
    every_BS = torch.ones_like(real_BS)
    one, other = (translate(cross_decoder, tokens_BN, source, every_BS) for source in (source_BS, other_BS))
    assert (one - other).abs().amax((1, 2))[:2].min() > NOTICED


def test_one_cross_attention_is_torchs_own(cross_decoder: Decoder) -> None:
    ours, real_BS = cross_decoder.blocks[0].cross, real_tokens()
    theirs = nn.MultiheadAttention(CROSS.width, CROSS.n_heads, batch_first=True).eval()
    fill_cross(theirs, ours)
    x_BND, memory_BSD = torch.randn(3, 7, CROSS.width), torch.randn(*real_BS.shape, CROSS.width)
    expected_BND, _ = theirs(x_BND, memory_BSD, memory_BSD, key_padding_mask=~real_BS)
    memory = MemoryAttend([ours.keys_and_values(memory_BSD.flatten(0, 1))], real_BS)
    assert torch.allclose(ours(x_BND.flatten(0, 1), memory), expected_BND.flatten(0, 1), atol=TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_attentions_of_whole_sequences_are_the_formula(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, close: float
) -> None:
    length = 150  # more than a tile
    q, k, v = (torch.randn(2 * length, n, 8).to(dtype) for n in (heads, kv_heads, kv_heads))
    expected = torch.cat(
        [formula(*(x[part].float() for x in (q, k, v)), window) for part in (slice(length), slice(length, None))]
    )
    for attend in (CausalAttend(length, window), TrainingAttend(length, window)):
        torch.testing.assert_close(attend(0, q, k, v).float(), expected, rtol=close, atol=close)


def formula(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, window: int | None) -> Tensor:
    """One token after another: softmax(q k^T / sqrt(C)) v over the tokens that it may see."""
    out = torch.empty_like(q_NHC)
    repeat = q_NHC.shape[1] // k_NKC.shape[1]
    k_NHC, v_NHC = (x.repeat_interleave(repeat, dim=1) for x in (k_NKC, v_NKC))
    for position, q_HC in enumerate(q_NHC):
        seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
        scores_SH = (k_NHC[seen] * q_HC).sum(-1) / q_HC.shape[-1] ** 0.5
        out[position] = (scores_SH.softmax(0)[..., None] * v_NHC[seen]).sum(0)
    return out
