"""`make gpu-check` runs as a whole without a GPU, and a failing stage affects no other."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from zipfile import ZipFile

import pytest

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.packages import WheelsError, install, missing
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.gpu.stages import NAMES, STAGES, choose
from benchmarks.gpu.subprocess_stage import run_in_subprocess
from tests.support import ROOT
from tests.support.processes import has_exited

pytestmark = pytest.mark.slow


def _bench(folder: Path, seconds: float) -> StageContext:
    return StageContext(device="cpu", tiny=True, weights=ROOT, folder=folder, deadline=time.monotonic() + seconds)


def _stage_of(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, body: str) -> str:
    """A module with run(bench), where the stage's process finds it."""
    lines = ["import os, signal, time", "from benchmarks.gpu.results import Finding, Unsupported", "def run(bench):"]
    lines += ["    yield Finding(what='first', value=1.0)", f"    {body}", "    yield Finding(what='last', value=2.0)"]
    (folder / f"{name}.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(str(folder))
    return name


def test_every_stage_that_a_cpu_can_try_runs_and_keeps_its_laws(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--minutes", "20"]
    command += ["--out", str(tmp_path)]
    # Reference kernels are enough here; other tests run the real kernels in Triton's interpreter.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["benchmark"], result["device"], result["tiny"], result["good"]) == ("gpu", "cpu", True, True)
    stages = {stage["name"]: stage for stage in result["stages"]}
    assert list(stages) == [stage.name for stage in STAGES if stage.tiny]
    assert {stage["status"] for stage in stages.values()} <= {"done", "skipped"}
    for name in (
        "machine",
        "roofs",
        "conform",
        "parity",
        "graphs",
        "syncs",
        "memory",
        "speed-gpt2",
        "batch-8b",
        "quantized-int8",
    ):
        assert stages[name]["status"] == "done", stages[name]
    verdicts = [finding["ok"] for stage in stages.values() for finding in stage["findings"] if "ok" in finding]
    assert len(verdicts) >= 8
    assert all(verdicts)
    (saved,) = tmp_path.glob("gpu-cpu-*.json")
    assert json.loads(saved.read_text()) == result
    assert saved.with_suffix(".md").read_text().strip() in done.stdout
    assert saved.with_suffix(".log").exists()


@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ("pass", "done", ""),
        ("raise OSError('no such thing')", "failed", "OSError: no such thing"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "SIGKILL"),
        ("os._exit(3)", "failed", "ended with 3"),
        ("raise Unsupported('an old card')", "skipped", "an old card"),
        ("while True: signal.pause()", "timed out", "killed"),
    ],
)
def test_a_stage_ends_alone_and_leaves_what_it_had_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, why: str
) -> None:
    monkeypatch.setattr("benchmarks.gpu.subprocess_stage.GRACE_SECONDS", 0.0)
    name = _stage_of(tmp_path, monkeypatch, f"stage_{status.replace(' ', '_')}_{len(body)}", body)
    findings: list[Finding] = []
    # A pause without an end needs the deadline, all others must not come near it.
    outcome = run_in_subprocess(
        name, _bench(tmp_path, 3.0 if status == "timed out" else 60), findings.append, tmp_path / "log"
    )
    assert (outcome.status, why in outcome.why) == (status, True), outcome
    assert [finding.what for finding in findings] == ["first", "last"][: 2 if status == "done" else 1]


def test_what_a_stage_prints_goes_to_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _stage_of(tmp_path, monkeypatch, "stage_talks", "os.write(1, b'said this')")
    run_in_subprocess(name, _bench(tmp_path, 60), lambda _: None, tmp_path / "log")
    assert "said this" in (tmp_path / "log").read_text()


def test_a_stage_can_begin_as_a_fresh_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = _stage_of(tmp_path, monkeypatch, "stage_fresh", "assert 'pytest' not in __import__('sys').modules")
    findings: list[Finding] = []
    outcome = run_in_subprocess(name, _bench(tmp_path, 60), findings.append, tmp_path / "log", "spawn")
    assert (outcome.status, len(findings)) == ("done", 2), outcome


def test_a_stage_dies_with_what_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = "import subprocess; open(bench.folder / 'pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    name = _stage_of(tmp_path, monkeypatch, "stage_starts", body)
    assert run_in_subprocess(name, _bench(tmp_path, 60), lambda _: None, tmp_path / "log").status == "done"
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    # A killed process ends once it gets a core.
    while not has_exited(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_exited(pid)


def test_wheels_of_a_folder_are_there_for_this_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with pytest.raises(WheelsError, match="holds no wheels"):
        install(wheels, site)
    with ZipFile(wheels / "brought-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("brought.py", "")
        wheel.writestr("brought-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: brought\nVersion: 1.0\n")
        wheel.writestr("brought-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("brought-1.0.dist-info/RECORD", "")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("PYTHONPATH", "before")
    assert missing(("brought",)) == ("brought",)
    install(wheels, site)
    assert missing(("brought",)) == ()
    assert os.environ["PYTHONPATH"] == f"{site}{os.pathsep}before"


def test_without_a_gpu_one_line_says_what_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("benchmarks.gpu.__main__.signal.signal", lambda *_: None)  # pytest's own handlers stay
    assert main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert "needs a CUDA GPU" in line
    assert "--device cpu --tiny" in line


@pytest.mark.parametrize(
    "flags", [["--only", "nonsense"], ["--minutes", "0"], ["--device", "cpu"], ["--wheels", "/nowhere"]]
)
def test_wrong_flags_are_told_in_one_line(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(flags)
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_stages_are_asked_for_by_name_or_by_noun() -> None:
    assert [stage.name for stage in choose(["speed", "roofs"], tiny=False)] == [
        name for name in NAMES if name == "roofs" or name.startswith("speed-")
    ]
    assert [stage.name for stage in choose(["http"], tiny=True)] == ["http"]
