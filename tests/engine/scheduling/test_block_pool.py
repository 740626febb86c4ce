"""The block pool: counts, sharing, eviction order."""

from __future__ import annotations

import pytest

from app.engine.scheduling.block_allocator import BlockPool, OutOfBlocks, chain_hash, root_hash


def test_free_cached_and_active_always_make_the_total() -> None:
    pool = BlockPool(4, 16)
    blocks = pool.allocate(3)
    pool.register_prefix(blocks[0], b"a")
    pool.release(blocks)
    counts = pool.counts
    assert (counts.free, counts.cached, counts.active) == (3, 1, 0)
    assert not pool.violations([])


def test_too_many_blocks_are_refused_and_none_is_taken() -> None:
    pool = BlockPool(2, 16)
    with pytest.raises(OutOfBlocks):
        pool.allocate(3)
    assert pool.available == 2


def test_a_published_block_is_found_until_it_is_needed_oldest_first() -> None:
    pool = BlockPool(2, 16)
    for name in (b"old", b"new"):
        (block,) = pool.allocate(1)
        pool.register_prefix(block, name)
        pool.release([block])
    pool.allocate(1)
    assert pool.find([b"old"]) == []
    assert len(pool.find([b"new"])) == 1


def test_find_ends_at_the_first_gap() -> None:
    pool = BlockPool(3, 16)
    blocks = pool.allocate(2)
    pool.register_prefix(blocks[0], b"a")
    pool.register_prefix(blocks[1], b"c")
    assert pool.find([b"a", b"b", b"c"]) == [blocks[0]]


def test_a_shared_block_survives_its_first_owner() -> None:
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.register_prefix(blocks[0], b"a")
    pool.share(blocks)
    pool.release(blocks)
    assert pool.counts.active == 1
    assert not pool.violations([blocks])
    with pytest.raises(OutOfBlocks):
        pool.allocate(1)


def test_releasing_twice_is_a_bug() -> None:
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(AssertionError):
        pool.release(blocks)


def test_forgotten_blocks_are_not_found_again() -> None:
    pool = BlockPool(1, 16)
    blocks = pool.allocate(1)
    pool.register_prefix(blocks[0], b"a")
    pool.release(blocks)
    pool.invalidate(blocks)
    assert pool.find([b"a"]) == []
    assert pool.counts.free == 1


def test_violations_names_an_owner_that_the_pool_does_not_know() -> None:
    pool = BlockPool(2, 16)
    blocks = pool.allocate(1)
    assert pool.violations([blocks, blocks])
    assert pool.violations([])


def test_a_hash_depends_on_weights_salt_and_everything_before() -> None:
    names = {
        chain_hash(root_hash(version, namespace), tokens)
        for version in ("w1", "w2")
        for namespace in ("", "k")
        for tokens in ((1, 2), (2, 1))
    }
    assert len(names) == 8
    assert chain_hash(chain_hash(root_hash("", ""), (1,)), (2,)) != chain_hash(root_hash("", ""), (1, 2))
