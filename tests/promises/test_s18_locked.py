"""Every package but torch is pinned with its hashes, and pip-audit knows no vulnerability in any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.promise_figures import Promise
from tests.tools.lock import DEVELOPMENT, SERVING, locked, pins, serving

VULNERABILITY = {
    "id": "GHSA-test", "modified": "2026-01-01T00:00:00Z", "summary": "a vulnerability", "details": "a vulnerability",
    "affected": [{
        "package": {"name": "jinja2", "ecosystem": "PyPI"},
        "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "3.1.6"}]}],
    }],
}  # fmt: skip


class _Osv(BaseHTTPRequestHandler):
    """Reports one vulnerability, in jinja2 before 3.1.6."""

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        name, version = query["package"]["name"], tuple(map(int, query["version"].split(".")[:3]))
        answer = {"vulns": [VULNERABILITY]} if name == "jinja2" and version < (3, 1, 6) else {}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_arguments: object) -> None:
        """Log nothing."""


@pytest.fixture
def osv() -> Iterator[str]:
    """URL of a local OSV service."""
    server = HTTPServer(("127.0.0.1", 0), _Osv)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/query"
    server.shutdown()
    thread.join()
    server.server_close()


def _audit(*arguments: str, required: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.tools.audit", *arguments]
    environment = {**os.environ, "AUDIT_REQUIRED": required}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False, env=environment)


def test_locks_contain_every_pin_with_hashes(promise: Promise) -> None:
    both = locked(SERVING) | locked(DEVELOPMENT)
    good = sum(both.get(name) == version for name, version in pins().items())
    promise.all_of("pins of constraints.txt (all but torch) with hashes", good, len(pins()))
    assert both == pins(), "make lock"
    assert not locked(SERVING).keys() & locked(DEVELOPMENT).keys()


def test_serving_lock_is_complete() -> None:
    """According to installed metadata; the container installs only this file and torch."""
    assert locked(SERVING).keys() == serving()


def test_lock_without_hashes_is_refused(tmp_path: Path) -> None:
    bare = tmp_path / "bare.lock"
    bare.write_text(SERVING.read_text() + "requests==2.34.2\n")
    with pytest.raises(ValueError, match="no pin with hashes"):
        locked(bare)


def test_known_vulnerability_fails_the_audit(tmp_path: Path, osv: str) -> None:
    old = tmp_path / "old.txt"
    old.write_text("jinja2==3.1.2\nclick==8.5.1\n")
    done = _audit("--pins", str(old), "--osv-url", osv)
    assert done.returncode == 1, done.stderr
    assert "error: jinja2 3.1.2 has GHSA-test, fixed in 3.1.6" in done.stderr
    assert "1 known holes in 2 of 2 packages" in done.stdout


def test_unreachable_audit_service_is_a_warning(tmp_path: Path) -> None:
    small = tmp_path / "pins.txt"
    small.write_text("click==8.5.1\n")
    done = _audit("--pins", str(small), "--osv-url", "http://127.0.0.1:9/v1/query")
    assert done.returncode == 0
    assert done.stderr.startswith("warning: pip-audit: no service") and done.stderr.count("\n") == 1
    required = _audit("--pins", str(small), "--osv-url", "http://127.0.0.1:9/v1/query", required="1")
    assert required.returncode == 1
    assert required.stderr.startswith("error: pip-audit: no service")
