"""Random decoders with odd widths and any valid combination of switches."""

from __future__ import annotations

import random
from functools import cache
from itertools import count
from typing import Any, get_args

from model.config import (
    Activation,
    ConfigError,
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
        kinds = tuple(dict.fromkeys(LayerKind(window=w, rope=r) for w, r in zip(windows, ropes, strict=False)))
        heads = kv_heads * rng.choice([1, 2, 3, 4])
        changes: dict[str, Any] = {
            "vocab_size": rng.choice([99, 320]),
            "n_heads": heads,
            "n_kv_heads": kv_heads,
            "head_dim": head_dim,
            "width": rng.choice([33, 50, 96]) if seed % 3 else heads * head_dim,
            "out_projection": seed % 3 > 0,
            "mlp_width": rng.choice([0, 33, 70, 256]),
            "n_layers": rng.choice([1, 2]) if len(kinds) == 1 else 2,
            "layer_kinds": kinds,
            "layer_types": tuple(range(len(kinds))) if len(kinds) > 1 else (),
            "norm": ("rmsnorm", "layernorm", "rmsnorm", "layernorm", "none")[seed // 2 % 5],
            "norm_position": rng.choice((*get_args(NormPosition), "output", "sandwich")),
            "positions": ("none", "learned", "sinusoidal", "none")[seed % 4],
            "activation": get_args(Activation)[seed // 3 % len(get_args(Activation))],
            "attention_scale": rng.choice(["head_dim", "width", 0.3]),
            "attention_soft_cap": rng.choice([None, None, 2.0]),
            "query_scale": rng.choice([None, QueryScale(beta=0.5, original_context=16)]),
            "residual_scale": rng.choice([1.0, 0.4]),
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
