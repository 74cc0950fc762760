"""Memory that begins at a vector, and its address in compiled code."""

import numba
import numpy as np
import pytest
from numba.core.errors import NumbaError

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.compiled.memory import allocate_stack_floats, load_int64s


@pytest.mark.parametrize("shape", [0, 1, 63, (3, 5), (2, 0, 7), (1, 2, 3)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.int64])
def test_memory_begins_at_a_vector_and_is_zero(
    shape: int | tuple[int, ...], dtype: type[np.generic]
) -> None:
    for _ in range(5):
        made = aligned_zeros(shape, dtype)
        assert made.ctypes.data % 64 == 0 or made.size == 0
        assert made.shape == (shape if isinstance(shape, tuple) else (shape,))
        assert made.dtype == dtype
        assert not made.any()


def test_compiled_code_needs_to_know_how_many_words_and_how_much_room() -> None:
    @numba.njit
    def read(address: int, count: int) -> int:
        return load_int64s(address, count)[0]  # type: ignore[no-any-return]

    @numba.njit
    def make_room(count: int) -> int:
        return allocate_stack_floats(count)  # type: ignore[no-any-return]

    with pytest.raises(NumbaError, match="the number of words is a constant"):
        read(0, 1)
    with pytest.raises(NumbaError, match="the size on the stack is a constant"):
        make_room(1)
