"""Whether a GPU and its torch support a weight format, and Triton's kernels a model."""

from __future__ import annotations

import torch

from model.config import ModelConfig
from model.weight_formats import Quantize, needs_gpu

_FP8_CAPABILITY = (8, 9)
_FP8_TORCH = {(8, 9): (2, 12)}
"""The first torch whose product scales rows of fp8 on GPUs of this compute capability, where that is not the oldest."""


def check_quantize(
    quantize: Quantize,
    device: str,
    dtype: torch.dtype,
    capability: tuple[int, int] | None = None,
    torch_version: str = torch.__version__,
) -> None:
    """Raises ValueError if a format is requested but not supported here: fp8, the only one that needs a GPU.

    capability: compute capability of the GPU, if any.
    """
    if not needs_gpu(quantize):
        return
    if device != "cuda":
        raise ValueError(
            f"--quantize fp8 requires a GPU, and the device is {device}: use --quantize int8, int4 or none"
        )
    if capability is None or capability < _FP8_CAPABILITY:
        found = "unknown" if capability is None else f"{capability[0]}.{capability[1]}"
        raise ValueError(
            "--quantize fp8 requires a GPU of compute capability 8.9 or newer (Ada, Hopper, Blackwell), and this one "
            f"has {found}: use --quantize int8, int4 or none"
        )
    needed = _FP8_TORCH.get(capability, (0, 0))
    if tuple(map(int, torch_version.split(".")[:2])) < needed:
        raise ValueError(
            f"--quantize fp8 on a GPU of compute capability {capability[0]}.{capability[1]} requires torch "
            f"{needed[0]}.{needed[1]} or newer, and this is {torch_version}: update it, or use --quantize int8, int4 "
            "or none"
        )
    if dtype != torch.bfloat16:
        raise ValueError("--quantize fp8 computes in bfloat16: use --dtype bfloat16 or auto")


def describe_unsupported(config: ModelConfig) -> str | None:
    """Why Triton's kernels cannot compute this model; None if they can."""
    return "the model has an encoder, which Triton's kernels do not compute" if config.n_encoder_layers else None
