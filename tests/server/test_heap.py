"""Threads of a server share few arenas of the C library, and what is free in them goes back."""

import re
import subprocess
import sys

import pytest

from expertctl.server.serve import MAX_ARENAS

THREADS = 12
PROGRAM = f"""
import ctypes, sys, tempfile, threading
from expertctl.server.serve import limit_malloc_arenas
if sys.argv[1] == "bound":
    assert limit_malloc_arenas()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
held = threading.Barrier({THREADS} + 1)
def hold():
    libc.malloc(100)
    held.wait()
    held.wait()
for _ in range({THREADS}):
    threading.Thread(target=hold).start()
held.wait()
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
held.wait()
"""


def arenas(how: str) -> int:
    """How many the C library itself says that it has, with so many threads that allocate."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, check=True)
    return len(set(re.findall(rb'<heap nr="(\d+)">', done.stdout)))


@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_threads_share_few_arenas() -> None:
    assert arenas("as it is") > MAX_ARENAS
    assert arenas("bound") == MAX_ARENAS


TRIMMED = """
import ctypes
from pathlib import Path
from expertctl.server.serve import trim_heap
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1])
before = resident()
blocks = [libc.malloc(8_000) for _ in range(5_000)]
for block in blocks:
    ctypes.memset(block, 1, 8_000)
kept = blocks[::500] + blocks[-1:]
for block in set(blocks) - set(kept):
    libc.free(block)
free = resident()
assert trim_heap()
print(before, free, resident())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a function of glibc")
def test_pages_that_lie_between_others_go_back_to_the_system() -> None:
    done = subprocess.run([sys.executable, "-c", TRIMMED], capture_output=True, check=True)
    before, free, trimmed = map(int, done.stdout.split())
    assert free - before > 8_000, "by itself nothing goes back, of ten thousand pages"
    assert trimmed - before < 1_500
