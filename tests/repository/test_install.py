"""make's installation, with a fake Python and a fake pip: what it does, and what it says where it cannot."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("make") is None, reason="needs make")]

# What makes environments: its version is asked for, then for the interpreter behind it, for `venv` and for the kernels.
PYTHON = """#!/bin/sh
case "$*" in
*version_info*) [ "$FAKE" != old ];;
-V) echo Python 3.10.12;;
*_base_executable*) echo "3.11 $0";;
"-m venv"*) [ "$FAKE" != no-venv ] || exit 1; mkdir -p "$3/bin"; cp "$(dirname "$0")/inner" "$3/bin/python";;
"-m app compile") echo "  file      $(dirname "$0")/library.so"; echo "  compiler  g++ 12";;
*deploy.install*) exec "$REAL" "$@";;
esac
"""
# The one inside: pip notes how it was called, and brings a torch without CUDA.
INNER = """#!/bin/sh
site="$(dirname "$0")/../lib/python3.11/site-packages"
case "$*" in
*deploy.install*) exec "$REAL" "$@";;
*sys.version*) echo 3.11.7;;
"-m pip config list") echo ":env:.find-links='/wheels'";;
"-m pip --version") [ "$FAKE" != without-pip ];;
"-m pip install"*)
  echo "$@" >> "$(dirname "$0")/../../calls"
  [ -z "$LOCK$PIP_ARGS" ] || echo "make's variables reach pip" >> "$(dirname "$0")/../../calls"
  case "$FAKE $*" in
  offline*) echo "WARNING: Retrying (Temporary failure in name resolution)"; echo "ERROR: No matching one"; exit 1;;
  full*torch*) echo "ERROR: No space left on device"; exit 1;;
  slow*torch*) exec sleep 60;;
  no-cpu*torch==*+cpu*) echo "ERROR: No matching distribution found for torch"; exit 1;;
  *torch==*)
    mkdir -p "$site/torch" "$site/torch-2.13.0.dist-info"
    echo "cuda: str | None = None" > "$site/torch/version.py";;
  esac;;
"-m app serve"*) echo "served: $@";;
esac
"""

UV = """#!/bin/sh
echo "uv $@" >> "$(dirname "$0")/calls"
case "$*" in
venv*) mkdir -p .venv/bin; cp "$(dirname "$0")/inner" .venv/bin/python;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name and all that an installation reads."""
    folder = tmp_path / "my checkout"
    for name in ("constraints.txt", "pyproject.toml", "requirements.lock", "requirements-dev.lock", "Makefile"):
        folder.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, folder)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "deploy/install", folder / "deploy/install", ignore=ignored)
    for name in ("source", "toolchain"):
        (folder / "app/engine/cpu" / name).mkdir(parents=True)
    for name, content in (("python", PYTHON), ("inner", INNER), ("library.so", "")):
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    return folder


def _command(folder: Path, *arguments: str, fake: str = "") -> tuple[list[str], dict[str, str]]:
    kept_out = ("LOCK", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PIP_ARGS", "PYTHON_ASKED", "TORCH", "UV", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in kept_out}
    real = os.path.realpath(sys.executable)
    environment |= {"FAKE": fake, "REAL": real, "PATH": f"{folder}:{os.environ['PATH']}"}
    return ["make", "PYTHON=python", "UV=", *arguments], environment


def _make(folder: Path, *arguments: str, fake: str = "") -> subprocess.CompletedProcess[str]:
    command, environment = _command(folder, *arguments, fake=fake)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _calls(folder: Path) -> list[str]:
    """How pip was called since the last look."""
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return lines


def test_serve_installs_what_it_needs_in_a_line_per_step_and_nothing_the_second_time(checkout: Path) -> None:
    first = _make(checkout, "serve", "PORT=9", "WEIGHTS=my weights")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "served: -m app serve --port 9 --weights my weights\n"
    steps = ["installing", "environment", "packages", "torch", "inkstream", "kernels", "installed"]
    assert [line.split()[0] for line in first.stderr.splitlines()] == steps
    packages, torch, link = _calls(checkout)
    assert "--require-hashes --no-deps -r requirements.lock" in packages and "requirements-dev" not in packages
    assert "torch==2.13.0+cpu --extra-index-url" in torch
    assert link.endswith("--no-build-isolation -e .[guided]")
    second = _make(checkout, "serve")
    assert second.stderr == "" and second.stdout == "served: -m app serve\n" and _calls(checkout) == []


def test_developers_tools_come_with_install_and_leave_torch_as_it_is(checkout: Path) -> None:
    assert _make(checkout, "runtime", "TORCH=torch==2.12.0").returncode == 0
    _calls(checkout)
    result = _make(checkout, "install")
    packages, torch, link = _calls(checkout)
    assert "-r requirements.lock -r requirements-dev.lock" in packages and link.endswith("-e .[dev]")
    assert "torch==2.12.0+cpu" in torch, result.stderr
    assert _make(checkout, "runtime").stderr == "" and _calls(checkout) == []
    again = _make(checkout, "install")
    assert again.stderr.splitlines() == ["installed in .venv: Python 3.11.7, torch 2.13.0, for dev"]


def test_another_torch_and_an_update_install_again_and_pips_arguments_are_handed_on(checkout: Path) -> None:
    assert _make(checkout, "runtime", "LOCK=", 'PIP_ARGS=--index-url "a b"').returncode == 0
    torch, link = _calls(checkout)
    assert "--index-url a b -c" in torch and torch.endswith(" torch==2.13.0") and "-r " not in torch + link
    assert _make(checkout, "runtime").returncode == 0 and _calls(checkout) == []
    assert _make(checkout, "runtime", "TORCH=cpu").returncode == 0 and "+cpu" in _calls(checkout)[1]
    with (checkout / "constraints.txt").open("a") as file:
        file.write("another==1\n")
    assert _make(checkout, "runtime").returncode == 0 and "torch==2.13.0+cpu" in _calls(checkout)[1]


def test_where_no_cpu_build_can_be_had_it_says_so_before_it_takes_the_other(checkout: Path) -> None:
    result = _make(checkout, "runtime", fake="no-cpu")
    _, *attempts, _ = _calls(checkout)
    assert [call.partition("torch==")[2].split()[0] for call in attempts] == ["2.13.0+cpu", "2.13.0+cpu", "2.13.0"]
    assert "index of CPU builds cannot be reached; the build with CUDA comes instead" in result.stderr
    demanded = _make(checkout, "runtime", "TORCH=cpu", fake="no-cpu")
    assert demanded.returncode == 2 and "error: no package" in demanded.stderr


def test_uv_installs_where_it_is_there_from_pips_places(checkout: Path) -> None:
    (checkout / "uv").write_text(UV)
    (checkout / "uv").chmod(0o755)
    result = _make(checkout, "runtime", "UV=uv")
    assert result.returncode == 0 and "Python 3.11.7; uv installs" in result.stderr
    made, packages, torch, link = _calls(checkout)
    assert made.startswith("uv venv --seed") and made.endswith("/.venv")
    places = "--index-strategy unsafe-best-match --find-links /wheels"
    assert packages.endswith(f"{places} --require-hashes --no-deps -r requirements.lock")
    assert torch.startswith("uv pip install --python ") and "torch==2.13.0+cpu --extra-index-url" in torch
    assert link.endswith("--no-build-isolation -e .[guided]")
    assert _make(checkout, "runtime", "UV=uv", "TORCH=auto", "PIP_ARGS=--retries 2").returncode == 0
    assert all(call.startswith("-m pip install") for call in _calls(checkout)), "PIP_ARGS are pip's"


@pytest.mark.parametrize(
    ("fake", "said"),
    [
        ("old", "error: inkstream needs Python 3.11 or newer, and python is Python 3.10.12; install one (Debian"),
        ("no-venv", "cannot make a virtual environment (Debian: apt install python3-venv)"),
        ("offline", "error: the package index cannot be reached: check network and proxy"),
        ("full", "error: the disk became full: free some space"),
    ],
)
def test_each_obstacle_is_one_line_that_says_what_to_do(checkout: Path, fake: str, said: str) -> None:
    result = _make(checkout, "serve", fake=fake)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2 and len(errors) == 1 and said in errors[0]
    assert "Retrying" not in result.stderr and "Traceback" not in result.stderr
    assert not (checkout / ".venv/installed").exists()
    assert len([call for call in _calls(checkout) if "torch==" in call]) <= 1
    again = _make(checkout, "serve")
    assert again.returncode == 0
    assert ("made again" in again.stderr) is (fake in ("full", "no-venv")), "pip may have left parts of packages"


def test_the_build_of_torch_stays_when_a_gpu_appears_until_make_is_asked_to_look_again(checkout: Path) -> None:
    assert _make(checkout, "runtime").returncode == 0
    (checkout / "nvidia-smi").write_text("#!/bin/sh\necho '580.65.06, NVIDIA H100'\n")
    (checkout / "nvidia-smi").chmod(0o755)
    _calls(checkout)
    assert _make(checkout, "install").returncode == 0 and "torch==2.13.0+cpu" in _calls(checkout)[1]
    result = _make(checkout, "runtime", "TORCH=auto")
    assert _calls(checkout)[1].endswith(" torch==2.13.0,!=2.13.0+cpu") and "for NVIDIA H100; TORCH=cpu" in result.stderr


def test_a_place_that_cannot_be_written_and_a_python_that_is_not_there(checkout: Path) -> None:
    (checkout / ".venv").touch()
    result = _make(checkout, "serve")
    assert result.returncode == 2 and "cannot be written" in result.stderr and "git clone" in result.stderr
    (checkout / ".venv").unlink()
    result = _make(checkout, "serve", "PYTHON=no-python")
    assert result.returncode == 2 and "no-python is not there" in result.stderr


def test_an_interrupted_installation_is_begun_anew(checkout: Path) -> None:
    command, environment = _command(checkout, "runtime", fake="slow")
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True, process_group=0
    ) as make:
        assert make.stderr
        while "packages" not in make.stderr.readline():
            pass
        os.killpg(make.pid, signal.SIGINT)
        assert "interrupted: the next make goes on" in make.stderr.read()
    assert make.returncode and not (checkout / ".venv/installed").exists()
    (checkout / ".venv/part").touch()
    result = _make(checkout, "runtime")
    assert result.returncode == 0 and ".venv is made again: an earlier installation did not finish" in result.stderr
    assert not (checkout / ".venv/part").exists()


def test_an_environment_of_before_without_pip_is_completed_and_a_moved_or_broken_one_made_again(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    shutil.copy(checkout / "inner", checkout / ".venv/bin/python")
    (checkout / ".venv/bin/python").write_text(INNER.replace('[ "$FAKE" != without-pip ]', "exit 1"))
    (checkout / ".venv/installed").touch()
    (checkout / ".venv/torch").write_text("torch==2.11.0\n")
    assert _make(checkout, "runtime").returncode == 0 and "torch==2.11.0+cpu" in _calls(checkout)[1]
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert ".venv is made again: it was made for another folder" in _make(moved, "runtime").stderr
    (moved / ".venv/bin/python").unlink()
    (moved / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    (moved / ".venv/installed").unlink()
    assert ".venv is made again: its Python is gone" in _make(moved, "runtime").stderr


def test_an_environment_behind_a_link_or_of_another_checkout_is_used_if_it_is_this_ones_and_never_changed(
    checkout: Path,
) -> None:
    assert _make(checkout, "runtime").returncode == 0
    own, elsewhere = checkout / ".venv", checkout.with_name("elsewhere")
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    _calls(checkout)
    assert _make(checkout, "serve").stdout == "served: -m app serve\n" and _calls(checkout) == []
    other = shutil.copytree(checkout, checkout.with_name("other"), symlinks=True)
    for folder, arguments in ((checkout, ["TORCH=torch==2.12.0"]), (other, [])):  # incomplete; of another folder
        result = _make(folder, "serve", *arguments)
        assert result.returncode == 2 and f"error: .venv is a link to {elsewhere}" in result.stderr
    own.unlink()
    elsewhere.rename(own)
    result = _make(other, "serve", f"VENV={os.path.relpath(own, other)}")
    assert result.returncode == 2 and f"is the environment of {checkout}: name another" in result.stderr
    (other / ".venv").unlink()
    (other / ".venv").symlink_to("nowhere")
    assert "error: .venv is a link to nowhere" in _make(other, "serve").stderr
    assert _calls(checkout) == [] and _make(checkout, "serve").stderr == "", "nothing was changed"


def test_two_at_once_install_once(checkout: Path) -> None:
    lock = os.open(checkout, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command, environment = _command(checkout, "runtime")
    with subprocess.Popen(command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True) as make:
        assert make.stderr and "another make is installing here" in make.stderr.readline()
        stamp = dict.fromkeys(
            ("torch_asked", "torch_build", "torch", "python", "python_asked", "kernels", "library"), ""
        )
        inputs = [sys.executable, "-c", "from deploy.install.state import inputs_digest as d; print(d())"]
        digest = subprocess.run(inputs, cwd=checkout, capture_output=True, text=True, check=True).stdout.strip()
        stamp |= {"root": str(checkout), "group": "runtime", "inputs": digest, "python_asked": "python"}
        (checkout / ".venv").mkdir()
        (checkout / ".venv/installed").write_text(json.dumps(stamp))
        os.close(lock)
        make.stderr.read()
    assert make.returncode == 0 and _calls(checkout) == []


@pytest.mark.parametrize("target", ["serve", "lint", "help", "gpu-check"])
def test_every_target_refuses_an_unknown_variable(checkout: Path, target: str) -> None:
    result = _make(checkout, target, "WEIGHT=x")
    assert result.returncode == 2 and "WEIGHT is no variable of make; did you mean WEIGHTS=?" in result.stderr
    assert result.stdout == "" and not (checkout / ".venv").exists()
