import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels import thread_pool as module
from expertctl.engine.kernels.program import ProgramBuilder
from expertctl.engine.kernels.thread_pool import (
    MAX_ITEMS,
    MAX_OPERATIONS,
    PoolFunctions,
    ThreadPool,
    load_pool_functions,
)
from tests.engine.kernels.sample_programs import (
    MixOperation,
    make_array_program,
    make_count_kernel,
    make_mix_program,
    make_thread_kernel,
)

ARRAYS, LENGTH = 3, 64
RUNS_OF_AN_EXAMPLE = 34

MIXES = st.builds(
    lambda source, step, *rest: MixOperation(source, (source + step) % ARRAYS, *rest),
    st.integers(0, ARRAYS - 1),
    st.integers(1, ARRAYS - 1),
    st.integers(-3, 3),
    st.integers(0, LENGTH),
    st.integers(1, LENGTH + 9),
)


@pytest.fixture(scope="module")
def crew() -> Iterator[ThreadPool]:
    crew = ThreadPool(4)
    yield crew
    crew.check_integrity()
    crew.close()


@pytest.mark.all
@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(mixes=st.lists(MIXES, max_size=12), workers=st.integers(1, 4))
def test_ten_thousand_runs_do_what_a_plain_executor_does(
    crew: ThreadPool, mixes: list[MixOperation], workers: int
) -> None:
    memory = np.arange(ARRAYS * LENGTH).reshape(ARRAYS, LENGTH)
    expected = memory.copy()
    program = make_mix_program(mixes, memory)
    for _ in range(RUNS_OF_AN_EXAMPLE):
        crew.run(program, workers=workers)
        for mix in mixes:
            mix.compute(expected)
        assert np.array_equal(memory, expected)
    crew.check_integrity()


def test_a_program_without_operations_is_over_at_once(crew: ThreadPool) -> None:
    counts = np.zeros(5, np.int64)
    for runs, workers in enumerate((1, 4), start=1):
        crew.run(ProgramBuilder().build(), workers=workers)
        crew.run(make_array_program(make_count_kernel(), np.zeros(0, np.int64)), workers=workers)
        crew.check_integrity()
        crew.run(make_array_program(make_count_kernel(), counts), workers=workers)
        assert counts.tolist() == [runs] * 5


@pytest.mark.parametrize("workers", [1, 3])
def test_items_are_counted_anew_at_each_run(crew: ThreadPool, workers: int) -> None:
    out, items = np.zeros(9, np.int64), np.zeros(1, np.int64)
    builder = ProgramBuilder()
    builder.add(make_count_kernel(), np.array([out.ctypes.data], np.int64), items, portion=2)
    program = builder.build()
    for items[0] in (0, 9, 4):
        crew.run(program, workers=workers)
    assert out.tolist() == [2, 2, 2, 2, 1, 1, 1, 1, 1]


def test_there_is_room_for_as_many_operations_as_a_ticket_counts(crew: ThreadPool) -> None:
    out = np.zeros(3, np.int64)
    for operations in (700, 3000, MAX_OPERATIONS):
        out[:] = 0
        crew.run(make_array_program(make_count_kernel(), out, operations=operations))
        assert out.tolist() == [operations] * 3


def test_more_than_a_ticket_counts_is_refused_before_anything_is_done(crew: ThreadPool) -> None:
    out = np.zeros(3, np.int64)
    many = make_array_program(make_count_kernel(), out, operations=MAX_OPERATIONS + 1)
    builder = ProgramBuilder()
    builder.add(make_count_kernel(), np.array([out.ctypes.data], np.int64), 3)
    builder.add(make_count_kernel(), np.array([out.ctypes.data], np.int64), MAX_ITEMS + 1)
    for program in (many, builder.build()):
        with pytest.raises(ValueError, match="in a run"):
            crew.run(program)
    assert not out.any()
    crew.run(make_array_program(make_count_kernel(), out))
    assert out.all()


@pytest.mark.parametrize("workers", [1, 2, 4, 9, 0, -1])
def test_no_more_threads_work_than_were_asked_for(crew: ThreadPool, workers: int) -> None:
    seen: set[int] = set()
    for _ in range(50):
        out = np.zeros(40, np.int64)
        crew.run(make_array_program(make_thread_kernel(), out), workers=workers)
        seen |= set(out.tolist())
    assert 0 not in seen
    assert len(seen) <= (min(workers, 4) if workers > 0 else 4)


def test_one_worker_is_the_caller(crew: ThreadPool) -> None:
    out = np.zeros(40, np.int64)
    crew.run(make_array_program(make_thread_kernel(), out), workers=1)
    assert set(out.tolist()) == {threading.get_ident()}


def test_times_are_of_each_operation_that_had_items(crew: ThreadPool) -> None:
    out, none = np.zeros(50_000, np.int64), np.zeros(0, np.int64)
    builder = ProgramBuilder()
    for array in (out, none, out):
        builder.add(make_count_kernel(), np.array([array.ctypes.data], np.int64), len(array))
    program = builder.build()
    for workers in (1, 3):
        begun = time.perf_counter()
        spent = crew.run_timed(program, workers=workers)
        assert spent.sum() <= time.perf_counter() - begun
        assert (spent > 0).tolist() == [True, False, True]
    assert set(out.tolist()) == {4}
    crew.run(program, workers=3)
    assert set(out.tolist()) == {6}


def test_callers_in_many_threads_take_turns(crew: ThreadPool) -> None:
    arrays = [np.zeros(30, np.int64) for _ in range(5)]
    programs = [make_array_program(make_count_kernel(), out, operations=20) for out in arrays]

    def work(number: int) -> None:
        for turn in range(60):
            crew.run(programs[number], workers=1 + (turn + number) % 4)

    callers = [threading.Thread(target=work, args=(number,)) for number in range(5)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(set(out.tolist()) == {1200} for out in arrays)


def test_callers_who_meet_at_a_pool_that_never_worked_share_its_threads() -> None:
    before = len(list_pool_threads())
    crew, meeting = ThreadPool(3), threading.Barrier(2)
    arrays = [np.zeros(30, np.int64) for _ in range(2)]
    with pytest.MonkeyPatch.context() as patch:

        def meet() -> PoolFunctions:
            meeting.wait()  # neither has a team yet
            return load_pool_functions()

        patch.setattr(module, "load_pool_functions", meet)
        work = [make_array_program(make_count_kernel(), out, operations=20) for out in arrays]
        callers = [threading.Thread(target=crew.run, args=(each,)) for each in work]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    assert [set(out.tolist()) for out in arrays] == [{20}] * 2
    assert len(list_pool_threads()) == before + 2
    crew.check_integrity()
    crew.close()
    assert len(list_pool_threads()) == before


def test_many_crews_do_not_know_of_each_other() -> None:
    crews = [ThreadPool(3) for _ in range(12)]
    arrays = [np.zeros(20, np.int64) for _ in crews]
    for crew, out in zip(crews, arrays, strict=True):
        crew.run(make_array_program(make_count_kernel(), out, operations=5))
    crews[3].close()
    for crew, out in zip(crews[4:], arrays[4:], strict=True):
        crew.run(make_array_program(make_count_kernel(), out, operations=5))
        crew.close()
    assert [set(out.tolist()) for out in arrays] == [{5}] * 4 + [{10}] * 8


def test_torch_computes_beside_it(crew: ThreadPool) -> None:
    threads = torch.get_num_threads()
    matrix = torch.ones(64, 64)
    out = np.zeros(500, np.int64)
    program = make_array_program(make_count_kernel(), out, operations=20)
    found: list[bool] = []

    def multiply() -> None:
        found.extend(bool((matrix @ matrix == 64).all()) for _ in range(200))

    beside = threading.Thread(target=multiply)
    beside.start()
    for _ in range(100):
        crew.run(program)
    beside.join()
    assert set(out.tolist()) == {2000}
    assert all(found)
    assert torch.get_num_threads() == threads


def list_pool_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crew"]


def test_threads_begin_with_the_first_shared_run_and_end_at_close() -> None:
    before = len(list_pool_threads())
    crew = ThreadPool(3)
    program = make_array_program(make_count_kernel(), np.zeros(9, np.int64))
    crew.run(program, workers=1)
    assert len(list_pool_threads()) == before
    crew.run(program)
    assert len(list_pool_threads()) == before + 2
    crew.close()
    assert len(list_pool_threads()) == before
    crew.close()
    with pytest.raises(ValueError, match="closed"):
        crew.run(program)


def test_who_found_a_pool_open_that_is_closed_in_between_is_refused() -> None:
    before = len(list_pool_threads())
    crew, out = ThreadPool(3), np.zeros(9, np.int64)
    crew.run(make_array_program(make_count_kernel(), out), workers=2)
    with pytest.MonkeyPatch.context() as patch:
        find_team = ThreadPool._current_workers

        def close_then(crew: ThreadPool) -> module._WorkerGroup:
            team = find_team(crew)
            crew.close()
            return team

        patch.setattr(ThreadPool, "_current_workers", close_then)
        with pytest.raises(ValueError, match="closed"):
            crew.run(make_array_program(make_count_kernel(), out))
    assert len(list_pool_threads()) == before
    assert set(out.tolist()) == {1}


def test_a_pool_that_is_closed_while_its_first_run_begins_starts_no_thread() -> None:
    before = len(list_pool_threads())
    crew, out = ThreadPool(3), np.zeros(9, np.int64)
    with pytest.MonkeyPatch.context() as patch:

        def close_first() -> PoolFunctions:
            crew.close()
            return load_pool_functions()

        patch.setattr(module, "load_pool_functions", close_first)
        with pytest.raises(ValueError, match="closed"):
            crew.run(make_array_program(make_count_kernel(), out))
    assert len(list_pool_threads()) == before
    assert not out.any()


def test_a_pool_that_never_worked_closes_too() -> None:
    crew = ThreadPool(3)
    crew.check_integrity()
    crew.close()
    crew.check_integrity()


def test_threads_end_with_a_pool_that_nobody_closed() -> None:
    before = len(list_pool_threads())
    crew = ThreadPool(3)
    crew.run(make_array_program(make_count_kernel(), np.zeros(9, np.int64)))
    del crew
    gc.collect()
    assert len(list_pool_threads()) == before


FORGOTTEN = """
import numpy as np
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.sample_programs import make_count_kernel, make_array_program
out = np.zeros(99, np.int64)
crew = ThreadPool(3)
crew.run(make_array_program(make_count_kernel(), out, operations=9))
print(out.sum())
"""


def test_the_interpreter_ends_while_a_pool_is_there() -> None:
    command = [sys.executable, "-W", "error", "-c", FORGOTTEN]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, f"{9 * 99}\n", "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_process_has_workers_of_its_own(crew: ThreadPool) -> None:
    out = np.zeros(50, np.int64)
    program = make_array_program(make_count_kernel(), out, operations=20)
    crew.run(program)

    def work() -> None:
        for _ in range(300):
            crew.run(program)

    busy = threading.Thread(target=work)
    busy.start()
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        out[:] = 0
        for _ in range(5):
            crew.run(program)
        crew.close()
        os._exit(0 if set(out.tolist()) == {100} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    busy.join()
    assert set(out.tolist()) == {301 * 20}


class SignalError(Exception):
    """What the test's signal raises."""


@pytest.mark.skipif(
    "coverage" in sys.modules and sys.modules["coverage"].Coverage.current() is not None,
    reason="a signal that raises while coverage holds its own lock stops everything",
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_comes_between_runs_never_within_one(crew: ThreadPool) -> None:
    out = np.zeros(60, np.int64)
    program = make_array_program(make_count_kernel(), out, operations=30)
    runs, interrupted = 0, 0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise SignalError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(200):
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0005)
                for _ in range(1000):
                    crew.run(program, workers=3)
            except SignalError:
                interrupted += 1
            runs = int(out[0])
            assert set(out.tolist()) == {runs}
            assert runs % 30 == 0
            crew.check_integrity()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert interrupted > 150  # now and then one is raised where nothing can be raised
