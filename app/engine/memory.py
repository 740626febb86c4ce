"""How much cache fits into the memory that is free. Knows shapes and bytes, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from app.engine.source_cache import source_tokens
from model.config import ModelConfig

_SHARE = 0.5


def choose_context(shape: ModelConfig, wanted: int) -> int:
    """Tokens that a sequence may have; 0 takes the model's own. Raises ValueError."""
    if wanted > shape.context:
        raise ValueError(f"--max-context {wanted} is more than the model's context of {shape.context}")
    return wanted or shape.context


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
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

    def blocks(self, wanted: int, free_bytes: int, engines: int = 1) -> int:
        """As many blocks as are wanted (0: as all running requests can fill) within a share of the free memory.

        `engines` take theirs from it at the same time. Raises ValueError.
        """
        needed = -(-self.context // self.block_size)
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

    @property
    def _token_bytes(self) -> int:
        return self.shape.kv_numbers_per_token * self.dtype.itemsize


def free_memory(device: torch.device) -> int:
    """Bytes that could be taken."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 4 << 30
