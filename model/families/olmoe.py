"""olmoe: llama with experts everywhere, and norms of all queries and all keys."""

from __future__ import annotations

from model.config import LayerKind, ModelConfig
from model.families.experts import EXPERT_NAMES, FUSED_NAMES, read_experts, with_experts
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.rope import read_whole_rope
from model.families.spec import Raw, require_values

_KEYS = {"width": ("intermediate_size",), "normalized": ("norm_topk_prob",)}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, clip_qkv=None)
    experts = read_experts(raw, _KEYS, {"count": 64, "chosen": 8, "normalized": False})
    layers = {"layer_kinds": (LayerKind(rope=read_whole_rope(raw), mlp="experts"),)}
    return read_dialect(
        raw,
        defaults={"norm_eps": 1e-5},
        layers=with_experts(layers, experts),
        qk_norm="width",
        **read_attention_biases(raw),
    )


OLMOE = llama_family(
    name="olmoe",
    models="OLMoE 1B-7B",
    architecture="OlmoeForCausalLM",
    read=_read,
    names={**NAMES, **EXPERT_NAMES},
    fused=FUSED_NAMES,
)
