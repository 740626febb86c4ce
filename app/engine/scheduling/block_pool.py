"""Block pool: which cache blocks are free, shared, or cached for their content.

    free --allocate--> active --release--> free            a block whose content has no name
                         |  ^  --release--> cached          a published block: content kept, evicted oldest first
                         |  +--share-- cached / active
                         +--publish: gets a name (hash)

Invariant: free + cached + active == total, and a block's reference count is the number of sequences that list it.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import dataclass


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
