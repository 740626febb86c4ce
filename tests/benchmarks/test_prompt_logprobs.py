"""The benchmark of prompt log-probabilities runs; what it measures is not asserted here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prompt_logprobs import main

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")]


def test_a_run_counts_steps_and_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--child", "scored", "--only", "default weights"]) == 0
    run = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (run["prompt_tokens"], run["longest_gap_steps"]) == (511, 1)
    assert 0 < run["longest_step_ms"] <= run["prompt_ms"]
    assert run["growth_mib"] >= 0
