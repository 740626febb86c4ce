"""An engine crash loses nothing: open requests pause while the engine restarts, and their outputs are byte-identical.

A request that was in flight in two crashes, with less than two new tokens or scores between them, is refused. The
service ends if the engine crashes three times within ten minutes and delivers nothing in between. The crash after which
a request is refused does not count, nor does the one before if the next engine completes a canary request.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.engine_client.restart_policy import TOKENS_TO_CLEAR
from tests.support.armed_faults import Faults
from tests.support.load.concurrent_clients import (
    CompletionExchange,
    RequestSpec,
    compare_outputs,
    concurrent_requests,
    is_ready,
    kill_engine,
    outputs,
    send_all,
)
from tests.support.model.tiny_models import tiny_weights
from tests.support.promise_figures import Promise
from tests.support.servers import Server, is_clean
from tests.support.services import Services
from tests.support.trials import Trials

_TEXT: dict[str, Any] = {"prompt": "Once upon a time", "ignore_eos": True, "temperature": 1.0}


def _streams(count: int, **extra: Any) -> list[RequestSpec]:
    return [RequestSpec(body={**_TEXT, "seed": seed, **extra}) for seed in range(count)]


def _mixed(max_tokens: int) -> list[RequestSpec]:
    """32 requests of all kinds that recover from a crash differently."""
    common: dict[str, Any] = {**_TEXT, "max_tokens": max_tokens}
    one: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": max_tokens, "seed": 5}
    long_prompt = "Once upon a time there was a fox. " * 30
    guided = {**common, "ignore_eos": False, "regex": "[a-z ]{200,300}"}
    specs = [
        RequestSpec(body={**common, "seed": 1, "n": 2}),
        RequestSpec(body={**common, "seed": 2, "n": 3, "stop": ["zq"], "logprobs": 2}),
        RequestSpec(body={**common, "seed": 3, "echo": True, "logprobs": 2, "prompt": long_prompt}),
        RequestSpec(body={**common, "seed": 4, "prompt": ["one", "two", "three"]}),
        RequestSpec(body={**common, "seed": 5, "stream": False}),
        RequestSpec(body={**common, "seed": 6, "stream": False, "n": 2, "echo": True, "logprobs": 1}),
        RequestSpec(body={**guided, "seed": 7}),
        RequestSpec(body={**guided, "seed": 8, "stream": False}),
        RequestSpec(body={**common, "seed": 9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_tokens": 20}),
        RequestSpec(path="/v1/completions", body={**one, "stream": True}),
        RequestSpec(path="/v1/completions", body={**one, "stream": True, "n": 2, "logprobs": 1}),
        RequestSpec(path="/v1/completions", body={**one, "best_of": 3, "n": 2}),
        RequestSpec(path="/v1/completions", body={**one, "echo": True, "logprobs": 3, "prompt": long_prompt}),
        RequestSpec(path="/score", body={"prompt": [long_prompt, "A fox and the moon"], "logprobs": 2}),
    ]
    return specs + _streams(32 - len(specs), max_tokens=max_tokens)


@pytest.fixture(scope="module")
def server(serve_module: Services, faults: Faults) -> Server:
    """A fake engine, for faults that it survives."""
    return serve_module(fake_ms=5, environment=faults.environment, logs_tracebacks=True)


def _have_started(server: Server, answers: Sequence[CompletionExchange]) -> bool:
    return server.wait_for(lambda: all(answer.n_events > 3 for answer in answers))


def _has_ended(answer: CompletionExchange) -> bool:
    return b"event: done" in answer.body[-2000:]


def _all_progress(server: Server, answers: list[CompletionExchange]) -> bool:
    """Waits until every stream has sent a few more events, or has ended."""
    streams = [(answer, answer.n_events) for answer in answers if answer.body[:3] == b"id:"]
    return server.wait_for(lambda: all(_has_ended(a) or a.n_events > n + TOKENS_TO_CLEAR for a, n in streams))


def _run_with_kills(server: Server, specs: list[RequestSpec], kills: int) -> tuple[list[CompletionExchange], int]:
    """Responses to concurrent clients while the engine is killed repeatedly, and the number of kills."""
    killed = 0
    with concurrent_requests(server, specs) as answers:
        # Then all are admitted (a restarting engine refuses requests): those without streaming were sent first.
        streams = [
            a for a, spec in zip(answers, specs, strict=True) if spec.body.get("stream", spec.path == "/complete")
        ]
        assert _have_started(server, streams)
        while killed < kills and not all(map(_has_ended, answers)):
            kill_engine(server)
            killed += 1
            assert server.wait_for(lambda: is_ready(server), 60), server.log.read_text()
            # A request without progress between two crashes is refused, so wait for requests without streaming, too.
            assert _all_progress(server, answers) and server.wait_for(lambda: not server.metric("requests_suspect"), 60)
    return answers, killed


def _compare_with_kills(server: Server, specs: list[RequestSpec], kills: int, *, kills_per_round: int) -> Trials:
    """Compares responses with those without kills; kills come in rounds."""
    expected, killed, trials = outputs(send_all(server, specs)), 0, Trials()
    before = server.metric("engine_restarts_total")
    while killed < kills:
        answers, times = _run_with_kills(server, specs, min(kills_per_round, kills - killed))
        trials += compare_outputs(server, answers, expected)
        killed += times
    assert server.metric("engine_restarts_total") == before + killed
    return trials


def test_streams_continue_after_every_engine_kill(server: Server, promise: Promise) -> None:
    """32 streams of the fake engine, which starts fast enough to be killed often."""
    kills, before = promise.size(3, 20), server.metric("replayed_requests_total")
    trials = _compare_with_kills(server, _streams(32, max_tokens=250), kills, kills_per_round=4)
    assert server.metric("replayed_requests_total") > before + kills
    promise.all_of("streams byte-identical through kill -9 of a fake engine", trials)


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_requests_of_every_kind_continue_after_an_engine_kill(
    serve: Services, tmp_path: Path, promise: Promise, kernels: str, request: pytest.FixtureRequest
) -> None:
    """A real model in float32: n, echo, log-probabilities, grammars, best_of, scores, streamed and whole, both APIs."""
    if kernels == "native":
        request.getfixturevalue("native_library")
    flags = ("--dtype", "float32", "--prompt-tokens-beside", "16", "--kernels", kernels)
    server = serve(*flags, weights=tiny_weights(tmp_path / "tiny", context=2048))
    trials = _compare_with_kills(server, _mixed(100), promise.size(1, 20), kills_per_round=2)
    promise.all_of(f"requests of every kind identical through kill -9, {kernels}", trials)


@pytest.mark.parametrize("point", ["engine.step", "engine.submit"])
def test_only_the_request_that_kills_the_engine_is_refused(
    server: Server, faults: Faults, promise: Promise, point: str
) -> None:
    """The request kills the engine when computed, or when submitted; 31 others are unaffected."""
    specs, restarts = _streams(31, max_tokens=120), server.metric("engine_restarts_total")
    expected = outputs(send_all(server, specs))
    faults.arm(point, "kill", match="max_tokens=119,")
    faults.arm("engine.forward", "sleep", seconds=0.05)  # a request after the crash would be refused
    poison = RequestSpec(body={**_TEXT, "max_tokens": 119, "seed": 1})
    with concurrent_requests(server, specs) as answers:
        assert _have_started(server, answers)
        with concurrent_requests(server, [poison]) as poisoned:
            assert server.wait_for(lambda: server.metric("engine_restarts_total") > restarts)
            faults.disarm("engine.forward")
    refused = poisoned[0].output()["end"]["error"]
    assert refused["code"] == "engine_failed" and "crashed twice" in refused["message"]
    others = compare_outputs(server, answers, expected)
    promise.all_of(f"other outputs identical beside a poisoned request ({point})", others)
    assert server.metric("engine_restarts_total") == restarts + 2
    for _ in range(2):  # without streaming, and repeated: only the request fails
        assert server.wait_for(lambda: is_ready(server), 60)
        (answer,) = send_all(server, [RequestSpec(body={**poison.body, "stream": False})])
        assert answer.status == 500 and answer.output()["error"]["code"] == "engine_failed"
        assert server.wait_for(lambda: is_ready(server), 60)
        assert compare_outputs(server, send_all(server, specs[:1]), expected[:1]).good == 1


@pytest.mark.parametrize("engines", [1, 2])
def test_requests_that_kill_the_engine_do_not_end_an_idle_service(
    server: Server, serve: Services, faults: Faults, promise: Promise, engines: int
) -> None:
    """After each crash a canary request confirms that the engine works, so the service gives up no engine."""
    if engines == 2:
        server = serve("--replicas", "2", fake_ms=5, environment=faults.environment, logs_tracebacks=True)
    restarts, since = server.metric("engine_restarts_total"), len(server.log_text())
    faults.arm("engine.step", "kill", match="max_tokens=119,")
    for number in range(3):
        assert server.wait_for(lambda: server.metric("requests_suspect") == 0 and is_ready(server), 60)
        (answer,) = send_all(server, [RequestSpec(body={**_TEXT, "max_tokens": 119, "seed": number})])
        assert answer.output()["end"]["error"]["code"] == "engine_failed"
    assert server.wait_for(lambda: is_ready(server), 60)
    (answer,) = send_all(server, _streams(1, max_tokens=5))
    assert b"event: done" in answer.body
    promise.all_of(f"poisoned requests in a row survived, {engines} engines", 3, 3)
    assert server.metric("engine_restarts_total") == restarts + 6 and is_clean(server, 30)
    assert "given up" not in server.log_text()[since:]


def test_lost_device_pauses_all_requests_and_fails_none(server: Server, faults: Faults, promise: Promise) -> None:
    """After such a CUDA error every call fails: no row is retried, and the next engine continues all open requests."""
    specs, restarts = _streams(16, max_tokens=120), server.metric("engine_restarts_total")
    since = len(server.log_text())
    expected = outputs(send_all(server, specs))
    faults.arm("engine.step", "sleep", seconds=0.05)  # a request after the crash would be refused
    with concurrent_requests(server, specs) as answers:
        assert _have_started(server, answers)
        faults.arm("engine.forward", "lose device", times=1)
        faults.disarm("engine.step")
    promise.all_of("streams identical through the loss of the device", compare_outputs(server, answers, expected))
    assert server.metric("engine_restarts_total") == restarts + 1 and not faults.is_armed("engine.forward")
    log = server.log_text()[since:]
    assert "the device is lost: an illegal memory access was encountered" in log
    assert "failed in the engine" not in log, "no request may be retried alone and fail"


def test_crash_loop_ends_the_service(serve: Services, faults: Faults, promise: Promise) -> None:
    """An engine that dies at every step: streams get an error, and the exit code is not 0."""
    server = serve(fake_ms=5, environment=faults.environment, logs_tracebacks=True)
    with concurrent_requests(server, _streams(8, max_tokens=8000)) as answers:  # 40 s without a crash
        assert _have_started(server, answers)
        faults.arm("engine.step", "exit", code=3)
    ends = [answer.output()["end"]["error"]["code"] for answer in answers]
    assert ends == ["engine_failed"] * 8
    code = server.process.wait(60)
    log = server.log.read_text()
    assert log.count("ended with exit code 3") == 4, "one crash belongs to the refused request"
    assert "error: the engine stopped 3 times in ten minutes" in log
    promise.all_of("crash loops that end the process with a non-zero code", int(code != 0), 1)


def test_shutdown_during_an_engine_restart_completes(serve: Services, faults: Faults) -> None:
    """Once with an engine that restarts before the drain timeout, once with one that does not."""
    for restarts_in_time in (True, False):
        drain, max_tokens = ("60", 400) if restarts_in_time else ("1", 8000)
        server = serve("--drain-timeout", drain, fake_ms=5, environment=faults.environment, logs_tracebacks=True)
        with concurrent_requests(server, _streams(4, max_tokens=max_tokens)) as answers:
            assert _have_started(server, answers)
            if not restarts_in_time:
                faults.arm("engine.load", "sleep", seconds=60)
            kill_engine(server)
            server.process.send_signal(signal.SIGTERM)
        words = "event: done" if restarts_in_time else "shutting down"
        assert all(words in answer.body.decode() for answer in answers)
        assert server.process.wait(60) == 0
        faults.disarm("engine.load")
