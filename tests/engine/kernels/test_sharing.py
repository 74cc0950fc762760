"""How items are claimed, and what a worker that the system held up finds when it looks again."""

import numpy as np
import pytest

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.compiled.thread_pool import _claim_items
from expertctl.engine.kernels.program import Program
from expertctl.engine.kernels.thread_pool import (
    OPERATION_BYTES,
    RUN_SHIFT,
    SHARED_WORDS,
    TICKET,
    is_idle,
    load_pool_functions,
    set_operation_buffer,
)
from tests.engine.kernels.sample_programs import (
    make_array_program,
    make_claim_kernel,
    make_count_kernel,
)

TICKET_WORD = TICKET // 8


def run_without_others(program: Program, shared: AnyArray) -> None:
    table = program.table
    assert load_pool_functions().run_threaded(
        table.ctypes.data, len(table), shared.ctypes.data, 0, 0, 0
    )


def test_a_late_worker_leaves_a_run_alone_that_is_written_and_not_yet_published() -> None:
    """The leader is held up between the length of its run and the ticket."""
    shared, room = (
        aligned_zeros(SHARED_WORDS, np.int64),
        aligned_zeros(8 * OPERATION_BYTES, np.uint8),
    )
    set_operation_buffer(shared, room.ctypes.data)
    first, second = np.zeros(1, np.int64), np.zeros(1, np.int64)
    assert is_idle(shared)
    earlier = make_array_program(make_count_kernel(), first)
    later = make_array_program(
        make_count_kernel(), second, operations=4
    )  # both stay until the test is over
    run_without_others(earlier, shared)
    old_ticket = shared[TICKET_WORD]
    run_without_others(later, shared)
    assert (first[0], second[0], is_idle(shared)) == (1, 4, True)

    shared[TICKET_WORD] = old_ticket
    _claim_items(shared.ctypes.data, 1)
    assert (first[0], second[0], shared[TICKET_WORD]) == (1, 4, old_ticket)

    shared[TICKET_WORD] = 2 << RUN_SHIFT
    assert not is_idle(shared)
    _claim_items(shared.ctypes.data, 1)
    assert second[0] == 4
    _claim_items(shared.ctypes.data, 2)
    assert (second[0], is_idle(shared)) == (8, True)


@pytest.mark.parametrize(
    ("items", "portion", "claims"),
    [(1, 1, [1]), (20, 1, [10, 5, 2, 1, 1, 1]), (20, 4, [10, 5, 4, 1]), (3, 7, [3])],
)
def test_who_works_alone_claims_half_of_what_is_left_and_no_less_than_a_portion(
    items: int, portion: int, claims: list[int]
) -> None:
    shared, room = (
        aligned_zeros(SHARED_WORDS, np.int64),
        aligned_zeros(8 * OPERATION_BYTES, np.uint8),
    )
    set_operation_buffer(shared, room.ctypes.data)
    together = np.zeros(items, np.int64)
    run_without_others(make_array_program(make_claim_kernel(), together, portion=portion), shared)
    assert together.tolist() == [size for size in claims for _ in range(size)]
