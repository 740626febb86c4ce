"""Whatever fails, a response keeps its form: one terminal event, valid JSON and UTF-8, and a stream that says the same
as the whole response.

Twelve faults, each met by four requests: both APIs, streamed and whole. What each must end with:

the undisturbed text    the engine is killed, raises in a step or is stopped; a slow reader; a stop string; an
                        incomplete character at the end
its beginning           the deadline
an error, the same      logits that are not finite; a request that kills every engine; a queue timeout; a shutdown whose
for stream and whole    drain timeout expires
nothing                 the client disconnects: what it received is well-formed, and the engine keeps nothing of it
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.armed_faults import Faults
from tests.support.completion_client import parse_events
from tests.support.load.concurrent_clients import (
    CompletionExchange,
    RequestSpec,
    concurrent_requests,
    engine_pid,
    exchange_with_body,
    is_ready,
    send_all,
)
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services

_BODY: dict[str, Any] = {"prompt": "Once", "max_tokens": 120, "temperature": 1.0, "seed": 3}
_FLAGS = ("--engine-silence", "3", "--resume-seconds", "0")
"""Three seconds: the engine of a machine that is short of CPU may be silent for one or two."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What a client makes of an answer, of whatever form."""

    text: str
    finish: str | None
    error: str | None
    """Its type."""


@dataclass(frozen=True, slots=True)
class _Stage:
    """A service that may be broken, and what starts others."""

    server: Server
    faults: Faults
    serve: Services


def _specs(**extra: Any) -> list[RequestSpec]:
    endpoints = ("/complete", "/v1/completions")
    return [
        RequestSpec(path=endpoint, body={**_BODY, **extra, "stream": stream})
        for endpoint in endpoints
        for stream in (True, False)
    ]


def _outcome(answer: CompletionExchange) -> _Outcome:
    """Strict about the form."""
    output = answer.output()
    if "texts" not in output:  # whole
        assert (answer.status == 200) == ("error" not in output), output
        if "error" in output:
            return _Outcome("", None, output["error"]["type"])
        (choice,) = output["choices"]
        return _Outcome(choice["text"], choice["finish_reason"], None)
    text = output["texts"].get(0, "")
    if "end" in output:  # the native stream: exactly one terminal event, as outputs() asserts
        error = output["end"].get("error")
        return _Outcome(text, None if error else output["end"]["choices"][0]["finish_reason"], error and error["type"])
    assert len(output["ends"]) + len(output["errors"]) == 1, "one finish_reason or one error, and [DONE] behind it"
    return _Outcome(text, output["ends"].get(0), output["errors"][0]["type"] if output["errors"] else None)


def _is_same(answers: list[CompletionExchange], expected: _Outcome) -> list[bool]:
    return [_outcome(answer) == expected for answer in answers]


def _is_error(answers: list[CompletionExchange], kind: str) -> list[bool]:
    return [(outcome.error, outcome.finish) == (kind, None) for outcome in map(_outcome, answers)]


@pytest.fixture(scope="module")
def stage(serve_module: Services, faults: Faults) -> _Stage:
    """A fake engine whose requests take most of a second; what one fault did to it is over before the next."""
    server = serve_module(*_FLAGS, fake_ms=8, environment=faults.environment, logs_tracebacks=True)
    return _Stage(server, faults, serve_module)


def _slow_from(stage: _Stage, step: int) -> AbstractContextManager[None]:
    """The first steps take as long as ever, all others a quarter of a second: what is under way then stays that."""
    return stage.faults.armed("engine.forward", "sleep", seconds=0.25, after=step)


@contextmanager
def _under_way(server: Server, specs: list[RequestSpec]) -> Iterator[list[CompletionExchange]]:
    """The answers of concurrent clients whose streams have started."""
    with concurrent_requests(server, specs) as answers:
        assert server.wait_for(lambda: server.metric("requests_running") == 4)  # also those without an event yet
        assert server.wait_for(lambda: answers[0].n_events > 5 and answers[2].n_events > 3)
        yield answers


def _undisturbed(stage: _Stage, **extra: Any) -> _Outcome:
    """What all four say where nothing goes wrong."""
    outcomes = {_outcome(answer) for answer in send_all(stage.server, _specs(**extra))}
    assert len(outcomes) == 1, outcomes
    (outcome,) = outcomes
    return outcome


def _broken_engine(break_it: Callable[[_Stage], None]) -> Callable[[_Stage], list[bool]]:
    def meet(stage: _Stage) -> list[bool]:
        expected, before = _undisturbed(stage), stage.server.metric("replayed_requests_total")
        # All four are there to be broken for half a minute, however late this is.
        with _slow_from(stage, 20), _under_way(stage.server, _specs()) as answers:
            break_it(stage)
            stage.faults.disarm("engine.forward")
        assert stage.server.wait_for(lambda: is_ready(stage.server), 30)
        assert stage.server.metric("replayed_requests_total") == before + 4
        return _is_same(answers, expected)

    return meet


def _slow_reader(stage: _Stage) -> list[bool]:
    expected = _undisturbed(stage)
    with concurrent_requests(stage.server, _specs(), pause=0.02) as answers:
        pass
    return _is_same(answers, expected)


def _stop_string(stage: _Stage) -> list[bool]:
    stop = _undisturbed(stage).text[30:33]
    expected = _undisturbed(stage, stop=stop)
    assert expected.finish == "stop" and stop not in expected.text
    return _is_same(send_all(stage.server, _specs(stop=stop)), expected)


def _half_a_character(stage: _Stage) -> list[bool]:
    """Of the tokens of the fake engine many are single bytes that begin a character."""
    for max_tokens in range(20, 60):
        (answer,) = send_all(stage.server, _specs(max_tokens=max_tokens)[:1])
        last = parse_events(answer.body.decode())[-2]
        if last.name == "token" and last.data["text"].endswith("\ufffd"):
            expected = _undisturbed(stage, max_tokens=max_tokens)
            assert expected.text.endswith("\ufffd")
            return _is_same(send_all(stage.server, _specs(max_tokens=max_tokens)), expected)
    raise AssertionError("no text ends in the middle of a character")


def _deadline(stage: _Stage) -> list[bool]:
    text = _undisturbed(stage).text
    with _slow_from(stage, 60):
        outcomes = [_outcome(answer) for answer in send_all(stage.server, _specs(deadline_ms=3000))]
    assert all(outcome.text for outcome in outcomes)
    # The last character may have been cut in its middle.
    return [o.finish == "timeout" and text.startswith(o.text.rstrip("\ufffd")) for o in outcomes]


def _not_finite(stage: _Stage) -> list[bool]:
    with stage.faults.armed("fake.not_finite", "nothing", after=40):
        return _is_error(send_all(stage.server, _specs()), "server_error")


def _poisoned(stage: _Stage) -> list[bool]:
    companion = RequestSpec(body={**_BODY, "max_tokens": 400})
    with concurrent_requests(stage.server, [companion]) as others:
        assert stage.server.wait_for(lambda: others[0].n_events > 3)
        with stage.faults.armed("engine.step", "kill", match="max_tokens=120,"):
            answers = send_all(stage.server, _specs())
    assert _outcome(others[0]).finish == "length"
    assert stage.server.wait_for(lambda: is_ready(stage.server), 30)
    return _is_error(answers, "server_error")


def _disconnected(stage: _Stage) -> list[bool]:
    good = []
    for spec in _specs(max_tokens=8000):  # a minute
        disconnect = threading.Event()
        with concurrent_requests(stage.server, [spec], disconnect=disconnect) as (answer,):
            assert stage.server.wait_for(lambda: stage.server.metric("requests_running") == 1)
            streams = spec.body["stream"]
            assert stage.server.wait_for(lambda: answer.n_events > 2 or not streams)  # noqa: B023
            disconnect.set()
        text = answer.body.decode("ascii").rpartition("\n\n")[0]
        if spec.body["stream"] and spec.path == "/complete":
            assert all(event.name not in ("done", "error") for event in parse_events(text + "\n\n"))
        good.append(bool(text) == spec.body["stream"] and is_clean(stage.server, 30.0))
    return good


def _no_turn(stage: _Stage) -> list[bool]:
    server, disconnect = stage.serve("--max-running", "1", "--queue-timeout", "1", fake_ms=8), threading.Event()
    with concurrent_requests(server, [RequestSpec(body={**_BODY, "max_tokens": 8000})], disconnect=disconnect) as first:
        assert server.wait_for(lambda: first[0].n_events > 1)
        return _is_error(send_all(server, _specs()), "unavailable_error")


def _end_of_the_service(stage: _Stage) -> list[bool]:
    server = stage.serve("--drain-timeout", "0.5", fake_ms=8)
    with _under_way(server, _specs(max_tokens=8000)) as answers:
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    return _is_error(answers, "unavailable_error")


_FAULTS: dict[str, Callable[[_Stage], list[bool]]] = {
    "engine killed": _broken_engine(lambda s: os.kill(engine_pid(s.server), signal.SIGKILL)),
    "engine raises": _broken_engine(lambda s: s.faults.arm("engine.step", "raise", times=1)),
    "engine stopped (SIGSTOP)": _broken_engine(lambda s: os.kill(engine_pid(s.server), signal.SIGSTOP)),
    "slow reader": _slow_reader,
    "stop string": _stop_string,
    "incomplete character": _half_a_character,
    "deadline": _deadline,
    "non-finite logits": _not_finite,
    "request that kills every engine": _poisoned,
    "client disconnects": _disconnected,
    "queue timeout": _no_turn,
    "service shuts down": _end_of_the_service,
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_every_answer_keeps_its_form(stage: _Stage, promise: Promise, fault: str) -> None:
    promise.all_of(f"well-formed responses, 2 APIs x 2 modes: {fault}", sum(_FAULTS[fault](stage)), 4)
    assert is_clean(stage.server, 30.0)


def test_the_check_of_the_form_finds_what_breaks_it() -> None:
    """The positive control."""
    event = b'id: r:%d\nevent: %s\ndata: {"index": 0, "text": "a", "choices": [{"finish_reason": "stop"}]}\n\n'
    bad = [
        event % (0, b"token"),
        event % (0, b"done") + event % (1, b"done"),
        event % (0, b"token") + event % (2, b"done"),
        event % (0, b"done") + event % (1, b"token"),
        (event % (0, b"token")).replace(b'"a"', b'"\xff"') + event % (1, b"done"),
        b'data: {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}\n\n',
        b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\ndata: [DONE]\n\n',
        b'data: {"choices": \n\ndata: [DONE]\n\n',
    ]
    good = event % (0, b"token") + event % (1, b"done")
    assert _outcome(exchange_with_body(good)) == _Outcome("a", "stop", None)
    for body in bad:
        with pytest.raises((AssertionError, ValueError)):
            _outcome(exchange_with_body(body))
