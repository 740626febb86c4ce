"""Freed memory stays with the process, for all of its threads."""

from __future__ import annotations

import platform
import resource
import subprocess
import sys

import pytest

from tests.support import ROOT

pytestmark = pytest.mark.slow

_PROGRAM = """
import ctypes, resource, sys
from concurrent.futures import ThreadPoolExecutor
from model.train.common.thread_pool import keep_freed_memory
if sys.argv[1] == "kept":
    keep_freed_memory()
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
use_in_both()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(2):
    use_in_both()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
def test_memory_that_was_freed_is_not_asked_of_the_system_again() -> None:
    faults = {}
    for way in ("kept", "given back"):
        command = [sys.executable, "-c", _PROGRAM, way]
        faults[way] = int(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    pages = 2**26 // resource.getpagesize()
    assert faults["kept"] < 0.1 * pages, faults
    assert faults["given back"] > 10 * faults["kept"], faults
