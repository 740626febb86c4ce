"""Loads and saves weights directories: config.json, model.safetensors or shards, generation_config.json. Strict.

Nothing in the directory is ever executed or unpickled, and the sizes of a config.json are checked against the headers
of the files before memory is allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from model.checkpoint.tensor_index import WEIGHTS_FILE, TensorIndex, check_layout, find_tensors, version_of
from model.config import ConfigError, ModelConfig
from model.families.registry import family_of, read_config, write_config
from model.families.spec import FamilySpec, Shape
from model.files import CheckpointError, read_json, regular_file
from model.nn.transformer import Decoder

_DTYPE_HINTS = {
    torch.bfloat16: " in bfloat16; if inkstream check accepts the weights, serve them with --dtype float32",
}


def all_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, on the tensor's device. Unlike isfinite(tensor), it allocates no copy."""
    return torch.isfinite(torch.stack(tensor.aminmax())).all()


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


def read_state(
    family: FamilySpec,
    config: ModelConfig,
    index: TensorIndex,
    only: str | None = None,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> dict[str, Tensor]:
    """State dict of the Decoder, or its tensor `only`. Raises CheckpointError.

    Copies one tensor at a time to the device in the file's dtype and converts it there, so that memory holds at most
    one source tensor in addition to the decoder's. Waits for the device only once, to check that all are finite.
    """
    stored_names, checked = _match(family, config, index), list[tuple[str, Tensor]]()
    with contextlib.ExitStack() as stack:
        opened = cache(lambda path: _open(path, device, stack))

        def get(name: str) -> Tensor:
            stored, path = stored_names[name], index.tensors[stored_names[name]].path
            tensor = _tensor(path, opened(path), stored).to(device, dtype)
            checked.append((f"{path}: {stored}", all_finite(tensor)))
            return tensor

        state = family.load(config, get, lambda *shape: torch.empty(shape, device=device, dtype=dtype), only)
        untied_copies = [
            name for name in stored_names.keys() - family.shapes(config).keys() if stored_names[name] in index.tensors
        ]
        untied_copies = untied_copies if "embedding" in state else []
        differing = [stored_names[name] for name in untied_copies if not torch.equal(get(name), state["embedding"])]
    # Reading a result from the device waits for it, so all results are read at the end.
    is_finite = torch.stack([result for _, result in checked]).tolist()
    if infinite := [name for (name, _), is_good in zip(checked, is_finite, strict=True) if not is_good]:
        raise CheckpointError(f"{infinite[0]} holds numbers that are not finite{_DTYPE_HINTS.get(dtype, '')}")
    if differing:
        raise CheckpointError(
            f"{index.source}: {differing[0]} is not the token embedding, to which config.json ties the head; "
            "if it is the head, set tie_word_embeddings to false"
        )
    return state


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


def _open(path: Path, device: torch.device, stack: contextlib.ExitStack) -> Any:
    """For a GPU, safetensors copies to the device itself (0.8 uses a pinned buffer as large as one tensor)."""
    target = str(device) if device.type == "cuda" else "cpu"
    try:
        return stack.enter_context(safe_open(regular_file(path), framework="pt", device=target))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


def _tensor(path: Path, opened: Any, name: str) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read ({error})") from None
    return tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded weights directory."""

    decoder: Decoder
    """On the meta device if load() was lazy, until read_all()."""
    read: Callable[[str | None], dict[str, Tensor]] = lambda _name: {}
    """Reads one tensor of a lazy decoder, or all of them. Raises CheckpointError."""
    family: str
    """model_type of its config.json."""
    generation: Mapping[str, Any]
    """generation_config.json, or empty."""
    eos_ids: tuple[int, ...]
    bos_id: int | None
    hashes: Mapping[Path, str]
    """Hexadecimal SHA-256 of each safetensors file."""

    @property
    def version(self) -> str:
        """Hexadecimal SHA-256 of the safetensors file; for shards see model.checkpoint.tensor_index."""
        return version_of(self.hashes)

    @property
    def is_lazy(self) -> bool:
        """Whether the decoder's tensors are still to be read."""
        return self.decoder.embedding.is_meta

    def read_all(self) -> None:
        """Gives a lazy decoder its tensors. Raises CheckpointError."""
        if self.is_lazy:
            self.decoder.load_state_dict(self.read(None), assign=True)
            self.decoder.requires_grad_(False).eval()


def load(directory: Path, *, device: torch.device, dtype: torch.dtype, lazy: bool = False) -> Checkpoint:
    """Loads and checks everything: names, shapes, dtypes, finite numbers. Raises CheckpointError.

    Memory: one copy in `dtype` on `device`, plus the files' pages, which the system can reclaim.
    lazy: the caller reads each tensor when it needs it, on the CPU, or calls read_all(); only then are numbers checked.
    """
    config_json, family, config = _read_config(directory)
    index = find_tensors(directory)
    check_sizes(directory / "config.json", config, index)
    family = dataclasses.replace(family, mappings=cache(family.mappings))  # each lazy read asks for them
    read = partial(read_state, family, config, index, device=device, dtype=dtype)
    with torch.device("meta"):
        decoder = Decoder(config).to(dtype)
    if not lazy:
        decoder.load_state_dict(read(None), assign=True)
    decoder.make_tables()
    decoder.requires_grad_(False).eval()
    if not lazy:
        decoder.to(device)
    generation = read_json(directory / "generation_config.json", optional=True)
    bos = generation.get("bos_token_id", config_json.get("bos_token_id"))
    path = directory / ("generation_config.json" if "eos_token_id" in generation else "config.json")
    return Checkpoint(
        decoder=decoder,
        read=read,
        family=family.name,
        generation=generation,
        eos_ids=_eos_ids(path, {**config_json, **generation}.get("eos_token_id"), config.vocab_size),
        bos_id=bos if isinstance(bos, int) and 0 <= bos < config.vocab_size else None,
        hashes=index.hashes(),
    )


def load_config(directory: Path) -> ModelConfig:
    """Reads only config.json. Raises CheckpointError."""
    return _read_config(directory)[2]


def weights_files(
    decoder: Decoder, *, dtype: torch.dtype, eos_id: int | None, generation: Mapping[str, Any]
) -> dict[str, bytes]:
    """Files of a weights directory, without the tokenizer: name -> content. Raises CheckpointError."""
    state = stored_state(decoder, dtype)
    raw = write_config(decoder.config, str(dtype).removeprefix("torch."), eos_id)
    tokens = {} if eos_id is None else {"bos_token_id": eos_id, "eos_token_id": eos_id}
    return {
        "config.json": _json_bytes(raw),
        "generation_config.json": _json_bytes({**tokens, **generation}),
        WEIGHTS_FILE: save(family_of(decoder.config).save(decoder.config, state), metadata={"format": "pt"}),
    }


def stored_state(decoder: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """The decoder's tensors in `dtype` on the CPU. Raises CheckpointError if a value overflows `dtype`."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in decoder.state_dict().items()}
    for name, tensor in state.items():
        if not all_finite(tensor):
            kind = str(dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} has numbers too large for {kind}; write bfloat16 (--export-dtype bfloat16)")
    return state


def _read_config(directory: Path) -> tuple[dict[str, Any], FamilySpec, ModelConfig]:
    check_layout(directory, with_tokenizer=False)
    path = directory / "config.json"
    raw = read_json(path)
    try:
        return raw, *read_config(raw)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _eos_ids(path: Path, raw: Any, vocab_size: int) -> tuple[int, ...]:
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
        raise CheckpointError(f"{path}: eos_token_id {raw!r} is not an id below {vocab_size}")
    return tuple(ids)


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
