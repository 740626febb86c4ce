"""Quantized tensors of GGUF files: the packed matrices have the numbers of the gguf package, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from model.gguf.blocks import PACKED_FORMATS, read_blocks
from model.gguf.ggml_types import GGML_TYPES
from model.number_formats import rounded_to_bfloat16
from tests.support.model.gguf_files import random_blocks, unpacked

KINDS = list(PACKED_FORMATS)


def test_the_sizes_of_all_types_are_those_of_the_package() -> None:
    known = {kind.value: (kind.name, *sizes) for kind, sizes in gguf.GGML_QUANT_SIZES.items()}
    assert {number: (each.name, each.block, each.n_bytes) for number, each in GGML_TYPES.items()} == known


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (37, 768), (3, 131_072)], ids=str)
def test_packed_matrices_have_the_numbers_of_the_file(name: str, rows: int, columns: int) -> None:
    blocks = random_blocks(name, rows=rows, columns=columns, seed=rows)
    matrix, expected = read_blocks(name, blocks), unpacked(name, blocks)
    assert matrix.shape == (rows, columns)
    assert np.array_equal(matrix.dequantized("float32").view(np.uint32), expected.view(np.uint32))
    assert np.array_equal(matrix.dequantized("bfloat16"), rounded_to_bfloat16(expected))


@pytest.mark.parametrize("name", [name for name in KINDS if GGML_TYPES[gguf.GGMLQuantizationType[name]].block == 32])
def test_rows_may_have_any_number_of_blocks(name: str) -> None:
    blocks = random_blocks(name, rows=5, columns=96, seed=1)
    assert np.array_equal(read_blocks(name, blocks).dequantized("float32"), unpacked(name, blocks))


@pytest.mark.parametrize("name", KINDS)
def test_every_bit_of_a_block_counts_where_it_counts_in_the_package(name: str) -> None:
    """Each bit of a block is flipped in a row of its own."""
    block = random_blocks(name, rows=1, columns=256, seed=3)
    n_bytes = block.shape[2]
    scale_bytes = {at for at in range(n_bytes) if name == "MXFP4" and at == 0}
    bits = [(at, bit) for at in range(n_bytes) for bit in range(8) if at not in scale_bytes]
    blocks = np.repeat(block, len(bits), axis=0)
    for row, (at, bit) in enumerate(bits):
        blocks[row, 0, at] ^= 1 << bit
    with np.errstate(all="ignore"):
        expected = unpacked(name, blocks)
    finite = np.isfinite(expected).all(axis=1)
    assert finite.sum() > len(bits) - 24
    numbers = read_blocks(name, blocks[finite]).dequantized("float32")
    assert np.array_equal(numbers.view(np.uint32), expected[finite].view(np.uint32))


@pytest.mark.parametrize("name", KINDS)
def test_unpacking_reads_a_mapped_file_in_pieces(name: str, tmp_path: Path) -> None:
    blocks = random_blocks(name, rows=2048, columns=512, seed=5)
    blocks.tofile(tmp_path / "blocks")
    mapped = np.memmap(tmp_path / "blocks", np.uint8, "r", shape=blocks.shape)
    assert np.array_equal(read_blocks(name, mapped).codes, read_blocks(name, blocks).codes)


@pytest.mark.parametrize("name", [name for name in KINDS if name != "MXFP4"])
@pytest.mark.parametrize("number", [np.inf, -np.inf, np.nan])
def test_scales_that_are_not_finite_are_refused(name: str, number: float) -> None:
    blocks = random_blocks(name, rows=3, columns=512, seed=7)
    at = 208 if name == "Q6_K" else 0
    blocks[2, 1, at : at + 2] = np.array([number], "<f2").view(np.uint8)
    # The multiples of this unit may all be 0.
    with np.errstate(invalid="ignore"), pytest.raises(ValueError, match="not finite"):
        read_blocks(name, blocks)


@pytest.mark.parametrize("exponent", [0, 20, 127, 240, 255])
def test_blocks_of_zeros_in_mxfp4_may_have_any_scale(exponent: int) -> None:
    blocks = random_blocks("MXFP4", rows=2, columns=96, seed=0)
    blocks[1, 1:, 0] = exponent
    blocks[1, 1, 1:], blocks[1, 2, 1:] = 0, np.arange(16) % 2 * 0x88
    blocks[0, 0, 1:] = 0x80
    matrix = read_blocks("MXFP4", blocks)
    assert np.array_equal(matrix.dequantized("float32").view(np.uint32), unpacked("MXFP4", blocks).view(np.uint32))
    assert matrix.scales.values[1, 1:].tolist() == [0, 0] and matrix.scales.values[1, 0] > 0


def test_scales_of_mxfp4_that_no_kernel_computes_are_refused() -> None:
    blocks = random_blocks("MXFP4", rows=2, columns=64, seed=0)
    for exponent in (0, 20, 240, 255):
        wrong = blocks.copy()
        wrong[1, 1, 0] = exponent
        wrong[1, 1, 1:-1] = 0  # one code is enough
        wrong[1, 1, -1] = 0x10
        with pytest.raises(ValueError, match="neither 0 nor from"):
            read_blocks("MXFP4", wrong)
