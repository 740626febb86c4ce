"""Specification of a model family: how to read its config.json, and how to map its tensors to ours.

Tensors are torch's, or numpy's arrays where the C++ kernels take them: mappings use what both have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.config import Activation, ConfigError, LayerKind, ModelConfig, Rope, check_field
from model.parameter_shapes import parameter_shapes

Raw = Mapping[str, Any]
Shape = tuple[int, ...]
Tensor = Any
"""A torch.Tensor or a numpy array."""
_MAX_LAYERS = 4096
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def _same(tensor: Tensor) -> Tensor:
    return tensor


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """A Decoder tensor, and the tensors of the file that it concatenates, in order."""

    target: str
    source: tuple[tuple[str, Shape], ...]
    """Names and shapes in the file."""
    load: Callable[[Tensor], Tensor] = _same
    """Converts the file's layout to the Decoder's."""
    save: Callable[[Tensor], Tensor] = _same
    """The inverse of `load`."""

    def without_prefix(self, prefix: str) -> TensorMapping:
        """The same from files whose names lack `prefix`."""
        return replace(self, source=tuple((name.removeprefix(prefix), shape) for name, shape in self.source))


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """One Hugging Face model_type."""

    name: str
    architecture: str
    """The transformers class that loads our exports."""
    read: Callable[[Raw], ModelConfig]
    """config.json -> ModelConfig. Raises ConfigError, KeyError, TypeError or ValueError."""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """ModelConfig -> config.json; valid only if read() returns the same ModelConfig.

    None if no model of this type is trained from scratch: fine-tuning keeps the config.json that it finds.
    """
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Modules (or tensors outside of modules) of the Decoder -> names in the files, with N for the number of the layer.

    Several names are q, k, v of attention.qkv, and gate, up of mlp.up. Without names, the files have the Decoder's. A
    family whose head is always the embedding has no untied_head.
    """
    layout: Callable[[ModelConfig, TensorMapping], TensorMapping] = lambda _config, mapping: mapping
    """Adds the conversion of a tensor that the files store in another layout."""
    prefix: str = ""
    """Prefix that tensor names lack if the model was saved without its head."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Names of redundant buffers that older exporters stored."""

    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """Each tensor of the Decoder, in the order of the computation."""
        mappings = []
        for target, (rows, *columns) in parameter_shapes(config).items():
            sources = self._sources(target)
            counts = [rows // len(sources)] * len(sources)
            if len(sources) == 3:
                counts = [config.head_dim * heads for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
            shapes = tuple((name, (count, *columns)) for name, count in zip(sources, counts, strict=True))
            mappings.append(self.layout(config, TensorMapping(target, shapes)))
        return mappings

    def _sources(self, target: str) -> list[str]:
        """Names of the file's tensors that make up the Decoder's tensor `target`."""
        if not self.names:
            return [target]
        layer = _LAYER.search(target)
        module, _, suffix = _LAYER.sub("N", target).rpartition(".")
        if (found := self.names.get(module or suffix)) is None:
            raise ConfigError(f"a {self.name} with {target} is not supported")
        names = (found,) if isinstance(found, str) else found
        number = layer[0] if layer else ""
        return [name.replace(".N.", f".{number}.") + (f".{suffix}" if module else "") for name in names]

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor that the files must hold; they hold no others."""
        return {name: shape for mapping in self.mappings(config) for name, shape in mapping.source}

    def save(self, config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The family's tensors, split from the Decoder's."""
        tensors: dict[str, Tensor] = {}
        for mapping in self.mappings(config):
            whole = mapping.save(state[mapping.target])
            parts = whole.split([shape[0] for _, shape in mapping.source])
            tensors |= {name: part.contiguous() for (name, _), part in zip(mapping.source, parts, strict=True)}
        return tensors


_ACTIVATIONS: dict[str, Activation] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
    "relu2": "relu2",
}
"""Of activations without parameters: no family reads others by their name alone."""
ACTIVATION_NAMES: dict[Activation, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_new",
    "silu": "silu",
    "relu2": "relu2",
    "xielu": "xielu",
}


def activation(name: object) -> Activation:
    """Activation for the name in transformers. Raises ConfigError."""
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise ConfigError(f"activation {name!r} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def rope_parameters(raw: Raw) -> Mapping[str, Any]:
    """rope_parameters of transformers 5, or rope_scaling of older versions, which wins if both are present."""
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"the rope scaling must be an object, not {rope!r}")
    return rope


def read_rope(raw: Raw, dim: int | None = None) -> Rope:
    """The rotation of a config.json of transformers 4 or 5. dim: see Rope. Raises ConfigError, KeyError.

    A family with several rotations makes the others itself, as Rope(theta=...): these keys are for all layers.
    """
    rope = rope_parameters(raw)
    places = ((rope, "rope_theta"), (raw, "rotary_emb_base"), (raw, "rope_theta"))
    bases = ((key, place[key]) for place, key in places if place.get(key) is not None)
    key, theta = next(bases, ("rope_theta", 10_000.0))
    check_field("theta", theta, key, Rope)
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "linear", "llama3"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; supported: default, linear, llama3")
    if kind == "default":
        return Rope(theta=theta, dim=dim)
    if kind == "linear":
        return Rope(theta=theta, dim=dim, kind="linear", factor=rope["factor"])
    return Rope(
        theta=theta,
        dim=dim,
        kind="llama3",
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_context=raw.get("original_max_position_embeddings")
        or rope.get("original_max_position_embeddings")
        or raw["max_position_embeddings"],
    )


def write_rope(rope: Rope) -> dict[str, Any]:
    """RoPE keys for transformers 4 and 5."""
    keys: dict[str, Any] = {"rope_type": rope.kind}
    if rope.kind != "default":
        keys["factor"] = rope.factor
    if rope.kind == "llama3":
        keys["low_freq_factor"], keys["high_freq_factor"] = rope.low_freq_factor, rope.high_freq_factor
        keys["original_max_position_embeddings"] = rope.original_context
    return {
        "rope_theta": rope.theta,
        "rope_scaling": None if rope.kind == "default" else keys,
        "rope_parameters": {**keys, "rope_theta": rope.theta},
    }


def read_layers(n_layers: int, kind_of: Callable[[int], LayerKind]) -> dict[str, Any]:
    """layer_kinds and layer_types of a ModelConfig, from the kind of the layer with each index. Raises ConfigError."""
    if n_layers > _MAX_LAYERS:  # the file may ask for billions
        raise ConfigError(f"{n_layers} layers of several kinds are not supported, at most {_MAX_LAYERS}")
    kinds = [kind_of(layer) for layer in range(n_layers)]
    different = tuple(dict.fromkeys(kinds))
    types = tuple(map(different.index, kinds)) if len(different) > 1 else ()
    return {"layer_kinds": different, "layer_types": types}


_DERIVED = {"n_kv_heads", "head_dim", "mlp_width"}
"""Fields that families compute from others if an optional key is null or 0."""


def read_fields(raw: Raw, keys: Mapping[str, str], **defaults: Any) -> dict[str, Any]:
    """Fields of ModelConfig. keys: field -> key of the config.json.

    Raises KeyError without a key and its default, and ConfigError with the name of the key for an invalid value.
    """
    values = {field: raw.get(key, defaults[field]) if field in defaults else raw[key] for field, key in keys.items()}
    for name, value in values.items():
        if value or not (name in defaults and name in _DERIVED):
            check_field(name, value, keys[name])
    return values


def write_fields(config: ModelConfig, keys: Mapping[str, str]) -> dict[str, Any]:
    """The inverse of read_fields()."""
    return {key: getattr(config, field) for field, key in keys.items()}


def head_size(raw: Raw, width: str, heads: str) -> int:
    """Width divided by the number of heads. Raises ConfigError if not divisible."""
    if raw[width] % raw[heads]:
        raise ConfigError(f"{width} ({raw[width]}) must be a multiple of {heads} ({raw[heads]})")
    size: int = raw[width] // raw[heads]
    return size


def require_values(raw: Raw, **allowed: Any) -> None:
    """Raises ConfigError if a key has an unsupported value: ignoring it would serve a different model."""
    for key, value in allowed.items():
        if raw.get(key, value) != value:
            raise ConfigError(f"{key} {raw[key]!r} is not supported, only {value!r}")
