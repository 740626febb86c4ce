"""Runs nginx in front of a service."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.servers import Server, free_ports

NGINX = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
needs_nginx = pytest.mark.skipif(NGINX is None, reason="needs nginx (Debian: nginx-light)")


def two_servers(servers: Sequence[Server]) -> str:
    """The shipped configuration with the addresses of these servers."""
    text = (ROOT / "deploy/nginx/two-servers.conf").read_text()
    for name, server in zip(("a", "b"), servers, strict=True):
        text = text.replace(f"server inkstream-{name}:8000", f"server {server.url.removeprefix('http://')}")
    return text.replace("listen 8080", "listen 127.0.0.1:PORT")


@contextmanager
def running_nginx(folder: Path, text: str, events: str = "") -> Iterator[str]:
    """Runs nginx with `text` in its http block, with PORT replaced; yields its address once the service responds."""
    (port,) = free_ports(1)
    temporary = "".join(f"{k}_temp_path {folder}/{k};" for k in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"))
    (folder / "nginx.conf").write_text(
        f"daemon off; worker_processes 1; pid {folder}/pid; error_log {folder}/error.log; events {{ {events} }}\n"
        f"http {{ access_log off; {temporary}\n{text.replace('PORT', str(port))} }}\n"
    )
    assert NGINX
    command = [NGINX, "-p", str(folder), "-c", str(folder / "nginx.conf"), "-e", str(folder / "error.log")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 60
        while not _is_live(url):
            assert time.monotonic() < deadline, (folder / "error.log").read_text()
            time.sleep(0.02)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _is_live(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health/live").status_code == 200
    except httpx.TransportError:
        return False
