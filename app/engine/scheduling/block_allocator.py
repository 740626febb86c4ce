"""KV cache blocks: which are free, shared or cached (BlockPool), and which ones a sequence gets (BlockAllocator).

BlockAllocator takes the blocks of a sequence from the prefix cache, shares its leader's, or allocates new ones.

A fork (a sequence with a leader) starts with the leader's whole prompt except the last token, which is computed again
for its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: tokens that the leader has generated since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, and no mask would hide that from the fork: in
this case the fork copies nothing and computes 8 again as well.

BlockPool tracks which cache blocks are free, shared, or cached for their content.

    free --allocate--> active --release--> free            a block that has no hash
                         |  ^  --release--> cached          a registered block: content kept, evicted oldest first
                         |  +--share-- cached / active
                         +--register_prefix: gets a hash

Invariant: free + cached + active == total, and a block's reference count is the number of sequences that list it.

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
from typing import NamedTuple

from app.common.model_version import Version
from app.common.types import BatchPlan, Sequence


class BlockCounts(NamedTuple):
    """How many blocks are in each state."""

    free: int
    cached: int
    active: int


class BlockPool:
    """Reference-counted blocks with a prefix cache in least-recently-used order."""

    def __init__(self, total: int, block_size: int) -> None:
        self.total = total
        self.block_size = block_size
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
        return BlockCounts(len(self._free), len(self._cached), self.total - self.available)

    def needed(self, tokens: int) -> int:
        """Number of blocks that `tokens` tokens fill."""
        return -(-tokens // self.block_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks of the longest prefix of `hashes` that is cached. Changes nothing."""
        found = []
        for block_hash in hashes:
            if (block := self._block_of.get(block_hash)) is None:
                break
            found.append(block)
        return found

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
        """Registers a full block under its hash, so that find() returns it; does nothing if another block has it."""
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

    def invalidate(self, blocks: Iterable[int]) -> None:
        """Removes the hashes of blocks that have references, so that find() no longer returns them."""
        for block in blocks:
            if (block_hash := self._hash_of.pop(block, None)) is not None:
                del self._block_of[block_hash]

    def violations(self, owners: Iterable[Items[int]]) -> list[str]:
        """Violations of the invariant, given every sequence's blocks; empty if there are none."""
        expected = [0] * self.total
        for blocks in owners:
            for block in blocks:
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


def root_hash(version: Version, namespace: str, source: Items[int] = ()) -> bytes:
    """Start of a chain of block hashes: another model version, cache namespace or source never shares a block."""
    return chain_hash(hashlib.sha256(f"{version.key}/{namespace}".encode()).digest(), source)


def chain_hash(parent: bytes, tokens: Items[int]) -> bytes:
    """Hash of a full block: covers its own tokens and, through `parent`, all tokens before them."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class StepsInFlight:
    """Launched steps in launch order, which is also the order of their commits."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._steps: deque[tuple[BatchPlan, list[Items[int]]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._steps)

    @property
    def deferred(self) -> Iterator[Items[int]]:
        """Blocks without an owner that are not released yet."""
        return (blocks for _, deferred in self._steps for blocks in deferred)

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
        for blocks in deferred:
            self._pool.release(blocks)

    def release(self, blocks: Items[int]) -> None:
        """Releases blocks at once, or as soon as no step in flight can use them."""
        if self._steps:
            self._steps[-1][1].append(blocks)
        else:
            self._pool.release(blocks)


def without_ended(plan: BatchPlan) -> BatchPlan:
    """The plan without ended sequences; block clears and copies stay, because those blocks are not released yet."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)


class BlockAllocator:
    """Owns the pool, and tracks which blocks the next step must clear or copy first."""

    def __init__(self, pool: BlockPool, in_flight: StepsInFlight, version: Version) -> None:
        self.pool = pool
        self._in_flight = in_flight
        self._version = version
        self._dirty: set[int] = set()  # may contain non-finite values; cleared for their next owner
        self._clear: list[int] = []
        self._copies: list[tuple[int, int]] = []

    def admit(self, sequence: Sequence, length: int, *, spare: int) -> bool:
        """Allocates blocks for `length` tokens; False if fewer than `spare` blocks would be left."""
        size, leader = self.pool.block_size, sequence.active_leader
        if leader:  # its complete, read-only prompt blocks, without that of the last prompt token
            reused = leader.blocks[: (leader.n_prompt - 1) // size].tolist()
        else:
            reused = self.pool.find(self._hashes(sequence, sequence.max_cached_tokens // size))
        self.pool.share(reused)
        missing = self.pool.needed(length) - len(reused)
        if missing + spare > self.pool.available:
            self.pool.release(reused)
            return False
        sequence.blocks = array("i", reused + self._allocate(missing))
        sequence.num_registered = len(reused)
        sequence.num_computed = len(reused) * size
        if leader and not leader.ahead:
            sequence.hashes = leader.hashes[: len(reused)]
            sequence.num_computed = leader.n_prompt - 1
            if sequence.num_computed > len(reused) * size:
                self._copies.append((leader.blocks[len(reused)], sequence.blocks[len(reused)]))
        return True

    def missing(self, sequence: Sequence) -> int:
        """Number of blocks that the sequence's pending tokens need beyond those it has."""
        return max(0, self.pool.needed(max(len(sequence.tokens), sequence.num_scheduled + 1)) - len(sequence.blocks))

    def extend(self, sequence: Sequence) -> None:
        """Allocates the missing() blocks; the caller ensures that enough are available."""
        sequence.blocks.extend(self._allocate(self.missing(sequence)))

    def register_prefix(self, sequence: Sequence) -> None:
        """Registers the blocks that have become full in the prefix cache."""
        full = sequence.num_computed // self.pool.block_size
        hashes = self._hashes(sequence, full)
        for index in range(sequence.num_registered, full):
            self.pool.register_prefix(sequence.blocks[index], hashes[index])
        sequence.num_registered = max(full, sequence.num_registered)

    def release(self, sequence: Sequence) -> None:
        """Releases all blocks of a sequence once no step can use them any more; full ones stay cached."""
        if len(sequence.tokens) - sequence.num_computed > 1:  # no sampled row has shown yet that its values are finite
            self._dirty |= set(sequence.blocks)
        elif sequence.ahead or sequence.request.grammar:  # nor will one for a step in flight or a skipped row
            self._dirty |= set(sequence.blocks[sequence.num_computed // self.pool.block_size :])
        self._in_flight.release(sequence.blocks)
        sequence.blocks = array("i")
        sequence.num_computed = sequence.num_registered = 0

    def invalidate(self, sequence: Sequence) -> None:
        """Removes the sequence's blocks, which may hold non-finite values, from the prefix cache."""
        self.pool.invalidate(sequence.blocks)
        self._dirty |= set(sequence.blocks)

    def drop_rows(self, sequence: Sequence, start: int, stop: int) -> None:
        """Marks the blocks of computed rows that the sequence ends without: their values may not be finite."""
        size = self.pool.block_size
        self._dirty |= set(sequence.blocks[start // size : -(-stop // size)] if stop > start else ())

    def take_preparations(self) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
        """Returns and resets what the next step must do first: blocks to clear, then (from, to) pairs to copy."""
        clear, copies = tuple(self._clear), tuple(self._copies)
        self._clear, self._copies = [], []
        return clear, copies

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self._clear += self._dirty.intersection(blocks)
        self._dirty.difference_update(blocks)
        return blocks

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Hashes of the first `count` blocks."""
        size, hashes = self.pool.block_size, sequence.hashes
        while len(hashes) < count:
            parent = (
                hashes[-1]
                if hashes
                else root_hash(self._version, sequence.request.cache_namespace, sequence.request.source)
            )
            start = len(hashes) * size
            hashes.append(chain_hash(parent, sequence.tokens[start : start + size]))
        return hashes[:count]
