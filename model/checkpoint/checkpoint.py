"""Loads decoders from weights directories (model/checkpoint/stored_weights.py), and makes the files of one."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from model.checkpoint.stored_weights import StoredWeights, find_weights
from model.checkpoint.tensor_index import WEIGHTS_FILE
from model.families.registry import family_of, write_config
from model.files import CheckpointError
from model.nn.transformer import Decoder
from model.number_formats import Array
from model.weights_version import Directory


def all_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, on the tensor's device. Unlike isfinite(tensor), it allocates no copy."""
    return torch.isfinite(torch.stack(tensor.aminmax())).all()


@dataclass(frozen=True, slots=True)
class TorchFormat:
    """Tensors of torch on a device (a `TensorFormat`), which also converts them."""

    device: torch.device
    dtype: torch.dtype

    def convert(self, array: Array) -> tuple[Tensor, Tensor]:
        """See TensorFormat."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the file is mapped for reading, and join() copies
            tensor = torch.from_numpy(array)
        tensor = tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor
        tensor = tensor.to(self.device).to(self.dtype)
        return tensor, all_finite(tensor)

    def join(self, parts: list[Tensor]) -> Tensor:
        """See TensorFormat."""
        return torch.cat(parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded weights directory."""

    decoder: Decoder
    weights: StoredWeights


def load(directory: Directory, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Loads and checks everything: names, shapes, dtypes, finite numbers. Raises CheckpointError.

    Memory: one copy in `dtype` on `device`, plus the files' pages, which the system can reclaim.
    """
    weights = find_weights(directory)
    return Checkpoint(decoder=load_decoder(weights, device=device, dtype=dtype), weights=weights)


def load_decoder(
    weights: StoredWeights,
    *,
    device: torch.device,
    dtype: torch.dtype,
    replaced: Mapping[str, Callable[[], Tensor]] | None = None,
) -> Decoder:
    """The decoder of these weights. Raises CheckpointError.

    replaced: makes parameters, by their names, that are not read.
    """
    with torch.device("meta"):
        decoder = Decoder(weights.config).to(dtype)
    replaced = replaced or {}
    names = [name for name in decoder.state_dict() if name not in replaced] if replaced else None
    state = weights.state(TorchFormat(device, dtype), names)
    decoder.load_state_dict(state | {name: make() for name, make in replaced.items()}, assign=True)
    decoder.make_tables()
    return decoder.requires_grad_(False).eval().to(device)


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


def _json_bytes(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
