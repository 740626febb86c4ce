"""The programs of examples/ do what their first lines say, against a real service."""

from __future__ import annotations

import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.http.cutting_proxy import cutting_proxy
from tests.support.keyed_server import Keyring
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
GONE = "http://127.0.0.1:9"


def run(name: str, *arguments: str, key: str = "") -> subprocess.CompletedProcess[str]:
    """Runs an example with the standard library only, as the examples promise: -I and -S exclude everything else."""
    variables = {**os.environ, "INKSTREAM_API_KEY": key, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-S", "-I", "-X", "utf8", EXAMPLES / name, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def _expected(server: Server, **body: Any) -> str:
    return str(fetch_completion(server.url, **body)["choices"][0]["text"])


@pytest.mark.parametrize("cuts", [[], [900], [2500], [1800, 700, 100, 900]])
def test_client_prints_the_whole_completion_despite_broken_connections(server: Server, cuts: list[int]) -> None:
    expected = _expected(server, prompt="The moon", max_tokens=60, seed=3, ignore_eos=False)
    with cutting_proxy(server.url, *cuts) as (url, opened):
        done = run("resume.py", "The moon", "--url", url, "--max-tokens", "60", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    assert len(opened) == len(cuts) + 1, "every connection must be used"


def test_client_goes_on_at_a_service_that_does_not_know_its_stream(serve: Services) -> None:
    server = serve("--resume-seconds", "0", fake_ms=3)
    expected = _expected(server, prompt="The moon", max_tokens=60, seed=3)
    with cutting_proxy(server.url, 2500, 700, 900) as (url, opened):
        done = run("resume.py", "The moon", "--url", url, "--max-tokens", "60", "--seed", "3")
    assert (done.returncode, done.stdout) == (0, expected + "\n"), done.stderr
    assert len(opened) > 4, "each broken connection is asked for first, and then goes on elsewhere"


def test_client_reports_errors(server: Server) -> None:
    refused = run("resume.py", "The moon", "--url", server.url, "--max-tokens", "-1")
    assert refused.returncode == 1 and refused.stderr.startswith("error: max_tokens")
    absent = run("resume.py", "The moon", "--url", GONE)
    assert absent.returncode == 1 and "start one with make serve" in absent.stderr and "Traceback" not in absent.stderr


def test_keys_are_sent(serve: Services, tmp_path: Path) -> None:
    ring = Keyring.of(tmp_path / "keys.json", "alice")
    server = serve(ring=ring, fake_ms=1)
    assert run("resume.py", "The moon", "--url", server.url).returncode == 1
    done = run("resume.py", "The moon", "--url", server.url, key=ring.keys["alice"])
    assert done.returncode == 0, done.stderr


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """The URL under which another server serves the page."""
    shutil.copy(EXAMPLES / "page.html", tmp_path)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_page_completes_its_text_from_another_origin(browser: Any, serve: Services, files: str) -> None:
    server = serve("--allow-origin", files, fake_ms=1)
    page = browser.new_page()
    page.goto(f"{files}/page.html?service={server.url}")
    page.locator("#go").click()
    page.locator("#status", has_text="done").wait_for()
    assert len(page.locator("#text").input_value()) > len("Once upon a time")
    page.locator("#text").fill("a " * 600_000)
    page.locator("#go").click()
    page.locator("#status", has_text="1048576").wait_for()  # the service's message for a body beyond the limit
    page.close()


def test_page_can_be_stopped(browser: Any, serve: Services, files: str) -> None:
    server = serve("--allow-origin", files, fake_ms=200)
    page = browser.new_page()
    page.goto(f"{files}/page.html?service={server.url}")
    page.locator("#go").click()
    page.locator("#stop").click()
    page.locator("#status", has_text="stopped").wait_for()
    assert server.wait_for(lambda: server.metric("requests_running") == 0)
    page.close()


def test_page_has_at_most_forty_lines() -> None:
    assert len((EXAMPLES / "page.html").read_text().splitlines()) <= 40
