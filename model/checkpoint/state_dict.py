"""A decoder's tensors out of a stock of files: held against what the config asks for, then read. Knows no JSON.

Nothing is built from a config before the files' headers bear it out: ten characters of JSON can ask for a terabyte.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from model.checkpoint.finite import FiniteCheck
from model.checkpoint.tensor_index import TensorIndex
from model.config import ModelConfig
from model.families.spec import FamilySpec, Shape
from model.files import CheckpointError, regular_file

_DTYPES = ("F32", "F16", "BF16")
_MOST_POSITION_NUMBERS = 2**27
_SMALL_POSITION_TABLE = 2**23
"""As many numbers as 131,072 positions of a head of 64; a larger table than its model is a mistake."""
_ABSURD = 16


def check_sizes(path: Path, config: ModelConfig, stock: TensorIndex) -> None:
    """Refuses what the files cannot hold by far; the rest is told tensor by tensor. Raises CheckpointError."""
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
