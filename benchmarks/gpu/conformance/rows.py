"""Row operations of a step (norms, heads, activations, state) against slow references, and alone against batched.

The references compute one token at a time in float64, and round where app/engine/gpu/kernels/interface.py says so.

Shape legend: as in app/engine/gpu/kernels/interface.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import get_args

import torch
from torch import Tensor

from app.engine.gpu.kernels.interface import HeadsSpec, Kernels, NormSpec, RowState
from benchmarks.gpu.conformance.harness import close, kernels_under_test, poisoned, random, rounded, same_bits
from benchmarks.gpu.results import Finding
from model.config import Activation, Norm

_FORMATS = (torch.bfloat16, torch.float16, torch.float32)
_LARGE_WIDTHS = ((1, 4096), (64, 8192), (300, 768), (7, 5120), (5, 100), (2, 16384))
_LARGE_STATES = ((256, 256, 64, 2048), (500, 129, 16, 300), (8, 1, 32, 5))
_LARGE_HEADS = (
    (256, 32, 8, 128, 128, True),
    (33, 40, 8, 80, 20, False),
    (70, 12, 12, 96, 96, True),
    (1, 3, 1, 256, 64, True),
)


def check_add_norm(device: str, tiny: bool) -> Iterator[Finding]:
    """Residual addition and norm."""
    for n_tokens, width in ((3, 40),) if tiny else _LARGE_WIDTHS:
        for dtype in _FORMATS:
            yield from norms(kernels_under_test(device), n_tokens, width, dtype, device, _seed())


def check_split_heads(device: str, tiny: bool) -> Iterator[Finding]:
    """Queries, and what the KV cache holds."""
    for n_tokens, n_heads, n_kv_heads, head_dim, turned, normed in ((3, 3, 1, 12, 6, True),) if tiny else _LARGE_HEADS:
        for dtype in _FORMATS:
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


def check_gate(device: str, tiny: bool) -> Iterator[Finding]:
    """Activations."""
    for n_tokens, width in ((3, 40),) if tiny else _LARGE_WIDTHS:
        for dtype in _FORMATS:
            yield from gates(kernels_under_test(device), n_tokens, width, dtype, device, _seed())


def check_states(device: str, tiny: bool) -> Iterator[Finding]:
    """State of the rows of a decode step."""
    for count, n_rows, block_size, n_blocks in ((5, 3, 16, 3),) if tiny else _LARGE_STATES:
        yield from states(kernels_under_test(device), count, n_rows, block_size, n_blocks, device, _seed())


def norms(kernels: Kernels, n_tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Every kind of norm, with and without delta, weight and bias."""
    x_TD, delta_TD, parts_XD = (random((n, width), dtype, device, seed + n) for n in (n_tokens, n_tokens, 2))
    delta_TD = delta_TD * 3 + 1
    for kind in get_args(Norm):
        for delta, weight, bias in (
            (delta_TD, parts_XD[0], None),
            (None, parts_XD[0], parts_XD[1]),
            (delta_TD, None, None),
        ):
            norm = NormSpec(kind=kind, weight=weight, bias=bias if kind == "layernorm" else None)
            what = f"{kind}, {n_tokens} of {width}, {dtype}, seed {seed}"
            with poisoned():
                sum_TD, normed_TD = kernels.add_norm(x_TD, delta, norm)
                last_TD, last_normed_TD = kernels.add_norm(x_TD[-1:], None if delta is None else delta[-1:], norm)
            yield same_bits(f"{what}: sum", sum_TD, x_TD if delta is None else x_TD + delta)
            expected_TD = torch.stack([normed(x_D, norm) for x_D in sum_TD])
            yield close(what, normed_TD, expected_TD)
            yield rounded(what, normed_TD, expected_TD)
            yield same_bits(
                f"{what}: alone", torch.cat((last_TD, last_normed_TD)), torch.cat((sum_TD[-1:], normed_TD[-1:]))
            )


def gates(kernels: Kernels, n_tokens: int, width: int, dtype: torch.dtype, device: str, seed: int) -> Iterator[Finding]:
    """Every activation, gated and not."""
    hidden_TX = 3 * random((n_tokens, 2 * width), dtype, device, seed)
    for activation in get_args(Activation):
        for gated in (True, False):
            gate_TF, up_TF = hidden_TX.chunk(2, dim=-1) if gated else (hidden_TX, None)
            expected_TF = activated(gate_TF, activation)
            if up_TF is not None:
                expected_TF = expected_TF.to(dtype).double() * up_TF.double()
            what = f"{activation}, gated {gated}, {n_tokens} of {width}, {dtype}, seed {seed}"
            with poisoned():
                out_TF = kernels.gate(hidden_TX, activation, gated)
                last_TF = kernels.gate(hidden_TX[-1:], activation, gated)
            yield close(what, out_TF, expected_TF)
            if activation != "gelu":  # 1 + erf has few significant digits near zero
                yield rounded(what, out_TF, expected_TF)
            yield same_bits(f"{what}: alone", last_TF, out_TF[-1:])


def heads(
    kernels: Kernels, spec: HeadsSpec, n_tokens: int, dtype: torch.dtype, device: str, seed: int
) -> Iterator[Finding]:
    """With a rotary table and without; every third token has no cache slot."""
    n_rows = spec.n_heads + 2 * spec.n_kv_heads
    qkv_TX = random((n_tokens, n_rows * spec.head_dim), dtype, device, seed)
    angles_PF = 3 * random((50, spec.turned_dim // 2), torch.float32, "cpu", seed + 1)
    rope_PC = torch.cat((angles_PF.cos(), angles_PF.sin()), dim=-1).to(device)
    generator = torch.Generator().manual_seed(seed)
    positions_T = torch.randint(50, (n_tokens,), generator=generator, dtype=torch.int32)
    slots_T = torch.randperm(2 * n_tokens, generator=generator, dtype=torch.int32)[:n_tokens]
    slots_T[1::3] = -1
    for rope, variant in ((rope_PC, spec), (None, replace(spec, q_norm=None))):
        what = f"{spec.n_heads}/{spec.n_kv_heads} heads of {spec.head_dim}, {rope is not None=}, {dtype}, seed {seed}"
        cache, last_cache = (_empty_cache(qkv_TX, spec) for _ in range(2))
        with poisoned():
            actual = kernels.split_heads(qkv_TX, variant, positions_T.to(device), rope, cache, slots_T.to(device))
            last = kernels.split_heads(
                qkv_TX[-1:], variant, positions_T[-1:].to(device), rope, last_cache, slots_T[-1:].to(device)
            )
        expected, expected_cache = _expected(qkv_TX, variant, positions_T.tolist(), rope, slots_T.tolist(), cache)
        yield close(f"{what}: q", actual, expected)
        yield rounded(f"{what}: q", actual, expected)
        written = ~expected_cache.isnan()
        yield close(f"{what}: cache", cache[written], expected_cache[written])
        yield rounded(f"{what}: cache", cache[written], expected_cache[written])
        is_untouched = bool(cache[~written].isnan().all())
        yield Finding(what=f"{what}: nothing else is written", value="", ok=is_untouched)
        yield same_bits(f"{what}: alone", last, actual[-1:])
        slot = int(slots_T[-1])
        if slot >= 0:
            yield same_bits(f"{what}: kept alone", last_cache.flatten(1, 2)[:, slot], cache.flatten(1, 2)[:, slot])


def _empty_cache(qkv_TX: Tensor, spec: HeadsSpec) -> Tensor:
    """A layer's cache in blocks of 16, with twice the needed slots; its last block is for padding rows."""
    n_blocks = 2 * len(qkv_TX) // 16 + 2
    return qkv_TX.new_full((2, n_blocks, 16, spec.n_kv_heads, spec.head_dim), float("nan"))


def _expected(
    qkv_TX: Tensor, spec: HeadsSpec, positions: list[int], rope_PC: Tensor | None, slots: list[int], like: Tensor
) -> tuple[Tensor, Tensor]:
    """Expected queries [T, H, C] and cache, in float64."""
    cache = torch.full_like(like, float("nan"), dtype=torch.float64).flatten(1, 2)
    queries = []
    for qkv_X, position, slot in zip(qkv_TX, positions, slots, strict=True):
        half = spec.turned_dim // 2
        angles = None if rope_PC is None else (rope_PC[position, :half], rope_PC[position, half:])
        heads_by_kind = qkv_X.unflatten(0, (-1, spec.head_dim)).split((spec.n_heads, spec.n_kv_heads, spec.n_kv_heads))
        turned = [prepared(x_C, spec.q_norm, spec, angles, spec.q_factor) for x_C in heads_by_kind[0]]
        queries.append(torch.stack(turned))
        if slot >= 0:
            keys = [prepared(x_C, spec.k_norm, spec, angles, 1.0) for x_C in heads_by_kind[1]]
            cache[0, slot], cache[1, slot] = torch.stack(keys), heads_by_kind[2].double()
    return torch.stack(queries), cache.view(like.shape)


def states(
    kernels: Kernels, count: int, n_rows: int, block_size: int, n_blocks: int, device: str, seed: int
) -> Iterator[Finding]:
    """Checks `n_rows` of `count` resident rows with `n_blocks` blocks each, followed by two padding rows."""
    rng = Random(seed)
    rows = [*rng.sample(range(count), n_rows), count, count]
    lengths = [*(rng.randrange(n_blocks * block_size) for _ in range(count)), 0]
    last = [*(rng.randrange(50_000) for _ in range(count)), 0]
    table = [[rng.randrange(10**6) for _ in range(n_blocks)] for _ in range(count + 1)]
    sampled = [rng.choice((-1, rng.randrange(50_000))) for _ in rows]
    state = RowState(_integers(table, device), _integers(lengths, device), _integers(last, device), block_size)
    actual = kernels.look_up(_integers(rows, device), state)
    at = [lengths[row] for row in rows]
    slots = [table[row][p // block_size] * block_size + p % block_size for row, p in zip(rows, at, strict=True)]
    tiles = [-1 if row == count else row for row in rows]
    expected = ([last[row] for row in rows], at, slots, tiles)
    what = f"{n_rows} of {count} rows, blocks of {block_size}, seed {seed}"
    for name, one, other in zip(actual._fields, actual, expected, strict=True):
        yield same_bits(f"{what}: {name}", one, _integers(other, device))
    kernels.advance(_integers(rows, device), _integers([p + 1 for p in at], device), _integers(sampled, device), state)
    for row, position, token in zip(rows[:n_rows], at, sampled, strict=False):
        lengths[row], last[row] = position + 1, max(token, 0)
    yield same_bits(f"{what}: lengths", state.kv_length_R, _integers(lengths, device))
    yield same_bits(f"{what}: last tokens", state.last_token_R, _integers(last, device))


def _integers(numbers: object, device: str) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def normed(x_D: Tensor, norm: NormSpec) -> Tensor:
    """Slow reference of one row, in float64."""
    wide_D = x_D.double()
    if norm.kind == "none":
        return wide_D
    if norm.kind == "layernorm":
        wide_D = wide_D - wide_D.mean()
    wide_D = wide_D / torch.sqrt(wide_D.square().mean() + norm.eps)
    if norm.weight is not None:
        wide_D = wide_D * norm.weight.double()
    return wide_D if norm.bias is None else wide_D + norm.bias.double()


def prepared(
    x_C: Tensor, weight_C: Tensor | None, spec: HeadsSpec, angles_F: tuple[Tensor, Tensor] | None, factor: float
) -> Tensor:
    """One head of one token: normalized, rotated, and scaled; each result rounded."""
    dtype = x_C.dtype
    if weight_C is not None:
        x_C = normed(x_C, NormSpec(kind="rmsnorm", weight=weight_C, eps=spec.eps)).to(dtype)
    if angles_F is not None:
        cos_F, sin_F = (angle_F.double() for angle_F in angles_F)
        half = len(cos_F)
        a_F, b_F = x_C[:half].double(), x_C[half : 2 * half].double()
        x_C = torch.cat((a_F * cos_F - b_F * sin_F, b_F * cos_F + a_F * sin_F, x_C[2 * half :].double())).to(dtype)
    return x_C.double() * factor


def activated(x: Tensor, activation: Activation) -> Tensor:
    """Elementwise activation."""
    wide = x.double()
    match activation:
        case "relu":
            return wide.clamp(min=0)
        case "gelu":
            return 0.5 * wide * (1 + torch.erf(wide / math.sqrt(2)))
        case "gelu_tanh":
            return 0.5 * wide * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
        case "silu":
            return wide / (1 + torch.exp(-wide))


def _seed() -> int:
    return time.time_ns() % 1_000_000
