"""The compared models: three shapes with random weights, and the default weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch

from benchmarks.prompts import pseudo_prose
from benchmarks.roofline import ModelSize, size_of
from model.checkpoint.checkpoint import load_config, weights_files
from model.config import ModelConfig
from model.nn.transformer import Decoder
from model.tokenizer.tokenizer import Tokenizer

_VOWELS = ("a", "e", "i", "o", "u", "ai", "ou")
_SYLLABLES = [consonant + vowel for consonant in "bcdfghjklmnprstvwz" for vowel in _VOWELS]
_PROSE_WORDS = 20_000
_STD = 0.02


def tokenizer_of(vocab_size: int) -> Tokenizer:
    """A tokenizer with exactly `vocab_size` tokens; most words of the prompts are one token."""
    return Tokenizer.train(_texts(vocab_size), vocab_size)


def _texts(vocab_size: int) -> Iterator[str]:
    """The prompts' prose, often enough to be merged first, then made-up words for the rest of the vocabulary."""
    yield from (pseudo_prose(index=index, words=100, seed=9) for index in range(_PROSE_WORDS // 100))
    random = Random(0)
    for _ in range(vocab_size // 8):
        yield " ".join("".join(random.choices(_SYLLABLES, k=random.randint(2, 5))) for _ in range(16))


def _llama(layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int) -> ModelConfig:
    return ModelConfig(
        n_layers=layers,
        width=width,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=64,
        mlp_width=mlp,
        vocab_size=vocab,
        context=1024,
    )


SHAPES = {
    # GPT-2 small: 124 M parameters.
    "A": ModelConfig(
        n_layers=12,
        width=768,
        n_heads=12,
        n_kv_heads=12,
        head_dim=64,
        mlp_width=3072,
        vocab_size=50_257,
        context=1024,
        norm="layernorm",
        norm_bias=True,
        positions="learned",
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
    ),
    # 135 M parameters: bound by memory bandwidth.
    "B": _llama(30, 576, 9, 3, 1536, 49_152),
    # 15.7 M parameters: fits in the last-level cache; bound by arithmetic.
    "C": _llama(8, 384, 6, 2, 1024, 8192),
}
MODELS = ("default", *SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A weights directory that all engines can convert."""

    name: str
    directory: Path
    config: ModelConfig

    @property
    def size(self) -> ModelSize:
        """Size for the roofline model."""
        return size_of(self.config)


def find_model(name: str, *, weights: Path, folder: Path) -> Model:
    """The model called `name`; a random one is written into `folder` first."""
    directory = weights if name == "default" else folder / name
    if name != "default" and not (directory / "config.json").exists():
        write_random(SHAPES[name], directory)
    return Model(name=name, directory=directory.resolve(), config=load_config(directory))


def write_random(config: ModelConfig, directory: Path) -> None:
    """Always the same weights. Writes config.json last: a directory that has it is complete."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(config.vocab_size)
    files = weights_files(random_decoder(config), dtype=torch.bfloat16, eos_id=tokenizer.eos_id, generation={})
    everything = files | {name: text.encode() for name, text in tokenizer.files().items()}
    for name in sorted(everything, key=lambda name: name == "config.json"):
        (directory / name).write_bytes(everything[name])


def random_decoder(config: ModelConfig) -> Decoder:
    """Every matrix preserves the scale of its input, so that the output depends on all of them.

    With the small numbers of an initialization for training, a tied head would only repeat the latest token.
    """
    torch.manual_seed(0)
    decoder = Decoder(config)
    for name, parameter in decoder.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.zeros_(parameter)
        elif parameter.dim() < 2:
            torch.nn.init.ones_(parameter)
        else:
            torch.nn.init.normal_(parameter, std=_STD if "embedding" in name else parameter.shape[1] ** -0.5)
    return decoder
