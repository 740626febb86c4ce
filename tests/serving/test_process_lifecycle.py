"""The two processes: failed starts, signals, and the queue as a client sees it. Crashes, hangs, drains: R9 to R12."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import ROOT
from tests.support.armed_faults import Faults
from tests.support.completion_client import fetch_completion, parse_events
from tests.support.http.raw_client import connect, get_request, post_request, read_all
from tests.support.keyed_server import Keyring
from tests.support.load.concurrent_clients import RequestSpec, concurrent_requests, engine_pid
from tests.support.model.tiny_models import tiny_weights
from tests.support.processes import is_stopped
from tests.support.reloads import count_reloads
from tests.support.servers import Server, is_clean, running_server, start_server, stop_server

pytestmark = pytest.mark.slow

LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 240, "ignore_eos": True, "seed": 7}


def test_sigterm_to_the_process_group_drains(tmp_path: Path, weights: Path) -> None:
    """systemd and `timeout` signal all processes."""
    faults = Faults(tmp_path / "faults")
    server = start_server(tmp_path, weights, fake_ms=1, environment=faults.environment)
    engine = engine_pid(server)
    faults.arm("engine.step", "stop", after=120, times=1)  # keeps the stream open until SIGCONT
    with concurrent_requests(server, [RequestSpec(body=LONG)]) as (response,):
        assert server.wait_for(lambda: is_stopped(engine))
        os.kill(engine, signal.SIGTERM)
        server.process.send_signal(signal.SIGTERM)
        os.kill(engine, signal.SIGCONT)
    assert b"event: done" in response.body
    assert server.process.wait(60) == 0


def test_requests_that_wait_for_a_turn_are_answered_before_the_service_ends(tmp_path: Path, weights: Path) -> None:
    """Those without a key wait while a key's stream runs: the drain ended with it, and closed them unanswered."""
    keys = Keyring.of(tmp_path / "keys", "a")
    server = start_server(tmp_path, weights, "--keys-file", str(keys.file), fake_ms=5)
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(connect(server))
        stream.sendall(post_request(LONG, "/complete", f"Authorization: Bearer {keys.keys['a']}", "Connection: close"))
        assert stream.recv(65536).startswith(b"HTTP/1.1 200")
        connections = [stack.enter_context(connect(server)) for _ in range(600)]
        for connection in connections:
            connection.sendall(get_request("/nothing", "Connection: close"))
        server.process.send_signal(signal.SIGTERM)
        assert b"event: done" in read_all(stream)
        assert {read_all(connection)[:12] for connection in connections} == {b"HTTP/1.1 401"}
    assert server.process.wait(60) == 0


def test_closed_terminal_does_not_end_a_service_under_nohup(tmp_path: Path, weights: Path) -> None:
    ours, theirs = pty.openpty()
    server = start_server(tmp_path, weights, fake_ms=1, terminal=theirs, wrapper=("nohup",))
    os.close(theirs)
    os.close(ours)
    assert server.wait_for(lambda: count_reloads(server, "switched") == 1), "the kernel must send SIGHUP"
    assert stop_server(server) == 0


def test_sigint_ignored_at_startup_stays_ignored(tmp_path: Path, weights: Path) -> None:
    """A script starts background processes like this; Ctrl+C is for the script only."""
    server = start_server(tmp_path, weights, fake_ms=1, wrapper=("sh", "-c", 'trap "" INT; exec "$@"', "sh"))
    server.process.send_signal(signal.SIGINT)
    assert fetch_completion(server.url, prompt="Once", max_tokens=2)["choices"], (
        "the signal must be handled before this request"
    )
    assert server.process.poll() is None and httpx.get(f"{server.url}/health/ready").status_code == 200
    assert stop_server(server) == 0


def test_engine_that_cannot_start_ends_the_service(tmp_path: Path, weights: Path) -> None:
    sabotage = (
        "from app.engine_client.replica import Replica as c; c.__init__.__kwdefaults__['command'] = ('/nonexistent',)"
    )
    server = start_server(tmp_path, weights, wait=False, sabotage=sabotage)
    assert server.process.wait(60) == 2
    assert server.log.read_text().endswith("error: /nonexistent: cannot be run: No such file or directory\n")


def test_folder_named_app_in_the_working_directory_does_not_matter(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app/__init__.py").write_text("raise RuntimeError('another package')")
    sabotage = f"import os; sys.path[0] = {str(ROOT)!r}; os.chdir({str(tmp_path)!r})"
    server = start_server(tmp_path, weights, sabotage=sabotage)
    assert stop_server(server) == 0


def _with_defaults(folder: Path, weights: Path) -> Path:
    copy = Path(shutil.copytree(weights, folder / "copy"))
    (copy / "generation_config.json").write_text('{"temperature": 99}')
    return copy


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--kv-blocks", "2000000000"], "does not fit"),
        (["--kv-blocks", "3"], "needs at least 16 blocks"),
        (["--host", "no.such.host.invalid", "--insecure-no-auth"], "has no address"),
        (["--weights", "DEFAULTS"], "generation_config.json: temperature"),
    ],
)
def test_startup_errors_are_one_line_with_exit_code_two(
    flags: list[str], words: str, tmp_path: Path, weights: Path
) -> None:
    if "DEFAULTS" in flags:
        flags = ["--weights", str(_with_defaults(tmp_path, weights))]
    assert words in _refused("--weights", str(weights), *flags).splitlines()[-1]


def test_port_in_use_is_refused_with_its_process(server: Server, weights: Path) -> None:
    port = int(server.url.rpartition(":")[2])
    text = _refused("--weights", str(weights), "--port", str(port))
    other = port + 1 if port < 65535 else 8000
    assert text.endswith(f"choose another, such as --port {other} (make serve PORT={other})")
    assert text.count("in use") == 1 and (sys.platform != "linux" or f"process {server.process.pid})" in text)


def _refused(*flags: str) -> str:
    """The error of a start that ends by itself."""
    command = [sys.executable, "-m", "app", "serve", "--port", "0", *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2 and "error: " in done.stderr and "Traceback" not in done.stderr
    return done.stderr.strip()


@pytest.mark.parametrize("after", [0.05, 0.3, 0.7])
def test_ctrl_c_during_startup_leaves_no_traceback_and_no_process(tmp_path: Path, weights: Path, after: float) -> None:
    # While Python itself starts, its own handler runs: the time counts from when the handler is ours.
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


def test_a_model_with_a_padded_vocabulary_serves(tmp_path: Path) -> None:
    with running_server(tmp_path, tiny_weights(tmp_path / "padded", vocab_size=640)) as server:
        response = fetch_completion(server.url, **LONG, temperature=10, logprobs=3)
        assert any(token["id"] >= 320 for token in response["choices"][0]["tokens"])


def test_queued_request_receives_its_position(tmp_path: Path, weights: Path) -> None:
    with running_server(tmp_path, weights, "--max-running", "1", fake_ms=1) as server:
        engine = engine_pid(server)
        os.kill(engine, signal.SIGSTOP)
        with concurrent_requests(server, [RequestSpec(body=LONG)] * 2) as responses:
            assert server.wait_for(lambda: any(b"event: queue" in response.body for response in responses))
            os.kill(engine, signal.SIGCONT)
        (events,) = [parse_events(a.body.decode()) for a in responses if b"event: queue" in a.body]
        names = [event.name for event in events]
        assert all(set(event.data) == {"position", "eta_ms"} for event in events if event.name == "queue")
        assert names.index("start") > names.index("queue") and names[-1] == "done"
        assert is_clean(server) and server.metric("generation_tokens_total") == 2 * 240
        assert httpx.head(f"{server.url}/metrics").status_code == 200
