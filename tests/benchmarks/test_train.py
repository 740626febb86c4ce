"""The benchmark of training runs, its plain side is the same network, and its last line is the result as JSON."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.train.__main__ import main
from benchmarks.train.plain_pytorch import PlainDecoder, PlainLoop
from model.nn.transformer import Decoder
from model.presets import preset, reshaped

pytestmark = pytest.mark.slow


def test_the_last_line_is_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--preset", "nano", "--rounds", "1", "--windows", "2", "--micro-windows", "1", "--device", "cpu"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["benchmark"], result["preset"], result["windows"]) == ("train", "nano", 2)
    rates = result["tokens_per_second"]
    assert rates.keys() == {"ours", "plain", "trainer"}
    for name in ("plain", "trainer"):
        assert result["times"][name] == pytest.approx(rates["ours"] / rates[name])


def test_the_plain_side_has_the_same_parameters_and_learns() -> None:
    config = reshaped(preset("nano"), n_layers=1, width=32, n_heads=2)
    assert sum(p.numel() for p in PlainDecoder(config).parameters()) == Decoder(config).n_params
    loop = PlainLoop(config, torch.device("cpu"), torch.float32, 1)
    tokens = torch.arange(32).reshape(2, 16)
    losses = [loop.step(tokens, tokens + 1) for _ in range(8)]
    assert losses[-1] < losses[0]
