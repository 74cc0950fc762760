"""What a worker that the system held up finds when it looks again."""

import numpy as np

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
from tests.engine.kernels.programs import count_kernel, on_one_array

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
