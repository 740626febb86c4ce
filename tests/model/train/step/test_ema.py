"""EMA of the weights and the best checkpoint; neither changes the training."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch

from model.train.loop import Loop
from model.train.step.trainer import BestWeights, WeightAverage, select_prefix
from tests.support.model.tiny_models import tiny_decoder
from tests.support.model.training_runs import EXACT, TINY, same, state_of, train, weights_of

pytestmark = pytest.mark.slow


def _filled(value: float) -> torch.nn.Module:
    decoder = tiny_decoder()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.fill_(value)
    return decoder


def test_an_average_follows_its_formula() -> None:
    decoder = _filled(1.0)
    average = WeightAverage(decoder, 0.5)
    expected = 1.0
    for step, value in ((1, 2.0), (2, 4.0), (30, 8.0)):
        with torch.no_grad():
            decoder.embedding.fill_(value)
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * value
    assert torch.allclose(average.tensors()["embedding"], torch.tensor(expected))
    assert average.tensors()["embedding"].dtype == torch.float32


def test_looking_at_the_average_gives_the_weights_back_bit_for_bit() -> None:
    decoder = tiny_decoder(dtype=torch.bfloat16)
    before = {name: p.detach().clone() for name, p in decoder.named_parameters()}
    average = WeightAverage(decoder, 0.9)
    average.tensors()["embedding"].add_(1.0)
    with contextlib.suppress(KeyboardInterrupt), average.swapped_in():
        assert not torch.equal(decoder.embedding, before["embedding"])
        raise KeyboardInterrupt
    assert same(before, dict(decoder.named_parameters()))


def test_the_best_weights_are_a_copy_and_the_first_of_equal_ones() -> None:
    decoder, best = _filled(1.0), BestWeights()
    best.keep_if_best(decoder, 5, 2.0)
    with torch.no_grad():
        decoder.embedding.fill_(7.0)
    best.keep_if_best(decoder, 10, 2.0)
    best.keep_if_best(decoder, 15, float("nan"))
    assert (best.step, best.bits) == (5, 2.0)
    best.copy_to(decoder)
    assert bool((decoder.embedding == 1.0).all())


def test_an_average_is_exported_and_does_not_touch_what_is_learnt(tmp_path: Path, text: Path) -> None:
    flags = [*TINY, *EXACT, "--steps", "6", "--warm-up", "1"]
    assert train(text, tmp_path / "off", *flags) == 0
    assert train(text, tmp_path / "on", *flags, "--ema", "0.9", "--keep", "last") == 0
    (_, off), (_, on) = state_of(tmp_path / "off"), state_of(tmp_path / "on")
    assert same(select_prefix("decoder", off), select_prefix("decoder", on))
    averages, exported = select_prefix("ema", on), weights_of(tmp_path / "on")
    assert torch.equal(averages["embedding"], exported["model.embed_tokens.weight"])
    assert not torch.equal(averages["embedding"], on["decoder.embedding"])
    assert "average of the last steps (decay 0.9) after the last step" in (tmp_path / "on/README.md").read_text()


def test_the_best_measurement_is_exported_where_the_run_got_worse(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Loop, "bits_per_byte", lambda loop, _: abs(loop.step - 4) + 1.0)
    flags = [*TINY, *EXACT, "--steps", "6", "--warm-up", "1"]
    assert train(text, tmp_path / "best", *flags) == 0
    assert train(text, tmp_path / "last", *flags, "--keep", "last") == 0
    _, state = state_of(tmp_path / "best")
    name = "model.embed_tokens.weight"
    best, last = weights_of(tmp_path / "best")[name], weights_of(tmp_path / "last")[name]
    assert torch.equal(best, state["best.embedding"]) and not torch.equal(best, last)
    assert torch.equal(last, state["decoder.embedding"])
    assert "after step 4 of 6, the fewest held-out bits" in (tmp_path / "best/README.md").read_text()
    assert "weights after the last step" in (tmp_path / "last/README.md").read_text()
