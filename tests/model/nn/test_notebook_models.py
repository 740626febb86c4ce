"""Our decoders against the notebooks' own, which tests/support/model/notebook_models.py writes of torch.nn modules.

Shape legend: B sequences, N tokens of each, S tokens of a source, D width, V vocabulary, H query heads, K kv heads, C
head_dim.
"""

from __future__ import annotations

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
from model.nn.attention import CausalAttend, EncoderAttend, MemoryAttend, PerHeadAttend
from model.nn.transformer import Decoder
from model.presets import preset
from model.train.step.attention import TrainingAttend
from tests.support.model.notebook_models import (
    ClassroomGPT,
    EncoderDecoder,
    Standalone,
    Textbook,
    Toy,
    fill_cross,
    random_decoder,
)

pytestmark = pytest.mark.slow

TOLERANCE = 1e-4
"""Differences measured here are below 1e-5."""
NOTICED = 5e-4
"""How far any other architecture stands off; the two GELUs lie 9e-4 apart, the others 0.1 and more."""

CASES = {
    "textbook": (replace(preset("textbook"), vocab_size=300, n_layers=2), Textbook),
    "textbook in full": (preset("textbook"), Textbook),
    "standalone": (replace(preset("standalone"), vocab_size=300), Standalone),
    "toy": (preset("toy"), Toy),
    "gpt": (replace(preset("gpt"), vocab_size=300, n_layers=3), ClassroomGPT),
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
@pytest.mark.parametrize("name", ["textbook", "standalone", "gpt"])
def test_a_notebook_decoder_is_its_reference(name: str, length: int) -> None:
    assert distance(name, length) < TOLERANCE


def test_the_textbook_decoder_is_its_reference_in_full_size() -> None:
    assert distance("textbook in full", 64) < TOLERANCE


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
        ("gpt", {"activation": "gelu_tanh"}),
        ("gpt", {"norm_eps": 1e-3}),
        ("gpt", {"sliding_window": 4}),
    ],
)
def test_any_other_architecture_is_noticed(name: str, switches: dict[str, Any]) -> None:
    assert distance(name, 6, **switches) > NOTICED


@pytest.mark.parametrize("name", ["textbook", "standalone", "toy", "gpt"])
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
    for attend in (PerHeadAttend(length, window), CausalAttend(length, window), TrainingAttend(length, window)):
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
