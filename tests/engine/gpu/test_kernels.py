"""Operations of a step on a device: Triton kernels against the reference kernels, and batch invariance of both.

tests/engine/gpu/test_runner.py shows that the reference kernels compute what torch's decoder computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from random import randrange
from typing import Any, get_args

import pytest
import torch
from torch import nn

from app.engine.gpu.kernels.interface import ExpertMatrices, ExpertsSpec, HeadsSpec, Kernels, RouterSpec
from benchmarks.gpu.conformance import attention, experts, packed, rows
from benchmarks.gpu.conformance.attention import build
from benchmarks.gpu.conformance.harness import random, same_bits
from benchmarks.gpu.results import Finding
from model.config import ExpertScore
from model.nn.feed_forward import MixtureOfExperts
from model.nn.packed_tensors import PackedTensors
from tests.support.gpu.kernel_backends import BOTH, DEVICE, FORMATS, SHAPES, kernels, needs_triton
from tests.support.model.tiny_models import mixture_config

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    # Exponentials that overflow as intended: numpy warns, a GPU does not.
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
]


def check_all(found: Iterable[Finding]) -> None:
    """Asserts that all results hold and that there are some; computes as in the engine, without gradients."""
    with torch.inference_mode():
        found = list(found)
    assert found and not [each for each in found if not each.ok]


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("name", SHAPES)
def test_attention_equals_the_reference_kernels(name: str) -> None:
    seed = randrange(10**6)
    dtype = FORMATS[seed % len(FORMATS)] if name == "prefill" else torch.float32
    tail = 1 if name in ("long", "late", "sinks") else 20
    scene = build(SHAPES[name], dtype, DEVICE, seed, tail)
    check_all([attention.accuracy(f"seed {seed}", kernels("triton"), scene, tail, 1 if tail == 1 else 16)])


@needs_triton
@pytest.mark.slow
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_16_bit_attention_over_long_contexts_is_no_less_accurate(dtype: torch.dtype) -> None:
    shape = replace(SHAPES["window"], lengths=(700,), window=None)
    check_all([attention.accuracy(str(dtype), kernels("triton"), build(shape, dtype, DEVICE, randrange(10**6), 2), 2)])


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["prefill", "window", "wide", "sinks"])
def test_row_has_the_same_bits_alone_batched_chunked_and_with_any_number_of_programs(name: str, kind: str) -> None:
    seed = randrange(10**6)
    others = (kernels(kind), kernels(kind, partial_bytes=0))
    check_all(attention.law(f"seed {seed}", others, build(SHAPES[name], torch.float32, DEVICE, seed, 18), tail=18))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("name", ["long", "late", "sinks"])
def test_sequential_and_parallel_splits_give_the_same_bits(name: str, kind: str) -> None:
    scene = build(SHAPES[name], torch.float32, DEVICE, randrange(10**6), 1)
    pieces = attention.ends(scene, 1)
    ways = [(kernels(kind), 0), (kernels(kind), 2), (kernels(kind, partial_bytes=0), 0)]
    first, *others = [torch.cat(scene.attend(kernel, pieces, 1, spare)) for kernel, spare in ways]
    check_all(same_bits(name, other, first) for other in others)


def _heads(kernels: Kernels, dtype: torch.dtype, seed: int, **sizes: Any) -> Iterable[Finding]:
    """Norm, rotation, scaling and the write to the cache."""
    q_norm, k_norm = random((2, sizes["head_dim"]), dtype, DEVICE, seed)
    spec = HeadsSpec(n_heads=6, n_kv_heads=2, q_norm=q_norm, k_norm=k_norm, **sizes)
    return rows.heads(kernels, spec, 4, dtype, DEVICE, seed)


OPERATIONS: dict[str, Callable[[Kernels, torch.dtype, int], Iterable[Finding]]] = {
    "norms": lambda kernels, dtype, seed: rows.norms(kernels, 3, 100, dtype, DEVICE, seed),
    "gates": lambda kernels, dtype, seed: rows.gates(kernels, 2, 1030, dtype, DEVICE, seed),
    "heads": partial(_heads, head_dim=32, turned_dim=32),
    "odd heads": partial(_heads, head_dim=40, turned_dim=12, q_factor=0.7),
}


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_equals_the_slow_reference_alone_and_batched(name: str, dtype: torch.dtype, kind: str) -> None:
    check_all(OPERATIONS[name](kernels(kind), dtype, randrange(10**6)))


@pytest.mark.parametrize("seed", [79, 231, 258, 304])
def test_vector_tail_rounds_like_the_rest(seed: int) -> None:
    """In these rows torch's gelu_tanh differs in one bit from batch to batch unless rows are full vectors."""
    check_all(OPERATIONS["gates"](kernels("torch"), torch.float32, seed))


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(("count", "n_rows"), [(1, 1), (7, 5), (150, 130)])
def test_decode_step_reads_its_rows_and_advances_them_by_a_token(count: int, n_rows: int, kind: str) -> None:
    check_all(rows.states(kernels(kind), count, n_rows, 16, 4, DEVICE, randrange(10**6)))


def test_reference_that_misses_one_key_is_detected() -> None:
    """Positive control: the tolerance is small enough to fail."""
    scene = build(SHAPES["wide"], torch.float32, DEVICE, 1, 1)
    blind = replace(scene, window=515)
    assert attention.accuracy("", kernels("torch"), scene, 1).ok
    found = torch.cat(blind.attend(kernels("torch"), [(0, 515, 1)], 1))
    expected = torch.cat(scene.attend(kernels("torch"), [(0, 515, 1)], 1))
    assert not attention.close("", found, expected).ok


def test_reference_without_its_sinks_is_detected() -> None:
    """Positive control: a sink takes a part of every row's weight."""
    scene = build(SHAPES["sinks"], torch.float32, DEVICE, 1, 1)
    assert attention.accuracy("", kernels("torch"), scene, 1).ok
    found = torch.cat(replace(scene, sinks_H=None).attend(kernels("torch"), [(0, 529, 1)], 1))
    expected = torch.cat(scene.attend(kernels("torch"), [(0, 529, 1)], 1))
    assert not attention.close("", found, expected).ok


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("score", get_args(ExpertScore))
def test_experts_equal_the_reference_in_any_company_and_read_no_others(
    score: ExpertScore, dtype: torch.dtype, kind: str
) -> None:
    seed = randrange(10**6)
    scene = experts.build(experts.small(score), dtype, DEVICE, seed)
    check_all(experts.compare(f"seed {seed}", kernels(kind), scene))


def _mixture(score: ExpertScore) -> MixtureOfExperts:
    """A mixture in torch: 3 of 5 experts, or with a sigmoid 6 of 33, for hidden states of 300 numbers."""
    is_of_chosen, count = score == "softmax_of_chosen", 33 if score == "sigmoid" else 5
    config = mixture_config(
        count=count, chosen=6 if score == "sigmoid" else 3, score=score, normalized=not is_of_chosen,
        choice_bias=not is_of_chosen, router_bias=is_of_chosen, bias=is_of_chosen, factor=2.5,
    )  # fmt: skip
    mixture = MixtureOfExperts(replace(config, width=300)).requires_grad_(False)
    for number, parameter in enumerate(mixture.parameters()):
        parameter.copy_(random(tuple(parameter.shape), torch.float32, "cpu", number) * parameter.shape[-1] ** -0.5)
    return mixture.to(DEVICE)


def _specs(mixture: MixtureOfExperts) -> tuple[RouterSpec, ExpertsSpec]:
    router, own = mixture.router, mixture.experts
    return RouterSpec(
        experts=mixture.config, weight_ED=router.weight, bias_E=router.bias, choice_bias_E=mixture.choice_bias
    ), ExpertsSpec(
        up=ExpertMatrices(own.up, own.up_bias),
        down=ExpertMatrices(own.down, own.down_bias),
        activation=own.name,
        gated=own.gated,
    )


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("score", get_args(ExpertScore))
def test_experts_equal_torchs_interpreter_also_where_logits_are_extreme(score: ExpertScore, kind: str) -> None:
    """Logits of NaN, in one row, are in no other row; equal, huge and tiny ones choose and weight the same experts."""
    mixture, backend = _mixture(score), kernels(kind)
    router, own = _specs(mixture)
    x_TD = random((23, 300), torch.float32, DEVICE, randrange(10**6))
    x_TD[3], x_TD[5], x_TD[7], x_TD[11] = float("nan"), 0.0, 3e4 * x_TD[7], -1e4 * router.weight_ED.sum(0)
    rows_T = torch.arange(23, dtype=torch.int32, device=DEVICE)
    wanted, routes = mixture.route(x_TD), backend.route(x_TD, router, rows_T)
    assert torch.equal(routes.ids_TC, wanted.ids_TC.int())
    assert torch.allclose(routes.weights_TC, wanted.weights_TC, rtol=1e-5, atol=1e-6, equal_nan=True)
    out_TD, expected_TD = backend.experts(x_TD, routes, own), mixture.experts(x_TD, wanted)
    assert out_TD[3].isnan().all() and out_TD.isnan().any(1).sum() == 1
    largest_T1 = expected_TD.nan_to_num().abs().amax(1, keepdim=True).clamp(min=1.0)
    assert torch.allclose(out_TD / largest_T1, expected_TD / largest_T1, rtol=0.0, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("kind", BOTH)
def test_logit_of_nan_is_the_largest_and_equal_ones_follow_by_id(kind: str) -> None:
    """As in torch, so that ids are valid; the row's weights are NaN."""
    mixture = _mixture("softmax_of_chosen")
    router, _ = _specs(mixture)
    bias_E = torch.tensor([-float("inf"), 1.0, 1.0, 1.0, float("nan")], device=DEVICE)
    flat = replace(router, weight_ED=torch.zeros_like(router.weight_ED), bias_E=bias_E)
    mixture.router.weight, mixture.router.bias = nn.Parameter(flat.weight_ED), nn.Parameter(bias_E)
    x_TD = -torch.ones(2, 300, device=DEVICE)
    routes = kernels(kind).route(x_TD, flat, torch.zeros(2, dtype=torch.int32, device=DEVICE))
    assert routes.ids_TC.tolist() == mixture.route(x_TD).ids_TC.tolist() == [[1, 2, 4]] * 2
    assert routes.weights_TC.isnan().all()


@needs_triton
@pytest.mark.parametrize("name", packed.FORMATS)
def test_packed_products_equal_the_reference_for_any_number_of_tokens(name: str) -> None:
    """In float32: the interpreter multiplies 16-bit numbers in another way."""
    rows, columns = 70, 384
    matrix = packed.random_matrix(packed.FORMATS[name], rows, columns, seed=1)
    weight = PackedTensors.of(matrix, (rows, columns), torch.device(DEVICE))
    product = import_module("app.engine.gpu.kernels.triton.quantized_products").packed_product
    findings = list(packed.compare(name, product, weight, torch.float32, seed=1))
    if matrix.format.scales == "float32" and DEVICE == "cpu":  # its fma is rounded twice
        findings = [found for found in findings if not found.what.endswith("numbers")]
    check_all(iter(findings))


def test_experts_of_which_one_is_another_are_detected() -> None:
    """Positive control: every expert matters, and so does the order of gate and up."""
    scene = experts.build(experts.small("softmax"), torch.float32, DEVICE, 1)
    everything = torch.arange(scene.shape.tokens, device=DEVICE)
    _, expected = scene.compute(kernels("torch"), everything)
    up = scene.experts.up
    for changed in (up._replace(numbers=up.numbers.roll(1, 0)), up._replace(numbers=up.numbers.roll(20, 1))):
        other = replace(scene, experts=replace(scene.experts, up=changed))
        assert not attention.close("", other.compute(kernels("torch"), everything)[1], expected).ok
