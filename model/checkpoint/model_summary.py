"""Model summary, line by line: shape, size, memory."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import MISSING, fields

from model.config import ModelConfig, Rope
from model.decoder_program import cost, decoder_program
from model.parameter_shapes import count_active_parameters

Line = tuple[str, str]
"""(label, value)."""

_DTYPES = {"float32": 4, "bfloat16": 2}
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


def shape_lines(config: ModelConfig) -> list[Line]:
    """The architecture, as printed by `inkstream check` and listed in a model card."""
    return [
        ("shape", f"{config.n_layers} layers x {config.width}, context {config.context}"),
        ("attention", f"{config.n_heads} heads, {config.n_kv_heads} kv heads, head_dim {config.head_dim}"),
        ("layers", "; ".join(_layers(config))),
        ("feed-forward", _feed_forward(config)),
        ("switches", ", ".join(_changed(config, but=("layer_kinds", "layer_types", "experts"))) or "the defaults"),
    ]


def _feed_forward(config: ModelConfig) -> str:
    if not (experts := config.experts):
        return str(config.mlp_width or "none")
    parts = [f"{experts.chosen} of {experts.count} experts of {experts.width}"]
    parts += [f"{experts.shared_width} that all tokens share"] if experts.shared_width else []
    parts += [f"{config.mlp_width} in dense layers"] if config.mlp_width else []
    weights = f"weights by {experts.score}" + ", normalized" * experts.normalized
    return ", ".join([*parts, weights + (f", times {experts.factor}" if experts.factor != 1.0 else "")])


def _layers(config: ModelConfig) -> Iterator[str]:
    """For each kind of layer how many there are, what they see, and how they rotate."""
    layers = config.layers
    for kind in config.layer_kinds:
        sees = "all tokens" if kind.window is None else f"{kind.window:,} tokens"
        rotation = f"rope {', '.join(_changed(kind.rope)) or 'of the defaults'}" if kind.rope else "no rope"
        yield f"{layers.count(kind)} see {sees}, {rotation}" + f", {kind.mlp}" * (config.experts is not None)


def _changed(values: ModelConfig | Rope, but: Container[str] = ()) -> list[str]:
    """The fields that do not have their defaults; of lists only how long they are."""
    found = {field.name: getattr(values, field.name) for field in fields(values) if field.name not in but}
    defaults = {field.name: field.default for field in fields(values) if field.default is not MISSING}
    return [
        f"{name} {f'of {len(value)} numbers' if isinstance(value, tuple) else value}"
        for name, value in found.items()
        if name in defaults and value != defaults[name]
    ]


def memory_lines(config: ModelConfig, n_params: int, context_bytes: Mapping[str, int]) -> list[Line]:
    """Memory of weights and KV cache in each dtype that the service supports.

    context_bytes: of the KV cache of a full context, for each dtype.
    """
    active = f", {describe_size(count_active_parameters(config))} active for a token" if config.experts else ""
    lines = [("parameters", describe_size(n_params) + active)]
    whole = config.windows.count(None)
    for name, size in _DTYPES.items():
        token = config.kv_elements_per_token * size
        cache = f"{describe_bytes(token)} of KV cache a token"
        if 0 < whole < config.n_layers:
            cache += f" ({describe_bytes(token * whole // config.n_layers)} beyond the windows)"
        cache += f", {describe_bytes(context_bytes[name])} a full context"
        lines.append((name, f"{describe_bytes(n_params * size)} of weights, {cache}"))
    return lines


def cost_lines(config: ModelConfig) -> list[Line]:
    """What one token costs at a full context: operations, and bytes that are read for a sequence that runs alone."""
    costs = [cost(config, operation, config.context) for operation in decoder_program(config)]
    flops, weights, cached = (sum(getattr(each, name) for each in costs) for name in ("flops", "parameters", "cached"))
    reads = (f"{describe_bytes((weights + cached) * size)} in {name}" for name, size in _DTYPES.items())
    return [("one token", f"{flops / 1e6:,.4g} MFLOP at a full context; reads {', '.join(reads)}")]


def describe_size(n_params: int) -> str:
    """Parameter count, in millions from 10,000 on."""
    return f"{n_params / 1e6:.2f} M" if n_params >= 10_000 else str(n_params)


def describe_bytes(n_bytes: int) -> str:
    """`n_bytes` in the largest binary unit that leaves a number of at least 1."""
    value, unit = float(n_bytes), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.4g} {_UNITS[unit]}"
