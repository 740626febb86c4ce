"""vaultgemma: gemma2 without norms of outputs."""

from __future__ import annotations

from dataclasses import replace

from model.config import ModelConfig
from model.families.gemma import read_gemma2
from model.families.llama import NAMES, llama_family
from model.families.spec import Raw


def _read(raw: Raw) -> ModelConfig:
    return replace(read_gemma2(raw), norm_position="pre")


VAULTGEMMA = llama_family(
    name="vaultgemma",
    models="VaultGemma 1B",
    architecture="VaultGemmaForCausalLM",
    read=_read,
    names={**NAMES, "blocks.N.norm_mlp": "model.layers.N.pre_feedforward_layernorm"},
)
