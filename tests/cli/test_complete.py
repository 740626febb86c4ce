"""inkstream complete: what it sends, what it prints, and its error messages.

Mostly against the real service; rare behavior comes from a small fake service with scripted responses.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.api.native.routes import CompleteRequest
from app.cli.request_flags import add_flags, given_fields, with_flags
from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.scripted_service import ScriptedService, scripted_service
from tests.support.servers import Server

DONE = {"choices": [{"index": 0, "finish_reason": "stop", "stop_reason": None}]}


@pytest.fixture
def scripted() -> Iterator[ScriptedService]:
    with scripted_service() as service:
        service.script_events(("start", {}), ("token", {"index": 0, "text": "x"}), ("done", DONE))
        yield service


Run = Callable[..., tuple[int, str, str]]


class Terminal(io.TextIOWrapper):
    """Reports that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs `inkstream complete` with these arguments; returns exit code, stdout and stderr."""
    monkeypatch.delenv("INKSTREAM_API_KEY", raising=False)

    def complete(*arguments: str, stdin: bytes | None = b"") -> tuple[int, str, str]:
        monkeypatch.setattr(
            sys, "stdin", Terminal(io.BytesIO()) if stdin is None else io.TextIOWrapper(io.BytesIO(stdin))
        )
        try:
            code = main(["complete", *arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        assert "Traceback" not in printed.err
        return code, printed.out, printed.err

    return complete


def test_full_disk_is_reported_in_one_line(server: Server, weights: Path) -> None:
    complete = ["complete", "a", "--max-tokens", "3", "--url", server.url]
    for verb in (complete, [*complete, "--json"], ["check", str(weights)]):
        with Path("/dev/full").open("w") as full:
            command = [sys.executable, "-m", "app", *verb]
            result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=ROOT)
        assert result.returncode == 1
        assert result.stderr.count("\n") == 1 and "cannot be written" in result.stderr


def test_closed_standard_input_is_reported() -> None:
    for prompt in ("", "-"):
        command = ["sh", "-c", f'"$0" -m app complete {prompt} <&-', sys.executable]
        result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
        assert result.returncode == 2 and "standard input is closed" in result.stderr


def test_output_is_the_completion_of_the_service(server: Server, run: Run) -> None:
    flags = ("--max-tokens", "20", "--seed", "5", "--temperature", "0.8", "--stop", "zq", "--top-k", "-1")
    expected = fetch_completion(server.url, prompt="The moon", max_tokens=20, seed=5, temperature=0.8, stop="zq")
    text = expected["choices"][0]["text"]
    assert run("The moon", "--url", server.url, *flags) == (0, text + "\n", "")
    for arguments in (("-",), ()):
        assert run(*arguments, "--url", server.url + "/", *flags, stdin=b"The moon") == (0, text + "\n", "")
    code, printed, _ = run("The moon", "--json", "--url", server.url, *flags, "--logprobs", "1")
    response = json.loads(printed)
    assert (code, response["choices"][0]["text"], printed.count("\n")) == (0, text, 1)
    assert {**response["usage"], "prompt_tokens_details": None} == {**expected["usage"], "prompt_tokens_details": None}
    assert response["choices"][0]["tokens"]


def test_service_errors_name_the_flags(server: Server, run: Run) -> None:
    for more in ((), ("--json",)):
        code, printed, error = run("a", "--url", server.url, "--temperature", "99", *more)
        assert (code, printed) == (1, "")
        assert error.startswith("error: --temperature: ")
    code, _, error = run("a", "--url", server.url, "--min-tokens", "50", "--max-tokens", "4")
    assert (code, error) == (1, "error: --min-tokens (50) must not be above --max-tokens (4)\n")
    for n in ("0", "-1", "1000000"):
        code, printed, error = run("a", "--url", server.url, "--n", n)
        assert (code, printed, error.startswith("error: --n: ")) == (1, "", True)
    code, _, error = run("--source", "a", "--url", server.url)
    assert (code, "no encoder: leave out --source" in error) == (1, True)


@pytest.mark.parametrize(
    ("message", "given", "expected"),
    [
        ("raise deadline_ms, or try later", [], "raise --deadline-ms, or try later"),
        ("regex and json_schema cannot be combined", ["regex"], "--regex and --json-schema cannot be combined"),
        ("the server stops at a stop", ["seed"], "the server stops at a stop"),
        ("logit_bias.x: must be a token id", ["logit_bias"], "--logit-bias.x: must be a token id"),
        (
            "stop[0]: 'stop' is too long for --stop-token-ids",
            ["stop"],
            "--stop[0]: 'stop' is too long for --stop-token-ids",
        ),
        ("set stream to false", ["prompt"], "set stream to false"),
    ],
)
def test_fields_of_a_message_become_flags(message: str, given: list[str], expected: str) -> None:
    fields = [name for name in CompleteRequest.model_fields if name not in ("prompt", "stream")]
    assert with_flags(message, fields, given) == expected


def _given(*arguments: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(prog="test", exit_on_error=False)
    names = add_flags(parser, CompleteRequest.model_json_schema(), without={"prompt", "stream"})
    assert set(names) == set(CompleteRequest.model_fields) - {"prompt", "stream"}
    assert {action.dest for action in parser._actions} == {*names, "help"}, "no other flags"
    parser.format_help()
    return given_fields(parser.parse_args(arguments), names)


def test_flags_become_fields_of_the_right_type(tmp_path: Path) -> None:
    assert _given() == {}
    assert _given("--n", "2", "--typical-p", "0.5", "--echo", "--user", "u") == {
        "n": 2,
        "typical_p": 0.5,
        "echo": True,
        "user": "u",
    }
    assert _given("--stop", r"a\nb\\n", "--stop", "c\n") == {"stop": ["a\nb\\n", "c\n"]}
    assert _given("--stop-token-ids", "1", "--stop-token-ids", "2") == {"stop_token_ids": [1, 2]}
    assert _given("--logit-bias", "12=-5", "--logit-bias", "3=0.5") == {"logit_bias": {"12": -5.0, "3": 0.5}}
    assert _given("--json-schema", '{"type": "object"}') == {"json_schema": {"type": "object"}}
    file = tmp_path / "file"
    file.write_text("true", encoding="utf-8")
    assert _given("--json-schema", f"@{file}", "--grammar", f"@{file}") == {"json_schema": True, "grammar": "true"}
    assert _given("--grammar", "start: /a/") == {"grammar": "start: /a/"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--n", "1.5"), "invalid int value: '1.5'"),
        (("--typical-p", "much"), "invalid float value: 'much'"),
        (("--logit-bias", "12"), "must be ID=BIAS, such as 123=-5, not '12'"),
        (("--json-schema", "{"), "not JSON"),
        (("--grammar", "@/no/such/file"), "No such file"),
    ],
)
def test_invalid_value_is_named_with_its_flag(arguments: tuple[str, str], message: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=message) as caught:
        _given(*arguments)
    assert arguments[0] in str(caught.value)


def test_api_key_is_sent_as_a_bearer_token(
    scripted: ScriptedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("a", "--url", scripted.url)
    monkeypatch.setenv("INKSTREAM_API_KEY", "from the environment")
    run("a", "--url", scripted.url)
    run("a", "--url", scripted.url, "--api-key", "given")
    monkeypatch.setenv("INKSTREAM_API_KEY", "")
    run("a", "--url", scripted.url)
    assert scripted.keys == [None, "Bearer from the environment", "Bearer given", None]
    code, _, error = run("a", "--url", scripted.url, "--api-key", "a\nb")
    assert (code, "keys are printable ASCII" in error) == (2, True)
    assert scripted.bodies == [{"prompt": "a", "return_token_ids": True}] * 4


def test_service_that_does_not_know_return_token_ids_gets_the_request_without_it(
    scripted: ScriptedService, run: Run
) -> None:
    scripted.status, scripted.headers = 400, {"content-type": "application/json"}
    scripted.parts = [b'{"error": {"message": "return_token_ids: unknown field"}}']
    code, _, error = run("a", "--url", scripted.url)
    assert code != 0 and "unknown field" in error
    assert scripted.bodies == [{"prompt": "a", "return_token_ids": True}, {"prompt": "a"}]


def test_url_defaults_to_the_environment_variable(
    scripted: ScriptedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INKSTREAM_URL", scripted.url)
    run("a")
    assert scripted.bodies == [{"prompt": "a", "return_token_ids": True}]
    code, _, error = run("a", "--url", "http://127.0.0.1:9")  # the flag wins
    assert (code, "no service answers at http://127.0.0.1:9 " in error) == (2, True)
    monkeypatch.setenv("INKSTREAM_URL", "127.0.0.1")
    code, _, error = run("a")
    assert (code, "(or the variable INKSTREAM_URL) must look like http://127.0.0.1:8000" in error) == (2, True)


def test_several_choices_are_printed_one_after_the_other(scripted: ScriptedService, run: Run) -> None:
    texts = [(1, "b"), (0, "a"), (2, "c"), (0, "a\n"), (1, "b")]
    tokens = [("token", {"index": index, "text": text}) for index, text in texts]
    scripted.script_events(("start", {}), *tokens, ("done", DONE))
    assert run("x", "--n", "3", "--url", scripted.url) == (0, "[1 of 3]\naa\n\n\n[2 of 3]\nbb\n\n[3 of 3]\nc\n", "")
    assert scripted.bodies == [{"prompt": "x", "n": 3, "return_token_ids": True}]


def test_error_in_the_middle_is_reported_after_the_partial_output(scripted: ScriptedService, run: Run) -> None:
    token = ("token", {"index": 0, "text": "half"})
    scripted.script_events(token, ("error", {"error": {"message": "the engine failed"}}))
    assert run("a", "--url", scripted.url) == (1, "half\n", "error: the engine failed\n")
    scripted.script_events(token)
    for breaks_off in (False, True):
        scripted.breaks_off = breaks_off
        code, text, error = run("a", "--url", scripted.url)
        assert (code, text, "before the text was complete" in error) == (1, "half\n", True)
    scripted.script_events(token)
    scripted.parts.append(b'id: r:1\nevent: token\ndata: {"index": 0, "te')
    assert run("a", "--url", scripted.url)[:2] == (1, "half\n")
    code, text, error = run("a", "--url", scripted.url, "--json")
    assert (code, text, "connection was lost" in error) == (1, "", True)


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_other_servers_are_not_mistaken_for_the_service(
    scripted: ScriptedService, run: Run, more: tuple[str, ...]
) -> None:
    scripted.headers, scripted.parts = {"content-type": "text/html"}, [b"<html>"]
    code, _, error = run("a", "--url", scripted.url, *more)
    assert (code, "is not an inkstream service" in error) == (2, True)
    scripted.status = 404
    code, _, error = run("a", "--url", scripted.url, *more)
    assert (code, "status 404" in error, "html" in error) == (1, True, False)


@pytest.mark.parametrize(
    ("url", "message"),
    [("http://127.0.0.1:9", "serve"), ("ftp://x", "--url"), ("nonsense", "--url"), ("http://x:y", "")],
)
def test_unreachable_service_is_reported(run: Run, url: str, message: str) -> None:
    code, text, error = run("a", "--url", url)
    assert (code, text) == (2, "")
    assert message in error


def test_missing_prompt_is_an_error(scripted: ScriptedService, run: Run) -> None:
    for stdin in (b"", None):
        code, _, error = run("--url", scripted.url, stdin=stdin)
        assert (code, "the text to complete is missing" in error) == (2, True)
    assert scripted.bodies == []
    for prompt in ("-", ""):
        assert run(prompt, "--url", scripted.url) == (0, "x\n", "")
    assert scripted.bodies == [{"prompt": "", "return_token_ids": True}] * 2, "an explicitly empty prompt is valid"


def test_control_characters_do_not_reach_the_terminal(
    scripted: ScriptedService, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted.script_events(("token", {"index": 0, "text": "a\t\x1b[2J\x9b\u00e9\n"}), ("done", DONE))
    assert run("a", "--url", scripted.url)[1] == "a\t\x1b[2J\x9b\u00e9\n\n", "output to a file is not filtered"
    screen = Terminal(io.BytesIO(), encoding="utf-8")
    monkeypatch.setattr(sys, "stdout", screen)
    run("a", "--url", scripted.url)
    assert screen.buffer.getvalue().decode() == "a\t\ufffd[2J\ufffd\u00e9\n\n"  # type: ignore[attr-defined]


def test_closed_pipe_and_ctrl_c_end_it_silently(scripted: ScriptedService) -> None:
    scripted.waits = threading.Event()
    scripted.script_events(*[("token", {"index": 0, "text": "line\n"})] * 3)
    command = [sys.executable, "-m", "app", "complete", "a", "--url", scripted.url]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    for disconnects in (False, True):
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            assert process.stdout and process.stderr
            assert process.stdout.readline() == b"line\n"
            if disconnects:
                process.stdout.close()
                scripted.waits.set()
            else:
                process.send_signal(signal.SIGINT)
            assert process.stderr.read() == b""
            assert process.wait(60) == (141 if disconnects else 130)
