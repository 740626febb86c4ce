"""Products with packed matrices against the reference: every format of scales and table, and batch invariance.

Numbers of the weight are compared bit for bit, by a product with an identity matrix. Shape legend: T tokens of the
step, K columns, N rows of the weight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from importlib import import_module

import numpy as np
import torch
from torch import Tensor

from app.engine.quantization.quantized_weights import PackedProduct, packed_product
from benchmarks.gpu.conformance.harness import close, poisoned, random, same_bits
from benchmarks.gpu.results import Finding
from model.nn.packed_tensors import PackedTensors
from model.number_formats import Array
from model.packed_matrix import SIGNED_CODES, UNSIGNED_CODES, GroupNumbers, PackedFormat, PackedMatrix, packed_codes
from model.quantize import QuantizedKind, packed_format

FP4_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of e2m1, of MXFP4."""


def format_of(kind: QuantizedKind, columns: int) -> PackedFormat:
    """The format of --quantize for so many columns, which a group divides."""
    found = packed_format(columns, kind)
    assert found
    return found


FORMATS: Mapping[str, PackedFormat] = {
    "int8": format_of("int8", 4096),
    "int4": format_of("int4", 4096),
    "4 bits, float32": PackedFormat(bits=4, group=128, scales="float32", has_offsets=True, table=UNSIGNED_CODES),
    "4 bits, float16": PackedFormat(bits=4, group=64, scales="float16", has_offsets=False, table=SIGNED_CODES),
    "4 bits, uneven": PackedFormat(bits=4, group=32, scales="float16", has_offsets=False, table=FP4_TWICE),
    "8 bits, multiples": PackedFormat(bits=8, group=16, scales="multiples", has_offsets=False),
}
"""Every kind of scales and table, with offsets and without."""
_LARGE = ((4096, 4096), (1000, 2944), (64, 14_336))
"""Rows and columns of a weight; 23 blocks of columns, and many splits."""
_SMALL = ((70, 384),)


def random_matrix(packed: PackedFormat, rows: int, columns: int, seed: int) -> PackedMatrix:
    """Numbers of about the size of trained weights."""
    dice = np.random.default_rng(seed)
    codes = dice.integers(0, 16, (rows, columns), np.uint8)
    integers = dice.integers(-127, 128, (rows, columns), np.int8)
    largest = max(map(abs, packed.table)) if packed.table else 127

    def of_groups(size: float, bytes_: tuple[int, int, type[np.generic]]) -> GroupNumbers:
        shape = (rows, columns // packed.group)
        values: Array
        if packed.scales != "multiples":
            return GroupNumbers(values=(dice.uniform(0.2, 1.0, shape) * size).astype(packed.scales))
        least, most, kind = bytes_
        values = dice.integers(least, most, shape).astype(kind)
        units = dice.uniform(0.5, 1.0, (rows, -(-columns // 256))) * size / most
        return GroupNumbers(values=values, units=units.astype(np.float16))

    size = 3 * columns**-0.5
    return PackedMatrix(
        format=packed,
        codes=packed_codes(codes) if packed.bits == 4 else integers,
        scales=of_groups(size / largest, (1, 256, np.uint8)),
        offsets=of_groups(size / 4, (-127, 128, np.int8)) if packed.has_offsets else None,
    )


def check_packed_products(device: str, tiny: bool) -> Iterator[Finding]:
    """The numbers of the weight, the product, and that the bits of a token depend on its own numbers only."""
    seed, product = time.time_ns() % 1_000_000, _row_by_row
    if device != "cpu":
        product = import_module("app.engine.gpu.kernels.triton.quantized_products").packed_product
    for name, packed in FORMATS.items():
        for rows, columns in _SMALL if tiny else _LARGE:
            weight = PackedTensors.of(random_matrix(packed, rows, columns, seed), (rows, columns), torch.device(device))
            yield from compare(f"{name}, {rows} x {columns}, seed {seed}", product, weight, torch.bfloat16, seed)


def _row_by_row(x_TK: Tensor, weight: PackedTensors, bias_N: Tensor | None) -> Tensor:
    """The reference with the same bits for any number of tokens, to test the checks themselves."""
    return torch.cat([packed_product(row_1K, weight, bias_N) for row_1K in x_TK.split(1)])


def compare(
    what: str, product: PackedProduct, weight: PackedTensors, dtype: torch.dtype, seed: int
) -> Iterator[Finding]:
    """One weight: few and many tokens, alone and with others."""
    rows, columns = weight.shape
    device = str(weight.codes.device)
    with poisoned():
        if columns <= 4096:
            ones = torch.eye(columns, dtype=dtype, device=device)
            yield same_bits(f"{what}: numbers", product(ones, weight, None), weight.dequantized(dtype).t())
        x_TK, bias_N = random((100, columns), dtype, device, seed + 1), random((rows,), dtype, device, seed + 2)
        expected_TN = packed_product(x_TK, weight, bias_N)
        found_TN = product(x_TK[:64], weight, bias_N)
        yield close(f"{what}: 64 tokens", found_TN, expected_TN[:64])
        yield close(f"{what}: 100 tokens", product(x_TK, weight, bias_N), expected_TN)
        for count in (1, 2, 15, 16, 17, 33):
            yield same_bits(f"{what}: {count} tokens", product(x_TK[:count], weight, bias_N), found_TN[:count])
        backwards = product(x_TK[:64].flip(0), weight, bias_N).flip(0)
        yield same_bits(f"{what}: in another order", backwards, found_TN)
