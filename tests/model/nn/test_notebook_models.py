"""Our decoders against the notebooks', built from torch.nn modules; attention against its formula.

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

from model.config import LayerKind, ModelConfig
from model.nn import attention
from model.nn.attention import CausalAttend, EncoderAttend, MemoryAttend
from model.nn.transformer import Block, Decoder
from model.presets import preset

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Differences measured here are below 1e-5."""
NOTICED = 5e-4
"""How far any other architecture stands off; the two GELUs lie 9e-4 apart, the others 0.1 and more."""


def random_decoder(config: ModelConfig) -> Decoder:
    """Random weights under which every part matters: no token and no sublayer dominates."""
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
    """Post-norm, ReLU, sinusoidal positions."""
    x_BND = embedded(ours, tokens_BN)
    for block in ours.blocks:
        x_BND = layer_like(block)(x_BND, src_mask=future(tokens_BN.shape[1]))
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def standalone(ours: Decoder, tokens_BN: Tensor) -> Tensor:
    """Post-norm, ReLU, learned positions, scores divided by the root of the whole width instead of a head's."""
    q_factor = math.sqrt(ours.config.head_dim / ours.config.width)
    x_BND = F.embedding(tokens_BN, ours.embedding) + ours.position_embedding[: tokens_BN.shape[1]]
    for block in ours.blocks:
        x_BND = layer_like(block, q_factor)(x_BND, src_mask=future(tokens_BN.shape[1]))
    return F.linear(x_BND, ours.untied_head, ours.head_bias)


def toy(ours: Decoder, tokens_BN: Tensor) -> Tensor:
    """One head in one layer, with the residual."""
    x_BND = F.embedding(tokens_BN, ours.embedding) + sinusoids(tokens_BN.shape[1], 2)
    q_BND, k_BND, v_BND = F.linear(x_BND, ours.blocks[0].attention.qkv.weight).chunk(3, -1)
    scores_BNN = (q_BND @ k_BND.mT / math.sqrt(2)).masked_fill(future(tokens_BN.shape[1]), float("-inf"))
    return F.linear(x_BND + scores_BNN.softmax(-1) @ v_BND, ours.untied_head, ours.head_bias)


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
    """Scaled embeddings and sinusoidal positions."""
    width = ours.config.width
    return F.embedding(tokens_BX, ours.embedding) * math.sqrt(width) + sinusoids(tokens_BX.shape[1], width)


def layer_like(ours: Block, q_factor: float = 1.0) -> nn.Module:
    """torch's own layer of an encoder or with cross-attention, with the weights of a block."""
    mlp_width, width = ours.mlp.up.weight.shape
    kind = nn.TransformerDecoderLayer if ours.cross else nn.TransformerEncoderLayer
    theirs = kind(width, ours.attention.n_heads, mlp_width, dropout=0.0, activation="relu", batch_first=True)
    norms = [ours.norm_attention, *([ours.norm_cross] if ours.cross else []), ours.norm_mlp]
    state = {f"norm{i}.{name}": x for i, norm in enumerate(norms, start=1) for name, x in norm.state_dict().items()}
    parts = {"self_attn.out_proj.": ours.attention.out, "linear1.": ours.mlp.up, "linear2.": ours.mlp.down}
    if cross := ours.cross:
        parts |= {"multihead_attn.out_proj.": cross.out}
        for x in ("weight", "bias"):
            state[f"multihead_attn.in_proj_{x}"] = torch.cat((getattr(cross.q, x), getattr(cross.kv, x)))
    state |= {f"{prefix}{name}": x for prefix, part in parts.items() for name, x in part.state_dict().items()}
    qkv = ours.attention.qkv
    state["self_attn.in_proj_weight"] = torch.cat((q_factor * qkv.weight[:width], qkv.weight[width:]))
    state["self_attn.in_proj_bias"] = torch.zeros(3 * width) if qkv.bias is None else qkv.bias
    theirs.load_state_dict(state)
    return theirs.eval()


def sinusoids(length: int, width: int) -> Tensor:
    """PE(pos, 2i) = sin(pos / 10000^(2i / width)), PE(pos, 2i + 1) = cos(the same)."""
    angles = [[position / 10000 ** (2 * i / width) for i in range(width // 2)] for position in range(length)]
    return torch.tensor([[wave(angle) for angle in row for wave in (math.sin, math.cos)] for row in angles])


def future(length: int) -> Tensor:
    """True where a token must not attend."""
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
    """Largest difference between our outputs, with `switches` changed, and the reference's."""
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
    attend = CausalAttend(length, decoder.config.windows)
    hidden_TD = decoder(tokens_BN.flatten(), torch.arange(length).repeat(batch), attend, cross)
    return decoder.head(hidden_TD).unflatten(0, (batch, length))


LENGTHS = {"textbook": (1, 2, 33, 150), "standalone": (1, 2, 33, 150), "toy": (1, 2, 6)}


@pytest.mark.parametrize(("name", "length"), [(name, length) for name in LENGTHS for length in LENGTHS[name]])
def test_notebook_decoder_equals_its_reference(name: str, length: int) -> None:
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
def test_every_architecture_change_is_detected(name: str, switches: dict[str, Any]) -> None:
    assert distance(name, 6, **switches) > NOTICED


@pytest.mark.parametrize("name", ["textbook", "standalone", "toy"])
def test_causal_mask_shifted_by_one_is_detected(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = attention.masked_positions
    whole = (LayerKind(window=6),)  # uses a mask instead of is_causal
    assert distance(name, 6, layer_kinds=whole) < TOLERANCE
    monkeypatch.setattr(attention, "masked_positions", lambda positions, *rest: right(positions + 1, *rest))
    assert distance(name, 6, layer_kinds=whole) > NOTICED


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
def test_decoder_with_an_encoder_equals_its_reference(cross_decoder: Decoder, length: int) -> None:
    real_BS = real_tokens()
    tokens_BN, source_BS = random_tokens(CROSS, 3, length), random_tokens(CROSS, *real_BS.shape)
    expected_BNV = encoder_decoder(cross_decoder, tokens_BN, source_BS, real_BS)
    ours_BNV = translate(cross_decoder, tokens_BN, source_BS, real_BS)
    assert (ours_BNV - expected_BNV).abs().max() < TOLERANCE
    everything_BNV = translate(cross_decoder, tokens_BN, source_BS, torch.ones_like(real_BS))
    assert (everything_BNV - expected_BNV).abs().amax((1, 2))[:2].min() > NOTICED


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
@pytest.mark.parametrize("window", [None, 1, 130])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_attention_of_whole_sequences_equals_the_formula(
    heads: int, kv_heads: int, window: int | None, dtype: torch.dtype, close: float
) -> None:
    length = 150  # more than a tile
    q, k, v = (torch.randn(2 * length, n, 8).to(dtype) for n in (heads, kv_heads, kv_heads))
    expected = torch.cat(
        [formula(*(x[part].float() for x in (q, k, v)), window) for part in (slice(length), slice(length, None))]
    )
    found = CausalAttend(length, [window])(0, q, k, v)
    torch.testing.assert_close(found.float(), expected, rtol=close, atol=close)


def formula(q_NHC: Tensor, k_NKC: Tensor, v_NKC: Tensor, window: int | None) -> Tensor:
    """softmax(q k^T / sqrt(C)) v over the tokens that each token may attend to."""
    length, repeat = len(q_NHC), q_NHC.shape[1] // k_NKC.shape[1]
    k_NHC, v_NHC = (x.repeat_interleave(repeat, dim=1) for x in (k_NKC, v_NKC))
    distance_NN = torch.arange(length)[:, None] - torch.arange(length)
    hidden_NN = (distance_NN < 0) | (distance_NN >= (window or length))
    scores_HNN = torch.einsum("nhc,mhc->hnm", q_NHC, k_NHC) / math.sqrt(q_NHC.shape[-1])
    return torch.einsum("hnm,mhc->nhc", scores_HNN.masked_fill(hidden_NN, float("-inf")).softmax(-1), v_NHC)
