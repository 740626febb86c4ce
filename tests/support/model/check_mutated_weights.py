"""Runs `check` on mutated weights directories, one after another, in this process: -m MODULE FOLDER --count N.

A separate program, since a test process cannot survive or undo some effects (a signal, an audit hook, descriptor 2, a
memory peak). Its last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import shutil
import sys
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load, save

from app.cli import check
from model.checkpoint import tensor_index
from model.checkpoint.tensor_index import StoredTensor
from tests.support.model.tiny_models import GPT2, tiny_config, tiny_decoder, tiny_files
from tests.support.model.weights_mutations import Files, mutate

SECONDS = 5.0
GROWTH_MIB = 256
_SMALL = {"width": 16, "head_dim": 4, "mlp_width": 24, "context": 64}
_SHAPES = {
    "llama": tiny_config(**_SMALL),
    "gpt2": tiny_config(**_SMALL, **GPT2),
    "own": tiny_config(**_SMALL, **GPT2 | {"positions": "sinusoidal", "activation": "relu"}, norm_position="post",
                       final_norm=False, tied_head=False, head_bias=True, n_encoder_layers=1),
}  # fmt: skip
# A check may read the files of its directory, and discard the output of a Rust panic.
_MAY_WRITE = {os.devnull}
_SANDBOX = [sys.executable, "-P", "-m", "app.tokenization.tokenizer_worker"]
"""Times regular expressions that are not known to be linear."""
# Files from which an engine reads the machine's properties at startup.
_MAY_READ = (
    "/proc/meminfo",
    "/proc/cpuinfo",
    "/proc/self/cgroup",
    "/proc/self/mountinfo",
    "/sys/fs/cgroup/",
    "/sys/devices/system/",
    "/sys/devices/cpu_core/",
)
# Harmless audit events; "open" and others are checked one by one.
_HARMLESS = (
    "object.__",
    "os.scandir",
    "os.listdir",
    "pathlib.Path.glob",
    "code.__new__",
    "builtins.id",
    "sys._getframe",
    "gc.",
    "array.",
    "mmap.",
)


def valid_directories() -> dict[str, Files]:
    """One directory of each kind, small enough for a thousand checks in seconds."""
    prompt = [5, 9, 200, 31, 7]
    made: dict[str, Files] = {
        name: {**tiny_files(tiny_decoder(config), prompt, temperature=0.8)} for name, config in _SHAPES.items()
    }
    made["sharded"] = _sharded(made["llama"])
    return made


def _sharded(files: Files) -> Files:
    whole = files["model.safetensors"]
    assert isinstance(whole, bytes)
    tensors = load(whole)
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    weight_map = {tensor: names[i % 2] for i, tensor in enumerate(sorted(tensors))}
    parts = {name: save({t: tensors[t] for t, shard in weight_map.items() if shard == name}) for name in names}
    index = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    kept = {name: content for name, content in files.items() if name != "model.safetensors"}
    return {**kept, **parts, "model.safetensors.index.json": index}


def write(directory: Path, files: Files) -> None:
    """Replaces the directory by these files."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    for name, content in files.items():
        if isinstance(content, bytes):
            (directory / name).write_bytes(content)
        elif content.kind == "fifo":
            os.mkfifo(directory / name)
        elif content.kind == "directory":
            (directory / name).mkdir()
        else:
            (directory / name).symlink_to(content.target)


class Watch:
    """Audit hook that records forbidden operations of a check; armed only while one runs."""

    def __init__(self) -> None:
        self.directory = ""
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.directory or event.startswith(_HARMLESS):
            return
        if event == "subprocess.Popen" and arguments[1][: len(_SANDBOX)] == _SANDBOX:
            return
        if event == "os.kill" and self._is_child(arguments[0]):
            return
        if event == "open":
            path, mode, flags = arguments
            if isinstance(path, int):  # a pipe to the sandbox worker
                return
            reads_own = os.path.realpath(path).startswith(self.directory) and not flags & (os.O_WRONLY | os.O_RDWR)
            if reads_own or path in _MAY_WRITE or (str(path).startswith(_MAY_READ) and mode == "r"):
                return
        self.seen.append(f"{event} {str(arguments)[:200]}")

    def _is_child(self, pid: int) -> bool:
        """Whether the process is a child of this one, zombies included."""
        directory, self.directory = self.directory, ""
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1] == str(os.getpid())
        finally:
            self.directory = directory


def _with_unproven_regex(files: Files) -> Files:
    """Files with a regular expression that a check tries in a sandbox, so that it loads the code for that."""
    raw = json.loads(files["tokenizer.json"])
    split = {"type": "Split", "pattern": {"Regex": "[b-y]+|[^b-y]"}, "behavior": "Isolated", "invert": False}
    raw["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, raw["pre_tokenizer"]]}
    return files | {"tokenizer.json": json.dumps(raw).encode()}


@contextlib.contextmanager
def _captured(log: Path) -> Iterator[None]:
    """Redirects descriptors 1 and 2 to files, since Rust does not write to sys.stderr."""
    kept = os.dup(1), os.dup(2)
    out = [os.open(log.with_suffix(suffix), os.O_RDWR | os.O_CREAT | os.O_TRUNC) for suffix in (".out", ".err")]
    for number in (1, 2):
        os.dup2(out[number - 1], number)
    try:
        yield
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number in (1, 2):
            os.dup2(kept[number - 1], number)
        for descriptor in (*kept, *out):
            os.close(descriptor)


def judge(directory: Path, log: Path, watch: Watch) -> tuple[int | None, str]:
    """Runs a check; returns its exit code, and what it did wrong, or ""."""
    started = time.monotonic()
    code: int | None = None
    with _captured(log):
        watch.seen, watch.directory = [], str(directory)
        try:
            code = check.main([str(directory)])
        except BaseException:
            traceback.print_exc()
        finally:
            watch.directory = ""
    seconds, lines = time.monotonic() - started, log.with_suffix(".err").read_text(errors="replace").splitlines()
    named = any(word in " ".join(lines) for word in (".json", ".safetensors"))
    if code not in (0, 2) or (code == 2 and (len(lines) != 1 or not named)) or (code == 0 and len(lines) > 1):
        return code, f"exit code {code}, {len(lines)} lines: {' | '.join(lines[-4:])[:600]}"
    if seconds > SECONDS:
        return code, f"took {seconds:.1f} s"
    return code, f"did {watch.seen}" if watch.seen else ""


def _status_mib(key: str) -> float:
    # Not getrusage: its peak starts at the parent process's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Harness:
    """Mutates valid directories in a folder, and watches the checker."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.directory = folder.resolve() / "weights"
        self.log = folder / "log"
        self.watch = Watch()
        self.valid = valid_directories()
        tried = [*self.valid.values(), _with_unproven_regex(self.valid["gpt2"])]
        for files in [*tried, *tried]:  # twice, to load what the checker loads lazily
            write(self.directory, files)
            outcome = judge(self.directory, self.log, self.watch)
        assert outcome == (0, ""), outcome
        write(folder / "outside", self.valid["llama"])
        self.rss_mib = _status_mib("VmRSS")

    def run(self, seed: int, numbers: range) -> dict[str, Any]:
        """Checks mutations `numbers`; returns counts, worst time and memory, and failures with their numbers."""
        failures, kinds, slowest, most_growth = [], Counter[str](), 0.0, 0.0
        for number in numbers:
            rng = Random(f"{seed}/{number}")
            base = rng.choice(sorted(self.valid))
            files = dict(self.valid[base])
            description = f"{number}: {base}, {mutate(rng, files)}"
            (self.folder / "current").write_text(description, errors="replace")
            write(self.directory, files)
            Path("/proc/self/clear_refs").write_text("5")  # resets the peak
            faulthandler.dump_traceback_later(60, exit=True)
            started = time.monotonic()
            code, wrong = judge(self.directory, self.log, self.watch)
            slowest = max(slowest, time.monotonic() - started)
            growth = _status_mib("VmHWM") - self.rss_mib
            most_growth = max(most_growth, growth)
            kinds["refused" if code == 2 else "harmless"] += 1
            size = sum(len(content) for content in files.values() if isinstance(content, bytes)) >> 20
            if wrong or growth > GROWTH_MIB + size:
                failures.append(f"{description}: {wrong or f'{growth:.0f} MiB more'}")
        faulthandler.cancel_dump_traceback_later()
        return {**kinds, "slowest_s": round(slowest, 2), "growth_mib": round(most_growth), "failures": failures}


def _believing_header(path: Path) -> dict[str, StoredTensor]:
    """Reads a header without checks."""
    with path.open("rb") as file:
        length = file.read(8)
        header = length + file.read(int.from_bytes(length, "little"))
    raw = json.loads(header[8:])
    starts = {name: len(header) + e["data_offsets"][0] for name, e in raw.items() if name != "__metadata__"}
    return {
        name: StoredTensor(name, path, raw[name]["dtype"], tuple(raw[name]["shape"]), start, header)
        for name, start in starts.items()
    }


def _raise(*_arguments: Any) -> Any:
    raise Exception("a bare one")


def _run_code(text: str) -> str:
    return str(eval(repr(text)))


def _take_memory(text: str) -> str:
    return text if bytearray(300 << 20) else ""


def _take_time(text: str) -> str:
    time.sleep(SECONDS)
    return text


# What a sabotaged checker does -> (owner, attribute, replacement, mutations within which a run must detect it).
SABOTAGE: dict[str, tuple[Any, str, Any, int]] = {
    "believes the header": (tensor_index, "read_header", _believing_header, 40),
    "raises a bare exception": (check, "one_line", _raise, 1),
    "names no file": (check, "one_line", lambda _: "", 5),
    "runs code": (check, "one_line", _run_code, 1),
    "takes memory": (check, "one_line", _take_memory, 1),
    "takes time": (check, "one_line", _take_time, 1),
}


def run_controls(harness: Harness, seed: int) -> dict[str, int]:
    """Number of failures that each sabotage causes."""
    found = {}
    for name, (owner, attribute, value, count) in SABOTAGE.items():
        with mock.patch.object(owner, attribute, value):
            found[name] = len(harness.run(seed, range(count))["failures"])
    return found


def main() -> int:
    """Prints the findings; the exit code is always 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--controls", action="store_true", help="break the checker instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    harness = Harness(options.folder)
    numbers = range(options.first, options.first + options.count)
    found = run_controls(harness, options.seed) if options.controls else harness.run(options.seed, numbers)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
