"""Small random checkpoints of every Hugging Face family, saved by transformers: the oracle of family tests."""

from __future__ import annotations

import zlib
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.support.lazy_modules import transformers
from tests.support.model.family_cases import COMMON, all_cases

FAMILY_CASES = all_cases()
FAMILIES = tuple(FAMILY_CASES)
UNKNOWN_TO_TRANSFORMERS: tuple[str, ...] = ()
"""Families with a test file of their own, which writes their files."""
CASES = {f"{name}-{letter}": keys for name, cases in FAMILY_CASES.items() for letter, keys in cases.shapes.items()}
"""The small models of all families."""


def family_name(case: str) -> str:
    """The model_type of a case."""
    return case.partition("-")[0]


def reference_config(name: str, **keys: Any) -> Any:
    """transformers' configuration, which completes the nested objects that it is given: not ours."""
    return transformers.AutoConfig.for_model(name, **deepcopy(keys))


def reference_model(case: str, **changes: Any) -> Any:
    """The transformers model with random parameters, the same whatever other cases there are.

    Biases of 0 and norms of 1 would hide mistakes.
    """
    config = reference_config(family_name(case), **{**COMMON, **CASES[case], **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    generator = torch.Generator().manual_seed(zlib.crc32(case.encode()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter += torch.empty_like(parameter).uniform_(-0.5, 0.5, generator=generator)
            else:
                parameter.normal_(0.0, 1.4 * model.config.hidden_size**-0.5, generator=generator)
    return model


def save_reference(case: str, directory: Path, **changes: Any) -> Any:
    """Saves the reference model, with changes of its configuration, to `directory`, and returns it."""
    model = reference_model(case, **changes)
    model.save_pretrained(directory)
    return model


def reference_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [T, V] of one sequence."""
    with torch.inference_mode():
        logits_TV: Tensor = model(torch.tensor([tokens])).logits[0]
    return logits_TV
