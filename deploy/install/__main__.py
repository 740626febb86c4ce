"""python -m deploy.install runtime|dev [--report]: make's variables are in the environment.

Ends in a moment if nothing is missing. python -m deploy.install --unknown NAME... judges names of variables.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from deploy.install.choices import OLDEST, InstallError, Settings
from deploy.install.installation import Installation, venv_name
from deploy.install.state import ROOT, is_complete, kernels_key, read_stamp, write_stamp
from deploy.install.steps import Progress
from deploy.install.variables import explain_variables


def read_settings(group: str, environment: Mapping[str, str]) -> Settings:
    """make's variables, as it exports them. Raises InstallError."""
    try:
        pip_args = tuple(shlex.split(environment.get("PIP_ARGS", "")))
    except ValueError as error:
        raise InstallError(f"PIP_ARGS cannot be read ({error})") from None
    return Settings(
        group=group,
        venv=ROOT / (environment.get("VENV") or ".venv"),
        torch=environment.get("TORCH", "").strip(),
        pip_args=pip_args,
        locks=tuple(environment.get("LOCK", "").split()),
        uv=environment.get("UV", "").strip(),
        python=environment.get("PYTHON_ASKED", "").strip(),
    )


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all is there; 2 it could not be installed; 130 interrupted."""
    if arguments[:1] == ["--unknown"]:
        print(explain_variables(arguments[1:]))
        return 0
    progress = Progress(sys.stderr)
    try:
        settings = read_settings(arguments[0], os.environ)
        signal.signal(signal.SIGTERM, _interrupt)
        if sys.version_info < OLDEST:
            raise InstallError(f"{settings.venv} has Python {sys.version.split()[0]}: remove it, then run make again")
        _install(settings, progress, is_report="--report" in arguments)
    except InstallError as error:
        progress.say(f"error: {error}")
        return 2
    except subprocess.SubprocessError as error:
        progress.say(f"error: {error}")
        return 2
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space, then run make again" if is_full else "then run make again"
        progress.say(f"error: {error.filename or ROOT}: {error.strerror}; {remedy}")
        return 2
    except KeyboardInterrupt:
        progress.say("interrupted: the next make goes on with what is downloaded")
        return 130
    return 0


def _install(settings: Settings, progress: Progress, *, is_report: bool) -> None:
    if not is_complete(settings, read_stamp(settings.venv)):
        with _alone(progress) as lock:
            if not is_complete(settings, read_stamp(settings.venv)):
                Installation(settings, progress, lock).run()
                return
    stamp = read_stamp(settings.venv)
    # Another user may have installed, whose cache this one may not read: Path.is_file() would raise.
    if not os.access(stamp["library"], os.R_OK) or stamp["kernels"] != kernels_key():
        _build_kernels(settings.venv, stamp)
    if is_report:
        name = venv_name(settings.venv)
        progress.say(f"installed in {name}: Python {stamp['python']}, torch {stamp['torch']}, for {stamp['group']}")


def _build_kernels(venv: Path, stamp: Mapping[str, object]) -> None:
    """After an update of their sources, or where a compiler was installed since. Failing, it only says so."""
    command = [sys.executable, "-m", "app", "compile"]
    library = ""
    if not subprocess.run([*command, "--quiet"], cwd=ROOT, stdout=sys.stderr, check=False).returncode:
        shown = subprocess.run([*command, "--check"], cwd=ROOT, capture_output=True, text=True, check=False).stdout
        found = re.search(r"^  file +(.+)$", shown, re.MULTILINE)
        library = found[1] if found else ""
    with contextlib.suppress(OSError):
        write_stamp(venv, {**stamp, "kernels": kernels_key(), "library": library})


@contextlib.contextmanager
def _alone(progress: Progress) -> Iterator[int]:
    """Holds the lock of this folder; a second make waits for the first."""
    lock = os.open(ROOT, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress.say("another make is installing here: this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a network file system without locks
        yield lock
    finally:
        os.close(lock)


def _interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
