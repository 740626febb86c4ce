"""Specification of a model family: how to read its config.json, and how to map its tensors to ours.

Tensors are torch's, or numpy's arrays where the C++ kernels take them: mappings use what both have in common.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from model.config import Activation, ConfigError, Experts, LayerKind, ModelConfig, Size, check_field, check_value
from model.parameter_shapes import parameter_shapes

Raw = Mapping[str, Any]
Shape = tuple[int, ...]
Tensor = Any
"""A torch.Tensor or a numpy array."""
_MAX_LAYERS = 4096
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")


def _same(unchanged: Any) -> Any:
    return unchanged


@dataclass(frozen=True, slots=True)
class Conversion:
    """Between the file's layout of a tensor and the Decoder's (model/families/layouts.py)."""

    load: Callable[[Tensor], Tensor] = _same
    save: Callable[[Tensor], Tensor] = _same
    """The inverse of `load`."""


@dataclass(frozen=True, slots=True)
class TensorMapping:
    """A Decoder tensor, and the tensors of the file that it concatenates, in order."""

    target: str
    source: tuple[tuple[str, Shape], ...]
    """Names and shapes in the file."""
    conversions: tuple[Conversion, ...] = ()
    """Of each source; empty if the file has the Decoder's layout."""
    constants: tuple[tuple[str, float], ...] = ()
    """Names and numbers of scalars that files store beside the sources, and that a Decoder cannot vary."""
    shape: Shape | None = None
    """Of the Decoder's tensor, if the sources have one dimension less, as those of single experts."""

    def load(self, index: int, tensor: Tensor) -> Tensor:
        """Source `index` in the Decoder's layout."""
        return self.conversion(index).load(tensor)

    def save(self, whole: Tensor) -> dict[str, Tensor]:
        """The file's tensors, by name."""
        tensors = {name: self.save_part(index, whole).contiguous() for index, (name, _) in enumerate(self.source)}
        return tensors | {name: whole.new_tensor(number) for name, number in self.constants}

    def save_part(self, index: int, whole: Tensor) -> Tensor:
        """Source `index` in the file's layout, which may be a view."""
        rows = whole.reshape(-1, *self.source[0][1][1:]) if self.shape else whole
        if len(self.source) > 1:
            start = sum(shape[0] for _, shape in self.source[:index])
            rows = rows[start : start + self.source[index][1][0]]
        return self.conversion(index).save(rows)

    def conversion(self, index: int) -> Conversion:
        """Of source `index`."""
        return self.conversions[index] if self.conversions else Conversion()

    def renamed(self, rename: Callable[[str], str]) -> TensorMapping:
        """The same from files with other names."""
        source = tuple((rename(name), shape) for name, shape in self.source)
        return replace(self, source=source, constants=tuple((rename(name), number) for name, number in self.constants))


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapper:
    """A model of several media around a text decoder, which its text_config describes."""

    name: str
    """Its model_type."""
    models: str
    """See FamilySpec."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the text_config that its files leave out."""
    skipped: re.Pattern[str] = re.compile(
        r"(model\.)?(vision_(tower|model|encoder)|visual|audio_(tower|model|encoder)"
        r"|(multi_modal|embed_vision|embed_audio|patch_merger)[a-z_]*|vision_language_adapter)\..+"
    )
    """Names of tensors that no text needs."""

    def names(self, name: str) -> tuple[str, ...]:
        """What the files of this model may call a tensor of the text decoder."""
        inner = name.removeprefix("model.")
        if inner == name:  # of the head
            return name, f"language_model.{name}"
        return f"model.language_model.{inner}", f"language_model.model.{inner}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilySpec:
    """One Hugging Face model_type."""

    name: str
    architecture: str
    """The transformers class that loads our exports."""
    models: str = ""
    """Some of its models, for docs/bring-your-model.md."""
    read: Callable[[Raw], ModelConfig]
    """config.json -> ModelConfig. Raises ConfigError, KeyError, TypeError or ValueError."""
    write: Callable[[ModelConfig], dict[str, Any]] | None = None
    """ModelConfig -> config.json; valid only if read() returns the same ModelConfig.

    None if no model of this type is trained from scratch: fine-tuning keeps the config.json that it finds.
    """
    names: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Modules (or whole tensors) of the Decoder -> names in the files, with N for the number of the layer.

    Several names are q, k, v of attention.qkv, and gate, up of mlp.up. E stands for the number of an expert. Without
    names, the files have the Decoder's. A family whose head is always the embedding has no untied_head.
    """
    fused: Mapping[str, str] = field(default_factory=dict)
    """Changes of `names` in files that store the experts of a layer together, as transformers has them in memory."""
    layout: Callable[[ModelConfig, TensorMapping], TensorMapping] = lambda _config, mapping: mapping
    """Adds the conversion of a tensor that the files store in another layout."""
    prefix: str = ""
    """Prefix that tensor names lack if the model was saved without its head."""
    ignored: re.Pattern[str] = re.compile(r"(?!)")
    """Names of redundant buffers that older exporters stored."""
    wrapper: Wrapper | None = None
    """The model of several media that has this text decoder."""

    def mappings(self, config: ModelConfig) -> list[TensorMapping]:
        """Each tensor of the Decoder, in the order of the computation."""
        return [
            self.layout(config, self._mapping(config, target, shape))
            for target, shape in parameter_shapes(config).items()
        ]

    def _mapping(self, config: ModelConfig, target: str, shape: Shape) -> TensorMapping:
        sources, (rows, *columns) = self._sources(target), shape
        if config.experts and ".E." in sources[0]:
            numbers = range(config.experts.count)
            names = [name.replace(".E.", f".{number}.") for number in numbers for name in sources]
            of_one = (columns[0] // len(sources), *columns[1:])
            return TensorMapping(target, tuple((name, of_one) for name in names), shape=shape)
        counts = [rows // len(sources)] * len(sources)
        if len(sources) == 3:
            counts = [config.head_dim * heads for heads in (config.n_heads, config.n_kv_heads, config.n_kv_heads)]
        return TensorMapping(
            target, tuple((name, (count, *columns)) for name, count in zip(sources, counts, strict=True))
        )

    def _sources(self, target: str) -> list[str]:
        """Names of the file's tensors that make up the Decoder's tensor `target`."""
        if not self.names:
            return [target]
        layer = _LAYER.search(target)
        whole = _LAYER.sub("N", target)
        module, dot, suffix = whole.rpartition(".")
        if whole in self.names:
            found, dot, suffix = self.names[whole], "", ""
        elif module in self.names:
            found = self.names[module]
        else:
            raise ConfigError(f"a {self.name} with {target} is not supported")
        names = (found,) if isinstance(found, str) else found
        number = layer[0] if layer else ""
        return [f"{name.replace('.N.', f'.{number}.')}{dot}{suffix}" for name in names]

    def of_files(self, tensors: Collection[str]) -> FamilySpec:
        """The family with the names of files that have these tensors."""
        endings = tuple(name.rpartition(".N.")[2] for name in self.fused.values())
        is_fused = endings and any(name.endswith(endings) for name in tensors)
        return replace(self, names={**self.names, **self.fused}, fused={}) if is_fused else self

    def count_experts_by_name(self, config: ModelConfig) -> int:
        """Number of tensors that the files have for single experts, without making their names."""
        if config.experts is None:
            return 0
        names = [name for each in self.names.values() for name in ((each,) if isinstance(each, str) else each)]
        layers = sum(kind.mlp == "experts" for kind in config.layers)
        return sum(".E." in name for name in names) * config.experts.count * layers

    def spellings(self) -> tuple[Callable[[str], str], ...]:
        """How the files may change the names of all tensors, the most frequent way first."""
        if not (wrapper := self.wrapper):
            return _same, lambda name: name.removeprefix(self.prefix)
        return lambda name: wrapper.names(name)[0], lambda name: wrapper.names(name)[1], _same

    def shapes(self, config: ModelConfig) -> dict[str, Shape]:
        """Name and shape of every tensor that the files must hold; they hold no others."""
        return {name: shape for mapping in self.mappings(config) for name, shape in mapping.source}

    def save(self, config: ModelConfig, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The family's tensors, split from the Decoder's."""
        tensors: dict[str, Tensor] = {}
        for mapping in self.mappings(config):
            tensors |= mapping.save(state[mapping.target])
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
        raise ConfigError(f"activation {name!r:.80} is not supported; supported: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


Layers = Mapping[str, Any]
"""layer_kinds and layer_types of a ModelConfig."""


def read_layers(n_layers: int, kind_of: Callable[[int], LayerKind]) -> Layers:
    """layer_kinds and layer_types of a ModelConfig, from the kind of the layer with each index. Raises ConfigError."""
    kinds = [kind_of(layer) for layer in range(check_layers(n_layers))]
    different = tuple(dict.fromkeys(kinds))
    types = tuple(map(different.index, kinds)) if len(different) > 1 else ()
    return {"layer_kinds": different, "layer_types": types}


def read_windows(raw: Raw, n_layers: str, window: object, default: Callable[[int], bool]) -> list[int | None]:
    """The window of each layer, by layer_types or else `default`, which says whether a layer has one.

    n_layers: key of the number of layers. window: of the layers that have one; None for none. Raises ConfigError.
    """
    check_field("window", window, "sliding_window", LayerKind)
    check_field("n_layers", raw[n_layers], n_layers)
    count, types = check_layers(raw[n_layers]), raw.get("layer_types")
    if types is None:
        types = ["sliding_attention" if default(layer) else "full_attention" for layer in range(count)]
    if not isinstance(types, list) or len(types) != count:
        raise ConfigError(f"layer_types must be a list of {count} names, one for each layer")
    if unknown := [name for name in types if name not in ("full_attention", "sliding_attention")]:
        raise ConfigError(
            f"layer_types has {unknown[0]!r:.40}, which is not supported, only full_attention and sliding_attention"
        )
    return [window if name == "sliding_attention" else None for name in types]  # type: ignore[misc]


def periodic_windows(raw: Raw, *keys: str, default: int) -> Callable[[int], bool]:
    """For read_windows(): whether a layer has a window, if every layer of a period has one except its last.

    keys: names of the period; the first one that is present counts. Raises ConfigError.
    """
    key = next((key for key in keys if key in raw), keys[0])
    period = raw.get(key, default)
    if raw.get("layer_types") is None:
        check_value(period, Size, key)
    return lambda layer: (layer + 1) % period > 0


def check_layers(n_layers: int) -> int:
    """The number of layers, which a file may put at billions. Raises ConfigError."""
    if n_layers > _MAX_LAYERS:
        raise ConfigError(f"{n_layers} layers of several kinds are not supported, at most {_MAX_LAYERS}")
    return n_layers


_DERIVED = {"n_kv_heads", "head_dim", "mlp_width"}
"""Fields that families compute from others if an optional key is null or 0."""


def read_fields(
    raw: Raw, keys: Mapping[str, str], *, of: type[ModelConfig | Experts] = ModelConfig, **defaults: Any
) -> dict[str, Any]:
    """Fields of a config. keys: field -> key of the config.json.

    Raises KeyError without a key and its default, and ConfigError with the name of the key for an invalid value.
    """
    values = {field: raw.get(key, defaults[field]) if field in defaults else raw[key] for field, key in keys.items()}
    for name, value in values.items():
        if value or not (name in defaults and name in _DERIVED):
            check_field(name, value, keys[name], of)
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
    """Raises ConfigError if a key has an unsupported value: ignoring it would serve a different model.

    allowed: key -> its only value, or a tuple of all.
    """
    for key, value in allowed.items():
        values = value if isinstance(value, tuple) else (value,)
        if key in raw and raw[key] not in values:
            supported = " or ".join(map(repr, values))
            raise ConfigError(f"{key} {raw[key]!r:.80} is not supported, only {supported}")
