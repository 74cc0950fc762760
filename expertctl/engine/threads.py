"""How many threads the products of a model are worth."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

SMALL_MODEL = 64 << 20
"""Below so many bytes of weights a step is over before other threads have woken up."""


def choose_threads(weight_bytes: int) -> int:
    """Return the thread count for a model; torch has applied ``OMP_NUM_THREADS`` already."""
    if weight_bytes < SMALL_MODEL:
        return 1
    return min(torch.get_num_threads(), usable_cores())


def usable_cores() -> int:
    """Return how many cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Compute with so many threads for the length of a ``with`` block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
