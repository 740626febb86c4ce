"""Mixtures of experts in the native kernels: which experts a row has, what is read, and in which order they add up."""

from __future__ import annotations

import ctypes
import random
from array import array
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.huge_pages import HugepageAllocator
from app.engine.scheduling.batch_plan import BatchPlan, Chunk, Sequence
from benchmarks.shapes import DenseWeights
from model.config import Experts, ExpertScore, LayerKind, ModelConfig, Rope
from model.nn.attention import CausalAttend
from model.nn.transformer import Decoder
from model.quantize import QuantizedWeights, packed_kind, quantized_formats
from tests.support.engine.native_sequences import random_sequence
from tests.support.model.tiny_models import (
    CPU_QUANTIZE,
    kernels,
    native_executor,
    round_weights,
    tiny_config,
    tiny_decoder,
)

pytestmark = pytest.mark.usefixtures("native_library", "one_thread")
DTYPES = [torch.float32, torch.bfloat16]
ROUTED = LayerKind(rope=Rope(), mlp="experts")
GPT_OSS: dict[str, Any] = {"activation": "swiglu_clamped", "sinks": True}


def _config(experts: Experts, **changes: Any) -> ModelConfig:
    return tiny_config(**{"layer_kinds": (ROUTED,), "mlp_width": 0, "experts": experts, **changes})


def _random_config(rng: random.Random) -> ModelConfig:
    """Any number of experts, and odd sizes."""
    count, score = rng.choice([2, 3, 8, 31, 33, 64]), rng.choice(get_args(ExpertScore))
    is_of_chosen = score == "softmax_of_chosen"
    experts = Experts(
        count=count, chosen=rng.choice([1, min(count, 8), count]), width=rng.choice([7, 32, 47, 64]), score=score,
        normalized=not is_of_chosen and rng.random() < 0.5, factor=rng.choice([1.0, 2.5]),
        router_bias=rng.random() < 0.5, choice_bias=not is_of_chosen and rng.random() < 0.5,
        bias=rng.random() < 0.5, shared_width=rng.choice([0, 33]),
    )  # fmt: skip
    changes = {"width": rng.choice([33, 48, 96]), "sinks": rng.random() < 0.5}
    changes["residual_scale"] = rng.choice([1.0, 0.4])
    activation, gated = rng.choice([("silu", True), ("relu2", False), ("swiglu_clamped", True)])
    return _config(experts, activation=activation, gated=gated, **changes)


def _logits(executor: NativeExecutor, *sequences: Sequence, start: int = 0) -> Tensor:
    """Logits [T, V] of the sequences in one step, each in one chunk from `start` on."""
    chunks = tuple(Chunk(sequence, start, len(sequence.tokens)) for sequence in sequences)
    executor.run(BatchPlan(chunks))
    return torch.from_numpy(executor.logits(range(sum(chunk.stop - chunk.start for chunk in chunks))).copy())


def _expected(decoder: Decoder, sequence: Sequence) -> Tensor:
    tokens_T = torch.tensor(sequence.tokens)
    attend = CausalAttend(len(tokens_T), decoder.config.windows, decoder.config.attention_soft_cap)
    with torch.inference_mode():
        return decoder.head(decoder(tokens_T, torch.arange(len(tokens_T)), attend)).float()


def test_random_configurations_have_packed_experts_and_dense_ones() -> None:
    """Of two layers no matrix, one of each layer, or both."""
    counts = set()
    for seed in range(24):
        formats = quantized_formats(_random_config(random.Random(seed)), "int8")
        counts.add(sum(stored is not None for name, stored in formats.items() if ".experts." in name))
    assert counts == {0, 2, 4}


@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
@pytest.mark.parametrize("seed", range(24))
def test_logits_equal_those_of_the_decoder(seed: int, quantize: Any) -> None:
    rng = random.Random(seed)
    decoder, sequence = tiny_decoder(_random_config(rng), seed=seed), random_sequence(rng.randint(1, 40), seed=seed)
    ours = _logits(native_executor(decoder, 8, quantize=quantize), sequence)
    if kind := packed_kind(quantize):
        round_weights(decoder, kind)
    assert torch.allclose(ours, _expected(decoder, sequence), atol=1e-3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
@pytest.mark.parametrize("experts", [Experts(count=64, chosen=8, width=47), Experts(count=3, chosen=2, width=200)])
def test_bits_of_a_row_do_not_depend_on_other_rows(experts: Experts, quantize: Any, dtype: torch.dtype) -> None:
    """Whichever rows share its experts: 1 to 40 rows of a sequence, and more than a pass of 512 rows has."""
    decoder = tiny_decoder(_config(experts, **GPT_OSS), dtype=dtype)
    executor = native_executor(decoder, 64, quantize=quantize)
    sequences = [random_sequence(200, seed=seed, first_block=13 * seed) for seed in range(4)]
    together = _logits(executor, *sequences)
    for sequence, whole in zip(sequences, together.split(200), strict=True):
        assert torch.equal(_logits(executor, sequence), whole)
    for size in range(1, 41):
        executor.run(BatchPlan((Chunk(sequences[0], 0, size),)))
        assert np.array_equal(executor.logits(range(size)), together[:size].numpy()), size


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(_config(Experts(count=16, chosen=4, width=80), **GPT_OSS), dtype=dtype)
    executor, sequences = (
        native_executor(decoder, 64, threads=1),
        [random_sequence(40, seed=s, first_block=3 * s) for s in range(9)],
    )
    expected = _logits(executor, *sequences)
    for threads in (2, 3, 5):
        executor.session = executor.session_on(ThreadPool(kernels(), threads))
        assert torch.equal(_logits(executor, *sequences), expected)
        assert torch.equal(_logits(executor, sequences[1], start=39), expected[79:80])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_experts_that_no_row_has_chosen_are_not_read(quantize: Any, dtype: torch.dtype) -> None:
    """Weights and biases are NaN; quantized weights, which cannot be, are 0, so that only biases show a read."""
    config = _config(Experts(count=12, chosen=3, width=64, choice_bias=True, bias=True), n_layers=1)
    decoder, sequence = tiny_decoder(config, dtype=dtype), random_sequence(40, seed=0)
    mixture: Any = decoder.blocks[0].mlp
    mixture.choice_bias[:] = torch.tensor([0, 9, 0, 0, 9, 0, 0, 0, 0, 9, 0, 0])
    expected = _logits(native_executor(decoder, 8, quantize=quantize), sequence)
    others = [expert for expert in range(12) if expert not in (1, 4, 9)]
    for parameter in mixture.experts.parameters():
        parameter[others] = torch.nan if quantize == "none" or parameter.ndim == 2 else 0
    assert torch.equal(_logits(native_executor(decoder, 8, quantize=quantize), sequence), expected)
    for parameter in mixture.experts.parameters():
        parameter[4] = torch.nan if quantize == "none" or parameter.ndim == 2 else 0
    assert _logits(native_executor(decoder, 8, quantize=quantize), sequence).isnan().all(), "positive control"


def _with_exact_weights(biases: list[float], **changes: Any) -> Decoder:
    """Experts that compute their bias, each with a weight of exactly 0.5."""
    experts = Experts(count=len(biases), chosen=3, width=32, score="sigmoid", choice_bias=True, bias=True)
    config = _config(experts, n_layers=1, norm="none", final_norm=False, sinks=False, **changes)
    decoder = tiny_decoder(config)
    mixture: Any = decoder.blocks[0].mlp
    for parameter in (mixture.router.weight, mixture.experts.down, decoder.blocks[0].attention.out.weight):
        parameter[:] = 0
    mixture.experts.down_bias[:] = torch.tensor(biases)[:, None]
    mixture.choice_bias[:] = 0
    return decoder


def test_experts_add_up_in_the_order_of_their_ids() -> None:
    """2^24 + 1 - 2^24 is 0 in float32. By rank, or backwards, it would be 1."""
    decoder, sequence = _with_exact_weights([2.0**25, 2.0, -(2.0**25), 5.0]), random_sequence(20, seed=0)
    mixture: Any = decoder.blocks[0].mlp
    mixture.choice_bias[:] = torch.tensor([8, 7, 9, 0])
    expected = decoder.head(decoder.embedding[torch.tensor(sequence.tokens)])
    assert torch.allclose(_logits(native_executor(decoder, 8), sequence), expected, atol=1e-4)


def test_of_equal_scores_the_lower_ids_are_chosen() -> None:
    decoder, sequence = _with_exact_weights([1.0, 10.0, 100.0, 1000.0, 1e4, 1e5]), random_sequence(20, seed=0)
    mixture: Any = decoder.blocks[0].mlp
    mixture.choice_bias[:] = torch.tensor([0, 0, 1, 0, 0, 0])
    ours = _logits(native_executor(decoder, 8), sequence)
    stream = decoder.embedding[torch.tensor(sequence.tokens)]
    assert torch.allclose(ours, decoder.head(stream + 0.5 * 111.0), rtol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES)
def test_non_finite_rows_stay_in_their_sequence(dtype: torch.dtype) -> None:
    decoder = tiny_decoder(_config(Experts(count=8, chosen=2, width=33), **GPT_OSS), dtype=dtype)
    sick, sound = random_sequence(40, seed=1), random_sequence(33, seed=2, first_block=4)
    decoder.embedding[7] = torch.inf  # tied: also a column of the logits
    sick.tokens[20] = 7
    sound.tokens[:] = array("q", (token if token != 7 else 8 for token in sound.tokens))
    executor = native_executor(decoder, 16)
    others = torch.arange(320) != 7
    expected = _logits(executor, sound)
    together = _logits(executor, sick, sound)
    assert together[20:40, others].isnan().all() and torch.equal(together[40:, others], expected[:, others])
    assert torch.equal(_logits(executor, sound)[:, others], expected[:, others]), "left in scratch memory"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_packed_experts_are_restored_from_their_bytes(quantize: Any, dtype: torch.dtype) -> None:
    """Packing twice gives the same bytes, which another decoder takes as they are."""
    config = _config(Experts(count=5, chosen=2, width=33, router_bias=True, bias=True, shared_width=20), **GPT_OSS)
    decoder, sequence, name = (
        tiny_decoder(replace(config, residual_scale=0.5), dtype=dtype),
        random_sequence(20, seed=0),
        str(dtype)[6:],
    )
    first, second = (native_executor(decoder, 8, quantize=quantize) for _ in range(2))
    packed = [b"".join(_content(executor.decoder.memory)) for executor in (first, second)]
    assert packed[0] == packed[1]
    region = HugepageAllocator(len(packed[0]))
    ctypes.memmove(region.start, packed[0], len(packed[0]))
    unread, kind = DenseWeights(pytest.fail), packed_kind(quantize)
    weights = QuantizedWeights(unread, decoder.config, kind) if kind else unread
    restored = NativeExecutor(
        kernels(), decoder.config, weights, ThreadPool(kernels(), 2), dtype=name, blocks=8, restored=region
    )
    assert torch.equal(_logits(restored, sequence), _logits(first, sequence))
    assert restored.decoder.memory.used_bytes == len(packed[0])


def _content(memory: HugepageAllocator) -> list[bytes]:
    return [ctypes.string_at(address, n_bytes) for address, n_bytes in memory.buffers]
