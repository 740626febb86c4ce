"""Without keys the service listens on loopback only, and a keys file that other users can read is refused."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from app.cli.serve import main as serve_verb
from app.common import logs
from tests.support.keyed_server import Keyring
from tests.support.promise_figures import Promise
from tests.support.services import Services


@pytest.fixture
def keep_loggers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep pytest's loggers in this process."""
    monkeypatch.setattr(logs, "set_up", lambda _level, _how: None)


@pytest.mark.usefixtures("keep_loggers")
def test_start_refuses_to_serve_the_network_without_keys(
    tmp_path: Path, weights: Path, promise: Promise, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = Keyring.of(tmp_path / "empty.json", "revoked")
    empty.revoke("revoked")
    readable = Keyring.of(tmp_path / "readable.json", "alice")
    readable.file.chmod(0o604)
    damaged = tmp_path / "damaged.json"
    damaged.touch(mode=0o600)
    away = tmp_path / "away.json"
    everywhere = ["--host", "0.0.0.0"]
    cases = [
        (everywhere, "--keys-file"),
        (["--host", "::"], "--keys-file"),
        ([*everywhere, "--keys-file", str(empty.file)], "no key protects"),
        ([*everywhere, "--keys-file", str(readable.file)], f"chmod 600 {readable.file}"),
        (["--keys-file", str(readable.file)], f"chmod 600 {readable.file}"),
        (["--insecure-no-auth", "--keys-file", str(readable.file)], f"chmod 600 {readable.file}"),
        (["--keys-file", str(away)], "keys add NAME"),
        (["--keys-file", str(damaged)], "damaged"),
        (["--keys-file", str(tmp_path)], "not a regular file"),
        (["--allowed-hosts", "https://a.example"], "without scheme"),
        (["--allow-origin", "*"], "write https://a.example"),
        (["--allow-origin", "https://a.example/"], "no path"),
    ]
    refused = 0
    for flags, words in cases:
        # In this process, because a start takes a second. R25 tests that no port is bound.
        assert serve_verb(["--weights", str(weights), "--port", "0", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line, (flags, line)
        refused += 1
    promise.all_of("starts refused that would serve the network without keys", refused, len(cases))


@pytest.mark.parametrize("how", ["keys", "insecure"])
def test_listens_on_all_addresses_with_keys_or_insecure_no_auth(serve: Services, tmp_path: Path, how: str) -> None:
    ring = Keyring.of(tmp_path / "keys.json", "alice")
    flags, keys = ((), ring) if how == "keys" else (("--insecure-no-auth",), None)
    server = serve("--host", "0.0.0.0", *flags, ring=keys, wait=False, fake_ms=1)
    url = server.url.replace("0.0.0.0", "127.0.0.1")
    assert server.wait_for(lambda: httpx.get(f"{url}/health").status_code == 200, 30)
    assert httpx.get(f"{url}/v1/models").status_code == (401 if how == "keys" else 200)


def test_empty_keys_file_denies_every_request(serve: Services, tmp_path: Path) -> None:
    """A service on loopback may start without keys; the first added key takes effect."""
    ring = Keyring.of(tmp_path / "keys.json", "revoked")
    revoked = ring.headers("revoked")
    ring.revoke("revoked")
    server = serve(ring=ring, fake_ms=1)
    for headers in ({}, revoked):
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 401
    ring.add("alice")
    headers = ring.headers("alice")
    assert server.wait_for(lambda: httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200)
