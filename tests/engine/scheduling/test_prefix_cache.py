"""The prefix cache: block hashes, eviction, and the longest prefix that all windows allow."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import pytest

from app.common.model_version import Version
from app.engine.scheduling.block_pool import BlockPool
from app.engine.scheduling.prefix_cache import chain_hash, find_prefix, root_hash


def test_first_released_block_is_evicted_first() -> None:
    pool = BlockPool(2, 16)
    for name in (b"old", b"new"):
        (block,) = pool.allocate(1)
        pool.register_prefix(block, name)
        pool.release([block])
    with pytest.raises(AssertionError, match="blocks requested"):
        pool.allocate(3)
    assert pool.available == 2, "no block may be allocated"
    pool.allocate(1)
    assert find_prefix([pool], [b"old"]) == [[]] and find_prefix([pool], [b"new"]) != [[]]


def test_block_hash_depends_on_weights_key_and_all_earlier_tokens() -> None:
    names = {
        chain_hash(root_hash(version, namespace), tokens)
        for version in (Version("w1"), Version("w2"))
        for namespace in ("", "k")
        for tokens in ((1, 2), (2, 1))
    }
    assert len(names) == 8


def test_block_hash_of_a_version_without_adapters_is_the_old_one() -> None:
    """The hashes by the code that had the digest of the weights as a string."""
    old = "569bb2fc11581d2c62ce0c5401796ad9c63dd65075adb9c5bb9011f8d5fa5103"
    assert chain_hash(root_hash(Version("w1"), "k"), (1, 2)).hex() == old
    old = "9917a46179426639b787198332110d245b07331e7edd0bd00f14c05c4fdc0f22"
    assert root_hash(Version("w" * 64), "", (3,)).hex() == old


def test_prefix_needs_only_the_cached_blocks_that_its_next_token_sees() -> None:
    pool = BlockPool(16, 4, window=6)
    names = [bytes([i]) for i in range(5)]
    blocks = pool.allocate(5)
    for block, name in zip(blocks, names, strict=True):
        pool.register_prefix(block, name)
    null = pool.null_block
    assert find_prefix([pool], names)[0] == [null, null, null, blocks[3], blocks[4]], "a token at 20 sees 15 to 19"
    assert find_prefix([pool], names[:2])[0] == blocks[:2] and find_prefix([pool], []) == [[]]
    pool.invalidate(blocks[:1])
    assert find_prefix([pool], names)[0] == [null, null, null, blocks[3], blocks[4]], "no token sees it"
    pool.invalidate(blocks[3:4])
    assert find_prefix([pool], names)[0] == [null, blocks[1], blocks[2]], "the longest prefix before what is missing"
    pool.invalidate(blocks[1:3])
    assert find_prefix([pool], names)[0] == []


def test_search_for_a_prefix_looks_at_each_hash_once() -> None:
    """Where blocks are missing, a search that starts again would take the square of the prompt's length."""
    names = [bytes([i // 256, i % 256]) for i in range(1000)]
    looked_up = Counter[int]()
    pools = [BlockPool(1000, 4, window=window) for window in (40, 60, None)]
    for number, pool in enumerate(pools):
        for index, block in enumerate(pool.allocate(1000)):
            if index % 4 != 3:
                pool.register_prefix(block, names[index])
        pool._block_of = _CountedDict(pool._block_of, looked_up, number)
    assert find_prefix(pools[:2], names) == [[0, 1, 2]] * 2 and looked_up == {0: 1000, 1: 1000}
    looked_up.clear()
    assert find_prefix(pools[::-1], names) == [[0, 1, 2]] * 3 and looked_up == {2: 4, 1: 3, 0: 3}


class _CountedDict(dict[bytes, int]):
    def __init__(self, known: dict[bytes, int], counts: Counter[int], number: int) -> None:
        super().__init__(known)
        self._counts, self._number = counts, number

    def get(self, key: bytes, default: Any = None) -> Any:
        self._counts[self._number] += 1
        return super().get(key, default)


def test_prefix_of_every_set_of_cached_blocks_is_the_longest_that_the_windows_allow() -> None:
    """Against the definition, for all sets of 7 blocks in two pools."""
    names = [bytes([i]) for i in range(7)]
    for windows in ((None,), (1,), (4,), (6,), (9, None), (3, 14)):
        for sets in product(range(128), repeat=len(windows)):
            if len(windows) > 1 and sum(sets) % 7:
                continue
            pools = [BlockPool(7, 4, window=window) for window in windows]
            for pool, chosen in zip(pools, sets, strict=True):
                for block in pool.allocate(7):
                    if chosen >> block & 1:
                        pool.register_prefix(block, names[block])
            (length,) = {len(blocks) for blocks in find_prefix(pools, names)}
            for count in range(8):
                needed = [range(0 if w is None else max(0, 4 * count - w + 1) // 4, count) for w in windows]
                fits = all(chosen >> i & 1 for chosen, each in zip(sets, needed, strict=True) for i in each)
                assert count <= length if fits else count != length, (windows, sets)
