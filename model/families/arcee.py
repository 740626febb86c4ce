"""arcee: llama with a feed-forward without a gate, by default of squared relu."""

from __future__ import annotations

from model.config import ModelConfig
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect
from model.families.spec import Raw, activation


def _read(raw: Raw) -> ModelConfig:
    dialect = {**read_attention_biases(raw), "mlp_bias": raw.get("mlp_bias", False), "gated": False}
    act = activation(raw.get("hidden_act", "relu2"))
    return read_dialect(raw, defaults={"norm_eps": 1e-5}, activation=act, **dialect)


ARCEE = llama_family(
    name="arcee",
    models="AFM 4.5B",
    architecture="ArceeForCausalLM",
    read=_read,
    names={**NAMES, "blocks.N.mlp.up": "model.layers.N.mlp.up_proj"},
)
