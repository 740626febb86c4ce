"""Specification of a model family: how to read its config.json, and how to map its tensors to ours."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from model.config import Activation, ConfigError, ModelConfig, RopeScaling

Raw = Mapping[str, Any]
Shape = tuple[int, ...]


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """One tensor of ours and the file's tensors that it stacks, in order."""

    ours: str
    theirs: tuple[tuple[str, Shape], ...]
    """Names and shapes in the file."""
    load: Callable[[Tensor], Tensor] = _same
    """From the file's form to ours."""
    save: Callable[[Tensor], Tensor] = _same
    """And back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """One Hugging Face model_type."""

    name: str
    architecture: str
    """The class of transformers that reads what we export."""
    read: Callable[[Raw], ModelConfig]
    """config.json -> ModelConfig. Raises ConfigError, KeyError, TypeError or ValueError."""
    write: Callable[[ModelConfig], dict[str, Any]]
    """ModelConfig -> config.json; only meaningful where read() gives the same ModelConfig back."""
    pieces: Callable[[ModelConfig], list[TensorMapping]]
    prefix: str = ""
    """What the names lose where a model was saved without its head."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Names of buffers that older exporters stored; they say nothing new."""

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor that the files must hold, no more and no fewer."""
        return {name: shape for piece in self.pieces(config) for name, shape in piece.theirs}

    def load(
        self, config: ModelConfig, get: Callable[[str], Tensor], empty: Callable[..., Tensor]
    ) -> dict[str, Tensor]:
        """State dict of our Decoder; `get` fetches a tensor by the file's name, `empty` makes one of a shape."""
        return {piece.ours: _assembled(piece, get, empty) for piece in self.pieces(config)}

    def save(self, config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The family's tensors, cut out of ours."""
        tensors: dict[str, Tensor] = {}
        for piece in self.pieces(config):
            whole = piece.save(state[piece.ours])
            parts = whole.split([shape[0] for _, shape in piece.theirs])
            tensors |= {name: part.contiguous() for (name, _), part in zip(piece.theirs, parts, strict=True)}
        return tensors


def _assembled(piece: TensorMapping, get: Callable[[str], Tensor], empty: Callable[..., Tensor]) -> Tensor:
    """A tensor of several parts is made once and filled part by part: at most one part is in memory besides it."""
    if len(piece.theirs) == 1:
        return piece.load(get(piece.theirs[0][0])).contiguous()
    rows = [shape[0] for _, shape in piece.theirs]
    whole, start = empty(sum(rows), *piece.theirs[0][1][1:]), 0
    for (name, _), count in zip(piece.theirs, rows, strict=True):
        whole[start : start + count] = piece.load(get(name))
        start += count
    return whole


def single(ours: str, theirs: str, *shape: int) -> TensorMapping:
    """A tensor that both sides have in the same form."""
    return TensorMapping(ours, ((theirs, shape),))


def linear(ours: str, theirs: Sequence[tuple[str, int]], columns: int, *, bias: bool) -> list[TensorMapping]:
    """A matrix of ours, and its bias, from the file's matrices (name, rows) behind one another."""
    weights = tuple((f"{name}.weight", (rows, columns)) for name, rows in theirs)
    biases = tuple((f"{name}.bias", (rows,)) for name, rows in theirs)
    return [TensorMapping(f"{ours}.weight", weights)] + ([TensorMapping(f"{ours}.bias", biases)] if bias else [])


def norm(ours: str, theirs: str, config: ModelConfig) -> list[TensorMapping]:
    """The scale of a norm over the width, and its shift where it has one."""
    names = ("weight", "bias") if config.norm_bias else ("weight",)
    return [single(f"{ours}.{name}", f"{theirs}.{name}", config.width) for name in names]


_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATION_NAMES: dict[Activation, str] = {"relu": "relu", "gelu": "gelu", "gelu_tanh": "gelu_new", "silu": "silu"}


def activation(name: object) -> Activation:
    """Ours for the name that transformers gives. Raises ConfigError."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_parameters(raw: Raw) -> Mapping[str, Any]:
    """What transformers calls rope_parameters since 5 and rope_scaling before; given both, it reads the older one."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"the rope scaling must be an object, not {rope!r}")
    return rope


def read_rope(raw: Raw) -> dict[str, Any]:
    """rope_theta and rope_scaling of a config.json, from wherever transformers 4 and 5 keep them."""
    rope = rope_parameters(raw)
    theta = rope.get("rope_theta") or raw.get("rotary_emb_base") or raw.get("rope_theta") or 10_000.0
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    if kind == "default":
        return {"rope_theta": theta, "rope_scaling": None}
    if kind == "linear":
        return {"rope_theta": theta, "rope_scaling": RopeScaling(kind="linear", factor=rope["factor"])}
    scaling = RopeScaling(
        kind="llama3",
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=raw.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or raw["max_position_embeddings"],
    )
    return {"rope_theta": theta, "rope_scaling": scaling}


def write_rope(config: ModelConfig) -> dict[str, Any]:
    """Keys that transformers 4 and 5 both read."""
    scaling, kind = config.rope_scaling, config.rope_scaling.kind if config.rope_scaling else "default"
    rope: dict[str, Any] = {"rope_type": kind}
    if scaling:
        rope["factor"] = scaling.factor
    if scaling and scaling.kind == "llama3":
        rope["low_freq_factor"], rope["high_freq_factor"] = scaling.low_freq_factor, scaling.high_freq_factor
        rope["original_max_position_embeddings"] = scaling.original_context
    return {
        "rope_theta": config.rope_theta,
        "rope_scaling": rope if scaling else None,
        "rope_parameters": {**rope, "rope_theta": config.rope_theta},
    }


def divided(raw: Raw, width: str, heads: str) -> int:
    """The size of a head where the heads share the width. Raises ConfigError."""
    if raw[width] % raw[heads]:
        raise ConfigError(f"{width} ({raw[width]}) must be a multiple of {heads} ({raw[heads]})")
    size: int = raw[width] // raw[heads]
    return size


def refuse(raw: Raw, **allowed: Any) -> None:
    """A switch that we would have to ignore is refused: ignoring it serves another model than the one given."""
    for key, value in allowed.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"{key} {raw[key]!r} is not supported, only {value!r}")
