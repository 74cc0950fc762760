"""The arguments of kernels: int64 that compiled code reads in the order in which they stand.

An array is only an address there, so a wrong one in its place would go unnoticed. That is why
functions that return arguments take arrays by name, and why dtypes are checked here.
"""

from typing import Any

import numpy as np

Numbers = np.ndarray[Any, Any]


def words_of(*words: int) -> Numbers:
    """Return arguments, int64 [words]."""
    return np.array(words, np.int64)


def address(array: Numbers | None, kind: Any = np.float32) -> int:
    """Return where an array of such numbers begins; 0 where there is none."""
    if array is None:
        return 0
    assert array.dtype == kind, f"{array.dtype} in the place of {np.dtype(kind)}"
    return array.ctypes.data


def rows_at(rows: Numbers) -> tuple[int, int]:
    """Return where float32 [rows, columns] begin, and the bytes from each row to the next."""
    lie_together = rows.strides[1] == rows.itemsize or rows.shape[1] == 1 or rows.size == 0
    assert lie_together, "the columns of a row lie apart"
    return address(rows), rows.strides[0]
