"""Cache groups: the layers whose keys and values share blocks, because they have one window and one format.

Each group has a cache of its own, [layer of the group, 2, block, ..], with its own number of blocks: a sequence has one
block table for each group, and a group with a window needs only the blocks that the next token sees. A model whose
layers are all alike has one.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass

from model.cache_formats import SCALE_BYTES, KvCache
from model.config import ModelConfig
from model.number_formats import ITEM_BYTES


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """How a cache stores keys and values."""

    dtype: str
    """Number format: float32, bfloat16, or int8 with scales."""

    @property
    def has_codes(self) -> bool:
        """Whether codes and scales are stored instead of numbers."""
        return self.dtype == "int8"

    def head_bytes(self, head_dim: int) -> int:
        """Bytes of one token's key, or value, of one head."""
        return head_dim + SCALE_BYTES if self.has_codes else head_dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """Layers that share a window and a format."""

    layers: tuple[int, ...]
    """Their indices in the decoder, in order."""
    window: int | None
    format: CacheFormat

    def __str__(self) -> str:
        layers = f"{len(self.layers)} layer{'s' if len(self.layers) > 1 else ''}"
        return layers if self.window is None else f"{layers} with a window of {self.window}"

    @property
    def n_reserved_blocks(self) -> int:
        """Blocks behind the pool's own: the padding block, and with a window the null block.

        The padding block may hold anything. The null block stands for blocks that a window has passed, and no step
        writes to it (BlockPool.null_block).
        """
        return 1 if self.window is None else 2

    def token_bytes(self, config: ModelConfig) -> int:
        """Bytes of one token's keys and values in all of these layers."""
        return 2 * len(self.layers) * config.n_kv_heads * self.format.head_bytes(config.head_dim)


def cache_dtype(dtype: str, kv_cache: KvCache) -> str:
    """The number format of the caches. dtype: of the steps, float32 or bfloat16."""
    return dtype if kv_cache == "auto" else kv_cache


def cache_groups(config: ModelConfig, dtype: str) -> tuple[CacheGroup, ...]:
    """The groups of a decoder, in the order of their first layers. dtype: of all caches."""
    windows = config.windows
    return tuple(
        CacheGroup(
            layers=tuple(layer for layer, other in enumerate(windows) if other == window),
            window=window,
            format=CacheFormat(dtype),
        )
        for window in dict.fromkeys(windows)
    )


def block_counts(blocks: int | Items[int], groups: Items[CacheGroup]) -> tuple[int, ...]:
    """The number of blocks of each group, without the reserved ones. blocks: the same, or one number for all groups."""
    counts = (blocks,) * len(groups) if isinstance(blocks, int) else tuple(blocks)
    assert len(counts) == len(groups), f"{len(counts)} numbers of blocks for {len(groups)} cache groups"
    return counts


def cache_places(groups: tuple[CacheGroup, ...]) -> list[tuple[int, int]]:
    """For each layer of the decoder its group, and its index among the group's layers."""
    places = {layer: (index, place) for index, group in enumerate(groups) for place, layer in enumerate(group.layers)}
    return [places[layer] for layer in range(len(places))]
