"""GPUs and ports in use, as the operating system reports them."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import socket
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from app.common.operating_system import listener_on, why_no_cuda


def _install(monkeypatch: pytest.MonkeyPatch, folder: Path, versions: str, *, has_driver: bool = True) -> None:
    """Installs a fake torch with this version file, and a driver."""
    (folder / "version.py").write_text(versions)
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(folder)]
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)

    def load(_: str) -> Any:
        if not has_driver:
            raise OSError(2, "libcuda.so.1: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", load)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


CPU_BUILD = "cuda: Optional[str] = None\nhip: Optional[str] = None\n"
CUDA_BUILD = "cuda: Optional[str] = '13.0'\nhip: Optional[str] = None\n"


@pytest.mark.parametrize(
    ("versions", "has_driver", "visible", "expected"),
    [
        (CUDA_BUILD, True, None, ""),
        (CUDA_BUILD, True, "0,1", ""),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.4'\n", True, None, ""),
        ("debug = False\n", True, None, ""),  # an unknown layout gives no reason
        (CPU_BUILD, True, None, "the installed torch computes on CPUs only"),
        (CUDA_BUILD, True, "", "CUDA_VISIBLE_DEVICES hides every GPU"),
        (CUDA_BUILD, True, "-1", "CUDA_VISIBLE_DEVICES hides every GPU"),
        (CUDA_BUILD, False, None, "this machine has no NVIDIA driver (libcuda.so.1)"),
    ],
)
def test_unusable_gpu_has_a_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, versions: str, has_driver: bool, visible: str | None, expected: str
) -> None:
    _install(monkeypatch, tmp_path, versions, has_driver=has_driver)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    problem = why_no_cuda()
    assert expected in problem and bool(problem) == bool(expected)


def test_gpu_check_does_not_import_torch() -> None:
    program = (
        "import sys; from app.common.operating_system import why_no_cuda; why_no_cuda(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_process_that_listens_on_a_port_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    with listener:
        port = listener.getsockname()[1]
        name = Path("/proc/self/comm").read_text().strip()
        assert listener_on(port) == f"{name}, process {os.getpid()}"
    assert listener_on(port) == ""
