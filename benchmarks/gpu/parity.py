"""The engine on this device against model/nn/reference.py on the CPU in float32: tokens and log-probabilities.

Small models of every layout with random weights; prompts shorter and longer than a split of attention; greedy requests,
and seeded ones with filters and penalties. The reference reads the engine's own tokens in one pass and scores each
against the logits before it, since one token that a tie decided otherwise would make the rest incomparable. In float32,
tokens must equal the reference's except for ties; in bfloat16, whose rounding changes every logit, log-probabilities
must be near those of the same rounded weights. A router that rounding takes to another expert makes another row, which
random routers do often: of mixtures, most tokens must agree.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil, isnan, nan
from typing import Any

import torch
from torch import Tensor

from app.common.types import Request
from app.engine.sampling.parameters import SamplingInput
from app.engine.sampling.sampler import sample
from benchmarks.engine_driver import random_prompt, request, run_all
from benchmarks.gpu.engines import build_device_engine
from benchmarks.gpu.results import Finding, StageContext
from benchmarks.shapes import SHAPES, decoder_of, random_state, smaller, weights_in_memory
from model.config import Experts, LayerKind, ModelConfig, QueryScale, Rope
from model.nn.reference import logits
from model.nn.transformer import Decoder

_SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "width": 256,
    "n_layers": 4,
    "n_heads": 4,
    "head_dim": 64,
    "mlp_width": 704,
    "context": 2048,
}
_ROTATED, _UNROTATED = (LayerKind(rope=Rope()),), (LayerKind(),)
_LLAMA = replace(SHAPES["8b"], n_kv_heads=2, layer_kinds=_ROTATED, **_SIZES)
_ODD = replace(_LLAMA, n_kv_heads=1, head_dim=128, qk_norm="head", logit_soft_cap=30.0)
_POST_NORM = replace(_LLAMA, norm="layernorm", norm_position="post", final_norm=False, activation="relu", gated=False)
LAYOUTS = {
    "llama": _LLAMA,
    "gpt": replace(SHAPES["A"], n_kv_heads=4, tied_head=False, **_SIZES),
    "window, caps, head norms": replace(_ODD, embedding_scale=2.0, layer_kinds=(LayerKind(window=100, rope=Rope()),)),
    "layers of three kinds": replace(
        _LLAMA,
        layer_kinds=(LayerKind(window=100, rope=Rope()), LayerKind(), LayerKind(window=300, rope=Rope(dim=32))),
        layer_types=(0, 1, 2, 0),
    ),
    "post-norm, sinusoids": replace(_POST_NORM, positions="sinusoidal", layer_kinds=_UNROTATED, head_bias=True),
    "parallel, half turned": replace(
        _LLAMA, parallel_residual=True, layer_kinds=(LayerKind(rope=Rope(dim=32)),), activation="gelu", gated=False
    ),
}
LAYOUTS |= {
    "sandwich, (1 + w), scores capped": replace(
        _ODD, norm_position="sandwich", norm_offset=True, attention_soft_cap=20.0, attention_scale=0.05
    ),
    "output norms, wide head norms, squared relu": replace(
        _LLAMA, norm_position="output", qk_norm="width", activation="relu2", gated=False
    ),
    "norms without weights, heads normed after the rotation, xIELU": replace(
        _ODD, norm_weight=False, qk_norm_after_rope=True, activation="xielu", gated=False, embedding_norm=True,
        logit_scale=0.5, query_scale=QueryScale(beta=0.3, original_context=500),
    ),
    "parallel with one norm": replace(
        _LLAMA, norm="layernorm", parallel_residual=True, shared_norm=True, layer_kinds=_ROTATED, residual_scale=0.5
    ),
}  # fmt: skip
_ROUTED = LayerKind(rope=Rope(), mlp="experts")
_MIXTURE = replace(
    _LLAMA, layer_kinds=(_ROUTED,), mlp_width=0, experts=Experts(count=16, chosen=4, width=176, normalized=True)
)
LAYOUTS |= {
    "experts": replace(_MIXTURE, qk_norm="head"),
    "experts of a sigmoid, one shared": replace(
        _MIXTURE, experts=Experts(
            count=12, chosen=3, width=176, score="sigmoid", choice_bias=True, factor=1.5, shared_width=176
        ),
    ),
    "experts, sinks, clamped SwiGLU": replace(
        _MIXTURE, sinks=True, activation="swiglu_clamped", qkv_bias=True, out_bias=True,
        layer_kinds=(replace(_ROUTED, window=100), _ROUTED), layer_types=(0, 1, 0, 1),
        experts=Experts(count=16, chosen=4, width=176, score="softmax_of_chosen", router_bias=True, bias=True),
    ),
}  # fmt: skip
_LOGPROB_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Tolerance of a log-probability; on a CPU, torch's were off by 8.1e-6 and 0.10 at most."""
_ROUTED_SHARE = {"float32": 0.98, "bfloat16": 0.85}
"""Share of a mixture's tokens that must be within the tolerances; torch on a CPU in bfloat16: 0.93 of 1,100 tokens."""
_TIE_TOLERANCE = 1e-3
_MAX_SHARE_OFF = 0.005
"""Share of sampled tokens in float32: a random number may fall between two sums that differ in their last digits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputScore:
    """How one output compares with the reference."""

    tokens: int
    off: int
    """Tokens that the reference would not have chosen."""
    gaps: tuple[float, ...]
    """Greedy requests: by how much each chosen logit is below the reference's."""
    differences: tuple[float, ...]
    """Of log-probabilities; NaN where none was reported."""


def score_output(
    decoder: Decoder, request: Request, tokens: tuple[int, ...], logprobs: tuple[float | None, ...]
) -> OutputScore:
    """Scores an output. `decoder` is in float32 on the CPU, with the same weights as the engine."""
    prompt = len(request.prompt)
    history = [*request.prompt, *tokens]
    logits_SV = logits(decoder, history)[prompt - 1 : -1]
    rows = [SamplingInput(request.params, history[: prompt + i], prompt) for i in range(len(tokens))]
    expected = [_expected_token(row_V, row) for row_V, row in zip(logits_SV, rows, strict=True)]
    own_S = torch.log_softmax(logits_SV, -1).gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
    reported = [float("nan") if logprob is None else logprob for logprob in logprobs]
    off = [i for i, token in enumerate(tokens) if token != expected[i]]
    pairs = enumerate(zip(expected, tokens, strict=True))
    return OutputScore(
        tokens=len(tokens),
        off=len(off),
        gaps=tuple(float(logits_SV[i, wanted] - logits_SV[i, token]) for i, (wanted, token) in pairs),
        differences=tuple((torch.tensor(reported) - own_S).abs().tolist()),
    )


def _expected_token(logits_V: Tensor, row: SamplingInput) -> int:
    """Samples one row: the reference must not depend on batching."""
    (sampled,) = sample(logits_V[None], [row])
    assert sampled.token is not None
    return sampled.token


def parity(context: StageContext) -> Iterator[Finding]:
    """Compares every layout in float32 and in bfloat16; all requests at once in one engine."""
    layouts = {name: smaller(LAYOUTS[name]) for name in ("llama", "gpt")} if context.tiny else LAYOUTS
    for name, shape in layouts.items():
        for dtype in ("float32",) if context.tiny else _LOGPROB_TOLERANCE:
            state = random_state(shape, device=torch.device("cpu"), dtype=getattr(torch, dtype))
            engine = build_device_engine(
                context,
                shape,
                weights_in_memory(shape, state),
                dtype=dtype,
                max_running=16,
                tokens_per_step=shape.context // 4,
                cache_tokens=4 * shape.context,
            )
            requests = _requests(shape, tiny=context.tiny)
            outputs = run_all(engine, requests)
            what = f"{name}, {dtype}"
            if outputs.failed:
                yield Finding(what=what, value="requests failed", ok=False, note=str(outputs.failed)[:200])
                continue
            oracle = decoder_of(shape, {name: tensor.float() for name, tensor in state.items()})
            scores = [score_output(oracle, r, outputs.tokens(r.id), outputs.logprobs(r.id)) for r in requests]
            share = _ROUTED_SHARE[dtype] if shape.experts else 1.0
            yield finding_of(what, requests, scores, dtype, share)


def finding_of(
    what: str, requests: Sequence[Request], scores: Sequence[OutputScore], dtype: str, share: float = 1.0
) -> Finding:
    """Judges the outputs of a layout. share: of the tokens that must be within the tolerances."""
    greedy = [v for r, v in zip(requests, scores, strict=True) if r.params.temperature == 0]
    sampled = [v for r, v in zip(requests, scores, strict=True) if r.params.temperature > 0]
    difference = _most([each for score in scores for each in score.differences], share)
    gap = _most([each for score in greedy for each in score.gaps], share)
    off, total = sum(v.off for v in sampled), sum(v.tokens for v in sampled)
    ok = difference <= _LOGPROB_TOLERANCE[dtype]
    if dtype == "float32":
        ok = ok and gap <= _TIE_TOLERANCE and off <= (_MAX_SHARE_OFF + 1 - share) * total + 1
    return Finding(
        what=what,
        value=difference,
        unit="nats at most" if share == 1.0 else f"nats at most, of {share:.0%} of the tokens",
        ok=ok,
        note=f"greedy {sum(v.off for v in greedy)} of {sum(v.tokens for v in greedy)} tokens off, logit gap {gap:.1e}; "
        f"drawn {off} of {total} off",
    )


def _most(values: Sequence[float], share: float) -> float:
    """The largest of the smallest values, which are this share of all; NaN if any is."""
    if any(map(isnan, values)):
        return nan
    return sorted(values)[ceil(share * len(values)) - 1]


def _requests(shape: ModelConfig, *, tiny: bool) -> list[Request]:
    """Greedy and sampled requests, with prompts from one token to more than two attention splits of 512."""
    lengths = (1, 20, 40) if tiny else (1, 17, 64, 100, 511, 512, 513, 1100)
    tokens = 6 if tiny else 48
    sampled = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.3}
    return [
        request(
            f"{length} {mode}",
            random_prompt(length, shape.vocab_size, length),
            tokens,
            logprobs=0,
            **({**sampled, "seed": length} if mode == "drawn" else {}),
        )
        for length in lengths
        for mode in ("greedy", "drawn")
    ]
