"""ministral3: mistral with queries that grow with their position, by default with yarn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from model.config import ModelConfig, QueryScale, check_field
from model.families.llama import llama_family, read_dialect, read_one_window
from model.families.rope import read_original_context, read_whole_rope, rope_parameters
from model.families.spec import Raw, require_values

_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "llama_4_scaling_beta": 0.1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def _read(raw: Raw) -> ModelConfig:
    require_values(raw, layer_types=None)
    keys: Mapping[str, Any] = rope_parameters(raw) or _ROPE
    rope = read_whole_rope({**raw, "rope_parameters": keys})
    check_field("beta", keys["llama_4_scaling_beta"], "llama_4_scaling_beta", QueryScale)
    scale = QueryScale(beta=keys["llama_4_scaling_beta"], original_context=read_original_context(raw, keys))
    defaults = {"n_kv_heads": 8, "head_dim": 128, "norm_eps": 1e-5}
    return read_dialect(raw, defaults=defaults, layers=read_one_window(raw, rope), query_scale=scale)


MINISTRAL3 = llama_family(
    name="ministral3", models="Ministral 3, 3B to 14B, as text", architecture="Ministral3ForCausalLM", read=_read
)
