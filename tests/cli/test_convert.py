"""inkstream convert as a user runs it: what it prints, what it leaves behind, and how it fails."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from app.__main__ import main
from model.checkpoint import new_directory
from model.checkpoint.conversion import ConversionPlan
from tests.support import ROOT
from tests.support.disk_faults import Operations, intercept_writes, no_space
from tests.support.model.convertible import LLAMA_SIZES, convert, logits_of, names, save_convertible
from tests.support.model.quantized_checkpoints import FILE, LAYOUTS, quantize_checkpoint
from tests.support.pseudo_terminal import on_terminal

Printed = pytest.CaptureFixture[str]


def run(*arguments: Path | str) -> int:
    try:
        return main(["convert", *map(str, arguments)])
    except SystemExit as end:
        return int(end.code or 0)


def refused(capsys: Printed, *arguments: Path | str) -> str:
    """The one line of an error."""
    capsys.readouterr()  # of what prepared the files
    assert run(*arguments) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1) and printed.err.startswith("error: ")
    return printed.err


@pytest.fixture
def source(tmp_path: Path, weights: Path) -> Path:
    return Path(shutil.copytree(weights, tmp_path / "source"))


def test_the_sizes_are_printed(tmp_path: Path, weights: Path, capsys: Printed) -> None:
    assert run(weights, tmp_path / "new" / "out", "--quantize", "int4", "--dtype", "bfloat16") == 0
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out.startswith(f"{tmp_path / 'new' / 'out'}: converted from {weights}\n")
    for words in (" before, ", "KiB after", "per weight, of 112,", "bfloat16",
                  "14 matrices of 4 bits in groups of 32 and 16", "4.62 bits per weight with scales"):  # fmt: skip
        assert words in printed.out, words
    assert main(["check", str(tmp_path / "new" / "out")]) == 0


def test_an_empty_directory_and_a_link_to_one_are_filled(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    assert run(weights, tmp_path / "link") == 0
    assert FILE in names(tmp_path / "empty") and (tmp_path / "link").is_symlink()


def test_a_model_of_the_hub_is_converted(tmp_path: Path, weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = tmp_path / "models--org--tiny" / "snapshots" / ("a" * 40)
    shutil.copytree(weights, directory)
    monkeypatch.setattr("model.checkpoint.hub_download.fetch", lambda _named, _say: directory)
    assert run("org/tiny", tmp_path / "out") == 0
    assert torch.equal(logits_of(tmp_path / "out"), logits_of(weights))


def test_bad_paths_are_one_line(tmp_path: Path, source: Path, capsys: Printed) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "broken").symlink_to(tmp_path / "file" / "x")
    cases: list[tuple[Path | str, Path | str, str]] = [
        (tmp_path / "nowhere", tmp_path / "out", "no such directory"),
        (tmp_path / "file", tmp_path / "out", "is not a directory"),
        (source, source, "is inside"),
        (source, source / "out", f"is inside {source}, which is read"),
        (source, tmp_path, "exists and is not empty; name a new directory"),
        (source, tmp_path / "file", "exists and is not a directory"),
        (source, tmp_path / "file" / "out", "cannot be written (Not a directory)"),
        (source, tmp_path / "broken", "cannot be"),
        (source, tmp_path / ("x" * 300), "cannot be"),
    ]
    before = names(tmp_path)
    for given, out, words in cases:
        assert words in refused(capsys, given, out), words
    assert names(tmp_path) == before and not [name for name in names(source) if "out" in name]


def test_an_adapter_and_quantized_weights_are_refused(tmp_path: Path, weights: Path, capsys: Printed) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")
    assert "this is an adapter: merge it" in refused(capsys, adapter, tmp_path / "out")
    packed = save_convertible("llama-b", tmp_path / "packed", weights, **LLAMA_SIZES)
    quantize_checkpoint(packed, *LAYOUTS["awq"])
    assert "packed already" in refused(capsys, packed, tmp_path / "out", "--quantize", "int8")
    assert names(tmp_path) == {"adapter", "packed"}


def test_options_of_a_nanogpt_are_refused_for_others(tmp_path: Path, weights: Path, capsys: Printed) -> None:
    for option, value in (("--activation", "gelu"), ("--chars", "meta.pkl")):
        assert f"{option} is for the checkpoint of a nanoGPT" in refused(capsys, weights, tmp_path / "o", option, value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_place_is_one_line(tmp_path: Path, source: Path, capsys: Printed) -> None:
    (tmp_path / "place").mkdir(mode=0o500)
    assert "cannot be written (Permission denied)" in refused(capsys, source, tmp_path / "place" / "out")


def test_a_disk_without_room_is_found_before_anything_is_written(
    tmp_path: Path, source: Path, capsys: Printed, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(new_directory.shutil, "disk_usage", lambda _: usage._replace(free=1000))
    monkeypatch.setattr(ConversionPlan, "write", lambda *_: pytest.fail("it was written"))
    assert "and its disk has 1,000 free" in refused(capsys, source, tmp_path / "out")
    assert names(tmp_path) == {"source"}


def test_a_disk_that_fills_up_leaves_nothing_behind(tmp_path: Path, source: Path, capsys: Printed) -> None:
    """At each operation that changes the disk."""
    with intercept_writes(counted := Operations()):
        assert run(source, tmp_path / "a" / "out") == 0
    shutil.rmtree(tmp_path / "a")
    capsys.readouterr()
    kinds = ("open", "write", "mkdir", "rename", "fsync")
    places = [at for at, kind in enumerate(counted.seen) if kind in kinds]
    assert len(places) > 20 and {counted.seen[at] for at in places} >= {"open", "write", "mkdir", "rename", "fsync"}
    last = len(counted.seen) - 1 - counted.seen[::-1].index("rename")
    for at in (each for each in places if each <= last):
        with intercept_writes(Operations(no_space, at)):
            assert "No space left on device" in refused(capsys, source, tmp_path / "a" / "out"), counted.seen[at]
        assert names(tmp_path) == {"source"}, (at, counted.seen[at])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_nothing_behind(tmp_path: Path, source: Path, number: int) -> None:
    program = (
        "import sys, time; from model.checkpoint.conversion import ConversionPlan\n"
        "def write(*_):\n    print('writes', flush=True)\n    time.sleep(60)\n"
        "ConversionPlan.write = write\nfrom app.__main__ import main\nsys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "convert", str(source), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout and process.stdout.readline() == "writes\n"
    assert len(names(tmp_path)) == 2
    process.send_signal(number)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 128 + number and errors.count("\n") <= 1 and "Traceback" not in errors
    assert names(tmp_path) == {"source"}


def test_of_two_conversions_into_one_place_one_wins(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    """Another one ends while this one writes; processes have different ids, so their folders differ."""
    real = ConversionPlan.write

    def write(conversion: ConversionPlan, *arguments: Any) -> None:
        monkeypatch.setattr(ConversionPlan, "write", real)
        with monkeypatch.context() as other:
            other.setattr(new_directory.os, "getpid", lambda: 1)
            assert run(source, tmp_path / "out", "--dtype", "bfloat16") == 0
        real(conversion, *arguments)

    monkeypatch.setattr(ConversionPlan, "write", write)
    assert run(source, tmp_path / "out") == 2
    assert "another process has just filled it" in capsys.readouterr().err
    assert names(tmp_path) == {"source", "out"}
    assert {tensor.dtype for tensor in load_file(tmp_path / "out" / FILE).values()} == {torch.bfloat16}


def test_two_processes_at_once_leave_one_complete_directory(tmp_path: Path, source: Path) -> None:
    command = [sys.executable, "-m", "app", "convert", str(source), str(tmp_path / "out")]
    both = [
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=60)[1] for process in both]
    assert sorted(process.returncode for process in both) in ([0, 2],)
    assert sum(error.count("\n") for error in errors) == 1
    assert names(tmp_path) == {"source", "out"} and main(["check", str(tmp_path / "out")]) == 0


def test_a_terminal_shows_a_bar_that_ends(tmp_path: Path, weights: Path) -> None:
    command = [sys.executable, "-m", "app", "convert", str(weights), str(tmp_path / "out")]
    with on_terminal(command, {**os.environ, "PYTHONPATH": str(ROOT)}) as terminal:
        assert terminal.wait() == 0
    assert "100 % of" in terminal.output and "\r\x1b[K" in terminal.output
    assert "converted from" in terminal.output.rpartition("\x1b[K")[2]


def to_bin(directory: Path, *, shards: int = 1, is_archive: bool = True) -> None:
    """Replaces the safetensors by pytorch_model.bin or shards of it."""
    tensors = load_file(directory / FILE)
    (directory / FILE).unlink()
    if shards == 1:
        torch.save(tensors, directory / "pytorch_model.bin", _use_new_zipfile_serialization=is_archive)
        return
    parts = {f"pytorch_model-{n}.bin": dict(list(tensors.items())[n::shards]) for n in range(shards)}
    for name, part in parts.items():
        torch.save(part, directory / name, _use_new_zipfile_serialization=is_archive)
    index = {"weight_map": {key: name for name, part in parts.items() for key in part}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(("shards", "is_archive"), [(1, True), (1, False), (3, True)])
@pytest.mark.parametrize("case", ["llama-b", "gpt2-a", "gpt_oss-a", "qwen3_moe-a", "opt-a"])
def test_a_bin_becomes_the_same_safetensors(
    tmp_path: Path, weights: Path, case: str, shards: int, is_archive: bool
) -> None:
    source = save_convertible(case, tmp_path / "source", weights)
    expected, logits = load_file(source / FILE), logits_of(source)
    to_bin(source, shards=shards, is_archive=is_archive)
    assert run(source, tmp_path / "out") == 0
    ours = load_file(tmp_path / "out" / FILE)
    assert ours.keys() == expected.keys() and all(torch.equal(ours[name], expected[name]) for name in expected)
    assert torch.equal(logits_of(tmp_path / "out"), logits) and main(["check", str(tmp_path / "out")]) == 0


def test_a_bin_in_other_orders_is_converted_and_quantized(tmp_path: Path, source: Path) -> None:
    """Transposed tensors, and views of one storage, as other exporters save them."""
    tensors = load_file(source / FILE)
    convert(source, tmp_path / "expected", bits=4)
    moved = {name: tensor.T.contiguous().T if tensor.ndim == 2 else tensor for name, tensor in tensors.items()}
    (source / FILE).unlink()
    torch.save(moved, source / "pytorch_model.bin")
    assert run(source, tmp_path / "out", "--quantize", "int4") == 0
    assert (tmp_path / "out" / FILE).read_bytes() == (tmp_path / "expected" / FILE).read_bytes()


class _Touch:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self._path}",)


def test_bad_bins_are_one_line(tmp_path: Path, source: Path, capsys: Printed) -> None:
    tensors = load_file(source / FILE)
    to_bin(source)
    path = source / "pytorch_model.bin"
    whole = path.read_bytes()
    name = "model.layers.0.mlp.down_proj.weight"
    changes: dict[str, tuple[Callable[[], Any], str]] = {
        "hostile": (lambda: torch.save({"a": _Touch(tmp_path / "mark")}, path), "which could run code"),
        "truncated": (lambda: path.write_bytes(whole[: len(whole) // 2]), "truncated"),
        "a tensor less": (lambda: torch.save({k: v for k, v in tensors.items() if k != name}, path), "are missing"),
        "a tensor more": (lambda: torch.save({**tensors, "x": torch.ones(2)}, path), "not part of the model"),
        "another shape": (lambda: torch.save({**tensors, name: tensors[name][:, 1:]}, path), "config.json asks for"),
        "doubles": (lambda: torch.save({**tensors, name: tensors[name].double()}, path), "dtype F64; allowed"),
        "repeated": (lambda: torch.save({**tensors, name: torch.ones(1, 1).expand(64, 176)}, path), "are repeated"),
        "not finite": (lambda: torch.save({**tensors, name: tensors[name] * torch.nan}, path), "not finite"),
        "a link out": (lambda: (path.unlink(), path.symlink_to(tmp_path / "x.bin")), "cannot be read|leads out"),
    }
    (tmp_path / "x.bin").write_bytes(whole)
    before = names(tmp_path)
    for change, words in changes.values():
        change()
        line = refused(capsys, source, tmp_path / "out")
        assert any(word in line for word in words.split("|")), (words, line)
        assert names(tmp_path) == before
    for missing in ("config.json", "tokenizer.json"):
        broken = Path(shutil.copytree(source, tmp_path / missing, symlinks=True))
        (broken / missing).unlink()
        assert missing in refused(capsys, broken, tmp_path / "out")


def test_safetensors_are_preferred_to_a_bin(tmp_path: Path, source: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"not read")
    assert run(source, tmp_path / "out") == 0


def nanogpt(path: Path, *, bias: bool = True, is_tied: bool = True, **changes: Any) -> dict[str, Tensor]:
    """Saves the checkpoint of a nanoGPT; returns its tensors."""
    torch.manual_seed(0)
    width, vocab, context = 32, 65, 48
    shapes = {"ln_1.weight": (width,), "attn.c_attn.weight": (96, 32), "attn.c_proj.weight": (32, 32)}
    shapes |= {"ln_2.weight": (width,), "mlp.c_fc.weight": (128, 32), "mlp.c_proj.weight": (32, 128)}
    state = {"transformer.wte.weight": torch.randn(vocab, width), "transformer.wpe.weight": torch.randn(context, width)}
    for layer in range(2):
        for name, shape in shapes.items():
            state[f"transformer.h.{layer}.{name}"] = torch.randn(shape)
            if bias:
                state[f"transformer.h.{layer}.{name.replace('weight', 'bias')}"] = torch.randn(shape[0])
    state["transformer.ln_f.weight"] = torch.randn(width)
    if bias:
        state["transformer.ln_f.bias"] = torch.randn(width)
    state["lm_head.weight"] = state["transformer.wte.weight"] if is_tied else torch.randn(vocab, width)
    state["transformer.h.0.attn.bias"] = torch.ones(1, 1, context, context).tril()
    args = {"n_layer": 2, "n_head": 4, "n_embd": width, "block_size": context, "bias": bias, "vocab_size": vocab}
    content = {"model": {f"_orig_mod.{k}": v for k, v in state.items()}, "model_args": {**args, **changes}}
    torch.save(content, path)
    return state


CHARACTERS = {chr(0x20 + number): number for number in range(65)}


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_nanogpt_becomes_a_directory_of_its_own_layout(tmp_path: Path, bias: bool, is_tied: bool) -> None:
    """Its logits are compared with transformers' in tests/repository/test_docs_bring_your_model.py."""
    state = nanogpt(tmp_path / "ckpt.pt", bias=bias, is_tied=is_tied)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": CHARACTERS}))
    assert run(tmp_path / "ckpt.pt", tmp_path / "out", "--chars", tmp_path / "meta.pkl") == 0
    ours = load_file(tmp_path / "out" / FILE)
    assert ("untied_head" in ours) == (not is_tied) and len(ours) == len(state) - 1 - is_tied
    assert torch.equal(ours["blocks.1.mlp.up.weight"], state["transformer.h.1.mlp.c_fc.weight"])
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["activation"], config["norm_bias"], config["tied_head"]) == ("gelu", bias, is_tied)
    assert main(["check", str(tmp_path / "out")]) == 0
    assert run(tmp_path / "ckpt.pt", tmp_path / "old", "--activation", "gelu_tanh") == 0
    assert json.loads((tmp_path / "old/config.json").read_text())["activation"] == "gelu_tanh"


def test_a_quantized_nanogpt_is_read(tmp_path: Path) -> None:
    nanogpt(tmp_path / "ckpt.pt")
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": CHARACTERS}))
    flags = ("--quantize", "int8", "--chars", tmp_path / "meta.pkl")
    assert run(tmp_path / "ckpt.pt", tmp_path / "out", *flags) == 0
    assert main(["check", str(tmp_path / "out")]) == 0


def test_bad_nanogpts_are_one_line(tmp_path: Path, capsys: Printed) -> None:
    path = tmp_path / "ckpt.pt"
    for changes, words in (
        ({"n_layer": 3}, "are missing"),
        ({"n_layer": 1}, "not part of the model"),
        ({"n_layer": 10**6}, "layers"),
        ({"n_layer": -1}, "n_layer -1"),
        ({"n_embd": 2**40}, "n_embd"),
        ({"n_head": 5}, "do not divide"),
        ({"bias": 1}, "it must be True or False"),
        ({"bias": False}, "not part of the model"),
        ({"vocab_size": "65"}, "vocab_size '65'"),
        ({"block_size": 64}, "config.json asks for"),
    ):
        nanogpt(path, **changes)  # type: ignore[arg-type]
        if "bias" in changes:
            content = torch.load(path, weights_only=True)
            nanogpt(path)
            whole = torch.load(path, weights_only=True)
            torch.save({"model": whole["model"], "model_args": content["model_args"]}, path)
        line = refused(capsys, path, tmp_path / "out")
        assert words in line, (changes, line)
    torch.save({"a": torch.ones(3)}, path)
    assert "without the model_args of a nanoGPT; for other models name a directory" in refused(
        capsys, path, tmp_path / "out"
    )
    nanogpt(path)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": {"a": 65}}))
    assert "the characters have the id 65" in refused(capsys, path, tmp_path / "out", "--chars", tmp_path / "meta.pkl")
    assert names(tmp_path) == {"ckpt.pt", "meta.pkl"}
