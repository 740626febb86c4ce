"""No key and no hash of one stands in the arguments of a process, where every user of the machine can read it."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path

import httpx

from tests.support.keyed_server import Keyring, keyed_server
from tests.support.promise_figures import Promise
from tests.support.servers import stop_server


def _family(pid: int) -> list[int]:
    """A process and all that come of it."""
    found, queue = [], [pid]
    while queue:
        found.append(queue.pop())
        for task in Path(f"/proc/{found[-1]}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # a thread that has just ended
                queue += [int(child) for child in (task / "children").read_text().split()]
    return found


def test_no_process_of_the_service_shows_a_secret(tmp_path: Path, weights: Path, promise: Promise) -> None:
    ring = Keyring(tmp_path / "keys.json")
    key = ring.add("alice")
    # A client's variable in the service's own environment is a mistake that must not become an argument either.
    server = keyed_server(tmp_path, weights, ring, fake_ms=1, environment={"INKSTREAM_API_KEY": key})
    try:
        guided = {"prompt": "x", "max_tokens": 0, "regex": "[a-z]+", "stream": False}
        httpx.post(f"{server.url}/complete", headers=ring.headers("alice"), json=guided, timeout=60)
        family = _family(server.process.pid)
        assert len(family) >= 3, "the service, its engine, and its grammar validator"
        digest = hashlib.sha256(key.encode()).hexdigest()
        clean = 0
        for pid in family:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
            assert arguments and key not in arguments and key[4:] not in arguments and digest not in arguments
            clean += 1
        promise.all_of("S19", "processes without a secret in their arguments", clean, len(family))
        # Workers that parse untrusted grammars and templates get no secrets either.
        workers = [pid for pid in family[1:] if b"validator_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        assert workers
        for pid in workers:
            assert b"INKSTREAM_" not in Path(f"/proc/{pid}/environ").read_bytes()
    finally:
        assert stop_server(server) == 0
