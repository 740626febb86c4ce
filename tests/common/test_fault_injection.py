"""Named fault points: inert without their variable, and their effects with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from app.common import fault_injection
from app.common.fault_injection import InjectedFault, _FaultRegistry
from tests.support import ROOT
from tests.support.armed_faults import Faults


def test_fault_points_are_inert_without_their_variable(tmp_path: Path) -> None:
    armed = Faults(tmp_path)
    armed.arm("engine.step", "exit", code=7)
    program = "from app.common.fault_injection import fault; fault('engine.step')"
    ours = {k: v for k, v in os.environ.items() if k != fault_injection.VARIABLE}
    for environment, code in (({}, 0), ({fault_injection.VARIABLE: ""}, 0), (armed.environment, 7)):
        command = [sys.executable, "-c", program]
        assert subprocess.run(command, cwd=ROOT, env=ours | environment, check=False).returncode == code


@pytest.mark.parametrize("raised", [("raise", InjectedFault), ("disk full", OSError), ("out of memory", MemoryError)])
def test_fault_occurs_the_requested_number_of_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, raised: tuple[str, type[Exception]]
) -> None:
    do, error = raised
    monkeypatch.setattr(fault_injection, "_REGISTRY", _FaultRegistry(tmp_path))
    Faults(tmp_path).arm("a.point", do, after=1, times=2, match="victim")
    happened = []
    for detail in ("victim 1", "bystander", "victim 2", "victim 3", "victim 4"):
        try:
            fault_injection.fault("a.point", detail)
        except error:
            happened.append(detail)
    assert happened == ["victim 2", "victim 3"]
    assert not Faults(tmp_path).is_armed("a.point")


def test_every_fault_point_is_named_once() -> None:
    named: list[str] = []
    for path in (*(ROOT / "app").rglob("*.py"), *(ROOT / "model").rglob("*.py")):
        named += re.findall(r'fault\("([a-z_.]+)"', path.read_text())
    assert named
    assert len(named) == len(set(named)), sorted(named)
