"""Model FLOPs utilization: FLOPs of a token, and peak FLOP/s of the device."""

from __future__ import annotations

import time

import torch

from model.config import ModelConfig
from model.nn.transformer import Decoder

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
