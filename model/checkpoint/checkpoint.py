"""Loads and saves weights directories: config.json, model.safetensors or shards, generation_config.json. Strict.

Nothing in the directory is ever executed or unpickled, and the sizes of a config.json are checked against the headers
of the files before memory is allocated.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
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

# To read an answer is to wait for the device, so it is put off until all tensors are on their way.

_IN = {
    torch.bfloat16: " in bfloat16; if inkstream check accepts the weights, serve them with --dtype float32",
}


class FiniteCheck:
    """Collects an answer for each tensor."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Path, str, torch.dtype]] = []
        self._answers: list[Tensor] = []

    def note(self, path: Path, name: str, tensor: Tensor) -> Tensor:
        """`tensor` as it is; require() reports whether it is finite."""
        self._tensors.append((path, name, tensor.dtype))
        # Unlike isfinite over all of it, this makes no copy as large as the tensor.
        self._answers.append(torch.isfinite(torch.stack(tensor.aminmax())).all())
        return tensor

    def require(self) -> None:
        """Raises CheckpointError with the name of the first tensor that is not finite."""
        answers = torch.stack(self._answers).tolist() if self._answers else []
        for (path, name, dtype), is_finite in zip(self._tensors, answers, strict=True):
            if not is_finite:
                raise CheckpointError(f"{path}: {name} holds numbers that are not finite{_IN.get(dtype, '')}")


# Nothing is built from a config before the files' headers bear it out: ten characters of JSON can ask for a terabyte.

_DTYPES = ("F32", "F16", "BF16")
_MOST_POSITION_NUMBERS = 2**27
_SMALL_POSITION_TABLE = 2**23
"""As many numbers as 131,072 positions of a head of 64; a larger table than its model is a mistake."""
_ABSURD = 16


def check_sizes(path: Path, config: ModelConfig, stock: TensorIndex) -> None:
    """Refuses what the files cannot hold by far; the rest is checked tensor by tensor. Raises CheckpointError."""
    layers, n_tensors = config.n_layers + config.n_encoder_layers, len(stock.tensors)
    if layers > n_tensors:
        raise CheckpointError(f"{path}: asks for {layers} layers, {stock.source.name} has only {n_tensors} tensors")
    stored = sum(math.prod(tensor.entry.shape) for tensor in stock.tensors.values())
    rows_of_a_layer = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim + config.mlp_width
    asked = config.width * (config.vocab_size + layers * rows_of_a_layer)
    if asked > _ABSURD * stored:
        raise CheckpointError(f"{path}: asks for {asked} numbers, {stock.source.name} has {stored}")
    columns = {"none": 0, "rotary": config.turned_dim}.get(config.positions, config.width)
    most = min(_MOST_POSITION_NUMBERS, max(_SMALL_POSITION_TABLE, stored))
    if config.context * columns > most:
        raise CheckpointError(
            f"{path}: the positions of a context of {config.context} need {config.context * columns} numbers, more "
            f"than {most}; give it a context of up to {most // columns}"
        )


def read_state(
    family: FamilySpec, config: ModelConfig, stock: TensorIndex, *, device: torch.device, dtype: torch.dtype
) -> dict[str, Tensor]:
    """State dict of the Decoder. Raises CheckpointError.

    Each tensor reaches its device before the next is read, in the file's number format, and gets its own there: beside
    the decoder's tensors there is one of the file's at a time, in either format. Nothing waits for the device but the
    one look at the end whether all numbers are finite.
    """
    in_file, finite = _match(family, config, stock), FiniteCheck()
    with contextlib.ExitStack() as stack:
        opened = {path: _open(path, device, stack) for path in stock.paths}

        def get(name: str) -> Tensor:
            path = stock.tensors[in_file[name]].path
            return finite.note(path, in_file[name], _tensor(path, opened[path], in_file[name]).to(device, dtype))

        state = family.load(config, get, lambda *shape: torch.empty(shape, device=device, dtype=dtype))
        stored_too = [name for name in in_file.keys() - family.shapes(config).keys() if in_file[name] in stock.tensors]
        others = [in_file[name] for name in stored_too if not torch.equal(get(name), state["embedding"])]
    finite.require()
    if others:
        raise CheckpointError(
            f"{stock.source}: {others[0]} is not the token embedding, to which config.json ties the head; "
            "if it is the head, set tie_word_embeddings to false"
        )
    return state


def _match(family: FamilySpec, config: ModelConfig, stock: TensorIndex) -> dict[str, str]:
    """The family's name of each tensor -> the file's, once names, shapes and dtypes are what the config asks for."""
    wanted = family.shapes(config)
    # Some exporters also store a tied head.
    known = {**family.shapes(dataclasses.replace(config, tied_head=False)), **wanted}
    found = {name: stored for name, stored in stock.tensors.items() if not family.ignored.fullmatch(name)}
    bare = not any(name.startswith(family.prefix) for name in found)
    in_file = {name: name.removeprefix(family.prefix) if bare else name for name in known}
    shapes: dict[str, Shape] = {in_file[name]: shape for name, shape in known.items()}
    if missing := sorted({in_file[name] for name in wanted} - found.keys()):
        raise CheckpointError(f"{stock.source}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if extra := sorted(found.keys() - shapes.keys()):
        raise CheckpointError(
            f"{stock.source}: {len(extra)} tensors are not part of the model, the first is {extra[0]}"
        )
    for name, stored in found.items():
        entry, shape = stored.entry, shapes[name]
        if entry.shape != shape:
            raise CheckpointError(
                f"{stored.path}: {name} has shape {list(entry.shape)}, config.json asks for {list(shape)}"
            )
        if entry.dtype not in _DTYPES:
            raise CheckpointError(f"{stored.path}: {name} has dtype {entry.dtype}; allowed are {', '.join(_DTYPES)}")
    return in_file


def _open(path: Path, device: torch.device, stack: contextlib.ExitStack) -> Any:
    """For a GPU safetensors hands the bytes on itself (0.8 through a pinned buffer as large as one tensor)."""
    where = str(device) if device.type == "cuda" else "cpu"
    try:
        return stack.enter_context(safe_open(regular_file(path), framework="pt", device=where))
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
    family: str
    """model_type of its config.json."""
    generation: Mapping[str, Any]
    """generation_config.json, or empty."""
    eos_ids: tuple[int, ...]
    bos_id: int | None
    hashes: Mapping[Path, str]
    """The SHA-256 of each file of tensors, hexadecimal."""

    @property
    def version(self) -> str:
        """SHA-256 of the safetensors file, hexadecimal; for shards see model.checkpoint.tensor_index."""
        return version_of(self.hashes)


def load(directory: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Loads and checks everything: names, shapes, dtypes, finite numbers. Raises CheckpointError.

    Memory: one copy in `dtype` on `device`, beside the files' pages, which the system can take back.
    """
    config_json, family, config = _read_config(directory)
    stock = find_tensors(directory)
    check_sizes(directory / "config.json", config, stock)
    state = read_state(family, config, stock, device=device, dtype=dtype)
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(state, assign=True)
    decoder.make_tables()
    decoder.requires_grad_(False).eval().to(device)
    generation = read_json(directory / "generation_config.json", optional=True)
    bos = generation.get("bos_token_id", config_json.get("bos_token_id"))
    path = directory / ("generation_config.json" if "eos_token_id" in generation else "config.json")
    return Checkpoint(
        decoder=decoder,
        family=family.name,
        generation=generation,
        eos_ids=_eos_ids(path, {**config_json, **generation}.get("eos_token_id"), config.vocab_size),
        bos_id=bos if isinstance(bos, int) and 0 <= bos < config.vocab_size else None,
        hashes=stock.hashes(),
    )


def load_config(directory: Path) -> ModelConfig:
    """The shape alone, from config.json. Raises CheckpointError."""
    return _read_config(directory)[2]


def weights_files(
    decoder: Decoder, *, dtype: torch.dtype, eos_id: int | None, generation: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of a weights directory without its tokenizer: name -> content. Raises CheckpointError."""
    state = stored_state(decoder, dtype)
    raw = write_config(decoder.config, str(dtype).removeprefix("torch."), eos_id)
    tokens = {} if eos_id is None else {"bos_token_id": eos_id, "eos_token_id": eos_id}
    return {
        "config.json": _json_bytes(raw),
        "generation_config.json": _json_bytes({**tokens, **generation}),
        WEIGHTS_FILE: save(family_of(decoder.config).save(decoder.config, state), metadata={"format": "pt"}),
    }


def stored_state(decoder: Decoder, dtype: torch.dtype) -> dict[str, Tensor]:
    """The decoder's tensors as a file holds them. Raises CheckpointError where `dtype` has no such numbers."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in decoder.state_dict().items()}
    for name, tensor in state.items():
        if not torch.isfinite(torch.stack(tensor.aminmax())).all():
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
