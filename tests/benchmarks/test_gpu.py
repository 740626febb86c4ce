"""`make gpu-check`: all of it runs without a GPU, a failing stage affects no other, and its arithmetic is right."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch

from benchmarks.engine_driver import random_prompt, request
from benchmarks.gpu import conform, speed
from benchmarks.gpu.__main__ import main
from benchmarks.gpu.conformance import attention, experts, packed, rows, sampler
from benchmarks.gpu.machine import least_seconds
from benchmarks.gpu.packages import WheelsError, install, missing
from benchmarks.gpu.parity import OutputScore, finding_of, score_output
from benchmarks.gpu.results import Finding, Record, Report, StageContext, file_name
from benchmarks.gpu.stages import ENGINE, HTTP, NAMES, STAGES, choose, seconds_for
from benchmarks.gpu.subprocess_stage import StartMethod, run_in_subprocess
from benchmarks.shapes import SHAPES, decoder_of, random_state, smaller
from model.nn.reference import generate, logits
from tests.support import ROOT
from tests.support.processes import has_exited


def _context(folder: Path, seconds: float = 60) -> StageContext:
    return StageContext(device="cpu", tiny=True, weights=ROOT, folder=folder, deadline=time.monotonic() + seconds)


@pytest.mark.slow
def test_every_stage_that_can_run_on_a_cpu_passes_its_checks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--tiny", "--minutes", "20"]
    command += ["--out", str(tmp_path)]
    # Reference kernels are enough here; other tests run the real kernels in Triton's interpreter.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["benchmark"], result["device"], result["tiny"], result["good"]) == ("gpu", "cpu", True, True)
    statuses = {stage["name"]: stage["status"] for stage in result["stages"]}
    assert statuses == {s.name: "skipped" if s.name == "quantized-fp8" else "done" for s in STAGES if s.tiny}
    verdicts = [finding["ok"] for stage in result["stages"] for finding in stage["findings"] if "ok" in finding]
    assert len(verdicts) >= 8 and all(verdicts)
    (saved,) = tmp_path.glob("gpu-cpu-*.json")
    assert json.loads(saved.read_text()) == result
    assert saved.with_suffix(".md").read_text().strip() in done.stdout
    assert saved.with_suffix(".log").exists()


def _run_stage(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str, start: StartMethod = "fork") -> Record:
    """Runs a stage that yields two findings, with this line between them."""
    name = f"stage_{abs(hash(body))}"
    lines = ["import os, signal, subprocess, sys", "from benchmarks.gpu.results import Finding, Unsupported"]
    lines += ["def run(context):", "    yield Finding(what='first', value=1.0)", f"    {body}"]
    (folder / f"{name}.py").write_text("\n".join([*lines, "    yield Finding(what='last', value=2.0)"]))
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr("benchmarks.gpu.subprocess_stage.GRACE_SECONDS", 0.0)
    record, context = Record(name="stage"), _context(folder, 3.0 if "pause" in body else 60)
    run_in_subprocess(f"{name}.run", context, record, lambda: None, folder / "log", start)
    return record


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "status", "why"),
    [
        ("os.write(1, b'said this')", "done", ""),
        ("raise OSError('no such thing')", "failed", "OSError: no such thing"),
        ("raise OSError('much' * 900 + ' at the end')", "failed", "muchmuch at the end"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "failed", "SIGKILL"),
        ("os._exit(3)", "failed", "ended with 3"),
        ("raise Unsupported('an old card')", "skipped", "an old card"),
        ("while True: signal.pause()", "timed out", "killed"),
    ],
)
def test_failing_stage_ends_alone_and_keeps_its_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, why: str
) -> None:
    record = _run_stage(tmp_path, monkeypatch, body)
    assert (record.status, why in record.why) == (status, True), record
    assert [finding.what for finding in record.findings] == ["first", "last"][: 2 if status == "done" else 1]
    assert ("said this" in (tmp_path / "log").read_text()) == (status == "done")


@pytest.mark.slow
def test_spawned_stage_is_a_fresh_process_and_its_children_end_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = "open(context.folder / 'pid', 'w').write(str(subprocess.Popen(['sleep', '600']).pid))"
    record = _run_stage(tmp_path, monkeypatch, f"assert 'pytest' not in sys.modules; {start}", "spawn")
    assert (record.status, len(record.findings)) == ("done", 2), record
    pid, deadline = int((tmp_path / "pid").read_text()), time.monotonic() + 60
    # A killed process ends only when the scheduler runs it.
    while not has_exited(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert has_exited(pid)


@pytest.mark.slow
def test_wheels_of_a_folder_are_importable_during_the_run_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.slow
def test_missing_gpu_is_reported_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("benchmarks.gpu.__main__.signal.signal", lambda *_: None)  # keep pytest's handlers
    assert main(["--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "needs a CUDA GPU" in line and "--device cpu --tiny" in line


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes main() detect a GPU before it runs stages."""
    monkeypatch.setattr("benchmarks.gpu.__main__._detect_device", lambda *_: ("a GPU", "fork"))
    monkeypatch.setattr("benchmarks.gpu.__main__.signal.signal", lambda *_: None)
    monkeypatch.setenv("TRITON_CACHE_DIR", "unused")


@pytest.mark.usefixtures("fake_gpu")
def test_gpu_run_that_would_skip_stages_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[str] = []
    monkeypatch.setattr("benchmarks.gpu.__main__.missing", lambda names: tuple({*names} & {"uvloop"}))
    monkeypatch.setattr("benchmarks.gpu.__main__.run_in_subprocess", lambda name, *_: ran.append(name))
    assert main(["--only", "machine,http", "--out", str(tmp_path)]) == 2 and not ran
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: http: no uvloop; bring wheels along") and line.endswith("or add --partial")
    main(["--only", "machine,http", "--out", str(tmp_path), "--partial"])
    assert ran == ["benchmarks.gpu.machine.machine"]


@pytest.mark.usefixtures("fake_gpu")
@pytest.mark.parametrize(
    ("why", "runs"), [("AcceleratorError: CUDA error: an illegal memory access", 2), ("ValueError: no", 1)]
)
def test_cuda_errors_are_reproduced_with_blocking_launches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str, runs: int
) -> None:
    blocking: list[bool] = []

    def fail(_: str, context: StageContext, record: Record, *__: object) -> None:
        blocking.append(context.is_blocking)
        record.status, record.why = "failed", why

    monkeypatch.setattr("benchmarks.gpu.__main__.run_in_subprocess", fail)
    assert main(["--only", "machine", "--out", str(tmp_path)]) == 1
    assert blocking == [False, True][:runs]
    (saved,) = tmp_path.glob("*.json")
    names = [stage["name"] for stage in json.loads(saved.read_text())["stages"]]
    assert names == ["machine", "machine (CUDA_LAUNCH_BLOCKING=1)"][:runs]


def test_requests_of_a_batch_that_do_not_fit_are_reported_and_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "build_engine", partial(speed.build_engine, cache_tokens=64))
    context = replace(_context(tmp_path), variant="8b", weights=ROOT / "weights")
    found = {finding.what: finding for finding in speed.batch(context)}
    fitting = found["requests that fit"]
    assert (fitting.value, fitting.unit) == (2, "of 4")
    assert "0 preemptions" in found["2 x 20 in, 6 out"].note


@pytest.mark.parametrize("flags", ["--only nonsense", "--minutes 0", "--device cpu", "--wheels /nowhere"])
def test_wrong_flags_are_one_line_and_status_2(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags.split())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_stages_are_chosen_by_name_or_noun_and_share_the_time() -> None:
    chosen = [stage.name for stage in choose(["speed"], tiny=False)]
    assert chosen == [name for name in NAMES if name == "roofs" or name.startswith("speed-")], "shares are of the roofs"
    assert [stage.name for stage in choose(["parity"], tiny=False)] == ["parity"]
    remaining = 480.0
    for i, stage in enumerate(STAGES):  # every stage gets a share and uses all of it
        share = seconds_for(stage, STAGES[i + 1 :], remaining)
        assert share == pytest.approx(480.0 * stage.weight / sum(s.weight for s in STAGES))
        remaining -= share


def test_report_is_good_until_a_stage_or_a_check_fails(tmp_path: Path) -> None:
    record = Record(name="speed")
    report = Report(path=tmp_path / (file_name("NVIDIA H200", "2026-11-22-1200") + ".json"), facts={}, records=[record])
    report.write()
    assert (
        json.loads((tmp_path / "gpu-nvidia-h200-2026-11-22-1200.json").read_text())["stages"][0]["status"] == "running"
    )
    record.findings += [Finding(what="a | b", value=1234.5, unit="tokens/s", share=0.5), Finding(what="c", value="x")]
    record.status = "done"
    assert report.is_good
    assert "| speed | a \\| b | 1,234 tokens/s | 50.0 % |" in report.table()
    assert report.numbers == {"speed: a | b": 1234.5}
    record.status = "timed out"
    assert not report.is_good and "**timed out**" in report.table()
    record.status = "done"
    record.findings.append(Finding(what="law", value=0.0, ok=False))
    assert not report.is_good


def test_kernel_checks_fail_independently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def check_sums(device: str, tiny: bool) -> Iterator[Finding]:
        yield Finding(what="rows", ok=tiny and device == "cpu", value=2, unit="ulp")

    def check_wrong(**_: object) -> Iterator[Finding]:
        yield Finding(what="one", ok=False, value="")
        raise ValueError("and then this")

    every = {
        one
        for module in (attention, experts, packed, rows, sampler)
        for key, one in vars(module).items()
        if key[:6] == "check_"
    }
    assert every == {*conform.CHECKS}
    monkeypatch.setattr(conform, "CHECKS", (check_wrong, check_sums))
    violation, wrong, sums = conform.conform(_context(tmp_path))
    assert (violation.what, violation.ok) == ("wrong, one", False)
    assert (wrong.ok, wrong.value, wrong.note) == (False, 0, "then ValueError: and then this")
    assert (sums.ok, sums.value, sums.note) == (True, 1, "2 ulp")


def test_kernel_checks_need_no_packages_of_the_engine() -> None:
    """A machine with a GPU may have little more than torch."""
    (needs,) = (stage.needs for stage in STAGES if stage.name == "conform")
    absent = dict.fromkeys({*ENGINE, *HTTP} - {*needs})
    script = f"import sys; sys.modules.update({absent}); import benchmarks.gpu.conform"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_oracle_detects_a_wrong_token_and_a_wrong_log_probability() -> None:
    shape = smaller(SHAPES["8b"])
    decoder = decoder_of(shape, random_state(shape, device=torch.device("cpu"), dtype=torch.float32))
    greedy = request("1", random_prompt(9, shape.vocab_size, 1), 5)
    tokens = tuple(generate(decoder, list(greedy.prompt), 5))
    logits_TV = logits(decoder, [*greedy.prompt, *tokens])[len(greedy.prompt) - 1 : -1]
    expected = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
    right = score_output(decoder, greedy, tokens, tuple(expected))
    assert (right.tokens, right.off, right.gaps) == (5, 0, (0.0,) * 5)
    assert max(right.differences) < 1e-6
    wrong = score_output(decoder, greedy, ((tokens[0] + 1) % shape.vocab_size, *tokens[1:]), tuple(expected))
    assert wrong.off >= 1 and max(wrong.gaps) > 1e-3
    off_by_half = score_output(decoder, greedy, tokens, (expected[0] - 0.5, *expected[1:]))
    assert max(off_by_half.differences) == pytest.approx(0.5, abs=1e-5)
    missing = score_output(decoder, greedy, tokens, (None, *expected[1:]))
    for share in (1.0, 0.5):
        assert not finding_of("", [greedy], [missing], "float32", share).ok, "missing is no small difference"
        assert finding_of("", [greedy], [right], "float32", share).ok


def test_parity_of_a_mixture_asks_for_a_share_of_the_tokens() -> None:
    """A router may choose another expert after rounding, but not for every tenth token in float32."""
    few = OutputScore(tokens=100, off=1, gaps=(0.5, *[0.0] * 99), differences=(3.0, *[1e-5] * 99))
    many = OutputScore(tokens=100, off=3, gaps=(*[0.5] * 3, *[0.0] * 97), differences=(*[3.0] * 3, *[1e-5] * 97))
    greedy = request("a", [1], 100, logprobs=0)
    for score, share, is_good in ((few, 1.0, False), (few, 0.98, True), (many, 0.98, False), (many, 0.9, True)):
        assert finding_of("", [greedy], [score], "float32", share).ok == is_good


def test_roofline_is_the_longer_of_memory_and_compute_time(tmp_path: Path) -> None:
    shape = smaller(SHAPES["C"])  # width 64, 2 layers, 4 and 2 heads of 16, mlp 96, vocabulary 320
    body, head, kv = 2 * (64 * 2 * (64 + 32) + 3 * 64 * 96), 320 * 64, 2 * 2 * 2 * 16

    def on_a_gpu(bytes_per_second: float, operations_per_second: float) -> StageContext:
        roofs = {"roofs: most bytes/s": bytes_per_second, "roofs: bf16 operations/s": operations_per_second}
        return replace(_context(tmp_path), device="cuda", numbers=roofs)

    reading, multiplying = on_a_gpu(10.0, 1e9), on_a_gpu(1e9, 10.0)
    assert least_seconds(reading, shape, tokens=4, rows=4, kept=5) == 2 * (body + head + 4 * 5 * kv) / 10
    found = least_seconds(multiplying, shape, tokens=50, rows=1, kept=0, weight_bytes=1)
    assert found == 2 * (body * 50 + head) / 10
    assert least_seconds(reading, shape, tokens=1, rows=1, kept=0, weight_bytes=1) == (body + head) / 10
    for blind in (replace(reading, device="cpu"), replace(reading, numbers=None)):
        assert least_seconds(blind, shape, tokens=1, rows=1, kept=0) is None


def test_random_weights_do_not_favor_one_token() -> None:
    shape = smaller(SHAPES["8b"])
    state = random_state(shape, device=torch.device("cpu"), dtype=torch.float32)
    logits_TV = logits(decoder_of(shape, state), list(random_prompt(64, shape.vocab_size, 0)))
    assert 1.0 < float(logits_TV.std()) < 6.0
    assert len(set(logits_TV.argmax(-1).tolist())) > 32
