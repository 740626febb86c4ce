"""Weights in fp8, as vendors publish them: bfloat16 numbers after loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint.checkpoint import load
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError
from tests.support.model.hub_checkpoints import save_reference

FP8 = torch.float8_e4m3fn
_FINE = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def _scale(matrix: Tensor, layout: str) -> Tensor:
    """Scales as large as they have to be: 448 is the largest number of the format."""
    if layout == "tensor":
        return matrix.abs().amax() / 448
    if layout == "rows":
        return matrix.abs().amax(1, keepdim=True) / 448
    rows, columns = (-(-size // 128) for size in matrix.shape)
    scales = torch.empty(rows, columns)
    for row in range(rows):
        for column in range(columns):
            block = matrix[128 * row : 128 * (row + 1), 128 * column : 128 * (column + 1)]
            scales[row, column] = block.abs().amax() / 448
    return scales


def _wide(scale: Tensor, shape: torch.Size, layout: str) -> Tensor:
    if layout != "blocks":
        return scale
    return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]


def _quantize(directory: Path, layout: str, name: str, dtype: torch.dtype, **config: Any) -> dict[str, Tensor]:
    """Stores the matrices of layers in fp8; returns what each tensor is then, in bfloat16."""
    path, tensors, expected = directory / "model.safetensors", {}, {}
    for key, tensor in load_file(path).items():
        expected[key] = tensors[key] = tensor.bfloat16()
        if not key.endswith("proj.weight"):
            continue
        scale = _scale(tensor, layout).to(dtype)
        wide = _wide(scale.float(), tensor.shape, layout)
        tensors[key] = (tensor / wide).to(FP8)
        tensors[key.removesuffix("weight") + name] = scale
        tensors[key.removesuffix("weight") + "input_scale"] = torch.ones(())
        expected[key] = (tensors[key].float() * wide).bfloat16()
    save_file(tensors, path)
    raw = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return expected


@pytest.mark.parametrize(
    ("layout", "name", "dtype"),
    [
        ("blocks", "weight_scale_inv", torch.float32),
        ("tensor", "weight_scale_inv", torch.bfloat16),
        ("rows", "weight_scale", torch.float32),
    ],
)
def test_fp8_is_its_number_times_its_scale_rounded_to_bfloat16(
    tmp_path: Path, layout: str, name: str, dtype: torch.dtype
) -> None:
    changes = {"hidden_size": 300, "intermediate_size": 200, "head_dim": 50, "num_attention_heads": 4}
    save_reference("llama-b", tmp_path, **changes)
    expected = _quantize(tmp_path, layout, name, dtype, **_FINE)
    weights = find_weights(tmp_path)
    assert len(weights.scales) == 2 * 7 and not weights.left_out
    state = load(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16).decoder.state_dict()
    for target, mapping in weights.mappings.items():
        wanted = torch.cat([expected[source] for source, _ in mapping.source])
        assert torch.equal(state[target], wanted), target
        assert weights.stored_format(target, "float32") == "bfloat16"
        assert weights.read(target, "bfloat16").tobytes() == wanted.view(torch.uint16).numpy().tobytes(), target


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_scale_inv": None}, "is in fp8 and has no .*weight_scale_inv"),
        ({"weight_scale_inv": torch.ones(7)}, r"has shape \[7\]: it must be one number, one for each of 48 rows"),
        ({"weight_scale_inv": torch.ones((), dtype=torch.int32)}, "has dtype I32; allowed are F32, F16, BF16"),
        ({"weight_scale_inv": torch.tensor(float("inf"))}, "numbers that are not finite"),
        ({"weight": torch.full((48, 48), float("nan")).to(FP8)}, "numbers that are not finite"),
        ({"weight": torch.ones(48, 48).to(torch.float8_e5m2)}, "has dtype F8_E5M2; allowed are .*F8_E4M3 with scales"),
    ],
)
def test_impossible_scales_are_refused_in_one_sentence(
    tmp_path: Path, change: dict[str, Tensor | None], words: str
) -> None:
    save_reference("llama-b", tmp_path)
    _quantize(tmp_path, "tensor", "weight_scale_inv", torch.float32, **_FINE)
    path = tmp_path / "model.safetensors"
    tensors, module = load_file(path), "model.layers.1.self_attn.q_proj."
    for name, tensor in change.items():
        if tensor is None:
            del tensors[module + name]
        else:
            tensors[module + name] = tensor
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=words) as caught:
        load(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert "\n" not in str(caught.value)
