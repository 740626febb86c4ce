"""Weights directories: what is written loads again bit for bit, and what is broken is refused in one sentence."""

from __future__ import annotations

import json
import shutil
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from model.checkpoint.checkpoint import load, weights_files
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError, write_files
from tests.support.model.tiny_models import tiny_config, tiny_decoder

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(weights, tmp_path / "copy"))


_GPT2 = {"norm": "layernorm", "norm_bias": True, "gated": False, "activation": "gelu_tanh", "qkv_bias": True,
         "out_bias": True, "mlp_bias": True, "n_kv_heads": 4}  # fmt: skip
FAMILIES: list[dict[str, Any]] = [
    {},
    {**_GPT2, "positions": "learned"},
    {**_GPT2, "rotary_dim": 4, "parallel_residual": True, "activation": "gelu", "tied_head": False},
]
"""Layouts that concatenate, transpose and reorder what is stored: llama, gpt2, gpt_neox."""


def _refused(directory: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        load(directory, device=CPU, dtype=torch.float32)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)


def test_what_is_saved_loads_bit_for_bit(weights: Path) -> None:
    loaded = load(weights, device=CPU, dtype=torch.float32).decoder.state_dict()
    saved = tiny_decoder().state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], saved[name]) for name in saved)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", FAMILIES)
def test_tensors_read_as_arrays_have_the_bits_that_torch_reads(
    tmp_path: Path, kind: dict[str, Any], stored: torch.dtype
) -> None:
    decoder = tiny_decoder(tiny_config(**kind))
    decoder.embedding[0, :2] = torch.tensor([-0.0, 1e-7])  # a subnormal number in float16
    write_files(tmp_path, weights_files(decoder, dtype=stored, eos_id=None, generation={}))
    found = find_weights(tmp_path)
    for name in ("float32", "bfloat16"):
        expected = load(tmp_path, device=CPU, dtype=getattr(torch, name)).decoder.state_dict()
        for parameter, tensor in expected.items():
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


def test_a_head_stored_beside_the_embedding_it_is_tied_to_must_be_the_embedding(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    load(directory, device=CPU, dtype=torch.float32)
    tensors["lm_head.weight"][3, 5] += 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _refused(directory, "lm_head.weight is not the token embedding.*tie_word_embeddings")


def test_several_tokens_may_end_a_text_and_generation_config_knows_best(directory: Path) -> None:
    for name, ids in (("config.json", 5), ("generation_config.json", [0, 7, 9])):
        raw = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps(raw | {"eos_token_id": ids}))
    assert load(directory, device=CPU, dtype=torch.float32).weights.eos_ids == (0, 7, 9)
    (directory / "generation_config.json").unlink()
    assert load(directory, device=CPU, dtype=torch.float32).weights.eos_ids == (5,)


@pytest.mark.parametrize("name", ["x" * 300, "no-such", "config.json"])
def test_what_is_no_directory_is_told(directory: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=r"no such directory|is not a directory"):
        load(directory / name, device=CPU, dtype=torch.float32)


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is model.norm.weight"),
    "extra": (lambda t: t.update(surprise=torch.ones(1)), "not part of the model, the first is surprise"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \[3\], config.json asks for \[64\]"),
    "dtype": (lambda t: t.update({"model.norm.weight": torch.ones(64).long()}), "dtype I64"),
    "nan": (lambda t: t["model.layers.1.mlp.up_proj.weight"].fill_(torch.nan), r"layers\.1\.mlp\.up_proj.* not finite"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_tensors_that_do_not_fit_are_named(directory: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    _refused(directory, words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "mamba"}, "mamba.*supported: llama"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantized weights"),
        ({"attention_bias": True}, "q_proj.bias|k_proj.bias"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"hidden_size": "big"}, "width"),
        ({"num_hidden_layers": None}, "n_layers"),
        ({"eos_token_id": 999}, "999"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(directory: Path, change: dict[str, Any], words: str) -> None:
    (directory / "generation_config.json").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
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
    config = json.loads((directory / "config.json").read_text())
    qwen = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    (directory / "config.json").write_text(json.dumps(config | qwen | {"model_type": family} | change))
    started = time.process_time()
    _refused(directory, words)
    assert time.process_time() - started < 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16])
def test_every_source_dtype_loads_into_every_wanted_one(
    directory: Path, dtype: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(tensors, directory / "model.safetensors")
    state = load(directory, device=CPU, dtype=wanted).decoder.state_dict()
    assert torch.equal(state["norm.weight"], tensors["model.norm.weight"].to(wanted))
    assert {tensor.dtype for tensor in state.values()} == {wanted}


def test_a_bare_base_model_lacks_the_prefix(directory: Path) -> None:
    before = load(directory, device=CPU, dtype=torch.float32).decoder.state_dict()
    tensors = load_file(directory / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, directory / "model.safetensors")
    after = load(directory, device=CPU, dtype=torch.float32).decoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    _refused(directory, "1 tensors are missing, the first is lm_head.weight")


def test_what_older_exporters_stored_besides_is_passed_over(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    version = load(directory, device=CPU, dtype=torch.float32).weights.version
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8, dtype=torch.float64)
    save_file(tensors, directory / "model.safetensors")
    assert load(directory, device=CPU, dtype=torch.float32).weights.version != version
    tensors["lm_head.weight"] = torch.ones(3, 64)
    save_file(tensors, directory / "model.safetensors")
    _refused(directory, r"lm_head.weight has shape \[3, 64\], config.json asks for \[320, 64\]")


def test_one_tensor_of_the_file_is_there_at_a_time_and_made_on_its_device(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a device holds at most one tensor in addition to the decoder."""
    alive, most, devices = weakref.WeakSet[torch.Tensor](), [0], []

    class CountedFile:
        def __init__(self, path: Path, *, framework: str, device: str) -> None:
            self._file = safe_open(path, framework=framework, device="cpu")
            devices.append(device)

        def __enter__(self) -> CountedFile:
            self._opened: Any = self._file.__enter__()
            return self

        def __exit__(self, *error: object) -> None:
            self._file.__exit__(*error)

        def get_tensor(self, name: str) -> torch.Tensor:
            tensor: torch.Tensor = self._opened.get_tensor(name).clone()
            alive.add(tensor)
            most[0] = max(most[0], len(alive))
            return tensor

    monkeypatch.setattr("model.checkpoint.checkpoint.safe_open", CountedFile)
    load(directory, device=CPU, dtype=torch.bfloat16)
    assert (most, len(alive), devices) == ([1], 0, ["cpu"])
    with pytest.raises((AssertionError, RuntimeError), match=r"CUDA|cuda"):  # there is none
        load(directory, device=torch.device("cuda", 1), dtype=torch.float32)
    assert devices[1:] == ["cuda:1"]


def test_numbers_too_large_for_the_format_that_is_asked_for_are_found(directory: Path) -> None:
    """What counts is what the device computes with."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"][0] = 3.4e38  # more than the largest bfloat16
    save_file(tensors, path, metadata={"format": "pt"})
    load(directory, device=CPU, dtype=torch.float32)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight holds numbers that are not finite"):
        load(directory, device=CPU, dtype=torch.bfloat16)
