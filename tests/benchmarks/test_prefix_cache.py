"""The benchmark of the prefix cache and of long prompts runs, and its last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.prefix import Pair, Window, main, summarize_interference, summarize_prefix_cache
from tests.support.model.tiny_models import tiny_weights

pytestmark = pytest.mark.slow

# Enough tokens that the arrival of the second stream, in which several of the first wait, is not half of all gaps.
_SMALL = ["--rounds", "1", "--shared", "64", "--tail", "5", "--streams", "2", "--tokens", "48", "--prompt", "150"]


def test_the_last_line_is_one_json_object_with_both_measurements(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    assert main(["--weights", weights, "--kernels", "torch", *_SMALL, "--every-ms", "1"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["benchmark"], result["server"]["numerics"]) == ("prefix", "torch-bfloat16")
    sharing, disturbance = result["sharing"], result["disturbance"]
    assert (sharing["pairs"], sharing["cached_tokens"], disturbance["windows"]) == (1, 64, 1)
    assert disturbance["arrivals"] >= 1
    assert min(sharing["cold_ms"], sharing["shared_ms"], disturbance["arrival_first_token_ms"]) > 0
    for kind in ("alone", "beside"):
        assert 0 <= disturbance[f"{kind}_p50_ms"] <= disturbance[f"{kind}_p99_ms"]


def test_a_prompt_that_does_not_fit_is_told_in_the_words_of_the_service(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = str(tiny_weights(tmp_path / "weights"))
    assert main(["--weights", weights, "--kernels", "torch", *_SMALL, "--shared", "900"]) == 1
    assert "HTTP 400" in capsys.readouterr().err


def test_a_plan_that_cannot_be_carried_out_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--every-ms", "0"])
    assert "--every-ms must be 1 or more" in capsys.readouterr().err


def test_ratios_are_those_of_neighbours() -> None:
    pairs = [
        Pair(cold=0.9, shared=0.1, cached=96),
        Pair(cold=0.8, shared=0.4, cached=80),
        Pair(cold=3, shared=1, cached=96),
    ]
    sharing = summarize_prefix_cache(pairs, 100)
    assert (sharing.cold_ms, sharing.shared_ms, sharing.sooner, sharing.cached_tokens) == (900, 400, 3, 80)
    assert sharing.cold_tokens_per_second == pytest.approx(111, abs=1)
    alone = [Window(gaps=(gap,), tokens_per_second=1 / gap, first_tokens=()) for gap in (1.0, 2.0, 4.0)]
    concurrent = [Window(gaps=(gap, gap), tokens_per_second=1 / gap, first_tokens=(gap,)) for gap in (2.0, 8.0, 4.0)]
    found = summarize_interference(alone, concurrent, 8)
    assert (found.p99_ratio, found.alone_p99_ms, found.beside_p99_ms, found.arrivals) == (2, 2000, 4000, 3)
    assert found.arrival_tokens_per_second == 2
