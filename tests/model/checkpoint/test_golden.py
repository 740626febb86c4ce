"""golden.json: a model still gives the log-probabilities that were recorded with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.checkpoint import load
from model.checkpoint.golden import GOLDEN_FILE, Golden
from model.checkpoint.golden_export import as_stored, golden_file, verify
from model.files import CheckpointError
from model.nn.transformer import Decoder
from tests.support import ROOT
from tests.support.model.tiny_models import tiny_decoder

PROMPT = [5, 9, 200, 31, 7]


def _load(directory: Path) -> Decoder:
    return load(directory, device=torch.device("cpu"), dtype=torch.float32).decoder


@pytest.fixture(autouse=True)
def _golden(directory: Path) -> None:
    (directory / GOLDEN_FILE).write_bytes(golden_file(tiny_decoder(), PROMPT))


def test_model_passes_its_own_golden_file(directory: Path, weights: Path) -> None:
    difference = verify(_load(directory), directory)
    assert difference is not None and difference < 1e-5
    assert verify(_load(weights), weights) is None


@pytest.mark.slow
def test_golden_numbers_are_log_probabilities_of_each_token_given_earlier_ones(directory: Path) -> None:
    raw = json.loads((directory / GOLDEN_FILE).read_text())
    decoder = tiny_decoder()
    for i, logprob in ((1, raw["logprobs"][0]), (4, raw["logprobs"][3])):
        longer = [json.loads(golden_file(decoder, [*PROMPT[:i], v]))["logprobs"][-1] for v in range(320)]
        assert torch.tensor(longer).exp().sum().item() == pytest.approx(1, abs=1e-4)
        assert longer[PROMPT[i]] == pytest.approx(logprob, abs=1e-5)


@pytest.mark.parametrize("change", [{"rope_parameters": {"rope_theta": 500.0}}, {"rms_norm_eps": 0.5}])
def test_config_of_a_different_model_is_detected(directory: Path, change: dict[str, Any]) -> None:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError, match=r"golden\.json: the log-probabilities differ by up to"):
        verify(_load(directory), directory)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"prompt": [1]}, r"length >= 2 - at `\$\.prompt`"),
        ({"prompt": [1, 320]}, "ids below 320"),
        ({"prompt": [1, -1]}, "int"),
        ({"logprobs": [-1, -1, -1, 1e7]}, "float"),
        ({"logprobs": [-1.0]}, "5 ids have 4 logprobs, not 1"),
        ({"logprobs": [-1, -1, -1, None]}, r"Expected `float`, got `null` - at `\$\.logprobs"),
        ({"logprobs": [-1e5] * 4}, "differ by up to"),
    ],
)
def test_invalid_golden_file_is_named(directory: Path, change: dict[str, Any], words: str) -> None:
    raw = json.loads((directory / GOLDEN_FILE).read_text())
    (directory / GOLDEN_FILE).write_text(json.dumps(raw | change))
    with pytest.raises(CheckpointError, match=f"golden.json: .*{words}"):
        verify(_load(directory), directory)


def test_weights_are_rounded_as_stored_and_tables_are_not() -> None:
    decoder = tiny_decoder()
    rounded = as_stored(decoder, torch.bfloat16)
    assert torch.equal(rounded.embedding, decoder.embedding.bfloat16().float())
    assert torch.equal(rounded.get_buffer("rope_0_PC"), decoder.get_buffer("rope_0_PC"))
    assert golden_file(rounded, PROMPT) != golden_file(decoder, PROMPT)


def test_default_weights_pass_their_golden_file() -> None:
    difference = verify(_load(ROOT / "weights"), ROOT / "weights")
    assert difference is not None and difference < 1e-4


def test_loss_is_the_share_of_more_bits() -> None:
    golden = Golden(path=Path("golden.json"), prompt=(1, 2, 3), logprobs=(-1.0, -3.0))
    assert golden.loss([-1.0, -3.0]) == 0 and golden.loss([-2.0, -4.0]) == 0.5 and golden.loss([-0.5]) == -0.5
    assert Golden(path=Path("golden.json"), prompt=(1, 2), logprobs=(0.0,)).loss([-1.0]) == 0
