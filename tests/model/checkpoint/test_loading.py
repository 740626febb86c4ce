"""Loading weights to a device: one tensor of the file at a time, each created once, with one final check."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint.checkpoint import all_finite, load
from model.families.llama import LLAMA
from model.files import CheckpointError
from tests.support.gpu.emulated_graph import Watch
from tests.support.model.tiny_models import tiny_config, tiny_weights

CPU = torch.device("cpu")
KINDS = {
    "llama": {},
    "llama with biases": {"qkv_bias": True, "mlp_bias": True, "out_bias": True},
    "gpt2": {
        "positions": "learned",
        "norm": "layernorm",
        "norm_bias": True,
        "gated": False,
        "activation": "gelu_tanh",
        "qkv_bias": True,
        "mlp_bias": True,
        "out_bias": True,
        "n_kv_heads": 4,
    },
}


class CountedFile:
    """safe_open that tracks its tensors: how many are alive at once, and their requested devices."""

    alive = most = 0
    devices: list[str]

    def __init__(self, path: Path, *, framework: str, device: str) -> None:
        self._file = safe_open(path, framework=framework, device="cpu")
        type(self).devices.append(device)

    def __enter__(self) -> CountedFile:
        self._opened: Any = self._file.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._file.__exit__(*error)

    def get_tensor(self, name: str) -> Tensor:
        tensor: Tensor = self._opened.get_tensor(name).clone()
        kind = type(self)
        kind.alive += 1
        kind.most = max(kind.most, kind.alive)
        weakref.finalize(tensor, self._on_freed)
        return tensor

    def _on_freed(self) -> None:
        type(self).alive -= 1


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[CountedFile]]:
    """Replaces the file class of safetensors."""
    monkeypatch.setattr(CountedFile, "alive", 0)
    monkeypatch.setattr(CountedFile, "most", 0)
    monkeypatch.setattr(CountedFile, "devices", [], raising=False)
    monkeypatch.setattr("model.checkpoint.checkpoint.safe_open", CountedFile)
    return CountedFile


@pytest.mark.parametrize("kind", KINDS)
def test_one_tensor_of_the_file_is_there_at_a_time(kind: str, counted: type[CountedFile], tmp_path: Path) -> None:
    """So a device holds at most one tensor in addition to the decoder."""
    directory = tiny_weights(tmp_path, **KINDS[kind])
    load(directory, device=CPU, dtype=torch.bfloat16)
    assert (counted.most, counted.alive, counted.devices) == (1, 0, ["cpu"])


def test_fused_matrices_are_filled_where_they_stay() -> None:
    """None is put together elsewhere first, which would take a layer's matrices twice."""
    config, made = tiny_config(qkv_bias=True), []
    shapes = LLAMA.shapes(config)

    def empty(*shape: int) -> Tensor:
        made.append(torch.empty(shape))
        return made[-1]

    state = LLAMA.load(config, lambda name: torch.full(shapes[name], float(len(name))), empty)
    fused = [tensor for name, tensor in state.items() if "qkv" in name or ".up." in name]
    assert len(fused) == len(made) == 3 * config.n_layers
    assert all(ours is given for ours, given in zip(fused, made, strict=True))
    rows = [shapes[f"model.layers.0.self_attn.{x}_proj.weight"][0] for x in "qkv"]
    assert [len(part) for part in state["blocks.0.attention.qkv.weight"].split(rows)] == rows


def test_a_gpus_files_are_opened_for_the_gpu(counted: type[CountedFile], tmp_path: Path) -> None:
    """safetensors then hands the bytes on itself; here there is none, so the first tensor that is made there fails."""
    directory = tiny_weights(tmp_path)
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda"):
        load(directory, device=torch.device("cuda", 1), dtype=torch.float32)
    assert counted.devices == ["cuda:1"]


def test_the_first_tensor_that_is_not_finite_is_named(tmp_path: Path) -> None:
    directory = tiny_weights(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"):
        tensors[name].view(-1)[7] = torch.inf
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.weight holds numbers"):
        load(directory, device=CPU, dtype=torch.float32)


def test_to_note_a_tensor_reads_nothing_from_its_device() -> None:
    with Watch():
        results = [all_finite(torch.full((3, 4), number)) for number in (1.0, torch.nan, torch.inf)]
        with pytest.raises(AssertionError, match="waits for the device"):
            torch.ones(1).item()
    assert torch.stack(results).tolist() == [True, False, False]


def test_numbers_too_large_for_the_format_that_is_asked_for_are_found(tmp_path: Path) -> None:
    """What counts is what the device computes with."""
    directory = tiny_weights(tmp_path)
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 3.4e38  # more than the largest bfloat16
    save_file(tensors, path, metadata={"format": "pt"})
    load(directory, device=CPU, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds numbers that are not finite"):
        load(directory, device=CPU, dtype=torch.bfloat16)
