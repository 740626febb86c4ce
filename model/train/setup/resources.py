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
from model.train.data.batch import Batch, EncoderInputs, of_windows
from model.train.step.distributed import ProcessGroup
from model.train.step.loss_backend import computing_for
from model.train.step.objective import Objective
from model.train.step.optimizer import ParameterUpdates
from model.train.step.trainer import Trainer

_TERA = 1e12
_BFLOAT16_PEAKS = {
    # Dense bfloat16 with float32 sums, from the vendors' data sheets; theirs with sparsity are twice that.
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "L40S": 362.0,
    "L4": 121.0,
}
"""TFLOP/s by a part of the device's name."""
_SLOWER = {"Laptop", "Mobile", "MIG", "NVL"}
"""Parts of what the rest of such a name promises."""
_SIDE = 512
_SECONDS = 0.1
_FEWEST = 5
"""Products that are timed, however slow a busy machine makes them."""


def flops_per_token(config: ModelConfig, context: float) -> float:
    """Forward and backward pass of one token of a text of `context` tokens: 6 N + 12 L H Q T.

    PaLM's convention (arXiv:2204.02311, appendix B): attention counts every pair of tokens, also those that causality
    leaves out. N: the parameters that are multiplied; of embeddings only those that are the head too.
    """
    with torch.device("meta"):
        decoder = Decoder(config)
    looked_up = 0 if config.tied_head else decoder.embedding.numel()
    if decoder.position_embedding is not None:
        looked_up += decoder.position_embedding.numel()
    return 6.0 * (decoder.n_params - looked_up) + 12.0 * config.n_layers * config.n_heads * config.head_dim * context


def peak_flops(device: torch.device, dtype: torch.dtype) -> float | None:
    """FLOP/s of `device` in `dtype`, or None if it is unknown.

    Of a GPU the data sheet's. A CPU's is measured for a tenth of a second: the fastest product of one thread that
    stays in its cache, times the threads. Of all threads together, a busy machine gave a twentieth of that.
    """
    if device.type == "cuda":
        return known_peak(torch.cuda.get_device_name(device)) if dtype == torch.bfloat16 else None
    return _measured_peak(dtype) if device.type == "cpu" else None


def known_peak(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of the GPU that calls itself so; None for one that is not in the table."""
    words = name.replace("-", " ").split()
    if not _SLOWER.isdisjoint(words):
        return None
    found = [part for part in _BFLOAT16_PEAKS if set(part.split()) <= set(words)]
    return _BFLOAT16_PEAKS[max(found, key=len)] * _TERA if found else None


def _measured_peak(dtype: torch.dtype) -> float:
    n_threads = torch.get_num_threads()
    left, right = (torch.ones(_SIDE, _SIDE, dtype=dtype) for _ in range(2))
    times: list[float] = []
    try:
        torch.set_num_threads(1)
        torch.mm(left, right)  # makes the kernel, too, which took longer than all of this on a busy machine: MFU 779 %
        end = time.perf_counter() + _SECONDS
        while len(times) < _FEWEST or time.perf_counter() < end:
            start = time.perf_counter()
            torch.mm(left, right)
            times.append(time.perf_counter() - start)
    finally:
        torch.set_num_threads(n_threads)
    return n_threads * 2.0 * _SIDE**3 / min(times)


_FLOAT = 4
_STATES = {"muon": 1, "adamw": 2}
"""Numbers that the optimiser keeps for each number of a matrix; for the others it is always AdamW's two."""
_SLACK = 4 << 20
"""Tokenizer, card, curve, log."""
_TIMES = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Bytes."""

    weights: int
    """In float32; the gradients are as many."""
    optimiser: int
    average: int
    """Of --ema; 0 without."""
    result: int
    """The weights as they are written in the end."""

    @property
    def in_memory(self) -> int:
        """Without activations, which depend on the batch."""
        return 2 * self.weights + self.optimiser + self.average

    @property
    def snapshot(self) -> int:
        """The best weights so far stand in the place of the gradients."""
        return self.in_memory

    @property
    def on_disk(self) -> int:
        """The most at any time: a snapshot is whole before the one before it goes."""
        return 2 * self.snapshot + self.result + _SLACK


def sizes(decoder: Decoder, optimizer: Optimizer, *, ema: float, export_dtype: str) -> Sizes:
    """Of a run that trains `decoder`, which may be without numbers (device meta)."""
    blocks = (decoder.blocks, decoder.encoder_blocks)
    n, n_matrices = decoder.n_params, sum(p.numel() for part in blocks for p in part.parameters() if p.ndim == 2)
    return Sizes(
        weights=_FLOAT * n,
        optimiser=_FLOAT * (_STATES[optimizer] * n_matrices + _STATES["adamw"] * (n - n_matrices)),
        average=_FLOAT * n if ema else 0,
        result=getattr(torch, export_dtype).itemsize * n,
    )


def require_memory(n_bytes: int, free: int) -> None:
    """Whether a run has so much memory, before it takes it. Raises ValueError."""
    if n_bytes > free:
        raise ValueError(
            f"weights, gradients and optimiser need {describe_bytes(n_bytes)} of memory, {describe_bytes(free)} are "
            "free; take a smaller --preset, or less of --width, --layers or --vocab-size"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """As measured."""

    row_seconds: float
    update_seconds: float
    micro_rows: int
    """Rows at once."""
    activations: int
    """Bytes that the backward pass of so many rows needs of the forward pass."""

    def step_seconds(self, rows: int) -> float:
        """Of a step over so many rows."""
        return rows * self.row_seconds + self.update_seconds


def measure(shape: ModelConfig, options: argparse.Namespace, device: torch.device, row_tokens: int) -> Speed:
    """Trains a new decoder on noise, once to warm up and then a few times."""
    decoder = Decoder(shape).initialise(0).to(device)
    rates = {"matrix_lr": options.matrix_lr, "other_lr": options.lr, "weight_decay": options.weight_decay}
    optimiser = ParameterUpdates(decoder, options.optimizer, **rates)
    computing = computing_for(options.compile, device.type, has_encoder=shape.n_encoder_layers > 0)
    objective = Objective(decoder, device, choose_dtype(options.dtype, device), computing)
    learner = Trainer(objective, optimiser, ema=0.0, ranks=ProcessGroup(), micro_windows=options.micro_windows)
    batch = _noise(shape, options.windows, row_tokens)
    one = batch.split(learner.rows_at_once(batch))[0]
    part = batch.split(len(one.inputs_RN) * learner.workers)[0]  # as in a run, a micro-batch for each thread
    rows = len(part.inputs_RN)
    activations = _kept_by(lambda: learner.gradients(one), decoder) * rows // len(one.inputs_RN)
    learner.update(0, 0.0)
    return Speed(
        row_seconds=_seconds(lambda: learner.gradients(part), device) / rows,
        update_seconds=_seconds(lambda: learner.optimiser.step(0.0), device, before=lambda: learner.gradients(part)),
        micro_rows=rows,
        activations=activations,
    )


def _noise(shape: ModelConfig, rows: int, row_tokens: int) -> Batch:
    tokens_RN = torch.randint(shape.vocab_size, (rows, row_tokens + 1), generator=torch.Generator().manual_seed(0))
    batch = of_windows(tokens_RN)
    if not shape.n_encoder_layers:
        return batch
    read = EncoderInputs(tokens_RS=batch.inputs_RN, real_RS=torch.ones_like(batch.inputs_RN, dtype=torch.bool))
    return Batch(inputs_RN=batch.inputs_RN, targets_RN=batch.targets_RN, sources=read)


def _kept_by(work: Callable[[], object], decoder: Decoder) -> int:
    """Bytes of the storages that autograd saves during `work`, but the parameters' own."""
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
    """The least of a few times: whatever else the machine does only ever adds."""
    measured = []
    for _ in range(_TIMES):
        before()
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        measured.append(time.perf_counter() - started)
    return min(measured)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
