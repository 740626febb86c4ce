"""Text decoders of models of several media, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from model.checkpoint.checkpoint import load
from model.checkpoint.stored_weights import find_weights
from model.config import ConfigError
from model.families.registry import read_config
from model.files import CheckpointError
from model.nn.reference import logits
from tests.support.lazy_modules import transformers
from tests.support.model.family_cases import COMMON, heads
from tests.support.model.hub_checkpoints import reference_config, reference_logits

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]
_VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
_VISION |= {"image_size": 28, "patch_size": 14}
_GEMMA = {**heads(4, 2, 12), **COMMON, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]}
WRAPPED: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {**_GEMMA, "model_type": "gemma3_text"}, "vision_config": _VISION}
    | {"mm_tokens_per_image": 4, "image_token_index": 98, "boi_token_index": 97, "eoi_token_index": 96},
    "mistral3": {"text_config": {**heads(4, 2, 12), **COMMON, "model_type": "ministral3"}}
    | {"vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 16}, "image_token_index": 98},
}


def _saved(name: str, directory: Path) -> Any:
    config = reference_config(name, **WRAPPED[name])
    model = transformers.AutoModelForImageTextToText.from_config(config).eval()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.empty_like(parameter).uniform_(-0.4, 0.4, generator=generator)
            parameter.add_(noise if parameter.ndim == 1 else noise * 0.4)
    model.save_pretrained(directory)
    return model


def _rename(directory: Path, rename: Callable[[str], str]) -> None:
    path = directory / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"})


def _older(name: str) -> str:
    """The names of transformers up to 4.51."""
    if name.startswith("model.language_model."):
        return name.replace("model.language_model.", "language_model.model.", 1)
    return f"language_model.{name}" if name.startswith("lm_head") else name.removeprefix("model.")


@pytest.mark.parametrize("rename", [str, _older])
@pytest.mark.parametrize("name", WRAPPED)
def test_text_decoder_has_the_logits_of_transformers(tmp_path: Path, name: str, rename: Callable[[str], str]) -> None:
    theirs = _saved(name, tmp_path)
    _rename(tmp_path, rename)
    loaded, tokens = load(tmp_path, device=torch.device("cpu"), dtype=torch.float32), list(range(90))
    difference = (logits(loaded.decoder, tokens) - reference_logits(theirs, tokens)).abs().max().item()
    assert difference < 1e-4
    left_out = loaded.weights.left_out
    assert left_out and all("vision" in each or "multi_modal" in each for each in left_out)
    assert len(left_out) + len({s for m in loaded.weights.mappings.values() for s, _ in m.source}) == len(
        loaded.weights.tensors
    ), "no other tensor is left out"


def test_a_tensor_of_another_kind_is_not_left_out(tmp_path: Path) -> None:
    _saved("gemma3", tmp_path)
    path = tmp_path / "model.safetensors"
    save_file({**load_file(path), "model.speech.weight": torch.ones(3)}, path)
    with pytest.raises(
        CheckpointError, match=r"1 tensors are not part of the model, the first is model\.speech\.weight"
    ):
        find_weights(tmp_path)


def test_a_published_text_config_leaves_most_keys_out() -> None:
    """As those of google/gemma-3-4b-it and 12b: what is missing has the default of transformers."""
    text: Mapping[str, Any] = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text"}
    text = {**text, "num_hidden_layers": 34, "sliding_window": 1024}
    text = {**text, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    raw = {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16"}
    family, config = read_config(raw)
    whole = reference_config("gemma3", **{k: v for k, v in raw.items() if k != "model_type"})
    assert config == read_config({**whole.text_config.to_dict(), "torch_dtype": "bfloat16"})[1]
    assert (family.name, config.vocab_size, config.n_kv_heads, config.context) == ("gemma3_text", 262_208, 4, 131_072)
    assert config.windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.embedding_scale == 50.5  # 50.596 in bfloat16


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text_config": None}, "text_config of a gemma3 must be an object, not None"),
        ({"text_config": []}, "text_config of a gemma3 must be an object"),
        ({"text_config": {"model_type": "gemma4_text"}}, "'gemma4_text' of text_config is not supported; supported: "),
        ({"text_config": {"model_type": ["gemma3_text"]}}, "of text_config is not supported"),
        ({"text_config": {"hidden_size": "2560"}}, "^hidden_size cannot be '2560'"),
    ],
)
def test_impossible_text_configs_are_refused_in_one_sentence(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_config({"model_type": "gemma3", **change})
    assert "\n" not in str(caught.value)


def test_the_config_of_the_directory_is_not_changed(tmp_path: Path) -> None:
    _saved("gemma3", tmp_path)
    before = json.loads((tmp_path / "config.json").read_text())
    find_weights(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text()) == before
