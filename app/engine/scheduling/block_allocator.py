"""Block allocator: blocks of a sequence from the prefix cache, shared with its leader, or newly allocated.

A fork (a sequence with a leader) starts with the leader's whole prompt but its last token, which is computed again for
its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: what the leader has drawn since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, which no mask would keep from the fork: it
copies nothing then, and computes 8 again, too.
"""

from __future__ import annotations

from app.common.fault_injection import is_armed
from app.common.types import Sequence
from app.engine.scheduling.block_pool import BlockPool, chain_hash, root_hash
from app.engine.scheduling.in_flight import StepsInFlight


class BlockAllocator:
    """Owns the pool, and knows what must be done to blocks before the next step."""

    def __init__(self, pool: BlockPool, flights: StepsInFlight, weights_version: str) -> None:
        self.pool = pool
        self._flights = flights
        self._version = weights_version
        self._dirty: set[int] = set()  # may hold numbers that are not finite; cleared for their next owner
        self._clear: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def admit(self, sequence: Sequence, length: int, *, spare: int) -> bool:
        """Gives a sequence the blocks of `length` tokens; False where `spare` blocks would not be left."""
        leader = sequence.living_leader
        there = leader.blocks[: self._full(leader)] if leader else self._find(sequence)
        self.pool.share(there)
        missing = self.pool.needed(length) - len(there)
        if missing + spare > self.pool.available:
            self.pool.release(there)
            return False
        sequence.blocks = there + self._allocate(missing)
        sequence.num_published = len(there)
        sequence.num_computed = len(there) * self.pool.block_size
        if leader and not leader.ahead:
            self._take_over_rest(sequence, leader)
        return True

    def missing(self, sequence: Sequence) -> int:
        """Blocks that its pending tokens need beyond those it has."""
        return self.pool.needed(max(len(sequence.tokens), sequence.num_begun + 1)) - len(sequence.blocks)

    def extend(self, sequence: Sequence) -> None:
        """Room for them. The caller has seen to it that there is enough."""
        sequence.blocks += self._allocate(max(0, self.missing(sequence)))

    def publish(self, sequence: Sequence) -> None:
        """Names the blocks that have become full."""
        full = sequence.num_computed // self.pool.block_size
        names = self._hashes(sequence, full)
        for index in range(sequence.num_published, full):
            self.pool.publish(sequence.blocks[index], names[index])
        sequence.num_published = max(full, sequence.num_published)

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence back, once no step can use them any more; full ones stay cached."""
        if len(sequence.tokens) - sequence.num_computed > 1:  # no draw has shown yet whether what it wrote is finite
            self._dirty |= set(sequence.blocks)
        elif sequence.ahead or sequence.request.guide:  # and none will of what it still writes, or of a late row
            self._dirty |= set(sequence.blocks[sequence.num_computed // self.pool.block_size :])
        if not is_armed("allocator.release"):
            self._flights.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_published = 0

    def spoil(self, sequence: Sequence) -> None:
        """Removes the sequence's blocks, which may hold non-finite values, from the prefix cache."""
        self.pool.forget(sequence.blocks)
        self._dirty |= set(sequence.blocks)

    def take_preparations(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Returns and resets what the next step must do first: blocks to clear, then (from, to) pairs to copy."""
        clear, copies = tuple(self._clear), tuple(self._copies)
        self._clear, self._copies = [], []
        return clear, copies

    def _full(self, leader: Sequence) -> int:
        """Number of complete, read-only prompt blocks, without the block of the last prompt token."""
        return (len(leader.request.prompt) - 1) // self.pool.block_size

    def _take_over_rest(self, sequence: Sequence, leader: Sequence) -> None:
        full = self._full(leader)
        sequence.hashes = leader.hashes[:full]
        sequence.num_computed = len(leader.request.prompt) - 1
        if sequence.num_computed > full * self.pool.block_size:
            self._copies.append((leader.blocks[full], sequence.blocks[full]))

    def _find(self, sequence: Sequence) -> list[int]:
        return self.pool.find(self._hashes(sequence, sequence.num_reusable // self.pool.block_size))

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self._clear += self._dirty.intersection(blocks)
        self._dirty.difference_update(blocks)
        return blocks

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` blocks."""
        size, hashes = self.pool.block_size, sequence.hashes
        while len(hashes) < count:
            parent = hashes[-1] if hashes else root_hash(self._version, sequence.request.salt, sequence.request.source)
            start = len(hashes) * size
            hashes.append(chain_hash(parent, sequence.tokens[start : start + size]))
        return hashes[:count]
