"""The engine on this device against model/nn/reference.py on the CPU in float32: tokens and log-probabilities.

Small models of every layout with random weights; prompts shorter and longer than a split of attention; greedy texts and
seeded ones with filters and penalties. In float32 tokens must be the oracle's, but for ties; in bfloat16, whose
rounding moves every logit, log-probabilities must be near those of the same rounded weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from app.common.types import Request
from benchmarks.gpu.drive import prompt_of, request, run_all
from benchmarks.gpu.finding import Bench, Finding
from benchmarks.gpu.oracle import Verdict, judge
from benchmarks.gpu.shapes import decoder_of, random_state, reader
from benchmarks.gpu.twins import device_engine
from model.config import ModelConfig

_LLAMA = ModelConfig(
    vocab_size=1024,
    width=256,
    n_layers=4,
    n_heads=4,
    n_kv_heads=2,
    head_dim=64,
    mlp_width=704,
    context=2048,
    tied_head=False,
)
LAYOUTS = {
    "llama": _LLAMA,
    "gpt": replace(
        _LLAMA,
        n_kv_heads=4,
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    "window, caps, head norms": replace(
        _LLAMA, n_kv_heads=1, head_dim=128, qk_norm=True, sliding_window=100, logit_soft_cap=30.0, embedding_scale=2.0
    ),
    "post-norm, sinusoids": replace(
        _LLAMA,
        norm="layernorm",
        norm_position="post",
        final_norm=False,
        positions="sinusoidal",
        activation="relu",
        gated=False,
        head_bias=True,
    ),
    "parallel, half turned": replace(_LLAMA, parallel_residual=True, rotary_dim=32, activation="gelu", gated=False),
}
_LEAST = {"float32": 1e-3, "bfloat16": 0.3}
"""How far a log-probability may be off; on a CPU, torch's were off by 8.1e-6 and 0.10 at most."""
_TIE = 1e-3
_SHARE_OFF = 0.005
"""Of drawn tokens in float32: a random number may fall between two sums that differ in their last digits."""


def run(bench: Bench) -> Iterator[Finding]:
    """Every layout in float32 and in bfloat16."""
    layouts = dict(list(LAYOUTS.items())[:2]) if bench.tiny else LAYOUTS
    for name, shape in layouts.items():
        for dtype in ("float32",) if bench.tiny else _LEAST:
            yield compare(bench, name, smaller(shape) if bench.tiny else shape, dtype)


def compare(bench: Bench, name: str, shape: ModelConfig, dtype: str) -> Finding:
    """One engine, all requests at once."""
    state = random_state(shape, device=torch.device("cpu"), dtype=getattr(torch, dtype))
    engine = device_engine(
        bench,
        shape,
        reader(shape, state),
        dtype=dtype,
        max_running=16,
        tokens_per_step=shape.context // 4,
        cache_tokens=4 * shape.context,
    )
    requests = _requests(shape, tiny=bench.tiny)
    texts = run_all(engine, requests)
    if texts.failed:
        return Finding(what=f"{name}, {dtype}", value="requests failed", ok=False, note=str(texts.failed)[:200])
    oracle = decoder_of(shape, {name: tensor.float() for name, tensor in state.items()})
    verdicts = [judge(oracle, r, texts.tokens(r.id), texts.logprobs(r.id)) for r in requests]
    return _finding(f"{name}, {dtype}", requests, verdicts, dtype)


def _finding(what: str, requests: Sequence[Request], verdicts: Sequence[Verdict], dtype: str) -> Finding:
    greedy = [v for r, v in zip(requests, verdicts, strict=True) if r.params.temperature == 0]
    drawn = [v for r, v in zip(requests, verdicts, strict=True) if r.params.temperature > 0]
    difference = max(verdict.difference for verdict in verdicts)
    gap = max(verdict.gap for verdict in greedy)
    off, total = sum(v.off for v in drawn), sum(v.tokens for v in drawn)
    ok = difference <= _LEAST[dtype]
    if dtype == "float32":
        ok = ok and gap <= _TIE and off <= _SHARE_OFF * total + 1
    return Finding(
        what=what,
        value=difference,
        unit="nats at most",
        ok=ok,
        note=f"greedy {sum(v.off for v in greedy)} of {sum(v.tokens for v in greedy)} tokens off, logit gap {gap:.1e}; "
        f"drawn {off} of {total} off",
    )


def _requests(shape: ModelConfig, *, tiny: bool) -> list[Request]:
    """Every other one greedy; from one token to beyond two splits of 512."""
    lengths = (1, 20, 40) if tiny else (1, 17, 64, 100, 511, 512, 513, 1100)
    tokens = 6 if tiny else 48
    drawn = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    return [
        request(
            f"{length} {way}",
            prompt_of(length, shape.vocab_size, length),
            tokens,
            logprobs=0,
            **({**drawn, "seed": length} if way == "drawn" else {}),
        )
        for length in lengths
        for way in ("greedy", "drawn")
    ]


def smaller(shape: ModelConfig) -> ModelConfig:
    """The same layout at a size for a CPU."""
    heads: dict[str, Any] = {"n_heads": 2, "n_kv_heads": min(2, shape.n_kv_heads), "head_dim": 16}
    return replace(shape, vocab_size=320, width=32, n_layers=2, mlp_width=48, context=128, **heads)
