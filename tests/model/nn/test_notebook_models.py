"""Our decoders against the notebooks' own, written of torch.nn modules; attention against its formula.

The preset gpt is GPT-2, which tests/model/train/test_run.py compares with transformers.
Shape legend: B sequences, N tokens of each, S tokens of a source, D width, V vocabulary, H query heads, K kv heads, C
head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
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


def textbook(ours: Decoder, tokens_BN: Tensor) -> Tensor:
    """Post-norm, ReLU, sinusoids."""
    x_BND = embedded(ours, tokens_BN)
    for block in ours.blocks:
        x_BND = layer_like(block)(x_BND, src_mask=future(tokens_BN.shape[1]))
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def standalone(ours: Decoder, tokens_BN: Tensor) -> Tensor:
    """Post-norm, learned positions, q/k/v without bias, scores divided by the root of the width."""
    width = ours.config.width
    x_BND = F.embedding(tokens_BN, ours.embedding) + ours.position_embedding[: tokens_BN.shape[1]]
    for block in ours.blocks:
        attended_BND = head_by_head(block.attention, x_BND, math.sqrt(width))
        x_BND = normed(x_BND + projected(attended_BND, block.attention.out), block.norm_attention)
        hidden_BNF = projected(x_BND, block.mlp.up).relu()
        x_BND = normed(x_BND + projected(hidden_BNF, block.mlp.down), block.norm_mlp)
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def toy(ours: Decoder, tokens_BN: Tensor) -> Tensor:
    """One head over one layer, and the residual."""
    x_BND = F.embedding(tokens_BN, ours.embedding) + sinusoids(tokens_BN.shape[1], 2)
    x_BND = x_BND + head_by_head(ours.blocks[0].attention, x_BND, math.sqrt(2))
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def encoder_decoder(ours: Decoder, tokens_BN: Tensor, source_BS: Tensor, real_BS: Tensor) -> Tensor:
    """The original: an encoder of padded sources, a decoder with cross-attention."""
    memory_BSD, mask_NN = embedded(ours, source_BS), future(tokens_BN.shape[1])
    for block in ours.encoder_blocks:
        memory_BSD = layer_like(block)(memory_BSD, src_key_padding_mask=~real_BS)
    x_BND = embedded(ours, tokens_BN)
    for block in ours.blocks:
        x_BND = layer_like(block)(x_BND, memory_BSD, tgt_mask=mask_NN, memory_key_padding_mask=~real_BS)
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def embedded(ours: Decoder, tokens_BX: Tensor) -> Tensor:
    """Scaled embeddings and sinusoids."""
    width = ours.config.width
    return F.embedding(tokens_BX, ours.embedding) * math.sqrt(width) + sinusoids(tokens_BX.shape[1], width)


def head_by_head(ours: Attention, x_BND: Tensor, divisor: float) -> Tensor:
    """Causal attention without biases, the softmax written out."""
    heads = []
    qkv = (F.linear(x_BND, weight).chunk(ours.n_heads, -1) for weight in ours.qkv.weight.chunk(3))
    for q, k, v in zip(*qkv, strict=True):
        scores_BNN = (q @ k.mT / divisor).masked_fill(future(q.shape[1]), float("-inf"))
        exponentials_BNN = torch.exp(scores_BNN - scores_BNN.amax(-1, keepdim=True))
        heads.append(exponentials_BNN / exponentials_BNN.sum(-1, keepdim=True) @ v)
    return torch.cat(heads, dim=-1)


def projected(x: Tensor, ours: nn.Module) -> Tensor:
    """x W^T + b."""
    return F.linear(x, ours.weight, ours.bias)


def normed(x: Tensor, ours: nn.Module) -> Tensor:
    """torch's LayerNorm."""
    return F.layer_norm(x, x.shape[-1:], ours.weight, ours.bias)


def layer_like(ours: Block) -> nn.Module:
    """torch's own layer, of an encoder or with cross-attention, with the weights of a block."""
    mlp_width, width = ours.mlp.up.weight.shape
    kind = nn.TransformerDecoderLayer if ours.cross else nn.TransformerEncoderLayer
    theirs = kind(width, ours.attention.n_heads, mlp_width, dropout=0.0, activation="relu", batch_first=True)
    norms = [ours.norm_attention, *([ours.norm_cross] if ours.cross else []), ours.norm_mlp]
    state = {f"norm{i}.{name}": x for i, norm in enumerate(norms, start=1) for name, x in norm.state_dict().items()}
    qkv, out = ours.attention.qkv, ours.attention.out
    parts = {"self_attn.in_proj_": qkv, "self_attn.out_proj.": out, "linear1.": ours.mlp.up, "linear2.": ours.mlp.down}
    state |= {f"{prefix}{name}": x for prefix, part in parts.items() for name, x in part.state_dict().items()}
    if ours.cross:
        state |= {f"multihead_attn.{name}": x for name, x in cross_state(ours.cross).items()}
    theirs.load_state_dict(state)
    return theirs.eval()


def cross_state(ours: CrossAttention) -> dict[str, Tensor]:
    """State of torch's attention: q, k, v behind one another, and the output projection."""
    projections = {f"in_proj_{x}": torch.cat((getattr(ours.q, x), getattr(ours.kv, x))) for x in ("weight", "bias")}
    return projections | {"out_proj.weight": ours.out.weight, "out_proj.bias": ours.out.bias}


def sinusoids(length: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / width)), PE(pos, 2i + 1) = cos(the same)."""
    angles = [[position / 10000 ** (2 * i / width) for i in range(width // 2)] for position in range(length)]
    return torch.tensor([[wave(angle) for angle in row for wave in (math.sin, math.cos)] for row in angles])


def future(length: int) -> Tensor:
    """True where a token may not look."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


CASES = {
    "textbook": (replace(preset("textbook"), vocab_size=300, n_layers=2), textbook),
    "standalone": (replace(preset("standalone"), vocab_size=300), standalone),
    "toy": (preset("toy"), toy),
}
CROSS = replace(preset("cross"), vocab_size=300)
SOURCE_LENGTHS = (9, 1, 20)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def distance(name: str, length: int, **switches: Any) -> float:
    """How far our outputs, with `switches` changed, are from the reference's at most."""
    config, reference = CASES[name]
    decoder = random_decoder(config)
    changed = Decoder(replace(config, **switches))
    changed.load_state_dict(decoder.state_dict())
    tokens_BN = random_tokens(config, 2, length)
    return float((outputs(changed, tokens_BN) - reference(decoder, tokens_BN)).abs().max())


def random_tokens(config: ModelConfig, batch: int, length: int) -> Tensor:
    return torch.randint(config.vocab_size, (batch, length), generator=torch.Generator().manual_seed(length))


def outputs(decoder: Decoder, tokens_BN: Tensor, cross: MemoryAttend | None = None) -> Tensor:
    """Logits [B, N, V]."""
    batch, length = tokens_BN.shape
    attend = CausalAttend(length, decoder.config.sliding_window)
    hidden_TD = decoder(tokens_BN.flatten(), torch.arange(length).repeat(batch), attend, cross)
    return decoder.head(hidden_TD).unflatten(0, (batch, length))


LENGTHS = {"textbook": (1, 2, 33, 150), "standalone": (1, 2, 33, 150), "toy": (1, 2, 6)}


@pytest.mark.parametrize(("name", "length"), [(name, length) for name in LENGTHS for length in LENGTHS[name]])
def test_a_notebook_decoder_is_its_reference(name: str, length: int) -> None:
    assert distance(name, length) < TOLERANCE


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
    real_BS = real_tokens()
    tokens_BN, source_BS = random_tokens(CROSS, 3, length), random_tokens(CROSS, *real_BS.shape)
    expected_BNV = encoder_decoder(cross_decoder, tokens_BN, source_BS, real_BS)
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
    theirs.load_state_dict(cross_state(ours))
    x_BND, memory_BSD = torch.randn(3, 7, CROSS.width), torch.randn(*real_BS.shape, CROSS.width)
    expected_BND, _ = theirs(x_BND, memory_BSD, memory_BSD, key_padding_mask=~real_BS)
    memory = MemoryAttend([ours.keys_and_values(memory_BSD.flatten(0, 1))], real_BS)
    assert torch.allclose(ours(x_BND.flatten(0, 1), memory), expected_BND.flatten(0, 1), atol=TOLERANCE)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_attention_of_whole_sequences_is_the_formula(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, close: float
) -> None:
    length = 150  # more than a tile
    q, k, v = (torch.randn(2 * length, n, 8).to(dtype) for n in (heads, kv_heads, kv_heads))
    expected = torch.cat(
        [formula(*(x[part].float() for x in (q, k, v)), window) for part in (slice(length), slice(length, None))]
    )
    found = CausalAttend(length, window)(0, q, k, v)
    torch.testing.assert_close(found.float(), expected, rtol=close, atol=close)


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
