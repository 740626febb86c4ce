"""Files of mixtures of experts: one tensor for each expert, or one for all experts of a layer."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint import stored_weights
from model.checkpoint.checkpoint import load
from model.checkpoint.stored_numbers import match_scales
from model.checkpoint.stored_weights import find_weights
from model.checkpoint.tensor_index import StoredTensor
from model.families.registry import read_config
from model.families.spec import FamilySpec
from model.files import CheckpointError
from tests.support.model.hub_checkpoints import CASES, FAMILY_CASES, family_name, save_reference

pytestmark = pytest.mark.usefixtures("one_thread")
MIXTURES = [
    case
    for case in CASES
    if family_name(case) != "gpt_oss"  # its other names are of packed experts
    and read_config({**FAMILY_CASES[family_name(case)].minimal, "model_type": family_name(case)})[0].fused
]
FILE = "model.safetensors"


def _state(directory: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return load(directory, device=torch.device("cpu"), dtype=dtype).decoder.state_dict()


@pytest.mark.parametrize("case", MIXTURES)
def test_experts_of_a_layer_may_be_one_tensor(tmp_path: Path, case: str) -> None:
    """As transformers has them in memory; it saves one tensor for each expert, or with older names."""
    theirs = save_reference(case, tmp_path / "single")
    theirs.save_pretrained(tmp_path / "fused", save_original_format=False)
    names = [load_file(tmp_path / way / FILE).keys() for way in ("single", "fused")]
    assert "experts" not in str(sorted(names[1])) or names[0] != names[1]
    single, fused = (_state(tmp_path / way) for way in ("single", "fused"))
    assert single.keys() == fused.keys()
    assert all(torch.equal(tensor, fused[name]) for name, tensor in single.items())


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    save_reference("olmoe-a", tmp_path)
    tensors = load_file(tmp_path / FILE)
    del tensors["model.layers.1.mlp.experts.5.up_proj.weight"]
    save_file(tensors, tmp_path / FILE)
    with pytest.raises(CheckpointError, match=r"1 tensors are missing.*layers\.1\.mlp\.experts\.5\.up_proj\.weight"):
        find_weights(tmp_path)


def test_more_experts_than_the_files_can_hold_are_refused_at_once(tmp_path: Path) -> None:
    save_reference("olmoe-a", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 4096, "intermediate_size": 10**6}))
    with pytest.raises(CheckpointError, match=r"asks for \d+ numbers"):
        find_weights(tmp_path)


def test_names_of_missing_experts_are_not_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small experts in thousands of layers would have gigabytes of names."""
    save_reference("olmoe-a", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_experts": 4096, "intermediate_size": 1}))
    monkeypatch.setattr(stored_weights, "_MAX_SIZE_RATIO", 1 << 40)
    monkeypatch.setattr(FamilySpec, "mappings", lambda *_: pytest.fail("made the names"))
    with pytest.raises(CheckpointError, match=r"has \d+ tensors, and the experts need \d+"):
        find_weights(tmp_path)


@pytest.mark.parametrize("case", ["qwen3_moe-b", "ernie4_5_moe-c"])
def test_experts_in_fp8_are_their_numbers_times_their_scales(tmp_path: Path, case: str) -> None:
    save_reference(case, tmp_path)
    tensors: dict[str, Tensor] = load_file(tmp_path / FILE)
    wanted = dict(tensors)
    for name in [name for name in tensors if ".experts." in name]:
        scale = torch.full((1, 1), 0.01)
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
        wanted[name] = (tensors[name].float() * scale).bfloat16()
    save_file(tensors, tmp_path / FILE)
    config: dict[str, Any] = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": fp8}))
    weights, state = find_weights(tmp_path), _state(tmp_path, torch.bfloat16)
    saved = weights.family.save(weights.config, state)
    assert len(weights.scales) > 12
    assert all(torch.equal(tensor, wanted[name].bfloat16()) for name, tensor in saved.items())


def test_scales_of_thousands_of_experts_are_matched_in_a_moment() -> None:
    def stored(name: str, dtype: str, *shape: int) -> StoredTensor:
        return StoredTensor(name=name, path=Path("x"), dtype=dtype, shape=shape, start=0, header=b"")

    names = [f"model.layers.{n}.mlp.experts.{e}.up_proj.weight" for n in range(48) for e in range(128)]
    found = {name: stored(name, "F8_E4M3", 4, 4) for name in names}
    found |= {f"{name}_scale_inv": stored(f"{name}_scale_inv", "F32", 1, 1) for name in names}
    started = time.process_time()
    kept, scales = match_scales(found)
    assert len(kept) == len(scales) == len(names)
    assert time.process_time() - started < 2.0, "each tensor looked at all others"
