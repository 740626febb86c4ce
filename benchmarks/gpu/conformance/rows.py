"""Row operations of a step (norms, heads, activations, state) against the reference kernels, and alone against batched.

Shape legend: as in app/engine/gpu/kernels/interface.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from random import Random
from typing import get_args

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import HeadsSpec, Kernels, NormSpec, RowState
from benchmarks.gpu.conformance.harness import close, kernels_under_test, poisoned, random, rounded, same_bits
from benchmarks.gpu.reference_kernels import ReferenceKernels
from benchmarks.gpu.results import Finding
from model.config import Activation, Norm
from model.decoder_program import ACTIVATION_PARAMETERS

Outputs = dict[str, Tensor]
FORMATS = (torch.bfloat16, torch.float16, torch.float32)
LARGE_WIDTHS = ((1, 4096), (64, 8192), (300, 768), (7, 5120), (5, 100), (2, 16384))
_LARGE_STATES = ((256, 256, 64, 2048), (500, 129, 16, 300), (8, 1, 32, 5))
_LARGE_HEADS = (
    (256, 32, 8, 128, 128, True),
    (33, 40, 8, 80, 20, False),
    (70, 12, 12, 96, 96, True),
    (1, 3, 1, 256, 64, True),
)


def check_add_norm(device: str, tiny: bool) -> Iterator[Finding]:
    """Residual addition and norm."""
    for n_tokens, width in ((3, 40),) if tiny else LARGE_WIDTHS:
        for dtype in FORMATS:
            yield from norms(kernels_under_test(device), n_tokens, width, dtype, device, _seed())


def check_split_heads(device: str, tiny: bool) -> Iterator[Finding]:
    """Queries, and what the KV cache holds."""
    for n_tokens, n_heads, n_kv_heads, head_dim, turned, normed in ((3, 3, 1, 12, 6, True),) if tiny else _LARGE_HEADS:
        for dtype in FORMATS:
            norms = [random((head_dim,), dtype, device, _seed()) if normed else None for _ in "qk"]
            spec = HeadsSpec(
                n_heads=n_heads,
                n_kv_heads=n_kv_heads,
                head_dim=head_dim,
                turned_dim=turned,
                q_norm=norms[0],
                k_norm=norms[1],
                q_factor=0.75 if normed else 1.0,
            )
            yield from heads(kernels_under_test(device), spec, n_tokens, dtype, device, _seed())
            scale_P = 1 + random((50,), torch.float32, device, _seed()).abs()
            after = replace(spec, norms_after=True, query_scale_P=scale_P)
            yield from heads(kernels_under_test(device), after, n_tokens, dtype, device, _seed())


def check_gate(device: str, tiny: bool) -> Iterator[Finding]:
    """Activations."""
    for n_tokens, width in ((3, 40),) if tiny else LARGE_WIDTHS:
        for dtype in FORMATS:
            yield from gates(kernels_under_test(device), n_tokens, width, dtype, device, _seed())


def check_states(device: str, tiny: bool) -> Iterator[Finding]:
    """Tokens, positions and cache slots of a step."""
    for count, n_rows, block_size, n_blocks in ((5, 3, 16, 3),) if tiny else _LARGE_STATES:
        yield from states(kernels_under_test(device), count, n_rows, block_size, n_blocks, device, _seed())


def norms(kernels: Kernels, n_tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Every kind of norm, with and without delta, weight and bias."""
    x_TD, delta_TD, parts_XD = (random((n, width), dtype, device, seed + n) for n in (n_tokens, n_tokens, 2))
    delta_TD = delta_TD * 3 + 1
    for kind in get_args(Norm):
        for delta, weight, bias in ((delta_TD, parts_XD[0], None), (None, *parts_XD), (delta_TD, None, None)):
            norm = NormSpec(kind=kind, weight=weight, bias=bias if kind == "layernorm" else None)

            def add_norm(kernels: Kernels, rows: slice, delta: Tensor | None = delta, norm: NormSpec = norm) -> Outputs:
                sum_TD, normed_TD = kernels.add_norm(x_TD[rows], None if delta is None else delta[rows], norm)
                return {"sum": sum_TD, "norm": normed_TD}

            yield from _compare(f"{kind}, {n_tokens} of {width}, {dtype}, seed {seed}", kernels, add_norm)


def gates(kernels: Kernels, n_tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Every activation, gated and not."""
    hidden_TX = 3 * random((n_tokens, 2 * width), dtype, device, seed)
    curvature_2 = torch.tensor([0.7, 1.1], device=device)
    for activation, gated in product(get_args(Activation), (True, False)):
        if activation == "swiglu_clamped" and not gated:
            continue  # ModelConfig refuses it

        def gate(kernels: Kernels, rows: slice, activation: Activation = activation, gated: bool = gated) -> Outputs:
            parameters = (curvature_2,) if activation in ACTIVATION_PARAMETERS else ()
            return {"gate": kernels.gate(hidden_TX[rows], activation, gated, *parameters)}

        what = f"{activation}, gated {gated}, {n_tokens} of {width}, {dtype}, seed {seed}"
        # 1 + erf and exp(x) - 1 - x have few significant digits near zero.
        yield from _compare(what, kernels, gate, is_exact=activation not in ("gelu", "xielu"))


def heads(
    kernels: Kernels, spec: HeadsSpec, n_tokens: int, dtype: torch.dtype, device: str, seed: int
) -> Iterator[Finding]:
    """With a rotary table and without; every third token has no cache slot."""
    n_rows = spec.n_heads + 2 * spec.n_kv_heads
    qkv_TX = random((n_tokens, n_rows * spec.head_dim), dtype, device, seed)
    angles_PF = 3 * random((50, spec.turned_dim // 2), torch.float32, "cpu", seed + 1)
    rope_PC = torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1).to(device)
    generator = torch.Generator().manual_seed(seed)
    positions_T = torch.randint(50, (n_tokens,), generator=generator, dtype=torch.int32).to(device)
    slots_T = torch.randperm(2 * n_tokens, generator=generator, dtype=torch.int32)[:n_tokens].to(device)
    slots_T[:-1][1::3] = -1
    for rope, variant in ((rope_PC, spec), (None, replace(spec, q_norm=None))):

        def split(kernels: Kernels, rows: slice, rope: Tensor | None = rope, spec: HeadsSpec = variant) -> Outputs:
            """Queries, and what was written to a cache in blocks of 16, whose last block is for padding rows."""
            n_blocks, slots = 2 * n_tokens // 16 + 2, slots_T[rows]
            cache = qkv_TX.new_full((2, n_blocks, 16, spec.n_kv_heads, spec.head_dim), float("nan"))
            q_THC = kernels.split_heads(qkv_TX[rows], spec, positions_T[rows], rope, cache, slots)
            kept = cache.flatten(1, 2)[:, slots[slots >= 0].long()]
            assert int(cache.isfinite().sum()) == kept.numel(), "the kernel wrote to other slots"
            return {"q": q_THC, "k and v": kept.transpose(0, 1)}

        what = f"{spec.n_heads}/{spec.n_kv_heads} heads of {spec.head_dim}, {rope is not None=}, {dtype}, seed {seed}"
        yield from _compare(what, kernels, split)


def _compare(
    what: str, kernels: Kernels, run: Callable[[Kernels, slice], Outputs], *, is_exact: bool = True
) -> Iterator[Finding]:
    """Kernels against the reference, and the last row alone against batched."""
    with poisoned():
        found, alone = run(kernels, slice(None)), run(kernels, slice(-1, None))
    for name, expected in run(ReferenceKernels(), slice(None)).items():
        yield close(f"{what}: {name}", found[name], expected)
        if is_exact:
            yield rounded(f"{what}: {name}", found[name], expected)
        yield same_bits(f"{what}: {name} alone", alone[name], found[name][-1:])


def states(
    kernels: Kernels, count: int, n_tokens: int, block_size: int, n_blocks: int, device: str, seed: int
) -> Iterator[Finding]:
    """Looks up `n_tokens` tokens of `count` resident rows with `n_blocks` blocks each, and two padding tokens."""
    rng = Random(seed)
    rows = [*(rng.randrange(count) for _ in range(n_tokens)), count, count]
    lengths = [rng.randint(1, n_blocks * block_size) for _ in rows]
    last = [*(rng.randrange(50_000) for _ in range(count)), 0]
    table = [[rng.randrange(10**6) for _ in range(n_blocks)] for _ in range(count + 1)]
    given = [rng.choice((-1, rng.randrange(50_000))) for _ in rows]
    state = RowState(_integers(table, device), _integers(last, device), block_size)
    at = [length - 1 for length in lengths]
    slots = [table[row][p // block_size] * block_size + p % block_size for row, p in zip(rows, at, strict=True)]
    tiles = [-1 if row == count else row for row in rows]
    sampled = [last[row] for row in rows]
    known = [last[row] if token < 0 else token for row, token in zip(rows, given, strict=True)]
    what = f"{n_tokens} tokens of {count} rows, blocks of {block_size}, seed {seed}"
    for tokens, tokens_T in ((sampled, None), (known, _integers(given, device))):
        actual = kernels.look_up(_integers(rows, device), _integers(lengths, device), tokens_T, state)
        for name, one, other in zip(actual._fields, actual, (tokens, at, slots, tiles), strict=True):
            yield same_bits(f"{what}: {name}", one, _integers(other, device))


def _integers(numbers: object, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def _seed() -> int:
    return time.time_ns() % 1_000_000
