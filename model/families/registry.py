"""Registry of model families: by the model_type of a config.json, and by the ModelConfigs that they can represent.

NATIVE is our own layout (the fields of ModelConfig, our tensor names), for decoders that no Hugging Face family covers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from model.config import MAX_LAYER_KINDS, ConfigError, Experts, LayerKind, ModelConfig, QueryScale, Rope
from model.families.apertus import APERTUS
from model.families.arcee import ARCEE
from model.families.cohere import COHERE2
from model.families.cwm import CWM
from model.families.ernie4_5 import ERNIE4_5
from model.families.ernie4_5_moe import ERNIE4_5_MOE
from model.families.exaone4 import EXAONE4
from model.families.falcon import FALCON
from model.families.gemma import GEMMA, GEMMA2, GEMMA3, GEMMA3_WRAPPER
from model.families.glm import GLM, GLM4
from model.families.gpt2 import GPT2, GPT_BIGCODE
from model.families.gpt_neo import GPT_NEO
from model.families.gpt_neox import GPT_NEOX
from model.families.gpt_oss import GPT_OSS
from model.families.gptj import GPTJ
from model.families.granite import GRANITE, GRANITE_HYBRID
from model.families.granitemoe import GRANITE_MOE, GRANITE_MOE_SHARED
from model.families.helium import HELIUM
from model.families.hunyuan import HUNYUAN_DENSE
from model.families.hyperclovax import HYPERCLOVAX
from model.families.internlm3 import INTERNLM3
from model.families.jais2 import JAIS2
from model.families.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from model.families.mellum import MELLUM
from model.families.ministral import MINISTRAL
from model.families.ministral3 import MINISTRAL3
from model.families.nanochat import NANOCHAT
from model.families.nemotron import NEMOTRON
from model.families.olmo import OLMO, OLMO2, OLMO3
from model.families.olmoe import OLMOE
from model.families.opt import OPT
from model.families.phi import PHI
from model.families.phi3 import PHI3
from model.families.quantization import read_quantization
from model.families.qwen3_moe import QWEN3_MOE
from model.families.seed_oss import SEED_OSS
from model.families.smollm3 import SMOLLM3
from model.families.spec import FamilySpec, Raw, Wrapper
from model.families.stablelm import STABLELM
from model.families.starcoder2 import STARCODER2
from model.families.vaultgemma import VAULTGEMMA

_FIELDS = {field.name: field for field in fields(ModelConfig)}
_METADATA_KEYS = {"architectures", "model_type", "dtype", "torch_dtype", "transformers_version"}
_METADATA_KEYS |= {"bos_token_id", "eos_token_id", "pad_token_id", "quantization_config"}
_OUTER_KEYS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config", "bos_token_id", "eos_token_id")
"""What a model of several media says of its text decoder outside of text_config, where it counts."""
_UNIFORM_KEYS = ("rope_theta", "rotary_dim", "rope_scaling", "sliding_window")


def _read_native(raw: Raw) -> ModelConfig:
    raw = _with_layer_kinds(raw)
    if unknown := sorted(raw.keys() - _FIELDS.keys() - _METADATA_KEYS):
        raise ConfigError(f"unknown key {unknown[0]!r:.80}; allowed: {', '.join(sorted(_FIELDS))}")
    required = {name for name, field in _FIELDS.items() if field.default is MISSING}
    if missing := sorted(required - raw.keys()):
        raise ConfigError(f"keys are missing: {', '.join(missing)}")
    values = {name: value for name, value in raw.items() if name in _FIELDS}
    if values.get("query_scale") is not None:
        values["query_scale"] = QueryScale(**_read_object(values["query_scale"], QueryScale, "query_scale"))
    if values.get("experts") is not None:
        values["experts"] = Experts(**_read_object(values["experts"], Experts, "experts"))
    if isinstance(values.get("qk_norm"), bool):  # versions up to 0.2
        values["qk_norm"] = "head" if values["qk_norm"] else "none"
    if not isinstance(values["layer_kinds"], list | tuple):
        raise ConfigError(f"layer_kinds must be a list, not {values['layer_kinds']!r:.40}")
    if len(values["layer_kinds"]) > MAX_LAYER_KINDS:  # each takes time to check
        raise ConfigError(
            f"layer_kinds has {len(values['layer_kinds'])} kinds, at most {MAX_LAYER_KINDS} are supported"
        )
    values["layer_kinds"] = tuple(map(_read_layer_kind, values["layer_kinds"]))
    types = values.get("layer_types", ())
    if not isinstance(types, list | tuple):
        raise ConfigError(f"layer_types must be a list of indices, not {types!r:.40}")
    return ModelConfig(**{**values, "layer_types": tuple(types)})


def _read_layer_kind(raw: object) -> LayerKind:
    values = _read_object(raw, LayerKind, "an entry of layer_kinds")
    if values.get("rope") is not None:
        rope = _read_object(values["rope"], Rope, "the rope of a layer kind")
        lists = {name: tuple(value) for name, value in rope.items() if isinstance(value, list)}
        values["rope"] = Rope(**{**rope, **lists})
    return LayerKind(**values)


def _read_object(raw: object, of: type[LayerKind | Rope | QueryScale | Experts], what: str) -> dict[str, Any]:
    """Values by the names of fields. Raises ConfigError."""
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{what} must be an object, not {raw!r:.40}")
    allowed = [field.name for field in fields(of)]
    if unknown := sorted(raw.keys() - set(allowed)):
        raise ConfigError(f"{what} has the unknown key {unknown[0]!r:.40}; allowed: {', '.join(allowed)}")
    return dict(raw)


def _with_layer_kinds(raw: Raw) -> Raw:
    """Versions up to 0.2 wrote one rope and one window for all layers."""
    old = {key: raw[key] for key in _UNIFORM_KEYS if key in raw}
    if "layer_kinds" in raw:
        if old:
            raise ConfigError(f"the key {next(iter(old))!r:.80} belongs into layer_kinds")
        return raw
    new = {key: value for key, value in raw.items() if key not in old}
    rope = None
    if raw.get("positions", "rotary") == "rotary":
        theta, dim = old.get("rope_theta", 10_000.0), old.get("rotary_dim")
        rope = {"theta": theta, "dim": dim, **(old.get("rope_scaling") or {})}
        new["positions"] = "none"
    elif old.get("rope_scaling") is not None or old.get("rotary_dim") is not None:
        raise ConfigError(f"rope_scaling and rotary_dim need rotary positions, not {raw['positions']}")
    return new | {"layer_kinds": [{"window": old.get("sliding_window"), "rope": rope}]}


NATIVE = FamilySpec(name="inkstream", architecture="InkstreamDecoder", read=_read_native, write=asdict)


_ALL = (
    *(LLAMA, MISTRAL, QWEN2, QWEN3, MINISTRAL3, SMOLLM3, SEED_OSS, ARCEE),
    *(INTERNLM3, VAULTGEMMA, CWM, JAIS2, HYPERCLOVAX, MINISTRAL),
    *(GEMMA, GEMMA2, GEMMA3),
    *(PHI, PHI3, OLMO, OLMO2, OLMO3),
    *(GRANITE, GRANITE_HYBRID, STARCODER2, STABLELM),
    *(GLM, GLM4, ERNIE4_5, HELIUM, COHERE2),
    *(EXAONE4, HUNYUAN_DENSE, APERTUS, NEMOTRON, NANOCHAT),
    *(QWEN3_MOE, MELLUM, OLMOE, GRANITE_MOE, GRANITE_MOE_SHARED, ERNIE4_5_MOE, GPT_OSS),
    *(GPT2, GPT_NEOX, GPT_NEO, GPTJ, GPT_BIGCODE, OPT, FALCON),
    NATIVE,
)
_FAMILIES = {family.name: family for family in _ALL}
_WRAPPERS = {
    wrapper.name: wrapper
    for wrapper in (GEMMA3_WRAPPER, Wrapper(name="mistral3", models="Mistral Small 3.1, Ministral 3, as text"))
}
MODELS = {family.name: family.models for family in _ALL if family.models}
MODELS |= {wrapper.name: wrapper.models for wrapper in _WRAPPERS.values()}
"""Some models of each model_type, for the documentation."""
MODEL_TYPES = (*_FAMILIES, *_WRAPPERS)
"""Values of model_type that can be read."""


def _check_model_type(raw: Raw) -> None:
    """Rejects a config.json of another architecture. Raises ConfigError."""
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in MODEL_TYPES:
        problem = "has no model_type" if name is None else f"model_type {name!r:.80} is not supported"
        raise ConfigError(f"{problem}; supported: {', '.join(MODEL_TYPES)}")


def text_keys(raw: Raw) -> Raw:
    """What a config.json says of the text decoder: the whole, or the text_config of a model of several media.

    Raises ConfigError.
    """
    _check_model_type(raw)
    if not (wrapper := _WRAPPERS.get(raw["model_type"])):
        return raw
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config of a {wrapper.name} must be an object, not {text!r:.40}")
    outer = {key: raw[key] for key in _OUTER_KEYS if key in raw}
    inner = {**wrapper.defaults, **text, **outer}
    name = inner.get("model_type")
    if not isinstance(name, str) or name not in _FAMILIES:
        supported = ", ".join(_FAMILIES)
        raise ConfigError(f"model_type {name!r:.40} of text_config is not supported; supported: {supported}")
    return inner


def read_config(raw: Raw) -> tuple[FamilySpec, ModelConfig]:
    """Family and config of a config.json (keys of transformers 4 and 5). Raises ConfigError."""
    text = text_keys(raw)
    family = _FAMILIES[text["model_type"]]
    if wrapper := _WRAPPERS.get(raw["model_type"]):
        family = replace(family, wrapper=wrapper)
    read_quantization(text.get("quantization_config"))
    try:
        return family, _read(family, text)
    except ConfigError:
        raise
    except KeyError as error:
        raise ConfigError(f"the key {error.args[0]!r:.80} is missing") from None
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"a value has the wrong type ({error})") from None


def family_of(config: ModelConfig) -> FamilySpec:
    """The first family whose config.json can represent `config`, so that as many programs as possible can read it."""
    return _written(config)[0]


def write_config(config: ModelConfig, dtype: str, eos_id: int | None) -> dict[str, Any]:
    """The config.json of `config` in the format of family_of(config)."""
    family, raw = _written(config)
    return {
        "architectures": [family.architecture],
        "model_type": family.name,
        **raw,
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "torch_dtype": dtype,
    }


def _written(config: ModelConfig) -> tuple[FamilySpec, dict[str, Any]]:
    for family in _FAMILIES.values():
        if family.write:
            raw = family.write(config)
            with contextlib.suppress(ConfigError, KeyError):  # a key is missing if the family cannot say all
                if _read(family, raw) == config:
                    return family, raw
    raise AssertionError("the native layout represents every config")


def _read(family: FamilySpec, raw: Raw) -> ModelConfig:
    config = family.read(raw)
    if family is not NATIVE and not config.mlp_width and any(kind.mlp == "dense" for kind in config.layer_kinds):
        raise ConfigError(f"a {family.name} without feed-forward is not supported")
    return config
