"""Weights by name: downloads from a hub, resumed downloads, and error messages."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import httpx
import httpx2
import pytest
import torch
from huggingface_hub import constants

from model.checkpoint import hub_download, hub_transfer
from model.checkpoint.gguf_directory import find_gguf, opened_weights
from model.checkpoint.hub import hub_model, resolve_weights, source_of
from model.checkpoint.hub_metadata import RemoteFile
from model.checkpoint.stored_weights import find_weights
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError, read_json
from model.train.finetune import load_base
from tests.support import ROOT
from tests.support.fake_hub import TOKEN, FakeHub, fake_hub
from tests.support.model.tiny_gguf import tiny_gguf, tiny_series
from tests.support.model.tiny_models import tiny_weights

NAME = "org/tiny"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a tiny model, including some that are not needed."""
    directory = tiny_weights(tmp_path_factory.mktemp("weights"))
    unneeded = {
        "README.md": b"#",
        "pytorch_model.bin": b"\x80",
        "onnx/model.onnx": b"1",
        "consolidated.safetensors": b"2",
    }
    return {path.name: path.read_bytes() for path in directory.iterdir()} | unneeded


@pytest.fixture
def hub(files: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """A fake hub with the model, and an empty cache."""
    with fake_hub() as running:
        running.repositories[NAME] = dict(files)
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(hub_transfer, "_PAUSES", (0.01,) * 3)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.chdir(tmp_path)
        yield running


RESOLVE = (
    "import sys; from model.checkpoint.hub import resolve_weights\n"
    "print(resolve_weights(sys.argv[1], lambda line: print(line, file=sys.stderr, flush=True)))"
)
"""Prints the directory of a name."""
VERB = "import runpy; runpy.run_module('app', run_name='__main__', alter_sys=True)"
"""Runs a verb."""


def start(hub: FakeHub, tmp_path: Path, program: str, *arguments: str) -> subprocess.Popen[str]:
    """Starts a process that uses this hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(
        command, env=variables, cwd=tmp_path, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def resolve(name: str = NAME) -> tuple[Path, list[str]]:
    """Resolves a name; returns the directory and the log lines."""
    lines: list[str] = []
    return resolve_weights(name, lines.append), lines


def problem(name: str = NAME) -> str:
    """The error message for a name that cannot be resolved."""
    with pytest.raises(CheckpointError) as caught:
        resolve(name)
    return str(caught.value)


def test_model_is_downloaded_once_with_only_the_needed_files(hub: FakeHub, files: dict[str, bytes]) -> None:
    directory, lines = resolve()
    check_layout(directory)
    assert {path.name for path in directory.iterdir()} == {
        "config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"
    } & files.keys()  # fmt: skip
    assert all(path.read_bytes() == files[path.name] for path in directory.iterdir())
    source = source_of(directory)
    assert source and (source.repository, source.commit) == (NAME, hub.commit(NAME))
    assert lines[0].startswith(f"downloading {NAME}: ")
    assert lines[-1].startswith(f"downloaded {NAME}, commit {hub.commit(NAME)[:12]}")
    hub.requests.clear()
    assert resolve() == (directory, [])
    assert [request.path for request in hub.requests] == [f"/api/models/{NAME}/revision/main"]
    hub.requests.clear()
    assert resolve(f"{NAME}@{hub.commit(NAME)}") == (directory, [])  # a commit never changes, so no request is needed
    assert not hub.requests


def test_new_commit_downloads_only_changed_files(hub: FakeHub) -> None:
    old, _ = resolve()
    hub.repositories[NAME]["generation_config.json"] = b'{"temperature": 0.5}'
    hub.requests.clear()
    new, _ = resolve()
    assert new != old
    assert [Path(request.path).name for request in hub.downloads("resolve|storage")] == ["generation_config.json"]


@pytest.mark.usefixtures("hub")
def test_link_of_a_killed_process_with_this_id_does_not_prevent_the_next_start() -> None:
    directory, _ = resolve()
    link = directory / "config.json"
    link.rename(directory / f".config.json.{os.getpid()}.tmp")
    assert resolve()[0] == directory
    assert link.is_symlink() and link.is_file()


def test_shards_are_taken_from_the_index(hub: FakeHub, files: dict[str, bytes]) -> None:
    shards = {f"model-0000{i}-of-00002.safetensors": bytes([i]) * 120_000 for i in (1, 2)}
    index = {"weight_map": {f"tensor{i}": name for i, name in enumerate(shards)}}
    sharded = {name: content for name, content in files.items() if name != "model.safetensors"}
    hub.repositories[NAME] = {**sharded, **shards, "model.safetensors.index.json": json.dumps(index).encode()}
    directory, _ = resolve()
    assert {path.name for path in directory.glob("*.safetensors")} == shards.keys()
    del hub.repositories[NAME]["model-00002-of-00002.safetensors"]
    assert "names model-00002-of-00002.safetensors, which the repository does not have" in problem()


@pytest.mark.parametrize("ignores_ranges", [False, True])
def test_download_resumes_after_a_lost_connection(hub: FakeHub, ignores_ranges: bool) -> None:
    hub.cut_after, hub.ignores_ranges = [50_000, 70_000], ignores_ranges
    directory, _ = resolve()
    assert (directory / "model.safetensors").read_bytes() == hub.repositories[NAME]["model.safetensors"]
    ranges = [request.range for request in hub.downloads("storage")]
    assert len(ranges) == 3
    assert ranges[0] == ""
    assert all(0 < int(text[6:-1]) < 200_000 for text in ranges[1:])


def test_server_errors_are_retried_for_metadata_and_downloads(hub: FakeHub) -> None:
    hub.failures = [("/api/models", 429), ("/api/models", 502), ("/config.json", 500), ("/storage", 503)]
    directory, _ = resolve()
    assert (directory / "model.safetensors").read_bytes() == hub.repositories[NAME]["model.safetensors"]
    assert not hub.failures


@pytest.mark.slow
def test_retries_are_logged_once_in_our_format(hub: FakeHub, tmp_path: Path) -> None:
    hub.failures = [("/storage", 429)]
    quiet = RESOLVE.replace("print(line, file=sys.stderr, flush=True)", "None")
    process = start(hub, tmp_path, f"from app.common import logs; logs.set_up('info', 'json')\n{quiet}", NAME)
    _, errors = process.communicate(timeout=60)
    lines = errors.splitlines()
    assert process.returncode == 0, errors
    assert len([line for line in lines if "answers 429; trying again in 0.5 s" in line]) == 1
    assert all(json.loads(line) for line in lines)


def test_download_is_retried_while_its_file_grows(
    hub: FakeHub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts: list[int] = []
    ends = 50_000

    def resets(url: str, headers: dict[str, str], output: BinaryIO, file: RemoteFile) -> None:
        position = output.tell()
        if file.name == "model.safetensors" and position < 60_000:
            attempts.append(position)
            output.write(files[file.name][position : min(position + 10_000, ends)])
            raise httpx2.ReadError("reset")
        append_rest(url, headers, output, file)

    append_rest = hub_transfer._append_rest
    monkeypatch.setattr(hub_transfer, "_append_rest", resets)
    monkeypatch.setattr(hub_transfer, "_LEAST_BYTES", 10_000)
    assert f"cannot reach {hub.url} (reset)" in problem()
    assert attempts == [0, 10_000, 20_000, 30_000, 40_000, 50_000, 50_000, 50_000]
    ends = 60_000
    assert (resolve()[0] / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_damaged_file_is_refused_and_downloaded_again(hub: FakeHub) -> None:
    hub.damaged = 1
    assert "safetensors arrived damaged" in problem()
    assert not list(Path(constants.HF_HUB_CACHE).rglob("model.safetensors"))
    directory, _ = resolve()
    assert (directory / "model.safetensors").read_bytes() == hub.repositories[NAME]["model.safetensors"]


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (200, "{url} does not answer like the Hub (its model info is not JSON): check HF_ENDPOINT"),
        (418, "{url} answers 418 for {url}/api/models/org/tiny/revision/main"),
        (429, "{url} answers 429 for {url}/api/models/org/tiny/revision/main"),
    ],
)
def test_server_other_than_a_hub_is_reported(hub: FakeHub, status: int, words: str) -> None:
    hub.status = status
    assert problem() == f"{NAME}: {words.format(url=hub.url)}"


def test_token_is_sent_only_to_the_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.gated, hub.private = {NAME}, set()
    message = problem()
    assert f"the model is gated: accept its license at {hub.url}/{NAME}, and set HF_TOKEN" in message
    monkeypatch.setenv("HF_TOKEN", "hf_a_wrong_one")
    assert "gated" in problem()
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve()[0].is_dir()
    assert {request.token for request in hub.downloads("^/storage")} == {""}
    assert TOKEN in {request.token for request in hub.downloads("/resolve/")}


def test_errors_name_a_remedy(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "no directory of this name here, and no such model at" in problem("org/none")
    hub.private = {NAME}
    assert "if it is private, set HF_TOKEN" in problem()
    hub.private = set()
    assert "has no branch, tag or commit 'v9'" in problem(f"{NAME}@v9")
    for wrong in (f"{NAME}@", "a..b/c", f"{NAME}@/etc/x", f"{NAME}@a//b", f"{NAME}@a/", f"{NAME}@a\x01"):
        assert "write org/name, or org/name@" in problem(wrong)
    assert "is a URL; give the model's name: org/name" in problem(f"https://huggingface.co/{NAME}/tree/v2")
    assert "org/a--b: Cannot have -- or .." in problem("org/a--b")
    monkeypatch.setattr(hub_download.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))
    assert "no room on the disk: " in problem()
    assert "set HF_HOME to another disk" in problem()
    assert not hub.downloads("storage")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"1"}, "is an adapter: merge it into its base"),
        ({"config.json": b"{}", "pytorch_model.bin": b"1"}, "pytorch_model.bin is not read: a pickle"),
        ({"config.json": b"{}", "folder/tiny.bin": b"1"}, "no model.safetensors"),
    ],
)
def test_repositories_without_safetensors_name_the_remedy(hub: FakeHub, names: dict[str, bytes], words: str) -> None:
    hub.repositories[NAME], hub.card = names, {"base_model": ["org/original"]}
    message = problem()
    assert words in message
    assert "names org/original as its base model" in message
    assert not hub.downloads("resolve|storage")


def test_a_base_model_with_an_adapter_is_refused(hub: FakeHub) -> None:
    hub.repositories[NAME]["adapter_config.json"] = b"{}"
    message = problem()
    assert message.startswith(f"{NAME}: the repository has adapter_config.json: the adapter would not be applied")
    assert not hub.downloads("resolve|storage")


def test_unsupported_architecture_is_refused_before_its_weights_are_downloaded(hub: FakeHub) -> None:
    hub.repositories[NAME]["config.json"] = b'{"model_type": "mamba"}'
    assert "model_type 'mamba' is not supported; supported: llama, " in problem()
    assert not hub.downloads("storage")


def test_cache_is_used_without_a_network(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert problem() == f"{NAME}: HF_HUB_OFFLINE is set, which keeps it from the network"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    directory, _ = resolve()
    end = f"; using commit {hub.commit(NAME)[:12]} from the cache {constants.HF_HUB_CACHE}"
    hub.status = 503
    assert resolve()[1][0].endswith(f"answers 503 for {hub.url}/api/models/{NAME}/revision/main{end}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve() == (directory, [f"{NAME}: HF_HUB_OFFLINE is set, which keeps it from the network{end}"])
    assert "HF_HUB_OFFLINE is set" in problem(f"{NAME}@v2")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "cannot reach http://127.0.0.1:9" in resolve()[1][0]
    (directory / "model.safetensors").unlink()  # another program downloaded only some files
    assert "cannot reach http://127.0.0.1:9" in problem()


def test_cache_is_used_when_the_hub_is_too_slow(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    directory, _ = resolve()
    monkeypatch.setattr(hub_transfer, "_WINDOW", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # completes connections, and never answers
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        found, (line,) = resolve()
    assert found == directory
    assert "sends less than 32768 bytes in 0.3 s" in line and f"using commit {hub.commit(NAME)[:12]} from the" in line


def test_local_directory_takes_precedence_over_a_model_of_the_same_name(hub: FakeHub, tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir(parents=True)
    directory, lines = resolve()
    assert directory == Path(NAME)
    assert lines == [f"{NAME}: this directory is used, not a model of the Hugging Face Hub with the same name"]
    assert not hub.requests
    for path in ("weights", "./org/none", "/org/none", "a/b/c", "."):
        assert hub_model(path) is None


@pytest.mark.usefixtures("hub")
def test_shared_blobs_of_the_cache_are_read() -> None:
    """Files from `hf download` may be links to links, because all models of a cache share their contents."""
    directory, _ = resolve()
    blob = (directory / "config.json").resolve()
    shared = Path(constants.HF_HUB_CACHE) / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(shared)
    check_layout(directory)
    assert read_json(directory / "config.json")["vocab_size"]


def wait_for_partial(tmp_path: Path, least: int = 1) -> Path:
    """Waits until the partial file of the weights (named by SHA-256) has at least this many bytes."""
    for _ in range(600):
        for path in (tmp_path / "home").rglob(f"{'?' * 64}.inkstream.incomplete"):
            if path.stat().st_size >= least:
                return path
        time.sleep(0.05)
    raise AssertionError("no partial file appeared")


@pytest.mark.slow
def test_interrupted_verb_resumes_the_download_and_names_the_commit(hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds_per_block = 0.2
    process = start(hub, tmp_path, VERB, "check", NAME)
    partial = wait_for_partial(tmp_path)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors
    assert "stopped; what has arrived is kept, and the same command continues" in errors
    size = partial.stat().st_size
    hub.seconds_per_block = 0.0
    second = start(hub, tmp_path, VERB, "check", NAME)
    output, errors = second.communicate(timeout=120)
    assert second.returncode == 0, errors
    assert hub.downloads("storage")[-1].range == f"bytes={size}-"
    assert f"commit       {hub.commit(NAME)} of {NAME}" in output


@pytest.mark.slow
def test_service_reports_a_download_and_ctrl_c_ends_it_quietly(hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds_per_block = 0.2
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = start(hub, tmp_path, VERB, "serve", "--weights", NAME, "--port", str(port))
    wait_for_partial(tmp_path, least=0)
    for _ in range(2):
        assert httpx.get(f"http://127.0.0.1:{port}/health/ready").json()["phase"] == "downloading"
        assert httpx.post(f"http://127.0.0.1:{port}/complete", content=b"x" * 200_000).status_code == 503
        process.send_signal(signal.SIGHUP)  # a reload, once there is something to reload
        time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1]
    assert process.returncode == 130 and "Traceback" not in errors


@pytest.mark.slow
def test_two_processes_share_one_download(hub: FakeHub, tmp_path: Path) -> None:
    hub.seconds_per_block = 0.1
    processes = [start(hub, tmp_path, RESOLVE, NAME) for _ in range(2)]
    results = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert results[0][0] == results[1][0]
    assert len(hub.downloads("storage")) == 1


def test_training_starts_from_a_hub_model(hub: FakeHub, tmp_path: Path) -> None:
    base = load_base(argparse.Namespace(init=NAME), tmp_path / "out", resumes=False)
    assert base and base.directory.name == hub.commit(NAME)
    assert base.decoder(torch.device("cpu")).n_params


@pytest.fixture(scope="module")
def gguf_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a repository with two quantizations of a tiny model, one of them as a series in a folder."""
    folder = tmp_path_factory.mktemp("gguf")
    files = {
        "tiny-Q8_0.gguf": tiny_gguf(folder / "tiny-Q8_0.gguf").read_bytes(),
        "README.md": b"#",
        "config.json": b"{}",
    }
    for path in tiny_series(folder):
        files[f"F32/{path.name.replace('tiny', 'tiny-F32')}"] = path.read_bytes()
    return files


def test_one_quantization_of_a_repository_is_downloaded(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = gguf_files
    path, lines = resolve(f"{NAME}:Q8_0")
    assert path.name == "tiny-Q8_0.gguf" and path.read_bytes() == gguf_files["tiny-Q8_0.gguf"]
    assert lines[0].startswith(f"downloading {NAME}:Q8_0: tiny-Q8_0.gguf, ")
    assert len(hub.downloads("resolve")) == 1
    source = source_of(path)
    assert source and (source.repository, source.commit) == (NAME, hub.commit(NAME))
    with opened_weights(path) as directory:
        assert find_weights(directory).packed
    hub.requests.clear()
    assert resolve(f"{NAME}:q8_0") == (path, [])
    assert not hub.downloads("resolve")


def test_a_series_in_a_folder_is_downloaded_whole(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = gguf_files
    path, _ = resolve(f"{NAME}@{hub.commit(NAME)}:F32")
    assert [each.name for each in find_gguf(path)] == ["tiny-F32-00001-of-00002.gguf", "tiny-F32-00002-of-00002.gguf"]
    source = source_of(path)
    assert source and source.repository == NAME
    with opened_weights(path) as directory:
        assert len(find_weights(directory).hashes) == 2


def test_a_repository_of_gguf_files_lists_the_choices(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = gguf_files
    assert "2 GGUF files that fit; add one of these after a colon: F32, Q8_0" in problem()
    assert "no GGUF file of Q4_K_M; add one of these after a colon: F32, Q8_0" in problem(f"{NAME}:Q4_K_M")
    assert not hub.downloads("resolve|storage")


def test_the_only_gguf_file_of_a_repository_needs_no_quantization(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = {"tiny-Q8_0.gguf": gguf_files["tiny-Q8_0.gguf"]}
    assert resolve()[0].name == "tiny-Q8_0.gguf"


def test_safetensors_are_meant_without_a_quantization(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] |= {"tiny-Q8_0.gguf": gguf_files["tiny-Q8_0.gguf"]}
    directory, _ = resolve()
    check_layout(directory)
    assert not (directory / "tiny-Q8_0.gguf").exists()
    assert resolve(f"{NAME}:Q8_0")[0] == directory / "tiny-Q8_0.gguf"
    assert resolve()[0] == directory


def test_a_cached_gguf_file_does_not_stand_for_a_commit_with_safetensors(
    hub: FakeHub, gguf_files: dict[str, bytes]
) -> None:
    hub.repositories[NAME] |= {"tiny-Q8_0.gguf": gguf_files["tiny-Q8_0.gguf"]}
    file, commit = resolve(f"{NAME}:Q8_0")[0], hub.commit(NAME)
    hub.status = 503
    assert resolve(f"{NAME}@{commit}:Q8_0") == (file, [])
    for name in (NAME, f"{NAME}@{commit}"):
        found, (line,) = resolve(name)
        assert found == file
        assert line.endswith(f"; using tiny-Q8_0.gguf of commit {commit[:12]} from the cache {constants.HF_HUB_CACHE}")
    hub.status = 0
    directory = resolve(f"{NAME}@{commit}")[0]
    assert directory == file.parent and (directory / "model.safetensors").exists()
    hub.status = 503
    assert resolve(f"{NAME}@{commit}") == (directory, [])


def test_a_downloaded_gguf_file_is_used_without_a_network(hub: FakeHub, gguf_files: dict[str, bytes]) -> None:
    hub.repositories[NAME] = gguf_files
    path, _ = resolve(f"{NAME}:F32")
    hub.status = 503
    found, lines = resolve(f"{NAME}:F32")
    assert found == path and "from the cache" in lines[0]
    assert "answers 503" in problem(f"{NAME}:Q8_0")
    hub.status = 0
    find_gguf(path)[1].unlink()
    hub.status = 503
    assert "answers 503" in problem(f"{NAME}:F32")
