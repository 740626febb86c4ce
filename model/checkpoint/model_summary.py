"""Model summary, line by line: shape, size, memory."""

from __future__ import annotations

from model.config import ModelConfig

Line = tuple[str, str]
"""(label, value)."""

_DTYPES = {"float32": 4, "bfloat16": 2}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def shape_lines(config: ModelConfig) -> list[Line]:
    """The architecture, as printed by `inkstream check` and listed in a model card."""
    encoder = f", encoder of {config.n_encoder_layers} layers with cross-attention" if config.n_encoder_layers else ""
    parallel = ", attention and feed-forward in parallel" if config.parallel_residual else ""
    lines = [
        ("shape", f"{config.n_layers} layers x {config.width}, context {config.context}{encoder}{parallel}"),
        ("attention", _attention(config)),
        ("positions", _positions(config)),
        ("norm", _norm(config)),
        ("feed-forward", _feed_forward(config)),
        ("head", _head(config)),
    ]
    return [*lines, ("embedding", f"times {config.embedding_scale:g}")] if config.embedding_scale != 1.0 else lines


def memory_lines(config: ModelConfig, n_params: int) -> list[Line]:
    """Memory of weights and KV cache in each dtype that the service supports."""
    lines = [("parameters", describe_size(n_params))]
    for name, size in _DTYPES.items():
        token = config.kv_elements_per_token * size
        cache = f"{describe_bytes(token)} of KV cache a token, {describe_bytes(token * config.context)} a full context"
        lines.append((name, f"{describe_bytes(n_params * size)} of weights, {cache}"))
    return lines


def describe_size(n_params: int) -> str:
    """Parameter count, in millions from 10,000 on."""
    return f"{n_params / 1e6:.2f} M" if n_params >= 10_000 else str(n_params)


def describe_bytes(n_bytes: int) -> str:
    """`n_bytes` in the largest binary unit that leaves a number of at least 1."""
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"


def _attention(config: ModelConfig) -> str:
    biases = {"q, k, v": config.qkv_bias, "output": config.out_bias}
    parts = [
        f"{config.n_heads} heads, {config.n_kv_heads} kv heads, head_dim {config.head_dim}",
        "no window" if config.sliding_window is None else f"sliding window {config.sliding_window}",
        f"scale 1/sqrt({config.attention_scale})",
        f"bias: {', '.join(name for name, there in biases.items() if there) or 'none'}",
    ]
    return ", ".join([*parts, *["qk-norm"] * config.qk_norm, *["no output projection"] * (not config.out_projection)])


def _positions(config: ModelConfig) -> str:
    if config.positions != "rotary":
        return config.positions
    part = (
        ""
        if config.effective_rotary_dim == config.head_dim
        else f" over {config.effective_rotary_dim} of {config.head_dim}"
    )
    scaling = config.rope_scaling
    how = f"{scaling.kind} x {scaling.factor:g}" if scaling else "none"
    return f"rotary{part}, theta {config.rope_theta:g}, scaling {how}"


def _norm(config: ModelConfig) -> str:
    if config.norm == "none":
        return "none"
    bias, final = "with bias" if config.norm_bias else "without bias", "with" if config.final_norm else "without"
    return f"{config.norm} {bias}, position {config.norm_position}, {final} final norm, eps {config.norm_eps:g}"


def _feed_forward(config: ModelConfig) -> str:
    if not config.mlp_width:
        return "none"
    gated, bias = "gated" if config.gated else "not gated", "bias" if config.mlp_bias else "no bias"
    return f"{config.mlp_width}, {config.activation}, {gated}, {bias}"


def _head(config: ModelConfig) -> str:
    cap = "" if config.logit_soft_cap is None else f", soft cap {config.logit_soft_cap:g}"
    return f"{'tied' if config.tied_head else 'untied'}, {'bias' if config.head_bias else 'no bias'}{cap}"
