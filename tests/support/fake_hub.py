"""A fake model hub on loopback for huggingface_hub: ranges, redirects, ETags, LFS headers and failures."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

_LFS_BYTES = 100_000
"""Files of this size or more are on the storage server, like large files of the Hub."""
_BLOCK = 1 << 14


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request that the hub received."""

    method: str
    path: str
    range: str
    token: str


@dataclass(slots=True)
class FakeHub:
    """Repositories and faults to inject; a test may change the fields while the hub runs."""

    url: str = ""
    storage: str = ""
    """The same server under another host name, which must not receive a token."""
    repositories: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    """Repositories whose files need TOKEN."""
    private: set[str] = field(default_factory=set)
    card: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Callable[[dict[str, Any]], Any]] = field(default_factory=dict)
    """Repository -> what turns its model info into the body that is sent: bytes, or something for JSON."""
    answers: dict[str, Callable[[BaseHTTPRequestHandler], None]] = field(default_factory=dict)
    """Part of a path -> what answers such requests itself."""
    status: int = 0
    """Status of every response, to imitate a server that is not the Hub; 0 behaves like the Hub."""
    failures: list[tuple[str, int]] = field(default_factory=list)
    """(part of a path, status) of the next responses to such paths, in order."""
    cut_after: list[int] = field(default_factory=list)
    """Numbers of bytes after which the next large responses break off, in order."""
    damaged: int = 0
    """Number of large responses to send with a wrong byte."""
    ignores_ranges: bool = False
    seconds_per_block: float = 0.0
    requests: list[RecordedRequest] = field(default_factory=list)

    def commit(self, name: str) -> str:
        """The repository's commit, a hash of its content."""
        digests = [file + hashlib.sha1(content).hexdigest() for file, content in self.repositories[name].items()]
        return hashlib.sha1("".join(digests).encode()).hexdigest()

    def downloads(self, pattern: str) -> list[RecordedRequest]:
        """Requests for content whose path matches."""
        return [request for request in self.requests if request.method == "GET" and re.search(pattern, request.path)]


TOKEN = "hf_the_right_one"


def etag(content: bytes) -> str:
    """ETag of a file, which is also its name in the cache."""
    if len(content) >= _LFS_BYTES:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


@contextmanager
def fake_hub() -> Iterator[FakeHub]:
    """Runs a hub for the block."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url, hub.storage = (f"http://{host}:{server.server_port}" for host in ("127.0.0.1", "localhost"))
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def log_message(self, *_: Any) -> None:
        """Logs nothing."""

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        hub.requests.append(RecordedRequest(self.command, path, self.headers.get("Range", ""), token))
        if hub.status:
            return self._send(hub.status, b"<html>")
        if hub.failures and hub.failures[0][0] in path:
            return self._send(hub.failures.pop(0)[1], b"<html>")
        if answer := next((answer for part, answer in hub.answers.items() if part in path), None):
            self.close_connection = True
            with contextlib.suppress(OSError):
                answer(self)
            return None
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?", path):
            return self._info(found[1], found[2] or "main", token)
        if found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self._file(found[1], found[2], found[3], token)
        if found := re.fullmatch(r"/storage/([^/]+/[^/]+)/(.+)", path):
            assert not token, "a token was sent to the storage server"
            return self._content(hub.repositories[found[1]][found[2]])
        return self._send(404, b"Not Found")

    def _info(self, name: str, revision: str, token: str) -> None:
        hub = self.hub
        if name not in hub.repositories or (name in hub.private and token != TOKEN):
            return self._send(401 if not token else 404, b"{}", {"X-Error-Code": "RepoNotFound"})
        if revision not in ("main", hub.commit(name)):
            return self._send(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
        blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        siblings = []
        for file, content in hub.repositories[name].items():
            details: dict[str, Any] = {"size": len(content), "blobId": etag(content)}
            if len(content) >= _LFS_BYTES:
                details["lfs"] = {"sha256": etag(content), "size": len(content), "pointerSize": 134}
            siblings.append({"rfilename": file, **(details if blobs else {})})
        body = {"id": name, "sha": hub.commit(name), "siblings": siblings, "cardData": hub.card, "tags": []}
        sent = self.hub.changes[name](body) if name in self.hub.changes else body
        content = sent if isinstance(sent, bytes) else json.dumps(sent).encode()
        return self._send(200, content, {"Content-Type": "application/json"})

    def _file(self, name: str, revision: str, file: str, token: str) -> None:
        hub = self.hub
        if name in hub.gated and token != TOKEN:
            return self._send(403 if token else 401, b"", {"X-Error-Code": "GatedRepo"})
        # A hub that lies about its commit also serves it.
        assert name in hub.changes or revision in ("main", hub.commit(name))
        content = hub.repositories[name][file]
        headers = {"X-Repo-Commit": hub.commit(name), "ETag": f'"{etag(content)}"'}
        if len(content) < _LFS_BYTES:
            return self._send(200, content, headers)
        headers |= {"X-Linked-Etag": f'"{etag(content)}"', "X-Linked-Size": str(len(content))}
        return self._send(302, b"", {**headers, "Location": f"{hub.storage}/storage/{name}/{file}"})

    def _content(self, content: bytes) -> None:
        hub, start = self.hub, 0
        if (found := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))) and not hub.ignores_ranges:
            start = int(found[1])
        if hub.damaged:
            hub.damaged -= 1
            content = content[:-1] + bytes([content[-1] ^ 1])
        cut = hub.cut_after.pop(0) if hub.cut_after else len(content)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.send_header("Accept-Ranges", "bytes")
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.end_headers()
        sent = content[start:][:cut]
        for position in range(0, len(sent), _BLOCK):
            try:
                self.wfile.write(sent[position : position + _BLOCK])
            except OSError:
                break
            time.sleep(hub.seconds_per_block)
        self.close_connection = self.close_connection or cut < len(content) - start

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            with contextlib.suppress(OSError):  # a client may refuse the rest
                self.wfile.write(body)
