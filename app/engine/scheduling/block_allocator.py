"""KV cache blocks: which are free, shared or cached (BlockPool), and which ones a sequence gets (BlockAllocator).

BlockAllocator takes the blocks of a sequence from the prefix cache, shares its leader's, or allocates new ones.

A fork (a sequence with a leader) starts with the leader's whole prompt but its last token, which is computed again for
its row of logits. With blocks of 4 and a prompt of 10 tokens:

    leader   [0 1 2 3] [4 5 6 7] [8 9 a b]      a, b: what the leader has drawn since
                 |         |         | copy
    fork     [  shared][  shared][8 9 a b]      9 is computed again, a and b are masked until they are overwritten

While a step of the leader is in flight, b may turn out not to be finite, which no mask would keep from the fork: it
copies nothing then, and computes 8 again, too.

BlockPool knows which cache blocks are free, shared, or cached for their content.

    free --allocate--> active --release--> free            a block whose content has no name
                         |  ^  --release--> cached          a published block: content kept, evicted oldest first
                         |  +--share-- cached / active
                         +--publish: gets a name (hash)

Invariant: free + cached + active == total, and a block's reference count is the number of sequences that list it.

StepsInFlight tracks steps that were launched but not committed, and defers the release of blocks that they may still
use. Between a step's launch and its commit, the device may write to the step's blocks and copy from others at any time.
When a sequence ends or is cancelled in that window, its blocks are released only after the most recent step in flight
commits, so a block that a step may still use is never reallocated.

    begin(n)   begin(n+1)   commit(n): a sequence ends   commit(n+1)
       |            |              | its blocks are held    | its blocks are free
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass

from app.common.fault_injection import is_armed
from app.common.types import BatchPlan, Sequence


class OutOfBlocks(Exception):
    """Fewer blocks are available than were asked for."""


@dataclass(frozen=True, slots=True)
class BlockCounts:
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
        """Blocks that allocate() could give out."""
        return len(self._free) + len(self._cached)

    @property
    def counts(self) -> BlockCounts:
        """The state of the pool."""
        return BlockCounts(len(self._free), len(self._cached), self.total - self.available)

    def needed(self, tokens: int) -> int:
        """Blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_size)

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Blocks that hold the longest prefix of `hashes`. Changes nothing."""
        found = []
        for name in hashes:
            if (block := self._block_of.get(name)) is None:
                break
            found.append(block)
        return found

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block."""
        for block in blocks:
            self._references[block] += 1
            self._cached.pop(block, None)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, nameless. Raises OutOfBlocks and then takes none."""
        if count > self.available:
            raise OutOfBlocks(f"{count} blocks asked for, {self.available} available")
        return [self._take() for _ in range(count)]

    def publish(self, block: int, name: bytes) -> None:
        """Names a full block, so that others find it. Where the name is taken, the block stays nameless."""
        if name not in self._block_of and block not in self._hash_of:
            self._hash_of[block] = name
            self._block_of[name] = block

    def release(self, blocks: Items[int]) -> None:
        """One reference less to each block; the last blocks are evicted first."""
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} is released more often than it was taken"
            self._references[block] -= 1
            if self._references[block] == 0:
                if block in self._hash_of:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    def forget(self, blocks: Iterable[int]) -> None:
        """Takes the names of blocks away: their content must not be found again."""
        for block in blocks:
            if (name := self._hash_of.pop(block, None)) is not None:
                del self._block_of[name]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def violations(self, owners: Iterable[Items[int]]) -> list[str]:
        """What is wrong with the invariant, given every sequence's blocks; empty when all is well."""
        expected = [0] * self.total
        for blocks in owners:
            for block in blocks:
                expected[block] += 1
        wrong = [
            f"block {block}: {references} references, {expected[block]} owners"
            for block, references in enumerate(self._references)
            if references != expected[block]
        ]
        idle = sorted([*self._free, *self._cached])
        if idle != [block for block, references in enumerate(self._references) if references == 0]:
            wrong.append("the free and cached blocks are not the blocks without references")
        return wrong

    def _take(self) -> int:
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            del self._block_of[self._hash_of.pop(block)]
        self._references[block] = 1
        return block


def root_hash(weights_version: str, salt: str, source: Items[int] = ()) -> bytes:
    """Where a chain of block hashes begins: other weights, another salt or source never share a block."""
    return chain_hash(hashlib.sha256(f"{weights_version}/{salt}".encode()).digest(), source)


def chain_hash(parent: bytes, tokens: Items[int]) -> bytes:
    """Name of a full block: its own tokens and, through `parent`, all tokens before them."""
    return hashlib.sha256(parent + array("I", tokens).tobytes()).digest()


class StepsInFlight:
    """In the order of their launches, which is the order of their commits."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._begun: deque[tuple[BatchPlan, list[list[int]]]] = deque()

    def __bool__(self) -> bool:
        return bool(self._begun)

    @property
    def held(self) -> Iterator[list[int]]:
        """Blocks without an owner that are not released yet."""
        return (blocks for _, held in self._begun for blocks in held)

    def begin(self, plan: BatchPlan) -> None:
        """Records a launched step, or one behind which every later plan is ordered."""
        for chunk in plan.chunks:
            chunk.sequence.ahead += chunk.stop - chunk.start
        self._begun.append((plan, []))

    def land(self, plan: BatchPlan) -> None:
        """Completes the oldest step in flight and releases its deferred blocks; does nothing if none is in flight."""
        if not self._begun:
            return
        oldest, held = self._begun.popleft()
        assert oldest is plan, "steps are committed in the order in which they were begun"
        for chunk in plan.chunks:
            chunk.sequence.ahead -= chunk.stop - chunk.start
        for blocks in held:
            self._pool.release(blocks)

    def release(self, blocks: list[int]) -> None:
        """Releases blocks at once, or as soon as no step in flight can use them."""
        if self._begun:
            self._begun[-1][1].append(blocks)
        else:
            self._pool.release(blocks)


def living(plan: BatchPlan) -> BatchPlan:
    """The plan without sequences that have ended; block clears and copies stay, for their blocks are still held."""
    chunks = tuple(chunk for chunk in plan.chunks if not chunk.sequence.ended)
    return BatchPlan(chunks, plan.started, plan.clear, plan.copies)


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
        leader = sequence.active_leader
        there = leader.blocks[: self._full(leader)] if leader else self._find(sequence)
        self.pool.share(there)
        missing = self.pool.needed(length) - len(there)
        if missing + spare > self.pool.available:
            self.pool.release(there)
            return False
        sequence.blocks = there + self._allocate(missing)
        sequence.num_registered = len(there)
        sequence.num_computed = len(there) * self.pool.block_size
        if leader and not leader.ahead:
            self._take_over_rest(sequence, leader)
        return True

    def missing(self, sequence: Sequence) -> int:
        """Blocks that its pending tokens need beyond those it has."""
        return self.pool.needed(max(len(sequence.tokens), sequence.num_scheduled + 1)) - len(sequence.blocks)

    def extend(self, sequence: Sequence) -> None:
        """Room for them. The caller has seen to it that there is enough."""
        sequence.blocks += self._allocate(max(0, self.missing(sequence)))

    def publish(self, sequence: Sequence) -> None:
        """Names the blocks that have become full."""
        full = sequence.num_computed // self.pool.block_size
        names = self._hashes(sequence, full)
        for index in range(sequence.num_registered, full):
            self.pool.publish(sequence.blocks[index], names[index])
        sequence.num_registered = max(full, sequence.num_registered)

    def release(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence back, once no step can use them any more; full ones stay cached."""
        if len(sequence.tokens) - sequence.num_computed > 1:  # no draw has shown yet whether what it wrote is finite
            self._dirty |= set(sequence.blocks)
        elif sequence.ahead or sequence.request.grammar:  # and none will of what it still writes, or of a late row
            self._dirty |= set(sequence.blocks[sequence.num_computed // self.pool.block_size :])
        if not is_armed("allocator.release"):
            self._flights.release(sequence.blocks)
        sequence.blocks = []
        sequence.num_computed = sequence.num_registered = 0

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
        return self.pool.find(self._hashes(sequence, sequence.max_cached_tokens // self.pool.block_size))

    def _allocate(self, count: int) -> list[int]:
        blocks = self.pool.allocate(count)
        self._clear += self._dirty.intersection(blocks)
        self._dirty.difference_update(blocks)
        return blocks

    def _hashes(self, sequence: Sequence, count: int) -> list[bytes]:
        """Names of the first `count` blocks."""
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
