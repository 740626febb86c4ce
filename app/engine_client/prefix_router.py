"""Prefix router: chooses an engine, preferably one that has the prompt's first blocks in its prefix cache.

Such an engine need not compute them. The router does not query the engines but remembers which blocks it sent: the
chained hashes of the blocks, as many as the cache has blocks, with least-recently-used eviction like the cache itself.

The bound on an engine's load is the one of "Consistent Hashing with Bounded Loads" (Mirrokni, Thorup and Zadimoghaddam,
SODA 2018): _BOUND times the mean, rounded up. A prefix that all requests share fills one engine up to this bound, then
a second one caches it, too.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice

from app.common.model_version import Version
from app.common.types import Request

_BOUND = 1.25
_MAX_HASHES = 4096
"""Limit per request: 65,536 prompt tokens in blocks of 16, which take about two milliseconds."""


def block_hashes(requests: Iterable[Request], block_size: int, version: Version) -> list[int]:
    """Chained hashes of the full blocks of all prompts, in order.

    A hash covers all tokens up to the end of its block, the adapters, and the cache namespace, which isolates tenants.
    All engines have the same weights. A hash collision costs a prompt that is computed twice, and nothing else.
    """
    chains = (_chain(request, block_size, version) for request in requests if request.leader is None)
    return list(dict.fromkeys(islice((block for chain in chains for block in chain), _MAX_HASHES)))


def _chain(request: Request, block_size: int, version: Version) -> Iterator[int]:
    parent = hash((request.cache_namespace, request.source, *version.adapters))
    for start in range(0, len(request.prompt) - block_size + 1, block_size):
        parent = hash((parent, request.prompt[start : start + block_size]))
        yield parent


class PrefixRouter:
    """Remembers which blocks were sent to which engine. Owned by the event loop."""

    def __init__(self, engines: int) -> None:
        self._blocks_of: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(engines)]
        self._last_used = [0] * engines
        self._clock = 0

    def choose(self, hashes: Sequence[int], loads: Mapping[int, int], adding: int) -> int:
        """Chooses an engine for `adding` sequences. loads: number of sequences of each candidate.

        Among engines within the bound: the one with most of the blocks, then the least loaded, then the least
        recently used.
        """
        bound = math.ceil(_BOUND * (sum(loads.values()) + adding) / len(loads))
        least = min(loads.values())
        within_bound = [engine for engine, load in loads.items() if load == least or load + adding <= bound]
        return max(
            within_bound, key=lambda engine: (self.n_cached(engine, hashes), -loads[engine], -self._last_used[engine])
        )

    def n_cached(self, engine: int, hashes: Iterable[int]) -> int:
        """Number of these blocks that are probably in the engine's cache."""
        blocks = self._blocks_of[engine]
        return sum(block in blocks for block in hashes)

    def record(self, engine: int, hashes: Sequence[int], max_blocks: int) -> None:
        """Records that these blocks were sent to an engine whose cache has `max_blocks` blocks."""
        self._clock += 1
        self._last_used[engine] = self._clock
        blocks = self._blocks_of[engine]
        # In reverse order: a block is always evicted before its predecessor.
        for block in reversed(hashes):
            blocks[block] = None
            blocks.move_to_end(block)
        while len(blocks) > max_blocks:
            blocks.popitem(last=False)

    def clear(self, engine: int) -> None:
        """Forgets the blocks of an engine that has lost its cache."""
        self._blocks_of[engine].clear()
