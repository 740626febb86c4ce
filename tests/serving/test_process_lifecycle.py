"""The two processes: start, health, signals, an engine that dies, falls silent or cannot start."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.armed_faults import Faults
from tests.support.completion_client import parse_events, stream, text_of, whole
from tests.support.load.concurrent_clients import children
from tests.support.model.tiny_models import tiny_weights
from tests.support.processes import has_exited, is_stopped
from tests.support.servers import Server, is_clean, running_server, start_server, stop_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "seed": 7}


@pytest.fixture
def faults(tmp_path: Path) -> Faults:
    """Of own_server and real_server."""
    return Faults(tmp_path / "faults")


@pytest.fixture
def own_server(tmp_path: Path, weights: Path, faults: Faults) -> Server:
    """A service that the test may break, around a fake engine, which starts in a moment."""
    return start_server(tmp_path, weights, fake_ms=1, environment=faults.environment)


@pytest.fixture
def real_server(tmp_path: Path, weights: Path, faults: Faults) -> Server:
    """A service that the test may break."""
    return start_server(tmp_path, weights, "--dtype", "float32", environment=faults.environment)


def _engine_pid(server: Server) -> int:
    (pid,) = children(server)
    return pid


def _half_a_stream(client: httpx.Client, server: Server, faults: Faults) -> tuple[httpx.Response, Iterator[str]]:
    """A stream whose engine has stopped itself half-way: however fast it is, the stream is open until SIGCONT."""
    engine = _engine_pid(server)
    faults.arm("engine.step", "stop", after=120, times=1)
    response = client.send(client.build_request("POST", f"{server.url}/complete", json=LONG, timeout=60), stream=True)
    lines = response.iter_lines()
    while next(lines) != "event: token":
        pass
    assert server.wait_for(lambda: is_stopped(engine))
    return response, lines


def test_the_port_answers_while_the_engine_loads(tmp_path: Path, weights: Path, faults: Faults) -> None:
    faults.arm("fake.load", "sleep", seconds=600)
    with running_server(tmp_path, weights, wait=False, fake_ms=1, environment=faults.environment) as server:
        assert server.wait_for(lambda: _get(server, "/health/live") == 200)
        response = httpx.get(f"{server.url}/health/ready")
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["phase"] != "ready"
        refused = httpx.post(f"{server.url}/complete", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["type"] == "unavailable_error"
        assert server.wait_for(lambda: len(children(server)) == 1)
        faults.disarm("fake.load")
        os.kill(_engine_pid(server), signal.SIGKILL)  # the next one loads at once
        assert server.wait_for(lambda: _get(server, "/health") == 200)


def _get(server: Server, path: str) -> int:
    try:
        return httpx.get(f"{server.url}{path}").status_code
    except httpx.TransportError:
        return 0


def test_a_killed_engine_is_a_pause_for_streams(real_server: Server, faults: Faults) -> None:
    undisturbed = stream(real_server.url, **LONG)
    with httpx.Client() as client:
        killed = _engine_pid(real_server)
        response, lines = _half_a_stream(client, real_server, faults)
        os.kill(killed, signal.SIGKILL)
        rest = "\n".join(lines)
        assert response.status_code == 200
    assert rest.count("event: done") == 1 and "event: error" not in rest
    again = httpx.get(f"{real_server.url}/complete/{response.headers['x-request-id']}/events", timeout=60)
    assert text_of(parse_events(again.text)) == text_of(undisturbed)
    assert _get(real_server, "/health/ready") == 200
    assert _engine_pid(real_server) != killed
    assert real_server.metric("engine_restarts_total") == real_server.metric("replayed_requests_total") == 1
    assert real_server.tells(f"the engine process {killed} was ended by SIGKILL")


def test_a_killed_engine_is_a_pause_for_plain_requests(own_server: Server, faults: Faults) -> None:
    undisturbed = whole(own_server.url, **LONG)["choices"]
    faults.arm("engine.step", "kill", after=120, times=1)
    assert whole(own_server.url, **LONG)["choices"] == undisturbed
    assert own_server.metric("engine_restarts_total") == own_server.metric("replayed_requests_total") == 1


def test_a_silent_engine_is_replaced(tmp_path: Path, weights: Path, faults: Faults) -> None:
    """The next one stops while it loads, which it may for a minute: however late we look, it is not ready."""
    with running_server(
        tmp_path, weights, "--engine-silence", "2", fake_ms=1, environment=faults.environment
    ) as server:
        faults.arm("fake.load", "stop", times=1)
        stopped = _engine_pid(server)
        os.kill(stopped, signal.SIGSTOP)
        assert server.wait_for(lambda: any(map(is_stopped, set(children(server)) - {stopped})))
        assert has_exited(stopped)
        assert _get(server, "/health/ready") == 503
        os.kill(_engine_pid(server), signal.SIGCONT)
        assert server.wait_for(lambda: _get(server, "/health/ready") == 200)


def test_three_crashes_in_a_row_end_the_service(own_server: Server) -> None:
    for before in range(3):
        assert own_server.wait_for(lambda n=before: own_server.metric("engine_restarts_total") == n)  # type: ignore[misc]
        assert own_server.wait_for(lambda: _get(own_server, "/health/ready") == 200)
        os.kill(_engine_pid(own_server), signal.SIGKILL)
    assert own_server.process.wait(60) == 1
    assert "stopped 3 times" in own_server.log.read_text()


def test_the_engine_follows_its_parent_into_death(own_server: Server) -> None:
    engine = _engine_pid(own_server)
    own_server.process.kill()
    own_server.process.wait()
    assert own_server.wait_for(lambda: has_exited(engine))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_open_streams_end_refuses_new_ones_and_exits_zero(
    own_server: Server, faults: Faults, number: int
) -> None:
    engine = _engine_pid(own_server)
    with httpx.Client() as client:
        _, lines = _half_a_stream(client, own_server, faults)
        own_server.process.send_signal(number)
        assert own_server.tells("ending")
        assert own_server.wait_for(lambda: _get(own_server, "/health/ready") != 200)
        os.kill(engine, signal.SIGCONT)
        rest = list(lines)
    assert any(line == "event: done" for line in rest)
    assert own_server.process.wait(60) == 0
    assert has_exited(engine)
    assert "Traceback" not in own_server.log.read_text()


def test_sigterm_to_the_whole_process_group_is_a_drain_too(own_server: Server, faults: Faults) -> None:
    """systemd and `timeout` signal all processes."""
    engine = _engine_pid(own_server)
    with httpx.Client() as client:
        _, lines = _half_a_stream(client, own_server, faults)
        os.kill(engine, signal.SIGTERM)
        own_server.process.send_signal(signal.SIGTERM)
        os.kill(engine, signal.SIGCONT)
        assert any(line == "event: done" for line in lines)
    assert own_server.process.wait(60) == 0


def test_streams_that_outlast_the_drain_time_out_are_told(tmp_path: Path, weights: Path, faults: Faults) -> None:
    server = start_server(tmp_path, weights, "--drain-timeout", "0.5", fake_ms=1, environment=faults.environment)
    engine = _engine_pid(server)
    with httpx.Client() as client:
        _, lines = _half_a_stream(client, server, faults)
        server.process.send_signal(signal.SIGTERM)
        rest = list(lines)
    assert rest.count("event: error") == 1
    assert any("shutting down" in line for line in rest)
    assert server.process.wait(60) == 0
    assert "Traceback" not in server.log.read_text()
    assert has_exited(engine)


def test_an_engine_that_cannot_be_started_ends_the_service(tmp_path: Path, weights: Path) -> None:
    sabotage = (
        "import app.engine_client.client as c; c.EngineClient.__init__.__kwdefaults__['command'] = ('/nonexistent',)"
    )
    server = start_server(tmp_path, weights, wait=False, sabotage=sabotage)
    assert server.process.wait(60) == 1
    assert "stopped 3 times" in server.log.read_text()


def test_a_folder_called_app_in_the_working_directory_does_not_matter(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("raise RuntimeError('another package')")
    sabotage = f"import os; sys.path[0] = {str(ROOT)!r}; os.chdir({str(tmp_path)!r})"
    server = start_server(tmp_path, weights, sabotage=sabotage)
    assert stop_server(server) == 0


def test_a_second_signal_ends_at_once(tmp_path: Path, weights: Path) -> None:
    server = start_server(tmp_path, weights, fake_ms=1)
    engine = _engine_pid(server)
    os.kill(engine, signal.SIGSTOP)  # a stream that cannot end
    with httpx.Client() as client:
        request = client.build_request("POST", f"{server.url}/complete", json=LONG)
        response = client.send(request, stream=True)
        server.process.send_signal(signal.SIGTERM)
        assert server.tells("ending"), "two signals that are not heard yet are one"
        assert server.process.poll() is None, "the first signal was meant to wait for the stream"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 1
        response.close()
    with contextlib.suppress(ProcessLookupError):
        os.kill(engine, signal.SIGCONT)
    assert server.wait_for(lambda: has_exited(engine))


def _serve(*flags: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "app", "serve", "--port", "0", *flags],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--port", "70000"], "--port"),
        (["--port", "http"], "--port"),
        (["--kv-blocks", "-1"], "--kv-blocks"),
        (["--device", "tpu"], "--device"),
        (["--max-running", "0"], "--max-running"),
        (["--tokens-per-step", "8"], "--max-running"),
        (["--kv-blocks", "2000000000"], "does not fit"),
        (["--host", "0.0.0.0"], "--insecure-no-auth"),
        (["--host", "no.such.host.invalid"], "--insecure-no-auth"),
        (["--weights", "/nonexistent"], "no such directory"),
        (["--host", "no.such.host.invalid", "--insecure-no-auth"], "has no address"),
        (["--unknown"], "--unknown"),
        (["--kv-blocks", "3"], "needs at least 16 blocks"),
        ({"INKSTREAM_PROT": "81"}, "INKSTREAM_PROT"),
        ({"INKSTREAM_MAX_RUNNING": "many"}, "INKSTREAM_MAX_RUNNING"),
    ],
)
def test_bad_configuration_ends_with_one_clear_line_and_exit_code_two(
    given: list[str] | dict[str, str], words: str, weights: Path
) -> None:
    flags, environment = ([], given) if isinstance(given, dict) else (given, {})
    result = _serve("--weights", str(weights), *flags, **environment)
    assert result.returncode == 2
    line = result.stderr.strip().splitlines()[-1]
    assert "error: " in line and words in line
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("after", [0.05, 0.3, 0.7])
def test_ctrl_c_during_the_start_leaves_no_traceback_and_no_process(
    tmp_path: Path, weights: Path, after: float
) -> None:
    # So early that Python itself is still starting, its own handler answers: the time counts from when it is ours.
    program = "import sys; from app.__main__ import main; print('begun', flush=True); sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "serve", "--port", "0", "--weights", str(weights)]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, start_new_session=True) as process,
    ):
        assert process.stdout
        process.stdout.readline()
        time.sleep(after)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(60)
    assert "Traceback" not in (tmp_path / "log").read_text()


def test_sampling_defaults_outside_their_range_are_refused(tmp_path: Path, weights: Path) -> None:
    copy = Path(shutil.copytree(weights, tmp_path / "copy"))
    (copy / "generation_config.json").write_text('{"temperature": 99}')
    result = _serve("--weights", str(copy))
    assert result.returncode == 2
    assert "generation_config.json: temperature" in result.stderr.splitlines()[-1]


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tmp_path: Path) -> None:
    result = _serve("--weights", str(tiny_weights(tmp_path / "narrow", vocab_size=300)))
    assert result.returncode == 2
    assert "tokenizer.json: has 320 tokens, the model only 300" in result.stderr.splitlines()[-1]


def test_a_model_with_a_padded_vocabulary_serves(tmp_path: Path) -> None:
    with running_server(tmp_path, tiny_weights(tmp_path / "padded", vocab_size=640)) as server:
        answer = whole(server.url, **LONG, temperature=10, logprobs=3)
        assert any(token["id"] >= 320 for token in answer["choices"][0]["tokens"])


def test_a_port_in_use_is_refused(server: Server, weights: Path) -> None:
    result = _serve("--weights", str(weights), "--port", server.url.rpartition(":")[2])
    assert result.returncode == 2
    assert "choose another --port" in result.stderr
    assert result.stderr.count("in use") == 1


def test_a_full_queue_refuses_with_503_and_retry_after(tmp_path: Path, weights: Path) -> None:
    flags = ("--max-running", "1", "--max-waiting", "2")
    with running_server(tmp_path, weights, *flags, fake_ms=1) as server:
        os.kill(_engine_pid(server), signal.SIGSTOP)
        with httpx.Client() as client:
            for _ in range(2):
                client.send(client.build_request("POST", f"{server.url}/complete", json=LONG), stream=True)
            refused = httpx.post(f"{server.url}/complete", json=LONG)
            assert refused.status_code == 503
            assert 1 <= int(refused.headers["retry-after"]) <= 120
            assert refused.json()["error"]["type"] == "unavailable_error"
        os.kill(_engine_pid(server), signal.SIGCONT)
        assert server.wait_for(lambda: server.metric("requests_waiting") == 0)
        assert 'rejected_total{reason="queue_full"} 1.0' in httpx.get(f"{server.url}/metrics").text


def test_a_request_in_the_queue_hears_its_position(tmp_path: Path, weights: Path) -> None:
    with running_server(tmp_path, weights, "--max-running", "1", fake_ms=1) as server:
        engine = _engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        with httpx.Client() as client:
            first = client.send(client.build_request("POST", f"{server.url}/complete", json=LONG), stream=True)
            second = client.send(client.build_request("POST", f"{server.url}/complete", json=LONG), stream=True)
            parts, text = second.iter_text(), ""
            while "event: queue" not in text:
                text += next(parts)
            os.kill(engine, signal.SIGCONT)
            first.read()
            events = parse_events(text + "".join(parts))
        names = [event.name for event in events]
        queue = [event.data for event in events if event.name == "queue"]
        assert queue and all(set(data) == {"position", "eta_ms"} for data in queue)
        assert names.index("start") > names.index("queue")
        assert names[-1] == "done"


def test_metrics_count_what_happened(server: Server) -> None:
    assert is_clean(server)
    before = server.metric("generation_tokens_total")
    whole(server.url, **LONG)
    assert server.wait_for(lambda: server.metric("generation_tokens_total") == before + 240)
    text = httpx.get(f"{server.url}/metrics").text
    names = [
        *("time_to_first_token", "inter_token_latency", "request_duration", "queue_duration", "prefill_duration"),
        *("requests_running", "requests_waiting", "kv_cache_usage_ratio", "prompt_tokens_total", "requests_total"),
        *("cached_prompt_tokens_total", "preemptions_total", "engine_restarts_total"),
    ]
    for name in names:
        assert re.search(rf"^inkstream_{name}(_seconds_bucket)?[ {{]", text, re.MULTILINE), name
    assert httpx.head(f"{server.url}/metrics").status_code == 200


def test_the_model_tells_its_facts(server: Server) -> None:
    (model,) = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert (model["id"], model["max_model_len"], model["n_vocab"]) == ("tiny", 256, 320)
    assert model["n_params"] > 100_000
    assert model["dtype"] == "float32"
    assert len(model["weights_version"]) == 64
