"""Mixtures of experts in torch: which experts a row has, what is read for it, and that its bits are its own."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from app.common.types import Request, SamplingParams
from model.config import ExpertScore
from model.nn.feed_forward import MixtureOfExperts, RoutedExperts, Routes
from model.nn.transformer import Decoder
from model.quantize import QuantizedKind, quantized
from tests.support.model.tiny_models import mixture_config, round_weights, run_all, tiny_decoder, tiny_engine

SCORES: tuple[ExpertScore, ...] = get_args(ExpertScore)
pytestmark = pytest.mark.usefixtures("one_thread")


def _mixture(decoder: Decoder) -> MixtureOfExperts:
    mlp = decoder.blocks[0].mlp
    assert isinstance(mlp, MixtureOfExperts)
    return mlp


def _rows(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(count)).to(dtype)


def test_experts_that_no_row_has_chosen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that pad a step choose none."""
    read, chosen, compute, route = set[int](), set[int](), RoutedExperts._of_one, MixtureOfExperts.route

    def recorded(self: RoutedExperts, expert: int, *inputs: Any) -> Tensor:
        read.add(expert)
        return compute(self, expert, *inputs)

    def routed(self: MixtureOfExperts, x_TD: Tensor) -> Routes:
        assert len(x_TD) == 1
        chosen.update((routes := route(self, x_TD)).ids_TC[0].tolist())
        return routes

    monkeypatch.setattr(RoutedExperts, "_of_one", recorded)
    monkeypatch.setattr(MixtureOfExperts, "route", routed)
    decoder = tiny_decoder(mixture_config())
    request = Request(id="r", prompt=(5,), max_tokens=1, params=SamplingParams(temperature=0))
    run_all(tiny_engine(decoder), [request])
    assert read == chosen and 3 <= len(chosen) <= 6, "of two layers"


@pytest.mark.parametrize("score", SCORES)
@torch.inference_mode()
def test_the_largest_scores_are_chosen_and_weigh_what_the_configuration_says(score: ExpertScore) -> None:
    is_of_chosen = score == "softmax_of_chosen"
    switches = {"normalized": not is_of_chosen, "choice_bias": not is_of_chosen}
    mixture = _mixture(tiny_decoder(mixture_config(score=score, factor=2.5, router_bias=True, **switches)))
    x_TD = _rows(9)
    logits_TE = torch.nn.functional.linear(x_TD, mixture.router.weight, mixture.router.bias).double()
    for logits_E, ids_C, weights_C in zip(logits_TE, *mixture.route(x_TD), strict=True):
        scores_E = logits_E.sigmoid() if score == "sigmoid" else logits_E.softmax(0)
        ranked_E = scores_E + (mixture.choice_bias if mixture.choice_bias is not None else 0.0)
        assert ids_C.tolist() == sorted(ranked_E.argsort(descending=True)[:3].tolist())
        wanted_C = scores_E[ids_C] / scores_E[ids_C].sum() * 2.5
        assert torch.allclose(weights_C.double(), wanted_C, rtol=1e-5)


@pytest.mark.parametrize("score", SCORES)
def test_of_equal_scores_the_first_experts_are_chosen(score: ExpertScore) -> None:
    mixture = _mixture(tiny_decoder(mixture_config(score=score, chosen=5)))
    mixture.router.weight.zero_()
    assert mixture.route(_rows(40)).ids_TC.tolist() == [[0, 1, 2, 3, 4]] * 40


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("score", SCORES)
@torch.inference_mode()
def test_a_row_has_the_same_bits_at_every_place_of_every_batch(
    score: ExpertScore, dtype: torch.dtype, threads: int
) -> None:
    torch.set_num_threads(threads)
    normalized = score != "softmax_of_chosen"
    config = mixture_config(score=score, count=67, chosen=9, width=33, normalized=normalized, bias=True)
    mixture, x_TD = _mixture(tiny_decoder(config, dtype=dtype)), _rows(150, dtype)

    def computed(rows_TD: Tensor) -> tuple[Tensor, Tensor]:
        routes = mixture.route(rows_TD)
        return routes.weights_TC, mixture.experts(rows_TD, routes)

    alone = [torch.cat(parts) for parts in zip(*map(computed, x_TD.split(1)), strict=True)]
    for rows in (2, 3, 17, 150):
        assert all(torch.equal(new[:rows], old[:rows]) for new, old in zip(computed(x_TD[:rows]), alone, strict=True))
    backwards = [part.flip(0) for part in computed(x_TD.flip(0))]
    assert all(torch.equal(new, old) for new, old in zip(backwards, alone, strict=True))


@torch.inference_mode()
def test_experts_add_up_in_float32_in_the_order_of_their_ids() -> None:
    mixture, x_TD = _mixture(tiny_decoder(mixture_config(bias=True), dtype=torch.bfloat16)), _rows(5, torch.bfloat16)
    routes, experts = mixture.route(x_TD), mixture.experts
    assert routes.weights_TC.dtype == torch.float32
    for row, found_D in enumerate(experts(x_TD, routes)):
        total_D = torch.zeros(64)
        for expert, weight in zip(routes.ids_TC[row].tolist(), routes.weights_TC[row], strict=True):
            total_D += experts._of_one(expert, x_TD[row : row + 1], experts._by_expert())[0].float() * weight
        assert torch.equal(found_D, total_D.bfloat16())


@pytest.mark.parametrize("kind", get_args(QuantizedKind))
def test_experts_and_the_shared_one_are_quantized_and_the_router_is_not(kind: QuantizedKind) -> None:
    """Rounded logits would choose other experts."""
    config = mixture_config(width=48, shared_width=16)
    decoder, rounded = tiny_decoder(config), round_weights(tiny_decoder(config), kind)
    before, after = _mixture(decoder), _mixture(rounded)
    assert torch.equal(before.router.weight, after.router.weight)
    for name in ("up", "down"):
        exact, found = getattr(before.experts, name), getattr(after.experts, name)
        packed = quantized(exact.flatten(0, 1).numpy(), kind)
        assert torch.equal(torch.from_numpy(packed.dequantized("float32")).view(exact.shape), found)
    assert before.shared and after.shared and not torch.equal(before.shared.up.weight, after.shared.up.weight)
