"""Which KV cache blocks a sequence gets: cached ones of its prefix, its leader's, or new ones.

A fork (a sequence with a leader) starts with the leader's whole prompt except the last token, which is computed again
for its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: tokens that the leader has generated since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, and no mask would hide that from the fork: in
this case the fork copies nothing and computes 8 again as well.

A group without a window, and the only group of a model, gives a sequence the blocks of all its tokens at admission. A
group with a window beside others gives them chunk by chunk. What it is sure to give, a claim, is what one more token
needs: no running sequence waits for a block. Blocks beyond all claims make chunks longer. With blocks of 4, a window
of 6 and a prompt of 40 tokens in chunks of 8:

    at admission                                               a claim of 3, all set aside
    first chunk    [0 1 2 3] [4 5 6 7]                         2 in use, 1 set aside
    second chunk   [0 1 2 3] [4 5 6 7] [8 9 a b] [c d e f]     4 in use
    its commit     [ null  ] [ null  ] [8 9 a b] [c d e f]     2 in use, 1 set aside

A block that two sequences share counts in both claims, but stays in use until both windows have passed it, so that less
may be left than is set aside (is_overdrawn): the scheduler preempts then. The claims of sequences that are never
preempted fit into the group together even if they share nothing.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Items

from app.common.model_version import Version
from app.engine.scheduling.batch_plan import Sequence
from app.engine.scheduling.block_pool import BlockPool, blocks_in_window
from app.engine.scheduling.prefix_cache import chain_hash, find_prefix, root_hash
from app.engine.scheduling.steps_in_flight import StepsInFlight


class BlockAllocator:
    """Owns the pools of all cache groups, and tracks which blocks the next step must clear or copy first."""

    def __init__(
        self, pools: Items[BlockPool], in_flight: StepsInFlight, version: Version, *, tokens_per_step: int
    ) -> None:
        """pools: one for each cache group, with blocks of one size."""
        self.pools = pools
        self.largest = max(pools, key=lambda pool: pool.total)
        self._others = [pool for pool in pools if pool is not self.largest]
        self._pool = pools[0]
        self._size = pools[0].block_size
        self._windowed = [(group, pool) for group, pool in enumerate(pools) if pool.window is not None]
        self._by_chunk = self._windowed if len(pools) > 1 else []
        """Groups that give blocks chunk by chunk."""
        self._claims = [0] * len(pools)
        """Largest claim of a sequence in each of them; 0 in the others."""
        for group, pool in self._by_chunk:
            self._claims[group] = blocks_in_window(pool.window or 0, self._size)
        self._blocks_per_step = pools[0].needed(tokens_per_step)
        self._in_flight = in_flight
        self._version = version
        self._dirty: list[set[int]] = [set() for _ in pools]  # may hold non-finite values; cleared for the next owner
        self._clear: list[tuple[int, int]] = []
        self._copies: list[tuple[int, int, int]] = []

    @property
    def active(self) -> int:
        """Number of blocks in use or set aside, in the group with the largest share of such blocks.

        In blocks of the largest group: 10 of 20 blocks count as 50 if that has 100.
        """
        active, total = self.largest.active + self.largest.set_aside, self.largest.total
        for pool in self._others:
            active = max(active, min(total, -(-(pool.active + pool.set_aside) * total // pool.total)))
        return active

    @property
    def is_overdrawn(self) -> bool:
        """Whether a group has fewer blocks left than it has set aside."""
        for _, pool in self._by_chunk:  # noqa: SIM110 - most models have none, and every step asks
            if pool.unclaimed < 0:
                return True
        return False

    def admit(
        self, sequence: Sequence, length: int, *, spare: int, running: Items[Sequence], final: Items[Sequence] = ()
    ) -> bool:
        """Allocates or sets aside the blocks for `length` tokens; False if a group has too few.

        spare: blocks that each group must have left. running: all sequences that run. final: the ones that are never
        preempted again, if this one is neither.
        """
        size, leader = self._size, sequence.active_leader
        reused = self._leader_blocks(leader) if leader else None
        if reused is None:
            leader, reused = None, find_prefix(self.pools, self._hashes(sequence, sequence.max_cached_tokens // size))
        count, needed = len(reused[0]), self._pool.needed(length)
        for pool, blocks in zip(self.pools, reused, strict=True):
            pool.share(pool.held(blocks))
        claims = [min(claim, needed) for claim in self._claims]
        fits = all(
            self._has_claim(group, claims[group], blocks, needed, spare, running, final)
            if claims[group]
            else needed - count + spare <= self.pools[group].available
            for group, blocks in enumerate(reused)
        )
        if not fits:
            for pool, blocks in zip(self.pools, reused, strict=True):
                pool.release(pool.held(blocks))
            return False
        is_copied = bool(leader and not leader.ahead and leader.n_prompt - 1 > count * size)
        new = [int(is_copied) if claim else needed - count for claim in claims]
        tables = (blocks + self._allocate(group, new[group]) for group, blocks in enumerate(reused))
        sequence.blocks = tuple(array("i", blocks) for blocks in tables)
        sequence.passed = [blocks.count(pool.null_block) for pool, blocks in zip(self.pools, reused, strict=True)]
        sequence.claims = claims
        for group, pool in self._by_chunk:
            pool.set_aside += self._unmet(sequence, group)
        self._set_capacity(sequence)
        sequence.num_registered = count
        sequence.num_computed = count * size
        if leader and not leader.ahead:
            sequence.hashes = leader.hashes[:count]
            sequence.num_computed = leader.n_prompt - 1
            if is_copied:
                pairs = enumerate(zip(leader.blocks, sequence.blocks, strict=True))
                self._copies += [(group, theirs[count], own[count]) for group, (theirs, own) in pairs]
        return True

    def can_extend(self, sequences: Items[Sequence]) -> bool:
        """Whether each group has the blocks for the next token of all these sequences."""
        if not self._by_chunk:
            return sum(self._missing(sequence, 0) for sequence in sequences) <= self._pool.available
        for group, pool in enumerate(self.pools):
            missing = unclaimed = 0
            for sequence in sequences:
                count = self._missing(sequence, group)
                missing += count
                if count and self._claims[group]:
                    unclaimed += max(0, count - self._unmet(sequence, group))
            if missing > pool.available or (unclaimed and unclaimed > pool.unclaimed):
                return False
        return True

    def extend(self, sequence: Sequence) -> None:
        """Allocates the blocks for the next token; the caller has asked can_extend()."""
        if not self._by_chunk:
            missing = self._missing(sequence, 0)
            sequence.blocks[0].extend(self._allocate(0, missing))
            sequence.capacity += missing * self._size
            return
        for group in range(len(self.pools)):
            if (missing := self._missing(sequence, group)) > 0:
                self._append(sequence, group, missing)
        self._set_capacity(sequence)

    def allocate_chunk(self, sequence: Sequence, start: int, stop: int) -> int:
        """Allocates blocks for tokens[start:stop] where that is done by chunk; returns where the chunk has to stop.

        That is earlier if a group has too few blocks, and `start` if it has none.
        """
        if not self._by_chunk:
            return stop
        for group, pool in self._by_chunk:
            count = len(sequence.blocks[group])
            count += min(pool.available, self._unmet(sequence, group) + max(0, pool.unclaimed))
            stop = min(stop, count * self._size)
        if stop <= start:
            return start
        for group, pool in self._by_chunk:
            if (missing := pool.needed(stop) - len(sequence.blocks[group])) > 0:
                self._append(sequence, group, missing)
        self._set_capacity(sequence)
        return stop

    def extend_with_free(self, sequence: Sequence, stop: int, *, spare: int) -> None:
        """Allocates blocks for tokens[:stop] as far as each group has free ones: it evicts none, and leaves `spare`."""
        needed = self._pool.needed(stop)
        for blocks, pool in zip(sequence.blocks, self.pools, strict=True):
            needed = min(needed, len(blocks) + max(0, min(pool.n_free, pool.unclaimed) - spare))
        for group, blocks in enumerate(sequence.blocks):
            if (missing := needed - len(blocks)) > 0:
                self._append(sequence, group, missing)
        self._set_capacity(sequence)

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
                blocks, unmet = sequence.blocks[group], self._unmet(sequence, group)
                self._mark_unverified(sequence, group)
                released = tuple(
                    blocks[first:stop] if other == group else array("i") for other in range(len(self.pools))
                )
                blocks[first:stop] = array("i", [pool.null_block]) * (stop - first)
                sequence.passed[group] = stop
                pool.set_aside += self._unmet(sequence, group) - unmet
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
        for group, pool in self._by_chunk:
            pool.set_aside -= self._unmet(sequence, group)
        self._in_flight.release(sequence.blocks)
        sequence.blocks, sequence.passed, sequence.claims = (), [], []
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
        owners = [sequence for sequence in owners if sequence.blocks]
        tables = [*(sequence.blocks for sequence in owners), *filter(None, self._in_flight.deferred)]
        found = [pool.violations([table[group] for table in tables]) for group, pool in enumerate(self.pools)]
        for group, pool in self._by_chunk:
            if pool.set_aside != (unmet := sum(self._unmet(sequence, group) for sequence in owners)):
                found[group].append(f"{pool.set_aside} blocks are set aside, and claims lack {unmet}")
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

    def _has_claim(
        self,
        group: int,
        claim: int,
        reused: list[int],
        needed: int,
        spare: int,
        running: Items[Sequence],
        final: Items[Sequence],
    ) -> bool:
        """Whether a group that gives blocks chunk by chunk has those of a claim, beside the ones of running sequences.

        Beside others, a step's tokens must find blocks too, as far as sequences have such prompts; or else these would
        be computed in tiny chunks.
        """
        pool, later = self.pools[group], 0
        unmet = max(0, claim - len(pool.held(reused)))
        if running:
            later = max(0, needed - len(reused) - unmet)
            for other in running:
                pending = pool.needed(len(other.tokens)) - len(other.blocks[group])
                later += max(0, pending - self._unmet(other, group))
        is_sure = claim + sum(other.claims[group] for other in final) <= pool.total
        return is_sure and unmet + spare + min(later, self._blocks_per_step) <= pool.unclaimed

    def _unmet(self, sequence: Sequence, group: int) -> int:
        """Number of blocks that are set aside for the sequence: the part of its claim that it does not use."""
        if not sequence.claims:
            return 0
        return max(0, sequence.claims[group] - len(sequence.blocks[group]) + sequence.passed[group])

    def _missing(self, sequence: Sequence, group: int) -> int:
        """Number of blocks of a group that the next token needs beyond those that the sequence has."""
        length = max(len(sequence.tokens), sequence.num_scheduled + 1)
        return max(0, self._pool.needed(length) - len(sequence.blocks[group]))

    def _append(self, sequence: Sequence, group: int, count: int) -> None:
        """Allocates blocks at the end of a sequence. Up to the largest claim, it also claims what it uses."""
        blocks, largest = sequence.blocks[group], self._claims[group]
        if not largest:
            blocks.extend(self._allocate(group, count))
            return
        unmet = self._unmet(sequence, group)
        blocks.extend(self._allocate(group, count))
        used = len(blocks) - sequence.passed[group]
        sequence.claims[group] = max(sequence.claims[group], min(largest, used))
        self.pools[group].set_aside += self._unmet(sequence, group) - unmet

    def _set_capacity(self, sequence: Sequence) -> None:
        sequence.capacity = min(map(len, sequence.blocks)) * self._size

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
