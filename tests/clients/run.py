"""Runs real clients of the completions API against the service, and prints a table: `make clients ONLY="llm"`.

Every client of clients.toml has its own environment in .clients/, made on first use. A client passes when its
script ends with 0; the script prints a line for each of its checks.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import ROOT
from tests.support.servers import Server, start_server, stop_server

HERE = Path(__file__).parent
ENVIRONMENTS = ROOT / ".clients"


@dataclass(frozen=True, slots=True, kw_only=True)
class Client:
    """A client as described in clients.toml."""

    name: str
    script: str
    packages: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()
    first: tuple[str, ...] = ()
    services: tuple[str, ...] = ("--dtype float32",)
    heavy: bool = False

    @property
    def folder(self) -> Path:
        """The directory of its environment."""
        return ENVIRONMENTS / self.name


class Outcome(NamedTuple):
    """The result of running a client."""

    client: Client
    passed: bool
    checks: int
    failed: int
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Runs the clients; returns 0 if all of them pass."""
    clients = read_clients()
    light = [name for name, client in clients.items() if not client.heavy]
    parser = argparse.ArgumentParser(description="Run real clients against the service.")
    parser.add_argument("names", nargs="*", metavar="CLIENT", help=f"{', '.join(clients)}; default: all but heavy ones")
    parser.add_argument("--weights", type=Path, default=ROOT / "weights")
    parser.add_argument("--list", action="store_true", help="only list the clients")
    options = parser.parse_args(argv)
    if unknown := [name for name in options.names if name not in clients]:
        parser.error(f"unknown {', '.join(unknown)}; clients are {', '.join(clients)}")
    if options.list:
        print("\n".join(f"{c.name:13} {' '.join(c.packages + c.npm)}{'  (heavy)' * c.heavy}" for c in clients.values()))
        return 0
    chosen = [clients[name] for name in options.names or light]
    for client in chosen:
        install(client)
    with services(options.weights) as url:
        outcomes = [run(client, url, options.weights) for client in chosen]
        print(table(outcomes))
    return 0 if all(outcome.passed for outcome in outcomes) else 1


def read_clients() -> dict[str, Client]:
    """All clients of clients.toml, by name."""
    entries = tomllib.loads((HERE / "clients.toml").read_text())
    return {
        name: Client(name=name, **{key: tuple(v) if isinstance(v, list) else v for key, v in entry.items()})
        for name, entry in entries.items()
    }


def install(client: Client) -> None:
    """Makes the client's environment if it is missing or has other versions."""
    made_of = json.dumps([client.first, client.packages, client.npm])
    stamp = client.folder / "made-of.json"
    if stamp.exists() and stamp.read_text() == made_of:
        return
    print(f"installing {' '.join(client.packages + client.npm)}", flush=True)
    shutil.rmtree(client.folder, ignore_errors=True)
    client.folder.mkdir(parents=True)
    if client.packages:
        subprocess.run([sys.executable, "-m", "venv", client.folder], check=True)
        pip = [client.folder / "bin/python", "-m", "pip", "install", "-qq", "--disable-pip-version-check"]
        for packages in filter(None, (client.first, client.packages)):
            subprocess.run([*pip, *shlex.split(os.environ.get("PIP_ARGS", "")), *packages], check=True)
    if client.npm:
        npm = shutil.which("npm") or sys.exit(f"error: {client.name} needs Node.js and npm (Debian: apt install npm)")
        subprocess.run([npm, "install", "--silent", "--prefix", client.folder, *client.npm], check=True)
    stamp.write_text(made_of)


@contextmanager
def services(weights: Path) -> Iterator[Callable[[str], str]]:
    """Yields a function from flags to the address of a service with these flags, started on first use.

    Stops all services at the end; raises AssertionError with the log of one that failed or logged an error.
    """
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:

        @cache
        def url(flags: str) -> str:
            fake, _, others = flags.rpartition(" ms a step: ")
            step = float(fake) if fake else None
            server = start_server(Path(folder), weights, *others.split(), fake_ms=step)
            stack.callback(_stop, server)
            return server.url

        yield url


def _stop(server: Server) -> None:
    code, log = stop_server(server), server.log.read_text()
    assert code == 0 and "Traceback" not in log and '"level": "error"' not in log, f"exit code {code}\n{log[-4000:]}"


def run(client: Client, url: Callable[[str], str], weights: Path) -> Outcome:
    """Runs the client's script in its environment and prints its output."""
    print(f"\n== {client.name}", flush=True)
    environment = {**os.environ, "PYTHONPATH": "", "CLIENT_WEIGHTS": str(weights), "CLIENT_ORACLE": sys.executable}
    script = HERE / client.script
    command: list[str | Path] = [client.folder / "bin/python" if client.packages else sys.executable, script]
    if client.npm:
        # Node resolves packages from the script's directory.
        command = ["node", shutil.copy(script, client.folder)]
    urls = [url(flags) for flags in client.services]
    started = time.monotonic()
    checks = failed = 0
    with subprocess.Popen([*command, *urls], stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout
        for line in process.stdout:
            print(line, end="", flush=True)
            checks += line.startswith(("ok ", "FAIL "))
            failed += line.startswith("FAIL ")
    passed = process.returncode == 0 and checks > 0 and not failed
    return Outcome(client, passed, checks, failed, time.monotonic() - started)


def table(outcomes: Sequence[Outcome]) -> str:
    """The table, one line for each client."""
    lines = [f"\n{'client':13} {'version':45} {'checks':>6} {'seconds':>7}  result"]
    for outcome in outcomes:
        version = " ".join(outcome.client.packages[:1] + outcome.client.npm)
        result = "passed" if outcome.passed else f"FAILED ({outcome.failed} checks)"
        lines.append(f"{outcome.client.name:13} {version:45} {outcome.checks:6} {outcome.seconds:7.1f}  {result}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
