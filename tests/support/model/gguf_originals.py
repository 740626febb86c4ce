"""Small checkpoints of transformers that GGUF files can hold whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.model.gguf_conversion import ARCHITECTURE_OF
from tests.support.model.hub_checkpoints import CASES, family_name, reference_config, save_reference

_ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function", "activation")
_NO_WINDOW = {
    **{name: {"sliding_window": None} for name in ("mistral", "ministral3", "starcoder2")},
    **{name: {"use_sliding_window": False, "layer_types": None} for name in ("qwen2", "qwen3", "qwen3_moe", "smollm3")},
}
"""Windows that the converter leaves out."""
_TIED = {"tie_word_embeddings": True}
_OTHER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "cohere2"), _TIED),
    "olmoe": {"norm_topk_prob": False},
    "qwen3_moe": {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1},
    "smollm3": {"no_rope_layers": None, "no_rope_layer_interval": 4, "num_hidden_layers": 5},
    "seed_oss": {"mlp_bias": False},
    "ernie4_5_moe": {"moe_layer_end_index": -1},
}
"""What the converter, or llama.cpp, knows of these families in one way only."""
_UNSUPPORTED = {
    "falcon-b": "a residual that is not parallel",
    "falcon-e": "heads that are interleaved and have their own keys",
    "gpt_bigcode-b": "heads that have their own keys",
    "ministral3-c": "a rotation that is not yarn",
}
"""Cases that llama.cpp does not convert, or computes wrongly."""
GGUF_CASES = [case for case in CASES if family_name(case) in ARCHITECTURE_OF and case not in _UNSUPPORTED]


def _changes(case: str) -> dict[str, Any]:
    """Of keys that GGUF files do not have, and whose default all files stand for."""
    name = family_name(case)
    default, other = reference_config(name), _OTHER.get(name, {})
    if "query_pre_attn_scalar" in CASES[case]:
        other = {**other, "query_pre_attn_scalar": CASES[case]["head_dim"]}
    if name == "olmo3" and "rope_parameters" in CASES[case]:
        ropes = CASES[case]["rope_parameters"]
        local = {"rope_type": "default", "rope_theta": ropes["full_attention"]["rope_theta"]}
        other = {**other, "rope_parameters": {**ropes, "sliding_attention": local}}
    activations = {key: getattr(default, key) for key in _ACTIVATIONS if key in CASES[case]}
    return activations | _NO_WINDOW.get(name, {}) | other


def save_original(case: str, directory: Path, **changes: Any) -> Any:
    """Saves the reference model of a case, with what GGUF files do not have at its default, and returns it."""
    model = save_reference(case, directory, **{**_changes(case), **changes})
    if "gemma" in case:  # whose scale of embeddings is rounded to the number format of the training
        raw = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps({**raw, "dtype": "bfloat16"}))
    return model
