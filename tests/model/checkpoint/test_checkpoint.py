"""Weights directories: what is written loads again bit for bit, and what is broken is refused in one sentence."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model.checkpoint.checkpoint import Checkpoint, load, weights_files
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError, write_files
from tests.support.model.tiny_models import GPT2, tiny_config, tiny_decoder

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2 | {"tied_head": False}}
"""Layouts that concatenate and transpose what is stored."""


def _load(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return load(directory, device=torch.device("cpu"), dtype=dtype)


def _refused(directory: Path, words: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        _load(directory, dtype)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def _change_json(directory: Path, name: str, **change: Any) -> None:
    raw = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(raw | change))


def _change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_loads_bit_for_bit_for_torch_and_for_the_kernels(
    tmp_path: Path, family: str, stored: torch.dtype
) -> None:
    decoder = tiny_decoder(tiny_config(**FAMILIES[family]))
    decoder.embedding[0, :2] = torch.tensor([-0.0, 1e-7])  # a subnormal number in float16
    write_files(tmp_path, weights_files(decoder, dtype=stored, eos_id=None, generation={}))
    found, written = find_weights(tmp_path), decoder.state_dict()
    assert found.family.name == family
    for name in ("float32", "bfloat16"):
        loaded = _load(tmp_path, getattr(torch, name)).decoder.state_dict()
        assert loaded.keys() == written.keys()
        for parameter, tensor in loaded.items():
            assert torch.equal(tensor, written[parameter].to(stored).to(getattr(torch, name)))
            words = tensor.view(torch.uint16) if name == "bfloat16" else tensor
            assert found.read(parameter, name).tobytes() == words.contiguous().numpy().tobytes()


def test_a_file_that_is_replaced_before_its_tensors_are_read_is_refused(directory: Path) -> None:
    """The other file has the same tensors, two of them in each other's place."""
    found, file = find_weights(directory), directory / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    one, other = [entry for name, entry in entries.items() if name.endswith("norm.weight")][:2]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    header = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
    assert found.read("norm.weight", "float32").size, "the control"
    file.unlink()
    file.write_bytes(content[:8] + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was replaced while it was read$"):
        found.read("norm.weight", "float32")


def test_what_exporters_store_besides_is_passed_over_and_a_tied_head_must_be_the_embedding(directory: Path) -> None:
    version = _load(directory).weights.version
    _change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    _change_tensors(directory, lambda t: t.update(old))
    assert _load(directory).weights.version != version
    _change_tensors(directory, lambda t: t["lm_head.weight"][3, 5].add_(1))
    _refused(directory, "lm_head.weight is not the token embedding.*tie_word_embeddings")
    _change_tensors(directory, lambda t: t.update({"lm_head.weight": torch.ones(3, 64)}))
    _refused(directory, r"lm_head.weight has shape \[3, 64\], config.json asks for \[320, 64\]")


def test_a_bare_base_model_lacks_the_prefix(directory: Path) -> None:
    before = _load(directory).decoder.state_dict()
    tensors = load_file(directory / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, directory / "model.safetensors")
    after = _load(directory).decoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _change_json(directory, "config.json", tie_word_embeddings=False)
    _refused(directory, "1 tensors are missing, the first is lm_head.weight")


def test_several_tokens_may_end_a_text_and_generation_config_knows_best(directory: Path) -> None:
    _change_json(directory, "config.json", eos_token_id=5)
    _change_json(directory, "generation_config.json", eos_token_id=[0, 7, 9])
    assert find_weights(directory).eos_ids == (0, 7, 9)
    (directory / "generation_config.json").unlink()
    assert find_weights(directory).eos_ids == (5,)


NORM = "model.norm.weight"
BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop(NORM), f"1 tensors are missing, the first is {NORM}"),
    "extra": (lambda t: t.update(surprise=torch.ones(1)), "not part of the model, the first is surprise"),
    "shape": (lambda t: t.update({NORM: torch.ones(3)}), r"shape \[3\], config.json asks for \[64\]"),
    "dtype": (lambda t: t.update({NORM: torch.ones(64).long()}), "dtype I64"),
    "nan": (lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan), r"layers\.1\.mlp\.up_proj.* not finite"),
    "infinite": (lambda t: t[NORM][:1].fill_(torch.inf), f"{NORM} holds numbers that are not finite"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_tensors_that_do_not_fit_are_named(directory: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    _change_tensors(directory, change)
    _refused(directory, words)


def test_numbers_too_large_for_the_format_that_is_asked_for_are_found(directory: Path) -> None:
    """What counts is what the device computes with: 3.4e38 is more than the largest bfloat16."""
    _change_tensors(directory, lambda t: t[NORM][:1].fill_(3.4e38))
    assert find_weights(directory).read("norm.weight", "float32").max() > 3e38
    _load(directory)
    _refused(directory, "not finite in bfloat16", torch.bfloat16)
    with pytest.raises(CheckpointError, match="not finite in bfloat16"):
        find_weights(directory).read("norm.weight", "bfloat16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba.*supported: llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"attention_bias": True}, "q_proj.bias|k_proj.bias"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"num_hidden_layers": None}, "n_layers"),
        ({"eos_token_id": 999}, "999"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(directory: Path, change: dict[str, Any], words: str) -> None:
    (directory / "generation_config.json").unlink()
    _change_json(directory, "config.json", **change)
    _refused(directory, words)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("content", [None, b"", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_broken_files_are_named(directory: Path, name: str, content: bytes | None) -> None:
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    _refused(directory, name)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 10**9}, "asks for 1000000000 layers"),
        ({"hidden_size": 2**30}, "asks for [0-9]* numbers"),
        ({"vocab_size": 2**31 - 1}, "asks for [0-9]* numbers"),
        ({"max_position_embeddings": 2**28}, "a context of up to 524288"),
    ],
)
def test_a_config_cannot_ask_for_what_the_file_does_not_hold(
    directory: Path, family: str, change: dict[str, Any], words: str
) -> None:
    qwen = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    _change_json(directory, "config.json", **qwen, model_type=family, **change)
    started = time.process_time()
    _refused(directory, words)
    assert time.process_time() - started < 1
