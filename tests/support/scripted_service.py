"""A fake service that gives scripted responses and records the requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class ScriptedService:
    """The response to give, and the bodies and keys of the received requests."""

    url: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    breaks_off: bool = False
    waits: threading.Event | None = None
    """If given, the second part is sent only after this event is set."""

    def script_events(self, *events: tuple[str, dict[str, Any]]) -> None:
        """Makes the response a stream of these events."""
        self.headers = {"content-type": "text/event-stream; charset=utf-8"}
        self.parts = [f"id: r:0\nevent: {name}\ndata: {json.dumps(data)}\n\n".encode() for name, data in events]


@contextmanager
def scripted_service() -> Iterator[ScriptedService]:
    """Runs the service on a free port for the block."""
    service = ScriptedService()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            assert self.headers["content-type"] == "application/json"
            service.bodies.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            service.keys.append(self.headers["authorization"])
            self.send_response(service.status)
            for name, value in service.headers.items():
                self.send_header(name, value)
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for number, part in enumerate(service.parts):
                if service.waits and number == 1:
                    service.waits.wait(120)
                self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.close_connection = True
            if not service.breaks_off:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, *_: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            """The client disconnected."""

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    service.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield service
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
