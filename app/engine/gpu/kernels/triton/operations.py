"""The operations of a step by Triton. Importing this file needs Triton; app/engine/gpu/triton_loader.py checks.

Made of functions of the triton_*.py files beside it; knows no network.
"""

from __future__ import annotations

from torch import Tensor

from app.engine.gpu.kernels.interface import AttentionBatch, AttentionSpec
from app.engine.gpu.kernels.launch_config import PARTIAL_BYTES, SHARED_BYTES
from app.engine.gpu.kernels.triton.attention import attention
from app.engine.gpu.kernels.triton.mlp_activation import gate
from app.engine.gpu.kernels.triton.norm import add_norm
from app.engine.gpu.kernels.triton.qkv_rope_cache import split_heads
from app.engine.gpu.kernels.triton.rows import advance, look_up
from app.engine.gpu.kernels.triton.sampler import sample


class TritonKernels:
    """`Kernels` on a GPU. Launches and returns; nothing waits for the device."""

    look_up = staticmethod(look_up)
    advance = staticmethod(advance)
    add_norm = staticmethod(add_norm)
    split_heads = staticmethod(split_heads)
    gate = staticmethod(gate)
    sample = staticmethod(sample)

    def __init__(self, partial_bytes: int = PARTIAL_BYTES, shared_bytes: int = SHARED_BYTES) -> None:
        self._partial_bytes = partial_bytes
        """Most that attention holds beside its result; where splits would need more, one program takes them in turn."""
        self._shared_bytes = shared_bytes
        """What a program may have of a multiprocessor's memory."""

    def attention(self, q_THC: Tensor, layer_cache: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        """See Kernels.attention."""
        return attention(q_THC, layer_cache, batch, spec, self._partial_bytes, self._shared_bytes)
