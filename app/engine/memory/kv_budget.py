"""How much cache a service needs, and how much fits into the memory. Knows shapes and bytes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.engine.memory.encoder_cache import source_tokens
from app.engine.memory.memory_plan import MemoryPlan, mib
from model.config import ModelConfig

_SHARE = 0.5
_MOST_BLOCKS = 1 << 20
"""Of a GPU's cache, which takes all that is left: each block costs the scheduler memory of the host, too."""


def choose_context(shape: ModelConfig, wanted: int) -> int:
    """Tokens that a sequence may have; 0 takes the model's own. Raises ValueError."""
    if wanted > shape.context:
        raise ValueError(f"--max-context {wanted} is more than the model's context of {shape.context}")
    return wanted or shape.context


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What the caches of a service need."""

    shape: ModelConfig
    context: int
    block_size: int
    max_running: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of the KV cache."""
        return self._token_bytes * self.block_size

    @property
    def source_bytes(self) -> int:
        """Bytes of what the encoder read for all running requests."""
        return self._token_bytes * source_tokens(self.context) * self.max_running if self.shape.n_encoder_layers else 0

    @property
    def needed_blocks(self) -> int:
        """Of one sequence as long as may be."""
        return -(-self.context // self.block_size)

    def cache_bytes(self, blocks: int) -> int:
        """Of a cache with so many blocks: one more is nobody's, and what the encoder read lies beside it."""
        return (blocks + 1) * self.block_bytes + self.source_bytes

    def blocks(self, wanted: int, free_bytes: int, engines: int = 1) -> int:
        """As many blocks as are wanted (0: as all running requests can fill) within a share of the free memory.

        `engines` take theirs from it at the same time. Raises ValueError.
        """
        needed = self.needed_blocks
        affordable = max(0, int(free_bytes * _SHARE) // engines - self.source_bytes) // self.block_bytes
        share = "half of the free memory"
        if engines > 1:
            share = f"each engine's part of {share} (--replicas {engines})"
        if affordable < needed:
            least_bytes = needed * self.block_bytes + self.source_bytes
            flags = ["--max-context", *["--max-running"] * bool(self.source_bytes), *["--replicas"] * (engines > 1)]
            raise ValueError(
                f"a sequence of {self.context} tokens needs {least_bytes >> 20} MiB of cache, more than {share} holds: "
                f"give a smaller {' or '.join(flags)}, or free some"
            )
        if not wanted:
            return min(needed * self.max_running, affordable)
        if not needed <= wanted <= affordable:
            raise ValueError(
                f"--kv-blocks {wanted} does not fit: the context of {self.context} tokens needs at least "
                f"{needed} blocks, and {share} holds {affordable}"
            )
        return wanted

    def blocks_on_gpu(self, wanted: int, plan: MemoryPlan) -> int:
        """As many blocks as are wanted (0: all that the plan has room for). Raises ValueError."""
        affordable = max(0, (plan.cache_room - self.source_bytes) // self.block_bytes - 1)
        needed = self.needed_blocks
        if affordable < needed:
            raise ValueError(
                f"a sequence of {self.context} tokens needs {mib(self.cache_bytes(needed))} of cache, and "
                f"{plan.refusal()}: {self._advice(affordable, plan)}"
            )
        if not wanted:
            return min(affordable, _MOST_BLOCKS)
        if wanted < needed:
            raise ValueError(
                f"--kv-blocks {wanted} is too few: the context of {self.context} tokens needs {needed} blocks of "
                f"{self.block_size} (or a smaller --max-context)"
            )
        if wanted > affordable:
            raise ValueError(
                f"--kv-blocks {wanted} does not fit: these blocks need {mib(self.cache_bytes(wanted))} of cache, and "
                f"{plan.refusal()}: give at most {affordable}"
            )
        return wanted

    def _advice(self, affordable: int, plan: MemoryPlan) -> str:
        """The numbers that help where not even one sequence fits."""
        flags = []
        if self.source_bytes:  # the sources of all running requests need room, too
            flags.append("a smaller --max-context or --max-running")
        elif affordable:
            flags.append(f"--max-context {affordable * self.block_size} or less")
        if utilization := plan.utilization_for(self.cache_bytes(self.needed_blocks)):
            flags.append(f"--gpu-memory-utilization {utilization:g} or more")
        return f"give {', or '.join(flags)}" if flags else "take a smaller model, or end what else uses the GPU"

    @property
    def _token_bytes(self) -> int:
        return self.shape.kv_numbers_per_token * self.dtype.itemsize
