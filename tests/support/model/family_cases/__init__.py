"""What the family tests know of each model family: one module for each file of model/families, found by its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

Keys = Mapping[str, Any]
"""Keys of a config.json, or arguments of transformers' configuration."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyCases:
    """Cases of one model_type."""

    name: str
    minimal: Keys
    """The fewest keys that make a small model; what they leave out has the default of transformers."""
    shapes: Mapping[str, Keys]
    """Small models by a letter: 99 tokens, contexts of 128 tokens, windows and scalings that matter within them."""
    variants: Sequence[Keys] = ()
    """Changes of `minimal`, in the spellings of all versions, which are read as transformers reads them."""
    switches: Sequence[tuple[str, Keys]] = ()
    """A letter, and a change of a key that is in its config.json, which changes the logits."""
    refused: Sequence[tuple[Keys, str]] = ()
    """Changes of `minimal`, and what the error says (a pattern)."""
    neutral: Mapping[str, str] = field(default_factory=dict)
    """Keys of transformers' configuration that `read` ignores -> why they do not change what is computed."""
    buffers: Sequence[str] = ()
    """Names of buffers that older exporters stored."""
    activation_key: str = "hidden_act"
    is_written: bool = False
    """Whether models are exported in this family's layout."""


def all_cases() -> dict[str, FamilyCases]:
    """The cases of every family, by model_type."""
    modules = [import_module(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
    return {cases.name: cases for module in modules for cases in module.FAMILIES}


COMMON = {"vocab_size": 99, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
LLAMA: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
}
"""Sizes under the names that most families give them."""
EXPERTS_NEUTRAL = dict.fromkeys(
    ("output_router_logits", "router_aux_loss_coef"), "of the loss that spreads tokens over experts in training"
)
SCALED = {"rope_type": "linear", "factor": 2.5, "rope_theta": 1e4}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 5e5}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}


def heads(count: int, kv_count: int, head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    """LLAMA with these heads."""
    shape = {**LLAMA, "num_attention_heads": count, "num_key_value_heads": kv_count, **more}
    return shape if head_dim is None else {**shape, "head_dim": head_dim}
