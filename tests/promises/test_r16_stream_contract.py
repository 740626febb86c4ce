"""Whatever fails, a response keeps its form: one terminal event, valid JSON and UTF-8, and a stream that says the same
as the whole response.

Twelve faults, each with four requests: both APIs, with and without streaming. Expected results:

the unaffected output   the engine is killed, raises in a step or is stopped; a slow reader; a stop string; an
                        incomplete character at the end
a prefix of it          the deadline
an error, the same      logits that are not finite; a request that kills every engine; a queue timeout; a shutdown whose
for all four            drain timeout expires
nothing                 the client disconnects: the part received is well-formed, and the engine frees everything
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
"""Three seconds: on a machine short of CPU the engine may be silent for one or two."""


@dataclass(frozen=True, slots=True)
class _Outcome:
    """A response in a common form, whatever its API and mode."""

    text: str
    finish: str | None
    error: str | None
    """The error type."""


@dataclass(frozen=True, slots=True)
class _Target:
    """A service under test, its faults, and a factory for further services."""

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
    """Parse a response; asserts that it is well-formed."""
    output = answer.output()
    if "texts" not in output:  # not streamed
        assert (answer.status == 200) == ("error" not in output), output
        if "error" in output:
            return _Outcome("", None, output["error"]["type"])
        (choice,) = output["choices"]
        return _Outcome(choice["text"], choice["finish_reason"], None)
    text = output["texts"].get(0, "")
    if "end" in output:  # the native stream: exactly one terminal event, as outputs() asserts
        error = output["end"].get("error")
        return _Outcome(text, None if error else output["end"]["choices"][0]["finish_reason"], error and error["type"])
    assert len(output["ends"]) + len(output["errors"]) == 1, "one finish_reason or one error, then [DONE]"
    return _Outcome(text, output["ends"].get(0), output["errors"][0]["type"] if output["errors"] else None)


def _is_same(answers: list[CompletionExchange], expected: _Outcome) -> list[bool]:
    return [_outcome(answer) == expected for answer in answers]


def _is_error(answers: list[CompletionExchange], kind: str) -> list[bool]:
    return [(outcome.error, outcome.finish) == (kind, None) for outcome in map(_outcome, answers)]


@pytest.fixture(scope="module")
def target(serve_module: Services, faults: Faults) -> _Target:
    """A fake engine whose requests take almost a second; it recovers from each fault before the next."""
    server = serve_module(*_FLAGS, fake_ms=8, environment=faults.environment, logs_tracebacks=True)
    return _Target(server, faults, serve_module)


def _slow_after_step(target: _Target, step: int) -> AbstractContextManager[None]:
    """Slows down all steps after the first `step` to a quarter of a second, so that requests stay in flight."""
    return target.faults.armed("engine.forward", "sleep", seconds=0.25, after=step)


@contextmanager
def _running_streams(server: Server, specs: list[RequestSpec]) -> Iterator[list[CompletionExchange]]:
    """Exchanges of concurrent clients whose streams have started."""
    with concurrent_requests(server, specs) as answers:
        assert server.wait_for(lambda: server.metric("requests_running") == 4)  # also those without an event yet
        assert server.wait_for(lambda: answers[0].n_events > 5 and answers[2].n_events > 3)
        yield answers


def _undisturbed(target: _Target, **extra: Any) -> _Outcome:
    """The common outcome of all four requests without a fault."""
    outcomes = {_outcome(answer) for answer in send_all(target.server, _specs(**extra))}
    assert len(outcomes) == 1, outcomes
    (outcome,) = outcomes
    return outcome


def _broken_engine(break_it: Callable[[_Target], None]) -> Callable[[_Target], list[bool]]:
    def run_fault(target: _Target) -> list[bool]:
        expected, before = _undisturbed(target), target.server.metric("replayed_requests_total")
        # All four requests stay in flight for half a minute, so the fault hits them even on a slow machine.
        with _slow_after_step(target, 20), _running_streams(target.server, _specs()) as answers:
            break_it(target)
            target.faults.disarm("engine.forward")
        assert target.server.wait_for(lambda: is_ready(target.server), 30)
        assert target.server.metric("replayed_requests_total") == before + 4
        return _is_same(answers, expected)

    return run_fault


def _slow_reader(target: _Target) -> list[bool]:
    expected = _undisturbed(target)
    with concurrent_requests(target.server, _specs(), pause=0.02) as answers:
        pass
    return _is_same(answers, expected)


def _stop_string(target: _Target) -> list[bool]:
    stop = _undisturbed(target).text[30:33]
    expected = _undisturbed(target, stop=stop)
    assert expected.finish == "stop" and stop not in expected.text
    return _is_same(send_all(target.server, _specs(stop=stop)), expected)


def _incomplete_character(target: _Target) -> list[bool]:
    """Many tokens of the fake engine are single bytes that start a multi-byte character."""
    for max_tokens in range(20, 60):
        (answer,) = send_all(target.server, _specs(max_tokens=max_tokens)[:1])
        last = parse_events(answer.body.decode())[-2]
        if last.name == "token" and last.data["text"].endswith("\ufffd"):
            expected = _undisturbed(target, max_tokens=max_tokens)
            assert expected.text.endswith("\ufffd")
            return _is_same(send_all(target.server, _specs(max_tokens=max_tokens)), expected)
    raise AssertionError("no output ends with an incomplete character")


def _deadline(target: _Target) -> list[bool]:
    text = _undisturbed(target).text
    with _slow_after_step(target, 60):
        outcomes = [_outcome(answer) for answer in send_all(target.server, _specs(deadline_ms=3000))]
    assert all(outcome.text for outcome in outcomes)
    # The last character may be incomplete.
    return [o.finish == "timeout" and text.startswith(o.text.rstrip("\ufffd")) for o in outcomes]


def _not_finite(target: _Target) -> list[bool]:
    with target.faults.armed("fake.not_finite", "nothing", after=40):
        return _is_error(send_all(target.server, _specs()), "server_error")


def _poisoned(target: _Target) -> list[bool]:
    companion = RequestSpec(body={**_BODY, "max_tokens": 400})
    with concurrent_requests(target.server, [companion]) as others:
        assert target.server.wait_for(lambda: others[0].n_events > 3)
        with target.faults.armed("engine.step", "kill", match="max_tokens=120,"):
            answers = send_all(target.server, _specs())
    assert _outcome(others[0]).finish == "length"
    assert target.server.wait_for(lambda: is_ready(target.server), 30)
    return _is_error(answers, "server_error")


def _disconnected(target: _Target) -> list[bool]:
    good = []
    for spec in _specs(max_tokens=8000):  # a minute
        disconnect = threading.Event()
        with concurrent_requests(target.server, [spec], disconnect=disconnect) as (answer,):
            assert target.server.wait_for(lambda: target.server.metric("requests_running") == 1)
            streams = spec.body["stream"]
            assert target.server.wait_for(lambda: answer.n_events > 2 or not streams)  # noqa: B023
            disconnect.set()
        text = answer.body.decode("ascii").rpartition("\n\n")[0]
        if spec.body["stream"] and spec.path == "/complete":
            assert all(event.name not in ("done", "error") for event in parse_events(text + "\n\n"))
        good.append(bool(text) == spec.body["stream"] and is_clean(target.server, 30.0))
    return good


def _queue_timeout(target: _Target) -> list[bool]:
    server, disconnect = target.serve("--max-running", "1", "--queue-timeout", "1", fake_ms=8), threading.Event()
    with concurrent_requests(server, [RequestSpec(body={**_BODY, "max_tokens": 8000})], disconnect=disconnect) as first:
        assert server.wait_for(lambda: first[0].n_events > 1)
        return _is_error(send_all(server, _specs()), "unavailable_error")


def _service_shutdown(target: _Target) -> list[bool]:
    server = target.serve("--drain-timeout", "0.5", fake_ms=8)
    with _running_streams(server, _specs(max_tokens=8000)) as answers:
        server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    return _is_error(answers, "unavailable_error")


_FAULTS: dict[str, Callable[[_Target], list[bool]]] = {
    "engine killed": _broken_engine(lambda s: os.kill(engine_pid(s.server), signal.SIGKILL)),
    "engine raises": _broken_engine(lambda s: s.faults.arm("engine.step", "raise", times=1)),
    "engine stopped (SIGSTOP)": _broken_engine(lambda s: os.kill(engine_pid(s.server), signal.SIGSTOP)),
    "slow reader": _slow_reader,
    "stop string": _stop_string,
    "incomplete character": _incomplete_character,
    "deadline": _deadline,
    "non-finite logits": _not_finite,
    "request that kills every engine": _poisoned,
    "client disconnects": _disconnected,
    "queue timeout": _queue_timeout,
    "service shuts down": _service_shutdown,
}


@pytest.mark.parametrize("fault", _FAULTS)
def test_every_response_is_well_formed(target: _Target, promise: Promise, fault: str) -> None:
    promise.all_of(f"well-formed responses, 2 APIs x 2 modes: {fault}", sum(_FAULTS[fault](target)), 4)
    assert is_clean(target.server, 30.0)


def test_malformed_responses_are_detected() -> None:
    """Positive control."""
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
