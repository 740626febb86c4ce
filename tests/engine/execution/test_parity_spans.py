"""Sequences over several spans of attention (256 positions in the C++ kernels, 512 in torch): bits and numbers."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
import torch

from app.common.types import Request, SamplingParams
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from model.config import LayerKind, ModelConfig, Rope
from model.nn.reference import logits
from tests.support.engine.parity import expect_parity
from tests.support.model.tiny_models import round_weights_for, tiny_config, tiny_decoder, tiny_engine

DTYPES = [torch.float32, torch.bfloat16]
CONTEXT, LENGTH = 1280, 1100
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


def _config(*windows: int | None, **more: Any) -> ModelConfig:
    kinds = tuple(LayerKind(window=window, rope=Rope()) for window in windows)
    types = tuple(range(len(kinds))) if len(kinds) > 1 else ()
    return tiny_config(layer_kinds=kinds, layer_types=types, n_layers=len(kinds), context=CONTEXT, **more)


CONFIGS = {
    "all positions": _config(None, head_dim=32),
    "windows that begin within spans": _config(300, 40, None),
    "soft cap": _config(None, 530, attention_soft_cap=3.0, n_heads=6, n_kv_heads=2, head_dim=20),
    "sinks": _config(None, 300, sinks=True, n_heads=6, n_kv_heads=2),
}
ONE_LAYER = {
    "all positions": CONFIGS["all positions"],
    "a window that begins within spans": _config(300, head_dim=20),
    "soft cap": _config(None, attention_soft_cap=3.0, n_heads=6, n_kv_heads=2, head_dim=20),
}


def _tokens(n: int) -> list[int]:
    rng = random.Random(n)
    return [rng.randrange(1, 320) for _ in range(n)]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONFIGS)
def test_scheduling_does_not_change_a_bit(case: str, dtype: torch.dtype) -> None:
    """Prompts end before, at and after the borders of spans; generated tokens cross them."""
    requests = [
        Request(
            id=f"r{length}", prompt=tuple(_tokens(length)), max_tokens=60,
            params=SamplingParams(temperature=i % 2, seed=i, logprobs=3),
        )
        for i, length in enumerate((250, 256, 505, 513, 950))
    ]  # fmt: skip
    expect_parity(tiny_decoder(CONFIGS[case], dtype=dtype), requests, tight=66)


@pytest.mark.usefixtures("way", "int8_cache")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONFIGS)
def test_rows_have_the_same_bits_in_chunks_of_every_size_with_an_int8_cache(case: str, dtype: torch.dtype) -> None:
    """Few rows read codes, and many rows decoded numbers."""
    test_rows_have_the_same_bits_in_chunks_of_every_size(case, dtype)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CONFIGS)
def test_rows_have_the_same_bits_in_chunks_of_every_size(case: str, dtype: torch.dtype) -> None:
    """Chunks that share tiles and products with rows of other spans."""
    decoder = tiny_decoder(CONFIGS[case], dtype=dtype)
    whole_TV = chunked_logits(decoder, LENGTH)
    for size in (512, 97, 33):
        assert torch.equal(chunked_logits(decoder, size), whole_TV), size
    for first, end in ((20, 30), (250, 262), (1000, LENGTH)):  # keys of one span, of two, of all
        assert torch.equal(chunked_logits(decoder, 1, first=first, end=end), whole_TV[first:end]), first


@pytest.mark.parametrize("case", CONFIGS)
def test_logits_equal_the_oracle(case: str, way: str) -> None:
    decoder = tiny_decoder(CONFIGS[case])
    ours_TV = chunked_logits(decoder, 512)
    round_weights_for(way, decoder)
    assert torch.allclose(ours_TV, logits(decoder, _tokens(LENGTH)), atol=5e-4)


@pytest.mark.usefixtures("int8_cache")
@pytest.mark.parametrize("case", ONE_LAYER)
def test_logits_equal_the_oracle_with_an_int8_cache(case: str, way: str) -> None:
    """A number near the middle between two codes, or a scale between two, may become the other one.

    More layers would amplify that: each logit then differs as much as it does from those without codes.
    """
    decoder, tokens = tiny_decoder(ONE_LAYER[case]), _tokens(LENGTH)
    ours_TV = chunked_logits(decoder, 512)
    round_weights_for(way, decoder)
    differences_TV = (ours_TV - logits(decoder, tokens, kv_cache="int8")).abs()
    assert differences_TV.max() < 2e-2
    assert differences_TV.median() < 3e-4
    exact_TV = logits(decoder, tokens)
    assert (ours_TV - exact_TV).abs().median() > 5e-3, "positive control: codes must be rounded"


def chunked_logits(decoder: Any, size: int = LENGTH, *, first: int = 0, end: int = LENGTH) -> torch.Tensor:
    """float32 logits [end - first, V], in chunks of `size` tokens from `first` on, after one chunk of all before."""
    runner = tiny_engine(decoder, blocks=3 * CONTEXT // 16, tokens_per_step=2048).runner
    executor: Any = runner.executor
    n_groups = len({kind.window for kind in decoder.config.layer_kinds})
    blocks = array("i", range(-(-end // 16)))
    tokens = array("q", _tokens(LENGTH)[:end])
    request = Request(id="r", prompt=tuple(tokens), max_tokens=1, params=SamplingParams())
    sequence = Sequence(request=request, tokens=tokens, arrival=0, blocks=(blocks,) * n_groups)
    starts = ([0] if first else []) + list(range(first, end, size))
    parts = []
    for start, stop in zip(starts, [*starts[1:], end], strict=True):
        executor.run(BatchPlan((Chunk(sequence, start, stop),)))
        if start >= first:
            rows = executor.logits(range(stop - start))
            parts.append(torch.as_tensor(rows).float().clone())
    return torch.cat(parts)
