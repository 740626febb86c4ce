"""No key and no hash of one appears in the arguments of a process, where every user of the machine can read it."""

from __future__ import annotations

import hashlib
from pathlib import Path

import httpx

from tests.support.keyed_server import Keyring
from tests.support.processes import family
from tests.support.promise_figures import Promise
from tests.support.services import Services


def test_no_process_has_a_secret_in_its_arguments(serve: Services, tmp_path: Path, promise: Promise) -> None:
    ring = Keyring(tmp_path / "keys.json")
    key = ring.add("alice")
    # A client's variable in the service's own environment is a mistake that must not become an argument either.
    server = serve(ring=ring, fake_ms=1, environment={"INKSTREAM_API_KEY": key})
    guided = {"prompt": "x", "max_tokens": 0, "regex": "[a-z]+", "stream": False}
    httpx.post(f"{server.url}/complete", headers=ring.headers("alice"), json=guided, timeout=60)
    processes = family(server.process.pid)
    assert len(processes) >= 3, "the service, its engine, and its grammar validator"
    digest = hashlib.sha256(key.encode()).hexdigest()
    clean = 0
    for pid in processes:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        assert arguments and key not in arguments and key[4:] not in arguments and digest not in arguments
        clean += 1
    promise.all_of("processes without a secret in their arguments", clean, len(processes))
    # Workers that parse untrusted grammars and templates get no secrets either.
    workers = [pid for pid in processes[1:] if b"validator_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert workers
    for pid in workers:
        assert b"INKSTREAM_" not in Path(f"/proc/{pid}/environ").read_bytes()
