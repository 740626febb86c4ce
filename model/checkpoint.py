"""A weights directory in and out: config.json, model.safetensors, generation_config.json. Strict and atomic.

Knows no tokenizer and no serving. Nothing in the directory is ever executed or unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from model.config import ConfigError, ModelConfig
from model.families.layout import Family
from model.families.registry import family_of, read_config, write_config
from model.transformer import Decoder

WEIGHTS_FILE = "model.safetensors"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class CheckpointError(ValueError):
    """A weights directory that cannot be loaded or written; the message names the file and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded weights directory."""

    decoder: Decoder
    generation: Mapping[str, Any]
    """generation_config.json, or empty."""
    eos_ids: tuple[int, ...]
    bos_id: int | None
    version: str
    """SHA-256 of the safetensors file, hexadecimal."""


def load(directory: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Loads and checks everything: names, shapes, dtypes, finite numbers. Raises CheckpointError."""
    family, config = _read_config(directory)
    path = directory / WEIGHTS_FILE
    _check_header(path, family, config)
    try:
        with safe_open(path, framework="pt") as file:
            state = family.load(config, lambda name: file.get_tensor(name).to(dtype))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    for name, tensor in state.items():
        if not torch.isfinite(tensor).all():
            raise CheckpointError(f"{path}: the tensor behind {name} holds numbers that are not finite")
    decoder = Decoder(config)
    decoder.load_state_dict(state, assign=True)
    decoder.requires_grad_(False).eval().to(device)
    generation = _read_json(directory / "generation_config.json", optional=True)
    special = {**_read_json(directory / "config.json"), **generation}
    return Checkpoint(
        decoder=decoder,
        generation=generation,
        eos_ids=_token_ids("eos_token_id", special, config, directory),
        bos_id=bos if isinstance(bos := special.get("bos_token_id"), int) and 0 <= bos < config.vocab_size else None,
        version=_sha256(path),
    )


def load_config(directory: Path) -> ModelConfig:
    """The shape alone, from config.json. Raises CheckpointError."""
    return _read_config(directory)[1]


def _read_config(directory: Path) -> tuple[Family, ModelConfig]:
    if not directory.is_dir():
        raise CheckpointError(f"{directory}: no such directory; train a model with python -m model.train --out DIR")
    path = directory / "config.json"
    try:
        return read_config(_read_json(path))
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None


def weights_files(
    decoder: Decoder, *, dtype: torch.dtype, eos_id: int | None, generation: Mapping[str, Any]
) -> dict[str, bytes]:
    """The files of a weights directory without its tokenizer: name -> content."""
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in decoder.state_dict().items()}
    raw = write_config(decoder.config, str(dtype).removeprefix("torch."), eos_id)
    tokens = {} if eos_id is None else {"bos_token_id": eos_id, "eos_token_id": eos_id}
    return {
        "config.json": _json_bytes(raw),
        "generation_config.json": _json_bytes({**tokens, **generation}),
        WEIGHTS_FILE: save(family_of(decoder.config).save(decoder.config, state), metadata={"format": "pt"}),
    }


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Replaces files that belong together: none before the disk has all of them. Raises CheckpointError."""
    staged = {directory / f".{name}.{os.getpid()}.tmp": directory / name for name in files}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for temporary, path in staged.items():
            with temporary.open("wb") as file:
                file.write(files[path.name])
                file.flush()
                os.fsync(file.fileno())
        for temporary, path in staged.items():
            temporary.replace(path)
        sync_directory(directory)
    except OSError as error:
        for temporary in staged:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
        raise CheckpointError(f"{directory}: {', '.join(files)} cannot be written ({error.strerror})") from None


def write_file(path: Path, content: bytes) -> None:
    """Replaces `path` at once or not at all, and only after the disk has the new content. Raises CheckpointError."""
    write_files(path.parent, {path.name: content})


def sync_directory(path: Path) -> None:
    """Makes renames within `path` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _check_header(path: Path, family: Family, config: ModelConfig) -> None:
    """Compares names, shapes and dtypes with what the config asks for, before any tensor is read."""
    expected = family.shapes(config)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            found = {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None
    # Some exporters also store a tied head; it says nothing new.
    if config.tied_head:
        found.pop("lm_head.weight", None)
    if missing := sorted(expected.keys() - found.keys()):
        raise CheckpointError(f"{path}: {len(missing)} tensors are missing, the first is {missing[0]}")
    if extra := sorted(found.keys() - expected.keys()):
        raise CheckpointError(f"{path}: {len(extra)} tensors are not part of the model, the first is {extra[0]}")
    for name, (shape, dtype) in found.items():
        if shape != expected[name]:
            raise CheckpointError(
                f"{path}: {name} has shape {list(shape)}, config.json asks for {list(expected[name])}"
            )
        if dtype not in _DTYPES:
            raise CheckpointError(f"{path}: {name} has dtype {dtype}; allowed are {', '.join(_DTYPES)}")


def _token_ids(key: str, special: Mapping[str, Any], config: ModelConfig, directory: Path) -> tuple[int, ...]:
    raw = special.get(key)
    ids = raw if isinstance(raw, list) else [] if raw is None else [raw]
    if not all(isinstance(i, int) and 0 <= i < config.vocab_size for i in ids):
        raise CheckpointError(f"{directory}: {key} {raw!r} is not an id below {config.vocab_size}")
    return tuple(ids)


def _read_json(path: Path, *, optional: bool = False) -> dict[str, Any]:
    if optional and not path.exists():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON ({error})") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: must hold a JSON object")
    return content


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
