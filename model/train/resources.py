"""Resources of a training run, computed from its parameters: bytes of its state, FLOPs of a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from model.checkpoint.model_summary import describe_bytes
from model.command_line import Optimizer
from model.config import ModelConfig
from model.decoder_program import Kind, cost, decoder_program, encoder_program
from model.nn.transformer import Decoder
from model.train.step.optimizer import block_matrices

_BFLOAT16_PEAKS = {
    # Dense bfloat16 with float32 accumulation, from the vendors' data sheets (figures with sparsity are twice that).
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""Part of the device's name -> TFLOP/s."""
_SLOWER_VARIANTS = {"Laptop", "Mobile", "MIG", "NVL"}
"""Words in the names of slower variants."""
_FLOAT = 4
_STATES = {"muon": 1, "adamw": 2}
"""Optimizer state per element of a block's matrix; all other parameters use AdamW with two."""
_SLACK = 4 << 20
"""Bytes for tokenizer, model card, plot and log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes of a run's state."""

    weights: int
    """Weights in float32; the gradients take as much."""
    optimizer: int
    average: int
    """Averaged weights of --ema; 0 without."""
    result: int
    """Exported weights."""

    @property
    def in_memory(self) -> int:
        """Memory without activations, which depend on the batch; also a snapshot: best weights, but no gradients."""
        return 2 * self.weights + self.optimizer + self.average

    @property
    def on_disk(self) -> int:
        """Peak disk space: a snapshot is complete before the previous one is removed."""
        return 2 * self.in_memory + self.result + _SLACK


def sizes(decoder: Decoder, optimizer: Optimizer, *, ema: float, export_dtype: str) -> Sizes:
    """Sizes of a run that trains `decoder`, which may be on the meta device."""
    n, n_matrices = decoder.n_params, sum(matrix.numel() for matrix in block_matrices(decoder))
    return Sizes(
        weights=_FLOAT * n,
        optimizer=_FLOAT * (_STATES[optimizer] * n_matrices + _STATES["adamw"] * (n - n_matrices)),
        average=_FLOAT * n if ema else 0,
        result=getattr(torch, export_dtype).itemsize * n,
    )


def require_memory(n_bytes: int, free: int) -> None:
    """Raises ValueError if less than `n_bytes` are free: the out-of-memory killer may end any process."""
    if n_bytes > free:
        raise ValueError(
            f"weights, gradients and optimizer need {describe_bytes(n_bytes)} of memory, {describe_bytes(free)} are "
            "free; use a smaller --preset, --width, --layers or --vocab-size"
        )


def meta_decoder(config: ModelConfig) -> Decoder:
    """A decoder without weights, for its number of parameters."""
    with torch.device("meta"):
        return Decoder(config)


def flops_per_token(config: ModelConfig, context: float) -> float:
    """FLOPs of forward and backward pass per token, at `context` tokens: 6 N + 12 L H Q T.

    PaLM's convention (arXiv:2204.02311, appendix B): attention counts all pairs of tokens within a layer's window, also
    masked ones. N: number of parameters except those that are looked up, as an embedding is that is not also the head.
    """
    flops = 0.0
    for operation in (*encoder_program(config), *decoder_program(config)):
        if operation.kind != Kind.EMBED:
            each = cost(config, operation, context)
            is_attention = operation.kind in (Kind.ATTENTION, Kind.CROSS_ATTENTION)
            flops += 6.0 * each.parameters + 3.0 * each.flops * is_attention
    return flops


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the GPU with this name; None if it is not in the table."""
    words = name.replace("-", " ").split()
    if not _SLOWER_VARIANTS.isdisjoint(words):
        return None
    found = [part for part in _BFLOAT16_PEAKS if set(part.split()) <= set(words)]
    return 1e12 * _BFLOAT16_PEAKS[max(found, key=len)] if found else None
