"""Weights directories as they are stored: configuration, checks of names and sizes, tensors as numpy arrays. Strict.

Nothing in the directory is ever executed or unpickled, and the sizes of a config.json are checked against the headers
of the files before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from model.checkpoint.config_file import read_config_file
from model.checkpoint.gguf_index import index_gguf
from model.checkpoint.packed_sources import is_empty_bias, match_packed
from model.checkpoint.stored_numbers import (
    ALLOWED_TYPES,
    NUMBER_FORMATS,
    STORED_TYPES,
    dequantized,
    mapped,
    match_scales,
)
from model.checkpoint.tensor_index import PackedSource, StoredTensor, TensorIndex, find_tensors, gguf_files, version_of
from model.config import ConfigError, ModelConfig
from model.families.quantization import Quantization, read_quantization
from model.families.spec import FamilySpec, Tensor, TensorMapping
from model.files import CheckpointError, read_json, sha256
from model.gguf.gguf_model import GgufModel
from model.number_formats import Array, all_finite, as_float32, rounded_to_bfloat16
from model.packed_matrix import PackedFormat, PackedMatrix
from model.parameter_shapes import count_parameters
from model.weight_formats import WeightFormat
from model.weights_version import Directory, File

_DTYPE_HINT = "; if inkstream check accepts the weights, serve them with --dtype float32"

# Check a config against the files' headers before allocating anything: ten characters of JSON can ask for a terabyte.

_MAX_POSITION_ELEMENTS = 2**27
_SMALL_POSITION_ELEMENTS = 2**23
"""131,072 positions of a head of size 64. A position table larger than this must not exceed the model's tensors."""
_MAX_SIZE_RATIO = 16
_CODES_OF = {"I32": 8, "U8": 2}
"""Numbers of 4 bits in an element of a packed matrix."""
_NOTHING = re.compile(r"(?!)")
_MAX_EOS_IDS = 64
"""Every request carries them to the engine."""


def check_sizes(path: File, config: ModelConfig, index: TensorIndex) -> None:
    """Rejects configs far larger than the files; _match() checks each tensor. Raises CheckpointError."""
    layers, n_tensors = config.n_layers + config.n_encoder_layers, len(index.tensors) + len(index.packed)
    if layers > n_tensors:
        raise CheckpointError(f"{path}: asks for {layers} layers, {index.source.name} has only {n_tensors} tensors")
    sizes = [math.prod(tensor.shape) * _CODES_OF.get(tensor.dtype, 1) for tensor in index.tensors.values()]
    stored = sum(sizes) + sum(math.prod(packed.shape) for packed in index.packed.values())
    rows = layers * (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    rows += sum(_feed_forward_rows(config, kind.mlp) for kind in config.layers)
    requested = config.width * (config.vocab_size + rows)
    if requested > _MAX_SIZE_RATIO * stored:
        raise CheckpointError(f"{path}: asks for {requested} numbers, {index.source.name} has {stored}")
    elements_per_position = sum(map(config.rotated_dim, config.ropes))
    elements_per_position += config.width if config.positions != "none" else 0
    limit = min(_MAX_POSITION_ELEMENTS, max(_SMALL_POSITION_ELEMENTS, stored))
    if config.context * elements_per_position > limit:
        raise CheckpointError(
            f"{path}: the positions of a context of {config.context} need {config.context * elements_per_position} "
            f"numbers, more than {limit}; give it a context of up to {limit // elements_per_position}"
        )


def _feed_forward_rows(config: ModelConfig, mlp: str) -> int:
    """Rows, about as long as the width, of the smallest matrices that a feed-forward may have."""
    if mlp == "dense" or config.experts is None:
        return config.mlp_width
    return config.experts.count * (1 + config.experts.width) + config.experts.shared_width


class TensorFormat(Protocol):
    """Number format and memory of loaded tensors: torch's on any device, or numpy's for the C++ kernels."""

    @property
    def dtype(self) -> Any:
        """Name of the number format, or torch's object for it."""
        ...

    def convert(self, array: Array, /) -> tuple[Tensor, Any]:
        """The tensor, and whether its numbers are finite. array: in the file's number format, bfloat16 as uint16."""
        ...

    def join(self, parts: list[Tensor], /) -> Tensor:
        """One tensor of these rows, whose memory is in the order of its elements. The parts may lie in a file."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A weights directory whose names, shapes, dtypes and sizes are checked."""

    family: FamilySpec
    config: ModelConfig
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json, or empty."""
    eos_ids: tuple[int, ...] = ()
    """From generation_config.json, or else from config.json."""
    named_eos_ids: tuple[int, ...] = ()
    """From both files."""
    bos_id: int | None = None
    mappings: Mapping[str, TensorMapping] = field(default_factory=dict)
    """Name of a tensor of the Decoder -> where it comes from, with the names in the files."""
    tensors: Mapping[str, StoredTensor] = field(default_factory=dict)
    """The tensors of the files."""
    scales: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Name of a tensor in fp8 -> its scales."""
    packed: Mapping[str, PackedSource] = field(default_factory=dict)
    """The packed matrices of the files, which are not among `tensors`."""
    left_out: tuple[str, ...] = ()
    """Names of tensors that no text needs, such as a vision tower's."""
    paths: tuple[File, ...] = ()
    """The files of the tensors, sorted by name."""
    hashes: Mapping[File, str]
    """Hexadecimal SHA-256 of each safetensors file."""

    @property
    def version(self) -> str:
        """Hexadecimal SHA-256 of the safetensors file; for shards see model.checkpoint.tensor_index."""
        return version_of(self.hashes)

    @property
    def n_params(self) -> int:
        """Number of parameters; a tied head counts once."""
        return count_parameters(self.config)

    @property
    def start_id(self) -> int | None:
        """The token that replaces an empty prompt: BOS, else EOS."""
        return self.bos_id if self.bos_id is not None else next(iter(self.eos_ids), None)

    def state(self, target: TensorFormat, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """State dict of the Decoder, or its tensors `names`. Raises CheckpointError.

        Asks whether numbers are finite after all tensors are on their way, since the answer waits for the device.
        """
        state: dict[str, Tensor] = {}
        checked: list[tuple[StoredTensor | PackedSource, Any]] = []
        for name in self.mappings if names is None else names:
            mapping, parts = self.mappings[name], []
            for index, (source, _) in enumerate(mapping.source):
                stored = self.stored(source)
                part, is_finite = target.convert(self.numbers(stored, str(target.dtype)))
                checked.append((stored, is_finite))
                parts.append(mapping.load(index, part))
            whole = target.join(parts)
            state[name] = whole.reshape(mapping.shape) if mapping.shape else whole
        for stored, is_finite in checked:
            if not is_finite:
                hint = f" in bfloat16{_DTYPE_HINT}" if str(target.dtype).endswith("bfloat16") else ""
                raise CheckpointError(f"{stored.path}: {stored.name} holds numbers that are not finite{hint}")
        return state

    def stored(self, source: str) -> StoredTensor | PackedSource:
        """The tensor with this name in the files."""
        return self.packed.get(source) or self.tensors[source]

    def numbers(self, stored: StoredTensor | PackedSource, dtype: str) -> Array:
        """As the file has them; packed ones in float32, or in bfloat16 if that is `dtype`. Raises CheckpointError."""
        if isinstance(stored, PackedSource):
            return stored.read().dequantized(dtype.rpartition(".")[2]).reshape(stored.shape)
        scale = self.scales.get(stored.name)
        return dequantized(stored, scale) if scale else mapped(stored)

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """Format and rows of each packed matrix that one tensor of the Decoder concatenates; empty if it is not packed.

        A tensor whose files have it in other columns, or only partly packed, is not.
        """
        mapping, formats = self.mappings[name], []
        for index, (source, _) in enumerate(mapping.source):
            packed = self.packed.get(source)
            order = None if packed is None else row_order(mapping, index, packed.shape)
            if packed is None or order is None:
                return ()
            formats.append((packed.format, len(order)))
        return tuple(formats)

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """The matrices of packed_formats(). Raises CheckpointError."""
        mapping, matrices = self.mappings[name], []
        for index, (source, _) in enumerate(mapping.source):
            packed = self.packed[source]
            order, matrix = row_order(mapping, index, packed.shape), packed.read()
            assert order is not None
            is_same = len(order) == matrix.shape[0] and np.array_equal(order, np.arange(len(order)))
            matrices.append(matrix if is_same else matrix.take(order))
        return tuple(matrices)

    def stored_format(self, name: str, dtype: str) -> str:
        """The smallest number format that holds one tensor of the Decoder as `dtype` holds it: its own, or `dtype`.

        Packed matrices have none: they are numbers of `dtype`.
        """
        formats = {self._number_format(source, dtype) for source, _ in self.mappings[name].source}
        return formats.pop() if dtype == "float32" and len(formats) == 1 else dtype

    def stored_bytes(self, dtype: str) -> int:
        """Bytes of the parameters, packed or in their stored_format()."""
        return sum(self._tensor_bytes(name, dtype) for name in self.mappings)

    def _tensor_bytes(self, name: str, dtype: str) -> int:
        source = self.mappings[name].source
        if formats := self.packed_formats(name):
            return sum(packed.n_bytes(rows, source[0][1][-1]) for packed, rows in formats)
        return WeightFormat(kind=self.stored_format(name, dtype)).n_bytes(sum(math.prod(shape) for _, shape in source))

    def _number_format(self, source: str, dtype: str) -> str:
        if source in self.packed:
            return dtype
        return "bfloat16" if source in self.scales else NUMBER_FORMATS[self.tensors[source].dtype]

    def read(self, name: str, dtype: str) -> Array:
        """One tensor of the Decoder in a number format, bfloat16 as uint16. Raises CheckpointError.

        dtype: float32, bfloat16, or float16 if that is its stored_format().
        """
        array: Array = self.state(_ArrayFormat(dtype), (name,))[name]
        return array


def _accept(_weights: StoredWeights) -> None:
    pass


def find_weights(
    directory: Directory, digest: Callable[[File], str] = sha256, check: Callable[[StoredWeights], None] = _accept
) -> StoredWeights:
    """Checks everything but the numbers: names, shapes, dtypes, sizes. Raises CheckpointError.

    digest: computes or remembers the SHA-256 of a file. check: may refuse the weights, which have no hashes yet, before
    their files are read whole.
    """
    config_json, family, config = read_config_file(directory)
    family, index = _find_index(directory, family)
    weights = match_weights(directory, config_json, family, config, index)
    check(weights)
    return dataclasses.replace(weights, hashes={path: digest(path) for path in weights.paths})


def match_weights(
    directory: Directory, config_json: Mapping[str, Any], family: FamilySpec, config: ModelConfig, index: TensorIndex
) -> StoredWeights:
    """The weights of find_weights() without hashes, whose files may have any format. Raises CheckpointError.

    config_json: what it says of the text decoder.
    """
    check_sizes(directory / "config.json", config, index)
    generation = read_json(directory / "generation_config.json", optional=True)
    bos = generation.get("bos_token_id", config_json.get("bos_token_id"))
    try:
        quantization = read_quantization(config_json.get("quantization_config"))
        matched = _match(family, config, index, quantization)
    except ConfigError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from None
    path = directory / ("generation_config.json" if "eos_token_id" in generation else "config.json")
    eos_ids = _eos_ids(path, {**config_json, **generation}.get("eos_token_id"), config.vocab_size)
    return StoredWeights(
        family=family,
        config=config,
        generation=generation,
        eos_ids=eos_ids,
        named_eos_ids=(*eos_ids, *_other_eos_ids(config_json.get("eos_token_id"), eos_ids, config.vocab_size)),
        bos_id=bos if isinstance(bos, int) and 0 <= bos < config.vocab_size else None,
        mappings=matched.mappings,
        tensors=index.tensors,
        scales=matched.scales,
        packed=matched.packed,
        left_out=matched.left_out,
        paths=tuple(index.paths),
        hashes={},
    )


def _find_index(directory: Directory, family: FamilySpec) -> tuple[FamilySpec, TensorIndex]:
    """The family with the names of the files, and their tensors. Raises CheckpointError."""
    if files := gguf_files(directory):
        model = GgufModel.read(files)
        return model.family_of_files(family), index_gguf(model)
    return family, find_tensors(directory)


@dataclass(frozen=True, slots=True)
class _ArrayFormat:
    """numpy's arrays, bfloat16 as uint16."""

    dtype: str

    def convert(self, array: Array) -> tuple[Array, bool]:
        """See TensorFormat."""
        if array.dtype == np.uint16:
            return array if self.dtype == "bfloat16" else as_float32(array), all_finite(array)
        if self.dtype == "float16":
            return array.astype(np.float16, casting="equiv", copy=False), all_finite(array)
        array = array.astype(np.float32, copy=False)
        is_finite = all_finite(array)
        if self.dtype == "bfloat16":
            array = rounded_to_bfloat16(array)
            is_finite = is_finite and all_finite(array)
        return array, is_finite

    def join(self, parts: list[Array]) -> Array:
        """See TensorFormat."""
        return np.ascontiguousarray(parts[0]) if len(parts) == 1 else np.concatenate(parts)


def row_order(mapping: TensorMapping, index: int, shape: tuple[int, ...]) -> Array | None:
    """The rows of source `index` of this shape in the Decoder's order; None if its conversion changes columns, too."""
    rows = math.prod(shape[:-1])
    numbered = np.broadcast_to(np.arange(rows).reshape(*shape[:-1], 1), (*shape[:-1], 2))
    try:
        moved = mapping.load(index, numbered)
    except ValueError:  # it asks for all columns
        return None
    moved = moved.reshape(-1, moved.shape[-1])
    order: Array = moved[:, 0]
    return order if moved.shape[1] == 2 and np.array_equal(order, moved[:, 1]) else None


class _Matched(NamedTuple):
    """Fields of StoredWeights."""

    mappings: dict[str, TensorMapping]
    scales: dict[str, StoredTensor]
    packed: Mapping[str, PackedSource]
    left_out: tuple[str, ...]


def _match(family: FamilySpec, config: ModelConfig, index: TensorIndex, quantization: Quantization) -> _Matched:
    """Matches the Decoder's tensors with the tensors of the files.

    Raises CheckpointError for wrong names, shapes or dtypes.
    """
    skipped = family.wrapper.skipped if family.wrapper else _NOTHING
    left_out = tuple(sorted(name for name in index.tensors if skipped.fullmatch(name)))
    kept = {name: stored for name, stored in index.tensors.items() if not skipped.fullmatch(name)}
    dense, packed = match_packed(
        {name: stored for name, stored in kept.items() if not family.ignored.fullmatch(name)}, quantization
    )
    dense, scales = match_scales(dense)
    found: dict[str, StoredTensor | PackedSource] = {**dense, **packed, **index.packed}
    # Some exporters also store a tied head.
    may_untie = not family.names or "untied_head" in family.names
    untied = dataclasses.replace(config, tied_head=False) if may_untie else config
    named = family.of_files(found)
    if (n_needed := named.count_experts_by_name(config)) > len(found):
        raise CheckpointError(f"{index.source}: has {len(found)} tensors, and the experts need {n_needed}")
    canonical = {mapping.target: mapping for mapping in named.mappings(untied)}
    embedding_name = canonical["embedding"].source[0][0]
    spellings = family.spellings()
    rename = next((spelling for spelling in spellings if spelling(embedding_name) in found), spellings[0])
    mappings = {target: mapping.renamed(rename) for target, mapping in canonical.items()}
    head = mappings.pop("untied_head", None) if config.tied_head else None
    for name, number in (constant for mapping in mappings.values() for constant in mapping.constants):
        if name in found:
            _check_constant(dense[name], number)
            del found[name]
    shapes = {name: shape for mapping in mappings.values() for name, shape in mapping.source}
    if missing := sorted(shapes.keys() - found.keys()):
        raise CheckpointError(f"{index.source}: {len(missing)} tensors are missing, the first is {missing[0]}")
    shapes |= dict(head.source) if head else {}
    for name in found.keys() - shapes.keys():
        stored = found[name]
        if isinstance(stored, StoredTensor) and is_empty_bias(stored, packed):
            del found[name]
    if extra := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(
            f"{index.source}: {len(extra)} tensors are not part of the model, the first is {extra[0]}"
        )
    for name, stored in found.items():
        if stored.shape != shapes[name]:
            raise CheckpointError(
                f"{stored.path}: {name} has shape {list(stored.shape)}, config.json asks for {list(shapes[name])}"
            )
        if isinstance(stored, StoredTensor) and stored.dtype not in STORED_TYPES and name not in scales:
            raise CheckpointError(f"{stored.path}: {name} has dtype {stored.dtype}; allowed are {ALLOWED_TYPES}")
    if head and (copy := found.get(head.source[0][0])):
        embedding = found[mappings["embedding"].source[0][0]]
        if not are_equal(copy, embedding):
            raise CheckpointError(
                f"{index.source}: {copy.name} is not the token embedding, to which config.json ties the head; "
                "if it is the head, set tie_word_embeddings to false"
            )
    return _Matched(mappings, scales, {**index.packed, **packed}, left_out)


def are_equal(one: StoredTensor | PackedSource, other: StoredTensor | PackedSource) -> bool:
    """Whether both hold the same numbers in the same dtype; false if one is packed. Raises CheckpointError."""
    if isinstance(one, PackedSource) or isinstance(other, PackedSource):
        return False
    return one.dtype == other.dtype and np.array_equal(mapped(one), mapped(other))


def _check_constant(stored: StoredTensor, number: float) -> None:
    """Raises CheckpointError unless the tensor is this number, in any number format."""
    if stored.shape not in ((), (1,)) or stored.dtype not in STORED_TYPES:
        raise CheckpointError(f"{stored.path}: {stored.name} must be one number of {', '.join(STORED_TYPES)}")
    found = float(_ArrayFormat("float32").convert(mapped(stored))[0].item())
    if not math.isclose(found, number, rel_tol=2**-8, abs_tol=2**-24):  # steps of bfloat16, float16
        raise CheckpointError(f"{stored.path}: {stored.name} {found:g} is not supported, only {number:g}")


def _eos_ids(path: File, raw: Any, vocab_size: int) -> tuple[int, ...]:
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f"{path}: eos_token_id {raw!r} is not an id below {vocab_size}")
    if len(distinct := tuple(dict.fromkeys(ids))) > _MAX_EOS_IDS:
        raise CheckpointError(f"{path}: eos_token_id lists {len(distinct)} ids; at most {_MAX_EOS_IDS} are allowed")
    return distinct


def _other_eos_ids(raw: Any, known: tuple[int, ...], vocab_size: int) -> tuple[int, ...]:
    """The valid ids of a config.json that generation_config.json overrides."""
    ids = raw if isinstance(raw, list) else [raw]
    valid = (i for i in ids if type(i) is int and 0 <= i < vocab_size and i not in known)
    return tuple(dict.fromkeys(valid))[: _MAX_EOS_IDS - len(known)]
