"""qwen3_moe: qwen3 with experts, but for the layers that its config.json makes dense."""

from __future__ import annotations

from model.config import ConfigError, LayerKind, ModelConfig, Size, check_field, check_value
from model.families.experts import EXPERT_NAMES, FUSED_NAMES, read_experts, with_experts
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Raw, read_fields, read_layers

_KEYS = {"count": ("num_local_experts", "num_experts"), "normalized": ("norm_topk_prob",)}


def _read(raw: Raw) -> ModelConfig:
    n_layers = read_fields(raw, {"n_layers": "num_hidden_layers"})["n_layers"]
    dense, step = raw.get("mlp_only_layers") or [], raw.get("decoder_sparse_step", 1)
    check_value(step, Size, "decoder_sparse_step")
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise ConfigError(f"mlp_only_layers must be a list of the numbers of layers, not {dense!r:.40}")
    window = raw.get("sliding_window", 4096) if raw.get("use_sliding_window", False) else None
    check_field("window", window, "sliding_window", LayerKind)
    rope, dense_layers = read_whole_rope(raw), set(dense)

    def kind(layer: int) -> LayerKind:
        is_dense = layer in dense_layers or (layer + 1) % step > 0
        return LayerKind(window=window, rope=rope, mlp="dense" if is_dense else "experts")

    experts = read_experts(raw, _KEYS, {"count": 128, "chosen": 8, "width": 768, "normalized": False})
    return read_dialect(
        raw,
        defaults={"n_kv_heads": 4},
        layers=with_experts(read_layers(n_layers, kind), experts),
        qk_norm="head",
        **read_attention_biases(raw),
    )


QWEN3_MOE = llama_family(
    name="qwen3_moe",
    models="Qwen3 30B-A3B, Qwen3-Coder 30B-A3B",
    architecture="Qwen3MoeForCausalLM",
    read=_read,
    names={**NAMES, **EXPERT_NAMES},
    fused=FUSED_NAMES,
)
