"""Which KV cache blocks a sequence gets: cached ones of its prefix, its leader's, or new ones.

A fork (a sequence with a leader) starts with the leader's whole prompt except the last token, which is computed again
for its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: tokens that the leader has generated since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, and no mask would hide that from the fork: in
this case the fork copies nothing and computes 8 again as well.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from app.common.model_version import Version
from app.engine.scheduling.batch_plan import Sequence
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.prefix_cache import chain_hash, find_prefix, root_hash
from app.engine.scheduling.steps_in_flight import StepsInFlight


class BlockAllocator:
    """Owns the pools of all cache groups, and tracks which blocks the next step must clear or copy first."""

    def __init__(self, pools: Items[BlockPool], in_flight: StepsInFlight, version: Version) -> None:
        """pools: one for each cache group, with equally many blocks of the same size."""
        self.pools = pools
        self._pool, *self._others = pools
        self._size = pools[0].block_size
        self._windowed = [(group, pool) for group, pool in enumerate(pools) if pool.window is not None]
        self._in_flight = in_flight
        self._version = version
        self._dirty: list[set[int]] = [set() for _ in pools]  # may hold non-finite values; cleared for the next owner
        self._clear: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int, int]] = []

    @property
    def available(self) -> int:
        """Number of blocks that can be allocated in every group."""
        available = self._pool.available
        for pool in self._others:
            available = min(available, pool.available)
        return available

    @property
    def active(self) -> int:
        """Number of blocks in use, in the group that has most."""
        active = self._pool.active
        for pool in self._others:
            active = max(active, pool.active)
        return active

    def admit(self, sequence: Sequence, length: int, *, spare: int) -> bool:
        """Allocates blocks for `length` tokens; False if a group would have fewer than `spare` blocks left."""
        size, leader = self._size, sequence.active_leader
        reused = self._leader_blocks(leader) if leader else None
        if reused is None:
            leader, reused = None, find_prefix(self.pools, self._hashes(sequence, sequence.max_cached_tokens // size))
        count = len(reused[0])
        missing = self._pool.needed(length) - count
        for pool, blocks in zip(self.pools, reused, strict=True):
            pool.share(pool.held(blocks))
        if missing + spare > self.available:
            for pool, blocks in zip(self.pools, reused, strict=True):
                pool.release(pool.held(blocks))
            return False
        tables = (blocks + self._allocate(group, missing) for group, blocks in enumerate(reused))
        sequence.blocks = tuple(array("i", blocks) for blocks in tables)
        sequence.passed = [blocks.count(pool.null_block) for pool, blocks in zip(self.pools, reused, strict=True)]
        sequence.capacity = (count + missing) * size
        sequence.num_registered = count
        sequence.num_computed = count * size
        if leader and not leader.ahead:
            sequence.hashes = leader.hashes[:count]
            sequence.num_computed = leader.n_prompt - 1
            if sequence.num_computed > count * size:
                pairs = enumerate(zip(leader.blocks, sequence.blocks, strict=True))
                self._copies += [(group, theirs[count], own[count]) for group, (theirs, own) in pairs]
        return True

    def missing(self, sequence: Sequence) -> int:
        """Number of blocks of each group that the pending tokens need beyond those that the sequence has."""
        length = max(len(sequence.tokens), sequence.num_scheduled + 1)
        return max(0, self._pool.needed(length - sequence.capacity))

    def extend(self, sequence: Sequence) -> None:
        """Allocates the missing() blocks; the caller ensures that enough are available."""
        missing = self.missing(sequence)
        for group, blocks in enumerate(sequence.blocks):
            blocks.extend(self._allocate(group, missing))
        sequence.capacity += missing * self._size

    def register_prefix(self, sequence: Sequence) -> None:
        """Registers the blocks that have become full in the prefix cache."""
        full = sequence.num_computed // self._size
        hashes = self._hashes(sequence, full)
        for pool, blocks in zip(self.pools, sequence.blocks, strict=True):
            for index in range(sequence.num_registered, full):
                pool.register_prefix(blocks[index], hashes[index])
        sequence.num_registered = max(full, sequence.num_registered)

    def release_before(self, sequence: Sequence, position: int) -> None:
        """Releases the blocks that the sequence's tokens at `position` and later do not see; full ones stay cached."""
        for group, pool in self._windowed:
            first, stop = sequence.passed[group], pool.first_visible(position)
            if stop > first:
                blocks = sequence.blocks[group]
                self._mark_unverified(sequence, group)
                released = tuple(
                    blocks[first:stop] if other == group else array("i") for other in range(len(self.pools))
                )
                blocks[first:stop] = array("i", [pool.null_block]) * (stop - first)
                sequence.passed[group] = stop
                self._in_flight.release(released)

    def release(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence once no step can use them any more; full ones stay cached."""
        is_verified = len(sequence.tokens) - sequence.num_computed <= 1 and sequence.has_prompt
        if not is_verified:  # no sampled row has shown yet that its values are finite
            self._mark_dirty(sequence, 0)
        else:
            if sequence.ahead or sequence.request.grammar:  # nor will one for a step in flight or a skipped row
                self._mark_dirty(sequence, sequence.num_computed // self._size)
            for group, _ in self._windowed:
                self._mark_unverified(sequence, group)
        self._in_flight.release(sequence.blocks)
        sequence.blocks, sequence.passed = (), []
        sequence.capacity = sequence.num_computed = sequence.num_registered = 0

    def invalidate(self, sequence: Sequence) -> None:
        """Removes the sequence's blocks, which may hold non-finite values, from the prefix cache."""
        self._mark_dirty(sequence, 0)
        for pool, blocks in zip(self.pools, sequence.blocks, strict=False):
            pool.invalidate(pool.held(blocks))
        for group, pool in self._windowed:  # also those that its window has passed
            passed = pool.registered(sequence.hashes)
            self._dirty[group].update(passed)
            pool.invalidate(passed)

    def drop_rows(self, sequence: Sequence, start: int, stop: int) -> None:
        """Marks the blocks of computed rows that the sequence goes on without: their values may not be finite."""
        if stop > start:
            self._mark_dirty(sequence, start // self._size)

    def take_preparations(self) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, int, int], ...]]:
        """Returns and resets what the next step must do first: BatchPlan.clear, then BatchPlan.copies."""
        clear, copies = tuple(self._clear), tuple(self._copies)
        self._clear, self._copies = [], []
        return clear, copies

    def violations(self, owners: Iterable[Sequence]) -> list[str]:
        """Violated invariants of the block accounting, given all sequences; empty if there are none."""
        tables = [*(sequence.blocks for sequence in owners), *self._in_flight.deferred]
        tables = [table for table in tables if table]
        found = [pool.violations([table[group] for table in tables]) for group, pool in enumerate(self.pools)]
        if len(found) == 1:
            return found[0]
        return [f"cache group {group}: {each}" for group, of_group in enumerate(found) for each in of_group]

    def _leader_blocks(self, leader: Sequence) -> list[list[int]] | None:
        """The leader's complete, read-only prompt blocks, without the block of the last prompt token.

        None if the leader has released a block that the fork's first token sees.
        """
        count = (leader.n_prompt - 1) // self._size
        start = count * self._size if leader.ahead else leader.n_prompt - 1
        reused = []
        for pool, blocks, passed in zip(self.pools, leader.blocks, leader.passed, strict=True):
            first = pool.first_visible(start)
            if passed > first:
                return None
            reused.append([pool.null_block] * first + blocks[first:count].tolist())
        return reused

    def _allocate(self, group: int, count: int) -> list[int]:
        blocks, dirty = self.pools[group].allocate(count), self._dirty[group]
        if dirty:
            self._clear += [(group, block) for block in dirty.intersection(blocks)]
            dirty.difference_update(blocks)
        return blocks

    def _mark_dirty(self, sequence: Sequence, first: int) -> None:
        """Marks the sequence's blocks from index `first` on."""
        for pool, dirty, blocks in zip(self.pools, self._dirty, sequence.blocks, strict=False):
            dirty.update(pool.held(blocks[first:]))

    def _mark_unverified(self, sequence: Sequence, group: int) -> None:
        """Marks the blocks of a group with a window that no sampled row has seen.

        A row with finite logits shows that the values that it sees are finite. The first such row is the prompt's last.
        """
        pool = self.pools[group]
        unseen, passed = sequence.n_prompt - (pool.window or 0), sequence.passed[group]
        if unseen > passed * self._size:
            self._dirty[group].update(sequence.blocks[group][passed : pool.needed(unseen)])

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the first `count` blocks."""
        size, hashes = self._size, sequence.hashes
        while len(hashes) < count:
            parent = (
                hashes[-1]
                if hashes
                else root_hash(self._version, sequence.request.cache_namespace, sequence.request.source)
            )
            start = len(hashes) * size
            hashes.append(chain_hash(parent, sequence.tokens[start : start + size]))
        return hashes[:count]
