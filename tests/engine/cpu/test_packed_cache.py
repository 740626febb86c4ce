"""Packed weights from the cache equal freshly packed ones, whatever happened to the files in between."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch

from app.common import weights_store
from app.common.weights_store import FileHashes, FileIdentity, WeightsStore, seal
from app.engine.cpu import packed_cache
from app.engine.cpu.executor import NativeExecutor, ThreadPool
from app.engine.cpu.packed_cache import PackedEntry
from app.engine.cpu.packed_decoder import PackedDecoder
from app.serving import weights_snapshot
from app.serving.weights_snapshot import WeightsSnapshot
from benchmarks.shapes import DenseWeights
from model.checkpoint.checkpoint import weights_files
from model.checkpoint.stored_weights import StoredWeights, find_weights
from model.checkpoint.tensor_index import version_of
from model.files import sha256, write_files
from model.packed_matrix import PackedFormat, PackedMatrix
from model.quantize import PackedWeights, QuantizedWeights, packed_kind
from model.weight_formats import Quantize
from model.weights_version import Directory
from tests.support.engine.native_sequences import logits_of
from tests.support.loaded_modules import not_matched, repository_modules
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.quantized_checkpoints import LAYOUTS, quantize_checkpoint
from tests.support.model.tiny_models import CPU_QUANTIZE, GPT2, kernels, tiny_config, tiny_decoder

pytestmark = pytest.mark.usefixtures("native_library", "one_thread")
LARGE = 1 << 30
LOGGER = "inkstream"
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2": GPT2,
    "qwen3": {"qk_norm": "head", "head_dim": 32, "tied_head": False},
    "odd sizes": {"head_dim": 20, "width": 50, "mlp_width": 33, "n_heads": 6, "vocab_size": 99},
}


@pytest.fixture(autouse=True)
def files_are_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the tests use files that are too new to be trusted or that are in memory."""
    monkeypatch.setattr(weights_store, "_SETTLED_NS", 0)
    monkeypatch.setattr(packed_cache, "is_in_memory", lambda _: False)


@pytest.fixture
def cache_log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO, LOGGER)
    return caplog


def _weights(directory: Path, *, seed: int = 0, **shape: Any) -> Path:
    decoder = tiny_decoder(tiny_config(**shape), seed=seed)
    write_files(directory, weights_files(decoder, dtype=torch.float32, eos_id=None, generation={}))
    return directory


class _Start:
    """One start of an engine: packs or restores `decoder`, and stores it if it was packed."""

    def __init__(
        self,
        weights: Directory,
        folder: Path,
        *,
        dtype: str = "bfloat16",
        quantize: Quantize = "none",
        limit: int = LARGE,
        min_bytes: int = 1,
    ) -> None:
        store = WeightsStore(folder, limit)
        hashes = FileHashes(weights, store)
        self.weights: StoredWeights = find_weights(weights, hashes.digest)
        config, pool = self.weights.config, ThreadPool(kernels(), 2)
        facts = ("inkstream-level-key.so", config, dtype, quantize)
        self.entry = PackedEntry(store, self.weights.version, hashes, *facts, min_bytes=min_bytes)
        restored = self.entry.restore(2)
        if restored is None:
            hashes.verify(self.weights.version)
        self.is_restored, self.n_read = restored is not None, 0
        kind = packed_kind(quantize)
        served: PackedWeights = QuantizedWeights(self, config, kind) if kind else self
        self.executor = NativeExecutor(kernels(), config, served, pool, dtype=dtype, blocks=8, restored=restored)
        self.decoder: PackedDecoder = self.executor.decoder
        self.thread = None if restored else self.entry.store_in_background(self.decoder.memory)
        for thread in threading.enumerate():  # including one that rewrites the metadata of the entry
            if thread.name == "packed weights":
                thread.join()
        self.entry.release()

    def read(self, name: str, dtype: str) -> Any:
        """See PackedWeights."""
        self.n_read += 1
        return self.weights.read(name, dtype)

    def packed_formats(self, name: str) -> tuple[tuple[PackedFormat, int], ...]:
        """See PackedWeights."""
        return self.weights.packed_formats(name)

    def read_packed(self, name: str) -> tuple[PackedMatrix, ...]:
        """See PackedWeights."""
        self.n_read += 1
        return self.weights.read_packed(name)

    @property
    def packed(self) -> bytes:
        """The packed weights."""
        return b"".join(packed_cache._pieces(self.decoder.memory.buffers))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*/{weights_store.PACKED}"))


def _fail(*_: object) -> NoReturn:
    raise AssertionError("the weights were read again")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantize", CPU_QUANTIZE)
def test_restored_program_has_the_bits_of_a_packed_one(
    tmp_path: Path, shape: str, dtype: str, quantize: Quantize
) -> None:
    weights = _weights(tmp_path / "weights", **SHAPES[shape])
    first, second = (_Start(weights, tmp_path / "store", dtype=dtype, quantize=quantize) for _ in range(2))
    assert not first.is_restored and first.n_read
    assert second.is_restored and not second.n_read
    assert first.packed == second.packed and any(first.packed)
    assert first.decoder.memory.used_bytes == second.decoder.memory.used_bytes
    assert [path.stat().st_size for path in _entries(tmp_path / "store")] == [first.decoder.memory.used_bytes]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("layout", ["awq g32", "pack-quantized", "gptq of 8 bits"])
def test_restored_packed_matrices_compute_the_bits_of_those_in_files(tmp_path: Path, layout: str, dtype: str) -> None:
    weights, tokens = tmp_path / "weights", [3, 1, 4, 1, 5]
    save_reference("llama-b", weights, hidden_size=256, intermediate_size=512, head_dim=64, num_attention_heads=4)
    quantize_checkpoint(weights, *LAYOUTS[layout])
    first, second = (_Start(weights, tmp_path / "store", dtype=dtype) for _ in range(2))
    assert not first.is_restored and first.n_read and second.is_restored and not second.n_read
    assert first.packed == second.packed
    logits = [logits_of(start.executor, tokens) for start in (first, second)]
    assert np.array_equal(*logits) and logits[0].std() > 0
    options: dict[str, Any] = {"dtype": dtype, "blocks": 8}
    dense = NativeExecutor(
        kernels(), first.weights.config, DenseWeights(first.weights.read), ThreadPool(kernels(), 2), **options
    )
    assert np.array_equal(logits_of(dense, tokens), logits[0])
    assert first.decoder.memory.used_bytes < dense.decoder.memory.used_bytes


def test_other_settings_and_kernels_have_other_entries(tmp_path: Path) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    forms: list[dict[str, Any]] = [{}, {"dtype": "float32"}, *({"quantize": quantize} for quantize in CPU_QUANTIZE[1:])]
    assert not any(_Start(weights, folder, **form).is_restored for form in forms)
    assert all(_Start(weights, folder, **form).is_restored for form in forms)
    store = WeightsStore(folder, LARGE)
    hashes = FileHashes(weights, store)
    found = find_weights(weights, hashes.digest)
    facts = (found.config, "bfloat16", "none")
    paths = {
        PackedEntry(store, found.version, hashes, name, *facts).path for name in ("inkstream-amx-1.so", "other.so")
    }
    assert len(paths) == 2 and not any(path.exists() for path in paths)


def test_entries_depend_on_all_code_that_reads_and_packs_weights() -> None:
    others = {
        "app/__init__.py": "is empty of code",
        "app/engine/__init__.py": "is empty of code",
        "app/engine/memory/__init__.py": "is empty of code",
        "app/engine/memory/cache_groups.py": "keys and values only",
    }
    loaded = repository_modules("model.checkpoint.stored_weights", "app.engine.cpu.packed_decoder")
    assert {"model/gguf/blocks.py", "model/checkpoint/gguf_index.py"} <= loaded
    assert not_matched(loaded, packed_cache.SOURCES) == others.keys()


def test_names_of_entries_depend_on_the_values_of_quantize(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the releases before formats had a table: an upgrade that changes no source packs nothing again."""
    monkeypatch.setattr(packed_cache, "_sources_hash", lambda: "sources")
    store = WeightsStore(tmp_path, LARGE)
    hashes, facts = FileHashes(tmp_path, store), ("inkstream-avx2-1.so", "config", "bfloat16")
    names = {each: PackedEntry(store, "0" * 64, hashes, *facts, each).path.name for each in CPU_QUANTIZE}
    assert names["none"] == "packed-f749a0d00d3ef201d8b10ee8.bin"
    assert len({*names.values()}) == len(CPU_QUANTIZE)


@pytest.mark.parametrize("is_in_place", [True, False])
def test_replaced_weights_are_never_served_from_an_older_entry(tmp_path: Path, is_in_place: bool) -> None:
    """Also if size and modification time are the same as before."""
    weights, other, folder = _weights(tmp_path / "weights"), _weights(tmp_path / "other", seed=5), tmp_path / "store"
    first = _Start(weights, folder)
    file, source = weights / "model.safetensors", other / "model.safetensors"
    before = file.stat()
    assert source.stat().st_size == before.st_size
    shutil.copyfile(source, file) if is_in_place else source.replace(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    second = _Start(weights, folder)
    assert not second.is_restored and second.packed != first.packed
    assert second.weights.version == version_of({file: sha256(file)}) != first.weights.version


def test_untrustworthy_file_times_are_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In images of EROFS or squashfs, all file times may be the same whole second, whatever the content."""
    weights, other, folder = _weights(tmp_path / "weights"), _weights(tmp_path / "other", seed=5), tmp_path / "store"
    same = FileIdentity(1, 2, 3, 4 * 10**9, 4 * 10**9, 1)
    monkeypatch.setattr(FileIdentity, "of", lambda _: same)
    first, second = _Start(weights, folder), _Start(other, folder)
    assert second.weights.version != first.weights.version and not second.is_restored


def test_weights_and_a_copy_are_read_and_hashed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    first = _Start(weights, folder)
    copy = shutil.copytree(weights, tmp_path / "copy")
    assert _Start(copy, folder).is_restored
    monkeypatch.setattr(weights_store, "sha256", _fail)
    for each in (copy, weights):
        again = _Start(each, folder)
        assert (again.packed, again.weights.version) == (first.packed, first.weights.version)


@pytest.mark.parametrize("in_memory_bytes", [24 << 20, 0])
def test_private_copy_of_the_weights_is_cached_by_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_memory_bytes: int
) -> None:
    """The engine reads weights of up to 1 GiB like this: in memory, or in the store beside the packed weights."""
    monkeypatch.setattr(weights_snapshot, "_MAX_IN_MEMORY_BYTES", in_memory_bytes)
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    for is_restored in (False, True):
        snapshot = WeightsSnapshot.open(weights)
        snapshot.keep(WeightsStore(folder, LARGE))
        start = _Start(snapshot.directory, folder)
        snapshot.close()
        assert start.is_restored == is_restored
        metadata = json.loads((start.entry.path.parent / "version.json").read_text())
        known = {FileIdentity(*identity): digest for identity, digest in metadata["files"]}
        assert all(identity.links for identity in known), "unlinked files must not be recorded"
        is_known = FileIdentity.of(weights / "model.safetensors") in known
        assert is_known == (not in_memory_bytes)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _claim_other_weights(path: Path) -> None:
    metadata = json.loads((described := path.with_name("version.json")).read_text())
    metadata["files"][0][1] = "0" * 64
    described.write_text(json.dumps(metadata))


def _remove_metadata(path: Path) -> None:
    path.with_name(path.name + ".json").unlink()


def _as_another_version_writes(path: Path) -> None:
    metadata = json.loads((described := path.with_name("version.json")).read_text())
    metadata["files"] = [[[*identity, 0], digest] for identity, digest in metadata["files"]]
    described.write_text(json.dumps(seal(metadata)))
    path.write_bytes(b"in another layout")


@pytest.mark.parametrize(
    "damage", [_flip, _truncate, _claim_other_weights, _remove_metadata, Path.unlink, _as_another_version_writes]
)
def test_a_damaged_entry_is_packed_again(tmp_path: Path, damage: Any) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    first = _Start(weights, folder)
    damage(first.entry.path)
    second = _Start(weights, folder)
    assert not second.is_restored or damage is _claim_other_weights, "the packed weights have a seal of their own"
    assert (second.packed, second.weights.version) == (first.packed, first.weights.version)
    assert _Start(weights, folder).is_restored


def _full_disk(*_: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _touched(weights: Path) -> Any:
    """Writes the weights of a decoder while their file changes."""
    pieces = packed_cache._pieces
    return lambda buffers: ((weights / "model.safetensors").touch(), pieces(buffers))[1]


OBSTACLES: dict[str, Callable[[pytest.MonkeyPatch, Path, Path], None]] = {
    "No space left on device.*--cache-dir": lambda patch, *_: patch.setattr(os, "posix_fallocate", _full_disk),
    "it is in memory": lambda patch, *_: patch.setattr(packed_cache, "is_in_memory", lambda _: True),
    "Not a directory": lambda _, __, folder: folder.parent.write_text(""),
    "changed while they were read": lambda patch, weights, _: patch.setattr(packed_cache, "_pieces", _touched(weights)),
    "too new, or have no times": lambda patch, *_: patch.setattr(weights_store, "_SETTLED_NS", 3600 * 10**9),
}


@pytest.mark.parametrize("words", OBSTACLES)
def test_failure_to_store_is_one_line_in_the_log(
    tmp_path: Path, cache_log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "cache" / "store"
    OBSTACLES[words](monkeypatch, weights, folder)
    assert _Start(weights, folder).n_read
    assert {path.name for path in folder.glob("*")} <= {".lock"}
    (line,) = cache_log.messages
    assert re.search(words, line)


def test_entries_writable_by_others_are_not_read(tmp_path: Path, cache_log: pytest.LogCaptureFixture) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    first = _Start(weights, folder)
    first.entry.path.chmod(0o622)
    assert not _Start(weights, folder).is_restored
    first.entry.path.chmod(0o600)
    assert _Start(weights, folder).is_restored, "positive control"
    folder.chmod(0o777)
    cache_log.clear()
    assert not _Start(weights, folder).is_restored
    (line,) = cache_log.messages
    assert "chmod go-w" in line


def test_packed_weights_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    (folder,) = _Start(_weights(tmp_path / "weights"), tmp_path / "store").entry.path.parents[:1]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_concurrent_starts_store_one_entry(tmp_path: Path) -> None:
    weights, folder = _weights(tmp_path / "weights"), tmp_path / "store"
    starts: list[_Start] = []
    threads = [threading.Thread(target=lambda: starts.append(_Start(weights, folder))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(starts) == 6 and len({start.packed for start in starts}) == 1
    assert len(_entries(folder)) == 1 and _Start(weights, folder).is_restored


def test_least_recently_used_entries_are_evicted(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    weights = [_weights(tmp_path / str(seed), seed=seed) for seed in range(3)]
    first = _Start(weights[0], folder)
    size = first.entry.path.stat().st_size
    second = _Start(weights[1], folder)
    for age, start in enumerate((second, first)):
        for path in (start.entry.path, start.entry.path.parent / ".in-use"):
            os.utime(path, (age, age))
    assert _Start(weights[1], folder).is_restored, "now the first one is the least recently used"
    third = _Start(weights[2], folder, limit=2 * size + 2048)
    assert {*_entries(folder)} == {each.entry.path for each in (second, third)}


def test_entry_beyond_the_limit_is_not_stored(tmp_path: Path, cache_log: pytest.LogCaptureFixture) -> None:
    assert _Start(_weights(tmp_path / "weights"), tmp_path / "store", limit=1000).thread is None
    assert not (tmp_path / "store").exists() and "--packed-cache-bytes" in cache_log.text


def test_small_programs_are_not_stored(tmp_path: Path) -> None:
    assert _Start(_weights(tmp_path / "weights"), tmp_path / "store", min_bytes=packed_cache.MIN_BYTES).thread is None
