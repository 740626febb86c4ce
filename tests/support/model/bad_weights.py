"""Weights with one defect each, which a reload must refuse, and the expected error messages."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.checkpoint import weights_files
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.golden_export import golden_file
from model.checkpoint.manifest import MANIFEST_FILE, manifest_file
from model.files import write_files
from model.nn.transformer import Decoder
from tests.support.model.tiny_models import VOCAB, tiny_config, tiny_decoder, tiny_files

_PROMPT = [5, 9, 200, 31, 7, 64, 100, 18]


def good_weights(directory: Path, seed: int) -> Path:
    """Writes a tiny model with golden.json and manifest.json."""
    files = tiny_files(tiny_decoder(seed=seed), _PROMPT)
    write_files(directory, {**files, MANIFEST_FILE: manifest_file(files)})
    return directory


def _truncated(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _dtype(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes().replace(b'"F32"', b'"I32"', 1))


def _not_finite(path: Path) -> None:
    tensors = load_file(path / "model.safetensors")
    next(iter(tensors.values())).view(-1)[7] = float("nan")
    save_file(tensors, path / "model.safetensors")


def _half_a_set(path: Path) -> None:
    shutil.copyfile(path / "generation_config.json", path / "tokenizer_config.json")
    (path / "generation_config.json").write_text('{"temperature": 0.5}')
    (path / MANIFEST_FILE).write_bytes(manifest_file({"generation_config.json": b"{}"}))


def _replace_model(path: Path, decoder: Decoder) -> None:
    write_files(path, weights_files(decoder, dtype=torch.float32, eos_id=0, generation={}))


def _large_tokenizer(path: Path) -> None:
    decoder = tiny_decoder(tiny_config(vocab_size=VOCAB - 1))
    _replace_model(path, decoder)
    (path / GOLDEN_FILE).write_bytes(golden_file(decoder, _PROMPT))


def _exploding(path: Path, **changes: int) -> None:
    """All weights are finite but activations overflow; without golden.json, like a Hugging Face directory."""
    decoder = tiny_decoder(tiny_config(**changes))
    for name, parameter in decoder.named_parameters():
        parameter.mul_(1e25 if "mlp" in name else 1)
    _replace_model(path, decoder)
    (path / GOLDEN_FILE).unlink()


def _loud_norms(path: Path) -> None:
    """Huge norm weights alone overflow to infinities, whose differences are NaN."""
    tensors = load_file(path / "model.safetensors")
    loud = {name: tensor.fill_(1e30) if "norm" in name else tensor for name, tensor in tensors.items()}
    save_file(loud, path / "model.safetensors")
    (path / GOLDEN_FILE).unlink()


def _write(path: Path, name: str, content: bytes) -> None:
    (path / name).write_bytes(content)


def _change_config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | changes))


KV_BLOCKS = 64
"""Blocks to start the service with: enough for a context of 256, too few for one of 8192."""
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing file": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors: no such file"),
    "a truncated file": (_truncated, "it is truncated"),
    "a wrong shape": (lambda path: _change_config(path, intermediate_size=160), "config.json asks for"),
    "a wrong dtype": (_dtype, "has dtype I32"),
    "numbers that are not finite": (_not_finite, "not finite"),
    "half a set of files": (_half_a_set, "differs from manifest.json"),
    "log-probabilities of another model": (
        lambda path: _write(path, GOLDEN_FILE, golden_file(tiny_decoder(seed=9), _PROMPT)),
        "the log-probabilities differ by",
    ),
    "a tokenizer larger than the model": (_large_tokenizer, "tokenizer.json: has 320 tokens, the model only 319"),
    "a broken tokenizer.json": (
        lambda path: _write(path, "tokenizer.json", b'{"model": {"type": "BPE", "vocab": {"a": 0}}}'),
        "tokenizer.json",
    ),
    "a broken config.json": (
        lambda path: _write(path, "config.json", b'{"model_type": "llama", '),
        "config.json: not JSON",
    ),
    "an unknown architecture": (
        lambda path: _change_config(path, model_type="mamba", architectures=["MambaForCausalLM"]),
        "mamba",
    ),
    "a model that does not fit": (
        lambda path: _replace_model(path, tiny_decoder(tiny_config(context=8192))),
        "does not fit",
    ),
    "numbers that explode": (_exploding, "the engine's logits are not finite in float32"),
    "norms of 1e30": (_loud_norms, "the engine's logits are not finite in float32"),
    "an encoder that explodes": (
        lambda path: _exploding(path, n_encoder_layers=1),
        "the engine's logits are not finite in float32",
    ),
    "a directory that is gone": (shutil.rmtree, "no such directory"),
    "a broken chat template": (
        lambda path: _write(path, "chat_template.jinja", b"\xff"),
        "chat_template.jinja: is not UTF-8",
    ),
}


def bad_weights(directory: Path, good: Path, kind: str) -> Path:
    """Copies good weights and adds one defect; without a manifest, which would detect all of them."""
    shutil.copytree(good, directory)
    (directory / MANIFEST_FILE).unlink()
    BAD[kind][0](directory)
    return directory
