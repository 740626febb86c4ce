"""Weights directories as they are stored: configuration, checks of names and sizes, tensors as numpy arrays. Strict.

Nothing in the directory is ever executed or unpickled, and the sizes of a config.json are checked against the headers
of the files before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from model.checkpoint.config_file import read_config_file
from model.checkpoint.tensor_index import Entry, TensorIndex, find_tensors, version_of
from model.config import ModelConfig
from model.families.spec import FamilySpec, Shape, TensorReader
from model.files import CheckpointError, read_json, regular_file, sha256
from model.number_formats import Array, as_float32, is_finite, rounded_to_bfloat16
from model.parameter_shapes import count_parameters

_DTYPE_HINT = "; if inkstream check accepts the weights, serve them with --dtype float32"

# Check a config against the files' headers before allocating anything: ten characters of JSON can ask for a terabyte.

_DTYPES = ("F32", "F16", "BF16")
_MAX_POSITION_ELEMENTS = 2**27
_SMALL_POSITION_ELEMENTS = 2**23
"""131,072 positions of a head of size 64. A position table larger than this must not exceed the model's tensors."""
_MAX_SIZE_RATIO = 16


def check_sizes(path: Path, config: ModelConfig, index: TensorIndex) -> None:
    """Rejects configs far larger than the files; _match() checks each tensor. Raises CheckpointError."""
    layers, n_tensors = config.n_layers + config.n_encoder_layers, len(index.tensors)
    if layers > n_tensors:
        raise CheckpointError(f"{path}: asks for {layers} layers, {index.source.name} has only {n_tensors} tensors")
    stored = sum(math.prod(tensor.entry.shape) for tensor in index.tensors.values())
    rows_per_layer = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim + config.mlp_width
    requested = config.width * (config.vocab_size + layers * rows_per_layer)
    if requested > _MAX_SIZE_RATIO * stored:
        raise CheckpointError(f"{path}: asks for {requested} numbers, {index.source.name} has {stored}")
    elements_per_position = {"none": 0, "rotary": config.effective_rotary_dim}.get(config.positions, config.width)
    limit = min(_MAX_POSITION_ELEMENTS, max(_SMALL_POSITION_ELEMENTS, stored))
    if config.context * elements_per_position > limit:
        raise CheckpointError(
            f"{path}: the positions of a context of {config.context} need {config.context * elements_per_position} "
            f"numbers, more than {limit}; give it a context of up to {limit // elements_per_position}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredWeights:
    """A weights directory whose names, shapes, dtypes and sizes are checked."""

    family: FamilySpec
    config: ModelConfig
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json, or empty."""
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    index: TensorIndex
    names: Mapping[str, str] = field(default_factory=dict)
    """Names of the tensors: in the family -> in the files."""
    hashes: Mapping[Path, str]
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

    def state(self, tensors: TensorReader, only: str | None = None) -> dict[str, Any]:
        """State dict of the Decoder, or its tensor `only`. Raises CheckpointError.

        Waits for the reader's device only once, to check that all numbers are finite.
        """
        state = self.family.load(self.config, tensors, self.names, only)
        untied_copies = self.names.keys() - self.family.shapes(self.config).keys() if "embedding" in state else ()
        stored_copies = [self.names[name] for name in untied_copies if self.names[name] in self.index.tensors]
        differing = [name for name in stored_copies if not tensors.equal(tensors.read(name), state["embedding"])]
        if infinite := tensors.not_finite():
            raise CheckpointError(infinite)
        if differing:
            raise CheckpointError(
                f"{self.index.source}: {differing[0]} is not the token embedding, to which config.json ties the head; "
                "if it is the head, set tie_word_embeddings to false"
            )
        return state

    def read(self, name: str, dtype: str) -> Array:
        """One tensor of the Decoder in a number format, bfloat16 as uint16. Raises CheckpointError."""
        array: Array = self.state(ArrayReader(self.index, dtype), name)[name]
        return array


def find_weights(directory: Path, digest: Callable[[Path], str] = sha256) -> StoredWeights:
    """Checks everything but the numbers: names, shapes, dtypes, sizes. Raises CheckpointError.

    digest: computes or remembers the SHA-256 of a file.
    """
    config_json, family, config = read_config_file(directory)
    index = find_tensors(directory)
    check_sizes(directory / "config.json", config, index)
    family = dataclasses.replace(family, mappings=cache(family.mappings))  # each read asks for them
    generation = read_json(directory / "generation_config.json", optional=True)
    bos = generation.get("bos_token_id", config_json.get("bos_token_id"))
    path = directory / ("generation_config.json" if "eos_token_id" in generation else "config.json")
    return StoredWeights(
        family=family,
        config=config,
        generation=generation,
        eos_ids=_eos_ids(path, {**config_json, **generation}.get("eos_token_id"), config.vocab_size),
        bos_id=bos if isinstance(bos, int) and 0 <= bos < config.vocab_size else None,
        index=index,
        names=_match(family, config, index),
        hashes=index.hashes(digest),
    )


def not_finite_message(path: Path, name: str, dtype: str) -> str:
    """Message for a tensor that holds NaN or an infinity in this number format."""
    hint = f" in bfloat16{_DTYPE_HINT}" if dtype == "bfloat16" else ""
    return f"{path}: {name} holds numbers that are not finite{hint}"


class ArrayReader:
    """A `TensorReader` of numpy arrays, bfloat16 as uint16."""

    def __init__(self, index: TensorIndex, dtype: str) -> None:
        self._index, self._dtype = index, dtype
        self._infinite: str | None = None

    def read(self, name: str) -> Array:
        """See TensorReader."""
        stored = self._index.tensors[name]
        array = _mapped(stored.path, stored.entry)
        if stored.entry.dtype == "BF16":
            is_good, array = is_finite(array), array if self._dtype == "bfloat16" else as_float32(array)
        else:
            array = array.astype(np.float32, copy=False)
            is_good = is_finite(array)
            if self._dtype == "bfloat16":
                array = rounded_to_bfloat16(array)
                is_good = is_good and is_finite(array)
        if not is_good:
            self._infinite = self._infinite or not_finite_message(stored.path, name, self._dtype)
        return array

    def empty(self, *shape: int) -> Array:
        """See TensorReader."""
        return np.empty(shape, np.uint16 if self._dtype == "bfloat16" else np.float32)

    def contiguous(self, tensor: Array) -> Array:
        """See TensorReader."""
        return np.ascontiguousarray(tensor)

    def equal(self, one: Array, other: Array) -> bool:
        """See TensorReader."""
        return np.array_equal(as_float32(one), as_float32(other))  # the two zeros are equal

    def not_finite(self) -> str | None:
        """See TensorReader."""
        return self._infinite


_STORED: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


def _mapped(path: Path, entry: Entry) -> Array:
    """The tensor of the file, which is mapped while the array exists. Raises CheckpointError."""
    try:
        with regular_file(path).open("rb") as file:
            region = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        numbers = np.frombuffer(region, _STORED[entry.dtype], math.prod(entry.shape), entry.start)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    if region[: len(entry.header)] != entry.header:
        raise CheckpointError(f"{path}: was replaced while it was read")
    array: Array = numbers.reshape(entry.shape)
    return array


def _match(family: FamilySpec, config: ModelConfig, index: TensorIndex) -> dict[str, str]:
    """Name of each tensor in the family -> in the file. Raises CheckpointError for wrong names, shapes or dtypes."""
    required = family.shapes(config)
    # Some exporters also store a tied head.
    known = {**family.shapes(dataclasses.replace(config, tied_head=False)), **required}
    found = {name: stored for name, stored in index.tensors.items() if not family.ignored.fullmatch(name)}
    lacks_prefix = not any(name.startswith(family.prefix) for name in found)
    stored_names = {name: name.removeprefix(family.prefix) if lacks_prefix else name for name in known}
    shapes: dict[str, Shape] = {stored_names[name]: shape for name, shape in known.items()}
    if missing := sorted({stored_names[name] for name in required} - found.keys()):
        raise CheckpointError(f"{index.source}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if extra := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(
            f"{index.source}: {len(extra)} tensors are not part of the model, the first is {extra[0]}"
        )
    for name, stored in found.items():
        entry, shape = stored.entry, shapes[name]
        if entry.shape != shape:
            raise CheckpointError(
                f"{stored.path}: {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{stored.path}: {name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}")
    return stored_names


def _eos_ids(path: Path, raw: Any, vocab_size: int) -> tuple[int, ...]:
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f"{path}: eos_token_id {raw!r} is not an id below {vocab_size}")
    return tuple(ids)
