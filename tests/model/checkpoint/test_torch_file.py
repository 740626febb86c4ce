"""Files of torch.save(): what they hold is found without running what they name, in memory and time with limits."""

from __future__ import annotations

import io
import os
import pickle
import random
import socket
import struct
import subprocess
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from app.cli import torch_file_sandbox
from app.cli.torch_file_sandbox import read_characters, read_torch_file
from model.checkpoint.stored_numbers import mapped
from model.checkpoint.torch_file import Question, TorchFile, TorchTensor, answer_question, decode_file
from model.checkpoint.torch_source import _tensors
from model.files import CheckpointError
from tests.support import ROOT

FORMATS = {"archive": True, "legacy": False}


def saved(path: Path, content: Any, *, is_archive: bool = True) -> Path:
    torch.save(content, path, _use_new_zipfile_serialization=is_archive)
    return path


def state() -> dict[str, torch.Tensor]:
    """All kinds of numbers, a parameter, views, a transposed matrix, scalars, empty tensors, shared numbers."""
    torch.manual_seed(0)
    base = torch.randn(6, 8)
    return OrderedDict(
        first=base,
        shared=base,
        transposed=base.T,
        view=base[2:5, 1:7],
        rows=base[::2],
        parameter=nn.Parameter(torch.randn(3)),
        half=torch.randn(4).half(),
        brain=torch.randn(4, 3).bfloat16(),
        scalar=torch.tensor(2.5),
        empty=torch.empty(0, 4),
    )


@pytest.mark.parametrize("is_archive", FORMATS.values(), ids=FORMATS)
def test_every_tensor_is_found_where_it_lies(tmp_path: Path, is_archive: bool) -> None:
    path, expected = saved(tmp_path / "x.bin", state(), is_archive=is_archive), state()
    file = read_torch_file(path)
    stored = _tensors(path, file.tensors)
    assert list(stored) == list(expected) and file.arguments is None
    for name, tensor in expected.items():
        numbers = torch.from_numpy(mapped(stored[name]).copy())
        numbers = numbers.view(torch.bfloat16) if tensor.dtype == torch.bfloat16 else numbers
        assert torch.equal(numbers, tensor.detach()), name


@pytest.mark.parametrize("is_archive", FORMATS.values(), ids=FORMATS)
def test_the_checkpoint_of_a_training_is_read_to_its_model(tmp_path: Path, is_archive: bool) -> None:
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    arguments = {"n_layer": 2, "bias": False, "dropout": 0.1, "name": None}
    content = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "model_args": arguments,
        "best_val_loss": torch.tensor(1.5),
        "config": {"out_dir": "out", "compile": True},
    }
    file = read_torch_file(saved(tmp_path / "ckpt.pt", content, is_archive=is_archive))
    assert [tensor.name for tensor in file.tensors] == ["weight", "bias"] and file.arguments == arguments


class _Call:
    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._reduced = function, arguments

    def __reduce__(self) -> Any:
        return self._reduced


def _archive(path: Path, content: bytes, **records: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x/data.pkl", content)
        for name, record in records.items():
            archive.writestr(f"x/{name.replace('_', '/')}", record)
    return path


def _tensor(size: tuple[Any, ...], stride: tuple[Any, ...], first: Any = 0, count: Any = 4, key: Any = "0") -> bytes:
    """The pickle of one tensor of these fields, which torch would refuse to save."""

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj: Any) -> Any:
            return ("storage", torch.FloatStorage, key, "cpu", count) if obj is torch else None

    buffer = io.BytesIO()
    rebuilt = _Call(torch._utils._rebuild_tensor_v2, torch, first, size, stride, False, OrderedDict())
    Pickler(buffer, 2).dump({"w": rebuilt})
    return buffer.getvalue()


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    """In an archive, in the legacy layout, and in a meta.pkl."""
    mark = tmp_path / "mark"
    attacks: list[_Call] = [
        _Call(os.system, f"touch {mark}"),
        _Call(eval, f"open({str(mark)!r}, 'w')"),
        _Call(subprocess.Popen, ["touch", str(mark)]),
        _Call(getattr, "x", "upper"),
        _Call(socket.create_connection, ("127.0.0.1", 1)),
        _Call(torch.load, str(mark)),
    ]
    for index, attack in enumerate(attacks):
        for is_archive in (True, False):
            path = saved(tmp_path / f"{index}{is_archive}.bin", {"w": attack}, is_archive=is_archive)
            with pytest.raises(CheckpointError, match=r"names [\w.]+, which could run code: only tensors"):
                read_torch_file(path)
        meta = tmp_path / f"{index}.pkl"
        meta.write_bytes(pickle.dumps({"stoi": attack}))
        with pytest.raises(CheckpointError, match="which could run code"):
            read_characters(meta)
    assert not mark.exists()
    torch.load(tmp_path / "0True.bin", weights_only=False)
    assert mark.exists(), "the control runs"


_HOSTILE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "a huge shape": (lambda p: _archive(p, _tensor((2**40, 2**7), (1, 1)), data_0=bytes(16)), "fewer numbers"),
    "a number for ever": (lambda p: _archive(p, _tensor((2**40,), (0,)), data_0=bytes(16)), "are repeated"),
    "a negative stride": (lambda p: _archive(p, _tensor((4,), (-1,)), data_0=bytes(16)), "invalid size"),
    "a negative start": (lambda p: _archive(p, _tensor((4,), (1,), -4), data_0=bytes(16)), "invalid size"),
    "a huge start": (lambda p: _archive(p, _tensor((4,), (1,), 2**47), data_0=bytes(16)), "fewer numbers"),
    "an enormous start": (lambda p: _archive(p, _tensor((4,), (1,), 2**200), data_0=bytes(16)), "invalid size"),
    "a size of text": (lambda p: _archive(p, _tensor(("4",), (1,)), data_0=bytes(16)), "invalid size"),
    "more strides": (lambda p: _archive(p, _tensor((4,), (1, 1)), data_0=bytes(16)), "dimensions"),
    "many dimensions": (lambda p: _archive(p, _tensor((1,) * 99, (1,) * 99), data_0=bytes(16)), "99 dimensions"),
    "no numbers": (lambda p: _archive(p, _tensor((4,), (1,))), "no numbers of w"),
    "a key of another kind": (lambda p: _archive(p, _tensor((4,), (1,), key=7), data_7=bytes(16)), "not read"),
    "few numbers": (lambda p: _archive(p, _tensor((4,), (1,)), data_0=bytes(12)), "fewer numbers than w"),
    "a list": (lambda p: saved(p, [torch.ones(2)]), "no state dict"),
    "one tensor": (lambda p: saved(p, torch.ones(2)), "no state dict"),
    "nothing": (lambda p: saved(p, {}), "no state dict"),
    "a number": (lambda p: saved(p, {"a": 3}), "holds 'a', a int"),
    "a name that is a number": (lambda p: saved(p, {3: torch.ones(2)}), "holds 3"),
    "deep nesting": (lambda p: _archive(p, b"\x80\x02" + b"(" * 10 + b"]" * 10 + b"."), "no state dict|damaged"),
    "a trainer's file": (lambda p: saved(p, {"model": {"a": torch.ones(2)}, "epoch": 3}), "no model_args"),
    "arguments with a tensor": (lambda p: saved(p, {"model": {"a": torch.ones(2)}, "model_args": {"n": [1]}}), "plain"),
    "a whole module": (lambda p: saved(p, nn.Linear(2, 2)), "which could run code"),
    "an empty file": (lambda p: p.touch() or p, "is damaged"),
    "zeros": (lambda p: (p.write_bytes(bytes(5000)), p)[1], "is damaged"),
    "text": (lambda p: (p.write_text("version https://git-lfs"), p)[1], "is damaged"),
    "an archive of something else": (lambda p: (zipfile.ZipFile(p, "w").writestr("a", "b"), p)[1], "archive"),
    "a large text": (lambda p: _archive(p, b"\x80\x04\x8d" + struct.pack("<Q", 2**40) + b"x"), "damaged|memory"),
    "a large memo": (lambda p: _archive(p, b"\x80\x02]r\xff\xff\xff\x7f."), "memory|no state dict|damaged"),
    "a long number": (lambda p: _archive(p, b"\x80\x02\x8b" + struct.pack("<i", 2**31 - 1) + b"1"), "damaged|memory"),
}


@pytest.mark.parametrize("name", _HOSTILE)
def test_a_hostile_file_is_one_line(tmp_path: Path, name: str) -> None:
    make, words = _HOSTILE[name]
    path = make(tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=words) as caught:
        read_torch_file(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_compressed_archives_and_programs_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x/data.pkl", bytes(1 << 20))
    with pytest.raises(CheckpointError, match="compressed archive"):
        read_torch_file(path)
    _archive(path, pickle.dumps({}), **{"constants.pkl": b""})
    with pytest.raises(CheckpointError, match="TorchScript"):
        read_torch_file(path)
    _archive(path, pickle.dumps({}), byteorder=b"big")
    with pytest.raises(CheckpointError, match="another byte order"):
        read_torch_file(path)


@pytest.mark.parametrize("is_archive", FORMATS.values(), ids=FORMATS)
def test_damaged_files_are_one_line_or_the_same_tensors_elsewhere(tmp_path: Path, is_archive: bool) -> None:
    """In this process, which the damage must not reach: 600 mutations and every truncation of some step."""
    whole = saved(tmp_path / "x.bin", state(), is_archive=is_archive).read_bytes()
    drawn, path = random.Random(5), tmp_path / "y.bin"
    contents = [whole[:cut] for cut in range(0, len(whole), 97)]
    for _ in range(600):
        changed = bytearray(whole)
        for _ in range(drawn.choice((1, 1, 3, 20))):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        contents.append(bytes(changed))
    problems = 0
    for content in contents:
        path.write_bytes(content)
        try:
            found = decode_file(path, answer_question(Question(path=str(path)).encode(), lambda: None))
            tensors = _tensors(path, found.tensors)
        except CheckpointError:
            problems += 1
            continue
        for stored in tensors.values():
            mapped(stored)
    assert problems > len(contents) / 5


def test_an_endless_loop_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that doubles 60 times would take years and memory; here memory ends first, or else the time."""
    monkeypatch.setattr(torch_file_sandbox, "_SECONDS", 2.0)
    path = _archive(tmp_path / "x.bin", b"\x80\x02" + b"]q\x00" + b"(h\x00" * 5_000_000 + b"l.")
    with pytest.raises(CheckpointError, match=r"too much memory|more than 2.0 seconds|damaged|no state dict"):
        read_torch_file(path)


_PROBE = """
import os, socket, sys
from app.cli.torch_file_worker import _forbid_files_and_processes
from app.sandbox.sandbox_child import confine
confine(1 << 40)
_forbid_files_and_processes()
for attempt in (
    lambda: open("/etc/hostname"), lambda: open(sys.argv[1], "w"), lambda: socket.socket(), lambda: os.pipe(),
):
    try:
        attempt()
        print("allowed")
    except OSError as error:
        print(error.strerror)
"""


def test_the_confined_process_can_open_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROBE, str(tmp_path / "x")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:-1] == ["Too many open files"] * 4
    assert not (tmp_path / "x").exists()


def test_a_confined_process_that_was_taken_over_is_not_believed(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.bin", {"w": torch.ones(4)})
    size = path.stat().st_size

    def tensor(**changes: Any) -> TorchFile:
        fields: dict[str, Any] = {"name": "w", "dtype": "F32", "shape": (4,), "strides": (1,), "start": 0}
        return TorchFile(tensors=(TorchTensor(**{**fields, **changes}),))

    _tensors(path, tensor().tensors)
    for changes in (
        {"start": size - 15},
        {"start": -4},
        {"shape": (2**40,)},
        {"shape": (-4,), "strides": (1,)},
        {"strides": (-1,)},
        {"strides": (2**40,)},
        {"strides": (1, 1)},
        {"dtype": "F8_E4M3"},
    ):
        with pytest.raises(CheckpointError, match="w does not lie in the file"):
            _tensors(path, tensor(**changes).tensors)
    with pytest.raises(CheckpointError, match="too many share their numbers"):
        _tensors(path, tensor(shape=(2**20,), strides=(0,)).tensors)


def test_characters_are_read_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "meta.pkl"
    ids = {"a": 0, "\u00e9": 1, "\U0001f98a": 2, "\n": 3}
    path.write_bytes(pickle.dumps({"vocab_size": 4, "itos": {i: c for c, i in ids.items()}, "stoi": ids}))
    assert read_characters(path) == ids
    for content in ({}, [], {"stoi": {}}, {"stoi": {"ab": 0}}, {"stoi": {"a": "0"}}, {"stoi": {1: 1}}, {"stoi": [1]}):
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(CheckpointError, match="stoi"):
            read_characters(path)
