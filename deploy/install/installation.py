"""The steps of an installation, in order."""

from __future__ import annotations

import errno
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from deploy.install.choices import (
    OLDEST,
    UNAVAILABLE,
    InstallError,
    Settings,
    Torch,
    choose_torch,
    explain,
    look_at_machine,
    uv_options,
)
from deploy.install.state import GROUPS, ROOT, UNFINISHED, inputs_digest, kernels_key, read_stamp, write_stamp
from deploy.install.steps import Progress, Running, bytes_below, size_text

_EXTRAS = {"runtime": "guided", "dev": "dev"}
_DEV_LOCK = "requirements-dev.lock"
_ROOM_BYTES = {"runtime": 1_250_000_000, "dev": 1_900_000_000, "cpu": 950_000_000, "cuda": 8_000_000_000}
"""Space on disk that an environment, and torch alone, need while they are installed: their files and one download."""
_CUDA_DOWNLOAD = "2.7 GB"
_MODULES = ("app.cli.serve", "app.engine.startup", "app.engine.worker_loop", "app.chat.template_worker")
"""What a start of the service imports."""
_IMPATIENT = {"PIP_RETRIES": "1", "PIP_TIMEOUT": "15", "PIP_DEFAULT_TIMEOUT": "15", "UV_HTTP_RETRIES": "1"}
"""For an index that may not be reached. There are others."""
_NOT_INHERITED = {"PYTHONHOME", "PYTHONPATH", "VIRTUAL_ENV", "MAKEFLAGS", "MAKELEVEL"} | {
    "LOCK", "PIP_ARGS", "PYTHON_ASKED", "TORCH", "UV", "VENV",  # make's; pip and uv would take some for theirs
}  # fmt: skip


class Installation:
    """One run: the steps, in order. The caller holds the lock, and the environment is not what is asked for."""

    def __init__(self, settings: Settings, progress: Progress, lock: int) -> None:
        self._settings = settings
        self._progress = progress
        self._lock = lock
        self._venv = settings.venv
        self._unfinished = settings.venv / UNFINISHED
        self._temporary = settings.venv / "tmp"
        self._python = str(settings.venv / "bin/python")
        self._constraints = settings.venv / "constraints.txt"
        self._stamp = read_stamp(settings.venv)
        self._group = max(settings.group, self._stamp.get("group", "runtime"), key=GROUPS.index)
        self._environment = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        self._environment |= {"TMPDIR": str(self._temporary), "PYTHONDONTWRITEBYTECODE": "1"}
        self._running: list[Running] = []
        self._installer: tuple[str, ...] = ()
        self._tool = "pip"
        self._bytes = 0

    def run(self) -> None:
        """Raises InstallError, OSError, KeyboardInterrupt."""
        began = time.monotonic()
        self._check_owned()
        self._check_writable()
        name = venv_name(self._venv)
        self._progress.say(f"installing into {name}, for {self._group} (docs/install.md):")
        try:
            self._make_environment()
            kernels = self._start("kernels", [self._base_python(), "-m", "app", "compile"])
            self._install_packages()
            torch = self._install_torch()
            self._link()
            library = self._finish_kernels(kernels)
        except InstallError as error:
            if error.is_consistent:
                self._unfinished.unlink(missing_ok=True)
            raise
        finally:
            for process in self._running:
                process.stop()
            shutil.rmtree(self._temporary, ignore_errors=True)
        self._write_stamp(torch, library)
        self._unfinished.unlink()
        seconds = time.monotonic() - began
        self._progress.say(f"installed in {seconds:.0f} s; {name} takes {size_text(bytes_below(self._venv))}")

    # --- the environment

    def _check_owned(self) -> None:
        """Refuses to change an environment that may serve something else: one behind a link, or of another checkout."""
        is_foreign = self._stamp.get("root", str(ROOT)) != str(ROOT)
        if self._venv.is_symlink():
            raise InstallError(
                f"{venv_name(self._venv)} is a link to {self._venv.readlink()}, which is not a complete environment "
                "of this folder, and make changes nothing behind a link: remove the link, then run make again "
                "(VENV=DIR puts the environment elsewhere)"
            )
        if is_foreign and self._venv.resolve().is_relative_to(self._stamp["root"]):
            raise InstallError(f"{self._venv} is the environment of {self._stamp['root']}: name another with VENV=")

    def _check_writable(self) -> None:
        try:
            self._venv.mkdir(parents=True, exist_ok=True)
            probe = self._venv / "probe"
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise InstallError(
                f"{self._venv} cannot be written ({os.strerror(error.errno or 0).lower()}): copy this folder to where "
                f'you may write (git clone "{ROOT}" inkstream), and run make there'
            ) from None

    def _check_room(self, needed: int) -> None:
        free = shutil.disk_usage(self._venv).free
        if free < needed:
            raise InstallError(
                f"too little space: {size_text(free)} are free where {self._venv} is, and an installation needs up to "
                f"{size_text(needed)}: free some, or clone to another disk",
                is_consistent=True,
            )

    def _base_python(self) -> str:
        """The Python to make the environment with: that of PYTHON=, else the one that runs this."""
        if not self._settings.python:
            return str(getattr(sys, "_base_executable", sys.executable))
        asked = f"PYTHON={self._settings.python}"
        show = [*shlex.split(self._settings.python), "-c", "import sys; print(sys.version[:4], sys._base_executable)"]
        try:
            version, path = subprocess.run(show, capture_output=True, text=True, check=True).stdout.split(maxsplit=1)
        except (OSError, ValueError, subprocess.SubprocessError):
            raise InstallError(f"{asked} does not run: name a Python, such as PYTHON=python3.12") from None
        if tuple(map(int, version.rstrip(".").split("."))) < OLDEST:
            raise InstallError(f"{asked} is Python {version.rstrip('.')}: inkstream needs 3.11 or newer")
        return path.strip()

    def _make_environment(self) -> None:
        """Ends with a Python that has pip. What an interrupted run left is removed: packages may be there in part."""
        began, version = time.monotonic(), self._version()
        if why := self._why_anew(version):
            self._progress.say(f"  {self._venv.name} is made again: {why}")
            _clear(self._venv)
            self._stamp, version = {}, ""
        self._bytes = bytes_below(self._venv)
        self._temporary.mkdir(exist_ok=True)
        if not version or not self._has_pip():
            self._check_room(_ROOM_BYTES[self._group])
            self._unfinished.touch()
            self._create()
            version = self._version()
        self._unfinished.touch()
        self._choose_installer()
        self._finish("environment", f"Python {version}; {self._tool} installs", began)

    def _why_anew(self, version: str) -> str:
        if self._unfinished.exists():
            return "an earlier installation did not finish"
        if not version and os.path.lexists(self._python):
            return "its Python is gone"
        if self._stamp and self._stamp["root"] != str(ROOT):
            return "it was made for another folder"
        if self._stamp and self._settings.python not in ("", self._stamp["python_asked"]):
            return "PYTHON= asks for another Python"
        return ""

    def _create(self) -> None:
        base = self._base_python()
        if uv := self._uv():
            command = [uv, "venv", "--seed", "--allow-existing", "--python", base, str(self._venv)]
            if not self._call("environment", command)[0] and self._has_pip():
                return
        code, output = self._call("environment", [base, "-m", "venv", str(self._venv)])
        if code and "No space left" in output:
            raise explain(output, "venv")
        if code or not self._has_pip():
            self._show(output)
            raise InstallError(f"{base} cannot make a virtual environment (Debian: apt install python3-venv)")

    def _version(self) -> str:
        """Of the environment's Python; nothing if none runs."""
        try:
            show = [self._python, "-SEc", "import sys; print(sys.version)"]
            return subprocess.run(show, capture_output=True, text=True, check=True).stdout.split()[0]
        except (OSError, IndexError, subprocess.SubprocessError):
            return ""

    def _has_pip(self) -> bool:
        try:
            return not subprocess.run([self._python, "-m", "pip", "--version"], capture_output=True).returncode
        except OSError:
            return False

    def _uv(self) -> str | None:
        """uv, where it is installed and may be used: PIP_ARGS are pip's."""
        return shutil.which(self._settings.uv) if self._settings.uv and not self._settings.pip_args else None

    def _choose_installer(self) -> None:
        options = ("--quiet", "--no-compile", "--no-input", "--disable-pip-version-check", "--no-warn-script-location")
        self._installer = (self._python, "-m", "pip", "install", *options, *self._settings.pip_args)
        if uv := self._uv():
            show = [self._python, "-m", "pip", "config", "list"]
            shown = subprocess.run(show, capture_output=True, text=True, env=self._environment)
            sources = uv_options(shown.stdout)
            if sources is not None and not shown.returncode:
                command = (uv, "pip", "install", "--python", self._python, "--no-progress")
                self._installer, self._tool = (*command, "--index-strategy", "unsafe-best-match", *sources), "uv"

    # --- what goes into it

    def _install_packages(self) -> None:
        """Everything but torch, by its hash and without a look at what it asks for: the pins are complete."""
        pins = (ROOT / "constraints.txt").read_text().splitlines(keepends=True)
        self._constraints.write_text("".join(pin for pin in pins if not pin.startswith("torch==")))
        locks = [name for name in self._settings.locks if self._group == "dev" or Path(name).name != _DEV_LOCK]
        if locks:
            began = time.monotonic()
            number = sum(len(re.findall(r"^\w.*==", (ROOT / name).read_text(), re.MULTILINE)) for name in locks)
            files = [part for name in locks for part in ("-r", name)]
            self._install("packages", "--require-hashes", "--no-deps", *files)
            self._finish("packages", f"{number} packages, by their hashes", began)

    def _install_torch(self) -> Torch:
        """In the build for this machine, or in the one that can be had."""
        began = time.monotonic()
        settings = self._settings._replace(torch=self._asked())
        kept = "" if self._settings.torch == "auto" else self._torch_build()
        torch = choose_torch(settings, self._pin(), kept, look_at_machine())
        if torch.build not in ("", self._torch_build()):
            self._check_room(_ROOM_BYTES[torch.build])
        reason = torch.reason
        candidates = torch.candidates(names_sources=settings.names_sources)
        for requirement, options in candidates:
            is_last = (requirement, options) == candidates[-1]
            if is_last and torch.build == "cpu" and not torch.is_demanded:
                self._check_room(_ROOM_BYTES["cuda"])
                reason = "none for CPUs could be had"
                self._progress.say(
                    f"  torch: PyTorch's index of CPU builds cannot be reached; the build with CUDA comes instead, "
                    f"{_CUDA_DOWNLOAD} to fetch (Ctrl+C stops; PIP_ARGS names another index)"
                )
            command = [*self._installer, "-c", str(self._constraints), requirement, *options]
            code, output = self._call("torch", command, **(_IMPATIENT if options else {}))
            if not code:
                break
            if is_last or not UNAVAILABLE.search(output):
                self._fail(output)
        cuda = self._torch_cuda()
        build = f", {f'CUDA {cuda}' if cuda else 'CPU'} build" if torch.build else ""
        self._finish("torch", f"{self._torch_version()}{build}: {reason}", began)
        return torch

    def _asked(self) -> str:
        """TORCH= of this run, else of the one before, which TORCH=auto forgets."""
        if self._settings.torch:
            return self._settings.torch.replace("auto", "")
        earlier = self._venv / "torch"  # older Makefiles kept it there, and their default, too
        before = earlier.read_text().strip() if earlier.exists() and not self._stamp else ""
        return str(self._stamp.get("torch_asked", before.replace(self._pin(), "")))

    def _pin(self) -> str:
        return str(re.findall(r"^torch==\S+", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[0])

    def _torch_build(self) -> str:
        """Of the torch that is installed; nothing without one."""
        return ("cuda" if self._torch_cuda() else "cpu") if self._torch_version() else ""

    def _torch_version(self) -> str:
        found = [path.name for path in self._packages("torch-*.dist-info")]
        return found[0].removeprefix("torch-").removesuffix(".dist-info") if found else ""

    def _torch_cuda(self) -> str:
        for folder in self._packages("torch"):
            if found := re.search(r"^cuda\b[^=]*= ['\"]([\d.]+)", (folder / "version.py").read_text(), re.MULTILINE):
                return found[1]
        return ""

    def _packages(self, pattern: str) -> list[Path]:
        return list(self._venv.glob(f"lib/python3*/site-packages/{pattern}"))

    def _link(self) -> None:
        """This folder as an installed package; it builds with the setuptools of the lock. What it asks for is there.

        At the same time the modules are compiled that a start imports.
        """
        began, compiling = time.monotonic(), list[Running]()
        isolation: tuple[str, ...] = ()
        if self._settings.locks:  # without them, packages come now
            isolation, compiling = ("--no-build-isolation",), self._compile_modules()
        self._install("inkstream", "-c", str(self._constraints), *isolation, "-e", f".[{_EXTRAS[self._group]}]")
        imports, *others = compiling or self._compile_modules()
        if self._wait("inkstream", imports):
            self._show(imports.output())
            raise InstallError(
                "the installed packages cannot be imported, Python says why above; rm -r .venv makes a new start"
            )
        for process in others:  # some of torch's files are no Python
            self._wait("inkstream", process)
        if not others:  # bytecode that ensurepip made, and that a service never reads
            for folder in self._packages("pip/**/__pycache__"):
                shutil.rmtree(folder)
        self._finish("inkstream", "this folder as a package, modules compiled", began)

    def _compile_modules(self) -> list[Running]:
        """Those that a start imports, an eighth of all; for developers, whose tools import most, all of them."""
        write = "import sys; sys.dont_write_bytecode = False"
        imports = self._start("imports", [self._python, "-c", f"{write}; import {', '.join(_MODULES)}"])
        if self._group != "dev":
            return [imports]
        folders = map(str, self._packages(""))
        return [imports, self._start("compileall", [self._python, "-m", "compileall", "-q", "-j", "0", *folders])]

    def _finish_kernels(self, process: Running) -> str:
        """Path of the library; nothing where there is none: torch computes then."""
        code = self._wait("kernels", process)
        output = process.output()
        found = dict(re.findall(r"^  (file|compiler) +(.+)$", output, re.MULTILINE))
        if code or "file" not in found:
            reason = (output.strip().splitlines() or [f"exit code {code}"])[-1].removeprefix("error: ")
            self._progress.step("kernels", f"none, torch computes instead, but slower: {reason}", process.seconds, 0)
            return ""
        text = f"built by {found.get('compiler', 'a compiler')} at the same time"
        text = text if "already built" not in output else "already built"
        self._progress.step("kernels", text, process.seconds, Path(found["file"]).stat().st_size)
        return str(found["file"])

    # --- how

    def _install(self, step: str, *arguments: str) -> None:
        code, output = self._call(step, [*self._installer, *arguments])
        if code:
            self._fail(output)

    def _fail(self, output: str) -> NoReturn:
        self._show(output)
        raise explain(output, self._tool)

    def _show(self, output: str) -> None:
        """The end of what a tool wrote, without pip's lines of places that it skips or tries again."""
        noise = ("WARNING: Location", "WARNING: Retrying", "Looking in ")
        for line in [line for line in output.splitlines() if line.strip() and not line.startswith(noise)][-15:]:
            self._progress.say(f"    {line.rstrip()}")

    def _finish(self, name: str, text: str, began: float) -> None:
        seconds = time.monotonic() - began
        now = bytes_below(self._venv) - bytes_below(self._temporary)
        self._progress.step(name, text, seconds, now - self._bytes)
        self._bytes = now

    def _start(self, step: str, command: Sequence[str], **variables: str) -> Running:
        logs = self._venv / "logs"
        logs.mkdir(exist_ok=True)
        log = logs / f"{step}.log"
        environment = {**self._environment, **variables}
        process = Running(command, folder=ROOT, log=log, environment=environment, lock=self._lock)
        self._running.append(process)
        return process

    def _wait(self, step: str, process: Running) -> int:
        while (code := process.poll()) is None:
            for other in self._running:
                other.poll()  # notes when it ended
            self._progress.running(step, time.monotonic() - process.began, bytes_below(self._temporary))
            time.sleep(0.05)
        return code

    def _call(self, step: str, command: Sequence[str], **variables: str) -> tuple[int, str]:
        process = self._start(step, command, **variables)
        return self._wait(step, process), process.output()

    def _write_stamp(self, torch: Torch, library: str) -> None:
        stamp = {
            "root": str(ROOT),
            "group": self._group,
            "inputs": inputs_digest(),
            "torch_asked": self._asked(),
            "torch_build": torch.build and self._torch_build(),
            "torch": self._torch_version(),
            "python": self._version(),
            "python_asked": self._settings.python or self._stamp.get("python_asked", ""),
            "kernels": kernels_key(),
            "library": library,
        }
        write_stamp(self._venv, stamp)


def venv_name(venv: Path) -> str:
    """As short as it can be said."""
    return str(venv.relative_to(ROOT) if venv.is_relative_to(ROOT) else venv)


def _clear(folder: Path) -> None:
    """Removes what is in a folder, which may be a mount point."""
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
