"""Threads of numpy's matrix products where OpenBLAS computes them, as in numpy's own wheels.

The number belongs to the whole process, so its owner is whoever runs a model: a local run, or the
loop of a server. OpenBLAS starts with as many threads as there are cores, or as
``OPENBLAS_NUM_THREADS`` or ``OMP_NUM_THREADS`` say. Other libraries keep their own number.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

_FOLDERS = ("../numpy.libs", ".dylibs", ".libs")
"""Where wheels for Linux and Windows, macOS, and old ones have their libraries."""
_NAMES = tuple(f"{prefix}openblas_{{}}_num_threads{suffix}"
               for prefix in ("scipy_", "") for suffix in ("64_", ""))  # fmt: skip


def get_blas_threads() -> int | None:
    """Return the number of threads of a matrix product; None where it is not known."""
    functions = _find_thread_functions()
    return None if functions is None else functions.get()


@contextmanager
def use_blas_threads(count: int) -> Iterator[None]:
    """Set the number of threads of matrix products for the length of a ``with`` block."""
    functions = _find_thread_functions()
    if functions is None:
        yield
        return
    before = functions.get()
    functions.set(count)
    try:
        yield
    finally:
        functions.set(before)


@dataclass(frozen=True, slots=True)
class _ThreadFunctions:
    """The functions of OpenBLAS that return and set the number of threads."""

    get: Callable[[], int]
    set: Callable[[int], object]


@cache
def _find_thread_functions() -> _ThreadFunctions | None:
    """Return the functions of the library that numpy has loaded; None if it is not OpenBLAS."""
    package = Path(np.__file__).parent
    paths = [path for folder in _FOLDERS for path in (package / folder).glob("*openblas*")]
    for path in paths:
        try:
            library = ctypes.CDLL(str(path.resolve()))
        except OSError:  # it is not one for this machine
            continue
        for name in _NAMES:
            get, change = (getattr(library, name.format(word), None) for word in ("get", "set"))
            if get is not None and change is not None:
                return _ThreadFunctions(get, change)
    return None
