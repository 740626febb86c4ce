"""inkstream complete -i in a pseudo-terminal, with a live service around the fake engine; and streams that resume."""

from __future__ import annotations

import contextlib
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.__main__ import main
from app.cli.client import Client, ServiceError
from app.cli.interactive import interact
from app.cli.request_flags import printable
from tests.support import ROOT
from tests.support.completion_client import whole
from tests.support.pseudo_terminal import PseudoTerminal, on_terminal
from tests.support.servers import Server
from tests.support.services import Services

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def service(serve_module: Services) -> Server:
    return serve_module(fake_ms=4)


@pytest.fixture
def complete(tmp_path: Path) -> Callable[..., contextlib.AbstractContextManager[PseudoTerminal]]:
    """`inkstream complete -i` with these flags."""

    def start(*flags: str, **variables: str) -> contextlib.AbstractContextManager[PseudoTerminal]:
        environment = {"XDG_STATE_HOME": str(tmp_path / "state"), "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        return on_terminal([sys.executable, "-m", "app", "complete", "-i", *flags], environment | variables)

    return start


def test_a_text_grows_in_turns_and_what_was_typed_is_kept(
    service: Server, complete: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {"max_tokens": 6, "seed": 3}
    first = whole(service.url, prompt="The moon", **settings)["choices"][0]["text"]
    second = whole(service.url, prompt=f"The moon{first} is", **settings)["choices"][0]["text"]
    third = whole(service.url, prompt=f"The moon{first} is{second}", **settings)["choices"][0]["text"]
    saved = tmp_path / "text.txt"
    with complete("--url", service.url, "--max-tokens", "6", "--seed", "3", NO_COLOR="1") as terminal:
        terminal.expect("> ")
        terminal.send("The moon\r")
        assert printable(first) in terminal.expect("(6 tokens, ")
        terminal.send(" is\r")
        assert printable(second) in terminal.expect("(6 tokens, ")
        terminal.send("\r")
        assert printable(third) in terminal.expect("(6 tokens, ")
        terminal.send(f"/undo\r/sa\t{saved}\r")
        terminal.expect("(wrote ")
        assert saved.read_text() == f"The moon{first} is{second}"
        assert terminal.leave() == 0
    history = tmp_path / "state/inkstream/history"
    assert history.read_text().splitlines() == ["The moon", " is", "/undo", f"/save {saved}"]
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with complete("--url", service.url, "--max-tokens", "2", NO_COLOR="1") as terminal:
        terminal.expect("> ")
        terminal.send("\x1b[A" * 3)  # up three times: an entry of the session before
        terminal.expect(" is")
        terminal.send("\r")
        terminal.expect("tokens/s)")
        terminal.send("/quit\r")
        assert terminal.wait() == 0
    assert history.read_text().splitlines()[4:] == [" is", "/quit"]


def test_ctrl_c_stops_the_completion_and_not_the_program(service: Server, complete: Callable[..., Any]) -> None:
    with complete("Once", "--url", service.url, "--max-tokens", "8000", "--ignore-eos") as terminal:
        terminal.expect("leaves.\r\nOnce")
        assert service.wait_for(lambda: service.metric("requests_running") == 1)
        terminal.send("\x03")
        terminal.expect("(stopped)")
        assert service.wait_for(lambda: service.metric("requests_running") == 0, 5), "the service was told"
        terminal.send("half a line")
        terminal.expect("half a line")
        terminal.send("\x03")
        terminal.expect("\r\n")
        terminal.send("/set max_tokens 3\r\r")
        terminal.expect("(3 tokens, ")
        assert terminal.leave() == 0


def test_lines_that_belong_together_are_one_entry(service: Server, complete: Callable[..., Any]) -> None:
    with complete("--url", service.url, "--max-tokens", "1", NO_COLOR="1") as terminal:
        terminal.expect("> ")
        terminal.send("one\\\rtwo\r")
        terminal.expect("(1 tokens")
        terminal.send("/show\r")
        terminal.expect("one\r\ntwo")
        terminal.send("/new\r\x1b[200~three\nfour\x1b[201~\r")  # as a terminal pastes
        terminal.expect("(1 tokens")
        terminal.send("/new\r//five\r")
        terminal.expect("(1 tokens")
        terminal.send("/show\r")
        terminal.expect("\r\n/five")


def test_without_a_service_it_names_the_command_that_starts_one(complete: Callable[..., Any]) -> None:
    with complete("--url", "http://127.0.0.1:9") as terminal:
        assert terminal.wait() == 2
        assert terminal.output.count("\n") == 1
        for words in ("no service answers at http://127.0.0.1:9 (Connection refused)", "inkstream serve", "--url"):
            assert words in terminal.output


def test_a_state_directory_that_cannot_be_written_is_said_once(
    service: Server, complete: Callable[..., Any], tmp_path: Path
) -> None:
    (tmp_path / "state").write_text("a file")
    with complete("--url", service.url, "--max-tokens", "1") as terminal:
        terminal.expect("is not kept for the next session")
        terminal.send("a\r")
        terminal.expect("(1 tokens")
        assert terminal.leave() == 0


@pytest.mark.parametrize(
    ("flags", "message"), [((), "needs a terminal"), (("--json",), "needs a terminal"), (("-x",), "-x")]
)
def test_it_needs_a_terminal(flags: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["complete", "-i", *flags])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--json",), ("--echo",), ("--n", "2")])
def test_flags_of_other_outputs_are_refused(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with pytest.raises(SystemExit):
        main(["complete", "-i", *flags])
    assert f"{flags[0]} cannot be combined with -i" in capsys.readouterr().err


class ScriptedClient(Client):
    """A client whose service answers every completion with the same events, and records the bodies."""

    def __init__(self, *events: tuple[str, Mapping[str, Any]]) -> None:
        super().__init__("http://127.0.0.1:9", "")
        self.scripted = events
        self.bodies: list[Mapping[str, Any]] = []

    def get(self, path: str) -> dict[str, Any]:
        return {"data": [{"id": path, "max_model_len": 100}]}

    def events(self, body: Mapping[str, Any]) -> Any:
        self.bodies.append(body)
        return (event for event in self.scripted)


TOKEN = {"index": 0, "text": "x", "tokens": [{"text": "x", "logprob": -0.1}]}
DONE = {
    "choices": [{"finish_reason": "stop", "stop_reason": None}],
    "usage": {"completion_tokens": 1},
    "timings": {"tokens_per_second": 7.6},
}


@pytest.fixture
def entries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a session in this process: what these entries print, without dimming."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def run(client: Client, *lines: str, **fields: Any) -> str:
        remaining = iter(lines)
        monkeypatch.setattr("builtins.input", lambda _: next(remaining, None) or _end())
        assert interact(client, "", fields) == 0
        return capsys.readouterr().out.replace("\033[2m", "").replace("\033[0m", "")

    return run


def _end() -> str:
    raise EOFError


def test_wrong_commands_and_settings_are_named_with_what_is_right(entries: Any) -> None:
    for entry, message in {
        "/regen": "there is no command /regen: did you mean /regenerate?",
        "/zzz": "there is no command /zzz: /help lists them",
        "/regenerate": "type a text first",
        "/undo": "the text is empty",
        "/save": "the file is missing: /save story.txt",
        "/save /no/such/folder/x": "/no/such/folder/x cannot be written (No such file or directory)",
        f"/save {__file__}": "exists, and nothing was written",
        "/set temprature 1": "did you mean temperature?",
        "/set zzz 1": "the settings are ",
        "/set temperature warm": "temperature must be a finite number, not 'warm'",
        "/set temperature 99": "temperature: Input should be less than or equal to 10",
        "/set ignore_eos maybe": "must be on or off",
        "/set n 2": "is not a setting",
    }.items():
        client = ScriptedClient()
        output = entries(client, entry)
        assert f"error: {message}" in output or (message in output and "error: " in output), (entry, output)
        assert client.bodies == []


def test_settings_hold_from_the_next_request_on(entries: Any) -> None:
    client = ScriptedClient(("token", TOKEN), ("done", DONE))
    output = entries(client, "/set temperature 0.5", "/set ignore-eos on", "/set stop a b", "/set", "a",
                     "/set temperature", "/set seed 1", "/regenerate")  # fmt: skip
    assert client.bodies == [
        {"prompt": "a", "temperature": 0.5, "ignore_eos": True, "stop": ["a b"]},
        {"prompt": "a", "ignore_eos": True, "stop": ["a b"], "seed": 1},
    ]
    assert "temperature is the model's own again" in output and "the seed is fixed to 1" in output
    assert "(1 tokens, 8 tokens/s, the model ended the text)" in output


def test_a_text_beyond_the_context_is_read_from_its_end_and_that_is_said(entries: Any) -> None:
    client = ScriptedClient(("start", {"truncated": True}), ("token", TOKEN), ("done", DONE))
    assert "the model does not see its beginning" in entries(client, "a" * 81, max_tokens=20)
    assert client.bodies[0]["truncate_prompt_tokens"] == 80
    client = ScriptedClient(("token", TOKEN), ("done", DONE))
    entries(client, "a" * 80, max_tokens=20)
    assert "truncate_prompt_tokens" not in client.bodies[0]


def test_tokens_have_the_color_of_their_probability_when_asked(entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    unlikely = {"index": 0, "text": "ab", "tokens": [{"text": "a", "logprob": -9.0}, {"text": "b", "logprob": -1.0}]}
    held_back = {
        "index": 0,
        "text": "c",
        "tokens": [{"text": "", "logprob": -0.1}, {"text": "\ufffd", "logprob": -2.0}],
    }
    client = ScriptedClient(("token", TOKEN), ("token", unlikely), ("token", held_back), ("done", DONE))
    output = entries(client, "/probs", "a", "/probs", "b")
    assert "\033[32mx\033[31ma\033[36mb\033[33mc\n" in output
    assert "xabc\n" in output
    assert [body.get("logprobs") for body in client.bodies] == [0, None]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "error: this terminal shows no colors" in entries(client, "/probs")
    monkeypatch.setenv("NO_COLOR", "")
    assert "a token's probability" in entries(client, "/probs")
    monkeypatch.setenv("TERM", "dumb")
    assert "\033" not in entries(client, "/undo")


def test_a_failure_keeps_the_text_and_control_characters_stay_out_of_the_terminal(entries: Any) -> None:
    failing = ("error", {"error": {"message": "the engine failed"}})
    client = ScriptedClient(("token", {"index": 0, "text": "\033[2Jx"}), failing)
    output = entries(client, "a", " b", "/show")
    assert output.count("error: the engine failed") == 2 and "press Enter to continue" in output
    assert client.bodies[1]["prompt"] == "a\033[2Jx b"
    assert "\033[2J" not in output and "a\ufffd[2Jx b" in output


def test_a_session_waits_for_a_model_that_loads_and_not_for_a_key(
    entries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*statuses: int) -> ScriptedClient:
        client, remaining = ScriptedClient(), iter(statuses)
        answer = client.get

        def get(path: str) -> dict[str, Any]:
            if status := next(remaining, 0):
                raise ServiceError(f"status {status}", status)
            return answer(path)

        monkeypatch.setattr(client, "get", get)
        return client

    monkeypatch.setattr("time.sleep", lambda _: None)
    assert "context 100 tokens" in entries(fail(503, 503))
    with pytest.raises(ServiceError, match="401"):
        interact(fail(401), "", {})


@contextlib.contextmanager
def cutting_proxy(url: str, *limits: int) -> Iterator[str]:
    """A TCP proxy that cuts its first connections after so many bytes of the answer, and later ones never."""
    address = ("127.0.0.1", int(url.rpartition(":")[2]))
    remaining = iter(limits)

    def forward(client: socket.socket, upstream: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(65536):
                upstream.sendall(data)

    def answer(client: socket.socket) -> None:
        limit = next(remaining, 1 << 30)
        with contextlib.suppress(OSError), client, socket.create_connection(address) as upstream:
            threading.Thread(target=forward, args=(client, upstream), daemon=True).start()
            while limit > 0 and (data := upstream.recv(min(4096, limit))):
                client.sendall(data)
                limit -= len(data)
            client.shutdown(socket.SHUT_RDWR)

    def serve(listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, args=(listener,))
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def test_a_lost_connection_is_resumed_without_a_gap(service: Server, capsys: pytest.CaptureFixture[str]) -> None:
    text = whole(service.url, prompt="a", max_tokens=60, seed=1)["choices"][0]["text"]
    with cutting_proxy(service.url, 1500, 1200, 40) as url:
        assert main(["complete", "a", "--max-tokens", "60", "--seed", "1", "--url", url]) == 0
    printed = capsys.readouterr()
    assert printed.out == text + "\n"
    assert printed.err == "note: the connection was lost; resuming the text\n" * 2, "once for each place"


def test_a_stream_that_is_gone_ends_with_the_reason(service: Server) -> None:
    with cutting_proxy(service.url, 1500, 0) as url:
        client = Client(url, "", resume_seconds=0.5)
        events = client.events({"prompt": "a", "max_tokens": 60})
        name = ""
        while name != "connection lost":
            name, _ = next(events)
    with pytest.raises(ServiceError, match="the stream ended before the text was complete: no service answers"):
        next(events)


def test_a_completion_that_is_closed_early_is_cancelled(service: Server) -> None:
    events = Client(service.url, "").events({"prompt": "a", "max_tokens": 8000, "ignore_eos": True})
    request_id = next(data["id"] for name, data in events if name == "start")
    events.close()
    rest = httpx.get(f"{service.url}/complete/{request_id}/events?after=0").text
    assert '"finish_reason": "cancelled"' in rest, "it is not kept for this client to resume"
    assert service.wait_for(lambda: service.metric("requests_running") == 0, 5)


def test_a_python_without_readline_still_reads_lines(entries: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "readline", None)
    client = ScriptedClient(("token", TOKEN), ("done", DONE))
    assert "built without readline" in entries(client, "a") and client.bodies == [{"prompt": "a"}]
