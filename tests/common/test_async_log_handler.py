"""A log pipe without a reader blocks nothing: neither requests, nor the engine, nor the shutdown."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.common import logs
from app.common.logs import MAX_PENDING_LINES, AsyncLogHandler, open_nonblocking
from tests.support import ROOT
from tests.support.armed_faults import Faults

pytestmark = pytest.mark.slow

PIPE_BYTES = 4096
BEFORE_FULL = 40
"""Requests whose lines, one of 200 bytes each at least, are more than such a pipe takes."""


@contextlib.contextmanager
def _server(weights: Path, **environment: str) -> Iterator[tuple[subprocess.Popen[bytes], str, int]]:
    """The fake engine's service with its log in a pipe, and the pipe's reading end, read up to the address."""
    ours, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    variables = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | environment
    variables["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, "-m", "tests.support.fake_service", "5", "serve", "--port", "0"]
    process = subprocess.Popen([*command, "--weights", str(weights)], cwd=ROOT, env=variables, stderr=theirs)
    os.close(theirs)
    try:
        text = b""
        while not (found := re.search(rb"listening on (http://[^\s\"]+)", text)):
            part = os.read(ours, 65536)
            assert part, text
            text += part
        url = found[1].decode()
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/health/ready").status_code != 200:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process, url, ours
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _fill(url: str, count: int) -> None:
    with httpx.Client(base_url=url) as client:
        for _ in range(count):
            assert client.get("/v1/models").status_code == 200


def test_unread_log_blocks_neither_requests_nor_engines_nor_shutdown(tmp_path: Path, weights: Path) -> None:
    faults = Faults(tmp_path / "faults")
    with _server(weights, **faults.environment) as (process, url, _):
        _fill(url, BEFORE_FULL)
        faults.arm("engine.step", "raise", times=1)  # the engine logs its failure, and the next engine answers
        response = httpx.post(f"{url}/complete", json={"prompt": "x", "max_tokens": 3, "stream": False}, timeout=60)
        assert response.status_code == 200 and not faults.is_armed("engine.step")
        process.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - began < 5


def test_a_second_signal_ends_at_once_with_an_unread_log(weights: Path) -> None:
    with _server(weights) as (process, url, _):
        _fill(url, BEFORE_FULL)
        body = {"prompt": "x", "max_tokens": 8000, "ignore_eos": True}
        with httpx.stream("POST", f"{url}/complete", json=body) as stream:
            lines = stream.iter_lines()
            assert stream.status_code == 200, stream.read()
            assert next(lines)
            process.send_signal(signal.SIGTERM)
            _until_it_drains(url)  # two signals that are still pending count as one
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=20) == 1, "ends before the stream and before the drain timeout"


def _until_it_drains(url: str) -> None:
    with contextlib.suppress(httpx.TransportError):
        while httpx.get(f"{url}/health/ready").status_code == 200:
            time.sleep(0.02)


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        with contextlib.suppress(OSError):
            os.close(end)


def _logger(writer: AsyncLogHandler) -> logging.Logger:
    logger = logging.Logger("of a test")
    logger.addHandler(writer)
    return logger


def test_lines_beyond_the_bound_are_dropped_counted_and_reported(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    writer = AsyncLogHandler(theirs, "utf-8")
    logger, n = _logger(writer), MAX_PENDING_LINES + 1000
    for number in range(n):
        logger.info("%s %d", "x" * 100, number)
    began = time.monotonic()
    writer.flush()
    assert time.monotonic() - began < 5
    dropped = writer.dropped
    assert 0 < dropped < 1000  # the lines already in the pipe are kept
    text = b""
    while not re.search(rb"lines of the log were dropped", text) or text.count(b"x" * 100) < n - dropped:
        text += os.read(ours, 65536)
    assert sum(map(int, re.findall(rb"(\d+) lines of the log were dropped", text))) == dropped == writer.dropped
    numbers = [int(number) for number in re.findall(rb"x (\d+)\n", text)]
    assert numbers == sorted(set(numbers)) and len(numbers) == n - dropped


def test_only_the_first_flush_waits_for_a_stalled_reader(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    writer = AsyncLogHandler(theirs, "utf-8")
    logger = _logger(writer)
    while select.select([], [theirs], [], 0)[1]:
        os.write(theirs, b"x" * 4096)
    logger.info("stuck")
    writer.flush()
    began = time.monotonic()
    for _ in range(10):
        writer.flush()
    assert time.monotonic() - began < 1
    text = b""
    while not text.endswith(b"stuck\n"):
        text += os.read(ours, 65536)
    assert writer._late.wait(60)
    logger.info("read")
    writer.flush()
    assert os.read(ours, 100) == b"read\n", "the next flush waits again"


def test_closed_pipe_only_drops_lines(pipe: tuple[int, int]) -> None:
    writer = AsyncLogHandler(pipe[1], "utf-8")
    os.close(pipe[0])
    _logger(writer).info("x")
    writer.flush()
    for _ in range(3000):
        if writer.dropped:
            break
        time.sleep(0.02)
    assert writer.dropped >= 1
    assert any(thread.name == "log" for thread in threading.enumerate())


def test_lines_logged_together_take_few_writes_of_whole_lines(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []

    def write(descriptor: int, data: bytes) -> int:
        assert descriptor == pipe[1]
        written.append(data)
        return len(data)

    monkeypatch.setattr(logs.os, "write", write)
    writer = AsyncLogHandler(pipe[1], "utf-8")
    logger = _logger(writer)
    for number in range(200):
        logger.info("%s %d", "x" * 100, number)
    logger.info("y" * 5000)
    writer.flush()
    monkeypatch.undo()
    assert b"".join(written).splitlines() == [b"x" * 100 + b" %d" % n for n in range(200)] + [b"y" * 5000]
    assert all(data.endswith(b"\n") for data in written)
    assert all(len(data) <= 4096 for data in written[:-1])
    assert len(written) < 50


def test_warnings_are_written_immediately(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A warning may be the last line of a process that is killed; other lines wait to be written together."""
    monkeypatch.setattr(logs, "_PAUSE_SECONDS", 60.0)
    ours, theirs = pipe
    logger = _logger(AsyncLogHandler(theirs, "utf-8"))
    logger.info("first")
    assert os.read(ours, 100) == b"first\n"
    time.sleep(0.05)
    logger.info("second")
    assert not select.select([ours], [], [], 0.1)[0], "positive control: an info line waits"
    logger.warning("third")
    assert os.read(ours, 100) == b"second\nthird\n"


def test_a_non_blocking_pipe_loses_nothing(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    os.set_blocking(theirs, False)
    writer = AsyncLogHandler(theirs, "utf-8")
    logger, text = _logger(writer), b""
    for _ in range(1000):
        logger.info("x" * 199)
    while len(text) < 200_000:
        text += os.read(ours, 65536)
    assert text == (b"x" * 199 + b"\n") * 1000 and writer.dropped == 0


def test_crash_is_logged_without_waiting(pipe: tuple[int, int]) -> None:
    ours, theirs = pipe
    descriptor = open_nonblocking(theirs)
    try:
        assert os.get_blocking(theirs) and not os.get_blocking(descriptor)
        os.set_blocking(theirs, False)
        while select.select([], [theirs], [], 0)[1]:
            os.write(theirs, b"x" * 4096)
        os.set_blocking(theirs, True)
        with pytest.raises(BlockingIOError):
            os.write(descriptor, b"x" * 4096)
        assert os.read(ours, 4) == b"xxxx"
    finally:
        os.close(descriptor)
    with Path(os.devnull).open() as file:
        assert open_nonblocking(file.fileno()) == file.fileno()
