"""Weights directories: what is written loads again bit for bit, and what is broken is refused in one sentence."""

from __future__ import annotations

import errno
import json
import os
import shutil
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import tiny_decoder

from model.checkpoint import CheckpointError, load, weights_files, write_files

CPU = torch.device("cpu")


@pytest.fixture
def directory(tmp_path: Path, weights: Path) -> Path:
    """A copy that the test may break."""
    return Path(shutil.copytree(weights, tmp_path / "copy"))


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


def test_an_untied_head_is_kept(tmp_path: Path) -> None:
    decoder = tiny_decoder()
    untied = type(decoder)(type(decoder.config)(**_fields(decoder.config) | {"tied_head": False}))
    with torch.no_grad():
        for parameter in untied.parameters():
            parameter.normal_()
    write_files(tmp_path, weights_files(untied, dtype=torch.float32, eos_id=None, generation={}))
    checkpoint = load(tmp_path, device=CPU, dtype=torch.float32)
    assert torch.equal(checkpoint.decoder.state_dict()["untied_head"], untied.state_dict()["untied_head"])
    assert checkpoint.eos_ids == ()


def _fields(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name) for name in config.__dataclass_fields__}


def test_the_version_is_the_hash_of_the_file_and_changes_with_it(directory: Path) -> None:
    first = load(directory, device=CPU, dtype=torch.float32).version
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"] + 1
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert load(directory, device=CPU, dtype=torch.float32).version != first


BROKEN: dict[str, tuple[Any, str]] = {
    "missing": (lambda t: t.pop("model.norm.weight"), "1 tensors are missing, the first is model.norm.weight"),
    "extra": (lambda t: t.update(surprise=torch.ones(1)), "not part of the model, the first is surprise"),
    "shape": (lambda t: t.update({"model.norm.weight": torch.ones(3)}), r"shape \[3\], config.json asks for \[64\]"),
    "dtype": (lambda t: t.update({"model.norm.weight": torch.ones(64).long()}), "dtype I64"),
    "nan": (lambda t: t.update({"model.norm.weight": torch.full((64,), torch.nan)}), "not finite"),
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
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "yarn"),
        ({"hidden_act": "mish"}, "mish"),
        ({"attention_bias": True}, "q_proj.bias|k_proj.bias"),
        ({"num_attention_heads": 3}, "multiple"),
        ({"num_attention_heads": 0, "head_dim": None}, "."),
        ({"hidden_size": "big"}, "width"),
        ({"vocab_size": -1}, "vocab_size"),
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
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b"\x00" * 100])
def test_broken_files_are_named(directory: Path, name: str, content: bytes | None) -> None:
    (directory / name).unlink()
    if content is not None:
        (directory / name).write_bytes(content)
    _refused(directory, name)


def test_a_truncated_weights_file_is_refused(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    _refused(directory, "model.safetensors")


@pytest.mark.parametrize(("owner", "call"), [(Path, "open"), (os, "fsync")])
@pytest.mark.parametrize("at", range(3))
def test_a_disk_that_gets_full_leaves_the_old_set_of_files_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, at: int
) -> None:
    old, new = (dict.fromkeys(("a", "b", "c"), content) for content in (b"old", b"new"))
    write_files(tmp_path, old)
    calls = count()

    real = getattr(owner, call)

    def full(*arguments: Any, **named: Any) -> Any:
        if next(calls) == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments, **named)

    monkeypatch.setattr(owner, call, full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_files(tmp_path, new)
    monkeypatch.undo()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
