"""Named faults: inert without their variable, and what they do with it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.common import fault_injection
from app.common.fault_injection import InjectedFault, _FaultRegistry
from tests.support import ROOT
from tests.support.armed_faults import Faults


def _run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    variables = {k: v for k, v in os.environ.items() if k != fault_injection.VARIABLE} | environment
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=variables, capture_output=True, text=True, check=False
    )


def test_faults_are_inert_without_their_variable(tmp_path: Path) -> None:
    armed = Faults(tmp_path)
    armed.arm("engine.step", "exit", code=7)
    program = "from app.common.fault_injection import fault; fault('engine.step')"
    assert _run(program, {}).returncode == 0
    assert _run(program, {fault_injection.VARIABLE: ""}).returncode == 0
    assert _run(program, armed.environment).returncode == 7


@pytest.mark.parametrize("raised", [("raise", InjectedFault), ("disk full", OSError), ("out of memory", MemoryError)])
def test_a_fault_happens_as_often_as_ordered(
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


def test_every_deed_is_described_by_a_word_and_every_point_is_named_once() -> None:
    """Two fault points with one name would be indistinguishable."""
    named: list[str] = []
    for path in (*(ROOT / "app").rglob("*.py"), *(ROOT / "model").rglob("*.py")):
        named += re.findall(r'fault\("([a-z_.]+)"', path.read_text())
    assert named
    assert len(named) == len(set(named)), sorted(named)


def test_an_order_is_json_that_the_service_reads(tmp_path: Path) -> None:
    orders: dict[str, Any] = {"do": "sleep", "seconds": 0}
    Faults(tmp_path).arm("p", **orders)
    assert json.loads((tmp_path / "p").read_text()) == orders
