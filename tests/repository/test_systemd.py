"""deploy/systemd: systemd accepts the unit, it grants few privileges, and it agrees with the service."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.common.settings import Settings
from tests.support import ROOT
from tests.support.servers import start_server, stop_server

pytestmark = pytest.mark.slow

UNIT = ROOT / "deploy/systemd/inkstream.service"
MOST_EXPOSURE = 1.6
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")


def _analyze(*arguments: str | Path) -> str:
    result = subprocess.run(
        ["systemd-analyze", *arguments], capture_output=True, text=True, timeout=60, check=False, env={"LC_ALL": "C"}
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


def _with(folder: Path, *drop_ins: str) -> Path:
    """The unit with these drop-ins, starting a program that exists on this machine."""
    unit = folder / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/inkstream/bin/inkstream", "/bin/sh"))
    (folder / f"{UNIT.name}.d").mkdir()
    for name in drop_ins:
        shutil.copy(UNIT.parent / name, folder / f"{UNIT.name}.d")
    return unit


@needs_systemd
@pytest.mark.parametrize("drop_ins", [[], ["keys.conf", "gpu.conf"]])
def test_systemd_finds_nothing_wrong(tmp_path: Path, drop_ins: list[str]) -> None:
    assert _analyze("verify", _with(tmp_path, *drop_ins)) == ""


@needs_systemd
def test_systemd_reports_a_mistake_in_the_unit(tmp_path: Path) -> None:
    unit = _with(tmp_path)
    unit.write_text(unit.read_text().replace("ProtectSystem=strict", "ProtectSystem=strictly"))
    assert "ignoring: strictly" in _analyze("verify", unit)


@needs_systemd
def test_exposure_level_equals_the_documented_one() -> None:
    (found,) = re.findall(r"Overall exposure level .*: ([\d.]+)", _analyze("security", "--offline=yes", UNIT))
    (stated,) = re.findall(r"exposure level ([\d.]+)", (ROOT / "docs/package.md").read_text())
    assert float(found) <= MOST_EXPOSURE and found == stated


def test_unit_agrees_with_the_service() -> None:
    lines = UNIT.read_text().splitlines()
    settings = dict(line.split("=", 1) for line in lines if re.match(r"[A-Z]\w+=", line))
    assert int(settings["TimeoutStopSec"]) > Settings().drain_timeout + 5
    assert settings["RestartPreventExitStatus"] == "2", "a bad configuration must not restart"
    known = {f"INKSTREAM_{name.upper()}" for name in Settings.model_fields}
    for path in UNIT.parent.iterdir():
        assert set(re.findall(r"\b(INKSTREAM_\w+)", path.read_text())) <= known, path


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[socket.socket]:
    """systemd's end of sd_notify."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.settimeout(60)
        yield channel


def test_systemd_is_notified_when_the_service_is_ready_and_stops(
    tmp_path: Path, weights: Path, manager: socket.socket
) -> None:
    server = start_server(
        tmp_path, weights, fake_ms=1, wait=False, environment={"NOTIFY_SOCKET": manager.getsockname()}
    )
    assert manager.recv(100) == b"READY=1"
    assert httpx.get(f"{server.url}/health/ready").status_code == 200
    assert stop_server(server) == 0
    assert manager.recv(100) == b"STOPPING=1"
