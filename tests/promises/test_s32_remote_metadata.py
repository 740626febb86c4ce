"""Everything that a hub or mirror sends is validated: it chooses no path, and neither memory, disk nor time.

A hostile hub on loopback has one repository for each lie. The control is a repository without one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.fake_hub import FakeHub, fake_hub
from tests.support.hostile_hub import BODIES, install, slow_body, slow_head
from tests.support.model.tiny_models import tiny_weights
from tests.support.promise_figures import Promise

_SLOW = {"slow head": slow_head, "slow body": slow_body}


def _fetch(hub: FakeHub, folder: Path, names: list[str]) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "tests.support.fetch_repositories", str(folder), *names]
    kept = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    variables = {**kept, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "a/b/c/home"), "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_lies_of_a_hub_are_refused_in_one_line_without_a_trace(tmp_path: Path, promise: Promise) -> None:
    files = {path.name: path.read_bytes() for path in tiny_weights(tmp_path / "weights").iterdir()}
    folder = tmp_path / "world"
    (folder / "a/b/c/home").mkdir(parents=True)
    with fake_hub() as hub:
        cases = install(hub, files)
        hub.answers |= {f"/api/models/org/{what.replace(' ', '-')}/": answer for what, answer in _SLOW.items()}
        cases |= {f"org/{what.replace(' ', '-')}": what for what in _SLOW}
        hub.repositories["org/honest"] = files
        honest, *found = _fetch(hub, folder, ["org/honest", *cases])
    assert honest["outcome"] == "accepted" and honest["bytes"] > 100_000, honest
    assert [entry["name"] for entry in found] == list(cases)
    for entry in found:
        entry["what"] = cases[entry["name"]]
    bad = [entry for entry in found if entry["outcome"] != "refused" or "\n" in entry["message"]]
    assert not bad, bad[:3]
    promise.all_of("lies refused in one line", len(found) - len(bad), len(found))
    escaped = [entry for entry in found if entry["outside"]]
    promise.at_most("files or directories outside HF_HOME", len(escaped), target=0, n=len(found))
    # The files before the lie are kept for the next try; together they are smaller than the weights.
    most = max(found, key=lambda entry: int(entry["bytes"]))
    whole = sum(map(len, files.values()))
    promise.at_most("bytes written, of the model's size", most["bytes"] / whole, target=1, n=len(found), unit="x")
    memory = max(found, key=lambda entry: float(entry["mib"]))
    promise.at_most("growth of the peak memory", memory["mib"], target=64, floor=128, n=len(found), unit="MiB")
    slow = max(found, key=lambda entry: float(entry["seconds"]))
    print({key: value for key, value in memory.items() if key != "message"}, slow)
    promise.at_most("longest try with a window of 2 s, of 60", slow["seconds"], target=10, floor=30,
                    n=len(found), unit="s")  # fmt: skip
    assert len(BODIES) * 3 < len(found)
