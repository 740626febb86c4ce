"""The parts of `make gpu-check`: its report, its roofs, its oracle, its random weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.engine_driver import random_prompt, request
from benchmarks.gpu import conform, conformance
from benchmarks.gpu.parity import score_output
from benchmarks.gpu.results import Finding, Outcome, Record, Report, StageContext, file_name
from benchmarks.gpu.roofline import Roofline
from benchmarks.gpu.shapes import decoder_of, random_state, shape_of
from benchmarks.gpu.stages import STAGES, seconds_for
from benchmarks.roofline import ModelSize
from model.nn.reference import generate, logits
from model.nn.transformer import Decoder


def _outcome(status: str) -> Outcome:
    return Outcome(status=status, seconds=1.0)


def test_time_that_a_stage_does_not_take_goes_to_those_that_follow() -> None:
    shares = [seconds_for(stage, STAGES[i + 1 :], 480.0) for i, stage in enumerate(STAGES)]
    assert sum(shares[:1]) < 60
    assert shares[-1] == 480.0
    remaining = 480.0
    for i, stage in enumerate(STAGES):  # each stage uses its full share, and every stage gets one
        share = seconds_for(stage, STAGES[i + 1 :], remaining)
        assert share == pytest.approx(480.0 * stage.weight / sum(s.weight for s in STAGES))
        remaining -= share


def test_a_report_is_good_until_a_stage_fails_or_a_law_breaks(tmp_path: Path) -> None:
    report = Report(path=tmp_path / "r.json", facts={})
    record = Record(name="speed")
    report.records.append(record)
    report.write()
    assert json.loads(report.path.read_text())["stages"][0]["status"] == "running"
    record.findings += [Finding(what="a | b", value=1234.5, unit="tokens/s", share=0.5), Finding(what="c", value="x")]
    record.outcome = _outcome("done")
    assert report.is_good
    assert "| speed | a \\| b | 1,234 tokens/s | 50.0 % |" in report.table()
    assert report.numbers == {"speed: a | b": 1234.5}
    record.findings.append(Finding(what="law", value=0.0, ok=False))
    assert not report.is_good
    record.findings.pop()
    record.outcome = _outcome("timed out")
    assert not report.is_good
    assert "**timed out**" in report.table()


def test_a_report_is_called_after_its_device() -> None:
    assert file_name("NVIDIA H200", "2026-11-22-1200") == "gpu-nvidia-h200-2026-11-22-1200"


_CHECKS = """
def check_sums(device, tiny):
    yield {"what": "rows", "ok": tiny and device == "cpu", "value": 2, "unit": "ulp"}
def check_wrong(device, tiny):
    yield {"what": "one", "ok": False}
    raise ValueError("and then this")
def check_quiet(device, tiny):
    return ()
"""


def test_checks_of_kernels_fail_each_for_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "norms.py").write_text(_CHECKS)
    (tmp_path / "absent.py").write_text("import there_is_no_such_package\n")
    monkeypatch.setattr(conformance, "__path__", [str(tmp_path)])
    bench = StageContext(device="cpu", tiny=True, weights=tmp_path, folder=tmp_path)
    found = {finding.what: finding for finding in conform.run(bench)}
    assert found["absent"].ok is None, "what a machine lacks breaks no law"
    assert (found["norms: sums"].ok, found["norms: sums"].value, found["norms: sums"].note) == (True, 1, "2 ulp")
    assert found["norms: wrong, one"].ok is False
    wrong = found["norms: wrong"]
    assert (wrong.ok, wrong.value, wrong.note) == (False, 0, "then ValueError: and then this")
    assert found["norms: quiet"].ok is True


def test_the_oracle_tells_a_wrong_token_and_a_wrong_log_probability() -> None:
    shape = shape_of("8b", tiny=True)
    decoder = decoder_of(shape, random_state(shape, device=torch.device("cpu"), dtype=torch.float32))
    greedy = request("1", random_prompt(9, shape.vocab_size, 1), 5)
    tokens = tuple(generate(decoder, list(greedy.prompt), 5))
    logits_TV = logits(decoder, [*greedy.prompt, *tokens])[len(greedy.prompt) - 1 : -1]
    expected = torch.log_softmax(logits_TV, -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1).tolist()
    right = score_output(decoder, greedy, tokens, tuple(expected))
    assert (right.tokens, right.off, right.gap) == (5, 0, 0.0)
    assert right.difference < 1e-6
    other = (tokens[0] + 1) % shape.vocab_size
    wrong = score_output(decoder, greedy, (other, *tokens[1:]), tuple(expected))
    assert wrong.off >= 1
    assert wrong.gap > 1e-3
    assert score_output(decoder, greedy, tokens, (expected[0] - 0.5, *expected[1:])).difference == pytest.approx(
        0.5, abs=1e-5
    )
    assert not score_output(decoder, greedy, tokens, (None, *expected[1:])).difference < 1e9, (
        "none at all is no small difference"
    )


def test_a_roof_is_reading_once_or_multiplying_whichever_takes_longer() -> None:
    size = ModelSize(body=900, head=100, kv_per_token=10)
    roofs = Roofline(device="cuda", size=size, bytes_per_second=10.0, operations_per_second=1e9)
    assert roofs.least_seconds(tokens=1, rows=1, kept=0) == 2000 / 10
    assert roofs.least_seconds(tokens=4, rows=4, kept=5) == (2000 + 4 * 5 * 10 * 2) / 10
    many = Roofline(device="cuda", size=size, bytes_per_second=1e9, operations_per_second=10.0)
    assert many.least_seconds(tokens=50, rows=1, kept=0) == 2 * (900 * 50 + 100) / 10
    blind = Roofline(device="cuda", size=size, bytes_per_second=None, operations_per_second=None)
    assert blind.least_seconds(tokens=1, rows=1, kept=0) is None


def test_shapes_have_the_sizes_that_they_are_called_after() -> None:
    for name, millions in (("gpt2", 124), ("1b", 1100), ("8b", 8030)):
        with torch.device("meta"):
            assert Decoder(shape_of(name, tiny=False)).n_params / 1e6 == pytest.approx(millions, rel=0.005)


def test_random_weights_let_no_token_win_always() -> None:
    shape = shape_of("8b", tiny=True)
    state = random_state(shape, device=torch.device("cpu"), dtype=torch.float32)
    logits_TV = logits(decoder_of(shape, state), list(random_prompt(64, shape.vocab_size, 0)))
    assert 1.0 < float(logits_TV.std()) < 6.0
    assert len(set(logits_TV.argmax(-1).tolist())) > 32
