"""The terminal output during and after a start, and --open."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import signal
import sys
import threading
import time
import webbrowser
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from app import start_summary
from app.common.ipc import Ready
from app.common.model_version import Version
from app.common.settings import Settings
from app.serving.service import Service
from app.start_summary import follow_start, open_page, page_url, summary
from tests.support import ROOT
from tests.support.async_test import async_test
from tests.support.processes import children
from tests.support.pseudo_terminal import PseudoTerminal, on_terminal

READY = Ready(
    context=2048, vocab_size=320, n_params=8_700_000, dtype="bfloat16", device="2 x GPU", model_version=Version("v"),
    eos_ids=(0,), start_id=0, sampling_defaults={}, blocks_total=8, block_size=16, has_encoder=False,
    numerics="native3-avx512-bfloat16", numerics_reason="", waits_for_build=False,
)  # fmt: skip


class LoadingService:
    """Stands in for a Service whose start the test controls."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(**settings)
        self.engine = self
        self.ready = READY
        self.model_name = "a-model"
        self.phase = "loading weights"
        self.is_loaded = asyncio.Event()

    async def wait_loaded(self) -> None:
        await self.is_loaded.wait()

    def as_service(self) -> Service:
        return cast(Service, self)


def _service(weights: Path, *flags: str, **environment: str) -> AbstractContextManager[PseudoTerminal]:
    """A service with the fake engine on a pseudo-terminal."""
    variables = {"PYTHONPATH": str(ROOT), "INKSTREAM_KERNELS": "torch", "TERM": "dumb", **environment}
    command = [sys.executable, "-m", "tests.support.fake_service", "1", "serve", "--port", "0", *flags]
    return on_terminal([*command, "--weights", str(weights)], variables)


def _stop(terminal: PseudoTerminal) -> int:
    """Sends Ctrl+C; returns the exit code."""
    terminal.process.send_signal(signal.SIGINT)
    return terminal.wait()


@pytest.mark.slow
def test_terminal_shows_a_start_summary_and_then_a_line_for_each_completion(tmp_path: Path, weights: Path) -> None:
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    with _service(weights, "--replicas", "2", "--open", BROWSER=str(browser)) as terminal:
        terminal.expect("  page    ")
        url = terminal.expect("\r\n").strip()
        terminal.expect(f"  API     {url}/docs\r\n")
        first = r"([-\d]+ [:\d]+  starting \.\.\.\r\n)?\r\n  inkstream .* Ctrl\+C stops it\.\r\n"  # if it is slow
        assert re.match(first, terminal.output)
        assert f"  model   {weights.name}, from {weights}\r\n" in terminal.output
        for _ in range(6000):
            if opened.exists() and opened.read_text():
                break
            time.sleep(0.01)
        assert opened.read_text() == f"{url}\n"
        start = len(terminal.output)
        for path in ("/", "/docs", "/web/main.js", "/health", "/health/live", "/metrics"):
            assert httpx.get(f"{url}{path}").status_code == 200
        body = {"prompt": "x", "max_tokens": 5, "ignore_eos": True, "stream": False}
        assert httpx.post(f"{url}/complete", json=body).status_code == 200
        assert httpx.post(f"{url}/complete", json={**body, "top_p": 2}).status_code == 400
        terminal.expect("invalid_request_error, req-")
        good, bad = [line for line in terminal.output[start:].split("\r\n") if "  POST " in line]
        moment = r"[-\d]+ [:\d]+"
        assert re.fullmatch(rf"{moment}  200  POST /complete  5 tokens, [\d,]+ tokens/s, [\d.]+ ms, length", good)
        assert re.match(rf"{moment}  400  POST /complete  [\d.]+ ms, invalid_request_error, req-", bad)
        assert "GET" not in terminal.output[start:]

        os.kill(children(terminal.process.pid)[0], signal.SIGKILL)
        assert "  warning: the engine " in terminal.expect(" was ended by SIGKILL")
        terminal.expect(": started in ")
        terminal.process.send_signal(signal.SIGHUP)
        terminal.expect("  new weights are served: ")
        assert _stop(terminal) == 0
        assert "Ctrl+C" not in terminal.output[start:] and "ending: open streams get up to 30 s" in terminal.output
        # Excludes uvicorn's own lines, phases, the memory plan and traces.
        for word in ("Uvicorn", "server process", "pplication", "warming", "memory:", "\x1b", "Traceback"):
            assert word not in terminal.output, word


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("10.1.2.3", "http://10.1.2.3:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("fe80::1%lo", "http://[fe80::1%lo]:80"),
    ],
)
def test_page_address_can_be_opened_on_this_machine(host: str, expected: str) -> None:
    assert page_url(host, 80) == expected


@async_test
async def test_summary_states_from_where_the_service_is_reachable(tmp_path: Path) -> None:
    def shown(**settings: Any) -> str:
        return summary(LoadingService(**settings).as_service(), READY, "URL")

    stored = replace(READY, dtype="float32", weights="bfloat16")
    size = "  size    8.70 M parameters, bfloat16 weights, computed in float32"
    reason = " (the device does not multiply bfloat16)"
    assert f"{size}{reason}, context" in summary(LoadingService().as_service(), stored, "URL")
    assert f"{size}, context" in summary(LoadingService(dtype="float32").as_service(), stored, "URL")
    packed = summary(LoadingService(dtype="float32").as_service(), replace(stored, weight_bits=4.666), "URL")
    assert "parameters, bfloat16 weights, 4.67 bits per weight, computed in float32, context" in packed
    assert "  size    8.70 M parameters, bfloat16, context of 2,048 tokens\n" in shown()
    assert "  device  2 x GPU, C++ kernels\n" in shown() and "network" not in shown()
    keyed = shown(host="0.0.0.0", keys_file=tmp_path)
    assert "  page    URL (with an API key)\n" in keyed and "reach the service at 0.0.0.0, with an API key\n" in keyed
    assert "at 0.0.0.0, without an API key (--insecure-no-auth)\n" in shown(host="0.0.0.0", insecure_no_auth=True)
    assert "a-model, from two\\nlines\n" in shown(weights="two\nlines")


@async_test
async def test_slow_start_names_each_phase_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(start_summary, "_PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(start_summary, "_POLL_SECONDS", 0.001)
    monkeypatch.setattr("app.common.logs.resolve_format", lambda _: "text")
    caplog.set_level(logging.INFO, "inkstream")
    service = LoadingService()
    task = asyncio.create_task(follow_start(service.as_service(), ("127.0.0.1", 1)))
    for phase in ("loading weights", "warming up"):
        service.phase = phase
        async with asyncio.timeout(30):
            while f"{phase} ..." not in caplog.messages:  # noqa: ASYNC110 (it has no event to wait for)
                await asyncio.sleep(0.001)
    service.is_loaded.set()
    await asyncio.wait_for(task, 30)
    assert caplog.messages == ["loading weights ...", "warming up ..."]


@pytest.mark.parametrize("problem", [OSError(2, "No such file"), webbrowser.Error("no browser"), None])
def test_open_without_a_browser_is_a_warning_with_the_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: Exception | None
) -> None:
    def fail(_: str) -> bool:
        if problem:
            raise problem
        return False

    monkeypatch.setattr(webbrowser, "open", fail)
    open_page("http://127.0.0.1:1")
    for thread in threading.enumerate():
        if thread.name == "browser":
            thread.join(30)
    (message,) = caplog.messages
    assert message.startswith("--open: ") and "open http://127.0.0.1:1 yourself" in message
