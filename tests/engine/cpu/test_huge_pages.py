"""Memory for the kernels: its address range, and that the system may back it with huge pages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from app.engine.cpu.library import HugepageAllocator, zeros

_MAPS = Path("/proc/self/maps")


def _rights(address: int) -> str:
    """Of the mapping that holds this address: "rw-p" where it is ours alone, "rw-s" where it could be shared."""
    for line in _MAPS.read_text().splitlines():
        start, end, rights = re.match(r"(\w+)-(\w+) (\S+)", line).groups()  # type: ignore[union-attr]
        if int(start, 16) <= address < int(end, 16):
            return rights
    raise AssertionError("no such mapping")


@pytest.mark.skipif(not _MAPS.exists(), reason="needs /proc")
def test_memory_is_private_for_shared_memory_gets_no_large_pages() -> None:
    arena, tensor = HugepageAllocator(), zeros((3, 5), torch.float32)
    assert _rights(arena.allocate(100)) == _rights(tensor.data_ptr()) == "rw-p"


def test_pieces_begin_at_cache_lines_and_do_not_overlap() -> None:
    arena, end = HugepageAllocator(), 0
    for n_bytes in (1, 64, 65, 40 << 20, 3):
        address = arena.allocate(n_bytes)
        assert address % 64 == 0
        assert not address < end < address + n_bytes
        end = address + n_bytes


def test_zeros_are_zeros_at_a_large_page() -> None:
    tensor = zeros((7, 33), torch.bfloat16)
    assert tensor.data_ptr() % (2 << 20) == 0
    assert tensor.shape == (7, 33)
    assert not tensor.any()
