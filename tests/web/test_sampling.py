"""Compares the page's sampling arithmetic with the server's sampler."""

import json
import random
import subprocess
from typing import Any

import pytest
import torch

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import FILTERS, apply_stages, row_parameters
from tests.support import ROOT
from tests.support.nodejs import NODE

_SCRIPT = f"""
    import {{ readFileSync }} from "node:fs";
    import {{ sampled }} from "{ROOT}/app/web/tokens/sampling.js";
    const cases = JSON.parse(readFileSync(0, "utf8"));
    console.log(JSON.stringify(cases.map(({{ top, vocabulary, settings }}) => sampled(top, vocabulary, settings))));
"""
_VOCABULARY = 16
_GRID: dict[str, list[float]] = {
    "temperature": [0.3, 0.8, 1.0, 1.7],
    "top_k": [0, 2, 5, 16, 40],
    "typical_p": [0.2, 0.6, 0.9, 1.0],
    "top_p": [0.3, 0.7, 0.95, 1.0],
    "min_p": [0.0, 0.05, 0.4, 1.0],
}
if NODE is None:
    pytest.skip("no node: make install brings playwright's", allow_module_level=True)


@pytest.mark.parametrize(("known", "least_exact", "most_exact"), [(_VOCABULARY, 400, 400), (6, 41, 359)])
def test_exact_distributions_of_the_page_equal_the_servers(known: int, least_exact: int, most_exact: int) -> None:
    """The page is always exact if it has the whole distribution, and sometimes with only the top tokens."""
    rng = random.Random(9)
    rows = [[rng.gauss(0, 3) for _ in range(_VOCABULARY)] for _ in range(400)]
    for row in rows[::4]:
        row[3] = row[7] = row[11]  # ties
    settings = [{name: rng.choice(values) for name, values in _GRID.items()} for _ in rows]
    results = _in_node([_case(row, one, known) for row, one in zip(rows, settings, strict=True)])
    exact = [(row, one, result) for row, one, result in zip(rows, settings, results, strict=True) if result["exact"]]
    assert least_exact <= len(exact) <= most_exact
    for row, one, result in exact:
        assert known < _VOCABULARY or result["rest"] == {"share": 0, "count": 0}
        order = sorted(range(_VOCABULARY), key=lambda token: (-row[token], token))[:known]
        expected = _sampled_shares(row, one)
        assert result["shares"] == pytest.approx([expected[token] for token in order], abs=1e-6), one


def _case(row: list[float], settings: dict[str, float], known: int) -> dict[str, Any]:
    logprobs = torch.tensor(row, dtype=torch.float64).log_softmax(-1).tolist()
    order = sorted(range(_VOCABULARY), key=lambda token: (-row[token], token))[:known]
    top = [{"id": token, "logprob": logprobs[token]} for token in order]
    return {"top": top, "vocabulary": _VOCABULARY, "settings": settings}


def _sampled_shares(row: list[float], settings: dict[str, Any]) -> list[float]:
    logits_1X = torch.tensor([row], dtype=torch.float64)
    parameters = row_parameters([SamplingInput(SamplingParams(seed=0, **settings), (), 0)], len(row), "cpu")
    left_X = apply_stages(logits_1X, parameters, FILTERS).weights_SV[0]
    shares: list[float] = (left_X / left_X.sum()).tolist()
    return shares


def _in_node(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert NODE
    command = [NODE, "--input-type=module", "-e", _SCRIPT]
    done = subprocess.run(command, input=json.dumps(cases), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = json.loads(done.stdout)
    return results
