"""Products with packed matrices in the kernels have the bits of products with the dense matrices of their numbers."""

from __future__ import annotations

import ctypes
from ctypes import CDLL
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.engine.cpu import packed_cache
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.huge_pages import HugepageAllocator
from app.engine.cpu.library import load_library
from app.engine.cpu.toolchain.builder import build, need_cache_directory
from app.engine.cpu.toolchain.cpu_target import X86_LEVELS, CpuTarget, runs_here, this_level
from app.engine.cpu.toolchain.library_cache import BuildRecipe
from app.engine.scheduling.batch_plan import BatchPlan, Chunk
from benchmarks.shapes import DenseWeights
from model.config import ModelConfig
from model.number_formats import Array
from model.packed_matrix import GroupNumbers, PackedFormat, PackedMatrix
from model.quantize import PackedWeights, QuantizedWeights
from tests.support.engine.native_sequences import logits_of, random_sequence, run_chunk
from tests.support.model.packed_decoders import KINDS, PackedState, packed_config
from tests.support.model.packed_matrices import FORMATS
from tests.support.model.tiny_models import kernels

pytestmark = pytest.mark.usefixtures("native_library", "one_thread")
DTYPES = ("float32", "bfloat16")
ROWS = (1, 2, 5, 6, 7, 13, 33, 64)


def _executor(library: CDLL, config: ModelConfig, weights: PackedWeights, dtype: str, **options: Any) -> NativeExecutor:
    return NativeExecutor(library, config, weights, ThreadPool(library, 2), dtype=dtype, blocks=8, **options)


def check_packed_bits(library: CDLL, kind: str, packed_format: PackedFormat, dtype: str) -> None:
    """Compares chunks of ROWS with a dense decoder's, and with the rows of the largest chunk."""
    config = packed_config(kind, packed_format.group)
    state = PackedState(config, packed_format)
    packed = _executor(library, config, state, dtype)
    dense = _executor(library, config, DenseWeights(state.dequantized), dtype)
    sequence = random_sequence(max(ROWS), config.vocab_size)
    expected = run_chunk(dense, sequence, 0, max(ROWS))
    assert np.isfinite(expected).all() and 0.1 < expected.std() < 1e4
    for rows in ROWS:
        found = run_chunk(packed, sequence, 0, rows)
        assert np.array_equal(found, expected[:rows]), f"{rows} rows"
        assert np.array_equal(found, run_chunk(dense, sequence, 0, rows)), f"{rows} rows of the dense decoder"
        assert np.array_equal(packed.logits([0]), expected[:1]), "head of one row"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed_format", FORMATS, ids=str)
def test_packed_matrices_compute_the_bits_of_dense_ones(packed_format: PackedFormat, kind: str, dtype: str) -> None:
    check_packed_bits(kernels(), kind, packed_format, dtype)


@pytest.mark.parametrize(
    "level", [level for level in X86_LEVELS if runs_here(level) and level != this_level()], ids=str
)
def test_packed_matrices_compute_the_bits_of_dense_ones_at_every_level(level: CpuTarget) -> None:
    library = load_library(build(BuildRecipe(level=level), need_cache_directory(None)))
    for index, packed_format in enumerate(FORMATS):
        for dtype in DTYPES:
            check_packed_bits(library, KINDS[index % len(KINDS)], packed_format, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed_format", FORMATS[::5], ids=str)
@pytest.mark.parametrize("name", ["embedding", "blocks.0.attention.qkv.weight", "blocks.1.mlp.down.weight"])
def test_one_wrong_scale_changes_logits(name: str, packed_format: PackedFormat, dtype: str) -> None:
    """Positive control of the comparisons above."""
    config = packed_config("llama", packed_format.group)
    state = PackedState(config, packed_format)
    sequence = random_sequence(40, config.vocab_size)
    sequence.tokens[7] = config.vocab_size - 1
    expected = run_chunk(_executor(kernels(), config, state, dtype), sequence, 0, 40)
    state.change_a_scale(name)
    found = run_chunk(_executor(kernels(), config, state, dtype), sequence, 0, 40)
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("packed_format", FORMATS[::3], ids=str)
def test_rows_that_are_not_finite_stay_alone(packed_format: PackedFormat, dtype: str) -> None:
    """In chunks of every way to compute, and in the padding of registers in later steps."""
    config = packed_config("gpt2", packed_format.group)
    state = PackedState(config, packed_format)
    sound, sick = random_sequence(39, config.vocab_size), random_sequence(40, config.vocab_size, first_block=4)
    expected = run_chunk(_executor(kernels(), config, state, dtype), sound, 0, 39)

    def read(name: str, number_format: str) -> Array:
        array = state.read(name, number_format).copy()
        if name == "position_embedding":
            array[39] = np.nan if number_format == "float32" else 0x7FC0
        return array

    weights: Any = SimpleNamespace(read=read, packed_formats=state.packed_formats, read_packed=state.read_packed)
    executor = _executor(kernels(), config, weights, dtype)
    for rows in (1, 5, 7, 39):
        executor.run(BatchPlan((Chunk(sick, 39, 40), Chunk(sound, 0, rows))))
        both = executor.logits(range(1 + rows))
        assert np.isnan(both[0]).all(), "positive control"
        assert np.array_equal(both[1:], expected[:rows]), rows
        assert np.array_equal(run_chunk(executor, sound, 0, rows), expected[:rows]), f"{rows} rows afterwards"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packed_format", FORMATS[1::2], ids=str)
def test_restored_matrices_compute_the_same_bits_and_only_formats_are_read(
    packed_format: PackedFormat, kind: str
) -> None:
    """Bytes without a sign, too, which no format tells from those with one. Otherwise, each weight is read once."""
    config = packed_config(kind, packed_format.group)
    state = PackedState(config, packed_format)
    first = _executor(kernels(), config, state, "bfloat16")
    assert sorted({*state.reads}) == sorted(state.reads) and {*state.parts} <= {*state.reads}
    content = b"".join(map(bytes, packed_cache._pieces(first.decoder.memory.buffers)))  # which share memory
    restored = HugepageAllocator(len(content))
    ctypes.memmove(restored.start, content, len(content))
    state.reads.clear()
    second = _executor(kernels(), config, state, "bfloat16", restored=restored)
    assert not state.reads
    assert np.array_equal(logits_of(second, range(20)), logits_of(first, range(20)))


def test_packed_parts_are_not_rounded_by_quantize() -> None:
    """Dense matrices beside them are."""
    config, packed_format = packed_config("llama", 32), FORMATS[1]
    state, sequence = PackedState(config, packed_format), random_sequence(20, 99)
    expected = run_chunk(_executor(kernels(), config, state, "float32"), sequence, 0, 20)
    quantized = QuantizedWeights(state, config, "int8")
    assert np.array_equal(run_chunk(_executor(kernels(), config, quantized, "float32"), sequence, 0, 20), expected)
    down = "blocks.1.mlp.down.weight"
    dense = state.dequantized(down, "float32")
    del state.parts[down]
    weights: Any = SimpleNamespace(
        read=lambda name, of: dense if name == down else state.read(name, of),
        packed_formats=state.packed_formats,
        read_packed=state.read_packed,
    )
    found = [
        run_chunk(_executor(kernels(), config, each, "float32"), sequence, 0, 20)
        for each in (weights, QuantizedWeights(weights, config, "int8"))
    ]
    assert np.array_equal(found[0], expected) and not np.array_equal(found[1], expected)


def _with_scale(matrix: PackedMatrix, scale: float) -> PackedMatrix:
    values = matrix.scales.values.copy()
    values[-1, -1] = scale
    return replace(matrix, scales=GroupNumbers(values=values))


@pytest.mark.parametrize(
    ("scale", "words"), [(np.inf, "a scale that is not finite"), (2.0**-110, "a scale that is neither 0")]
)
def test_matrix_that_no_kernel_computes_is_refused(scale: float, words: str) -> None:
    config, packed_format = packed_config("llama", 32), FORMATS[9]
    state, name = PackedState(config, packed_format), "blocks.1.mlp.down.weight"
    state.parts[name] = (_with_scale(state.parts[name][0], scale),)
    with pytest.raises(ValueError, match=f"{name} holds {words}"):
        _executor(kernels(), config, state, "float32")


def test_columns_that_are_no_whole_groups_are_refused() -> None:
    config = packed_config("llama", 32)
    state, name = PackedState(config, FORMATS[1]), "blocks.1.mlp.down.weight"
    (matrix,) = state.parts[name]
    state.parts[name] = (replace(matrix, format=replace(matrix.format, group=128)),)
    with pytest.raises(ValueError, match=f"{name} has 288 columns, no multiple of the 128"):
        _executor(kernels(), config, state, "float32")


def test_packed_matrices_take_the_memory_of_their_formats() -> None:
    """But for panels that are not whole, and vectors."""
    config = packed_config("llama", 128)
    for packed_format in FORMATS[3::4]:
        state = PackedState(config, packed_format)
        used = _executor(kernels(), config, state, "bfloat16").decoder.memory.used_bytes
        least = sum(part.format.n_bytes(*part.shape) for parts in state.parts.values() for part in parts)
        assert least < used < 1.15 * least
