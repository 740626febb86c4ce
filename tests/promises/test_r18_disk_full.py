"""If the disk fills up at any write, fsync or rename of a save, the checkpoint before it still loads."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model.checkpoint.checkpoint import load, weights_files
from model.checkpoint.stored_weights import find_weights
from model.files import CheckpointError, write_files
from model.train.training_checkpoint import Position, load_snapshot, save_snapshot
from tests.support import ROOT
from tests.support.disk_faults import SPACE, Operations, intercept_writes, no_space
from tests.support.model.tiny_models import TEXT, tiny_decoder
from tests.support.promise_figures import Promise

CPU = torch.device("cpu")
Save = Callable[[Path, int], None]
Version = Callable[[Path], int]


def _save_run(folder: Path, number: int) -> None:
    """Save a training snapshot."""
    position = Position(step=number, seconds=1.0, digest="d", shape="s", flags={})
    save_snapshot(folder, position, {"x": torch.full((4096,), float(number))})


def _version_of_run(folder: Path) -> int:
    found = load_snapshot(folder)
    assert found is not None
    position, tensors = found
    assert bool((tensors["x"] == position.step).all())
    return position.step


def _save_weights(folder: Path, number: int) -> None:
    """Save a weights directory; each file contains the number, so that mixed files are detected."""
    decoder = tiny_decoder()
    with torch.no_grad():
        decoder.embedding.fill_(float(number))
    files = weights_files(decoder, dtype=torch.float32, eos_id=number, generation={"top_k": number})
    write_files(folder, {**files, "README.md": str(number).encode()})


def _version_of_weights(folder: Path) -> int:
    decoder, stored = load(folder, device=CPU, dtype=torch.float32).decoder, find_weights(folder)
    numbers = {int(decoder.embedding[0, 0]), stored.generation["top_k"], *stored.eos_ids}
    assert numbers == {int((folder / "README.md").read_text())}, f"files of {numbers} are mixed"
    return numbers.pop()


KINDS: dict[str, tuple[Save, Version]] = {
    "snapshot of a run": (_save_run, _version_of_run),
    "weights directory": (_save_weights, _version_of_weights),
}


def _survives(folder: Path, kind: str, at: int, then_also: frozenset[str]) -> bool:
    """Whether the previous save (or this one, if it completed) loads, and the next save works."""
    save, version = KINDS[kind]
    save(folder, 1)
    with intercept_writes(Operations(no_space, at, then_also)), contextlib.suppress(CheckpointError):
        save(folder, 2)
    kept = version(folder)
    leftovers = [path for path in folder.rglob("*") if path.name.endswith((".tmp", ".old"))]
    save(folder, 3)
    return kept in (1, 2) and not leftovers and version(folder) == 3


@pytest.mark.parametrize("kind", KINDS)
def test_full_disk_keeps_the_previous_checkpoint(tmp_path: Path, promise: Promise, kind: str) -> None:
    KINDS[kind][0](tmp_path / "dry", 1)
    counting = Operations()
    with intercept_writes(counting):
        KINDS[kind][0](tmp_path / "dry", 2)
    assert {"open", "write", "fsync"} <= set(counting.seen) and {"rename", "replace"} & set(counting.seen)
    wrong = [
        f"{number}: {what}, {'and from then on' if then_also else 'once'}"
        for number, what in enumerate(counting.seen)
        if what != "rmtree"
        for then_also in (frozenset[str](), SPACE)
        if not _survives(tmp_path / f"{number}-{bool(then_also)}", kind, number, then_also)
    ]
    print(*wrong, sep="\n")
    n = 2 * sum(what != "rmtree" for what in counting.seen)
    promise.all_of(f"no space left at each operation, once or permanently: {kind}", n - len(wrong), n)


def test_saving_in_place_is_detected(tmp_path: Path) -> None:
    """Control: overwriting files in place loses the checkpoint."""

    def save_in_place(folder: Path, number: int) -> None:
        folder.mkdir(exist_ok=True)
        decoder = tiny_decoder()
        for name, content in weights_files(decoder, dtype=torch.float32, eos_id=number, generation={}).items():
            with (folder / name).open("wb") as file:
                file.write(content)

    save_in_place(tmp_path, 1)
    with intercept_writes(Operations(no_space, 6)), pytest.raises(OSError, match="No space"):
        save_in_place(tmp_path, 2)
    with pytest.raises((CheckpointError, AssertionError)):
        load(tmp_path, device=CPU, dtype=torch.float32)


def test_training_on_a_full_file_system(tmp_path: Path, promise: Promise) -> None:
    """Fills a tmpfs after the first snapshot: later saves fail, and that snapshot still loads."""
    (tmp_path / "text.txt").write_text(TEXT * 5)
    small = tmp_path / "small"
    small.mkdir()
    python = shlex.quote(sys.executable)
    train = f"{python} -m model.train --data {tmp_path}/text.txt --out {small}/out --preset nano --device cpu"
    train += " --vocab-size 300 --context 32 --windows 4 --layers 1 --width 64 --save-seconds 0.001 --max-minutes 0.1"
    fill = f"until ls {small}/out/.training/step-* >/dev/null 2>&1 || ! kill -0 $pid; do sleep 0.01; done; "
    fill += f"while kill -0 $pid 2>/dev/null; do cat /dev/zero >> {small}/other 2>/dev/null; sleep 0.02; done"
    load = "from pathlib import Path; from model.train.training_checkpoint import load_snapshot"
    check = f"{python} -c '{load}; "
    check += f'print("loads", load_snapshot(Path("{small}/out/.training"))[0].step)\''
    run = f"{{ {train} & pid=$!; {fill}; wait $pid; echo code $?; df {small} | tail -1; {check}; }}"
    script = f"mount -t tmpfs -o size=20m tmpfs {small} && {run}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = ["unshare", "--mount", "--map-root-user", "sh", "-c", script]
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False
        )
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    if "code" not in done.stdout:
        pytest.skip(f"cannot mount a tmpfs: {done.stderr.strip()[-200:]}")
    print(done.stdout, done.stderr)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "code 2" in done.stdout and len(errors) == 1 and "No space left on device" in errors[0]
    assert "Traceback" not in done.stderr
    loaded = re.search(r"loads (\d+)", done.stdout)
    promise.all_of("a full file system: the run's last snapshot loads", int(bool(loaded)), 1)
