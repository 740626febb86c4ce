"""How a Hugging Face directory names and shapes things, family by family. Knows no files: dictionaries in and out.

Legend of the mapping: our Decoder keeps q, k, v in one matrix `qkv` (in this order) and gate, up in `gate_up`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from model.config import ConfigError, ModelConfig

SUPPORTED = ("llama",)


def config_from_hf(raw: Mapping[str, Any]) -> ModelConfig:
    """ModelConfig of a config.json (keys of transformers 4 and 5). Raises ConfigError with one sentence."""
    family = raw.get("model_type")
    if family not in SUPPORTED:
        raise ConfigError(f"model_type {family!r} is not supported; supported: {', '.join(SUPPORTED)}")
    _refuse_unsupported(raw)
    try:
        heads = raw["num_attention_heads"]
        return ModelConfig(
            vocab_size=raw["vocab_size"],
            width=raw["hidden_size"],
            n_layers=raw["num_hidden_layers"],
            n_heads=heads,
            n_kv_heads=raw.get("num_key_value_heads") or heads,
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            mlp_width=raw["intermediate_size"],
            context=raw["max_position_embeddings"],
            rope_theta=float(_rope(raw).get("rope_theta") or raw.get("rope_theta") or 10_000.0),
            norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            tied_head=bool(raw.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ConfigError(f"the key {error.args[0]!r} is missing") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(str(error)) from None


def config_to_hf(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The config.json of `config`, with the keys that transformers 4 and 5 both read."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.width,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_width,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the family's safetensors file must hold, no more and no fewer."""
    q_width, kv_width = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.width)}
    for layer in range(config.n_layers):
        block = f"model.layers.{layer}"
        shapes |= {
            f"{block}.input_layernorm.weight": (config.width,),
            f"{block}.self_attn.q_proj.weight": (q_width, config.width),
            f"{block}.self_attn.k_proj.weight": (kv_width, config.width),
            f"{block}.self_attn.v_proj.weight": (kv_width, config.width),
            f"{block}.self_attn.o_proj.weight": (config.width, q_width),
            f"{block}.post_attention_layernorm.weight": (config.width,),
            f"{block}.mlp.gate_proj.weight": (config.mlp_width, config.width),
            f"{block}.mlp.up_proj.weight": (config.mlp_width, config.width),
            f"{block}.mlp.down_proj.weight": (config.width, config.mlp_width),
        }
    shapes["model.norm.weight"] = (config.width,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocab_size, config.width)
    return shapes


def state_from_hf(config: ModelConfig, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """State dict of our Decoder; `get` fetches a tensor by its Hugging Face name."""
    return {ours: torch.cat([get(name) for name in theirs]) for ours, theirs in _names(config)}


def state_to_hf(config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The family's tensors, cut out of our fused ones."""
    shapes = tensor_shapes(config)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in _names(config):
        parts = state[ours].split([shapes[name][0] for name in theirs])
        tensors |= {name: part.contiguous() for name, part in zip(theirs, parts, strict=True)}
    return tensors


def _names(config: ModelConfig) -> list[tuple[str, list[str]]]:
    """Each tensor of ours with the family's tensors that it stacks."""
    pairs = [("embedding", ["model.embed_tokens.weight"]), ("norm", ["model.norm.weight"])]
    for layer in range(config.n_layers):
        block = f"model.layers.{layer}"
        attention = [f"{block}.self_attn.{x}_proj.weight" for x in "qkv"]
        pairs += [
            (f"blocks.{layer}.norm_attention", [f"{block}.input_layernorm.weight"]),
            (f"blocks.{layer}.qkv", attention),
            (f"blocks.{layer}.out", [f"{block}.self_attn.o_proj.weight"]),
            (f"blocks.{layer}.norm_mlp", [f"{block}.post_attention_layernorm.weight"]),
            (f"blocks.{layer}.gate_up", [f"{block}.mlp.{x}_proj.weight" for x in ("gate", "up")]),
            (f"blocks.{layer}.down", [f"{block}.mlp.down_proj.weight"]),
        ]
    return pairs if config.tied_head else [*pairs, ("untied_head", ["lm_head.weight"])]


def _rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return rope if isinstance(rope, Mapping) else {}


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    """A switch that we would have to ignore is refused: ignoring it serves another model than the one given."""
    kind = _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"
    switches = {
        "rope scaling": (kind, "default"),
        "hidden_act": (raw.get("hidden_act", "silu"), "silu"),
        "attention_bias": (bool(raw.get("attention_bias")), False),
        "mlp_bias": (bool(raw.get("mlp_bias")), False),
    }
    for name, (value, supported) in switches.items():
        if value != supported:
            raise ConfigError(f"{name} {value!r} is not supported so far, only {supported!r}")
