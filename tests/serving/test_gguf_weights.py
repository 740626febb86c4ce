"""A GGUF file in place of a weights directory: kept as it was, reloaded when it is replaced, served and checked."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import httpx
import pytest

from app.__main__ import main
from app.common.weights_store import WeightsStore
from app.serving.gguf_tokenizers import GgufTokenizers
from app.serving.weights_snapshot import WeightsSnapshot, take_fingerprint, what_is_missing, without_links
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError, sha256
from model.tokenizer import gguf_tokenizer
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.tiny_gguf import tiny_gguf, tiny_series
from tests.support.servers import running_server


@pytest.mark.parametrize("has_store", [False, True], ids=["memory", "store"])
def test_snapshot_outlives_a_file_that_is_overwritten_in_place(
    has_store: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    digest, snapshot = sha256(path), WeightsSnapshot.open(path)
    if has_store:
        monkeypatch.setattr("app.serving.weights_snapshot._MAX_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr("app.serving.stored_copies.is_in_memory", lambda _: False)
    snapshot.keep(WeightsStore.of(tmp_path / "cache", 1 << 30) if has_store else None)
    path.write_bytes(b"overwritten")
    weights = find_weights(snapshot.directory)
    assert weights.version == digest
    assert weights.read("embedding", "float32").shape == (320, 64)
    assert Tokenizer.load(snapshot.directory).encode("the owl")
    opened = {Path(where): os.readlink(where) for where in snapshot.version.files.values()}  # noqa: PTH115
    assert all(where.exists() for where in opened)
    snapshot.close()
    left = [where for where, kept in opened.items() if where.exists() and os.readlink(where) == kept]  # noqa: PTH115
    assert not left, "a descriptor may have been used again, but not for the same file"


def test_snapshot_of_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF")
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(CheckpointError, match=r"bad\.gguf: is truncated"):
        WeightsSnapshot.open(path)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert "is truncated" in what_is_missing(path)


def test_fingerprint_changes_with_the_file_and_with_each_of_a_series(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    first = take_fingerprint(path)
    assert first.files and what_is_missing(path) == "" and take_fingerprint(path) == first
    shutil.copy(path, tmp_path / "new")
    (tmp_path / "new").rename(path)
    assert take_fingerprint(path) != first
    folder = tmp_path / "series"
    folder.mkdir()
    paths = tiny_series(folder)
    whole = take_fingerprint(paths[0])
    assert [name for name, *_ in whole.files] == [path.name for path in paths]
    os.utime(paths[1], (1, 1))
    assert take_fingerprint(paths[0]) != whole
    paths[1].unlink()
    assert take_fingerprint(paths[0]).files == () and "lacks" in what_is_missing(paths[0])


def test_links_are_followed_but_to_blobs_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "real.gguf").touch()
    (tmp_path / "blob").touch()
    for name, target in (("a.gguf", "real.gguf"), ("b.gguf", "blob")):
        (tmp_path / name).symlink_to(target)
    assert without_links(tmp_path / "a.gguf") == tmp_path / "real.gguf"
    assert without_links(tmp_path / "b.gguf") == tmp_path / "b.gguf"


def test_check_describes_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "tiny-Q8_0.gguf")
    assert main(["check", str(path)]) == 0
    lines = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    found = dict(lines)
    assert found["name"] == "tiny-Q8_0" and found["family"] == "llama" and found["version"] == sha256(path)
    assert "matrices of 8 bits in groups of 32" in found["packed"] and found["chat"] == "has a template"
    path.write_bytes(path.read_bytes()[:1000])
    assert main(["check", str(path)]) == 2
    assert f"error: {path}: is truncated" in capsys.readouterr().err


def test_doctor_finds_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    main(["doctor", "--weights", str(path)])
    assert f"{path}, 0 MiB; inkstream check {path} reads all of it" in capsys.readouterr().out


@pytest.mark.slow
def test_a_file_is_served_and_a_replaced_one_is_reloaded(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    body = {"prompt": "Once upon", "max_tokens": 4, "temperature": 0}
    with running_server(tmp_path, path) as server:
        first = httpx.post(f"{server.url}/v1/completions", json=body).json()
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert first["choices"][0]["text"] and model["id"] == "tiny" and model["weights_version"] == sha256(path)
        other = tiny_gguf(tmp_path / "other.gguf", width=96, head_dim=24)
        other.rename(path)
        server.process.send_signal(signal.SIGHUP)
        assert server.wait_for(lambda: server.metric('weights_reloads_total{outcome="switched"}') == 1)
        model = httpx.get(f"{server.url}/v1/models").json()["data"][0]
        assert model["weights_version"] == sha256(path)
        assert httpx.post(f"{server.url}/v1/completions", json=body).json()["choices"][0]["text"]
        path.write_bytes(b"GGUF")
        server.process.send_signal(signal.SIGHUP)
        assert server.has_logged("new weights are refused", "is truncated")
        assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 200


def test_tokenizer_files_are_kept_between_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, cache = tiny_gguf(tmp_path / "tiny.gguf"), tmp_path / "cache"
    made: list[int] = []
    original = gguf_tokenizer.tokenizer_files
    monkeypatch.setattr(gguf_tokenizer, "tokenizer_files", lambda *given: made.append(1) or original(*given))

    def contents() -> dict[str, bytes]:
        snapshot = WeightsSnapshot.open(path, GgufTokenizers(cache))
        try:
            files = snapshot.version.files
            return {name: Path(where).read_bytes() for name, where in files.items() if not name.endswith(".gguf")}
        finally:
            snapshot.close()

    first = contents()
    assert contents() == first and len(made) == 1
    (kept,) = (cache / "gguf-tokenizers").glob("*.json")
    kept.write_text("damaged")
    assert contents() == first and len(made) == 2
    kept.chmod(0o666)  # by others, too
    assert contents() == first and len(made) == 3
    flag = b"tokenizer.ggml.add_bos_token" + (7).to_bytes(4, "little")
    path.write_bytes(path.read_bytes().replace(flag + b"\0", flag + b"\1"))
    assert contents()["tokenizer.json"] != first["tokenizer.json"] and len(made) == 4
    for number in range(40):
        GgufTokenizers(cache).remember(f"{number:064}", lambda: {"a": b"b"})
    assert len(list((cache / "gguf-tokenizers").glob("*.json"))) == 16


def test_a_cache_that_cannot_be_written_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for _ in range(2):
        assert GgufTokenizers(tmp_path / "file").remember("0" * 64, lambda: {"a": b"b"}) == {"a": b"b"}
