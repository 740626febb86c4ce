"""The operations of a step by Triton, put together. Whoever imports this file needs Triton: see the door in assembly.

Made of functions of the triton_*.py files beside it; knows no network.
"""

from __future__ import annotations

from torch import Tensor

from app.engine.kernels.face import AttentionBatch, AttentionSpec, HeadsSpec, NormSpec
from app.engine.kernels.sampling_table import SampleOut, SamplingTable
from app.engine.kernels.tiling import PARTIAL_BYTES, SHARED_BYTES
from app.engine.kernels.triton_attention import attention
from app.engine.kernels.triton_gate import gate
from app.engine.kernels.triton_heads import split_heads
from app.engine.kernels.triton_norm import add_norm
from app.engine.kernels.triton_sampler import sample
from model.config import Activation


class TritonKernels:
    """`Kernels` on a GPU. Launches and returns; nothing waits for the device."""

    def __init__(self, partial_bytes: int = PARTIAL_BYTES, shared_bytes: int = SHARED_BYTES) -> None:
        self._partial_bytes = partial_bytes
        """Most that attention holds beside its result; where splits would need more, one program takes them in turn."""
        self._shared_bytes = shared_bytes
        """What a program may have of a multiprocessor's memory."""

    def add_norm(self, x_TD: Tensor, delta_TD: Tensor | None, norm: NormSpec) -> tuple[Tensor, Tensor]:
        """See Kernels.add_norm."""
        return add_norm(x_TD, delta_TD, norm)

    def split_heads(
        self,
        qkv_TX: Tensor,
        spec: HeadsSpec,
        positions_T: Tensor,
        rope_PC: Tensor | None,
        layer_cache: Tensor,
        slots_T: Tensor,
    ) -> Tensor:
        """See Kernels.split_heads."""
        return split_heads(qkv_TX, spec, positions_T, rope_PC, layer_cache, slots_T)

    def attention(self, q_THC: Tensor, layer_cache: Tensor, batch: AttentionBatch, spec: AttentionSpec) -> Tensor:
        """See Kernels.attention."""
        return attention(q_THC, layer_cache, batch, spec, self._partial_bytes, self._shared_bytes)

    def gate(self, hidden_TX: Tensor, activation: Activation, gated: bool) -> Tensor:
        """See Kernels.gate."""
        return gate(hidden_TX, activation, gated)

    def sample(
        self, logits_SV: Tensor, rows_S: Tensor, positions_S: Tensor, table: SamplingTable, out: SampleOut
    ) -> None:
        """See Kernels.sample."""
        sample(logits_SV, rows_S, positions_S, table, out)
