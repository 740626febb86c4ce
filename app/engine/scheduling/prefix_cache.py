"""Prefix cache: hashes that name full blocks by their content, and the longest cached prefix in the pools."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence as Items
from functools import reduce
from operator import and_

from app.common.model_version import Version
from app.engine.scheduling.block_pool import BlockPool


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
