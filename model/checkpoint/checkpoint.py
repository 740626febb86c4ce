"""Loads decoders from weights directories (model/checkpoint/stored_weights.py), and makes the files of one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from model.checkpoint.stored_weights import StoredWeights, find_weights, not_finite_message
from model.checkpoint.tensor_index import WEIGHTS_FILE, TensorIndex
from model.families.registry import family_of, write_config
from model.files import CheckpointError, regular_file
from model.nn.transformer import Decoder


def all_finite(tensor: Tensor) -> Tensor:
    """Whether all elements are finite, on the tensor's device. Unlike isfinite(tensor), it allocates no copy."""
    return torch.isfinite(torch.stack(tensor.aminmax())).all()


class TorchReader:
    """A `TensorReader` of torch tensors on a device.

    Copies one tensor at a time to the device in the file's dtype and converts it there, so that memory holds at most
    one source tensor in addition to the decoder's.
    """

    def __init__(
        self, index: TensorIndex, stack: contextlib.ExitStack, device: torch.device, dtype: torch.dtype
    ) -> None:
        """stack: closes the files."""
        self.device, self.dtype, self._index = device, dtype, index
        self._opened = cache(lambda path: _open(path, device, stack))
        self._checked: list[tuple[Path, str, Tensor]] = []

    def read(self, name: str) -> Tensor:
        """See TensorReader."""
        path = self._index.tensors[name].path
        try:
            tensor: Tensor = self._opened(path).get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read ({error})") from None
        tensor = tensor.to(self.device, self.dtype)
        self._checked.append((path, name, all_finite(tensor)))
        return tensor

    def empty(self, *shape: int) -> Tensor:
        """See TensorReader."""
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def contiguous(self, tensor: Tensor) -> Tensor:
        """See TensorReader."""
        return tensor.contiguous()

    def equal(self, one: Tensor, other: Tensor) -> bool:
        """See TensorReader."""
        return torch.equal(one, other)

    def not_finite(self) -> str | None:
        """See TensorReader. Reading a result from the device waits for it, so all are read at once."""
        is_finite = torch.stack([result for *_, result in self._checked]).tolist()
        bad = [(path, name) for (path, name, _), is_good in zip(self._checked, is_finite, strict=True) if not is_good]
        return not_finite_message(*bad[0], str(self.dtype).removeprefix("torch.")) if bad else None


def _open(path: Path, device: torch.device, stack: contextlib.ExitStack) -> Any:
    """For a GPU, safetensors copies to the device itself (0.8 uses a pinned buffer as large as one tensor)."""
    target = str(device) if device.type == "cuda" else "cpu"
    try:
        return stack.enter_context(safe_open(regular_file(path), framework="pt", device=target))
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A loaded weights directory."""

    decoder: Decoder
    weights: StoredWeights


def load(directory: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
    """Loads and checks everything: names, shapes, dtypes, finite numbers. Raises CheckpointError.

    Memory: one copy in `dtype` on `device`, plus the files' pages, which the system can reclaim.
    """
    weights = find_weights(directory)
    return Checkpoint(decoder=load_decoder(weights, device=device, dtype=dtype), weights=weights)


def load_decoder(weights: StoredWeights, *, device: torch.device, dtype: torch.dtype) -> Decoder:
    """The decoder of these weights. Raises CheckpointError."""
    with torch.device("meta"):
        decoder = Decoder(weights.config).to(dtype)
    with contextlib.ExitStack() as stack:
        decoder.load_state_dict(weights.state(TorchReader(weights.index, stack, device, dtype)), assign=True)
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
