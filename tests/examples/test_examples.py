"""The programs of examples/ do what their first lines say, against a real service."""

from __future__ import annotations

import csv
import http.server
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.completion_client import whole
from tests.support.keyed_server import Keyring
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow
EXAMPLES = ROOT / "examples"
GONE = "http://127.0.0.1:9"
TEXTS = ["The moon rose over the sea.", "", "zq zq zq", "One two three, four five.", *["again and again"] * 20]


def run(name: str, *arguments: str | Path, key: str = "") -> subprocess.CompletedProcess[str]:
    """With the standard library alone, as the examples promise: -I and -S leave everything else out."""
    variables = {**os.environ, "INKSTREAM_API_KEY": key, "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-S", "-I", "-X", "utf8", EXAMPLES / name, *arguments]
    done = subprocess.run(command, env=variables, capture_output=True, timeout=120)
    return subprocess.CompletedProcess(command, done.returncode, done.stdout.decode(), done.stderr.decode())


def _expected(server: Server, **body: Any) -> str:
    return str(whole(server.url, **body)["choices"][0]["text"])


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):  # one of them was closed
        while data := source.recv(65536):
            target.sendall(data)


@contextmanager
def breaking(server: Server, cuts: list[int]) -> Iterator[tuple[str, list[int]]]:
    """A proxy whose first connections break after so many bytes of the answer; its address, and the bytes it passed."""
    passed: list[int] = []
    host, port = server.url.removeprefix("http://").split(":")

    def serve(listener: socket.socket) -> None:
        for limit in (*cuts, None):
            try:
                client, _ = listener.accept()
            except OSError:  # closed: the test has ended
                return
            with client, socket.create_connection((host, int(port))) as service:
                threading.Thread(target=_copy, args=(client, service), daemon=True).start()
                passed.append(0)
                while data := service.recv(64 if limit else 65536):
                    client.sendall(data)
                    passed[-1] += len(data)
                    if limit and passed[-1] >= limit:
                        break
                with suppress(OSError):  # the client was first
                    client.shutdown(socket.SHUT_RDWR)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", passed


@pytest.mark.parametrize("cuts", [[], [900], [2500], [1800, 700, 100, 900]])
def test_the_client_prints_the_whole_text_however_often_the_connection_breaks(server: Server, cuts: list[int]) -> None:
    expected = _expected(server, prompt="The moon", max_tokens=60, seed=3, ignore_eos=False)
    with breaking(server, cuts) as (url, passed):
        done = run("resume.py", "The moon", "--url", url, "--max-tokens", "60", "--seed", "3")
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected + "\n"
    assert len(passed) == len(cuts) + 1, "each connection was needed"


def test_the_client_says_what_is_wrong(server: Server) -> None:
    refused = run("resume.py", "The moon", "--url", server.url, "--max-tokens", "-1")
    assert refused.returncode == 1 and refused.stderr.startswith("error: max_tokens")
    absent = run("resume.py", "The moon", "--url", GONE)
    assert absent.returncode == 1 and "start one with make serve" in absent.stderr and "Traceback" not in absent.stderr


def _table(folder: Path) -> Path:
    path = folder / "texts.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([["name", "text"], *([str(i), text] for i, text in enumerate(TEXTS))])
    return path


def test_a_csv_file_gets_the_scores_of_the_service(server: Server, tmp_path: Path) -> None:
    done = run("score_csv.py", _table(tmp_path), tmp_path / "scored.csv", "--url", server.url)
    assert done.returncode == 0, done.stderr
    with (tmp_path / "scored.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["text"] for row in rows] == TEXTS
    for row in rows:
        if not row["text"]:
            assert row["bits_per_byte"] == ""
            continue
        (score,) = httpx.post(f"{server.url}/score", json={"prompt": row["text"]}).json()["scores"]
        assert row["bits_per_byte"] == f"{round(score['bits_per_byte'], 4)}"
        assert (row["tokens"], row["logprob"]) == (str(score["n_scored"]), f"{round(score['logprob'], 4)}")


def test_scoring_says_what_is_wrong(server: Server, tmp_path: Path) -> None:
    table, target = _table(tmp_path), tmp_path / "scored.csv"
    column = run("score_csv.py", table, target, "--url", server.url, "--column", "body")
    assert column.returncode == 2 and "no column 'body'; its columns are name, text" in column.stderr
    missing = run("score_csv.py", tmp_path / "none.csv", target, "--url", server.url)
    assert missing.returncode == 2 and "none.csv" in missing.stderr and "Traceback" not in missing.stderr
    before = table.read_bytes()
    same = run("score_csv.py", table, table, "--url", server.url)
    assert same.returncode == 2 and "another file" in same.stderr and table.read_bytes() == before
    absent = run("score_csv.py", table, target, "--url", GONE)
    assert absent.returncode == 1 and "start one with make serve" in absent.stderr


def test_keys_are_sent(serve: Services, tmp_path: Path) -> None:
    ring = Keyring.of(tmp_path / "keys.json", "alice")
    server = serve(ring=ring, fake_ms=1)
    for arguments in (("resume.py", "The moon"), ("score_csv.py", _table(tmp_path), tmp_path / "scored.csv")):
        assert run(*arguments, "--url", server.url).returncode == 1
        done = run(*arguments, "--url", server.url, key=ring.keys["alice"])
        assert done.returncode == 0, done.stderr


@pytest.fixture
def files(tmp_path: Path) -> Iterator[str]:
    """The address at which another server has the page."""
    shutil.copy(EXAMPLES / "page.html", tmp_path)
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_address[1]}"
        running.shutdown()


def test_the_page_continues_its_text_from_another_origin(browser: Any, serve: Services, files: str) -> None:
    server = serve("--allow-origin", files, fake_ms=1)
    page = browser.new_page()
    page.goto(f"{files}/page.html?service={server.url}")
    page.locator("#go").click()
    page.locator("#status", has_text="done").wait_for()
    assert len(page.locator("#text").input_value()) > len("Once upon a time")
    page.locator("#text").fill("a " * 600_000)
    page.locator("#go").click()
    page.locator("#status", has_text="1048576").wait_for()  # the limit of a body, in the words of the service
    page.close()


def test_the_page_can_be_stopped(browser: Any, serve: Services, files: str) -> None:
    server = serve("--allow-origin", files, fake_ms=200)
    page = browser.new_page()
    page.goto(f"{files}/page.html?service={server.url}")
    page.locator("#go").click()
    page.locator("#stop").click()
    page.locator("#status", has_text="stopped").wait_for()
    assert server.wait_for(lambda: server.metric("requests_running") == 0)
    page.close()


def test_the_page_has_forty_lines() -> None:
    assert len((EXAMPLES / "page.html").read_text().splitlines()) <= 40
