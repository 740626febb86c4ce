"""Creates and completes the environment of all make targets: python -m deploy.install runtime|dev [--report].

make's variables are in the environment: LOCK, PIP_ARGS, PYTHON_ASKED, TORCH, UV, VENV. pip or uv installs the packages
of the locks by their hashes, torch in the build for this machine, and this folder; the native kernels are built
meanwhile. A run that has nothing to do ends in a moment.

<venv>/installed says what is there (JSON); it is {} while that changes, and what an interrupted run left is removed.
Only the standard library: nothing else is installed yet.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
"""Linux builds of torch without CUDA. The package index itself has those with CUDA, for x86-64 and for aarch64."""
EXTRAS = {"runtime": "guided", "dev": "dev"}
"""Group -> extras of this package. In order: each group includes the groups before it."""
_GROUPS = list(EXTRAS)
_KEYS = {"root", "inputs", "group", "asked", "built", "python"}
_SOURCES = re.compile(r"--(index-url|extra-index-url|find-links|no-index)\b|-[if]")
_START = "import app.cli.serve, app.engine.startup, app.engine.worker_loop, app.chat.template_worker"
"""Packages that a start of the service imports."""
_FULL_BYTES = 100_000_000
_FULL = re.compile(r"No space left on device|Disk quota exceeded|os error 28\b")
_NOT_INHERITED = {"LOCK", "PIP_ARGS", "PYTHONDONTWRITEBYTECODE", "PYTHONHOME", "PYTHONPATH", "TORCH", "UV", "VENV",
                  "VIRTUAL_ENV"}  # fmt: skip


class InstallError(Exception):
    """A failure with a message for users: what is wrong and what to do."""


class InstallOptions(NamedTuple):
    """Settings from make's variables."""

    group: str
    venv: Path
    torch: str = ""
    pip_args: tuple[str, ...] = ()
    locks: tuple[str, ...] = ()
    uv: str = ""
    asks_for_python: bool = False
    """Whether the environment must be one of the Python that runs this."""

    @classmethod
    def read(cls, group: str, variables: Mapping[str, str]) -> InstallOptions:
        """Reads make's variables from the environment. Raises InstallError."""
        try:
            pip_args = tuple(shlex.split(variables.get("PIP_ARGS", "")))
        except ValueError as error:
            raise InstallError(f"PIP_ARGS cannot be read ({error})") from None
        return cls(
            group=group,
            venv=ROOT / (variables.get("VENV") or ".venv"),
            torch=variables.get("TORCH", "").strip(),
            pip_args=pip_args,
            locks=tuple(variables.get("LOCK", "").split()),
            uv=variables.get("UV", "").strip(),
            asks_for_python=bool(variables.get("PYTHON_ASKED", "").strip()),
        )

    @property
    def names_sources(self) -> bool:
        """Whether PIP_ARGS sets the source of packages."""
        return any(map(_SOURCES.match, self.pip_args))


def choose_torch(asked: str, built: str, pin: str, *, names_sources: bool) -> tuple[str, list[list[str]]]:
    """The build (cpu, cuda, or any, which leaves the choice to pip) and arguments for pip, to be tried in turn.

    asked: TORCH=, of this make or one before. built: the build of before, which stays unless this make asks; without
    one (nothing, any) it is that for this machine. Raises InstallError.
    """
    build = asked if asked in ("cpu", "cuda") else ""
    requirement = pin if build or not asked else asked
    if build and sys.platform != "linux":
        raise InstallError(f"TORCH={asked} is for Linux: this system has one build of torch; leave it out")
    is_open = sys.platform == "linux" and not names_sources and re.fullmatch(r"torch==[\w.]+", requirement)
    if not build and is_open:
        build = built if built in ("cpu", "cuda") else "cuda" if has_gpu() else "cpu"
    build = build or "any"
    if build == "cuda":
        return build, [[f"{requirement},!={requirement.partition('==')[2]}+cpu"]]
    if build == "any":
        return build, [[requirement]]
    places = [] if names_sources else ["--extra-index-url", CPU_INDEX]
    return build, [[f"{requirement}+cpu", *places], *([] if asked == "cpu" else [[requirement]])]


def has_gpu() -> bool:
    """Whether NVIDIA's driver reports a GPU."""
    try:
        return subprocess.run(["nvidia-smi", "-L"], capture_output=True, timeout=20).stdout.startswith(b"GPU ")
    except (OSError, subprocess.SubprocessError):
        return False


def read_note(venv: Path) -> dict[str, Any] | None:
    """The record of what is installed; empty after an interrupted run; None if this version never ran."""
    try:
        note = json.loads((venv / "installed").read_bytes())
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) and note.keys() in (set(), _KEYS) else None


def write_note(venv: Path, note: Mapping[str, Any] | None) -> None:
    """Replaces the file at once; None removes it. Raises OSError."""
    new = venv / "installed.new"
    if note is None:
        (venv / "installed").unlink(missing_ok=True)
        return
    new.write_text(json.dumps(note) + "\n")
    new.replace(venv / "installed")


def inputs_digest() -> str:
    """Digest of the files that name the environment's packages. The locks only add hashes to constraints.txt."""
    return hashlib.sha256(
        b"".join((ROOT / name).read_bytes() for name in ("constraints.txt", "pyproject.toml"))
    ).hexdigest()


def is_complete(settings: InstallOptions, note: Mapping[str, Any] | None) -> bool:
    """Whether the environment matches the settings."""
    return bool(
        note
        and note["root"] == str(ROOT)
        and note["inputs"] == inputs_digest()
        and settings.group in _GROUPS[: _GROUPS.index(note["group"]) + 1]
        and (settings.torch in ("", note["asked"]) or (settings.torch == "auto" and _is_for_machine(settings, note)))
        and (not settings.asks_for_python or note["python"] == base_python())
    )


def _is_for_machine(settings: InstallOptions, note: Mapping[str, Any]) -> bool:
    """Whether torch is what TORCH=auto would install."""
    build, _ = choose_torch("", "", "torch==0", names_sources=settings.names_sources)
    return not note["asked"] and bool(note["built"] == build)


def base_python() -> str:
    """The interpreter behind the environment that this may run in."""
    return str(getattr(sys, "_base_executable", sys.executable))


class Installer:
    """One installation. The caller holds the lock, and the environment does not match the settings.

    What it starts inherits the lock: a pip that outlives this keeps other makes waiting.
    """

    def __init__(self, settings: InstallOptions, lock: int) -> None:
        self._settings = settings
        self._inherited = (lock,)
        self._venv = settings.venv
        self._python = str(settings.venv / "bin/python")
        self._note = read_note(settings.venv)
        known = self._note or {}
        self._group = max(settings.group, known.get("group", "runtime"), key=_GROUPS.index)
        asked = settings.torch or known.get("asked", "")
        self._asked = "" if asked == "auto" else asked
        self._built = "" if settings.torch else known.get("built", "")
        self._temporary = settings.venv / "tmp"
        kept = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self._environment = {**kept, "TMPDIR": str(self._temporary)}  # /tmp may be too small for torch
        self._tool, self._install = "pip", list[str]()
        self._was_full = False

    def run(self) -> None:
        """Raises InstallError, OSError, KeyboardInterrupt."""
        began = time.monotonic()
        inputs = inputs_digest()  # a git pull meanwhile is installed by the next make
        self._check_owned()
        say(f"installing into {self._venv}, for {self._group} (docs/install.md)")
        self._make_environment()
        before = self._packages()
        write_note(self._venv, {})
        self._temporary.mkdir(exist_ok=True)
        log = self._venv / "kernels.log"
        with log.open("wb") as output:
            command = [base_python(), "-m", "app", "compile"]
            kernels = subprocess.Popen(
                command, cwd=ROOT, env=self._environment, stdout=output, stderr=output, pass_fds=self._inherited
            )
        try:
            build = self._install_all()
        except BaseException:
            kernels.terminate()
            if self._packages() == before:  # nothing changed, for example without a network
                write_note(self._venv, self._note)
            raise
        finally:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if kernels.wait():
            say(f"  no native kernels, torch computes instead, but slower: {log.read_text().strip()[-500:]}")
        note = {"root": str(ROOT), "inputs": inputs, "group": self._group, "python": base_python()}
        write_note(self._venv, {**note, "asked": self._asked, "built": build})
        say(f"installed in {time.monotonic() - began:.0f} s")

    def _check_owned(self) -> None:
        """Refuses to change an environment that may serve something else: one behind a link, or of another checkout."""
        owner = (self._note or {}).get("root", str(ROOT))
        if self._venv.is_symlink() or (owner != str(ROOT) and self._venv.resolve().is_relative_to(owner)):
            raise InstallError(
                f"{self._venv} is a link, or the environment of another checkout, and not complete for this one: "
                "remove it, or name another folder with VENV=DIR, then run make again"
            )

    def _packages(self) -> set[str]:
        return {path.name for path in self._venv.glob("lib/python3*/site-packages/*")}

    def _make_environment(self) -> None:
        """Ends with a Python that has pip."""
        note = self._note
        is_stale = note is not None and (
            note.get("root") != str(ROOT) or (self._settings.asks_for_python and note["python"] != base_python())
        )
        if not is_stale and Path(self._python).exists():
            look = [self._python, "-c", "import sys; print('%d.%d' % sys.version_info[:2]); import pip"]
            found = subprocess.run(look, capture_output=True, text=True)
            version = found.stdout.strip()
            if version and tuple(map(int, version.split("."))) < (3, 11):
                raise InstallError(f"{self._venv} has Python {version}, too old: remove it, then run make again")
            if not found.returncode:
                return
        self._venv.mkdir(parents=True, exist_ok=True)
        if note is not None:  # make made it, so make may empty it; the folder stays, since it may be a mount point
            write_note(self._venv, {})
            for path in self._venv.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != "installed":
                    path.unlink()
        self._note = None
        command = [base_python(), "-m", "venv", str(self._venv)]
        if subprocess.run(command, stdout=sys.stderr, pass_fds=self._inherited).returncode:
            self._fail(f"{base_python()} cannot make a virtual environment (Debian: apt install python3-venv)")

    def _choose_tool(self) -> None:
        """uv where it is installed and pip has no settings or arguments of its own."""
        loudness = [] if sys.stderr.isatty() else ["-qq"]
        ask = [self._python, "-m", "pip", "config", "list"]
        config = subprocess.run(ask, env=self._environment, capture_output=True, text=True).stdout
        uv = shutil.which(self._settings.uv) if self._settings.uv else None
        if uv and not self._settings.pip_args and not config.strip():
            command = [uv, "pip", "install", "--python", self._python, "--index-strategy", "unsafe-best-match"]
            self._tool, self._install = "uv", [*command, *loudness]  # as pip does: the best of all indexes
            return
        options = ["--no-compile", "--disable-pip-version-check", "--no-input", *loudness, *self._settings.pip_args]
        self._install = [self._python, "-m", "pip", "install", *options]

    def _install_all(self) -> str:
        """Packages, torch, this folder. Returns torch's build."""
        self._choose_tool()
        pins = (ROOT / "constraints.txt").read_text()
        pin = re.findall(r"^torch==\S+", pins, re.MULTILINE)[0]
        constraints = self._venv / "constraints.txt"
        constraints.write_text(pins.replace(f"{pin}\n", ""))
        locks = [name for name in self._settings.locks if self._group == "dev" or "-dev" not in Path(name).name]
        if locks:
            files = [part for name in locks for part in ("-r", name)]
            self._call("packages", "--require-hashes", "--no-deps", *files)
        build, attempts = choose_torch(self._asked, self._built, pin, names_sources=self._settings.names_sources)
        for attempt in attempts:
            is_last = attempt is attempts[-1]
            step = f"torch, {build} build"
            if self._call(step, "-c", str(constraints), *attempt, may_fail=not is_last):
                break
            build = "any"
            say("  no CPU build of torch there: the build with CUDA comes instead, 2.7 GB to fetch (Ctrl+C stops)")
        isolation = ["--no-build-isolation"] if locks else []
        self._call("inkstream", "-c", str(constraints), *isolation, "-e", f".[{EXTRAS[self._group]}]")
        if subprocess.run([self._python, "-c", _START], cwd=ROOT, env=self._environment, stdout=sys.stderr).returncode:
            self._fail(
                "the installed packages cannot be imported, Python says why above; rm -r .venv makes a new start"
            )
        if self._group == "dev":  # tools import most modules; some of torch's files are no Python
            command = [self._python, "-m", "compileall", "-qq", "-j", "0", str(self._venv / "lib")]
            subprocess.run(command, env=self._environment, stdout=subprocess.DEVNULL, pass_fds=self._inherited)
        return build

    def _call(self, step: str, *arguments: str, may_fail: bool = False) -> bool:
        """Whether pip or uv could install this. Raises InstallError unless it may fail."""
        say(f"  {step} ({self._tool} installs)")
        impatient = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "15", "PIP_DEFAULT_TIMEOUT": "15", "UV_HTTP_RETRIES": "1"}
        environment = {**self._environment, **impatient} if may_fail else self._environment
        command = [*self._install, *arguments]
        # pip's progress is on stdout. uv's is on stderr, and only shown if that is the terminal.
        errors = subprocess.PIPE if self._tool == "pip" or may_fail else None
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=sys.stderr, stderr=errors, pass_fds=self._inherited,
            text=True, errors="replace",
        ) as child:  # fmt: skip
            try:
                for line in child.stderr or ():
                    self._was_full |= bool(_FULL.search(line))
                    print(line, end="", file=sys.stderr, flush=True)
                code = child.wait()
            except BaseException:
                child.kill()
                child.wait()
                raise
        if code and (not may_fail or self._is_full()):
            self._fail(
                f"{step} could not be installed, {self._tool} says why above; if the package index cannot be reached, "
                "docs/install.md says how to install from another one or from a folder; then run make again"
            )
        return not code

    def _is_full(self) -> bool:
        """Whether the disk is or was full: pip and uv remove what they could not finish."""
        return self._was_full or shutil.disk_usage(self._venv).free < _FULL_BYTES

    def _fail(self, message: str) -> None:
        if self._is_full():
            message = f"the disk of {self._venv} is full: free 2 GB (8 GB with CUDA), then run make again"
        raise InstallError(message)


def say(text: str) -> None:
    """Prints a line to standard error."""
    print(text, file=sys.stderr, flush=True)


def install(settings: InstallOptions, *, is_report: bool) -> None:
    """Completes the environment; a second make waits for the first. Raises InstallError, OSError, KeyboardInterrupt."""
    if not is_complete(settings, read_note(settings.venv)):
        lock = os.open(ROOT, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("another make is installing here: this one waits for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # a network file system without locks
        if not is_complete(settings, read_note(settings.venv)):
            Installer(settings, lock).run()
            return
    # After an update of the sources, or where a compiler was installed since. Without one this says nothing.
    subprocess.run([sys.executable, "-SEm", "app", "compile", "--quiet"], cwd=ROOT, stdout=sys.stderr)
    if is_report:
        say(f"{settings.venv} is complete")


def main(arguments: Sequence[str]) -> int:
    """Exit codes: 0 all is there; 2 it could not be installed; 130 interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        install(InstallOptions.read(arguments[0], os.environ), is_report="--report" in arguments)
    except InstallError as error:
        say(f"error: {error}")
        return 2
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "free some space" if is_full else f'clone to where you may write (git clone "{ROOT}" inkstream)'
        say(f"error: {error.filename or ROOT}: {error.strerror}; {remedy}, then run make there")
        return 2
    except KeyboardInterrupt:
        say("interrupted: the next make begins again, with the packages that are downloaded")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
