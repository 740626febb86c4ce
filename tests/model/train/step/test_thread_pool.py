"""Training thread pool: partition of the work, errors, and freed memory that stays with the process."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from model.train.step.thread_pool import map_shares, run_each
from tests.support import ROOT


@pytest.fixture(autouse=True)
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("workers", "shares"), [(1, [[0, 1, 2, 3]]), (3, [[0, 1], [2], [3]]), (9, [[0], [1], [2], [3]])]
)
def test_shares_are_in_order_and_the_caller_runs_the_last(workers: int, shares: list[list[int]]) -> None:
    def work(share: Sequence[int]) -> tuple[list[int], int, int]:
        return list(share), threading.get_ident(), torch.get_num_threads()

    found = map_shares(work, range(4), workers)
    assert [share for share, _, _ in found] == shares
    assert found[-1][1] == threading.get_ident()
    assert all(ident != threading.get_ident() for _, ident, _ in found[:-1])
    assert {n_threads for _, _, n_threads in found} == {3 // len(shares) or 1}
    assert torch.get_num_threads() == 3


@pytest.mark.parametrize("bad", [0, 2])
def test_exception_of_a_part_reaches_the_caller_after_all_have_ended(bad: int) -> None:
    done = []

    def work(share: Sequence[int]) -> None:
        if bad in share:
            raise RuntimeError("no more")
        done.extend(share)

    with pytest.raises(RuntimeError, match="no more"):
        map_shares(work, range(3), 3)
    assert sorted(done) == [number for number in range(3) if number != bad]
    with pytest.raises(RuntimeError, match="no more"):
        run_each(lambda item: work([item]), range(3))
    assert sorted(done) == sorted(2 * [number for number in range(3) if number != bad])
    threads = []
    run_each(lambda _: threads.append(torch.get_num_threads()), range(5))
    assert threads == [1] * 5 and torch.get_num_threads() == 3


_PROGRAM = """
import ctypes, resource
from concurrent.futures import ThreadPoolExecutor
from model.train.step.thread_pool import keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def use():
    places = [libc.malloc(2**23) for _ in range(8)]
    for place in places:
        ctypes.memset(place, 1, 2**23)
    for place in places:
        libc.free(place)
# One worker that stays: a new one may begin before the one before has given back its part of the heap.
worker = ThreadPoolExecutor(1)
def use_in_both():
    use()
    worker.submit(use).result()
def faults():
    use_in_both()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2):
        use_in_both()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
given_back = faults()
keep_freed_memory()
print(given_back, faults())
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_freed_memory_is_reused_without_the_system() -> None:
    command = [sys.executable, "-c", _PROGRAM]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    given_back, kept = map(int, done.stdout.split())
    pages = 2**26 // resource.getpagesize()
    assert kept < 0.1 * pages and given_back > 10 * kept, (kept, given_back)
