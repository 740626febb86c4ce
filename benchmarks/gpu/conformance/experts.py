"""Mixtures of experts against the reference kernels: the choice, the products, batch invariance, and what is not read.

Router and hidden states are small multiples of powers of two, so that logits are exact in any order of their sums and
many of them are equal; biases of the choice differ by more than scores do, so that no two scores are nearly equal.
Weights of experts that no token of a step has chosen are NaN. Shape legend: as in app/engine/gpu/kernels/interface.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import get_args

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import ExpertMatrices, ExpertsSpec, Kernels, RouterSpec
from benchmarks.gpu.conformance.harness import close, kernels_under_test, poisoned, random, same_bits
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding
from model.config import Activation, Experts, ExpertScore
from model.nn.feed_forward import Routes
from model.nn.packed_tensors import PackedTensors
from model.quantize import QuantizedKind, quantized


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsShape:
    """Experts of a layer, and the tokens of a step."""

    tokens: int
    width: int
    experts: Experts
    activation: Activation = "silu"
    gated: bool = True
    quantize: QuantizedKind | None = None

    def __str__(self) -> str:
        experts = f"{self.experts.chosen} of {self.experts.count} experts, {self.width} x {self.experts.width}"
        return f"{self.tokens} tokens, {experts}, {self.activation}" + (f", {self.quantize}" if self.quantize else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsScene:
    """A step with its router and its experts."""

    shape: ExpertsShape
    x_TD: Tensor
    rows_T: Tensor
    """Resident rows; every seventh token is padding, whose hidden state is NaN."""
    router: RouterSpec
    experts: ExpertsSpec

    def compute(self, kernels: Kernels, tokens: Tensor) -> tuple[Routes, Tensor]:
        """The routes of some tokens, in a step of their own, and what their experts add."""
        with poisoned():
            routes = kernels.route(self.x_TD[tokens], self.router, self.rows_T[tokens])
            return routes, kernels.experts(self.x_TD[tokens], routes, self.experts)

    def with_poison(self, kernels: Kernels) -> ExpertsScene:
        """The same scene with NaN for the experts that no token has chosen."""
        ids_TC = kernels.route(self.x_TD, self.router, self.rows_T).ids_TC
        is_unused_E = ~torch.isin(torch.arange(self.shape.experts.count, device=ids_TC.device), ids_TC)
        return replace(
            self,
            experts=replace(
                self.experts,
                up=_poisoned(self.experts.up, is_unused_E),
                down=_poisoned(self.experts.down, is_unused_E),
            ),
        )


def _poisoned(matrices: ExpertMatrices, is_unused_E: Tensor) -> ExpertMatrices:
    """Codes have no NaN: their scales or units do."""

    def poison(numbers: Tensor) -> Tensor:
        by_expert = numbers.reshape(len(is_unused_E), -1)
        return by_expert.masked_fill(is_unused_E[:, None], float("nan")).view(numbers.shape)

    numbers, bias = matrices
    poisoned_bias = None if bias is None else poison(bias)
    if not isinstance(numbers, PackedTensors):
        return ExpertMatrices(poison(numbers), poisoned_bias)
    of = numbers.scales
    scales = replace(of, values=poison(of.values)) if of.units is None else replace(of, units=poison(of.units))
    return ExpertMatrices(replace(numbers, scales=scales), poisoned_bias)


def build(shape: ExpertsShape, dtype: torch.dtype, device: str, seed: int) -> ExpertsScene:
    """A scene whose logits have few bits: sums of up to 2^18 products of 6 bits are exact in float32."""
    experts, width = shape.experts, shape.width

    def few_bits(*sizes: int, seed: int) -> Tensor:
        return (2 * random(sizes, torch.float32, device, seed)).round().clamp(-7, 7).to(dtype)

    x_TD = few_bits(shape.tokens, width, seed=seed) / 2
    rows_T = torch.arange(shape.tokens, dtype=torch.int32, device=device)
    rows_T[6::7] = -1
    x_TD[rows_T < 0] = float("nan")
    router = RouterSpec(
        experts=experts,
        weight_ED=few_bits(experts.count, width, seed=seed + 1) / 2 ** ((width.bit_length() + 1) // 2),
        bias_E=few_bits(experts.count, seed=seed + 2) / 8 if experts.router_bias else None,
        choice_bias_E=few_bits(experts.count, seed=seed + 3).sign() * 2 if experts.choice_bias else None,
    )

    def matrices(rows: int, columns: int, seed: int) -> ExpertMatrices:
        numbers = random((experts.count, rows, columns), torch.float32, device, seed) * columns**-0.5
        bias_EN = random((experts.count, rows), dtype, device, seed + 1) if experts.bias else None
        if shape.quantize is None:
            return ExpertMatrices(numbers.to(dtype), bias_EN)
        packed = quantized(numbers.flatten(0, 1).cpu().numpy(), shape.quantize)
        return ExpertMatrices(PackedTensors.of(packed, (experts.count, rows, columns), numbers.device), bias_EN)

    return ExpertsScene(
        shape=shape,
        x_TD=x_TD,
        rows_T=rows_T,
        router=router,
        experts=ExpertsSpec(
            up=matrices(experts.width * (1 + shape.gated), width, seed + 4),
            down=matrices(width, experts.width, seed + 6),
            activation=shape.activation,
            gated=shape.gated,
        ),
    )


FORMATS = (torch.bfloat16, torch.float16, torch.float32)
_QWEN3 = Experts(count=128, chosen=8, width=768, normalized=True)
_GPT_OSS = Experts(count=32, chosen=4, width=2880, score="softmax_of_chosen", router_bias=True, bias=True)
_SIGMOID = Experts(count=64, chosen=6, width=200, score="sigmoid", choice_bias=True, factor=2.5)
LARGE = (
    ExpertsShape(tokens=300, width=2048, experts=_QWEN3),
    ExpertsShape(tokens=2100, width=2048, experts=replace(_QWEN3, normalized=False)),
    ExpertsShape(tokens=500, width=2880, experts=_GPT_OSS, activation="swiglu_clamped"),
    ExpertsShape(tokens=400, width=1000, experts=_SIGMOID, activation="relu2", gated=False),
    ExpertsShape(tokens=300, width=2048, experts=_QWEN3, quantize="int8"),
    ExpertsShape(tokens=300, width=2048, experts=_QWEN3, quantize="int4"),
    ExpertsShape(tokens=2100, width=2048, experts=_QWEN3, quantize="int4"),
)


def small(score: ExpertScore) -> ExpertsShape:
    """Odd sizes; 3 of 5 experts for 41 tokens, so that some items have 64 tokens' places and others 16."""
    is_of_chosen = score == "softmax_of_chosen"
    experts = Experts(
        count=5,
        chosen=3,
        width=48,
        score=score,
        normalized=score == "sigmoid",
        factor=1.0 if is_of_chosen else 1.5,
        router_bias=is_of_chosen,
        choice_bias=not is_of_chosen,
        bias=is_of_chosen,
    )
    return ExpertsShape(
        tokens=41,
        width=80,
        experts=experts,
        activation="swiglu_clamped" if is_of_chosen else "silu",
        quantize={"sigmoid": "int4", "softmax_of_chosen": "int8"}.get(score),  # type: ignore[arg-type]
    )


def check_experts(device: str, tiny: bool) -> Iterator[Finding]:
    """The choice of experts, what they add, and that the bits of a row depend on its own numbers only."""
    seed, kernels = time.time_ns() % 1_000_000, kernels_under_test(device)
    shapes = tuple(map(small, get_args(ExpertScore))) if tiny else LARGE
    for shape, dtype in product(shapes, FORMATS):
        yield from compare(f"{shape}, {dtype}, seed {seed}", kernels, build(shape, dtype, device, seed))


def compare(what: str, kernels: Kernels, scene: ExpertsScene) -> Iterator[Finding]:
    """Kernels against the reference, then tokens alone and in other company."""
    everything = torch.arange(scene.shape.tokens, device=scene.x_TD.device)
    expected_routes, expected_TD = scene.compute(ReferenceKernels(), everything)
    routes, found_TD = scene.compute(kernels, everything)
    yield same_bits(f"{what}: ids", routes.ids_TC, expected_routes.ids_TC)
    yield close(f"{what}: weights", routes.weights_TC, expected_routes.weights_TC)
    yield close(f"{what}: sums", found_TD, expected_TD)
    poisoned_scene = scene.with_poison(kernels)
    yield same_bits(f"{what}: unused experts", poisoned_scene.compute(kernels, everything)[1], found_TD)
    shuffled = torch.randperm(len(everything), generator=torch.Generator().manual_seed(len(everything)))
    groups = {"alone": everything[:6].split(1), "in pairs": everything[:9].split(2)}
    groups["in another order"] = (shuffled.to(everything.device),)
    groups["beside copies"] = (everything[:1].repeat(200),)
    for name, steps in groups.items():
        for tokens in steps:
            other = scene.with_poison(kernels) if name == "in another order" else scene
            other_routes, other_TD = other.compute(kernels, tokens)
            yield same_bits(f"{what}: {name}", other_TD, found_TD[tokens])
            yield same_bits(f"{what}: weights {name}", other_routes.weights_TC, routes.weights_TC[tokens])
