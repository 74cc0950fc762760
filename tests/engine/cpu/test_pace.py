import random
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.cpu.program_cache import (
    COST,
    MAX_TRIAL_INTERVAL,
    MIN_TRIAL_INTERVAL,
    TRIAL_STEPS,
    StepTuner,
    ThreadTuner,
    list_worker_counts,
)
from expertctl.engine.kernels.thread_pool import ThreadPool
from tests.engine.kernels.sample_programs import make_array_program, make_count_kernel

Machine = Callable[[int], float]
"""How long a step takes with so many workers."""


def quiet(workers: int) -> float:
    """Products of matrices where nobody else computes."""
    return 1 / workers


def make_busy_machine(busy: int, cores: int) -> Machine:
    """A machine where workers for whom no core is free hold up all others twentyfold."""
    return lambda workers: 20 / cores if workers > cores - busy else 1 / workers


def walk(course: StepTuner, machine: Machine, steps: int, *, jitter: float = 0.0) -> list[float]:
    """Take steps as the course says; return how long each took."""
    chance, taken = random.Random(0), []
    for _ in range(steps):
        taken.append(machine(course.workers) * (1 + jitter * chance.random()))
        course.record(course.workers, taken[-1])
    return taken


@pytest.mark.parametrize(
    ("limit", "counts"),
    [(1, (1,)), (2, (2, 1)), (4, (4, 3, 2, 1)), (16, (16, 15, 8, 4, 2, 1)), (6, (6, 5, 3, 1))],
)
def test_the_choice_is_between_all_but_one_and_halves(limit: int, counts: tuple[int, ...]) -> None:
    assert list_worker_counts(limit) == counts


@pytest.mark.parametrize("cores", [2, 3, 4, 16])
def test_a_quiet_machine_gives_all_workers_but_for_a_few_trials(cores: int) -> None:
    taken = walk(StepTuner(cores), quiet, 2000, jitter=0.1)
    assert sum(taken) <= 1.04 * sum(walk(StepTuner(1), lambda _: quiet(cores), 2000, jitter=0.1))


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_a_noisy_neighbour_costs_at_most_half(cores: int) -> None:
    course = StepTuner(cores)
    walk(course, quiet, 100, jitter=0.1)
    taken = walk(course, make_busy_machine(1, cores), 500, jitter=0.1)
    undisturbed = walk(StepTuner(1), lambda _: quiet(cores), 500, jitter=0.1)
    assert sum(taken) <= 2.2 * sum(undisturbed)
    assert sum(taken[TRIAL_STEPS:]) <= 2.1 * sum(undisturbed[TRIAL_STEPS:])


def test_many_neighbours_leave_a_few_workers() -> None:
    course = StepTuner(16)
    walk(course, quiet, 100)
    taken = walk(course, make_busy_machine(11, 16), 200)
    assert min(taken[-MIN_TRIAL_INTERVAL:]) == quiet(4)


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_all_workers_come_back_when_the_neighbour_is_gone(cores: int) -> None:
    course = StepTuner(cores)
    walk(course, quiet, 100)
    walk(course, make_busy_machine(1, cores), 300)
    walk(course, quiet, 2 * MAX_TRIAL_INTERVAL)
    taken = walk(course, quiet, MIN_TRIAL_INTERVAL)
    assert min(taken) == quiet(cores)


def test_one_slow_step_changes_nothing() -> None:
    course = StepTuner(2)
    walk(course, quiet, MIN_TRIAL_INTERVAL - 4)
    course.record(2, 9.0)
    assert course.workers == 2
    assert set(walk(course, quiet, 3)) == {quiet(2)}


def test_a_text_that_grows_is_no_alarm() -> None:
    course = StepTuner(2)
    taken = 0.0
    for step in range(4000):
        seconds = quiet(course.workers) * (1 + step / 400)
        taken += seconds
        course.record(course.workers, seconds)
    assert taken <= 1.03 * sum(quiet(2) * (1 + step / 400) for step in range(4000))


def test_a_trial_that_is_hopeless_ends_after_one_step() -> None:
    course = StepTuner(2)
    machine: Machine = {2: 1.0, 1: 5.0}.__getitem__
    taken = walk(course, machine, MIN_TRIAL_INTERVAL + 2)
    assert taken == [1.0] * MIN_TRIAL_INTERVAL + [5.0, 1.0]


@pytest.mark.parametrize("slow", [1.1, 1.5, 2.0, 40.0])
def test_trials_that_lose_cost_little(slow: float) -> None:
    taken = walk(StepTuner(2), {2: 1.0, 1: slow}.__getitem__, 20_000)
    assert 20_000 < sum(taken) <= 20_000 * 1.08
    if slow < 10:
        assert sum(taken) <= 20_000 * (1.02 + COST)


def test_a_step_that_began_before_the_last_change_tells_nothing() -> None:
    course = StepTuner(2)
    for _ in range(50):
        course.record(1, 0.001)
    assert course.workers == 2


@settings(deadline=None, max_examples=40)
@given(
    st.integers(2, 16), st.integers(0, 5), st.floats(1.1, 3.0), st.floats(1.1, 3.0), st.integers()
)
def test_it_finds_the_best_number_where_times_have_one_valley(
    limit: int, place: int, left: float, right: float, seed: int
) -> None:
    counts = list_worker_counts(limit)
    best = min(place, len(counts) - 1)
    times = {
        count: right ** (k - best) if k > best else left ** (best - k)
        for k, count in enumerate(counts)
    }
    course, chance, late = StepTuner(limit), random.Random(seed), []
    for step in range(1500):
        seconds = times[course.workers] * (1 + 0.02 * chance.random())
        course.record(course.workers, seconds)
        if step >= 1000:
            late.append(seconds)
    assert sum(late) <= 1.1 * 500


def test_each_kind_of_step_has_a_pace_of_its_own() -> None:
    pace = ThreadTuner(2)
    for kind in ("step", "step", "prompt", "step"):
        with pace.measure_step(kind) as workers:
            assert workers == 2


def test_a_step_that_fails_is_not_measured() -> None:
    pace = ThreadTuner(2)

    def fail() -> None:
        with pace.measure_step("step"):
            raise KeyError

    for _ in range(MIN_TRIAL_INTERVAL):
        with pytest.raises(KeyError):
            fail()
    with pace.measure_step("step") as workers:
        assert workers == 2


@pytest.mark.parametrize("limit", [1, 0, -3])
def test_one_worker_is_always_one(limit: int) -> None:
    pace = ThreadTuner(limit)
    for _ in range(3 * MIN_TRIAL_INTERVAL):
        with pace.measure_step("step") as workers:
            assert workers == 1


def test_steps_beside_a_process_that_spins_are_right_and_within_the_limit() -> None:
    out = np.zeros(400, np.int64)
    program = make_array_program(make_count_kernel(), out, operations=5)
    spinning = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    crew, pace, counts = ThreadPool(2), ThreadTuner(2), set()
    try:
        for _ in range(4 * MIN_TRIAL_INTERVAL):
            with pace.measure_step("step") as workers:
                crew.run(program, workers=workers)
            counts.add(workers)
    finally:
        spinning.kill()
        spinning.wait()
        crew.close()
    assert set(out.tolist()) == {4 * MIN_TRIAL_INTERVAL * 5}
    assert counts <= {1, 2}
