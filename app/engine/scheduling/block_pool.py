"""Cache blocks of one cache group: free, shared by sequences, or cached for their content.

    free --allocate--> active --release--> free            a block that has no hash
                         |  ^  --release--> cached          a registered block: content kept, evicted oldest first
                         |  +--share-- cached / active
                         +--register_prefix: gets a hash

Invariant: free + cached + active == total, and a block's reference count is the number of sequences that list it.

The layers of a cache group share a window (app/engine/memory/cache_groups.py). Each group has its own number of blocks,
and a sequence is admitted and grows only if every group has enough. Blocks that a window has passed are released while
the sequence runs, and its entry becomes the null block, which is never written. For the same reason a prefix needs
only the blocks that its next token sees. With blocks of 4, a window of 6 and 17 tokens computed:

    no window    [0 1 2 3] [4 5 6 7] [8 9 a b] [c d e f] [g . . .]
    window of 6  [ null  ] [ null  ] [ null  ] [c d e f] [g . . .]      the next token sees 5 others: c to g
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Items
from typing import NamedTuple, TypeVar

Blocks = TypeVar("Blocks", "array[int]", "list[int]")


class BlockCounts(NamedTuple):
    """How many blocks are in each state."""

    free: int
    cached: int
    active: int


def blocks_in_window(window: int, block_size: int) -> int:
    """Most blocks that a sequence needs for one more token: what the token sees, itself included, lies in them."""
    return 1 - (1 - window) // block_size


class BlockPool:
    """Reference-counted blocks of a cache group, with a prefix cache in least-recently-used order."""

    def __init__(self, total: int, block_size: int, *, window: int | None = None) -> None:
        """window: of the group's layers, see LayerKind."""
        self.total = total
        self.block_size = block_size
        self.window = window
        self.null_block = total + 1
        """Stands for blocks that the window has passed; behind the padding block, and without references."""
        self.set_aside = 0
        """Available blocks that running sequences are sure to get: others leave them (BlockAllocator)."""
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
    def n_free(self) -> int:
        """Number of blocks without content."""
        return len(self._free)

    @property
    def unclaimed(self) -> int:
        """Number of available blocks that are not set aside; below 0 if blocks that were set aside are in use."""
        return len(self._free) + len(self._cached) - self.set_aside

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
