"""Handwritten gradients equal those of plain autograd."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from model.nn.attention import CausalAttend
from model.nn.transformer import Decoder
from model.presets import preset, reshaped
from model.train.data.batch import IGNORE_INDEX, batch_of_windows
from model.train.step.attention import TrainingAttend
from model.train.step.objective import Objective, cross_entropy


def _heads(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(shape, generator=generator, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize(("length", "window"), [(1, None), (7, None), (128, None), (300, None), (300, 40), (300, 200)])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 2, 8), (3, 3, 6)])
def test_attention_of_training_is_that_of_the_reference_with_its_gradient(
    length: int, window: int | None, heads: int, kv_heads: int, head_dim: int
) -> None:
    n_tokens = 2 * length
    qkv = _heads((n_tokens, heads, head_dim), (n_tokens, kv_heads, head_dim), (n_tokens, kv_heads, head_dim))
    weight = torch.randn(n_tokens, heads, head_dim, generator=torch.Generator().manual_seed(2))
    found = []
    for attend in (CausalAttend(length, window), TrainingAttend(length, window)):
        out = attend(0, *qkv)
        found.append([out, *torch.autograd.grad((out * weight).sum(), qkv)])
    for plain, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, 37])
@pytest.mark.parametrize("n_words", [6, 20_000])
def test_cross_entropy_is_that_of_torch_with_its_gradient(n_tokens: int, n_words: int) -> None:
    (logits,) = _heads((n_tokens, n_words))
    targets = torch.arange(n_tokens) * 5 % n_words
    targets[1::3] = IGNORE_INDEX
    plain = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE_INDEX) * 0.25
    used_up = logits * 1.0
    ours = cross_entropy(used_up, targets, weight=0.25, ignore_index=IGNORE_INDEX)
    torch.testing.assert_close(ours, plain)
    gradients = [torch.autograd.grad(3 * loss, logits)[0] for loss in (ours, plain)]
    torch.testing.assert_close(*gradients)


def test_a_target_thought_impossible_costs_what_it_should() -> None:
    """Its score is 0 in float32; the loss is not infinite, which would end the run."""
    logits = torch.tensor([[0.0, 200.0, -50.0], [0.0, 0.0, 0.0]])
    loss = cross_entropy(logits, torch.tensor([2, 1]), weight=1.0, ignore_index=IGNORE_INDEX)
    assert float(loss) == pytest.approx(250.0 + math.log(3))


def test_a_batch_in_parts_has_the_gradients_of_the_whole_in_bfloat16() -> None:
    decoder = Decoder(reshaped(preset("nano"), n_layers=1, width=64, n_heads=2)).initialize(3)
    objective = Objective(decoder, torch.device("cpu"), torch.bfloat16)
    batch = batch_of_windows(torch.randint(0, 1024, (4, 33), generator=torch.Generator().manual_seed(4)))
    found = []
    for at_once in (4, 2):
        decoder.zero_grad()
        for part in batch.split(at_once):
            objective.loss_sum(part, 0.01).backward()
        found.append([p.grad.clone() for p in decoder.parameters() if p.grad is not None])
    assert len(found[0]) == len(list(decoder.parameters()))
    for whole, parts in zip(*found, strict=True):
        assert whole.dtype == torch.float32
        torch.testing.assert_close(parts, whole, rtol=0.05, atol=2e-3)
