"""seed_oss: llama with biases of queries, keys and values, and a key for the bias of attention's output."""

from __future__ import annotations

from model.config import ModelConfig
from model.families.llama import llama_family, read_dialect
from model.families.spec import Raw, read_fields

_BIASES = {"qkv_bias": "attention_bias", "out_bias": "attention_out_bias", "mlp_bias": "mlp_bias"}


def _read(raw: Raw) -> ModelConfig:
    biases = read_fields(raw, _BIASES, qkv_bias=True, out_bias=False, mlp_bias=False)
    return read_dialect(raw, defaults={"n_kv_heads": 8, "head_dim": 128}, **biases)


SEED_OSS = llama_family(name="seed_oss", models="Seed-OSS 36B", architecture="SeedOssForCausalLM", read=_read)
