"""gemma, gemma2, gemma3_text: norms by 1 + weight, scaled embeddings; from gemma2 on norms of outputs, and windows."""

from __future__ import annotations

import re
import struct
from functools import partial
from typing import Any

from model.config import LayerKind, ModelConfig, Positive, Rope, check_field, check_value
from model.families.llama import NAMES, read_sizes
from model.families.rope import read_rope, rope_parameters
from model.families.spec import (
    FamilySpec,
    Raw,
    Wrapper,
    activation,
    periodic_windows,
    read_layers,
    read_windows,
    require_values,
)

_SANDWICH = {
    **NAMES,
    "blocks.N.norm_attention_output": "model.layers.N.post_attention_layernorm",
    "blocks.N.norm_mlp": "model.layers.N.pre_feedforward_layernorm",
    "blocks.N.norm_mlp_output": "model.layers.N.post_feedforward_layernorm",
}


def _read(raw: Raw, default_kv_heads: int = 4, **dialect: Any) -> ModelConfig:
    require_values(raw, attention_bias=False, use_bidirectional_attention=(None, False))
    sizes = read_sizes(raw, n_kv_heads=default_kv_heads, head_dim=256, tied_head=True)
    return ModelConfig(**sizes, norm_offset=True, embedding_scale=_embedding_scale(raw, sizes["width"]), **dialect)


def _embedding_scale(raw: Raw, width: int) -> float:
    """sqrt(width), rounded to the number format that the model was trained in."""
    scale = width**0.5
    match raw.get("dtype") or raw.get("torch_dtype"):
        case "bfloat16":
            (bits,) = struct.unpack("<I", struct.pack("<f", scale))
            (scale,) = struct.unpack("<f", struct.pack("<I", bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000))
        case "float16":
            (scale,) = struct.unpack("<e", struct.pack("<e", scale))
    return float(scale)


def _read_gemma(raw: Raw) -> ModelConfig:
    """Early files name gelu where the model has the approximation."""
    act = activation(raw.get("hidden_act", "gelu_pytorch_tanh"))
    act = "gelu_tanh" if act == "gelu" else act
    return _read(raw, 16, activation=act, layer_kinds=(LayerKind(rope=read_rope(raw)),))


def _read_sandwich(raw: Raw, layers: Any, **dialect: Any) -> ModelConfig:
    scalar = raw.get("query_pre_attn_scalar", 256)
    check_value(scalar, Positive, "query_pre_attn_scalar")
    caps = {"attention_soft_cap": "attn_logit_softcapping", "logit_soft_cap": "final_logit_softcapping"}
    dialect |= {field: raw.get(key, dialect.get(field)) for field, key in caps.items()}
    act = activation(raw.get("hidden_activation", "gelu_pytorch_tanh"))
    return _read(
        raw, activation=act, norm_position="sandwich", attention_scale=float(scalar) ** -0.5, **layers, **dialect
    )


def read_gemma2(raw: Raw) -> ModelConfig:
    """gemma2, and vaultgemma but for its norms. Raises as FamilySpec.read."""
    windows = read_windows(raw, "num_hidden_layers", raw.get("sliding_window", 4096), lambda layer: layer % 2 == 0)
    layers = read_layers(len(windows), lambda layer: LayerKind(window=windows[layer], rope=read_rope(raw)))
    return _read_sandwich(raw, layers, attention_soft_cap=50.0, logit_soft_cap=30.0)


def _read_gemma3(raw: Raw) -> ModelConfig:
    """Layers with a window have a rotation of their own."""
    default = periodic_windows(raw, "sliding_window_pattern", "_sliding_window_pattern", default=6)
    windows = read_windows(raw, "num_hidden_layers", raw.get("sliding_window", 4096), default)
    everywhere = LayerKind(rope=read_rope(raw, layer_type="full_attention", theta=1e6))
    if isinstance(rope_parameters(raw).get("sliding_attention"), dict):
        local_rope = read_rope(raw, layer_type="sliding_attention")
    else:
        theta = raw.get("rope_local_base_freq", 10_000.0)
        check_field("theta", theta, "rope_local_base_freq", Rope)
        local_rope = Rope(theta=theta)
    layers = read_layers(
        len(windows),
        lambda layer: LayerKind(window=windows[layer], rope=local_rope) if windows[layer] else everywhere,
    )
    return _read_sandwich(raw, layers, qk_norm="head")


_family = partial(FamilySpec, prefix="model.", ignored=re.compile(r".*rotary_emb\.inv_freq"))
GEMMA = _family(name="gemma", models="Gemma 2B and 7B", architecture="GemmaForCausalLM", read=_read_gemma, names=NAMES)
GEMMA2 = _family(
    name="gemma2", models="Gemma 2, 2B and 9B", architecture="Gemma2ForCausalLM", read=read_gemma2, names=_SANDWICH
)
GEMMA3 = _family(
    name="gemma3_text",
    models="Gemma 3, 270M and 1B",
    architecture="Gemma3ForCausalLM",
    read=_read_gemma3,
    names=_SANDWICH,
)
GEMMA3_WRAPPER = Wrapper(
    name="gemma3",
    models="Gemma 3, 4B and 12B, as text",
    defaults={
        "model_type": "gemma3_text",
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "max_position_embeddings": 131_072,
    },
)
