"""Extracts the commands and programs of a documentation page, and runs them in a fresh clone."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from app.__main__ import main as inkstream
from tests.support import ROOT
from tests.support.nodejs import NODE
from tests.support.servers import Server, free_ports, start_server, stop_server

INKSTREAM = ".venv/bin/inkstream"
# Links to the repository in the clone, besides tiny `weights`. Pages may write next to them but not into them.
_CLONED = ("app", "benchmarks", "deploy", "docs", "examples", "model", "tests", "Makefile", "pyproject.toml")
_ADDRESS = re.compile(r"(?:localhost|127\.0\.0\.1):8000\b")
_PROXY = re.compile(r"(?:localhost|127\.0\.0\.1):8080\b")
# Programs that need no review: they change only files of the clone, or send requests to the service.
_PROGRAMS = {INKSTREAM, ".venv/bin/python", "cat", "cp", "curl", "echo", "kill", "ln", "mkdir", "mv", "nginx", "sed"}
_PROGRAMS |= {"set", "sleep"}
_SERVED = re.compile(r"make (?:serve|train)\b")
# Training as the pages show it takes minutes; with these flags a few steps take a second.
SHORT = ["--context", "32", "--windows", "4", "--device", "cpu", "--report-seconds", "0.001"]
NEW = ["--vocab-size", "300", "--layers", "1", "--width", "32", "--heads", "2"]


def reason_not_to_run(command: str) -> str | None:
    """Why a test must not run this command of a page; None if it may."""
    without_here = re.sub(r"<<-? *['\"]?(\w+).*", "", command, flags=re.DOTALL)
    for part in re.split(r"&&|\|\||[;|\n]|\bdo\b|\$\(", re.sub(r"'[^']*'", "''", without_here)):
        words = [word for word in part.replace(")", " ").split() if not re.match(r"\w+=", word)]
        program = next((word for word in words if word not in ("until", "while", "done", "if", "then", "fi")), "sleep")
        if program not in _PROGRAMS or {"-m", "pip"} <= set(words):
            return f"{program} is none of the programs that tests run"
    if path := re.search(r"(?:^|[\s=\"'>])(/(?!dev/null)[\w.]+|\.\./)", without_here):
        return f"{path[1]} is not in the clone"
    if address := re.search(r"https?://(?!127\.0\.0\.1|localhost)[^\s\"']+", command):
        return f"{address[0]} is not this machine"
    return None


@dataclass(frozen=True, slots=True)
class Fence:
    """A fenced block of a page."""

    language: str
    """Empty if the page names none."""
    text: str
    line: int
    not_run: str = ""
    """Why no test can run it, as a comment above it says: <!-- not run: REASON -->."""


def fences(page: str) -> list[Fence]:
    """The fenced blocks of a page, in order."""
    mark = r"(?:^ *<!-- not run: (?P<why>[^\n]+) -->\n)?"
    block = rf"{mark}^(?P<indent> *)```(?P<language>[\w-]*)\n(?P<text>.*?)^(?P=indent)```$"
    found = re.finditer(block, page, re.MULTILINE | re.DOTALL)
    return [
        Fence(match["language"], match["text"], page.count("\n", 0, match.start("indent")) + 1, match["why"] or "")
        for match in found
    ]


def reason_to_skip(fence: Fence, command: str = "") -> str | None:
    """Why a test leaves out a block, or this command of it; None if the test runs it."""
    if fence.not_run:
        return fence.not_run
    if script := re.match(r'"""(\w+\.py) ', fence.text):
        return f"the reader saves it as {script[1]}"
    if "HuggingFaceTB/" in command:
        return "downloads from the Hugging Face Hub"
    if command.startswith("make "):
        return None if _SERVED.match(command) else "tests run only make serve and make train"
    return reason_not_to_run(command)


def commands(page: str) -> list[str]:
    """Every command of a page's shell blocks, in order, without comments."""
    return [command for fence in fences(page) for command in commands_of(fence)]


def commands_of(fence: Fence) -> list[str]:
    """The commands of a shell block, or those after `$ ` in a transcript; other languages have none."""
    if fence.language == "console":
        return re.findall(r"^\$ (.+)$", fence.text, re.MULTILINE)
    return list(_split(fence.text)) if fence.language == "sh" else []


def _split(block: str) -> Iterator[str]:
    """Yields commands: lines joined where a backslash, an open quote or a here-document continues them."""
    pending = ""
    for line in block.splitlines():
        pending += line.partition("  #")[0].rstrip() + "\n"
        if not _continues(pending):
            if (command := pending.replace("\\\n", " ").strip()) and not command.startswith("#"):
                yield command
            pending = ""
    assert not pending, f"the block ends in the middle of {pending!r}"


def _continues(command: str) -> bool:
    here = re.search(r"<<-? *['\"]?(\w+)", command)
    if here:
        return re.search(rf"^\s*{here[1]}$", command, re.MULTILINE) is None
    try:
        shlex.split(command)
    except ValueError:
        return True
    return command.endswith("\\\n")


def made_command(words: list[str]) -> list[str]:
    """The last command that this `make` command line would run, as an inkstream command line."""
    printed = subprocess.run(
        [words[0], "--no-print-directory", "--dry-run", *words[1:]],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    last = shlex.split(printed.splitlines()[-1].replace("exec ", ""))
    assert last[:2] == [".venv/bin/python", "-m"], last
    return [INKSTREAM, *({"model.train": ["train"], "app": []}[last[2]]), *last[3:]]


class PageReader:
    """Runs the commands of a page in a fresh clone; trains for a few steps only."""

    def __init__(
        self, clone: Path, weights: Path, *, server: Server | None = None, fake_ms: float | None = None
    ) -> None:
        """`server` is already running. With `fake_ms`, services that the page starts have the fake engine."""
        self.clone, self._running, self._fake_ms = clone, server, fake_ms
        self.weights: Path = weights
        self._started: Server | None = None
        self._flags: list[str] = []
        self._steps = 2
        (self._proxy_port,) = free_ports(1)
        (clone / ".venv/bin").mkdir(parents=True)
        for name in _CLONED:
            if (ROOT / name).exists():
                (clone / name).symlink_to(ROOT / name)
        if not (clone / "weights").exists():
            (clone / "weights").symlink_to(weights)
        run = f'exec "{sys.executable}"'
        complete = 'if [ "$1" = complete ]; then shift; set -- complete "$@" --url "$DOCS_URL"; fi'
        for name, script in {"python": f'{run} "$@"', "inkstream": f'{complete}\n{run} -m app "$@"'}.items():
            (clone / ".venv/bin" / name).write_text(f"#!/bin/sh\n{script}\n")
            (clone / ".venv/bin" / name).chmod(0o755)

    @property
    def server(self) -> Server:
        """The service that the page started last, else the one that was already running."""
        server = self._started or self._running
        assert server, "the page uses a service that it does not start"
        return server

    def run_command(self, command: str) -> str:
        """Runs a command, and returns its output. Raises AssertionError if it fails."""
        words = [word for word in shlex.split(command) if word != "&"]
        if words[0] == "make":
            words = made_command(words)
        variables = [word for word in words if re.match(r"INKSTREAM_\w+=", word)]
        match words[len(variables) :]:
            case [program, "serve", *flags] if program == INKSTREAM:
                self._serve(flags, dict(word.split("=", 1) for word in variables))
            case [program, "train", *flags] if program == INKSTREAM:
                self._train(flags)
            case [program, "check", *flags] if program == INKSTREAM:
                assert inkstream(["check", *flags]) == 0  # in this process, which has already imported torch
            case [program, "completion", shell, ">", file] if program == INKSTREAM:
                with (self.clone / file.removeprefix("~/")).open("w") as script, redirect_stdout(script):
                    assert inkstream(["completion", shell]) == 0  # likewise
            case ["kill", "$!"]:
                self.close()  # SIGTERM too, and waits for the process
            case _:
                return self._shell(command)
        return ""

    def run_program(self, fence: Fence) -> str:
        """Runs a program of the page unchanged, and returns its output."""
        program = self._here(fence.text)
        command = {"python": [sys.executable, "-c"], "js": [NODE, "--input-type=module", "-e"]}[fence.language]
        return self.output([*map(str, command), program])

    def close(self) -> None:
        """Stops the service that the page started, and daemons that a failed page left running."""
        for file in self.clone.glob("*/*.pid"):
            os.kill(int(file.read_text()), signal.SIGTERM)
        if self._started:
            server, self._started = self._started, None
            assert stop_server(server) == 0, server.log.read_text()

    def _here(self, text: str) -> str:
        """Replaces the page's addresses by the service's address and a free port for a proxy."""
        text = _PROXY.sub(f"127.0.0.1:{self._proxy_port}", text)
        return _ADDRESS.sub(self.server.url.removeprefix("http://"), text) if _ADDRESS.search(text) else text

    def _serve(self, flags: list[str], variables: dict[str, str]) -> None:
        """Starts a service with the clone's files on a free port, unless it is already running."""
        if self._started and flags == self._flags:
            return
        self.close()
        self._flags = flags
        found = [str(self.clone / flag) if flag and (self.clone / flag).exists() else flag for flag in flags]
        self._started = start_server(
            self.clone, self.clone / "weights", *found, environment=variables, fake_ms=self._fake_ms
        )

    def _train(self, flags: list[str]) -> None:
        out = flags[flags.index("--out") + 1]
        shape = [] if "--init" in flags else NEW
        if "--dry-run" in flags:
            assert inkstream(["train", *flags, *shape, *SHORT]) == 0
            assert not (self.clone / out).exists()
            return
        if "--resume" in flags:
            self._steps += 1
        elif (self.clone / out).exists():
            shutil.rmtree(self.clone / out)
        assert inkstream(["train", *flags, *shape, *SHORT, "--steps", str(self._steps)]) == 0

    def _shell(self, command: str) -> str:
        """Runs a command in a shell that keeps variables; `$!` is the service that the page started."""
        if reason := reason_not_to_run(command):
            raise AssertionError(f"{command}: {reason}")
        if self._started:
            command = command.replace("$!", str(self._started.process.pid))
        state = self.clone / ".venv/variables"
        state.touch()
        names = " ".join(re.findall(r"(?:^|[;&] *)(?:export )?([A-Za-z_]\w*)=", command))
        keep = f'declare -p {names} >> "{state}"' if names else ":"
        script = f'. "{state}"; set -o pipefail\n{self._here(command)}\nstatus=$?; {keep}; exit $status'
        printed = self.output(["bash", "-c", script])
        if "curl" in command:  # curl exits with 0 whatever the status
            assert '{"error":' not in printed, printed
        return printed

    def output(self, command: list[str]) -> str:
        """Runs a program in the clone, and returns its output. Raises AssertionError if it fails."""
        variables = {name: value for name, value in os.environ.items() if not name.startswith("INKSTREAM_")}
        variables |= {"HOME": str(self.clone), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        variables["PATH"] += os.pathsep + "/usr/sbin"  # where Debian has nginx
        if self._started or self._running:
            variables["DOCS_URL"] = self.server.url
        with tempfile.TemporaryFile() as printed, tempfile.TemporaryFile() as errors:  # daemons would keep a pipe open
            files = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": errors}
            done = subprocess.run(command, cwd=self.clone, env=variables, timeout=120, **files)
            written = [(file.seek(0), file.read().decode())[1] for file in (printed, errors)]
        assert done.returncode == 0, "\n".join([command[-1], *written])
        return written[0]
