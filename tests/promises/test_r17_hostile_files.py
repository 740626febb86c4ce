"""Hostile weights directories get exit code 2 and one line that names file and reason; nothing in them is executed.

10,000 mutated directories at full size. An audit hook watches for anything but reading the directory's own files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.support import ROOT
from tests.support.model.check_mutated_weights import GROWTH_MIB, SABOTAGE, SECONDS
from tests.support.promise_figures import Promise


def _run(folder: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.support.model.check_mutated_weights", str(folder), *flags]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "RUST_BACKTRACE": "0"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    current = folder / "current"
    assert result.returncode == 0, (current.read_text() if current.exists() else "", result.stderr[-3000:])
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def test_mutated_directories_are_refused_in_one_line_or_harmless(tmp_path: Path, promise: Promise) -> None:
    count = promise.size(300, 10_000)
    report = _run(tmp_path, "--count", str(count), "--seed", "17")
    print(*report["failures"], sep="\n")
    good = count - len(report["failures"])
    promise.all_of("mutated directories refused in one line, or loaded without effect", good, count)
    promise.at_most("peak memory of a check", report["growth_mib"], target=GROWTH_MIB, floor=GROWTH_MIB + 8,
                    n=count, unit="MiB")  # fmt: skip
    promise.at_most("longest check", report["slowest_s"], target=2, floor=SECONDS, n=count, unit="s")
    assert report["refused"] + report["harmless"] == count
    # Guards against mutations that have no effect and against a check that refuses everything.
    assert report["refused"] > count / 2 and report["harmless"] > count / 20


def test_harmful_checkers_are_detected(tmp_path: Path) -> None:
    found = _run(tmp_path, "--controls")
    assert found.keys() == SABOTAGE.keys()
    assert all(found.values()), found
