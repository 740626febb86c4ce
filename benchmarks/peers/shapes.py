"""The models that sides are compared on: three shapes with random weights, and the default ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.peers.numbers import ModelSize
from benchmarks.peers.words import tokenizer_of
from model.checkpoint.checkpoint import load_config, weights_files
from model.config import ModelConfig
from model.nn.transformer import Decoder

_STD = 0.02


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
    # GPT-2, the smallest: 124 M parameters.
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
    # 135 M parameters: the memory's bandwidth rules.
    "B": _llama(30, 576, 9, 3, 1536, 49_152),
    # 15.7 M parameters: lies in the last cache; the number of operations rules.
    "C": _llama(8, 384, 6, 2, 1024, 8192),
}
MODELS = ("default", *SHAPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A weights directory that every side can have made into its own format."""

    name: str
    directory: Path
    config: ModelConfig

    @property
    def size(self) -> ModelSize:
        """For the limits of the machine."""
        return size_of(self.config)


def size_of(config: ModelConfig) -> ModelSize:
    """Of the embedding a step reads only rows, unless it is the head too."""
    heads, kv_heads = config.n_heads * config.head_dim, config.n_kv_heads * config.head_dim
    attention = config.width * (heads + 2 * kv_heads) + heads * config.width
    mlp = (3 if config.gated else 2) * config.width * config.mlp_width
    return ModelSize(
        body=config.n_layers * (attention + mlp),
        head=config.vocab_size * config.width,
        kv_per_token=config.kv_numbers_per_token,
    )


def find_model(name: str, *, weights: Path, folder: Path) -> Model:
    """The model called `name`; a random one is written into `folder` where it is not there yet."""
    directory = weights if name == "default" else folder / name
    if name != "default" and not (directory / "config.json").exists():
        write_random(SHAPES[name], directory)
    return Model(name=name, directory=directory.resolve(), config=load_config(directory))


def write_random(config: ModelConfig, directory: Path) -> None:
    """The same weights always; config.json comes last: a directory that has it is whole."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizer_of(config.vocab_size)
    files = weights_files(random_decoder(config), dtype=torch.bfloat16, eos_id=tokenizer.eos_id, generation={})
    everything = files | {name: text.encode() for name, text in tokenizer.files().items()}
    for name in sorted(everything, key=lambda name: name == "config.json"):
        (directory / name).write_bytes(everything[name])


def random_decoder(config: ModelConfig) -> Decoder:
    """Every matrix keeps the size of what goes through it, so that the text depends on all of them.

    With the small numbers that training begins with, a tied head would only repeat the latest token.
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
