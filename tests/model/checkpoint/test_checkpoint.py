"""Weights directories: written weights load bit for bit, from one file or several shards.

Broken or incomplete directories, and headers that do not match, are refused in one sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from app.cli.check import main as check
from model.checkpoint.checkpoint import Checkpoint, load, weights_files
from model.checkpoint.stored_weights import find_weights
from model.checkpoint.tensor_index import check_layout, read_header
from model.files import CheckpointError, linked_caches, write_files
from tests.support.model.tiny_models import GPT2, tiny_config, tiny_decoder

FAMILIES: dict[str, dict[str, Any]] = {"llama": {}, "gpt2": GPT2 | {"tied_head": False}}
"""Layouts that concatenate and transpose what is stored."""


def _load(directory: Path, dtype: torch.dtype = torch.float32) -> Checkpoint:
    return load(directory, device=torch.device("cpu"), dtype=dtype)


def _refused(directory: Path, words: str, dtype: torch.dtype = torch.float32) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        _load(directory, dtype)
    assert str(caught.value).startswith(str(directory)) and str(caught.value).isprintable()


def _change_json(directory: Path, name: str, **change: Any) -> None:
    raw = json.loads((directory / name).read_text())
    (directory / name).write_text(json.dumps(raw | change))


def _change_tensors(directory: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_written_weights_load_bit_for_bit_for_torch_and_the_kernels(
    tmp_path: Path, family: str, stored: torch.dtype
) -> None:
    decoder = tiny_decoder(tiny_config(**FAMILIES[family]))
    decoder.embedding[0, :2] = torch.tensor([-0.0, 1e-7])  # a subnormal number in float16
    write_files(tmp_path, weights_files(decoder, dtype=stored, eos_id=None, generation={}))
    found, written = find_weights(tmp_path), decoder.state_dict()
    assert found.family.name == family
    narrow = str(stored).removeprefix("torch.")
    for parameter, tensor in written.items():
        assert (found.stored_format(parameter, "float32"), found.stored_format(parameter, "bfloat16")) == (
            narrow,
            "bfloat16",
        )
        words = tensor.to(stored).contiguous()
        words = words.view(torch.uint16) if narrow == "bfloat16" else words
        assert found.read(parameter, narrow).tobytes() == words.numpy().tobytes(), parameter
    assert found.stored_bytes("float32") == stored.itemsize * found.n_params
    assert found.stored_bytes("bfloat16") == 2 * found.n_params
    for name in ("float32", "bfloat16"):
        loaded = _load(tmp_path, getattr(torch, name)).decoder.state_dict()
        assert loaded.keys() == written.keys()
        for parameter, tensor in loaded.items():
            assert torch.equal(tensor, written[parameter].to(stored).to(getattr(torch, name)))
            words = tensor.view(torch.uint16) if name == "bfloat16" else tensor
            assert found.read(parameter, name).tobytes() == words.contiguous().numpy().tobytes()


def test_tensor_of_several_formats_is_stored_in_the_format_of_products(tmp_path: Path) -> None:
    """Keys and values in float32 beside queries in bfloat16, which are one matrix here."""
    decoder = tiny_decoder()
    write_files(tmp_path, weights_files(decoder, dtype=torch.bfloat16, eos_id=None, generation={}))
    name = "model.layers.0.self_attn.k_proj.weight"
    _change_tensors(tmp_path, lambda tensors: tensors.update({name: tensors[name].float()}))
    found, wide = find_weights(tmp_path), decoder.state_dict()["blocks.0.attention.qkv.weight"].numel()
    formats = {name: found.stored_format(name, "float32") for name in decoder.state_dict()}
    assert [name for name, kind in formats.items() if kind == "float32"] == ["blocks.0.attention.qkv.weight"]
    assert found.stored_bytes("float32") == 2 * (found.n_params - wide) + 4 * wide


def test_file_replaced_before_its_tensors_are_read_is_refused(directory: Path) -> None:
    """The other file has the same tensors, two of them swapped."""
    found, file = find_weights(directory), directory / "model.safetensors"
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    entries = json.loads(content[8 : 8 + length])
    one, other = [entry for name, entry in entries.items() if name.endswith("norm.weight")][:2]
    one["data_offsets"], other["data_offsets"] = other["data_offsets"], one["data_offsets"]
    header = json.dumps(entries, separators=(",", ":")).encode().ljust(length)
    assert found.read("norm.weight", "float32").size, "positive control"
    file.unlink()
    file.write_bytes(content[:8] + header + content[8 + length :])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: was replaced while it was read$"):
        found.read("norm.weight", "float32")


def test_extra_tensors_of_exporters_are_ignored_and_a_tied_head_must_equal_the_embedding(directory: Path) -> None:
    version = _load(directory).weights.version
    _change_tensors(directory, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64)}
    _change_tensors(directory, lambda t: t.update(old))
    assert _load(directory).weights.version != version
    _change_tensors(directory, lambda t: t["lm_head.weight"][3, 5].add_(1))
    _refused(directory, "lm_head.weight is not the token embedding.*tie_word_embeddings")
    _change_tensors(directory, lambda t: t.update({"lm_head.weight": torch.ones(3, 64)}))
    _refused(directory, r"lm_head.weight has shape \[3, 64\], config.json asks for \[320, 64\]")


def test_base_model_without_the_prefix_loads(directory: Path) -> None:
    before = _load(directory).decoder.state_dict()
    tensors = load_file(directory / "model.safetensors")
    save_file({n.removeprefix("model."): t for n, t in tensors.items()}, directory / "model.safetensors")
    after = _load(directory).decoder.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    _change_json(directory, "config.json", tie_word_embeddings=False)
    _refused(directory, "1 tensors are missing, the first is lm_head.weight")


def test_eos_ids_may_be_several_and_generation_config_takes_precedence(directory: Path) -> None:
    _change_json(directory, "config.json", eos_token_id=5)
    _change_json(directory, "generation_config.json", eos_token_id=[0, 7, 9, 7])
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
def test_mismatched_tensors_are_named(directory: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    _change_tensors(directory, change)
    _refused(directory, words)


def test_numbers_too_large_for_the_requested_format_are_refused(directory: Path) -> None:
    """The compute format decides: 3.4e38 exceeds the largest bfloat16."""
    _change_tensors(directory, lambda t: t[NORM][:1].fill_(3.4e38))
    assert find_weights(directory).read("norm.weight", "float32").max() > 3e38
    _load(directory)
    _refused(directory, "not finite in bfloat16", torch.bfloat16)
    with pytest.raises(CheckpointError, match="not finite in bfloat16"):
        find_weights(directory).read("norm.weight", "bfloat16")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized weights"),
        ({"attention_bias": True}, "q_proj.bias|k_proj.bias"),
        ({"eos_token_id": 999}, "999"),
        ({"eos_token_id": [*range(65)]}, "lists 65 ids; at most 64"),
    ],
)
def test_unservable_config_is_refused(directory: Path, change: dict[str, Any], words: str) -> None:
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
        ({"num_hidden_layers": 10**9}, "1000000000 layers"),
        ({"hidden_size": 2**30}, "asks for [0-9]* numbers"),
        ({"vocab_size": 2**31 - 1}, "asks for [0-9]* numbers"),
        ({"max_position_embeddings": 2**28}, "a context of up to 524288"),
    ],
)
def test_config_with_shapes_beyond_the_file_is_refused_quickly(
    directory: Path, family: str, change: dict[str, Any], words: str
) -> None:
    qwen = {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 0}
    _change_json(directory, "config.json", **qwen, model_type=family, **change)
    started = time.process_time()
    _refused(directory, words)
    assert time.process_time() - started < 1


INDEX = "model.safetensors.index.json"
SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


@pytest.fixture
def sharded(directory: Path) -> Path:
    """The tiny weights, cut into three."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {name: SHARDS[i % 3] for i, name in enumerate(tensors)}
    for shard in SHARDS:
        save_file({n: t for n, t in tensors.items() if weight_map[n] == shard}, directory / shard)
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def test_shards_load_like_a_single_file(sharded: Path, weights: Path) -> None:
    one, many = _load(weights), _load(sharded)
    expected, found = one.decoder.state_dict(), many.decoder.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    hashes = [hashlib.sha256((sharded / shard).read_bytes()).hexdigest() for shard in SHARDS]
    assert many.weights.version == hashlib.sha256("".join(hashes).encode()).hexdigest()
    assert one.weights.version == hashlib.sha256((weights / "model.safetensors").read_bytes()).hexdigest()


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "a path": (lambda m: m.update({NORM: "../x.safetensors"}), "weight_map"),
    "a lost shard": (lambda m: m.update({NORM: "gone.safetensors"}), r"gone\.safetensors: cannot be read"),
    "the wrong shard": (lambda m: m.update({NORM: next(s for s in SHARDS if s != m[NORM])}), f"{NORM}, .* assigns"),
    "not named": (lambda m: m.pop(NORM), f"holds {NORM}, which {INDEX} does not list"),
    "not there": (lambda m: m.update(surprise=SHARDS[0]), f"{SHARDS[0]}: surprise is missing"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_wrong_index_is_refused(sharded: Path, kind: str) -> None:
    change, words = CHANGES[kind]
    index = json.loads((sharded / INDEX).read_text())
    change(index["weight_map"])
    (sharded / INDEX).write_text(json.dumps(index))
    _refused(sharded, words)


def test_duplicate_tensor_in_shards_or_index_is_refused(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    other = next(shard for shard in SHARDS if shard != index["weight_map"][NORM])
    doubled = json.dumps(index).replace(f'"{NORM}":', f'"{NORM}": "{other}", "{NORM}":')
    (sharded / INDEX).write_text(doubled)
    _refused(sharded, f"duplicate key '{NORM}'")
    (sharded / INDEX).write_text(json.dumps(index))
    tensors = load_file(sharded / other)
    save_file(tensors | {NORM: torch.ones(64)}, sharded / other)
    _refused(sharded, f"{other}: holds {NORM}, which {INDEX} assigns to")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_links_must_stay_inside_the_directory(tmp_path: Path, directory: Path, name: str) -> None:
    (directory / name).rename(directory / "real")
    (directory / name).symlink_to("real")
    version = _load(directory).weights.version
    (directory / "real").rename(tmp_path / "real")
    (directory / name).unlink()
    (directory / name).symlink_to(tmp_path / "real")
    _refused(directory, f"{name}: leads out of the directory")
    (directory / name).unlink()
    (directory / name).symlink_to(name)
    _refused(directory, f"{name}: cannot be read")
    (directory / name).unlink()
    os.mkfifo(directory / name)
    _refused(directory, f"{name}: is not a regular file")
    assert version


def test_hub_cache_layout_loads(tmp_path: Path, weights: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123abcd", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for path in weights.iterdir():
        shutil.copy(path, blobs / hashlib.sha256(path.read_bytes()).hexdigest())
        (snapshot / path.name).symlink_to(f"../../blobs/{hashlib.sha256(path.read_bytes()).hexdigest()}")
    assert _load(snapshot).weights.version == _load(weights).weights.version
    (tmp_path / "by-name").symlink_to(snapshot)
    assert _load(tmp_path / "by-name").weights.version == _load(weights).weights.version


def test_directory_may_link_into_a_hub_cache_and_nowhere_else(tmp_path: Path, weights: Path) -> None:
    """As `hf download --local-dir` did, or ln -s: from any directory to blobs, which are named by their content."""
    blobs, shared, directory = tmp_path / "hub/models--a--b/blobs", tmp_path / "hub/blobs", tmp_path / "local"
    blobs.mkdir(parents=True)
    directory.mkdir()
    for path in weights.iterdir():
        name = hashlib.sha256(path.read_bytes()).hexdigest()
        shutil.copy(path, blobs / name)
        (directory / path.name).symlink_to(blobs / name)
    assert _load(directory).weights.version == _load(weights).weights.version
    assert linked_caches(directory) == {str(tmp_path / "hub/models--a--b"): len(list(weights.iterdir()))}
    assert linked_caches(weights) == {}
    config = directory / "config.json"
    blob = config.resolve()
    (shared / blob.name[:2]).mkdir(parents=True)
    blob.rename(shared / blob.name[:2] / blob.name)
    blob.symlink_to(shared / blob.name[:2] / blob.name)
    assert _load(directory).weights.version
    content = config.read_bytes()
    config.unlink()
    for other in (blobs / "config.json", blobs / ("a" * 39), blobs / ("A" * 40), shared / "zz" / ("a" * 64),
                  tmp_path / "hub/datasets--a--b/blobs" / ("a" * 64), tmp_path / ("a" * 64)):  # fmt: skip
        other.parent.mkdir(parents=True, exist_ok=True)
        other.write_bytes(content)
        config.symlink_to(other)
        _refused(directory, "config.json: leads out of the directory")
        config.unlink()
    (blobs / ("b" * 64)).symlink_to("/etc/passwd")
    config.symlink_to(blobs / ("b" * 64))
    _refused(directory, "config.json: leads out of the directory")
    config.unlink()
    config.symlink_to(blobs / ("c" * 64))
    _refused(directory, r"config.json: cannot be read \(No such file or directory: a link to .*; copy .* with cp -rL")


MISSING = [
    ({"pytorch_model.bin"}, "model.safetensors", "pytorch_model.bin is not read: a pickle.*bring-your-model"),
    ({"ckpt.pt"}, "model.safetensors", "ckpt.pt is not read"),
    ({"x.gguf"}, "config.json", "x.gguf is not read: use the model that"),
    ({"model-00001-of-00002.safetensors"}, "model.safetensors", "index.json is missing"),
    (set(), "model.safetensors", "model.safetensors: no such file; a model directory has config.json"),
    (set(), "tokenizer.json", r"create it with transformers: AutoTokenizer.*save_pretrained\(DIR\)$"),
    ({"tokenizer.model"}, "tokenizer.json", "create it from tokenizer.model with transformers"),
    ({"vocab.json", "merges.txt"}, "tokenizer.json", "create it from merges.txt with transformers"),
    ({"snapshots"}, "config.json", "pass the revision folder under snapshots"),
    ({"adapter_config.json"}, "config.json", "an adapter: merge it"),
    ({"adapter_config.json", "adapter_model.safetensors"}, "", "adapter_config.json: the adapter would not be applied"),
]


@pytest.mark.parametrize(("present", "missing", "words"), MISSING)
def test_missing_files_are_named_with_a_remedy(directory: Path, present: set[str], missing: str, words: str) -> None:
    check_layout(directory)
    if missing:
        (directory / missing).unlink()
    for name in present:
        (directory / name).touch()
    with pytest.raises(CheckpointError, match=words):
        check_layout(directory)


def test_path_other_than_a_model_directory_is_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = directory / "model.safetensors"
    words = {"no-such": "no such directory", "x" * 300: "cannot be read", file: "give the directory that contains it: "}
    for name, message in words.items():
        with pytest.raises(CheckpointError, match=message):
            check_layout(directory / name)
    (directory / "config.json").unlink()
    monkeypatch.chdir(directory)
    with pytest.raises(CheckpointError, match=r"^\./config\.json: no such file; a model directory has"):
        check_layout(Path())


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_git_lfs_pointer_is_reported(directory: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    (directory / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")
    assert check([str(directory)]) == 2
    assert f"{name}: is only a pointer of git-lfs" in capsys.readouterr().err


A, B = (
    {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    {"dtype": "F16", "shape": [], "data_offsets": [24, 26]},
)


def _file(tmp_path: Path, header: Any, body: bytes = bytes(26), length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    return path


def test_headers_written_by_the_library_are_read(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(()).half(), "c": torch.zeros(0, 4).bool(), "d": torch.ones(5)}
    path = tmp_path / "x.safetensors"
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    found, content = read_header(path), path.read_bytes()
    header = content[: 8 + int.from_bytes(content[:8], "little")]
    expected = {"a": ("F32", (2, 3)), "b": ("F16", ()), "c": ("BOOL", (0, 4)), "d": ("F32", (5,))}
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == expected
    assert all(tensor.header == header for tensor in found.values())
    for name, tensor in tensors.items():
        assert content[found[name].start :][: tensor.nbytes] == tensor.numpy().tobytes()


_A = b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, '
LIES: dict[str, tuple[Any, str]] = {
    "gap": ({"a": A, "b": B | {"data_offsets": [25, 27]}}, "b"),
    "overlap": ({"a": A, "b": B | {"data_offsets": [22, 24]}}, "b"),
    "shape": ({"a": A | {"shape": [3, 3]}, "b": B}, ""),
    "huge": ({"a": A | {"shape": [2**60, 2**60]}, "b": B}, "verflow"),
    "dtype": ({"a": A | {"dtype": "F31"}, "b": B}, "F31"),
    "twice": (_A + b'"b": {"dtype": "F16", "shape": [], "data_offsets": [24, 26]}, "b": 2}', "expected struct"),
    "deep": (b'{"a":' + b"[" * 100_000, ""),
    "list": ({"a": list(A.values()), "b": B}, "the entry of a is not an object"),
}


@pytest.mark.parametrize("kind", LIES)
def test_inconsistent_header_is_refused_in_one_line(tmp_path: Path, kind: str) -> None:
    """The message is the library's."""
    header, words = LIES[kind]
    with pytest.raises(CheckpointError, match=f"x.safetensors: invalid header: .*{words}") as caught:
        read_header(_file(tmp_path, header))
    assert str(caught.value).isprintable()


def test_oversized_header_is_refused_before_it_is_read(tmp_path: Path) -> None:
    for length in (2**64 - 1, 200, 0):
        with pytest.raises(CheckpointError, match=r"x.safetensors: (invalid header|the header has \d+ bytes, more)"):
            read_header(_file(tmp_path, {"a": A, "b": B}, length=length))
    path = tmp_path / "x.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", 1 << 40))
        file.truncate(1 << 41)  # uses no disk space
    with pytest.raises(CheckpointError, match="has 1099511627776 bytes, more than"):
        read_header(path)
    for content in (b"", b"1234567"):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"x\.safetensors: "):
            read_header(path)
