"""Directories to convert: small models of any family with a tokenizer; and what a conversion makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from model.checkpoint.checkpoint import load
from model.checkpoint.conversion import Dtype
from model.checkpoint.converted_directory import ConvertedDirectory, open_directory, open_gguf, prepare
from model.checkpoint.gguf_directory import find_gguf
from model.nn.reference import logits
from tests.support.model.hub_checkpoints import save_reference
from tests.support.model.tiny_models import VOCAB

PROMPT = (1, 5, 9, 33, 2, 7)
LLAMA_SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "num_attention_heads": 4}
"""Sizes that groups of 128 columns divide, for families with llama's keys."""


def save_convertible(case: str, directory: Path, weights: Path, **changes: object) -> Path:
    """A model that inkstream check accepts. weights: a directory of tiny_weights(), whose tokenizer it gets."""
    save_reference(case, directory, **{"vocab_size": VOCAB, **changes})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(weights / name, directory / name)
    return directory


def convert(source: Path, out: Path, *, dtype: Dtype | None = None, bits: int = 0) -> ConvertedDirectory:
    """Converts without the command line; returns what was planned."""
    opened = open_gguf(source) if find_gguf(source) else open_directory(source)
    directory = prepare(opened, out, dtype=dtype, bits=bits)
    directory.write(lambda _: None)
    return directory


def logits_of(directory: Path, dtype: torch.dtype = torch.float32) -> Tensor:
    """Logits [T, V] of PROMPT."""
    return logits(load(directory, device=torch.device("cpu"), dtype=dtype).decoder, list(PROMPT))


def config_of(directory: Path) -> dict[str, object]:
    """The config.json."""
    content: dict[str, object] = json.loads((directory / "config.json").read_text())
    return content


def names(folder: Path) -> set[str]:
    """Names of everything in a folder, hidden files too."""
    return {path.name for path in folder.iterdir()}


def leftovers(folder: Path, known: Iterable[str]) -> set[str]:
    """What is in the folder besides these names."""
    return names(folder) - set(known)
