"""Models of every architecture: a converted checkpoint is the same model as the original one."""

from __future__ import annotations

import dataclasses
import json
import math
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from model.checkpoint.checkpoint import Checkpoint, load
from model.checkpoint.gguf_directory import MadeFiles, version_of_gguf
from model.checkpoint.gguf_files import make_files
from model.checkpoint.gguf_index import index_gguf
from model.checkpoint.stored_numbers import mapped
from model.checkpoint.stored_weights import find_weights
from model.config import ModelConfig
from model.families.registry import read_config
from model.files import CheckpointError
from model.gguf.architectures import ARCHITECTURES
from model.gguf.gguf_model import GgufModel
from model.gguf.metadata_reader import shortest
from model.weights_version import Directory
from tests.support.model.gguf_conversion import ARCHITECTURE_OF, write_converted
from tests.support.model.gguf_files import add_array, write_gguf
from tests.support.model.gguf_metadata import gguf_metadata
from tests.support.model.gguf_originals import GGUF_CASES, save_original
from tests.support.model.hub_checkpoints import CASES, FAMILY_CASES, family_name
from tests.support.model.sample_tokenizers import llama2

_LARGEST = {name: max(case for case in GGUF_CASES if family_name(case) == name) for name in ARCHITECTURE_OF}


@contextmanager
def _opened(*paths: Path) -> Iterator[Directory]:
    """The model of GGUF files without a tokenizer."""
    made = MadeFiles({"config.json": json.dumps(GgufModel.read(paths).config).encode()})
    try:
        yield version_of_gguf(list(paths), made)
    finally:
        made.close()


def _load(directory: Directory) -> Checkpoint:
    return load(directory, device=torch.device("cpu"), dtype=torch.float32)


def _are_close(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-6)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_are_close, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_close(one[key], other[key]) for key in one)
    return bool(one == other)


def _differences(one: ModelConfig, other: ModelConfig) -> dict[str, Any]:
    """Fields that differ by more than float32, in which files have numbers."""
    pairs = {name: (value, dataclasses.asdict(other)[name]) for name, value in dataclasses.asdict(one).items()}
    return {name: pair for name, pair in pairs.items() if not _are_close(*pair)}


def test_every_architecture_has_cases() -> None:
    assert set(ARCHITECTURE_OF.values()) == ARCHITECTURES.keys()
    assert ARCHITECTURE_OF.keys() <= FAMILY_CASES.keys()
    assert {family_name(case) for case in GGUF_CASES} == ARCHITECTURE_OF.keys()


@pytest.mark.parametrize("case", GGUF_CASES)
def test_a_converted_model_is_the_original_one(case: str, tmp_path: Path) -> None:
    save_original(case, tmp_path)
    with _opened(write_converted(tmp_path, tmp_path / "model.gguf")) as directory:
        found, expected = _load(directory), _load(tmp_path)
    assert _differences(found.weights.config, expected.weights.config) == {}
    state = found.decoder.state_dict()
    for name, tensor in expected.decoder.state_dict().items():
        if ARCHITECTURES[ARCHITECTURE_OF[family_name(case)]].adds_one and "norm" in name:
            assert torch.allclose(state[name], tensor, rtol=0, atol=2.5e-7), name  # 1 + w has less digits of w
        else:
            assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("case", [case for case in GGUF_CASES if "gemma" in case or "nemotron" in case])
def test_norms_that_were_trained_in_bfloat16_come_back_exactly(case: str, tmp_path: Path) -> None:
    save_original(case, tmp_path)
    path = write_converted(tmp_path, tmp_path / "model.gguf", rounds_to_bfloat16=True)
    with _opened(path) as directory:
        state = _load(directory).decoder.state_dict()
    for name, tensor in _load(tmp_path).decoder.state_dict().items():
        assert torch.equal(state[name], tensor.bfloat16().float()), name


@pytest.mark.parametrize("case", _LARGEST.values())
def test_quantized_matrices_stay_packed_and_have_the_numbers_of_the_package(case: str, tmp_path: Path) -> None:
    sizes = {"n_embd" if "n_embd" in CASES[case] else "hidden_size": 96}
    save_original(case, tmp_path, **sizes)
    packed = write_converted(tmp_path, tmp_path / "packed.gguf", "Q8_0")
    unpacked = write_converted(tmp_path, tmp_path / "unpacked.gguf", "Q8_0", is_unpacked=True)
    with _opened(packed) as one, _opened(unpacked) as other:
        found, expected = find_weights(one), find_weights(other)
        assert len(found.packed) > 3 * found.config.n_layers and not expected.packed
        for name in found.mappings:
            numbers = found.read(name, "float32")
            assert np.array_equal(numbers, expected.read(name, "float32")), name
            sources = [source for source, _ in found.mappings[name].source]
            if all(source in found.packed for source in sources):
                matrices = found.read_packed(name)
                rows = np.concatenate([matrix.dequantized("float32") for matrix in matrices])
                assert np.array_equal(rows, numbers.reshape(rows.shape)), name
                assert found.packed_formats(name), name


def _tiny(**changes: Any) -> dict[str, Any]:
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    return {f"llama.{key}": value for key, value in {**sizes, **changes}.items() if value is not None}


_EMBEDDING = {"token_embd.weight": np.zeros((9, 32), np.float32)}


def _read(path: Path, metadata: dict[str, Any], architecture: str = "llama", **tensors: Any) -> GgufModel:
    return GgufModel.read([write_gguf(path / "a.gguf", architecture, metadata, {**_EMBEDDING, **tensors})])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"expert_count": 8}, "'llama.expert_count' is not supported"),
        ({"attention.something_new": 2}, "'llama.attention.something_new' is not supported"),
        ({"attention.temperature_scale": 0.1}, "'llama.attention.temperature_scale' is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 1.0}, "log_multiplier is only supported"),
        ({"block_count": None}, "llama.block_count is missing"),
        ({"block_count": 2**31}, "block_count cannot be 2147483648"),
        ({"block_count": "one"}, "block_count cannot be 'one'"),
        ({"embedding_length": 0}, "are no sizes"),
        ({"attention.head_count": [4, 2]}, "head_count differs between layers"),
        ({"attention.value_length": 16}, "value_length 16 is not supported"),
        ({"attention.key_length": "8"}, "key_length '8'|value_length|head_dim"),
        ({"rope.dimension_count": 4}, "rope.dimension_count must be 8"),
        ({"rope.dimension_count": 9}, "rope.dimension_count 9 is not from 1 to 8"),
        ({"rope.scaling.type": "mrope"}, "rope.scaling.type 'mrope' is not supported"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": -1.0}, "factor"),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 3.0}, "attn_factor 3"),
        ({"rope.freq_base": 0.0}, "rope_theta"),
        ({"rope.scaling.attn_factor": 1.19}, "llama.rope.scaling.attn_factor 1.19 is only supported with yarn"),
        ({"rope.scaling.type": "none", "rope.scaling.yarn_attn_factor": 1.19}, "attn_factor 1.19 is only supported"),
        ({"rope.scaling.attn_factor": 0.0}, "attn_factor 0.0 is only supported with yarn"),
        (
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.19},
            "attn_factor 1.19 is only supported with yarn",
        ),
        ({"rope.scaling.attn_factor": 1.0, "rope.scaling.yarn_attn_factor": 1.19}, "attn_factor and .* differ"),
        ({"rope.scaling.yarn_beta_fast": 8.0}, "yarn_beta_fast and yarn_beta_slow need the type yarn"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "rms_norm_eps"),
    ],
)
def test_metadata_that_say_another_model_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason) as error:
        _read(tmp_path, _tiny(**changes))
    assert str(error.value).startswith(str(tmp_path / "a.gguf"))


# What the published GGUF files of Ministral 3 say.
_MINISTRAL = {"rope.scaling.type": "yarn", "rope.scaling.factor": 16.0, "rope.scaling.original_context_length": 16384}
_MINISTRAL |= {"rope.freq_base": 1e6, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow": 1.0}
_MINISTRAL |= {"rope.scaling.yarn_log_multiplier": 1.0, "attention.temperature_scale": 0.1, "rope.dimension_count": 8}


def _mistral3(**changes: Any) -> dict[str, Any]:
    return {key.replace("llama", "mistral3"): value for key, value in _tiny(**{**_MINISTRAL, **changes}).items()}


@pytest.mark.parametrize(("multiplier", "attention_factor"), [(1.0, 1.0), (0.5, 1.12175), (0.0, 1.27726)])
def test_the_scales_of_mistral3_are_read(multiplier: float, attention_factor: float, tmp_path: Path) -> None:
    read = _read(tmp_path, _mistral3(**{"rope.scaling.yarn_log_multiplier": multiplier}), "mistral3").config
    family, config = read_config(read)
    rope = config.layer_kinds[0].rope
    assert rope and config.query_scale and family.name == "ministral3" and config.layer_kinds[0].window is None
    assert (config.query_scale.beta, config.query_scale.original_context) == (0.1, 16384)
    assert (rope.kind, rope.theta, rope.factor, rope.original_context) == ("yarn", 1e6, 16.0, 16384)
    assert (rope.beta_fast, rope.beta_slow) == (32.0, 1.0)
    assert rope.attention_factor == pytest.approx(attention_factor, abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"attention.temperature_scale": -0.1}, "llama_4_scaling_beta cannot be -0.1"),
        ({"attention.temperature_length": 8}, "'mistral3.attention.temperature_length' is not supported"),
        (
            {"rope.scaling.type": "linear"},
            "yarn_log_multiplier is only supported with the type yarn in models of mistr",
        ),
        ({"rope.scaling.yarn_log_multiplier": "1"}, "mscale"),
        ({"rope.scaling.attn_factor": 1.27726}, "attn_factor 1.27726 is not supported"),
        ({name: None for name in _MINISTRAL if "yarn" in name} | {"rope.scaling.type": "linear"}, "only .* with yarn"),
        ({"expert_count": 4}, "'mistral3.expert_count' is not supported"),
    ],
)
def test_other_scales_of_mistral3_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        _read(tmp_path, _mistral3(**changes), "mistral3")


def test_mistral3_without_a_scale_of_queries_is_llama(tmp_path: Path) -> None:
    save_original(_LARGEST["mistral"], tmp_path)
    with _opened(write_converted(tmp_path, tmp_path / "model.gguf", architecture="mistral3")) as directory:
        found, expected = _load(directory), _load(tmp_path)
    assert _differences(found.weights.config, expected.weights.config) == {}
    state = found.decoder.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.decoder.state_dict().items())


_XIELU = {"xielu.alpha_p": [0.1, 1e-8], "xielu.alpha_n": [-3.0, 0.7], "xielu.beta": [0.5] * 2, "xielu.eps": [-1e-6] * 2}


def _apertus(**changes: Any) -> dict[str, Any]:
    sizes = {key.replace("llama", "apertus"): value for key, value in _tiny(block_count=2).items()}
    return {key: value for key, value in {**sizes, **_XIELU, **changes}.items() if value is not None}


@pytest.mark.parametrize("shift", range(4))
def test_arrays_of_layers_are_tensors_wherever_they_lie(shift: int, tmp_path: Path) -> None:
    model = _read(tmp_path, {"general.name": "x" * shift, **_apertus()}, "apertus")
    found = {name: stored for name, stored in index_gguf(model).tensors.items() if "xielu" in name}
    assert {name: mapped(stored).tolist() for name, stored in found.items()} == {
        f"blk.{layer}.{key}": [np.float32(numbers[layer])] for key, numbers in _XIELU.items() for layer in range(2)
    }


@pytest.mark.parametrize("value", [None, 0.5, "x", [0.5], [0.5] * 3, [1, 1], ["x", "y"], [True, True]])
@pytest.mark.parametrize("key", _XIELU)
def test_arrays_of_layers_have_one_number_for_each(key: str, value: Any, tmp_path: Path) -> None:
    wrong = f"the metadata key {key} must be an array of F32 with one number for each of 2 layers"
    with pytest.raises(CheckpointError, match=wrong):
        _read(tmp_path, _apertus(**{key: value}), "apertus")


@pytest.mark.parametrize(("name", "number", "only"), [("beta", 0.7, "0.5"), ("eps", -1e-3, "-1e-06")])
def test_other_constants_of_xielu_are_refused(name: str, number: float, only: str, tmp_path: Path) -> None:
    model = save_original("apertus-b", tmp_path)
    getattr(model.model.layers[1].mlp.act_fn, name).fill_(number)
    model.save_pretrained(tmp_path)
    wrong = rf"blk\.1\.xielu\.{name} {number:g} is not supported, only {only}"
    with (
        _opened(write_converted(tmp_path, tmp_path / "model.gguf")) as directory,
        pytest.raises(CheckpointError, match=wrong),
    ):
        find_weights(directory)


_LONG, _SHORT = ({f"rope_factors_{name}.weight": np.linspace(1, 8, 4, dtype=np.float32)} for name in ("long", "short"))


@pytest.mark.parametrize("factors", [_LONG, _SHORT], ids=["long", "short"])
def test_rope_factors_for_long_texts_need_those_for_short_ones(factors: dict[str, Any], tmp_path: Path) -> None:
    wrong = r"rope_factors_long\.weight and rope_factors_short\.weight are only supported together"
    with pytest.raises(CheckpointError, match=wrong):
        _read(tmp_path, _tiny(), **factors)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "type 'yarn' with the factor 4.0"),
        ({"rope.scaling.type": "linear"}, "type 'linear'"),
        ({"rope.scaling.factor": 4.0}, "factor 4.0"),
    ],
)
def test_rope_factors_and_another_scaling_are_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"{reason}.* not supported together with rope_factors_long"):
        _read(tmp_path, _tiny(**changes), **_LONG, **_SHORT)
    named = {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.19}
    rope = _read(tmp_path, _tiny(**named), **_LONG, **_SHORT).config["rope_parameters"]
    assert (rope["rope_type"], rope["attention_factor"]) == ("longrope", 1.19)


_BIG = 40 << 20


@pytest.mark.parametrize(
    ("key", "kind", "fill", "reason"),
    [
        ("tokenizer.zzz", 0, 7, ""),
        ("tokenizer.chat_template", 0, 7, "tokenizer.chat_template must be a string"),
        ("tokenizer.ggml.add_bos_token", 7, 1, "add_bos_token must be true or false"),
        ("tokenizer.ggml.tokens", 0, 7, f"tokenizer.ggml.tokens has {_BIG} entries; at most 1048576"),
        ("tokenizer.ggml.tokens", 8, 0, f"tokenizer.ggml.tokens has {_BIG // 8} entries"),
        ("tokenizer.ggml.token_type", 5, 1, f"token_type has {_BIG // 4} entries"),
        ("tokenizer.ggml.scores", 6, 1, f"scores has {_BIG // 4} entries"),
        ("tokenizer.ggml.scores", 7, 1, f"scores has {_BIG} entries"),
        ("tokenizer.ggml.precompiled_charsmap", 1, 1, f"precompiled_charsmap has {_BIG} bytes; at most"),
        ("tokenizer.ggml.precompiled_charsmap", 2, 1, f"precompiled_charsmap has {_BIG // 2} entries"),
        ("llama.attention.head_count", 0, 4, f"llama.attention.head_count has {_BIG} values; at most 4096"),
        ("llama.attention.head_count_kv", 7, 1, f"llama.attention.head_count_kv has {_BIG} values; at most 4096"),
    ],
)
def test_arrays_of_any_size_take_no_more_memory_than_the_file(
    key: str, kind: int, fill: int, reason: str, tmp_path: Path
) -> None:
    base = {**_tiny(), **gguf_metadata(json.loads(llama2().to_str()))}
    base |= {"tokenizer.ggml.model": "t5"} if "charsmap" in key else {}
    base.pop(key, None)
    path = add_array(write_gguf(tmp_path / "a.gguf", "llama", base, _EMBEDDING), key, kind, bytes([fill]) * _BIG)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=reason) if reason else nullcontext():
            make_files([path])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size + (16 << 20)


def test_an_empty_array_is_named(tmp_path: Path) -> None:
    metadata = {key: value for key, value in _tiny().items() if not key.endswith("head_count")}
    path = add_array(write_gguf(tmp_path / "a.gguf", "llama", metadata, _EMBEDDING), "llama.attention.head_count", 4)
    with pytest.raises(CheckpointError, match=r"llama\.attention\.head_count is an empty array"):
        GgufModel.read([path])


_NAMES = (
    *("block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"),
    *("attention.head_count_kv", "attention.key_length", "attention.value_length", "attention.layer_norm_rms_epsilon"),
    *("attention.layer_norm_epsilon", "attention.sliding_window", "attention.sliding_window_pattern", "logit_scale"),
    *("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    *("attention.clamp_kqv", "attention.scale", "embedding_scale", "residual_scale", "final_logit_softcapping"),
    *("rope.freq_base", "rope.freq_base_swa", "rope.dimension_count", "rope.scaling.type", "rope.scaling.factor"),
    *("rope.scaling.original_context_length", "rope.scaling.attn_factor", "rope.scaling.yarn_beta_fast"),
    *("expert_count", "expert_used_count", "expert_feed_forward_length", "expert_shared_feed_forward_length"),
    *("expert_shared_count", "interleave_moe_layer_step", "leading_dense_block_count", "use_parallel_residual"),
)
_VALUES = ("", "yarn", "x" * 1000, 0, 1, 2**32 - 1, -1, (2**64 - 1, gguf.GGUFValueType.UINT64), 0.5, -1e30, 1e30,
           float("nan"), float("inf"), True, False, [1, 2], ["a"], [0.5] * 9, [True, False])  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_metadata_of_any_type_are_read_or_refused_in_one_line(architecture: str, tmp_path: Path) -> None:
    random, outcomes = Random(architecture), set[str]()
    for _ in range(25):
        base = {"rope.scaling.type": random.choice(["yarn", "linear", "none"]), "rope.scaling.factor": 2.0}
        base |= {"attention.sliding_window": 8, "expert_count": 4, "expert_used_count": 2, "logit_scale": 2.0}
        changes = base | {random.choice(_NAMES): random.choice(_VALUES) for _ in range(random.randrange(3))}
        metadata = {key.replace("llama", architecture): value for key, value in _tiny(**changes).items()}
        try:
            _read(tmp_path, metadata, architecture, **{"rope_freqs.weight": np.linspace(1, 8, 4, dtype=np.float32)})
        except CheckpointError as error:
            outcomes.add(str(error))
    assert len(outcomes) > 3
    assert all(line.startswith(f"{tmp_path / 'a.gguf'}: ") and "\n" not in line for line in outcomes)


def test_harmless_metadata_are_accepted(tmp_path: Path) -> None:
    changes = {"expert_count": 0, "vocab_size": 9, "attention.head_count": [4, 4], "rope.dimension_count": 8}
    model = _read(tmp_path, {**_tiny(**changes), "general.file_type": 7, "other.key": 3})
    assert model.config["num_attention_heads"] == 4 and model.config["tie_word_embeddings"]


@pytest.mark.parametrize(
    ("architecture", "kind", "reason"),
    [
        ("mamba", "model", "general.architecture 'mamba' is not supported in GGUF files; supported: llama, qwen2"),
        ("clip", "model", "vision part .mmproj. of a model"),
        ("llama", "adapter", "general.type 'adapter', not a model"),
    ],
)
def test_files_without_a_supported_model_are_refused(architecture: str, kind: str, reason: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=reason):
        _read(tmp_path, {**_tiny(), "general.type": kind}, architecture)


def test_rope_factors_that_the_architecture_does_not_read_are_refused(tmp_path: Path) -> None:
    factors = {"rope_freqs.weight": np.ones(4, np.float32)}
    sizes = {key.replace("llama", "gpt2"): value for key, value in _tiny().items()}
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight is not supported in models of gpt2"):
        _read(tmp_path, sizes, "gpt2", **factors)


def test_frequency_factors_of_no_known_rule_are_kept_as_they_are(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.5, 3.0, 7.0], np.float32)
    rope = _read(tmp_path, _tiny(), **{"rope_freqs.weight": factors}).config["rope_parameters"]
    assert rope["rope_type"] == "longrope" and rope["long_factor"] == rope["short_factor"] == factors.tolist()
    assert rope["attention_factor"] == 1.0


@pytest.mark.parametrize("kind", ["Q2_K", "Q3_K", "IQ2_XS", "IQ3_S", "TQ1_0"])
def test_types_that_are_not_read_are_refused_by_name_with_a_remedy(kind: str, tmp_path: Path) -> None:
    _, n_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    metadata = _tiny(embedding_length=256)
    blocks = np.zeros((9, 1, n_bytes), np.uint8)
    path = write_gguf(tmp_path / "a.gguf", "llama", metadata, {"token_embd.weight": (kind, blocks)})
    with _opened(path) as directory, pytest.raises(CheckpointError, match=f"is {kind}, .* download .* Q4_K_M"):
        find_weights(directory)


def test_generation_settings_come_from_the_file(tmp_path: Path) -> None:
    found = {"tokenizer.ggml.bos_token_id": 3, "general.sampling.temp": 0.5, "general.sampling.top_k": 40}
    model = _read(tmp_path, {**_tiny(), **found})
    assert model.generation == {"bos_token_id": 3, "temperature": 0.5, "top_k": 40, "do_sample": True}
    greedy = _read(tmp_path, {**_tiny(), "general.sampling.temp": 0.0, "tokenizer.ggml.bos_token_id": 2**32 - 1})
    assert greedy.generation == {"temperature": 0.0}
    assert _read(tmp_path, {**_tiny(), "general.sampling.temp": 0.6}).generation["temperature"] == 0.6


@pytest.mark.parametrize("value", ["hot", math.nan, math.inf, True, [0.5]])
def test_sampling_parameters_must_be_finite_numbers(value: Any, tmp_path: Path) -> None:
    wrong = r"general\.sampling\.temp cannot be .*, only a finite number"
    with pytest.raises(CheckpointError, match=wrong):
        _read(tmp_path, {**_tiny(), "general.sampling.temp": value})


@pytest.mark.parametrize("value", ["1", [1], 1.5])
def test_special_tokens_must_be_numbers(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.bos_token_id must be a number"):
        _read(tmp_path, {**_tiny(), "tokenizer.ggml.bos_token_id": value})


def test_numbers_of_float32_are_those_that_people_wrote_and_others_are_kept(tmp_path: Path) -> None:
    wide = 10_000.123456789
    metadata = _tiny(**{"rope.freq_base": (wide, gguf.GGUFValueType.FLOAT64)})
    config = _read(tmp_path, metadata).config
    assert config["rope_parameters"]["rope_theta"] == wide and config["rms_norm_eps"] == 1e-5
    for number in (0.1, 1e-38, 3.4028235e38, -1e-45, 16_777_216.0, -0.0, math.inf):
        assert str(shortest(float(np.float32(number)))) == str(number)
    assert shortest(1e300) == 1e300 and math.isnan(shortest(math.nan)) and shortest(float(np.float32(3e38))) == 3e38
