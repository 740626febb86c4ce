"""phi3's longrope: the served context chooses the short or the long factors, where transformers asks each sequence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from model.checkpoint.checkpoint import load
from model.families.registry import read_config
from model.nn.reference import generate, logits
from model.nn.transformer import Decoder
from tests.support.lazy_modules import transformers
from tests.support.model.family_cases import COMMON, heads
from tests.support.model.family_cases.phi3 import longrope
from tests.support.model.hub_checkpoints import FAMILY_CASES, reference_config, reference_logits

ORIGINAL, CONTEXT = 32, 128
TOLERANCE = 1e-4
pytestmark = pytest.mark.usefixtures("one_thread")


def _model(**rope: Any) -> Any:
    """A model of transformers that was trained on 32 tokens and serves 128."""
    torch.manual_seed(5)
    rope = longrope(9, partial_rotary_factor=0.75, **rope)
    keys = {**COMMON, **heads(4, 2), "hidden_size": 96, "original_max_position_embeddings": ORIGINAL}
    config = reference_config("phi3", **keys, rope_parameters=rope)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(float(parameter.ndim == 1), 0.14)
    return model


def _loaded(model: Any, directory: Path) -> Decoder:
    model.save_pretrained(directory)
    return load(directory, device=torch.device("cpu"), dtype=torch.float32).decoder


def _difference(decoder: Decoder, model: Any, length: int) -> float:
    tokens = [(7 * index + 1) % 99 for index in range(length)]
    return (logits(decoder, tokens) - reference_logits(model, tokens)).abs().max().item()


@pytest.mark.parametrize("length", [ORIGINAL + 1, 99, CONTEXT])
def test_sequence_beyond_the_original_context_has_the_logits_of_transformers(tmp_path: Path, length: int) -> None:
    model = _model()
    assert 0 < _difference(_loaded(model, tmp_path), model, length) < TOLERANCE


@pytest.mark.parametrize("length", [5, ORIGINAL])
def test_short_sequence_of_a_long_context_has_the_long_factors_too(tmp_path: Path, length: int) -> None:
    """transformers computes other keys for it, and computes all again when the sequence grows beyond."""
    decoder = _loaded(model := _model(), tmp_path)
    assert _difference(decoder, _model(short_factor=longrope(9)["long_factor"]), length) < TOLERANCE
    assert _difference(decoder, model, length) > 5 * TOLERANCE


def test_logits_of_a_token_do_not_depend_on_how_long_the_sequence_becomes(tmp_path: Path) -> None:
    decoder = _loaded(_model(), tmp_path)
    prompt = [3, 1, 4, 1, 5, 9]
    tokens = [*prompt, *generate(decoder, prompt, ORIGINAL)]
    assert len(tokens) > ORIGINAL
    assert (logits(decoder, tokens)[: len(prompt)] - logits(decoder, prompt)).abs().max() < TOLERANCE
    assert logits(decoder, tokens)[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_longrope_of_early_files_has_other_names(name: str, key: str) -> None:
    """transformers 5 refuses `su` with original_max_position_embeddings beside rope_scaling, as those files have it."""
    factors = {each: longrope(8)[each] for each in ("short_factor", "long_factor")}
    raw = {**FAMILY_CASES["phi3"].minimal, "model_type": "phi3", "original_max_position_embeddings": ORIGINAL}
    config = read_config({**raw, "rope_scaling": {key: name, **factors}})[1]
    assert config == read_config({**raw, "rope_parameters": longrope(8)})[1]
    assert config.ropes[0].kind == "longrope"
    assert config.ropes[0].attention_factor == pytest.approx(1.4**0.5)  # 1 + log 4 / log 32
