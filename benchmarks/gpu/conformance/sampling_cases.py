"""Sampling test cases for devices: rows of logits with their requests, random ones and edge cases.

Everything follows from a seed. Shape legend: S rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor

from app.common.types import SamplingParams
from app.engine.sampling.parameters import SamplingInput

FULL = SamplingParams(
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    min_p=0.02,
    typical_p=0.95,
    repetition_penalty=1.1,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    logprobs=20,
)
_KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50, "top_p": 0.9},
    {"top_k": 200},
    {"top_k": 2**31 - 1},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"top_p": 0.999, "temperature": 1.7},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"typical_p": 0.2},
    {"typical_p": 0.95},
    {"typical_p": 0.5, "min_p": 0.8, "temperature": 1.5},
    {"typical_p": 0.9, "top_k": 300, "top_p": 0.8, "min_p": 0.1},
)
"""One entry per code path of a row; other parameters are random."""
_EXTREMES: tuple[dict[str, Any], ...] = (
    {"top_p": 0.0},
    {"top_p": 0.0, "typical_p": 0.5},
    {"top_p": 5e-324},
    {"top_p": 1 - 2**-53},
    {"typical_p": 5e-324},
    {"typical_p": 1 - 2**-53},
    {"min_p": 5e-324},
    {"temperature": 5e-324},
    {"temperature": 1e-5, "top_p": 0.5},
    {"temperature": 10.0, "top_p": 0.5},
    {"temperature": 10.0, "top_k": 7},
    {"repetition_penalty": 5e-324},
    {"repetition_penalty": 1e300, "temperature": 0.0},
    {"seed": -(2**63), "choice": 2**31 - 1},
    {"seed": 2**63 - 1},
    {"logprobs": 20},
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Rows that are sampled together."""

    name: str
    logits_SV: Tensor
    rows: Sequence[SamplingInput]


def chance(name: str, vocab: int, rows: int, seed: int, *, dtype: torch.dtype = torch.float32) -> Case:
    """Cycles through all kinds of parameters, on logits of many scales; half of the rows have penalties."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    scales_S1 = torch.tensor([rng.choice((0.1, 1.0, 3.0, 10.0)) for _ in range(rows)])[:, None]
    logits_SV = (torch.randn(rows, vocab, generator=generator) * scales_S1).to(dtype)
    return Case(name=name, logits_SV=logits_SV, rows=[_row(_params(rng, i, vocab), vocab, rng) for i in range(rows)])


def edges(vocab: int, seed: int) -> Iterator[Case]:
    """Ties, numbers at the ends of their ranges, rows that are not finite, and sequences that may not end."""
    rng, generator = Random(seed), torch.Generator().manual_seed(seed)
    noise_V = torch.randn(vocab, generator=generator)
    every = [_row(SamplingParams(**(_seeded(rng) | kind)), vocab, rng) for kind in _KINDS + _EXTREMES]
    logits = {
        "equal": torch.zeros(vocab),
        "few values": (2 * noise_V).round(),
        "two values": (noise_V > 1).float(),
        "one far above": noise_V + 200.0 * (torch.arange(vocab) == vocab // 2),
        "two zeros": noise_V.sign() * 0.0,
        "tiny": noise_V * 1e-40,
        "huge": noise_V.clamp(-1, 1) * 3.4e38,
        "below zero": noise_V.abs() * -30,
    }
    for name, logits_V in logits.items():
        yield Case(name=name, logits_SV=logits_V.expand(len(every), -1).clone(), rows=every)
    yield _not_finite(noise_V, every[: len(_KINDS)])
    yield _far_along(noise_V, rng)
    yield _endless(min(vocab, 16), rng)


def _not_finite(noise_V: Tensor, rows: list[SamplingInput]) -> Case:
    """Every other row is not finite; the rows between must sample as usual."""
    logits_SV = noise_V.repeat(len(rows), 1)
    bad = (float("nan"), float("inf"), float("-inf"))
    for i in range(0, len(rows), 2):
        logits_SV[i, (7 * i) % len(noise_V)] = bad[i // 2 % 3]
    logits_SV[-1] = float("-inf")
    return Case(name="not finite", logits_SV=logits_SV, rows=rows)


def _far_along(noise_V: Tensor, rng: Random) -> Case:
    """Sequences as long as positions allow: only the length of a row without penalties matters."""
    lengths = (1, 2**16, 2**24 + 1, 2**31 - 1)
    rows = [SamplingInput(SamplingParams(**_seeded(rng)), range(length), 1) for length in lengths]
    return Case(name="far along", logits_SV=noise_V.repeat(len(rows), 1), rows=rows)


def _endless(vocab: int, rng: Random) -> Case:
    """All tokens but at most one end the text, which min_tokens forbids unless nothing else is left."""
    params = [SamplingParams(min_tokens=9, **_seeded(rng)) for _ in range(4)]
    stops = [tuple(range(vocab)), tuple(range(1, vocab)), (0, *range(vocab)), (vocab,)]
    rows = [SamplingInput(p, [0, 1], 1, ids[:16]) for p, ids in zip(params, stops, strict=True)]
    return Case(name="endless", logits_SV=torch.zeros(len(rows), vocab), rows=rows)


def _params(rng: Random, i: int, vocab: int) -> SamplingParams:
    more = _seeded(rng) | {"logprobs": rng.choice((None, 0, 5, 20)), "min_tokens": rng.choice((0, 0, 4, 1000))}
    if i % 2:
        more |= {
            "repetition_penalty": rng.choice((1.0, 1.3, 0.7)),
            "presence_penalty": rng.choice((0.0, 0.5, -2.0)),
            "frequency_penalty": rng.choice((0.0, -0.4, 1.1)),
        }
    if i % 4 == 0:
        ids = {rng.randrange(2 * vocab) for _ in range(rng.choice((1, 3, 300)))}
        more["logit_bias"] = tuple((token, rng.uniform(-9, 9)) for token in sorted(ids))
    temperature = rng.choice((0.3, 0.8, 1.0, 1.5))
    return SamplingParams(**({"temperature": temperature} | more | _KINDS[i % len(_KINDS)]))


def _seeded(rng: Random) -> dict[str, Any]:
    return {"seed": rng.randrange(-(2**63), 2**63), "choice": rng.randrange(4)}


def _row(params: SamplingParams, vocab: int, rng: Random) -> SamplingInput:
    tokens = [rng.randrange(vocab) for _ in range(rng.randrange(1, 40))]
    stop_ids = tuple(rng.randrange(vocab + 1) for _ in range(rng.randrange(4)))
    return SamplingInput(params, tokens, rng.randrange(1, len(tokens) + 1), stop_ids)
