"""A weights directory in and out: config.json, model.safetensors or shards, generation_config.json. Strict.

Knows no tokenizer and no serving. Nothing in the directory is ever executed or unpickled, and no memory is taken on the
word of a config.json: what it asks for is held against the headers of the files first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from model.checkpoint.layout_check import WEIGHTS_FILE, check_layout
from model.checkpoint.state_dict import check_sizes, read_state
from model.checkpoint.tensor_index import find_tensors, version_of
from model.config import ConfigError, ModelConfig
from model.families.registry import family_of, read_config, write_config
from model.families.spec import FamilySpec
from model.files import CheckpointError, read_json
from model.nn.transformer import Decoder


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
