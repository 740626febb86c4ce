"""Presets: named model configurations for training from scratch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

from model.config import ConfigError, LayerKind, ModelConfig

Arch = Literal["llama", "gpt", "textbook"]
ARCHS: tuple[Arch, ...] = get_args(Arch)
"""Layouts available in every size."""


def preset(name: str, arch: Arch | None = None) -> ModelConfig:
    """The preset `name`, or a network of its size in another layout; docs/train.md describes each preset."""
    if name not in _PRESETS:
        raise ConfigError(f"unknown preset {name!r}; available: {', '.join(PRESET_NAMES)}")
    size = _PRESETS[name]
    if arch is None or (arch == "llama" and name in SIZES):
        return size
    if name not in SIZES:
        raise ConfigError(f"--arch {arch} needs one of the presets {', '.join(SIZES)}; {name} has its own layout")
    shape = (size.n_layers, size.width, size.n_heads, size.vocab_size, size.context)
    return _gpt(*shape) if arch == "gpt" else _textbook(*shape)


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, context: int) -> ModelConfig:
    return ModelConfig(
        n_layers=layers,
        width=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=64 if width > 128 else 32,
        mlp_width=mlp,
        vocab_size=vocab,
        context=context,
    )


def _classic(layers: int, width: int, heads: int, vocab: int, context: int, **switches: Any) -> ModelConfig:
    """The layout before llama: one kv head per head, an ungated feed-forward of 4 x width, LayerNorm, biases."""
    shape = {"n_layers": layers, "width": width, "n_heads": heads, "n_kv_heads": heads, "head_dim": width // heads}
    biases = {"norm_bias": True, "qkv_bias": True, "out_bias": True, "mlp_bias": True}
    common = {"vocab_size": vocab, "context": context, "mlp_width": 4 * width, "norm": "layernorm", "gated": False}
    return ModelConfig(**{**shape, **biases, **common, **switches})


_POST_NORM = {"norm_position": "post", "final_norm": False, "activation": "relu", "tied_head": False, "head_bias": True}
_UNROTATED = (LayerKind(),)


def _gpt(layers: int, width: int, heads: int, vocab: int, context: int) -> ModelConfig:
    """GPT-2's layout with the exact GELU."""
    return _classic(
        layers, width, heads, vocab, context, positions="learned", layer_kinds=_UNROTATED, activation="gelu"
    )


def _textbook(layers: int, width: int, heads: int, vocab: int, context: int) -> ModelConfig:
    """The decoder of "Attention is all you need" without its encoder (arXiv:1706.03762)."""
    scaled = {"positions": "sinusoidal", "layer_kinds": _UNROTATED, "embedding_scale": width**0.5}
    return _classic(layers, width, heads, vocab, context, **scaled, **_POST_NORM)


_PRESETS = {
    "nano": _llama(4, 128, 4, 2, 352, 1024, 256),
    "small": _llama(5, 256, 4, 2, 704, 4096, 512),
    "base": _llama(8, 384, 6, 2, 896, 8192, 1024),
    # Depth and width of the smallest GPT-2, a common baseline (124 M: three times the keys and values and three times
    # the vocabulary, which corpora smaller than its own do not fill).
    "medium": _llama(12, 768, 12, 4, 2048, 16_384, 1024),
    "textbook": _textbook(6, 512, 8, 10_000, 512),
    # A post-norm decoder block as often written from scratch: scores are divided by the square root of the width.
    "standalone": _classic(
        4,
        256,
        4,
        4096,
        256,
        positions="learned",
        layer_kinds=_UNROTATED,
        qkv_bias=False,
        attention_scale="width",
        **_POST_NORM,
    ),
    # One layer with one head of size 2: small enough to compute by hand.
    "toy": ModelConfig(
        n_layers=1,
        width=2,
        n_heads=1,
        n_kv_heads=1,
        head_dim=2,
        mlp_width=0,
        vocab_size=6,
        context=6,
        norm="none",
        final_norm=False,
        positions="sinusoidal",
        layer_kinds=_UNROTATED,
        out_projection=False,
        tied_head=False,
        head_bias=True,
    ),
    "gpt": _gpt(6, 384, 6, 4096, 256),
    # The original encoder-decoder.
    "cross": _classic(
        3,
        256,
        4,
        4096,
        128,
        positions="sinusoidal",
        layer_kinds=_UNROTATED,
        embedding_scale=16.0,
        n_encoder_layers=3,
        **_POST_NORM,
    ),
}
PRESET_NAMES = tuple(_PRESETS)
SIZES = ("nano", "small", "base", "medium")
"""Presets of the llama layout, from small to large."""


def reshaped(
    config: ModelConfig,
    *,
    n_layers: int | None = None,
    width: int | None = None,
    n_heads: int | None = None,
    n_kv_heads: int | None = None,
    mlp_width: int | None = None,
) -> ModelConfig:
    """The same architecture in another size; dimensions not given scale in proportion. Raises ConfigError."""
    layers, new_width, heads = n_layers or config.n_layers, width or config.width, n_heads or config.n_heads
    if (width or n_heads) and new_width % heads:
        raise ConfigError(f"width {new_width} is not divisible by {heads} heads; choose a multiple (--width, --heads)")
    group = config.n_heads // config.n_kv_heads
    kv_heads = n_kv_heads or (heads if heads % group else heads // group)
    if heads % kv_heads:
        raise ConfigError(
            f"{heads} heads are not divisible by {kv_heads} key/value heads; choose a divisor (--heads, --kv-heads)"
        )
    return replace(
        config,
        n_layers=layers,
        n_encoder_layers=layers if config.n_encoder_layers else 0,
        width=new_width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=new_width // heads if width or n_heads else config.head_dim,
        mlp_width=mlp_width or config.mlp_width * new_width // config.width,
        # Scaled embeddings are scaled by the square root of the width.
        embedding_scale=config.embedding_scale if config.embedding_scale == 1.0 else new_width**0.5,
    )
