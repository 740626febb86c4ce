"""Quantization of matrices to 4 or 8 bits by groups of columns, without calibration.

    int8   integers from -127 to 127; a float16 scale for 32 columns                             8.5 bits per weight
    int4   integers from 0 to 15; a scale and an offset for 32 columns, bytes that multiply      4.625
           float16 units of 256 columns

Columns that 32 does not divide have groups of 16, and others are not quantized. int8 maps the largest number of a group
to 127. int4 searches for the scale and the offset of the least squared error: it tries several ranges that leave out up
to a fifth of a group's span at either end, improves the best one by least squares, and decides about neighboring bytes
by the error that is left. Numbers that lie on 16 even steps already, as after training for 4 bits, keep their places.

The bits are the same on every machine, and for any number of threads: all operations are elementwise in float32, each
rounded as IEEE 754 has it, and sums add halves in a fixed order. A matrix product, or numpy's sum along an axis, would
add in an order that depends on the library and the CPU.

Shape legend: R rows, C columns, G groups of a row, U units of a row, N = R G groups of a piece, S columns of a group.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, Protocol

import numpy as np

from model.config import ModelConfig
from model.decoder_program import Kind, Operation, decoder_program, encoder_program
from model.number_formats import Array, all_finite
from model.packed_matrix import UNIT_COLUMNS, UNSIGNED_CODES, GroupNumbers, PackedFormat, PackedMatrix, packed_codes
from model.parameter_shapes import parameter_shapes
from model.weight_formats import Quantize

QuantizedKind = Literal["int8", "int4"]
LEAST, MOST = 2.0**-14, 2.0**22
"""Magnitude of a matrix's largest number, so that float16 holds scales and units with some precision."""
_GROUPS = (32, 16)
_PIECE = 1 << 18
"""Numbers that are quantized at once, so that copies stay in a core's cache."""
_NEGLIGIBLE = np.float32(2.0**-40)
"""Smaller numbers count as 0, which float16 scales make of them: so that no intermediate result is subnormal."""
_TOP = np.float32(15)
"""The last code of 4 bits."""
_LEFT_OUT = (0.0, 0.06, 0.12, 0.18)
"""Share of a group's span that a range leaves out at one end."""
_REFINEMENTS = 3
_MOST_SCALE, _MOST_OFFSET = np.float32(255), np.float32(127)
"""Multiples of a unit."""
_NEIGHBORS = ((1, 0), (-1, 0), (0, 1), (0, -1))
"""Changes of the bytes of scale and offset."""


def packed_kind(quantize: Quantize) -> QuantizedKind | None:
    """The kind of packed matrices that this value of --quantize makes; None if it makes none."""
    return quantize if quantize == "int8" or quantize == "int4" else None


def packed_format(columns: int, kind: QuantizedKind) -> PackedFormat | None:
    """The format of a quantized matrix of so many columns; None if no group divides them."""
    group = next((each for each in _GROUPS if not columns % each), None)
    if group is None:
        return None
    if kind == "int8":
        return PackedFormat(bits=8, group=group, scales="float16", has_offsets=False)
    return PackedFormat(bits=4, group=group, scales="multiples", has_offsets=True, table=UNSIGNED_CODES)


def quantized_formats(config: ModelConfig, kind: QuantizedKind) -> dict[str, PackedFormat | None]:
    """The packed_format() of each matrix of a decoder by its name: None if it is not quantized.

    Embedding and head are int8 in either kind: they decide about every token. A router is no such matrix: with rounded
    logits it would choose other experts. Nor are tables of positions.
    """
    formats: dict[str, PackedFormat | None] = {}
    for operation in (*encoder_program(config), *decoder_program(config)):
        for name, shape in _matrices(operation):
            is_outer = operation.kind in (Kind.EMBED, Kind.HEAD)
            formats[name] = packed_format(shape[-1], "int8" if is_outer else kind)
    return formats


def describe_unquantized(config: ModelConfig, kind: QuantizedKind) -> str | None:
    """Log message about matrices that are not quantized because of their columns; None if there are none."""
    formats, shapes = quantized_formats(config, kind), parameter_shapes(config)
    dense = [name for name, stored in formats.items() if stored is None]
    if not dense:
        return None
    sizes = ", ".join(sorted({" x ".join(map(str, shapes[name])) for name in dense}))
    return (
        f"{len(dense)} of {len(formats)} matrices are not quantized: {kind} requires columns that {_GROUPS[-1]} "
        f"divides, and their sizes are {sizes}"
    )


def _matrices(operation: Operation) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the matrices that may be quantized."""
    match operation.kind:
        case Kind.LINEAR | Kind.HEAD | Kind.EMBED:
            yield operation.weights[0]
        case Kind.CROSS_ATTENTION:
            yield from (weight for weight in operation.weights if len(weight.shape) == 2)
        case Kind.EXPERTS:
            yield from (weight for weight in operation.weights if len(weight.shape) == 3)


class PackedWeights(Protocol):
    """Parameters of a decoder by their names, of which some are packed: StoredWeights, or those of --quantize."""

    def packed_formats(self, name: str, /) -> tuple[tuple[PackedFormat, int], ...]:
        """Format and rows of each part of a parameter, which follow each other; none if its numbers are stored."""
        ...

    def read_packed(self, name: str, /) -> tuple[PackedMatrix, ...]:
        """The parts of a parameter; the rows of all experts follow each other. Raises ValueError."""
        ...

    def read(self, name: str, dtype: str, /) -> Array:
        """The numbers of a parameter in float32 or bfloat16 (as uint16). Raises ValueError."""
        ...


class QuantizedWeights:
    """Quantizes matrices as they are read; matrices that files have packed stay as they are."""

    def __init__(self, source: PackedWeights, config: ModelConfig, kind: QuantizedKind) -> None:
        self._source, self._kind, self._shapes = source, kind, parameter_shapes(config)
        formats = quantized_formats(config, kind).items()
        self._formats = {name: stored for name, stored in formats if stored and not source.packed_formats(name)}

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        if stored := self._formats.get(name):
            return ((stored, math.prod(self._shapes[name][:-1])),)
        return self._source.packed_formats(name)

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """See PackedWeights."""
        if stored := self._formats.get(name):
            return (self._quantized(name, "int8" if stored.bits == 8 else "int4"),)
        return self._source.read_packed(name)

    def read(self, name: str, dtype: str) -> Array:
        """See PackedWeights; of a quantized parameter the numbers that it stands for."""
        if name not in self._formats:
            return self._source.read(name, dtype)
        (matrix,) = self.read_packed(name)
        return matrix.dequantized(dtype).reshape(self._shapes[name])

    def _quantized(self, name: str, kind: QuantizedKind) -> PackedMatrix:
        numbers = self._source.read(name, "float32")
        try:
            return quantized(numbers.reshape(-1, numbers.shape[-1]), kind)
        except ValueError as error:
            raise ValueError(f"--quantize {self._kind}: {name} {error}; use --quantize none") from None


def quantized(numbers: Array, kind: QuantizedKind, *, threads: int | None = None) -> PackedMatrix:
    """The matrix float32 [R, C] in its packed_format(), which must not be None.

    threads: among which rows are divided; by default as many as there are CPUs for this process. Takes up to 16 MiB for
    each of them, and the result. Raises ValueError, with the reason only, if the numbers are not finite, too small or
    too large.
    """
    rows, columns = numbers.shape
    target = packed_format(columns, kind)
    assert target and numbers.dtype == np.float32
    _check_range(numbers)
    groups, units = columns // target.group, -(-columns // UNIT_COLUMNS)
    codes = np.empty((rows, columns * target.bits // 8), np.int8 if kind == "int8" else np.uint8)

    def of_groups(values: type[np.generic]) -> GroupNumbers:
        has_units = target.scales == "multiples"
        return GroupNumbers(
            values=np.empty((rows, groups), values), units=np.empty((rows, units), np.float16) if has_units else None
        )

    scales = of_groups(np.float16 if kind == "int8" else np.uint8)
    matrix = PackedMatrix(
        format=target, codes=codes, scales=scales, offsets=of_groups(np.int8) if target.has_offsets else None
    )
    quantize = _quantize_int8 if kind == "int8" else _quantize_int4
    step = max(1, _PIECE // columns)

    def fill(first: int) -> None:
        here = slice(first, first + step)
        quantize(numbers[here], matrix.take(here))

    with ThreadPoolExecutor(threads or _n_cpus()) as pool:
        list(pool.map(fill, range(0, rows, step)))
    return matrix


def _n_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_range(numbers: Array) -> None:
    """Raises ValueError."""
    if not numbers.size:
        return
    if not all_finite(numbers):
        raise ValueError("holds numbers that are not finite")
    largest = max(float(numbers.max()), -float(numbers.min()))
    if largest and not LEAST <= largest <= MOST:
        raise ValueError(
            f"has {largest:.3g} as its largest number, and quantization needs one from {LEAST:.2g} to {MOST:.2g}"
        )


def _quantize_int8(numbers: Array, out: PackedMatrix) -> None:
    """Fills `out`."""
    by_group_SN = _by_group(numbers, out.format.group)
    scales_N = _rounded_up(np.abs(by_group_SN).max(axis=0) / np.float32(127))
    out.scales.values[:] = scales_N.reshape(out.scales.values.shape)
    codes_SN = np.rint(by_group_SN * _inverse(scales_N.astype(np.float32)))
    np.clip(codes_SN, -127, 127, out=codes_SN)
    out.codes[:] = codes_SN.astype(np.int8).T.reshape(numbers.shape)


def _quantize_int4(numbers: Array, out: PackedMatrix) -> None:
    """Fills `out`."""
    by_group_SN = _by_group(numbers, out.format.group)
    steps_N, lows_N = _best_range(by_group_SN)
    assert out.offsets
    groups_of_unit = UNIT_COLUMNS // out.format.group
    scale_units_N = _units(out.scales, steps_N, _MOST_SCALE, groups_of_unit)
    offset_units_N = _units(out.offsets, lows_N, _MOST_OFFSET, groups_of_unit)

    def nearest(values_N: Array, units_N: Array, most: np.float32) -> Array:
        multiples: Array = np.clip(np.rint(values_N * _inverse(units_N)), -most, most)
        return multiples

    def codes(multiples_N: Array, offsets_N: Array) -> tuple[Array, Array, Array]:
        scales_N, offsets_N = multiples_N * scale_units_N, offsets_N * offset_units_N
        return _codes(by_group_SN, scales_N, offsets_N), scales_N, offsets_N

    def error(multiples_N: Array, offsets_N: Array) -> Array:
        errors_SN, scales_N, offsets_N = codes(multiples_N, offsets_N)
        errors_SN *= scales_N
        errors_SN += offsets_N
        errors_SN -= by_group_SN
        errors_SN *= errors_SN
        return _sum(errors_SN)

    scales_N = nearest(steps_N, scale_units_N, _MOST_SCALE)
    offsets_N = nearest(lows_N, offset_units_N, _MOST_OFFSET)
    least_N = error(scales_N, offsets_N)
    for change in _NEIGHBORS:
        trial = (
            np.clip(scales_N + np.float32(change[0]), 0, _MOST_SCALE),
            np.clip(offsets_N + np.float32(change[1]), -_MOST_OFFSET, _MOST_OFFSET),
        )
        error_N = error(*trial)
        is_better_N = error_N < least_N
        for kept, other in zip((scales_N, offsets_N, least_N), (*trial, error_N), strict=True):
            np.copyto(kept, other, where=is_better_N)
    out.scales.values[:] = scales_N.astype(np.uint8).reshape(out.scales.values.shape)
    out.offsets.values[:] = offsets_N.astype(np.int8).reshape(out.offsets.values.shape)
    codes_SN = codes(scales_N, offsets_N)[0].astype(np.uint8)
    out.codes[:] = packed_codes(codes_SN.T.reshape(numbers.shape))


def _best_range(by_group_SN: Array) -> tuple[Array, Array]:
    """Step and number of code 0 of each group, float32 [N] each, with the least squared error among those tried.

    With fixed codes c and numbers x whose mean is 0, the step xc / v, where v = cc - (sum of c)^2 / S, explains xc^2
    / v of the squares.
    """
    size = np.float32(len(by_group_SN))
    means_N = _sum(by_group_SN.copy()) / size
    centered_SN = by_group_SN - means_N
    least_N = centered_SN.min(axis=0)
    spans_N = centered_SN.max(axis=0) - least_N
    steps_N, lows_N, gains_N = np.zeros_like(means_N), np.zeros_like(means_N), np.full_like(means_N, -1)

    def attempt(step_N: Array, low_N: Array) -> None:
        codes_SN = _codes(centered_SN, step_N, low_N)
        sums_N, products_N = _sum(codes_SN.copy()), _sum(centered_SN * codes_SN)
        codes_SN *= codes_SN
        variances_N = _sum(codes_SN) - sums_N * sums_N / size
        found_N = products_N * _inverse(variances_N)
        gain_N = products_N * found_N
        is_better_N = gain_N > gains_N
        for kept, other in ((steps_N, found_N), (lows_N, -found_N * (sums_N / size)), (gains_N, gain_N)):
            np.copyto(kept, other, where=is_better_N)

    for below in _LEFT_OUT:
        for above in _LEFT_OUT:
            low_N = least_N + np.float32(below) * spans_N
            attempt(spans_N * np.float32((1 - below - above) / 15), low_N)
    for _ in range(_REFINEMENTS):
        attempt(steps_N.copy(), lows_N.copy())
    return steps_N, lows_N + means_N


def _codes(by_group_SN: Array, steps_N: Array, lows_N: Array) -> Array:
    """float32 [S, N], 0 to 15: those of the numbers step * code + low that are next to the given ones."""
    codes_SN = by_group_SN - lows_N
    codes_SN *= _inverse(steps_N)
    np.rint(codes_SN, out=codes_SN)
    np.clip(codes_SN, 0, _TOP, out=codes_SN)
    return codes_SN


def _units(out: GroupNumbers, numbers_N: Array, most: np.float32, groups_of_unit: int) -> Array:
    """float32 [N]: the unit of each group, with which `most` reaches the largest of these numbers; stores them, too."""
    assert out.units is not None
    rows, groups = out.values.shape
    padded = np.zeros((rows, out.units.shape[1] * groups_of_unit), np.float32)
    padded[:, :groups] = np.abs(numbers_N).reshape(rows, groups)
    out.units[:] = _rounded_up(padded.reshape(rows, -1, groups_of_unit).max(axis=2) / most)
    units: Array = np.repeat(out.units.astype(np.float32), groups_of_unit, axis=1)[:, :groups].reshape(-1)
    return units


def _by_group(numbers: Array, group: int) -> Array:
    """[R, C] -> [S, N], so that operations on all groups run along memory."""
    by_group_SN = np.ascontiguousarray(numbers.reshape(-1, group).T)
    return np.where(np.abs(by_group_SN) < _NEGLIGIBLE, np.float32(0), by_group_SN)


def _sum(numbers_SN: Array) -> Array:
    """[N]: in a fixed order. S is a power of two. Overwrites the numbers."""
    while len(numbers_SN) > 1:
        half = len(numbers_SN) // 2
        numbers_SN[:half] += numbers_SN[half:]
        numbers_SN = numbers_SN[:half]
    total: Array = numbers_SN[0]
    return total


def _inverse(scales_N: Array) -> Array:
    """1 / scale; 0 where it is 0."""
    inverse: Array = np.divide(np.float32(1), scales_N, out=np.zeros_like(scales_N), where=scales_N != 0)
    return inverse


def _rounded_up(numbers: Array) -> Array:
    """Positive float32 -> float16, at least as large."""
    rounded = numbers.astype(np.float16)
    larger: Array = np.where(rounded < numbers, np.nextafter(rounded, np.float16(np.inf)), rounded)
    return larger
