"""The measured models, with random weights created in memory: 16 GB need no file.

Every matrix preserves the scale of its input, so that the output depends on all of them, and logits are as far apart as
those of a trained model: with flat ones the next token would depend on the last bit of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.peers.shapes import SHAPES as PEERS_SHAPES
from model.checkpoint.checkpoint import Checkpoint
from model.config import ModelConfig
from model.nn.transformer import Decoder

_TINY = ModelConfig(
    vocab_size=320,
    width=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    mlp_width=96,
    context=192,
)
_SPREAD = 2.5
"""Approximate standard deviation of the logits."""

SHAPES = {
    # 124 M parameters, a context of 1,024.
    "gpt2": PEERS_SHAPES["A"],
    # 1.1 B.
    "1b": ModelConfig(
        vocab_size=32_000,
        width=2048,
        n_layers=22,
        n_heads=32,
        n_kv_heads=4,
        head_dim=64,
        mlp_width=5632,
        context=4096,
        tied_head=False,
    ),
    # 8.0 B: 16 GB in bfloat16.
    "8b": ModelConfig(
        vocab_size=128_256,
        width=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=8,
        head_dim=128,
        mlp_width=14_336,
        context=8192,
        rope_theta=500_000.0,
        tied_head=False,
    ),
}


def shape_of(name: str, *, tiny: bool) -> ModelConfig:
    """The shape by name, or a tiny one of the same layout."""
    if not tiny:
        return SHAPES[name]
    return _TINY if name != "gpt2" else _small_gpt()


def checkpoint_reader(config: ModelConfig, state: Mapping[str, Tensor] | None = None) -> Callable[..., Checkpoint]:
    """Reader of weights for build_engine(): returns these tensors, or else random ones."""

    def read(_directory: Path, *, device: torch.device, dtype: torch.dtype) -> Checkpoint:
        tensors = random_state(config, device=device, dtype=dtype) if state is None else state
        decoder = decoder_of(config, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})
        return Checkpoint(
            decoder=decoder.to(device),
            family="random",
            generation={},
            eos_ids=(),
            bos_id=0,
            hashes={Path("model.safetensors"): f"{0:064x}"},
        )

    return read


def decoder_of(config: ModelConfig, state: Mapping[str, Tensor]) -> Decoder:
    """A decoder that holds these tensors, without copies."""
    with torch.device("meta"):
        decoder = Decoder(config)
    decoder.load_state_dict(dict(state), assign=True)
    decoder.make_tables()
    return decoder.requires_grad_(False).eval()


def random_state(config: ModelConfig, *, device: torch.device, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor]:
    """Always the same on the same device; takes no more memory than the tensors themselves."""
    generator = torch.Generator(device).manual_seed(seed)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in Decoder(config).named_parameters()}
    state = {}
    for name, shape in shapes.items():
        tensor = state[name] = torch.empty(shape, device=device, dtype=dtype)
        if name.endswith("bias"):
            tensor.normal_(0.0, 0.1, generator=generator)
        elif len(shape) == 1:
            tensor.normal_(1.0, 0.1, generator=generator)
        elif "embedding" in name or "head" in name:
            tensor.normal_(0.0, _SPREAD * config.width**-0.5, generator=generator)
        else:
            tensor.normal_(0.0, shape[1] ** -0.5, generator=generator)
    return state


def _small_gpt() -> ModelConfig:
    """GPT-2's layout in a size for a CPU."""
    return replace(
        PEERS_SHAPES["A"],
        n_layers=2,
        width=64,
        n_heads=4,
        n_kv_heads=4,
        head_dim=16,
        mlp_width=96,
        vocab_size=320,
        context=192,
    )
