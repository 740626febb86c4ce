"""make install, with fake Python and pip: an interrupted installation is completed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support import ROOT

WITHOUT_PIP = "#!/bin/sh\nexit 1\n"
WITH_PIP = "#!/bin/sh\nexit 0\n"
OFFLINE = '#!/bin/sh\ncase "$*" in *"pip install"*) exit 1;; esac\n'


def _program(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def _install(folder: Path, environments_python: str) -> subprocess.CompletedProcess[str]:
    """PYTHON makes an environment with that Python in it; one without pip is there already."""
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").touch()
    (folder / "constraints.txt").write_text("torch==0\nother==0\n")
    _program(folder / ".venv/bin/python", WITHOUT_PIP)
    made = _program(folder / "made", environments_python)
    python = _program(folder / "python", f'#!/bin/sh\n[ "$2" != venv ] || cp {made} .venv/bin/python\n')
    command = ["make", "install", f"PYTHON={python}", "LOCK=", "TORCH=torch"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]


def test_an_environment_whose_making_was_interrupted_is_made_to_its_end(tmp_path: Path) -> None:
    """Ctrl+C left a Python without pip, and every later install ended with that."""
    result = _install(tmp_path, WITH_PIP)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / ".venv/installed").exists()


def test_without_a_network_it_says_how_to_install_from_elsewhere(tmp_path: Path) -> None:
    result = _install(tmp_path, OFFLINE)
    assert result.returncode == 2
    assert "error: packages could not be installed" in result.stdout and "PIP_ARGS" in result.stdout
    assert not (tmp_path / ".venv/installed").exists()
