"""Resources of a training run: bytes computed from its parameters, seconds measured on a few micro-batches, FLOPs.

Model FLOPs utilization divides the FLOPs of the tokens seen by the peak FLOP/s of the device.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from model.checkpoint.model_summary import describe_bytes
from model.command_line import Optimizer
from model.config import ModelConfig
from model.device import choose_dtype
from model.nn.transformer import Decoder
from model.train.data.batch import Batch, EncoderInputs, batch_of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import choose_loss_backend
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer

_TERA = 1e12
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


def flops_per_token(config: ModelConfig, context: float) -> float:
    """FLOPs of forward and backward pass per token, at `context` tokens: 6 N + 12 L H Q T.

    PaLM's convention (arXiv:2204.02311, appendix B): attention counts all pairs of tokens, also masked ones. N: number
    of parameters in matrix products, which includes an embedding only if it is also the head.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    looked_up = 0 if config.tied_head else decoder.embedding.numel()
    if decoder.position_embedding is not None:
        looked_up += decoder.position_embedding.numel()
    return 6.0 * (decoder.n_params - looked_up) + 12.0 * config.n_layers * config.n_heads * config.head_dim * context


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the GPU with this name; None if it is not in the table."""
    words = name.replace("-", " ").split()
    if not _SLOWER_VARIANTS.isdisjoint(words):
        return None
    found = [part for part in _BFLOAT16_PEAKS if set(part.split()) <= set(words)]
    return _BFLOAT16_PEAKS[max(found, key=len)] * _TERA if found else None


_FLOAT = 4
_STATES = {"muon": 1, "adamw": 2}
"""Optimizer state per element of a block's matrix; all other parameters use AdamW with two."""
_SLACK = 4 << 20
"""Bytes for tokenizer, model card, plot and log."""
_REPEATS = 3


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
        """Memory without activations, which depend on the batch."""
        return 2 * self.weights + self.optimizer + self.average

    @property
    def snapshot(self) -> int:
        """Size of a snapshot, which stores the best weights but no gradients."""
        return self.in_memory

    @property
    def on_disk(self) -> int:
        """Peak disk space: a snapshot is complete before the previous one is removed."""
        return 2 * self.snapshot + self.result + _SLACK


def sizes(decoder: Decoder, optimizer: Optimizer, *, ema: float, export_dtype: str) -> Sizes:
    """Sizes of a run that trains `decoder`, which may be on the meta device."""
    blocks = (decoder.blocks, decoder.encoder_blocks)
    n, n_matrices = decoder.n_params, sum(p.numel() for part in blocks for p in part.parameters() if p.ndim == 2)
    return Sizes(
        weights=_FLOAT * n,
        optimizer=_FLOAT * (_STATES[optimizer] * n_matrices + _STATES["adamw"] * (n - n_matrices)),
        average=_FLOAT * n if ema else 0,
        result=getattr(torch, export_dtype).itemsize * n,
    )


def require_memory(n_bytes: int, free: int) -> None:
    """Raises ValueError if less than `n_bytes` are free."""
    if n_bytes > free:
        raise ValueError(
            f"weights, gradients and optimizer need {describe_bytes(n_bytes)} of memory, {describe_bytes(free)} are "
            "free; use a smaller --preset, --width, --layers or --vocab-size"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Measured training speed."""

    row_seconds: float
    update_seconds: float
    micro_rows: int
    """Rows per micro-batch."""
    activations: int
    """Bytes saved in the forward pass of `micro_rows` rows for the backward pass."""

    def step_seconds(self, rows: int) -> float:
        """Seconds of a step over `rows` rows."""
        return rows * self.row_seconds + self.update_seconds


def measure(shape: ModelConfig, options: argparse.Namespace, device: torch.device, row_tokens: int) -> Speed:
    """Measures training of a new decoder on random tokens, after a warm-up."""
    decoder = Decoder(shape).initialize(0).to(device)
    rates = {"matrix_lr": options.matrix_lr, "other_lr": options.lr, "weight_decay": options.weight_decay}
    optimizer = ParameterUpdates(decoder, options.optimizer, **rates)
    loss_backend = choose_loss_backend(options.compile, device.type, has_encoder=shape.n_encoder_layers > 0)
    objective = Objective(decoder, device, choose_dtype(options.dtype, device), loss_backend)
    trainer = Trainer(objective, optimizer, ema=0.0, ranks=ProcessGroup(), micro_windows=options.micro_windows)
    batch = _noise(shape, options.windows, row_tokens)
    one = batch.split(trainer.micro_batch_rows(batch))[0]
    part = batch.split(len(one.inputs_RN) * trainer.workers)[0]  # as in a run, a micro-batch for each thread
    rows = len(part.inputs_RN)
    activations = _saved_bytes(lambda: trainer.gradients(one), decoder) * rows // len(one.inputs_RN)
    trainer.update(0, 0.0)
    return Speed(
        row_seconds=_seconds(lambda: trainer.gradients(part), device) / rows,
        update_seconds=_seconds(lambda: trainer.optimizer.step(0.0), device, before=lambda: trainer.gradients(part)),
        micro_rows=rows,
        activations=activations,
    )


def _noise(shape: ModelConfig, rows: int, row_tokens: int) -> Batch:
    tokens_RN = torch.randint(shape.vocab_size, (rows, row_tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = batch_of_windows(tokens_RN)
    if not shape.n_encoder_layers:
        return batch
    read = EncoderInputs(tokens_RS=batch.inputs_RN, real_RS=torch.ones_like(batch.inputs_RN, dtype=torch.bool))
    return Batch(inputs_RN=batch.inputs_RN, targets_RN=batch.targets_RN, sources=read)


def _saved_bytes(work: Callable[[], object], decoder: Decoder) -> int:
    """Bytes of the storages that autograd saves during `work`, excluding parameters."""
    own = {p.untyped_storage().data_ptr() for p in decoder.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        work()
    return sum(kept.values())


def _seconds(work: Callable[[], object], device: torch.device, before: Callable[[], object] = lambda: None) -> float:
    """The minimum of a few measurements: other load on the machine only adds time."""
    measured = []
    for _ in range(_REPEATS):
        before()
        _synchronize(device)
        started = time.perf_counter()
        work()
        _synchronize(device)
        measured.append(time.perf_counter() - started)
    return min(measured)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
