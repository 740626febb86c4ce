"""internlm3: llama with one key for the biases of queries, keys and values, and one for all others."""

from __future__ import annotations

from model.config import ConfigError, ModelConfig
from model.families.llama import llama_family, read_dialect
from model.families.spec import Raw, read_fields


def _read(raw: Raw) -> ModelConfig:
    """The keys of published files win over the ones that transformers writes, as they do there."""
    keys = {
        "qkv_bias": "qkv_bias" if "qkv_bias" in raw else "attention_bias",
        "mlp_bias": "bias" if "bias" in raw else "mlp_bias",
    }
    biases = read_fields(raw, keys, qkv_bias=False, mlp_bias=False)
    if biases["qkv_bias"] != biases["mlp_bias"]:
        raise ConfigError(f"{keys['qkv_bias']} and {keys['mlp_bias']} must be equal")
    defaults = {"n_kv_heads": 2, "head_dim": 128, "norm_eps": 1e-5}
    return read_dialect(raw, defaults=defaults, out_bias=biases["mlp_bias"], **biases)


INTERNLM3 = llama_family(name="internlm3", models="InternLM3 8B", architecture="LlamaForCausalLM", read=_read)
