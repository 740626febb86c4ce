"""Names and shapes of a decoder's parameters, from its configuration alone."""

from __future__ import annotations

import math

from model.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Shapes of `Decoder(config).state_dict()` (model/nn/transformer.py), in its order."""
    c, shapes = config, Shapes()
    shapes["embedding"] = (c.vocab_size, c.width)
    if c.positions == "learned":
        shapes["position_embedding"] = (c.context, c.width)
    if not c.tied_head:
        shapes["untied_head"] = (c.vocab_size, c.width)
    if c.head_bias:
        shapes["head_bias"] = (c.vocab_size,)
    for layer in range(c.n_encoder_layers):
        shapes |= _block(c, f"encoder_blocks.{layer}", cross=False)
    if c.n_encoder_layers and c.final_norm:
        shapes |= _norm(c, "encoder_norm")
    for layer in range(c.n_layers):
        shapes |= _block(c, f"blocks.{layer}", cross=c.n_encoder_layers > 0)
    if c.final_norm:
        shapes |= _norm(c, "norm")
    return shapes


def count_parameters(config: ModelConfig) -> int:
    """Number of parameters; a tied head counts once."""
    return sum(map(math.prod, parameter_shapes(config).values()))


def _block(c: ModelConfig, name: str, *, cross: bool) -> Shapes:
    heads, kv_heads = c.n_heads * c.head_dim, 2 * c.n_kv_heads * c.head_dim
    shapes = _norm(c, f"{name}.norm_attention")
    shapes |= _linear(f"{name}.attention.qkv", heads + kv_heads, c.width, bias=c.qkv_bias)
    if c.qk_norm:
        shapes |= {f"{name}.attention.{each}.weight": (c.head_dim,) for each in ("q_norm", "k_norm")}
    shapes |= _out_projection(c, f"{name}.attention")
    if cross:
        shapes |= _norm(c, f"{name}.norm_cross")
        shapes |= _linear(f"{name}.cross.q", heads, c.width, bias=c.qkv_bias)
        shapes |= _linear(f"{name}.cross.kv", kv_heads, c.width, bias=c.qkv_bias)
        shapes |= _out_projection(c, f"{name}.cross")
    if c.mlp_width:
        shapes |= _norm(c, f"{name}.norm_mlp")
        shapes |= _linear(f"{name}.mlp.up", c.mlp_width * (2 if c.gated else 1), c.width, bias=c.mlp_bias)
        shapes |= _linear(f"{name}.mlp.down", c.width, c.mlp_width, bias=c.mlp_bias)
    return shapes


def _out_projection(c: ModelConfig, name: str) -> Shapes:
    return _linear(f"{name}.out", c.width, c.n_heads * c.head_dim, bias=c.out_bias) if c.out_projection else {}


def _linear(name: str, rows: int, columns: int, *, bias: bool) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | {f"{name}.bias": (rows,)} if bias else weight


def _norm(c: ModelConfig, name: str) -> Shapes:
    if c.norm == "none":
        return {}
    weight: Shapes = {f"{name}.weight": (c.width,)}
    return weight | {f"{name}.bias": (c.width,)} if c.norm_bias else weight
