"""A model in the words of the field: its ModelConfig in one line, its size. Knows no tensors and no files."""

from __future__ import annotations

from model.config import ModelConfig

_NORMS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}
_GATED = {"silu": "SwiGLU", "gelu": "GeGLU", "gelu_tanh": "GeGLU (tanh)", "relu": "ReGLU"}
_PLAIN = {"silu": "SiLU", "gelu": "GELU", "gelu_tanh": "GELU (tanh)", "relu": "ReLU"}


def describe_shape(config: ModelConfig) -> str:
    """For example "5 layers x 256, 4 query and 2 key/value heads of 64, pre-norm RMSNorm, rotary positions, ..."."""
    encoder = f"{config.n_encoder_layers} encoder and " if config.n_encoder_layers else ""
    parts = [
        f"{encoder}{config.n_layers} {'decoder ' if encoder else ''}layer{'s' if config.n_layers > 1 else ''}"
        f" x {config.width}",
        _heads(config),
        _norm(config),
        _positions(config),
        _feed_forward(config),
        *_extras(config),
        f"{'tied ' if config.tied_head else ''}vocabulary {config.vocab_size}",
        f"context {config.context}",
    ]
    return ", ".join(parts)


def describe_size(n_params: int) -> str:
    """Parameters in millions, where there are that many."""
    return f"{n_params / 1e6:.2f} M" if n_params >= 10_000 else str(n_params)


def _heads(config: ModelConfig) -> str:
    heads, kv_heads, size = config.n_heads, config.n_kv_heads, config.head_dim
    if heads == kv_heads:
        return f"{heads} head{'s' if heads > 1 else ''} of {size}"
    return f"{heads} query and {kv_heads} key/value head{'s' if kv_heads > 1 else ''} of {size}"


def _norm(config: ModelConfig) -> str:
    if config.norm == "none":
        return "no norm"
    text = f"{config.norm_position}-norm {_NORMS[config.norm]}"
    return (
        text
        if config.final_norm == (config.norm_position == "pre")
        else f"{text} {_with(config.final_norm)} final norm"
    )


def _positions(config: ModelConfig) -> str:
    if config.positions == "none":
        return "no positions"
    turned = "" if config.rotary_dim is None else f" of {config.rotary_dim} numbers a head"
    scaling = "" if config.rope_scaling is None else f" ({config.rope_scaling.kind} scaling)"
    return f"{config.positions} positions{turned}{scaling}"


def _feed_forward(config: ModelConfig) -> str:
    if not config.mlp_width:
        return "no feed-forward"
    return f"{(_GATED if config.gated else _PLAIN)[config.activation]} {config.mlp_width}"


def _extras(config: ModelConfig) -> list[str]:
    """What not every decoder has."""
    biases = {"q/k/v": config.qkv_bias, "output": config.out_bias, "feed-forward": config.mlp_bias}
    biased = [name for name, there in (biases | {"head": config.head_bias}).items() if there]
    extras = {
        f"biases of {' and '.join(biased)}": bool(biased),
        "no output projection": not config.out_projection,
        "q/k norm": config.qk_norm,
        "parallel residual": config.parallel_residual,
        f"sliding window {config.sliding_window}": config.sliding_window is not None,
        "scores over the root of the width": config.attention_scale == "width",
        f"embeddings x {config.embedding_scale:.4g}": config.embedding_scale != 1.0,
        f"logits capped at {config.logit_soft_cap}": config.logit_soft_cap is not None,
    }
    return [words for words, there in extras.items() if there]


def _with(there: bool) -> str:
    return "with" if there else "without"
