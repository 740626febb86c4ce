"""hyperclovax: llama with norms of outputs, and with factors of embeddings, scores, sums and logits."""

from __future__ import annotations

from model.config import ModelConfig, Positive, check_value
from model.families.llama import NAMES, llama_family, read_attention_biases, read_dialect, read_sizes
from model.families.spec import Raw, read_fields, require_values

_NAMES = {
    **NAMES,
    "blocks.N.norm_attention_output": "model.layers.N.post_norm1",
    "blocks.N.norm_mlp_output": "model.layers.N.post_norm2",
}
_SCALES = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "logit_scale": "logits_scaling",
}


def _read(raw: Raw) -> ModelConfig:
    scales = read_fields(raw, _SCALES, embedding_scale=1.0, residual_scale=1.0, logit_scale=1.0)
    if (multiplier := raw.get("attention_multiplier")) is None:
        multiplier = read_sizes(raw)["head_dim"] ** -0.5
    check_value(multiplier, Positive, "attention_multiplier")
    has_output_norms = raw.get("use_post_norm", True)
    check_value(has_output_norms, bool, "use_post_norm")
    if has_output_norms:
        require_values(raw, residual_multiplier=1.0)  # a Decoder applies its factor before the norm
    scales |= {"attention_scale": multiplier, "norm_position": "sandwich" if has_output_norms else "pre"}
    return read_dialect(raw, **read_attention_biases(raw), mlp_bias=raw.get("mlp_bias", False), **scales)


HYPERCLOVAX = llama_family(
    name="hyperclovax",
    models="HyperCLOVA X SEED Think 14B",
    architecture="HyperCLOVAXForCausalLM",
    read=_read,
    names=_NAMES,
)
