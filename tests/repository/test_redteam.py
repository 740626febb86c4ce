"""The adversarial suite: a short slice against a real service, and planted faults that it must find."""

from __future__ import annotations

import ast
import json
import math
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.redteam.__main__ import main
from tests.redteam.attack import Slowdown
from tests.redteam.changing_files import backtracking_regex
from tests.redteam.framing import LAST, judge
from tests.redteam.http_client import MalformedResponse, parse_responses
from tests.redteam.messages import Message, MessageGenerator
from tests.redteam.remote_metadata import SECONDS, Outcome, draw, find_problem
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


def test_suite_imports_only_the_standard_library_and_itself() -> None:
    for path in SUITE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or "."] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                is_ours = name.startswith("tests.redteam.")
                assert is_ours or name.split(".")[0] in sys.stdlib_module_names, (path, name)


def test_service_withstands_a_short_part_of_the_suite() -> None:
    ran = _run("--seconds", "12", "--tries", "300", "--seed", "1", "--only", "framing,json-bodies,authentication")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert ran.stdout.startswith("redteam: seed 1,")


@pytest.mark.parametrize("arguments", ["--only nothing", "--seconds 0", "--url ftp://x", "--url http://x:y", "--key a"])
def test_a_wrong_command_exits_with_2(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments.split())
    assert ended.value.code == 2 and "error:" in capsys.readouterr().err


KEY = "ink-planted"


class _Faulty(BaseHTTPRequestHandler):
    """Smuggles bodies of upgrade requests, accepts a key in any header, and fails on NaN."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = b"" if "Upgrade" in self.headers else self.rfile.read(int(self.headers.get("Content-Length", 0)))
        status, content = 200, {"object": "list", "tokens": [1], "choices": [{"text": "a"}]}
        if self.path == "/openapi.json":
            content = _DOCUMENT
        elif self.path.startswith("/health"):
            content = {}
        elif KEY not in str(self.headers):
            status, content = 401, {}
        elif b"NaN" in body:
            status = 500
        data = json.dumps(content, separators=(",", ":")).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_PUT = do_DELETE = do_OPTIONS = do_PATCH = do_POST

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


_DOCUMENT: dict[str, Any] = {
    "paths": {"/complete": {"post": {"requestBody": {"content": {"application/json": {"schema": {"$ref": "#/a"}}}}}}},
    "a": {"type": "object", "properties": {"prompt": {"type": "string"}, "temperature": {"type": "number"}}},
}


def test_planted_faults_are_found_and_reported(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Faulty) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = tmp_path / "result.json"
        only = "framing,json-bodies,authentication,bad-weights"
        where = ["--url", f"http://127.0.0.1:{server.server_port}", "--key", KEY, "--key", KEY]
        ran = _run("--seconds", "10", "--tries", "400", "--seed", "5", "--only", only, "--json", str(result), *where)
        server.shutdown()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    reports: dict[str, Any] = {report["attack"]: report for report in json.loads(result.read_text())["reports"]}
    summaries = {name: " ".join(f["summary"] for f in report["findings"]) for name, report in reports.items()}
    assert "upgrade: " in summaries["framing"] and "the body was answered as a request" in summaries["framing"]
    assert "status 500" in summaries["json-bodies"]
    assert "is answered" in summaries["authentication"]
    assert reports["bad-weights"]["verdict"] == "skipped"
    assert all(f["repro"] for report in reports.values() for f in report["findings"])


class _Unbounded(BaseHTTPRequestHandler):
    """Takes a twentieth of a second for each page of metrics, one after another, and repeats the last 100 responses."""

    protocol_version = "HTTP/1.1"
    _lock = threading.Lock()

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self._lock:
            if self.path == "/metrics":
                time.sleep(0.05)
        repeated = self.server.names.count(name := self.headers.get("Idempotency-Key"))  # type: ignore[attr-defined]
        self.server.names = [*self.server.names, name][-100:]  # type: ignore[attr-defined]
        self.send_response(200)
        data = b'{"object":"list","tokens":[1],"choices":[{"text":"a"}]}'
        self.send_header("Content-Length", str(len(data)))
        if name and repeated:
            self.send_header("Idempotent-Replayed", "true")
        self.end_headers()
        self.wfile.write(data)

    do_POST = do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        """Logs nothing."""


def test_unpaid_work_that_is_not_bounded_is_found(tmp_path: Path) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Unbounded) as server:
        server.names = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        result = tmp_path / "result.json"
        where = ["--url", f"http://127.0.0.1:{server.server_port}", "--key", KEY, "--key", KEY]
        ran = _run("--seconds", "20", "--seed", "5", "--only", "unpaid-work", "--json", str(result), *where)
        server.shutdown()
    assert ran.returncode == 1, ran.stdout + ran.stderr
    assert result.exists(), ran.stderr
    (report, *_) = json.loads(result.read_text())["reports"]
    found = " ".join(finding["summary"] for finding in report["findings"])
    assert "beside requests for metrics and documents" in found
    assert "kept responses were evicted" in found


def test_lies_of_a_hub_that_work_are_reported() -> None:
    honest = Outcome(code=0, output="", memory=100 << 20, seconds=1.0, escaped=[], written=10)
    refused = replace(honest, code=2)
    assert not find_problem(refused, honest, 10)
    for works in (
        honest, replace(refused, escaped=["/evil"]), replace(refused, seconds=SECONDS), replace(refused, code=-9),
        replace(refused, output="Traceback"), replace(refused, written=20 << 20), replace(refused, memory=300 << 20),
    ):  # fmt: skip
        assert find_problem(works, honest, 10), works


def test_lies_of_a_hub_are_refused() -> None:
    ran = _run("--seconds", "8", "--tries", "3", "--seed", "1", "--only", "remote-metadata")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def test_seed_reproduces_the_attacks() -> None:
    def drawn(seed: int) -> list[object]:
        messages, grammars, rng = MessageGenerator(Random(seed), "k"), GrammarGenerator(Random(seed)), Random(seed)
        return [(messages.next(), grammars.next(), backtracking_regex(rng), draw(rng).text) for _ in range(50)]

    assert drawn(3) == drawn(3)
    assert drawn(3) != drawn(4)


def test_every_extra_response_is_a_finding() -> None:
    valid = Message(kind="plain", data=b"", must_answer=True)
    assert judge(valid, OK * 2, True) is None
    assert "2 responses to 1 requests" in str(judge(valid, OK * 3, True))
    assert "1 of 2 responses" in str(judge(valid, OK, True))
    assert judge(valid, OK.replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"), True) is None
    ambiguous = Message(kind="chunk size", data=b"", must_refuse=True)
    assert "ambiguous" in str(judge(ambiguous, OK * 2, True))
    assert judge(ambiguous, OK.replace(b"200", b"400"), True) is None
    assert "not HTTP" in str(judge(valid, OK + b"garbage" + LAST, True))
    with pytest.raises(MalformedResponse):
        parse_responses(b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n")


def test_slowdowns_are_relative_to_the_victim_alone() -> None:
    assert Slowdown(alone=0.1, loaded=0.6).is_excessive
    assert not Slowdown(alone=0.1, loaded=0.4).is_excessive
    assert not Slowdown(alone=0.001, loaded=0.05).is_excessive, "a few milliseconds must count as noise"


def test_logs_are_searched_for_internals_and_secrets() -> None:
    log = 'started\nTraceback (most recent call last):\n"key": "ink-secret"\nthread panicked at x.rs\nfine'
    assert len(leaks_in(log, ["ink-secret", ""])) == 3


def test_bad_weights_differ_from_good_ones_as_described(tmp_path: Path) -> None:
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
