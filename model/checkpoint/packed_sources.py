"""Packed matrices of safetensors files: AWQ, GPTQ, compressed-tensors and MXFP4.

Each stores a matrix [R, C] as several tensors, whose names and shapes say what they are. The sources are vLLM's
compressed-tensors (pack_quantized), AutoAWQ (gemm), GPTQModel (gptq and gptq_v2) and transformers (integrations/mxfp4).
A zero point z stands for an offset: scale * (code - z).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from model.checkpoint.stored_numbers import mapped
from model.checkpoint.tensor_index import PackedSource, StoredTensor
from model.families.quantization import Quantization
from model.files import CheckpointError
from model.number_formats import Array, as_float32
from model.packed_matrix import (
    FP4_CODES,
    GROUPS,
    SIGNED_CODES,
    UNSIGNED_CODES,
    GroupNumbers,
    PackedFormat,
    PackedMatrix,
    packed_codes,
)

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column of each code of a word, from its low bits on."""
_FP4_BIAS = 128
"""Of the exponents of their scales, halved."""
_LEAST_EXPONENT, _MOST_EXPONENT = _FP4_BIAS - 24, _FP4_BIAS + 15
"""Of powers of 2 that are float16 numbers."""
_WORDS_AT_ONCE = 64
"""Words of each row of an AWQ matrix that are unpacked at once."""
Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True, slots=True)
class _Module:
    """The tensors of one packed matrix, by what they are."""

    name: str
    """Of the matrix, ending with weight."""
    parts: Tensors

    @property
    def first(self) -> StoredTensor:
        return next(iter(self.parts.values()))

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.first.path}: {self.name.removesuffix('.weight')} {reason}")

    def need(self, part: str, dtypes: str, *shape: int | None) -> StoredTensor:
        """The tensor, of one of these dtypes and this shape; None: of any size. Raises CheckpointError."""
        stored = self.parts.get(part)
        if stored is None:
            raise self.fail(f"has no {part}")
        fits = len(stored.shape) == len(shape)
        fits = fits and all(want in (None, size) for want, size in zip(shape, stored.shape, strict=True))
        if stored.dtype not in dtypes.split() or not fits:
            wanted = [size or "any" for size in shape]
            raise self.fail(f"has a {part} of {stored.dtype} {list(stored.shape)}; it must be {dtypes} {wanted}")
        return stored

    def group(self, columns: int, groups: int) -> tuple[int, int]:
        """The group of a format, and how often each scale is repeated for it. Raises CheckpointError."""
        stored = columns // groups if groups and columns % groups == 0 else 0
        if group := next((each for each in reversed(GROUPS) if stored and stored % each == 0), 0):
            return group, stored // group
        raise self.fail(f"has {groups} scales for {columns} columns; groups must be multiples of {GROUPS[0]} columns")


def match_packed(found: Tensors, quantization: Quantization) -> tuple[dict[str, StoredTensor], dict[str, PackedSource]]:
    """The tensors that are not packed, and the packed matrices, each by its name. Raises CheckpointError."""
    dense, packed = dict(found), dict[str, PackedSource]()
    for name in found:
        read = next((read for ending, read in _READERS.items() if name.endswith(ending)), None)
        prefix, dot, part = name.rpartition(".")
        if part == "weight" and found[name].dtype == "I8":
            read = _int_quantized
        if read is None or (read is _mxfp4 and found[name].dtype != "U8"):
            continue
        if read is _mxfp4:
            parts = {"blocks": found[name]}
            if scales := found.get(f"{name.removesuffix('_blocks')}_scales"):
                parts["scales"] = scales
            module = _Module(name, parts)
        else:
            parts = {each: found[f"{prefix}{dot}{each}"] for each in _PARTS if f"{prefix}{dot}{each}" in found}
            module = _Module(f"{prefix}{dot}weight", parts)
            if part != "weight" and "weight" in parts:
                raise module.fail(f"has both a {part} and a weight")
        source = read(module, quantization)
        packed[source.name] = source
        for stored in parts.values():
            dense.pop(stored.name, None)
    return dense, packed


def is_empty_bias(stored: StoredTensor, packed: Mapping[str, PackedSource]) -> bool:
    """Whether it is a bias of zeros, which GPTQ's exporters give every module."""
    if not stored.name.endswith(".bias") or stored.name.removesuffix("bias") + "weight" not in packed:
        return False
    return stored.dtype in ("F16", "BF16", "F32") and not mapped(stored).any()


def _source(
    module: _Module, packed_format: PackedFormat, shape: tuple[int, ...], read: Callable[[], PackedMatrix]
) -> PackedSource:
    return PackedSource(name=module.name, path=module.first.path, format=packed_format, shape=shape, load=read)


def _compressed_tensors(module: _Module, _quantization: Quantization) -> PackedSource:
    """pack-quantized: codes along the columns, from the low bits on; both codes and zero points are unsigned."""
    rows, columns = _stored_shape(module)
    stored = module.need("weight_packed", "I32", rows, None)
    bits = 32 * stored.shape[1] // columns
    if bits not in (4, 8) or columns * bits != 32 * stored.shape[1]:
        raise module.fail(
            f"has {bits} bits for each of {columns} numbers; only 4 and 8 bits are supported, of whole words"
        )
    scale = module.need("weight_scale", _NUMBERS, rows, None)
    _check_order(module, columns, scale.shape[1])
    group, repeats = module.group(columns, scale.shape[1])
    zeros = None
    if "weight_zero_point" in module.parts:
        zeros = module.need("weight_zero_point", "I32", -(-rows * bits // 32), scale.shape[1])
    packed_format = _affine(module, bits, group, scale, is_symmetric=zeros is None)

    def read() -> PackedMatrix:
        codes: Array = mapped(stored).view(np.uint8)
        unsigned = None
        if zeros is not None:
            words = np.ascontiguousarray(mapped(zeros).T)
            unsigned = _unpacked(words, bits)[:, :rows].T.astype(np.int32) - (1 << (bits - 1))
        return _made(packed_format, _signed(codes, bits), mapped(scale), unsigned, repeats)

    return _source(module, packed_format, (rows, columns), read)


def _stored_shape(module: _Module) -> tuple[int, int]:
    shape = mapped(module.need("weight_shape", "I64 I32", 2))
    rows, columns = (int(size) for size in shape)
    if not (0 < rows < 2**31 and 0 < columns < 2**31):
        raise module.fail(f"has the weight_shape {shape.tolist()}")
    return rows, columns


def _int_quantized(module: _Module, _quantization: Quantization) -> PackedSource:
    """int-quantized: int8 as it is. Scales of activations are left out: steps do not round them."""
    stored = module.need("weight", "I8", None, None)
    rows, columns = stored.shape
    scale = module.need("weight_scale", _NUMBERS, rows, None)
    if "weight_zero_point" in module.parts:
        raise module.fail("has zero points of 8 bits, which are not supported; use the unquantized weights")
    group, repeats = module.group(columns, scale.shape[1])
    packed_format = _affine(module, 8, group, scale, is_symmetric=True)
    return _source(
        module, packed_format, stored.shape, lambda: _made(packed_format, mapped(stored), mapped(scale), None, repeats)
    )


def _gptq_or_awq(module: _Module, quantization: Quantization) -> PackedSource:
    if quantization.method not in ("awq", "gptq"):
        raise module.fail("has a qweight, and config.json no quantization_config of AWQ or GPTQ, which says its order")
    scale = module.need("scales", _NUMBERS, None, None)
    read = _awq if quantization.method == "awq" else _gptq
    return read(module, quantization, scale)


def _gptq(module: _Module, quantization: Quantization, scale: StoredTensor) -> PackedSource:
    """Codes along the columns, from the low bits on; a word of each row is followed by the words of other rows."""
    groups, rows = scale.shape
    zeros = module.need("qzeros", "I32", groups, None)
    bits = 32 * zeros.shape[1] // rows if rows else 0
    if bits not in (4, 8) or bits * rows != 32 * zeros.shape[1]:
        raise module.fail(f"has zero points of {bits} bits; only 4 and 8 bits are supported")
    stored = module.need("qweight", "I32", None, rows)
    columns = stored.shape[0] * 32 // bits
    group, repeats = module.group(columns, groups)
    _check_order(module, columns, groups)
    packed_format = _affine(module, bits, group, scale, is_symmetric=False)
    lowest = 0 if quantization.stores_zero_points else 1  # the first version stores the zero point less 1

    def read() -> PackedMatrix:
        codes = np.ascontiguousarray(mapped(stored).T).view(np.uint8)
        points = _unpacked(mapped(zeros), bits).T.astype(np.int32) + lowest
        if bits == 8:
            codes, points = _signed(codes, bits), points - 128
        return _made(packed_format, codes, mapped(scale).T, points, repeats)

    return _source(module, packed_format, (rows, columns), read)


def _awq(module: _Module, _quantization: Quantization, scale: StoredTensor) -> PackedSource:
    """gemm: words of eight rows of one column, in their own order."""
    groups, rows = scale.shape
    _check_order(module, module.need("qweight", "I32", None, None).shape[0], groups)
    if rows % 8:
        raise module.fail(f"has {rows} rows, which must be a multiple of 8")
    zeros = module.need("qzeros", "I32", groups, rows // 8)
    stored = module.need("qweight", "I32", None, rows // 8)
    columns = stored.shape[0]
    group, repeats = module.group(columns, groups)
    packed_format = _affine(module, 4, group, scale, is_symmetric=False)

    def rows_of(words: Array) -> Array:
        """[n, words] -> [8 * words, n]."""
        codes = _unpacked(words, 4).reshape(len(words), -1, 8)
        ordered: Array = codes[:, :, np.argsort(_AWQ_ORDER)].reshape(len(words), -1).T
        return ordered

    def read() -> PackedMatrix:
        words, codes = mapped(stored), np.empty((rows, columns // 2), np.uint8)
        for first in range(0, rows // 8, _WORDS_AT_ONCE):
            part = np.ascontiguousarray(words[:, first : first + _WORDS_AT_ONCE])
            codes[8 * first : 8 * (first + _WORDS_AT_ONCE)] = packed_codes(rows_of(part))
        return _made(packed_format, codes, mapped(scale).T, rows_of(mapped(zeros)).astype(np.int32), repeats)

    return _source(module, packed_format, (rows, columns), read)


def _mxfp4(module: _Module, _quantization: Quantization) -> PackedSource:
    """Experts' matrices: e2m1 in groups of 32, whose scale is a power of 2."""
    stored = module.need("blocks", "U8", None, None, None, 16)
    *shape, groups, width = stored.shape
    scale = module.need("scales", "U8", *shape, groups)
    exponents = mapped(scale)
    least = int(exponents.min(initial=255, where=exponents > 0))  # 0: of groups of zeros
    is_small = least >= _LEAST_EXPONENT and int(exponents.max(initial=0)) <= _MOST_EXPONENT
    packed_format = PackedFormat(
        bits=4, group=32, scales="float16" if is_small else "float32", has_offsets=not is_small, table=FP4_CODES
    )

    def read() -> PackedMatrix:
        scales = np.ldexp(np.float32(1), mapped(scale).reshape(-1, groups).astype(np.int32) - _FP4_BIAS)
        codes = mapped(stored).reshape(-1, groups * width)
        has_numbers = (codes.reshape(-1, groups, width) & 0x77).any(axis=2)  # 0 and 8 are zeros of any scale
        return _made(packed_format, codes, np.where(has_numbers, scales, 0).astype(np.float32), None, 1)

    return _source(module, packed_format, (*shape, groups * 2 * width), read)


def _affine(module: _Module, bits: int, group: int, scale: StoredTensor, *, is_symmetric: bool) -> PackedFormat:
    if scale.dtype == "F32" and not is_symmetric:
        raise module.fail("has scales in F32 and zero points; scales must be F16 or BF16")
    is_half = is_symmetric and scale.dtype == "F16"
    table = () if bits == 8 else SIGNED_CODES if is_symmetric or "weight_packed" in module.parts else UNSIGNED_CODES
    return PackedFormat(
        bits=bits, group=group, scales="float16" if is_half else "float32", has_offsets=not is_half, table=table
    )


def _made(packed_format: PackedFormat, codes: Array, scales: Array, zeros: Array | None, repeats: int) -> PackedMatrix:
    """scales, zeros: [R, G], each of `repeats` groups of the format. An offset is exact: 11 bits times 9."""
    wide = as_float32(scales)
    offsets = np.full_like(wide, -0.0) if zeros is None else -(wide * zeros)
    numbers = (np.repeat(each, repeats, axis=1) for each in (wide, offsets))
    scale, offset = (GroupNumbers(values=each.astype(packed_format.scales)) for each in numbers)
    return PackedMatrix(
        format=packed_format, codes=codes, scales=scale, offsets=offset if packed_format.has_offsets else None
    )


def _unpacked(words: Array, bits: int) -> Array:
    """int32 [n, words] -> codes uint8 [n, 32 / bits * words], from the low bits on."""
    octets: Array = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    codes = np.empty((*octets.shape, 2), np.uint8)
    codes[..., 0], codes[..., 1] = octets & 15, octets >> 4
    return codes.reshape(len(words), -1)


def _signed(codes: Array, bits: int) -> Array:
    """Codes of 8 bits less 128, as integers; others as they are."""
    signed: Array = (codes ^ 0x80).view(np.int8) if bits == 8 else codes
    return signed


def _check_order(module: _Module, columns: int, groups: int) -> None:
    """Raises CheckpointError if a g_idx gives columns other groups than those in which they lie."""
    for part in ("g_idx", "weight_g_idx"):
        if part not in module.parts:
            continue
        order = mapped(module.need(part, "I32 I64", columns))
        is_unset = part == "weight_g_idx" and (order == -1).all()
        if not is_unset and not np.array_equal(order, np.arange(columns) // -(-columns // max(1, groups))):
            raise module.fail(
                f"has a {part} in which columns of one group are apart (act-order, desc_act), which is not supported; "
                "use weights that were quantized without it, or the unquantized ones"
            )


_NUMBERS = "F16 BF16 F32"
_PARTS = (
    "weight_packed",
    "weight",
    "qweight",
    "weight_scale",
    "weight_zero_point",
    "weight_shape",
    "weight_g_idx",
    "qzeros",
    "scales",
    "g_idx",
)
_READERS: Mapping[str, Callable[[_Module, Quantization], PackedSource]] = {
    ".weight_packed": _compressed_tensors,
    ".qweight": _gptq_or_awq,
    "_blocks": _mxfp4,
}
"""By the end of the name of the tensor that holds the codes."""
