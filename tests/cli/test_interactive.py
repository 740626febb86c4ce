"""inkstream complete -i in a pseudo-terminal, with a live service around the fake engine; and resumed streams."""

from __future__ import annotations

import contextlib
import sys

import httpx
import pytest

from app.__main__ import main
from app.cli.client import Client, ServiceError
from app.cli.request_flags import printable
from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.http.cutting_proxy import cutting_proxy
from tests.support.pseudo_terminal import PseudoTerminal, on_terminal
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(serve_module: Services) -> Server:
    return serve_module(fake_ms=4)


def complete(*flags: str) -> contextlib.AbstractContextManager[PseudoTerminal]:
    """`inkstream complete -i` with these flags."""
    return on_terminal(
        [sys.executable, "-m", "app", "complete", "-i", *flags], {"TERM": "dumb", "PYTHONPATH": str(ROOT)}
    )


def test_completions_and_typed_input_accumulate_over_turns(service: Server) -> None:
    def after(text: str) -> str:
        return str(fetch_completion(service.url, prompt=text, max_tokens=6, seed=3)["choices"][0]["text"])

    first = after("The moon")
    second = after(f"The moon{first} is")
    with complete("The moon", "--url", service.url, "--max-tokens", "6", "--seed", "3") as terminal:
        for typed, text in (
            ("", first),
            (" is\r", second),
            ("\r", after(f"The moon{first} is{second}")),
            ("/undo\r/regenerate\r", second),
            ("/undo\r/undo\r/undo\r/regenerate\r", after("")),
        ):
            terminal.send(typed)
            # The terminal shows a line break as two characters.
            terminal.expect(f"{printable(text)}\n".replace("\n", "\r\n"))
        assert terminal.leave() == 0


def test_ctrl_c_stops_the_completion_and_not_the_program(service: Server) -> None:
    with complete("Once", "--url", service.url, "--max-tokens", "8000", "--ignore-eos") as terminal:
        assert service.wait_for(lambda: service.metric("requests_running") == 1)
        terminal.send("\x03")
        terminal.expect("> ")
        assert service.wait_for(lambda: service.metric("requests_running") == 0, 5), (
            "the service was not asked to cancel"
        )
        terminal.send("half a line")
        terminal.expect("half a line")
        terminal.send("\x03")
        terminal.expect("> ")
        assert terminal.leave() == 0


def test_service_error_ends_the_turn_and_not_the_program() -> None:
    with complete("--url", "http://127.0.0.1:9") as terminal:
        terminal.expect("> ")
        terminal.send("a\r")
        terminal.expect("error: no service answers at http://127.0.0.1:9 (Connection refused)")
        terminal.expect("> ")
        assert terminal.leave() == 0


@pytest.mark.parametrize(
    ("flags", "is_terminal", "message"),
    [
        ((), False, "needs a terminal"),
        (("-x",), False, "-x"),
        (("--json",), True, "--json cannot be combined with -i"),
        (("--echo",), True, "--echo cannot be combined with -i"),
        (("--n", "2"), True, "--n cannot be combined with -i"),
    ],
)
def test_interactive_mode_needs_a_terminal_and_a_single_choice(
    flags: tuple[str, ...],
    is_terminal: bool,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: is_terminal)
    with pytest.raises(SystemExit) as end:
        main(["complete", "-i", *flags])
    assert end.value.code == 2 and message in capsys.readouterr().err


def test_lost_connection_resumes_without_a_gap(service: Server, capsys: pytest.CaptureFixture[str]) -> None:
    text = fetch_completion(service.url, prompt="a", max_tokens=60, seed=1)["choices"][0]["text"]
    with cutting_proxy(service.url, 1500, 1200, 40) as (url, _):
        assert main(["complete", "a", "--max-tokens", "60", "--seed", "1", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out == text + "\n"
    assert printed.err == "note: the connection was lost; resuming the text\n" * 2, "one note for each lost connection"


@pytest.mark.parametrize("flags", [(), ("--n", "2", "--stop", "zq"), ("--logprobs", "1")])
def test_lost_connection_goes_on_at_a_service_that_does_not_know_the_stream(
    serve: Services, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    server = serve("--resume-seconds", "0", fake_ms=3)
    arguments = ["complete", "a", "--max-tokens", "60", "--seed", "1", *flags, "--url"]
    assert main([*arguments, server.url]) == 0
    expected = capsys.readouterr().out
    with cutting_proxy(server.url, 2500, 900, 1500) as (url, opened):
        assert main([*arguments, url]) == 0
    printed = capsys.readouterr()
    assert printed.out == expected and "resuming the text" in printed.err
    assert len(opened) == 5, "the first request, and twice a 404 and a request that goes on"


def test_unresumable_stream_ends_with_the_reason(service: Server) -> None:
    with cutting_proxy(service.url, 1500, 0) as (url, _):
        client = Client(url, "", resume_seconds=0.5)
        events = client.events({"prompt": "a", "max_tokens": 60})
        name = ""
        while name != "connection lost":
            name, _ = next(events)
    with pytest.raises(ServiceError, match="the stream ended before the text was complete: no service answers"):
        next(events)


def test_closing_a_completion_early_cancels_it(service: Server) -> None:
    events = Client(service.url, "").events({"prompt": "a", "max_tokens": 8000, "ignore_eos": True})
    request_id = next(data["id"] for name, data in events if name == "start")
    events.close()
    rest = httpx.get(f"{service.url}/complete/{request_id}/events?after=0").text
    assert '"finish_reason": "cancelled"' in rest, "a closed completion is cancelled, not kept for resuming"
    assert service.wait_for(lambda: service.metric("requests_running") == 0, 5)
