"""Writes the tensors of any weights that can be read as one safetensors file: dense, or in compressed-tensors' format.

Tensors are read, rounded and written in pieces. Names and layouts are the source's, or those of a given family; packed
experts get the names and the layout of dense ones. Packed matrices of 4 and 8 bits are what vLLM and transformers call
pack-quantized.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np

from model.checkpoint.family_tensors import FamilyTensor, family_constants, family_tensors
from model.checkpoint.group_quantizer import packed_words, quantized_symmetric
from model.checkpoint.stored_numbers import NUMBER_FORMATS, dequantized, mapped
from model.checkpoint.stored_weights import StoredWeights, row_order
from model.checkpoint.tensor_index import PackedSource, StoredTensor
from model.checkpoint.tensor_writer import NewTensor, TensorWriter, file_bytes
from model.families.layouts import PACKED_BLOCKS
from model.families.spec import FamilySpec, TensorMapping
from model.files import CheckpointError
from model.number_formats import Array, all_finite, as_float32, rounded_to_bfloat16

Dtype = Literal["float32", "float16", "bfloat16"]
Progress = Callable[[int], None]
"""Gets the bytes of each piece that is written."""
_TYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
_FORMAT_OF: dict[np.dtype[Any], Dtype] = {
    np.dtype("<f4"): "float32",
    np.dtype("<f2"): "float16",
    np.dtype("<u2"): "bfloat16",
}
"""Number formats by the dtypes of arrays."""
_PIECE = 1 << 20
"""Numbers that are converted at once."""
_GROUPS = (32, 16)
"""Columns that share a scale: the first one that divides a row."""
_LINEAR = re.compile(
    r"(encoder_)?blocks\.\d+\.(attention|cross|mlp)(\.shared|\.experts)?\.(qkv|q|kv|out|up|down)(\.weight)?"
)
"""Tensors of the Decoder that are matrices of linear layers; embedding, head and routers stay dense."""


@dataclass(frozen=True, slots=True)
class _Output:
    """One tensor of the source, and what is written of it."""

    source: StoredTensor | PackedSource | FamilyTensor
    name: str
    shape: tuple[int, ...]
    dtype: Dtype
    group: int = 0
    """Columns that share a scale, if it is packed."""

    @property
    def module(self) -> str:
        return self.name.removesuffix(".weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConversionPlan:
    """What is written of some weights."""

    weights: StoredWeights
    family: FamilySpec
    mappings: Mapping[str, TensorMapping]
    """Name of a tensor of the Decoder -> how it is written."""
    outputs: Sequence[_Output]
    bits: int
    """Of the packed matrices; 0 for none."""

    @property
    def n_bytes(self) -> int:
        """Bytes of the file."""
        return file_bytes(self._tensors())

    @property
    def tensor_bytes(self) -> int:
        """Bytes of the tensors, all of which progress counts."""
        return sum(tensor.n_bytes for tensor in self._tensors())

    @property
    def n_params(self) -> int:
        """Numbers of all tensors, whether packed or not."""
        return sum(math.prod(output.shape) for output in self.outputs)

    def describe_packed(self) -> str:
        """Number of packed matrices, and their bits with scales; empty if there are none."""
        packed = [output for output in self.outputs if output.group]
        numbers = sum(math.prod(output.shape) for output in packed)
        bits = sum(math.prod(output.shape) * (self.bits + 16 / output.group) for output in packed)
        groups = " and ".join(str(group) for group in _GROUPS if any(output.group == group for output in packed))
        found = f"{len(packed):,} matrices of {self.bits} bits in groups of {groups}"
        return f"{found}, {bits / numbers:.2f} bits per weight with scales" if packed else ""

    @property
    def dtypes(self) -> set[Dtype]:
        """Number formats of the tensors that are not packed."""
        return {output.dtype for output in self.outputs if not output.group}

    @property
    def keeps_numbers(self) -> bool:
        """Whether the file holds the numbers of the source, so that its golden.json still holds."""
        return not self.bits and all(
            output.dtype == "float32" or output.dtype == self._own_dtype(output) for output in self.outputs
        )

    def _own_dtype(self, output: _Output) -> str:
        if isinstance(output.source, PackedSource | FamilyTensor):
            return "packed or in another layout"
        return "bfloat16" if output.source.name in self.weights.scales else NUMBER_FORMATS[output.source.dtype]

    def write(self, file: BinaryIO, progress: Progress) -> None:
        """Raises CheckpointError, OSError."""
        writer = TensorWriter(file, self._tensors())
        for output in self.outputs:
            try:
                if output.group:
                    self._write_packed(writer, output, progress)
                else:
                    for piece in self._pieces(output):
                        progress(writer.append(output.name, _as_dtype(piece, output.dtype)))
            except ValueError as error:
                path = output.source.path
                whole = f"{path}: {output.source.name} {error}"
                raise CheckpointError(str(error) if isinstance(error, CheckpointError) else whole) from None
        writer.check_complete()

    def quantization_config(self) -> dict[str, Any]:
        """For config.json: compressed-tensors' description of the packed matrices; empty if there are none."""
        if not self.bits:
            return {}
        groups: dict[str, Any] = {}
        for group in _GROUPS:
            modules = [output.module for output in self.outputs if output.group == group]
            if modules:
                # Names win over classes where a group's targets are looked up.
                targets = ["Linear"] if group == _GROUPS[0] else modules
                groups[f"group_{len(groups)}"] = {
                    "targets": targets,
                    "weights": {
                        "num_bits": self.bits,
                        "type": "int",
                        "symmetric": True,
                        "strategy": "group",
                        "group_size": group,
                        "dynamic": False,
                    },
                    "input_activations": None,
                    "output_activations": None,
                }
        return {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": self._dense_modules(),
            "kv_cache_scheme": None,
        }

    def _dense_modules(self) -> list[str]:
        """Modules with a matrix that stays dense, a tied head included, and patterns for those that no text needs."""
        embeddings = {
            source
            for name in ("embedding", "position_embedding")
            for source, _ in (self.mappings[name].source if name in self.mappings else ())
        }
        left_out = {re.match(r"(?:model\.)?([^.]+)", name)[1] for name in self.weights.left_out}  # type: ignore[index]
        found = [
            output.module
            for output in self.outputs
            if not output.group and len(output.shape) > 1 and output.name not in embeddings
            if output.name not in self.weights.left_out
        ]
        head = self.family.names.get("untied_head")
        if isinstance(head, str):
            found.append(head.removesuffix(".weight"))
        found.append("lm_head")  # what transformers calls every head in memory
        patterns = [rf"re:(.*\.)?{re.escape(module)}\..*" for module in sorted(left_out)]
        return list(dict.fromkeys([*found, *patterns]))

    def _tensors(self) -> list[NewTensor]:
        tensors = []
        for output in self.outputs:
            if not output.group:
                tensors.append(NewTensor(output.name, _TYPES[output.dtype], output.shape))
                continue
            rows, columns = output.shape
            tensors += [
                NewTensor(f"{output.module}.weight_packed", "I32", (rows, columns * self.bits // 32)),
                NewTensor(f"{output.module}.weight_scale", "F16", (rows, columns // output.group)),
                NewTensor(f"{output.module}.weight_shape", "I64", (2,)),
            ]
        return tensors

    def _write_packed(self, writer: TensorWriter, output: _Output, progress: Progress) -> None:
        shape = np.array(output.shape, "<i8")
        progress(writer.append(f"{output.module}.weight_shape", shape))
        for piece in self._pieces(output):
            _check_finite(piece)
            codes, scales = quantized_symmetric(as_float32(piece), self.bits, output.group)
            progress(writer.append(f"{output.module}.weight_packed", packed_words(codes, self.bits)))
            progress(writer.append(f"{output.module}.weight_scale", scales))

    def _pieces(self, output: _Output) -> Iterator[Array]:
        """The numbers of a tensor [R, C] in float32, float16, or bfloat16 as uint16, some whole rows at a time."""
        source = output.source
        if isinstance(source, PackedSource):
            yield from _packed_pieces(source, output)
            return
        if isinstance(source, FamilyTensor):
            whole = source.read(output.dtype)
        else:
            scale = self.weights.scales.get(source.name)
            whole = dequantized(source, scale) if scale else mapped(source)
        if whole.size:
            rows = whole.reshape(-1, whole.shape[-1] if whole.ndim else 1)
            step = _rows_at_once(rows.shape[1])
            for first in range(0, len(rows), step):
                yield rows[first : first + step]


def plan(
    weights: StoredWeights, *, dtype: Dtype | None, bits: int = 0, family: FamilySpec | None = None
) -> ConversionPlan:
    """What to write. Raises CheckpointError if it cannot be done.

    dtype: of dense tensors; None for bfloat16, or each tensor's own if no matrix of the source is quantized. bits: 4 or
    8 to pack matrices of linear layers. family: writes its names and its layout instead of those of the files.
    """
    if bits and weights.packed:
        kind = next(iter(weights.packed.values()))
        raise CheckpointError(
            f"{kind.path}: {kind.name} is packed already ({kind.format.describe()}), and rounding it again would lose "
            "more than rounding the original once: quantize the original weights (or convert these without --quantize "
            "first, and then the result)"
        )
    is_quantized = bool(weights.packed or weights.scales)
    chosen: Dtype | None = dtype or ("bfloat16" if is_quantized else None)
    mappings = {each.target: each for each in family.mappings(weights.config)} if family else weights.mappings
    groups = _groups(mappings) if bits else {}
    if bits and not groups:
        raise CheckpointError(
            f"{weights.paths[0]}: no matrix of a {weights.family.name} can be packed: they are stored transposed, "
            "for all experts together, or in rows that 16 does not divide"
        )
    if family:
        outputs = _family_outputs(weights, mappings, chosen, groups)
    else:
        outputs = [_output(weights, name, chosen, groups.get(name, 0)) for name in _names(weights)]
    return ConversionPlan(
        weights=weights, family=family or weights.family, mappings=mappings, outputs=outputs, bits=bits
    )


def _family_outputs(
    weights: StoredWeights, mappings: Mapping[str, TensorMapping], dtype: Dtype | None, groups: Mapping[str, int]
) -> list[_Output]:
    assert dtype is not None
    shapes = {name: shape for mapping in mappings.values() for name, shape in mapping.source}
    outputs = [
        _Output(tensor.same() or tensor, name, shapes[name], dtype, groups.get(name, 0))
        for name, tensor in family_tensors(weights, mappings).items()
    ]
    return outputs + [_Output(stored, name, (), dtype) for name, stored in family_constants(weights, mappings).items()]


def _names(weights: StoredWeights) -> list[str]:
    """Tensors of the files that are part of the model, each once; a stored copy of a tied head is not."""
    names = dict.fromkeys(source for mapping in weights.mappings.values() for source, _ in mapping.source)
    constants = (name for mapping in weights.mappings.values() for name, _ in mapping.constants)
    return [*names, *(name for name in constants if name in weights.tensors), *weights.left_out]


def _output(weights: StoredWeights, name: str, dtype: Dtype | None, group: int) -> _Output:
    packed = weights.packed.get(name)
    if packed is None:
        stored = weights.tensors[name]
        if stored.dtype not in NUMBER_FORMATS and name not in weights.scales:  # of parts that no text needs
            raise CheckpointError(
                f"{stored.path}: {name}, which no text needs, has dtype {stored.dtype}; only tensors in "
                f"{', '.join(NUMBER_FORMATS)} can be converted"
            )
        own: Any = NUMBER_FORMATS.get(stored.dtype)
        return _Output(stored, name, stored.shape, dtype or own, group)
    assert dtype is not None
    if not name.endswith(PACKED_BLOCKS):
        return _Output(packed, name, packed.shape, dtype)
    experts, rows, columns = packed.shape
    return _Output(packed, name.removesuffix(PACKED_BLOCKS), (experts, columns, rows), dtype)


def _groups(mappings: Mapping[str, TensorMapping]) -> dict[str, int]:
    """The matrices to pack, with the columns of their groups.

    Not those that the Decoder has in other columns: programs know packed matrices as [out, in] alone.
    """
    found = {}
    for target, mapping in mappings.items():
        if not _LINEAR.fullmatch(target):
            continue
        for index, (name, shape) in enumerate(mapping.source):
            group = next((each for each in _GROUPS if shape[-1] % each == 0), 0)
            is_linear = len(shape) == 2 and name.endswith(".weight") and row_order(mapping, index, shape) is not None
            if group and is_linear:
                found[name] = group
    return found


def _packed_pieces(source: PackedSource, output: _Output) -> Iterator[Array]:
    matrix = source.read()
    kind = "bfloat16" if output.dtype == "bfloat16" else "float32"
    if output.shape == source.shape:
        step = _rows_at_once(source.shape[-1])
        for first in range(0, matrix.shape[0], step):
            yield matrix.take(slice(first, first + step)).dequantized(kind)
        return
    rows = source.shape[1]
    for first in range(0, matrix.shape[0], rows):  # one expert after the other
        yield matrix.take(slice(first, first + rows)).dequantized(kind).T


def _rows_at_once(columns: int) -> int:
    return max(1, _PIECE // max(1, columns))


def _as_dtype(piece: Array, dtype: Dtype) -> Array:
    """The numbers in this format, bfloat16 as uint16. Raises ValueError, with the reason only."""
    _check_finite(piece)
    if _FORMAT_OF[piece.dtype] == dtype:
        return piece
    wide = as_float32(piece)
    if dtype == "float32":
        return wide
    with np.errstate(over="ignore"):
        narrow = rounded_to_bfloat16(wide) if dtype == "bfloat16" else wide.astype(np.float16)
    if not all_finite(narrow):
        other = "--dtype float32" if dtype == "bfloat16" else "--dtype bfloat16"
        raise ValueError(f"holds numbers too large for {dtype}; convert with {other}")
    return narrow


def _check_finite(piece: Array) -> None:
    if not all_finite(piece):
        raise ValueError("holds numbers that are not finite")
