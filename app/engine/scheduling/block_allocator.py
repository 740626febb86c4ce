"""KV cache blocks: which are free, shared or cached (BlockPool), and which ones a sequence gets (BlockAllocator).

BlockAllocator takes the blocks of a sequence from the prefix cache, shares its leader's, or allocates new ones.

A fork (a sequence with a leader) starts with the leader's whole prompt except the last token, which is computed again
for its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: tokens that the leader has generated since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, and no mask would hide that from the fork: in
this case the fork copies nothing and computes 8 again as well.

BlockPool tracks which cache blocks of one cache group are free, shared, or cached for their content.

    free --allocate--> active --release--> free            a block that has no hash
                         |  ^  --release--> cached          a registered block: content kept, evicted oldest first
                         |  +--share-- cached / active
                         +--register_prefix: gets a hash

Invariant: free + cached + active == total, and a block's reference count is the number of sequences that list it.

The layers of a cache group share a window (app/engine/memory/cache_groups.py). Each group has blocks of its own, and a
sequence has as many entries in each; it is admitted and grows only if every group has enough. Blocks that a window has
passed are released while the sequence runs, and its entry becomes the null block, which is never written. For the same
reason a prefix needs only the blocks that its next token sees. With blocks of 4, a window of 6 and 17 tokens computed:

    no window    [0 1 2 3] [4 5 6 7] [8 9 a b] [c d e f] [g . . .]
    window of 6  [ null  ] [ null  ] [ null  ] [c d e f] [g . . .]      the next token sees 5 others: c to g

StepsInFlight tracks steps that were launched but not committed, and defers the release of blocks that they may still
use. Between a step's launch and its commit, the device may write to the step's blocks and copy from others at any time.
When a sequence ends or is cancelled in that window, its blocks are released only after the most recent step in flight
commits, so a block that a step may still use is never reallocated.

    launch(n)  launch(n+1)  commit(n): a sequence ends   commit(n+1)
       |            |              | release is deferred    | its blocks are free
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from functools import reduce
from operator import and_
from typing import NamedTuple, TypeVar

from app.common.model_version import Version
from app.engine.scheduling.batch_plan import BatchPlan, Sequence

Blocks = TypeVar("Blocks", "array[int]", "list[int]")
BlockTable = tuple["array[int]", ...]
"""Blocks of a sequence: an array for each cache group."""


class BlockCounts(NamedTuple):
    """How many blocks are in each state."""

    free: int
    cached: int
    active: int


class BlockPool:
    """Reference-counted blocks of a cache group, with a prefix cache in least-recently-used order."""

    def __init__(self, total: int, block_size: int, *, window: int | None = None) -> None:
        """window: of the group's layers, see LayerKind."""
        self.total = total
        self.block_size = block_size
        self.window = window
        self.null_block = total + 1
        """Stands for blocks that the window has passed; behind the padding block, and without references."""
        self._references = [0] * total
        self._free = deque(range(total))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def available(self) -> int:
        """Number of blocks that allocate() can return."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        """Number of blocks in each state."""
        return BlockCounts(len(self._free), len(self._cached), self.active)

    @property
    def active(self) -> int:
        """Number of blocks with references."""
        return self.total - len(self._free) - len(self._cached)

    def needed(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)

    def first_visible(self, position: int) -> int:
        """Index of the first block of a sequence that its tokens at `position` and later see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def held(self, blocks: Blocks) -> Blocks:
        """The blocks of a sequence without the null blocks at their start."""
        return blocks if self.window is None else blocks[blocks.count(self.null_block) :]

    def blocks_of(self, hashes: Iterable[bytes]) -> list[int | None]:
        """The blocks that are registered under these hashes, None where there is none; without a window up to there."""
        if self.window is not None:
            return [*map(self._block_of.get, hashes)]
        found = list[int | None]()
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            found.append(block)
        return found

    def visible_lengths(self, blocks: Items[int | None]) -> int:
        """Bit n is set if all that the next token sees after the first n of `blocks` is there."""
        if self.window is None:
            return (2 << len(blocks)) - 1
        gap, lengths = 0, ["1"]  # the number of blocks up to the last one that is not there
        for count, block in enumerate(blocks, 1):
            if block is None:
                gap = count
            lengths.append("1" if gap <= self.first_visible(count * self.block_size) else "0")
        return int("".join(reversed(lengths)), 2)

    def share(self, blocks: Iterable[int]) -> None:
        """Adds one reference to each block."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """Returns `count` unregistered blocks with one reference each; the caller ensures that they are available."""
        assert count <= self.available, f"{count} blocks requested, {self.available} available"
        return [self._take() for _ in range(count)]

    def register_prefix(self, block: int, block_hash: bytes) -> None:
        """Registers a full block under its hash for find_prefix(); does nothing if another block has it."""
        if block_hash not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def release(self, blocks: Items[int]) -> None:
        """Removes one reference from each block; the last blocks are evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released more often than it was acquired"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def registered(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks that are registered under any of `hashes`."""
        return [block for block in self.blocks_of(hashes) if block is not None]

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Removes the hashes of blocks, so that find_prefix() no longer finds them; cached ones become free."""
        for block in blocks:
            if (block_hash := self._hash_of.pop(block, None)) is not None:
                del self._block_of[block_hash]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def violations(self, owners: Iterable[array[int]]) -> list[str]:
        """Violations of the invariant, given every sequence's blocks; empty if there are none."""
        expected = [0] * self.total
        for blocks in owners:
            for block in self.held(blocks):
                expected[block] += 1
        found = [
            f"block {block}: {references} references, {expected[block]} owners"
            for block, references in enumerate(self._references)
            if references != expected[block]
        ]
        idle = sorted([*self._free, *self._cached])
        if idle != [block for block, references in enumerate(self._references) if references == 0]:
            found.append("the free and cached blocks are not the blocks without references")
        return found

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] = 1
        return block


def find_prefix(pools: Items[BlockPool], hashes: Items[bytes]) -> list[list[int]]:
    """For each pool the blocks of the longest prefix of `hashes` after which all that the next token sees is cached.

    Blocks that it does not see are null blocks. Changes nothing, and looks at each hash once in each pool.
    """
    found = list[list[int | None]]()
    for pool in pools:
        found.append(pool.blocks_of(hashes))
        hashes = hashes[: len(found[-1])]  # no longer prefix is cached
    visible = (pool.visible_lengths(blocks[: len(hashes)]) for pool, blocks in zip(pools, found, strict=True))
    length = reduce(and_, visible).bit_length() - 1
    firsts = (pool.first_visible(length * pool.block_size) for pool in pools)
    return [
        [pool.null_block] * first + [block for block in blocks[first:length] if block is not None]
        for pool, blocks, first in zip(pools, found, firsts, strict=True)
    ]


def root_hash(version: Version, namespace: str, source: Items[int] = ()) -> bytes:
    """Start of a chain of block hashes: another model version, cache namespace or source never shares a block."""
    return chain_hash(hashlib.sha256(f"{version.key}/{namespace}".encode()).digest(), source)


def chain_hash(parent: bytes, tokens: Items[int]) -> bytes:
    """Hash of a full block: covers its own tokens and, through `parent`, all tokens before them."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class StepsInFlight:
    """Launched steps in launch order, which is also the order of their commits."""

    def __init__(self, pools: Items[BlockPool]) -> None:
        self._pools = pools
        self._steps: deque[tuple[BatchPlan, list[BlockTable]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def deferred(self) -> Iterator[BlockTable]:
        """Blocks without an owner that are not released yet."""
        return (table for _, deferred in self._steps for table in deferred)

    def add(self, plan: BatchPlan) -> None:
        """Records a step that was launched, or that runs next and precedes every later plan."""
        for chunk in plan.chunks:
            chunk.sequence.ahead += chunk.stop - chunk.start
        self._steps.append((plan, []))

    def complete(self, plan: BatchPlan) -> None:
        """Completes the oldest step in flight and releases its deferred blocks; does nothing if none is in flight."""
        if not self._steps:
            return
        oldest, deferred = self._steps.popleft()
        assert oldest is plan, "steps are committed in the order in which they were launched"
        for chunk in plan.chunks:
            chunk.sequence.ahead -= chunk.stop - chunk.start
        for table in deferred:
            self.release_now(table)

    def release(self, table: BlockTable) -> None:
        """Releases blocks at once, or as soon as no step in flight can use them."""
        if self._steps:
            self._steps[-1][1].append(table)
        else:
            self.release_now(table)

    def release_now(self, table: BlockTable) -> None:
        """Releases blocks that no step in flight uses."""
        for pool, blocks in zip(self._pools, table, strict=False):  # a sequence that does not run has none
            pool.release(pool.held(blocks))


def without_ended(plan: BatchPlan) -> BatchPlan:
    """The plan without ended sequences; block clears and copies stay, because those blocks are not released yet."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)


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
