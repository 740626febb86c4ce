"""Small random checkpoints of every Hugging Face family, saved by transformers: the oracle of family tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.lazy_modules import transformers

FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "gpt_neox")
UNKNOWN_TO_TRANSFORMERS: tuple[str, ...] = ()
"""Families with a test file of their own, which writes their files."""
_COMMON = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0}
_LLAMA = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80, "max_position_embeddings": 128}
_SCALED = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
_SLIDING = {"use_sliding_window": True, "max_window_layers": 0}


def _heads(heads: int, kv_heads: int, head_dim: int | None = None) -> dict[str, int]:
    shape = {**_LLAMA, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return shape if head_dim is None else {**shape, "head_dim": head_dim}


CASES: dict[str, dict[str, Any]] = {
    "llama-a": {**_heads(6, 2, 20), "attention_bias": True, "rope_parameters": _SCALED, "tie_word_embeddings": True},
    "llama-b": {
        **_heads(4, 4),
        "mlp_bias": True,
        "rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32},
    },
    "llama-c": {**_heads(8, 2, 24), "rms_norm_eps": 1e-3, "hidden_act": "gelu_pytorch_tanh"},
    "mistral-a": {**_heads(6, 2, 20), "sliding_window": 17},
    "mistral-b": {**_heads(4, 1), "sliding_window": None, "tie_word_embeddings": True},
    "mistral-c": {**_heads(3, 3, 24), "sliding_window": 64, "hidden_act": "relu"},
    "qwen2-a": {**_heads(6, 2), "hidden_size": 120, "tie_word_embeddings": True},
    "qwen2-b": {**_heads(4, 4), **_SLIDING, "sliding_window": 10, "rope_parameters": {**_SCALED, "rope_theta": 1e6}},
    "qwen2-c": {**_heads(4, 1), "hidden_size": 96, **_SLIDING, "sliding_window": 5, "max_window_layers": 1},
    "qwen3-a": {**_heads(6, 2, 20), "attention_bias": True, "tie_word_embeddings": True},
    "qwen3-b": {**_heads(8, 2, 12), **_SLIDING, "sliding_window": 9},
    "qwen3-c": {**_heads(3, 3, 24), "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "gpt_neox-a": {**_LLAMA, "hidden_size": 80, "num_attention_heads": 4, "rotary_pct": 1.0},
    "gpt_neox-b": {**_LLAMA, "hidden_size": 96, "num_attention_heads": 4, "use_parallel_residual": False}
    | {"rotary_pct": 0.25, "tie_word_embeddings": True, "hidden_act": "relu"},
    "gpt_neox-c": {**_LLAMA, "hidden_size": 36, "num_attention_heads": 3, "attention_bias": False, "rotary_pct": 0.5}
    | {"rope_scaling": {"type": "linear", "factor": 2.0}, "rotary_emb_base": 777, "hidden_act": "gelu_new"},
    "gpt_neox-d": {**_LLAMA, "num_attention_heads": 3, "use_parallel_residual": True, "rotary_pct": 0.25}
    | {"rope_parameters": {**_LLAMA3, "original_max_position_embeddings": 32}},
    "gpt2-a": {"n_embd": 80, "n_layer": 2, "n_head": 4, "n_positions": 128, "activation_function": "gelu_new"},
    "gpt2-b": {"n_embd": 36, "n_layer": 2, "n_head": 3, "n_positions": 128, "n_inner": 50}
    | {"activation_function": "relu", "tie_word_embeddings": False},
    "gpt2-c": {"n_embd": 48, "n_layer": 3, "n_head": 2, "n_positions": 128, "n_inner": 100}
    | {"activation_function": "gelu", "layer_norm_epsilon": 1e-3},
}
"""1, 3 and 4 heads per kv head, head sizes 12, 16, 20 and 24, windows and scalings that matter within 128 tokens."""


def family_name(case: str) -> str:
    """The model_type of a case."""
    return case.partition("-")[0]


def reference_model(case: str, **changes: Any) -> Any:
    """The transformers model with random parameters: biases of 0 and norms of 1 would hide mistakes."""
    config = transformers.AutoConfig.for_model(family_name(case), **{**_COMMON, **CASES[case], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(sorted(CASES).index(case))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.uniform_(0.5, 1.5, generator=generator)
            else:
                parameter.normal_(0.0, 1.4 * model.config.hidden_size**-0.5, generator=generator)
    return model


def save_reference(case: str, directory: Path) -> Any:
    """Saves the reference model to `directory`, and returns it."""
    model = reference_model(case)
    model.save_pretrained(directory)
    return model


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one sequence."""
    with torch.inference_mode():
        logits_TV: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits_TV
