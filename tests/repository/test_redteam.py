"""The adversarial suite: a short slice against a real service, and planted faults that it must find."""

from __future__ import annotations

import ast
import json
import math
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.redteam.attack import Slowdown
from tests.redteam.changing_files import backtracking_regex
from tests.redteam.framing import LAST, Message, MessageGenerator, judge
from tests.redteam.http_client import MalformedAnswer, parse_answers
from tests.redteam.service import leaks_in
from tests.redteam.starvation import GrammarGenerator
from tests.redteam.weights_files import KINDS, TensorFile
from tests.support import ROOT

pytestmark = pytest.mark.slow

SUITE = ROOT / "tests/redteam"
OK = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


def _run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.redteam", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_the_suite_imports_only_the_standard_library_and_itself() -> None:
    for path in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_ours = name.startswith("tests.redteam.")
                assert is_ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)


def test_a_short_slice_of_the_suite_is_refused_by_the_service() -> None:
    ran = _run("--seconds", "12", "--tries", "300", "--seed", "1", "--only", "framing,json-bodies,authentication")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("redteam: seed 1,")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--only", "nothing"),
        ("--seconds", "0"),
        ("--url", "ftp://x"),
        ("--key", "a"),
        ("--tries", "0"),
    ],
)
def test_a_wrong_command_exits_with_2(arguments: tuple[str, ...]) -> None:
    ran = _run(*arguments)
    assert ran.returncode == 2
    assert "Traceback" not in ran.stderr
    assert "error:" in ran.stderr


class _FaultyServer:
    """Smuggles bodies of upgrade requests, takes a key in any header, and fails on NaN."""

    def __init__(self, key: str) -> None:
        self._key = key.encode()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=self._serve, args=(self._listener.accept()[0],), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, suppress(OSError, ValueError):
            connection.settimeout(5)
            raw = b""
            while True:
                while b"\r\n\r\n" not in raw:
                    part = connection.recv(65536)
                    if not part:
                        return
                    raw += part
                head, _, raw = raw.partition(b"\r\n\r\n")
                length = self._length(head.lower())
                while len(raw) < length:
                    raw += connection.recv(65536)
                body, raw = raw[:length], raw[length:]
                connection.sendall(self._answer(head, body))
                if b"connection: close" in head.lower():
                    return

    @staticmethod
    def _length(head: bytes) -> int:
        if b"\r\nupgrade:" in head or b"content-length: " not in head:
            return 0
        return int(head.split(b"content-length: ")[1].split(b"\r\n")[0])

    def _answer(self, head: bytes, body: bytes) -> bytes:
        status, content = b"200 OK", b"{}"
        if b"/openapi.json" in head:
            content = json.dumps(_DOCUMENT).encode()
        elif b"/health" in head.split(b"\r\n")[0]:
            content = b'{"status":"live"}'
        elif self._key not in head:
            status, content = b"401 Unauthorized", b"{}"
        elif b"NaN" in body:
            status = b"500 Internal Server Error"
        elif head.startswith(b"GET /v1/models"):
            content = b'{"object":"list"}'
        elif head.startswith(b"POST"):
            content = b'{"tokens":[1],"choices":[{"text":"a"}]}'
        return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(content), content)


_DOCUMENT = {
    "paths": {"/complete": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/a"}}}}}}},
    "a": {"type": "object", "properties": {"prompt": {"type": "string"}, "temperature": {"type": "number"}}},
}


@contextmanager
def _faulty(key: str) -> Iterator[str]:
    server = _FaultyServer(key)
    try:
        yield server.url
    finally:
        server.close()


def test_planted_faults_are_found_and_reported(tmp_path: Path) -> None:
    with _faulty("ink-planted") as url:
        result = tmp_path / "result.json"
        only = "framing,json-bodies,authentication,bad-weights"
        where = ["--url", url, "--key", "ink-planted", "--key", "ink-planted"]
        ran = _run("--seconds", "10", "--tries", "400", "--seed", "5", "--only", only, "--json", str(result), *where)
    assert ran.returncode == 1, ran.stdout + ran.stderr
    reports: dict[str, Any] = {report["attack"]: report for report in json.loads(result.read_text())["reports"]}
    summaries = {name: " ".join(f["summary"] for f in report["findings"]) for name, report in reports.items()}
    assert "upgrade: " in summaries["framing"] and "the body was answered as a request" in summaries["framing"]
    assert "status 500" in summaries["json-bodies"]
    assert "is answered" in summaries["authentication"]
    assert reports["bad-weights"]["verdict"] == "skipped"
    assert all(f["repro"] for report in reports.values() for f in report["findings"])


def test_a_seed_gives_the_same_attacks_again() -> None:
    def drawn(seed: int) -> list[object]:
        messages, grammars, rng = MessageGenerator(Random(seed), "k"), GrammarGenerator(Random(seed)), Random(seed)
        return [(messages.next(), grammars.next(), backtracking_regex(rng)) for _ in range(50)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_every_answer_too_many_is_a_finding() -> None:
    valid = Message(kind="plain", data=b"", must_answer=True)
    assert judge(valid, OK * 2, True) is None
    assert "2 answers to 1 requests" in str(judge(valid, OK * 3, True))
    assert "1 of 2 answers" in str(judge(valid, OK, True))
    assert judge(valid, OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), True) is None
    ambiguous = Message(kind="chunk size", data=b"", must_refuse=True)
    assert "ambiguous" in str(judge(ambiguous, OK * 2, True))
    assert judge(ambiguous, OK.replace(b"200", b"400"), True) is None
    assert "not HTTP" in str(judge(valid, OK + b"garbage" + LAST, True))
    with pytest.raises(MalformedAnswer):
        parse_answers(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n")


def test_slowdowns_are_judged_relative_to_the_victim_alone() -> None:
    assert Slowdown(alone=0.1, loaded=0.6).is_excessive
    assert not Slowdown(alone=0.1, loaded=0.4).is_excessive
    assert not Slowdown(alone=0.001, loaded=0.05).is_excessive, "a few milliseconds are noise"


def test_logs_are_searched_for_internals_and_secrets() -> None:
    log = 'started\nTraceback (most recent call last):\n"key": "ink-secret"\nthread panicked at x.rs\nfine'
    assert len(leaks_in(log, ["ink-secret", ""])) == 3


def test_bad_weights_differ_from_good_ones_as_they_say(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    file = tmp_path / "model.safetensors"
    good = struct.pack("<Q", len(header)) + header + bytes(24)
    file.write_bytes(good)
    assert TensorFile(file).to_bytes() == good
    KINDS["exploding: a few tensors 3e38"](tmp_path, Random(1))
    values = struct.unpack("<6f", bytes(TensorFile(file).data))
    assert all(math.isfinite(value) and value > 1e38 for value in values)
    file.write_bytes(good)
    KINDS["transposed shape"](tmp_path, Random(1))
    assert TensorFile(file).header["a"]["shape"] == [3, 2]
