"""Random decoders with odd widths and any valid combination of switches."""

from __future__ import annotations

import random
from functools import cache
from itertools import count
from typing import Any, Literal, get_args

from model.config import (
    Activation,
    ConfigError,
    Experts,
    ExpertScore,
    LayerKind,
    ModelConfig,
    NormPosition,
    QkNorm,
    QueryScale,
    Rope,
)
from tests.support.model.tiny_models import tiny_config

_SCALINGS: list[dict[str, Any]] = [
    {},
    {"kind": "linear", "factor": 2.5},
    {"kind": "llama3", "factor": 8.0, "original_context": 64},
    {"kind": "yarn", "factor": 4.0, "original_context": 32, "beta_fast": 8.0, "attention_factor": 1.1},
    {
        "kind": "longrope",
        "original_context": 64,
        "attention_factor": 1.2,
        "short_factors": (1.0,),
        "long_factors": (3.0,),
    },
]


@cache
def random_config(seed: int) -> ModelConfig:
    """A random decoder with odd widths and any valid combination of switches."""
    rng = random.Random(seed)
    for _ in count():
        head_dim, kv_heads = (2, 12, 20, 24, 64)[seed % 5], rng.choice([1, 2, 3])
        scaling = _SCALINGS[seed // 4 % len(_SCALINGS)]
        dim = 2 if "long_factors" in scaling else rng.choice([None, 2])
        ropes = [Rope(dim=dim, **scaling), None, Rope(theta=50.0, dim=2)]
        rng.shuffle(ropes)
        windows = rng.choice([(None,), (40,), (9, None), (40, 9), (9, 9)])
        experts, mlps = random_experts(rng, seed)
        of_layers = zip(windows, ropes, mlps, strict=False)
        kinds = tuple(dict.fromkeys(LayerKind(window=w, rope=r, mlp=mlp) for w, r, mlp in of_layers))
        heads = kv_heads * rng.choice([1, 2, 3, 4])
        changes: dict[str, Any] = {
            "vocab_size": rng.choice([99, 320]),
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": head_dim,
            "width": rng.choice([33, 50, 96]) if seed % 3 else heads * head_dim,
            "out_projection": seed % 3 > 0,
            "mlp_width": rng.choice([0, 33, 70, 256]) if any(kind.mlp == "dense" for kind in kinds) else 0,
            "experts": experts if any(kind.mlp == "experts" for kind in kinds) else None,
            "sinks": seed % 7 in (1, 4),
            "n_layers": rng.choice([1, 2]) if len(kinds) == 1 else 2,
            "layer_kinds": kinds,
            "layer_types": tuple(range(len(kinds))) if len(kinds) > 1 else (),
            "norm": ("rmsnorm", "layernorm", "rmsnorm", "layernorm", "none")[seed // 2 % 5],
            "norm_position": (position := rng.choice((*get_args(NormPosition), "output", "sandwich"))),
            "positions": ("none", "learned", "sinusoidal", "none")[seed % 4],
            "activation": get_args(Activation)[seed // 3 % len(get_args(Activation))],
            "attention_scale": rng.choice(["head_dim", "width", 0.3]),
            "attention_soft_cap": rng.choice([None, None, 2.0]),
            "query_scale": rng.choice([None, QueryScale(beta=0.5, original_context=16)]),
            "residual_scale": (rng.choice([1.0, 0.4]), 1.0)[position in ("output", "sandwich")],
            "logit_scale": rng.choice([1.0, 0.25]),
            "qk_norm": rng.choice(get_args(QkNorm)),
            "embedding_scale": rng.choice([1.0, 3.3]),
            "logit_soft_cap": rng.choice([None, 5.0]),
        }
        switches = ("norm_bias", "final_norm", "gated", "qkv_bias", "out_bias", "mlp_bias", "head_bias", "tied_head")
        switches += ("parallel_residual", "shared_norm", "norm_offset", "qk_norm_after_rope", "embedding_norm")
        rare = {"norm_weight": rng.random() < 0.6}
        try:
            return tiny_config(**changes, **rare, **{name: rng.random() < 0.5 for name in switches})
        except ConfigError:
            continue
    raise AssertionError


def random_experts(rng: random.Random, seed: int) -> tuple[Experts | None, list[Literal["dense", "experts"]]]:
    """Experts of every second decoder, and the feed-forward of each kind of layer."""
    if seed % 2 == 0:
        return None, ["dense", "dense"]
    score = get_args(ExpertScore)[seed // 2 % len(get_args(ExpertScore))]
    is_of_chosen, count = score == "softmax_of_chosen", rng.choice([3, 8, 20])
    experts = Experts(
        count=count,
        chosen=rng.choice([1, 2, count]),
        width=rng.choice([7, 32, 65]),
        score=score,
        normalized=not is_of_chosen and rng.random() < 0.5,
        factor=rng.choice([1.0, 2.5]),
        router_bias=rng.random() < 0.5,
        choice_bias=not is_of_chosen and rng.random() < 0.5,
        bias=rng.random() < 0.5,
        shared_width=rng.choice([0, 33]),
    )
    return experts, rng.choice([["experts", "experts"], ["dense", "experts"], ["experts", "dense"]])
