"""config.json as transformers 4 and 5 write it: read as transformers reads it, or refused in one sentence."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.stored_weights import find_weights
from model.config import Activation, ConfigError, LayerKind, ModelConfig, Rope
from model.decoder_program import ACTIVATION_PARAMETERS
from model.families import registry
from model.families.llama import LLAMA as LLAMA_FAMILY
from model.families.registry import MODEL_TYPES, family_of, read_config, write_config
from model.families.spec import ACTIVATION_NAMES, read_layers
from model.files import CheckpointError
from tests.model.families.test_wrappers import WRAPPED
from tests.support.lazy_modules import transformers
from tests.support.model.family_cases import Keys
from tests.support.model.hub_checkpoints import (
    CASES,
    FAMILIES,
    FAMILY_CASES,
    UNKNOWN_TO_TRANSFORMERS,
    family_name,
    reference_config,
    reference_model,
    save_reference,
)
from tests.support.model.random_configs import random_config
from tests.support.model.tiny_models import tiny_config

LLAMA = FAMILY_CASES["llama"].minimal


def _read(name: str, raw: dict[str, Any]) -> ModelConfig:
    return read_config({"model_type": name, **raw})[1]


@pytest.mark.parametrize(
    ("name", "change"), [(name, change) for name, cases in FAMILY_CASES.items() for change in ({}, *cases.variants)]
)
def test_old_new_and_missing_keys_are_read_as_in_transformers(name: str, change: Keys) -> None:
    """transformers reads the keys of every version and writes them all out; both forms must give one shape."""
    raw = {**FAMILY_CASES[name].minimal, **change}
    whole = reference_config(name, **raw)
    family, config = read_config({"model_type": name, **raw})
    assert config == _read(name, whole.to_dict())
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(whole)
    assert sum(map(math.prod, family.shapes(config).values())) == theirs.num_parameters()


@pytest.mark.parametrize("name", [name for name, cases in FAMILY_CASES.items() if cases.activation_key])
def test_every_activation_is_read_and_written_by_its_name(name: str) -> None:
    """Includes activations that transformers does not have."""
    cases = FAMILY_CASES[name]
    key = cases.activation_key
    for activation, written in ACTIVATION_NAMES.items():
        if activation in ACTIVATION_PARAMETERS:
            continue  # those need tensors
        config = _read(name, {**cases.minimal, key: written})
        assert config.activation == activation
        if cases.is_written:
            assert write_config(config, "float32", 0)[key] == written
    assert ACTIVATION_NAMES.keys() == set(get_args(Activation)) - {"swiglu_clamped"}, "which only gpt_oss has"


@pytest.mark.parametrize("case", [case for case in CASES if FAMILY_CASES[family_name(case)].is_written])
def test_written_config_is_read_back_here_and_by_transformers(case: str) -> None:
    config = _read(family_name(case), reference_model(case).config.to_dict())
    raw = write_config(config, "float32", 0)
    assert _read(raw["model_type"], raw) == config
    assert (
        _read(
            raw["model_type"],
            reference_config(
                raw["model_type"], **{key: value for key, value in raw.items() if key != "model_type"}
            ).to_dict(),
        )
        == config
    )


@pytest.mark.parametrize("case", ["gpt2-a", "llama-a", "qwen2-a", "gpt_neox-b"])
def test_model_saved_without_its_head_has_names_without_the_prefix(case: str) -> None:
    model = reference_model(case)
    family, config = read_config(model.config.to_dict())
    ours = {name.removeprefix(family.prefix) for name in family.shapes(config)}
    assert ours == set(model.base_model.state_dict())


@pytest.mark.parametrize("case", CASES)
def test_buffers_of_older_exporters_are_known_and_are_no_parameters(case: str) -> None:
    family, config = read_config(reference_model(case).config.to_dict())
    assert all(family.ignored.fullmatch(name) for name in FAMILY_CASES[family.name].buffers)
    assert not any(family.ignored.fullmatch(name) for name in family.shapes(config))


REFUSED = [(name, change, words) for name, cases in FAMILY_CASES.items() for change, words in cases.refused]
REFUSED += [
    ("llama", {"rope_theta": 0}, "^rope_theta cannot be 0"),
    ("llama", {"rope_parameters": {"rope_theta": "1e4"}}, "^rope_theta cannot be '1e4'"),
    ("gpt_neox", {"rotary_emb_base": 0}, "^rotary_emb_base cannot be 0"),
    ("llama", {"num_key_value_heads": 3}, "multiple"),
    ("llama", {"intermediate_size": 0}, "without feed-forward"),
    ("llama", {"tie_word_embeddings": None}, "^tie_word_embeddings cannot be None"),
    ("llama", {"vocab_size": "99"}, "^vocab_size cannot be '99'"),
    ("llama", {"hidden_size": [48]}, r"^hidden_size cannot be \[48\]"),
    ("llama", {"hidden_size": "48"}, "^hidden_size cannot be '48'"),
    ("llama", {"hidden_size": "48", "head_dim": 12}, "^hidden_size cannot be '48'"),
    ("llama", {"hidden_size": 0}, "^hidden_size cannot be 0"),
    ("llama", {"num_key_value_heads": "4"}, "^num_key_value_heads cannot be '4'"),
    ("llama", {"attention_bias": "no"}, "^attention_bias cannot be 'no'"),
    ("gpt2", {"n_embd": "48"}, "^n_embd cannot be '48'"),
    ("gpt_neox", {"num_hidden_layers": 2.0}, r"^num_hidden_layers cannot be 2\.0"),
]


@pytest.mark.parametrize(("name", "change", "words"), REFUSED)
def test_unsupported_features_are_refused_by_name_in_one_sentence(
    name: str, change: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        _read(name, {**FAMILY_CASES[name].minimal, **change})
    assert "\n" not in str(caught.value)


NEUTRAL = {
    "return_dict", "output_hidden_states", "output_attentions", "use_cache", "chunk_size_feed_forward", "problem_type",
    "_name_or_path", "transformers_version", "architectures", "id2label", "label2id", "is_encoder_decoder", "dtype",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp", "model_type",
    "attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "hidden_dropout",
}  # fmt: skip
"""Keys of every configuration that change nothing but training, output and form; ids are read with the checkpoint."""


class _Tracked(dict[str, Any]):
    """A config.json that notes which keys are read."""

    def __init__(self, keys: Keys) -> None:
        super().__init__(keys)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.read.add(str(key))
        return super().__contains__(key)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_key_of_transformers_is_read_or_refused_or_known_to_be_neutral(name: str) -> None:
    cases, ignored = FAMILY_CASES[name], set[str]()
    for keys in (cases.minimal, *cases.shapes.values(), *({**cases.minimal, **change} for change in cases.variants)):
        whole = reference_config(name, **keys).to_dict()
        raw = _Tracked({**whole, "model_type": name})
        read_config(raw)
        ignored = (ignored or set(raw)) - raw.read
    assert ignored - NEUTRAL == cases.neutral.keys(), "what does each of them change?"


@pytest.mark.parametrize("key", LLAMA)
def test_missing_size_is_named(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        _read("llama", {name: value for name, value in LLAMA.items() if name != key})


@pytest.mark.parametrize("raw", [{"model_type": None}, {}])
def test_missing_model_type_is_named_with_the_list(raw: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^has no model_type; supported: {', '.join(MODEL_TYPES)}$"):
        read_config({**LLAMA, **raw})


@pytest.mark.parametrize("name", ["mamba", "bloom", "gemma4_text", ["llama"], 7, ""])
def test_other_architectures_are_refused_by_name_with_the_list(name: object) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"model_type": name, **LLAMA})
    assert f"model_type {name!r} is not supported" in str(caught.value)
    assert all(supported in str(caught.value) for supported in MODEL_TYPES)
    assert {*FAMILIES, *UNKNOWN_TO_TRANSFORMERS, *WRAPPED, "inkstream"} == set(MODEL_TYPES)


SCALED = Rope(theta=500, dim=6, kind="llama3", factor=4.0, original_context=64)
OWN: list[dict[str, Any]] = [
    {"norm_position": "post"},
    {"positions": "sinusoidal"},
    {"logit_soft_cap": 30.0},
    {"qk_norm": "head", "window": 9, "rope": SCALED, "embedding_scale": 8.0},
    {"qkv_bias": True, "out_bias": True, "window": 5},
    {"layer_kinds": (LayerKind(window=9, rope=Rope()), LayerKind()), "layer_types": (0, 1)},
    {"norm": "layernorm", "norm_bias": True, "gated": False, "parallel_residual": True, "n_kv_heads": 4},
    {"n_encoder_layers": 1},
]


@pytest.mark.parametrize("change", OWN)
def test_shapes_of_no_family_are_written_in_our_own_layout_and_read_back(change: dict[str, Any]) -> None:
    config = tiny_config(**change)
    assert family_of(config).name == "inkstream"
    assert read_config(write_config(config, "float32", 0))[1] == config


def test_our_own_layout_refuses_unknown_keys() -> None:
    raw = write_config(tiny_config(positions="sinusoidal"), "float32", None)
    with pytest.raises(ConfigError, match="unknown key 'surprise'"):
        read_config(raw | {"surprise": 1})
    with pytest.raises(ConfigError, match="'rope_scaling' belongs into layer_kinds"):
        read_config(raw | {"rope_scaling": {"kind": "linear", "factor": 2.0}})
    for kinds in ([{"stretch": 2.0}], [{"rope": {"stretch": 2.0}}], [3], 3, {"window": 3}, [{"rope": [1]}], None):
        with pytest.raises(ConfigError, match=r"unknown key|must be a list|must be an object"):
            read_config(raw | {"layer_kinds": kinds})
    with pytest.raises(ConfigError, match="100000 kinds, at most 64 are supported"):  # not after checking each
        read_config(raw | {"layer_kinds": [{"surprise": 1}] * 100_000})


UNIFORM: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"positions": "rotary"}, {}),
    ({"positions": "rotary", "rope_theta": 500.0, "rotary_dim": 6}, {"rope": Rope(theta=500.0, dim=6)}),
    ({"sliding_window": 9, "rope_scaling": None}, {"window": 9}),
    (
        {"rope_scaling": {"kind": "llama3", "factor": 4.0, "original_context": 64}, "rope_theta": 500, "rotary_dim": 6},
        {"rope": SCALED},
    ),
    ({"positions": "learned", "rope_theta": 10_000.0, "sliding_window": 5}, {"positions": "learned", "window": 5}),
    ({"positions": "none"}, {"rope": None}),
]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"layer_kinds": None}, "^layer_kinds must be a list, not None$"),
        ({"layer_kinds": [7]}, "^an entry of layer_kinds must be an object, not 7$"),
        (
            {"layer_kinds": [{"widow": 3}]},
            "an entry of layer_kinds has the unknown key 'widow'; allowed: window, rope, mlp$",
        ),
        *[
            ({"layer_kinds": [{"rope": rope}]}, "the rope of a layer kind must be an object")
            for rope in (0, "", [], False)
        ],
        (
            {"layer_kinds": [{"rope": {"base": 1}}]},
            "the rope of a layer kind has the unknown key 'base'; allowed: theta",
        ),
        ({"layer_kinds": [{"rope": {"kind": "linear", "factor": 1e-320}}]}, "^factor of the rope cannot be"),
        ({"layer_types": None}, "^layer_types must be a list of indices, not None$"),
    ],
)
def test_wrong_layers_of_our_own_layout_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_config({"model_type": "inkstream", **asdict(tiny_config()), **change})
    assert "\n" not in str(caught.value)


def test_rope_without_keys_is_the_default_rotation() -> None:
    raw = {"model_type": "inkstream", **asdict(tiny_config()), "layer_kinds": [{"rope": {}}, {"rope": None}]}
    layers = {"n_layers": 2, "layer_types": [0, 1]}
    assert read_config({**raw, **layers})[1].layer_kinds == (LayerKind(rope=Rope()), LayerKind())


@pytest.mark.parametrize(("old", "change"), UNIFORM)
def test_our_own_layout_of_version_0_2_is_read(old: dict[str, Any], change: dict[str, Any]) -> None:
    expected = tiny_config(norm_position="post", **change)
    raw = {k: v for k, v in asdict(expected).items() if k not in ("layer_kinds", "layer_types", "positions")}
    assert read_config({"model_type": "inkstream", **raw, **old})[1] == expected


@pytest.mark.parametrize(("old", "now"), [(True, "head"), (False, "none")])
def test_version_0_2_stored_whether_heads_have_norms(old: bool, now: str) -> None:
    raw = {"model_type": "inkstream", **asdict(tiny_config()), "qk_norm": old}
    assert read_config(raw)[1] == tiny_config(qk_norm=now)


def test_every_switch_is_written_and_read_back() -> None:
    for seed in range(60):
        raw = json.loads(json.dumps({"model_type": "inkstream", **asdict(random_config(seed))}))
        assert read_config(raw)[1] == random_config(seed), seed


@pytest.mark.parametrize(
    ("old", "words"),
    [
        ({"positions": "learned", "rotary_dim": 4}, "need rotary positions, not learned"),
        ({"positions": "none", "rope_scaling": {"kind": "linear", "factor": 2.0}}, "need rotary positions, not none"),
        ({"rope_scaling": {"stretch": 2.0}}, "unknown key 'stretch'"),
        ({"rope_scaling": {"kind": "ntk", "factor": 2.0}}, "kind of the rope cannot be 'ntk'"),
        ({"sliding_window": 0}, "window of a layer kind cannot be 0"),
    ],
)
def test_impossible_layouts_of_version_0_2_are_refused(old: dict[str, Any], words: str) -> None:
    raw = {k: v for k, v in asdict(tiny_config()).items() if k not in ("layer_kinds", "layer_types", "positions")}
    with pytest.raises(ConfigError, match=words):
        read_config({"model_type": "inkstream", **raw, **old})


def test_layers_of_several_kinds_are_described_once_each() -> None:
    local, everywhere = LayerKind(window=16, rope=Rope()), LayerKind(rope=Rope(theta=1e6))
    mixed = read_layers(4, lambda layer: everywhere if layer % 2 else local)
    assert mixed == {"layer_kinds": (local, everywhere), "layer_types": (0, 1, 0, 1)}
    assert read_layers(4, lambda _: local) == {"layer_kinds": (local,), "layer_types": ()}
    with pytest.raises(ConfigError, match=r"^2147483647 layers of several kinds are not supported, at most 4096$"):
        read_layers(2**31 - 1, lambda _: local)


def test_family_whose_head_is_always_the_embedding_needs_no_name_for_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {module: name for module, name in LLAMA_FAMILY.names.items() if module != "untied_head"}
    monkeypatch.setitem(registry._FAMILIES, "llama", replace(LLAMA_FAMILY, names=names))
    save_reference("llama-a", tmp_path / "tied")
    assert find_weights(tmp_path / "tied").config.tied_head
    save_reference("llama-b", tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"config\.json: a llama with untied_head is not supported$"):
        find_weights(tmp_path / "untied")


@pytest.mark.parametrize(
    ("name", "number", "words"),
    [
        ("beta", torch.tensor(0.5, dtype=torch.bfloat16), ""),
        ("eps", torch.tensor([-1e-6], dtype=torch.bfloat16), ""),
        ("eps", torch.tensor(-1e-6, dtype=torch.float16), ""),
        ("beta", torch.tensor(0.25), r"model\.layers\.1\.mlp\.act_fn\.beta 0\.25 is not supported, only 0\.5$"),
        ("eps", torch.tensor(-1e-3), r"act_fn\.eps -0\.001 is not supported, only -1e-06$"),
        ("beta", torch.tensor(torch.nan), r"act_fn\.beta nan is not supported"),
        ("beta", torch.tensor([0.5, 0.5]), r"act_fn\.beta must be one number of F32, F16, BF16$"),
        ("beta", torch.tensor(1), r"act_fn\.beta must be one number of F32, F16, BF16$"),
    ],
)
@pytest.mark.parametrize("prefix", ["model.", ""])
def test_stored_constants_must_have_the_number_that_is_computed_with(
    tmp_path: Path, name: str, number: torch.Tensor, words: str, prefix: str
) -> None:
    save_reference("apertus-b", tmp_path)
    path = tmp_path / "model.safetensors"
    stored = load_file(path) | {f"model.layers.1.mlp.act_fn.{name}": number}
    save_file({f"{prefix}{each.removeprefix('model.')}": tensor for each, tensor in stored.items()}, path)
    if not words:
        find_weights(tmp_path)
        return
    with pytest.raises(CheckpointError, match=words if prefix else words.replace(r"model\.", "")):
        find_weights(tmp_path)
