"""How items are claimed, and what a worker that the system held up finds when it looks again."""

import numpy as np
import pytest

from expertctl.engine.kernels import sharing as module
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.program import Program
from expertctl.engine.kernels.sharing import (
    ROW_BYTES,
    SHARED_WORDS,
    Numbers,
    is_idle,
    lend_room,
    sharing,
)
from tests.engine.kernels.programs import claim_kernel, count_kernel, on_one_array

TICKET = module._TICKET // 8


def run_without_others(program: Program, shared: Numbers) -> None:
    table = program.table
    assert sharing().run_shared(table.ctypes.data, len(table), shared.ctypes.data, 0, 0, 0)


def test_a_late_worker_leaves_a_run_alone_that_is_written_and_not_yet_published() -> None:
    """The leader is held up between the length of its run and the ticket."""
    shared, room = aligned(SHARED_WORDS, np.int64), aligned(8 * ROW_BYTES, np.uint8)
    lend_room(shared, room.ctypes.data)
    first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert is_idle(shared)
    earlier = on_one_array(count_kernel(), first)
    later = on_one_array(count_kernel(), second, operations=4)  # both stay until the test is over
    run_without_others(earlier, shared)
    old_ticket = shared[TICKET]
    run_without_others(later, shared)
    assert (first[0], second[0], is_idle(shared)) == (1, 4, True)

    shared[TICKET] = old_ticket
    module._take_part(shared.ctypes.data, 1)
    assert (first[0], second[0], shared[TICKET]) == (1, 4, old_ticket)

    shared[TICKET] = 2 << module._RUN_SHIFT
    assert not is_idle(shared)
    module._take_part(shared.ctypes.data, 1)
    assert second[0] == 4
    module._take_part(shared.ctypes.data, 2)
    assert (second[0], is_idle(shared)) == (8, True)


@pytest.mark.parametrize(
    ("items", "portion", "claims"),
    [(1, 1, [1]), (20, 1, [10, 5, 2, 1, 1, 1]), (20, 4, [10, 5, 4, 1]), (3, 7, [3])],
)
def test_who_works_alone_claims_half_of_what_is_left_and_no_less_than_a_portion(
    items: int, portion: int, claims: list[int]
) -> None:
    shared, room = aligned(SHARED_WORDS, np.int64), aligned(8 * ROW_BYTES, np.uint8)
    lend_room(shared, room.ctypes.data)
    together = np.zeros(items, np.int64)
    run_without_others(on_one_array(claim_kernel(), together, portion=portion), shared)
    assert together.tolist() == [size for size in claims for _ in range(size)]
