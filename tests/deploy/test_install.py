"""make's installation: the choice of torch, pip or uv, when it does anything at all, and its error messages."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from deploy import install
from deploy.install import (
    CPU_INDEX,
    InstallError,
    InstallOptions,
    choose_torch,
    has_gpu,
    is_complete,
    read_note,
    write_note,
)
from tests.support import ROOT

PIN, CPU, CUDA = "torch==2.13.0", "torch==2.13.0+cpu", "torch==2.13.0,!=2.13.0+cpu"
FROM_INDEX = ["--extra-index-url", CPU_INDEX]


def needs_make(test: Callable[..., None]) -> Callable[..., None]:
    """Marks a test that runs make, and many processes with it."""
    marked: Callable[..., None] = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")(test)
    return pytest.mark.slow(marked)


# Both Pythons run the installation in the real one. The fake pip records its calls and if it sees make's variables.
RUN = """
*deploy.install*)
  shift 2
  exec "$REAL" -SEc "import runpy, sys; sys._base_executable = '$BASE'
runpy.run_module('deploy.install', run_name='__main__', alter_sys=True)" "$@";;
"""
PYTHON = f"""#!/bin/sh
case "$*" in
*version_info*) [ "$FAKE" != old ];;
"-m venv"*) [ "$FAKE" != no-venv ] || exit 1; mkdir -p "$3/bin"; cp "$(dirname "$0")/inner" "$3/bin/python";;
"-m app compile") [ "$FAKE" != no-compiler ] || {{ echo "error: no compiler"; exit 2; }};;
{RUN}
esac
"""
INNER = f"""#!/bin/sh
site="$(dirname "$0")/../lib/python3.11/site-packages"
case "$*" in
*"sys.exit(sys.version_info"*) [ "$FAKE" != old-venv ];;
*"print("*sys.version_info*) case "$FAKE" in old-venv) echo 3.10;; *) echo 3.11;; esac;;
"-m pip config list")
  env | sed -n "s/^PIP_/:env:./p"
  [ "$FAKE" != configured ] || echo "global.index-url='x'";;
"-m pip install"*)
  echo "$@" >> "$CALLS"
  [ -z "$LOCK$PIP_ARGS" ] || echo "make's variables reach pip" >> "$CALLS"
  case "$FAKE $*" in
  offline*) echo "ERROR: No matching distribution" >&2; exit 1;;
  slow*torch*) echo $$ $PPID > pids; exec sleep 60;;
  full*torch*) echo "ERROR: [Errno 28] No space left on device" >&2; exit 1;;
  updated*torch*) echo another==1 >> constraints.txt;;
  no-cpu*torch==*+cpu*) exit 1;;
  *) mkdir -p "$site/$(echo "$*" | cksum | tr ' ' -)";;
  esac;;
"-m app serve"*) echo "served: $@";;
{RUN}
esac
"""
UV = '#!/bin/sh\necho "uv $@" >> "$CALLS"\n'


@pytest.mark.parametrize(
    ("asked", "built", "names_sources", "gpu", "platform", "build", "attempts"),
    [
        ("", "", False, False, "linux", "cpu", [[CPU, *FROM_INDEX], [PIN]]),
        ("", "any", False, True, "linux", "cuda", [[CUDA]]),
        ("", "", False, True, "darwin", "any", [[PIN]]),
        ("", "cpu", False, True, "linux", "cpu", [[CPU, *FROM_INDEX], [PIN]]),
        ("", "cpu", True, False, "linux", "any", [[PIN]]),
        ("torch==2.12.0", "cuda", False, False, "linux", "cuda", [["torch==2.12.0,!=2.12.0+cpu"]]),
        ("cpu", "", False, True, "linux", "cpu", [[CPU, *FROM_INDEX]]),
        ("cuda", "cpu", False, False, "linux", "cuda", [[CUDA]]),
        ("torch==2.12.0", "", False, False, "linux", "cpu", [["torch==2.12.0+cpu", *FROM_INDEX], ["torch==2.12.0"]]),
        ("torch==2.12.0+cu126", "", False, False, "linux", "any", [["torch==2.12.0+cu126"]]),
        ("./torch.whl", "", False, True, "linux", "any", [["./torch.whl"]]),
        ("", "", True, False, "linux", "any", [[PIN]]),
        ("cpu", "", True, False, "linux", "cpu", [[CPU]]),
    ],
)
def test_torch_build_fits_the_machine_unless_a_variable_overrides_it(
    asked: str,
    built: str,
    names_sources: bool,
    gpu: bool,
    platform: str,
    build: str,
    attempts: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(install, "has_gpu", lambda: gpu)
    monkeypatch.setattr(sys, "platform", platform)
    assert choose_torch(asked, built, PIN, names_sources=names_sources) == (build, attempts)


def test_torch_build_can_be_chosen_only_on_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(InstallError, match="TORCH=cuda is for Linux"):
        choose_torch("cuda", "", PIN, names_sources=False)


@pytest.mark.parametrize(
    ("script", "found"),
    [("echo 'GPU 0: NVIDIA H100 80GB HBM3'", True), ("echo NVIDIA-SMI has failed; exit 9", False), ("exit 0", False)],
)
def test_gpu_is_detected_by_nvidias_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, found: bool
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    _program(tmp_path / "nvidia-smi", f"#!/bin/sh\n{script}\n")
    assert has_gpu() is found


def test_options_come_from_make_variables() -> None:
    settings = InstallOptions.read(
        "dev", {"PIP_ARGS": "--find-links 'a b'", "LOCK": "x.lock y.lock", "VENV": "", "UV": " "}
    )
    assert settings.pip_args == ("--find-links", "a b") and settings.names_sources
    assert settings.locks == ("x.lock", "y.lock") and settings.venv == ROOT / ".venv" and settings.uv == ""
    assert not InstallOptions.read("dev", {"PIP_ARGS": "--retries 2"}).names_sources
    with pytest.raises(InstallError, match="PIP_ARGS cannot be read"):
        InstallOptions.read("dev", {"PIP_ARGS": "'"})


def test_environment_is_complete_if_it_matches_the_request(tmp_path: Path) -> None:
    note = {"root": str(ROOT), "inputs": install.inputs_digest(), "group": "dev", "asked": "cpu", "built": "cpu"}
    note["python"] = "/other"
    asked = InstallOptions(group="dev", venv=tmp_path, torch="cpu")
    assert is_complete(asked, note) and is_complete(asked._replace(group="runtime", torch=""), note)
    assert not is_complete(asked._replace(torch="cuda"), note)
    assert not is_complete(asked._replace(asks_for_python=True), note)
    for changes in ({"group": "runtime"}, {"root": "/elsewhere"}, {"inputs": "before an update"}):
        assert not is_complete(asked, note | changes), changes
    for content in (b"", b"[]", b"\xff", b'{"root": "x", "torch_asked": ""}'):
        (tmp_path / "installed").write_bytes(content)
        assert not is_complete(asked, read_note(tmp_path))
    write_note(tmp_path, note)
    assert is_complete(asked, read_note(tmp_path))
    write_note(tmp_path, {})
    assert read_note(tmp_path) == {} and not is_complete(asked, {})


def _program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with a space in its name and all files that an installation reads."""
    folder = tmp_path / "my checkout"
    for name in (
        "constraints.txt", "pyproject.toml", "requirements.lock", "requirements-dev.lock", "Makefile",
        "deploy/__init__.py", "deploy/install.py",
    ):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "app").mkdir()
    (folder / "app/__main__.py").touch()
    _program(folder / "python", PYTHON)
    _program(folder / "inner", INNER)
    return folder


def _command(folder: Path, *arguments: str, fake: str = "") -> tuple[list[str], dict[str, str]]:
    kept_out = ("LOCK", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PIP_ARGS", "PYTHON_ASKED", "TORCH", "UV", "VENV")
    environment = {name: value for name, value in os.environ.items() if name not in kept_out and name[:4] != "PIP_"}
    environment |= {"FAKE": fake, "REAL": os.path.realpath(sys.executable), "PATH": f"{folder}:{os.environ['PATH']}"}
    environment |= {"BASE": str(folder / "python"), "CALLS": str(folder / "calls")}
    return ["make", "UV=", *arguments], environment


def _make(folder: Path, *arguments: str, fake: str = "") -> subprocess.CompletedProcess[str]:
    command, environment = _command(folder, "PYTHON=python", *arguments, fake=fake)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False)


def _make_environment(folder: Path) -> None:
    """An environment that make did not create."""
    (folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(folder / "inner", folder / ".venv/bin/python")


def _calls(folder: Path) -> list[str]:
    """The calls of pip since the last call of this function."""
    calls = folder / "calls"
    lines = calls.read_text().splitlines() if calls.exists() else []
    calls.unlink(missing_ok=True)
    return lines


@needs_make
def test_serve_installs_its_packages_once(checkout: Path) -> None:
    first = _make(checkout, "serve", "PORT=9", "WEIGHTS=my weights")
    assert first.returncode == 0, first.stderr
    assert first.stdout == "served: -m app serve --port 9 --weights my weights\n"
    packages, torch, link = _calls(checkout)
    assert "--require-hashes --no-deps -r requirements.lock" in packages and "requirements-dev" not in packages
    assert "torch==2.13.0+cpu --extra-index-url" in torch
    assert link.endswith("--no-build-isolation -e .[guided]")
    second = _make(checkout, "serve")
    assert second.stderr == "" and second.stdout == "served: -m app serve\n" and _calls(checkout) == []


@needs_make
def test_developer_lock_is_recognized_by_file_name_only(checkout: Path) -> None:
    (checkout / "my-dev").mkdir()
    shutil.copy(checkout / "requirements.lock", checkout / "my-dev")
    assert _make(checkout, "runtime", "LOCK=my-dev/requirements.lock my-dev/requirements-dev.lock").returncode == 0
    assert _calls(checkout)[0].endswith("-r my-dev/requirements.lock")


@needs_make
def test_install_adds_developer_tools_and_keeps_torch(checkout: Path) -> None:
    assert _make(checkout, "runtime", "TORCH=torch==2.12.0").returncode == 0
    _calls(checkout)
    result = _make(checkout, "install")
    packages, torch, link = _calls(checkout)
    assert "-r requirements.lock -r requirements-dev.lock" in packages and link.endswith("-e .[dev]")
    assert "torch==2.12.0+cpu" in torch, result.stderr
    assert _make(checkout, "runtime").stderr == "" and _calls(checkout) == []
    assert _make(checkout, "install").stderr == f"{checkout}/.venv is complete\n"


@needs_make
def test_new_torch_choice_or_update_reinstalls_and_pip_args_are_passed_on(checkout: Path) -> None:
    assert _make(checkout, "runtime", "LOCK=", 'PIP_ARGS=--index-url "a b"').returncode == 0
    torch, link = _calls(checkout)
    assert "--index-url a b -c" in torch and torch.endswith(" torch==2.13.0") and "-r " not in torch + link
    assert _make(checkout, "runtime").returncode == 0 and _calls(checkout) == []
    assert _make(checkout, "runtime", "TORCH=cpu").returncode == 0 and "+cpu" in _calls(checkout)[1]
    with (checkout / "constraints.txt").open("a") as file:
        file.write("another==1\n")
    assert _make(checkout, "runtime").returncode == 0 and "torch==2.13.0+cpu" in _calls(checkout)[1]


@needs_make
def test_update_during_an_installation_is_installed_by_the_next_make(checkout: Path) -> None:
    assert _make(checkout, "runtime", fake="updated").returncode == 0 and _calls(checkout)
    assert _make(checkout, "runtime").returncode == 0 and _calls(checkout)
    assert _make(checkout, "runtime").stderr == "" and _calls(checkout) == []


@needs_make
def test_torch_build_stays_when_a_gpu_appears_until_torch_auto(checkout: Path) -> None:
    assert _make(checkout, "runtime").returncode == 0
    _program(checkout / "nvidia-smi", "#!/bin/sh\necho 'GPU 0: NVIDIA H100'\n")
    _calls(checkout)
    assert _make(checkout, "install").returncode == 0 and CPU in _calls(checkout)[1]
    assert _make(checkout, "runtime", "TORCH=auto").returncode == 0 and _calls(checkout)[1].endswith(f" {CUDA}")
    assert _make(checkout, "runtime", "TORCH=auto").stderr == "" and _calls(checkout) == []
    assert _make(checkout, "runtime", "TORCH=cuda").returncode == 0 and _calls(checkout)
    assert _make(checkout, "runtime", "TORCH=auto").returncode == 0 and _calls(checkout), "auto replaces the old choice"


@needs_make
def test_missing_cpu_build_is_reported_before_the_cuda_build_is_installed(checkout: Path) -> None:
    result = _make(checkout, "runtime", fake="no-cpu")
    _, *attempts, _ = _calls(checkout)
    assert [call.partition("torch==")[2].split()[0] for call in attempts] == ["2.13.0+cpu", "2.13.0"]
    assert "no CPU build of torch there: the build with CUDA comes instead" in result.stderr
    demanded = _make(checkout, "runtime", "TORCH=cpu", fake="no-cpu")
    assert demanded.returncode == 2 and "error: torch, cpu build could not be installed" in demanded.stderr


@needs_make
def test_full_disk_is_not_mistaken_for_a_missing_build(checkout: Path) -> None:
    result = _make(checkout, "runtime", fake="full")
    assert len(_calls(checkout)) == 2 and "no CPU build" not in result.stderr and result.returncode == 2
    assert "ERROR: [Errno 28]" in result.stderr, "pip's message is shown"
    assert f"error: the disk of {checkout}/.venv is full: free 2 GB" in result.stderr


@needs_make
def test_uv_installs_if_available_and_pip_has_no_configuration(checkout: Path) -> None:
    _program(checkout / "uv", UV)
    assert _make(checkout, "runtime", "UV=uv").returncode == 0
    packages, torch, link = _calls(checkout)
    assert packages.startswith("uv pip install --python ") and packages.endswith("--no-deps -r requirements.lock")
    assert "torch==2.13.0+cpu --extra-index-url" in torch and link.endswith("--no-build-isolation -e .[guided]")
    for arguments, fake in (("PIP_ARGS=--retries 2", ""), ("PIP_ARGS=", "configured")):
        (checkout / ".venv/installed").unlink()
        assert _make(checkout, "runtime", "UV=uv", arguments, fake=fake).returncode == 0
        calls = _calls(checkout)
        assert calls and all(call.startswith("-m pip install") for call in calls)


@needs_make
@pytest.mark.parametrize(
    ("fake", "message"),
    [
        ("old", "error: inkstream needs Python 3.11 or newer, and python is none; install one (Debian"),
        ("old-venv", "/.venv has Python 3.10, too old: remove it, then run make again"),
        ("no-venv", "cannot make a virtual environment (Debian: apt install python3-venv)"),
        ("offline", "error: packages could not be installed, pip says why above"),
    ],
)
def test_each_obstacle_is_one_line_with_a_remedy(checkout: Path, fake: str, message: str) -> None:
    if fake == "old-venv":
        _make_environment(checkout)
    result = _make(checkout, "serve", fake=fake)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2 and len(errors) == 1 and message in errors[0], result.stderr
    assert "Traceback" not in result.stderr and not (checkout / ".venv/installed").exists()
    assert bool(_calls(checkout)) == (fake == "offline")
    assert _make(checkout, "serve").returncode == 0


@needs_make
def test_without_a_compiler_torch_computes(checkout: Path) -> None:
    result = _make(checkout, "serve", fake="no-compiler")
    assert result.returncode == 0 and "no native kernels, torch computes instead" in result.stderr
    assert "error: no compiler" in result.stderr


@needs_make
def test_environment_still_serves_after_a_failed_installation(checkout: Path) -> None:
    assert _make(checkout, "runtime").returncode == 0
    assert _make(checkout, "install", fake="offline").returncode == 2
    _calls(checkout)
    assert _make(checkout, "serve").stdout == "served: -m app serve\n" and _calls(checkout) == []


@needs_make
def test_unwritable_folder_and_missing_python_are_errors(checkout: Path) -> None:
    (checkout / ".venv").touch()
    result = _make(checkout, "serve")
    assert result.returncode == 2 and "clone to where you may write" in result.stderr
    (checkout / ".venv").unlink()
    result = _make(checkout, "serve", "PYTHON=no-python")
    assert result.returncode == 2 and "and no-python is none" in result.stderr


def _pids(folder: Path) -> tuple[int, int]:
    """The pids of the pip that installs torch and of the installation, once both run."""
    while not (folder / "pids").exists() or not (folder / "pids").read_text().endswith("\n"):
        time.sleep(0.02)
    pip, installation = map(int, (folder / "pids").read_text().split())
    return pip, installation


@needs_make
@pytest.mark.parametrize("ends", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_interrupted_installation_restarts_and_pip_always_holds_the_lock(checkout: Path, ends: signal.Signals) -> None:
    """Ctrl+C and kill end pip, too; a pip that outlives its make holds the lock."""
    command, environment = _command(checkout, "PYTHON=python", "runtime", fake="slow")
    lock = os.open(checkout, os.O_RDONLY)
    with subprocess.Popen(
        command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True, process_group=0
    ) as make:
        pip, installation = _pids(checkout)
        try:
            os.kill(-make.pid if ends == signal.SIGINT else installation, ends)
            if ends == signal.SIGKILL:
                make.wait(20)
                with pytest.raises(BlockingIOError):
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            else:
                assert make.stderr and "interrupted: the next make begins again" in make.stderr.read()
                make.wait(20)
                assert not Path(f"/proc/{pip}").exists()
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pip, signal.SIGKILL)
            os.close(lock)
    assert make.returncode and read_note(checkout / ".venv") == {}
    (checkout / ".venv/part").touch()
    assert _make(checkout, "runtime").returncode == 0 and not (checkout / ".venv/part").exists()


@needs_make
def test_moved_or_broken_environment_is_recreated_and_a_foreign_one_completed(checkout: Path) -> None:
    _make_environment(checkout)
    (checkout / ".venv/mine").touch()
    assert _make(checkout, "runtime").returncode == 0 and (checkout / ".venv/mine").exists()
    moved = checkout.with_name("moved")
    checkout.rename(moved)
    assert _make(moved, "runtime").returncode == 0 and not (moved / ".venv/mine").exists()
    (moved / ".venv/bin/python").unlink()
    (moved / ".venv/bin/python").symlink_to("/nowhere/python3.11")
    write_note(moved / ".venv", {})
    assert _make(moved, "runtime").returncode == 0


@needs_make
def test_linked_or_foreign_environment_is_never_changed(
    checkout: Path,
) -> None:
    assert _make(checkout, "runtime").returncode == 0
    own, elsewhere = checkout / ".venv", checkout.with_name("elsewhere")
    own.rename(elsewhere)
    own.symlink_to(elsewhere)
    _calls(checkout)
    assert _make(checkout, "serve").stdout == "served: -m app serve\n" and _calls(checkout) == []
    other = shutil.copytree(checkout, checkout.with_name("other"), symlinks=True)
    for folder, arguments in ((checkout, ["TORCH=torch==2.12.0"]), (other, [])):  # incomplete; another folder's
        result = _make(folder, "serve", *arguments)
        assert result.returncode == 2 and "is a link, or the environment of another checkout" in result.stderr
    own.unlink()
    elsewhere.rename(own)
    result = _make(other, "serve", f"VENV={os.path.relpath(own, other)}")
    assert result.returncode == 2 and "is a link, or the environment of another checkout" in result.stderr
    assert _calls(checkout) == [] and _make(checkout, "serve").stderr == "", "nothing was changed"


@needs_make
def test_two_concurrent_makes_install_once(checkout: Path) -> None:
    lock = os.open(checkout, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    command, environment = _command(checkout, "PYTHON=python", "runtime")
    with subprocess.Popen(command, cwd=checkout, env=environment, stderr=subprocess.PIPE, text=True) as make:
        assert make.stderr and "another make is installing here" in make.stderr.readline()
        note = {"root": str(checkout), "inputs": install.inputs_digest(), "group": "runtime", "asked": "", "built": ""}
        (checkout / ".venv").mkdir()
        (checkout / ".venv/installed").write_text(json.dumps({**note, "python": str(checkout / "python")}))
        os.close(lock)
        make.stderr.read()
    assert make.returncode == 0 and _calls(checkout) == []


@needs_make
@pytest.mark.parametrize("target", ["serve", "lint", "help", "gpu-check"])
def test_every_target_refuses_an_unknown_variable(checkout: Path, target: str) -> None:
    result = _make(checkout, target, "WEIGHT=x", "CUDA_VISIBLE_DEVICES=0", "CXX=c++")
    assert result.returncode == 2 and "*** WEIGHT: no variable of make, which has ARGS" in result.stderr
    assert result.stdout == "" and not (checkout / ".venv").exists()
