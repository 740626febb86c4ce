"""The command line: each verb as a user would try it, with typical mistakes."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from app.__main__ import main
from app.common.settings import GROUPS, Settings, grouped_fields
from app.common.version import VERSION
from benchmarks.service_process import ServiceProcess, child_pids
from tests.support import ROOT
from tests.support.servers import Server

pytestmark = pytest.mark.slow

_VERBS = ("serve", "complete", "bench", "check", "convert", "doctor", "compile", "keys", "completion", "train")


Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a command in this process, because a new process would spend up to two seconds on imports."""
    on_interrupt = signal.getsignal(signal.SIGINT)

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        try:
            code = main([*arguments])
        except SystemExit as end:
            code = int(end.code or 0)
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    yield run
    signal.signal(signal.SIGINT, on_interrupt)


def test_check_prints_the_facts_of_a_good_directory(run: Run, weights: Path) -> None:
    result = run("check", str(weights))
    assert (result.returncode, result.stderr) == (0, "")
    for fact in (
        "llama",
        "2 layers x 64, context 256",
        "4 heads, 2 kv heads, head_dim 16",
        "feed-forward 176",
        "0.11 M",
        "256 bytes of KV cache a token, 64 KiB a full context",  # 2 * 2 layers * 2 heads * 16 * 2 bytes
        " MFLOP at a full context; reads ",
        "BPE, 320 of 320 tokens",
        '0 "<|endoftext|>", not added',
        "no template",
        "golden       none",
    ):
        assert fact in result.stdout, fact


def test_bench_loads_a_running_service(server: Server) -> None:
    """Runs a command in a new process, as a user does."""
    flags = ["--url", server.url, "--streams", "2", "--max-tokens", "8", "--prompt-words", "5"]
    command = [sys.executable, "-m", "app", "bench", *flags]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1].startswith("{")


def test_missing_verb_prints_the_list_and_exits_with_2(run: Run) -> None:
    result = run()
    assert (result.returncode, result.stdout) == (2, "")
    assert "serve a weights directory" in result.stderr
    for verb in _VERBS:
        assert re.search(rf"^  {verb}  .+\n {{10,}}inkstream {verb}( |$)", result.stderr, re.MULTILINE), verb
    assert max(map(len, result.stderr.splitlines())) <= 80


def test_the_version_is_that_of_the_package(run: Run) -> None:
    result = run("--version")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"inkstream {VERSION}\n", "")


@pytest.mark.parametrize(("word", "hint"), [("fly\nhigh", ""), ("chekc", "did you mean check? ")])
def test_unknown_verb_is_one_line_with_the_known_ones(run: Run, word: str, hint: str) -> None:
    result = run(word)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith(
        f"error: {word!r} is not a verb; {hint}the verbs are serve, complete, bench, check, "
    )


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (("serve", "--max-runing", "4"), "--max-running"),
        (("serve", "my-model", "--port", "8001"), "--weights"),
        (("serve", ""), "--weights"),
        (("complete", "x", "--temprature", "1"), "--temperature"),
        (("bench", "--stream-s", "1"), "--streams"),
        (("keys", "add", "x", "--key-file", "y"), "--keys-file"),
        (("train", "--dat", "x", "--out", "y"), "--data"),
        (("convert", "a", "b", "--quantise", "int4"), "--quantize"),
    ],
)
def test_misspelled_or_missing_flag_of_any_verb_gets_a_suggestion(
    run: Run, arguments: tuple[str, ...], meant: str
) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert f"did you mean {meant}? see " in result.stderr


def test_the_help_of_serve_is_grouped_and_fits_into_80_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    printed = run("serve", "--help").stdout
    assert re.findall(r"^(\w+):$", printed, re.MULTILINE) == ["options", *grouped_fields(), "examples"]
    assert max(map(len, printed.splitlines())) <= 80
    for shown in ("--weights DIR ", "--port N ", "--device {auto,cpu,cuda}\n", "--max-body-bytes N ",
                  "--head-timeout X ", "--max-running N ", "(default: 8000)", "--open  "):  # fmt: skip
        assert f"  {shown}" in printed or shown in printed, shown
    assert "(default: None)" not in printed and "(default: )" not in printed


def test_every_setting_is_in_a_group() -> None:
    assert [name for fields in grouped_fields().values() for name in fields] == list(Settings.model_fields)
    assert list(grouped_fields()) == list(GROUPS.values())


@pytest.mark.parametrize("verb", [verb for verb in _VERBS if verb not in ("keys", "completion")])
def test_every_verb_has_help(run: Run, verb: str) -> None:
    result = run(verb, "--help")
    assert result.returncode == 0
    assert "--help" in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("serve", "--x"),
        ("complete", "a", "--x"),
        ("bench", "--x"),
        ("check",),
        ("check", ""),
        ("convert",),
        ("convert", "a"),
        ("convert", "", "b"),
        ("convert", "a", ""),
        ("convert", "a", "b", "--dtype", "int8"),
        ("doctor", "--x"),
        ("compile", "--x"),
        ("keys",),
        ("completion",),
        ("train",),
    ],
)
def test_wrong_arguments_are_reported_in_one_line(run: Run, arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and "--help" in result.stderr


@pytest.mark.parametrize(("verb", "rest"), [("check", ["weights"]), ("train", ["--data", "a.txt", "--out", "out"])])
def test_verb_that_needs_torch_reports_that_it_is_missing(verb: str, rest: list[str]) -> None:
    program = "import sys; sys.modules['torch'] = None; from app.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", program, verb, *rest]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1)
    assert result.stderr.startswith("error: ") and "torch" in result.stderr


@pytest.mark.parametrize("verb", ["serve", "complete"])
def test_ctrl_c_during_an_import_that_converts_it_to_an_error_ends_silently(tmp_path: Path, verb: str) -> None:
    """Some versions of pydantic do this."""
    program = "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(5)\n"
    (tmp_path / "pydantic.py").write_text(f"{program}except BaseException:\n    raise ImportError from None\n")
    command, variables = [sys.executable, "-m", "app", verb], {**os.environ, "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(
        command, cwd=ROOT, env=variables, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, b"", b"")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_sockets_do_not_reuse_the_descriptors_of_closed_standard_streams(weights: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    serve = ["-m", "tests.support.fake_service", "1", "serve", "--port", str(port), "--weights", str(weights)]
    variables = {k: v for k, v in os.environ.items() if not k.startswith("INKSTREAM_")} | {"PYTHONPATH": str(ROOT)}
    command = ["sh", "-c", 'exec "$0" "$@" <&- >&- 2>&-', sys.executable, *serve]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdin=null, stdout=null, stderr=null)
    service = ServiceProcess(process, Path(os.devnull), time.monotonic(), url)
    try:
        service.wait_for_route("/health/ready")
        (engine,) = child_pids(process.pid)
        for pid in (process.pid, engine):
            for number in range(3):
                assert str(Path(f"/proc/{pid}/fd/{number}").readlink()) == os.devnull, (pid, number)
        response = httpx.post(f"{url}/complete", json={"prompt": "x", "max_tokens": 3, "stream": False})
        assert response.status_code == 200
        assert service.stop() == 0
    finally:
        service.kill()


def test_error_without_stderr_is_not_written_to_stdout() -> None:
    """Without sys.stderr, print() writes to standard output."""
    command = ["sh", "-c", '"$0" -m app check /nothing 2>&-', sys.executable]
    result = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, timeout=300, check=False)
    assert (result.returncode, result.stdout) == (2, b"")
