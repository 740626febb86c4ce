"""Keys are named, stored as hashes, compared in constant time, never taken from a URL, and changed without a
restart.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from app.access import api_keys as keys_module
from app.access.api_keys import MAX_KEYS, ApiKeys, KeyFileError, add_key, new_key, read_keys, revoke_key, stored
from app.cli.keys import main as keys_verb
from tests.support import ROOT
from tests.support.keyed_server import Keyring, bearer, log_lines, raw_request, send_raw, status_of
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

Verb = Callable[..., tuple[object, str, str]]


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return Keyring(tmp_path / "keys.json")


@pytest.fixture(scope="module")
def served(serve_module: Services, tmp_path_factory: pytest.TempPathFactory) -> tuple[Server, Keyring]:
    ring = Keyring.of(tmp_path_factory.mktemp("served") / "keys.json", "alice")
    return serve_module(ring=ring, fake_ms=1), ring


def _status(server: Server, key: str) -> int:
    return httpx.get(f"{server.url}/v1/models", headers=bearer(key)).status_code


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Verb:
    """The verb `keys` in this process: exit code, standard output and error."""

    def run_verb(*arguments: str) -> tuple[object, str, str]:
        try:
            code: object = keys_verb(arguments)
        except SystemExit as end:
            code = end.code
        return code, *capsys.readouterr()

    return run_verb


def test_cli_adds_lists_and_revokes_keys(ring: Keyring, run: Verb, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ("--keys-file", str(ring.file))
    code, out, _ = run("add", "alice", *file, "--days", "30", "--requests-per-minute", "60")
    key = out.strip()
    assert (code, out.count("\n")) == (0, 1) and key.startswith("ink-") and len(key) == 47
    monkeypatch.setenv("INKSTREAM_KEYS_FILE", str(ring.file))
    assert run("add", "bob", "--tokens-per-minute", "9", "--concurrency", "2")[1].strip() not in ("", key)
    content = ring.file.read_text()
    assert key not in content and key[4:] not in content and hashlib.sha256(key.encode()).hexdigest() in content
    assert stat.S_IMODE(ring.file.stat().st_mode) == 0o600
    listed = run("list", *file)[1]
    assert [line.split()[0] for line in listed.splitlines()] == ["NAME", "alice", "bob"]
    assert key not in listed and "60" in listed
    assert run("revoke", "alice", *file)[0] == 0
    assert [stored.name for stored in read_keys(ring.file)] == ["bob"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["add", "alice"], "already"),
        (["add", "two words"], "64 letters"),
        (["add", "x" * 65], "64 letters"),
        (["add", "new\n"], "64 letters"),
        (["add", "new", "--days", "0"], "above 0"),
        (["add", "new", "--concurrency", "-1"], "whole number"),
        (["add", "new", "--tokens-per-minute", "9" * 5000], "whole number"),
        (["revoke", "unknown"], "no key called"),
        (["destroy"], "invalid choice"),
        ([], "required"),
    ],
)
def test_invalid_key_commands_fail_in_one_line(
    ring: Keyring,
    run: Verb,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    ring.add("alice")
    monkeypatch.setenv("INKSTREAM_KEYS_FILE", str(ring.file))
    before = ring.file.read_bytes()
    code, _, errors = run(*arguments)
    assert code == 2 and words in errors and errors.count("\n") == 1 and ring.file.read_bytes() == before


@pytest.mark.parametrize(("output", "code"), [(">/dev/full", 1), (">&-", 2)])
def test_key_that_cannot_be_printed_is_not_stored(ring: Keyring, output: str, code: int) -> None:
    ring.add("alice")
    command = ["sh", "-c", f'"$0" -m app keys add bob --keys-file "$1" {output}', sys.executable, str(ring.file)]
    result = subprocess.run(command, cwd=ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert result.returncode == code and result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert [key.name for key in read_keys(ring.file)] == ["alice"]


def test_concurrent_adds_lose_no_key(ring: Keyring, promise: Promise) -> None:
    n = promise.size(8, 40)
    program = "import sys; from app.cli.keys import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "add", "--keys-file", str(ring.file)]
    processes = [subprocess.Popen([*command, f"key-{i}"], cwd=ROOT, stdout=subprocess.PIPE) for i in range(n)]
    made = [process.communicate(timeout=60)[0].decode().strip() for process in processes]
    keys = ApiKeys(ring.file)
    kept = sum(keys.tenant_of(key.encode()) is not None for key in made)
    promise.all_of("keys kept of those added at the same time", kept, n)
    assert len(set(made)) == n
    assert [path.name for path in ring.file.parent.iterdir()] == ["keys.json"], "no temporary file may be left"


def test_added_and_revoked_keys_take_effect_within_seconds(served: tuple[Server, Keyring], promise: Promise) -> None:
    server, ring = served

    def latest() -> float:
        key = ring.add("bob")
        added = _seconds_until(server, key, 200)
        ring.revoke("bob")
        return max(added, _seconds_until(server, key, 401))

    late = max(promise.measured(latest, lambda seconds: seconds <= 3) for _ in range(2))
    promise.at_most("seconds until a key is known or revoked", late, target=1.5, floor=3, unit="s", n=4)


def _seconds_until(server: Server, key: str, status: int) -> float:
    began = time.monotonic()
    assert server.wait_for(lambda: _status(server, key) == status)
    return time.monotonic() - began


def test_damaged_keys_file_keeps_the_old_keys_and_is_logged_once(served: tuple[Server, Keyring]) -> None:
    server, ring = served
    good, alice = ring.file.read_bytes(), ring.keys["alice"]

    def n_reports() -> int:
        return sum("keys stay" in line["message"] for line in log_lines(server))

    damages: list[Callable[[], object]] = [
        lambda: ring.file.write_text("{"),
        lambda: ring.file.write_text("[" * 100_000),
        lambda: (ring.file.write_bytes(good), ring.file.chmod(0o644)),
        ring.file.unlink,
    ]
    for count, damage in enumerate(damages, 1):
        damage()
        assert server.wait_for(lambda count=count: _status(server, alice) == 200 and n_reports() == count)
    time.sleep(1.2)
    assert _status(server, alice) == 200 and n_reports() == len(damages)
    assert _status(server, "ink-other") == 401


def test_keys_in_urls_and_other_headers_are_ignored(keyed_server: tuple[Server, Keyring]) -> None:
    server, ring = keyed_server
    key = ring.keys["alice"]
    for query in (f"api_key={key}", f"key={key}", f"token={key}", f"Authorization=Bearer%20{key}"):
        assert status_of(send_raw(server.url, raw_request("GET", f"/v1/models?{query}", "Host: localhost"))) == 401
    user = raw_request("GET", f"http://{key}:{key}@localhost/v1/models", "Host: localhost")
    assert status_of(send_raw(server.url, user)) in (400, 401)
    for header in (f"X-Api-Key: {key}", f"Cookie: key={key}", f"Proxy-Authorization: Bearer {key}", f"Api-Key: {key}"):
        assert status_of(send_raw(server.url, raw_request("GET", "/v1/models", "Host: localhost", header))) == 401


def test_every_stored_key_is_compared(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    """No early exit: the first, the last and an unknown key need the same comparisons, each in constant time."""
    made = [ring.add(f"key-{i}") for i in range(20)]
    compared: list[tuple[bytes, bytes]] = []
    original = hmac.compare_digest

    def compare(a: bytes, b: bytes) -> bool:
        compared.append((a, b))
        return original(a, b)

    keys = ApiKeys(ring.file)
    monkeypatch.setattr(keys_module.hmac, "compare_digest", compare)
    for key, name in ((made[0], "key-0"), (made[-1], "key-19"), ("ink-unknown", None), ("", None)):
        compared.clear()
        found = keys.tenant_of(key.encode())
        assert (found and found.name) == name
        assert len(compared) == 20 and all(len(a) == len(b) == 32 for a, b in compared)


def test_key_expires(ring: Keyring, monkeypatch: pytest.MonkeyPatch) -> None:
    key = new_key()
    add_key(ring.file, stored(key, "alice", days=1))
    keys = ApiKeys(ring.file)
    assert keys.tenant_of(key.encode())
    later = datetime.now(UTC) + timedelta(days=1, seconds=1)
    monkeypatch.setattr(keys_module.time, "time", later.timestamp)
    assert keys.tenant_of(key.encode()) is None


def test_invalid_keys_files_are_refused(tmp_path: Path) -> None:
    key = {"name": "a", "sha256": "0" * 64, "created": "2026-01-01T00:00:00Z"}
    wrong: list[dict[str, object]] = [
        {**key, "sha256": "0" * 63}, {**key, "sha256": "G" * 64}, {**key, "name": "a b"}, {**key, "name": "a\n"},
        {**key, "created": "2026-01-01T00:00:00"}, {**key, "concurrency": -1}, {**key, "admin": True},
    ]  # fmt: skip
    files = [[one] for one in wrong] + [[key, key], [{**key, "name": f"k{i}"} for i in range(MAX_KEYS + 1)]]
    path = tmp_path / "keys.json"
    path.touch(mode=0o600)
    texts = [json.dumps({"keys": keys}) for keys in files]
    texts += ["", "{", "\0", "[" * 100_000, '{"keys": {}}', '{"keys": [], "more": 1}']
    for number, text in enumerate(texts):
        path.write_text(text)
        with pytest.raises(KeyFileError) as error:
            read_keys(path)
        assert "\n" not in str(error.value), number
    path.write_text(json.dumps({"keys": [key]}))
    assert [stored.name for stored in read_keys(path)] == ["a"]
    with pytest.raises(KeyFileError, match="not a regular file"):
        read_keys(tmp_path)
    with pytest.raises(KeyFileError, match="no key called"):
        revoke_key(path, "b")
