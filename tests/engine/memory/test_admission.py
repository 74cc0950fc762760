"""Runs of one home share a memory: seats, turns, and what a killed process leaves."""

import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import accumulate
from pathlib import Path

import pytest

from expertctl.engine.memory.process_registry import MemoryAdmission

MIB = 1 << 20


class AdmissionPauseError(BaseException):
    """A pause in which nothing changes: the run would wait for ever."""


def stuck() -> None:
    raise AdmissionPauseError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "home" / "running"


@pytest.fixture
def told() -> list[str]:
    return []


def seats(folder: Path) -> list[str]:
    """What the seats say, the oldest first."""
    return [(f / "seat").read_text() for f in sorted(folder.iterdir()) if f.is_dir()]


def test_a_run_has_a_seat_as_long_as_it_runs(folder: Path) -> None:
    with MemoryAdmission(folder).acquire(100) as seat:
        assert seats(folder) == ["100 in"]
        assert not seat.queued
        seat.resize(60)
        assert seats(folder) == ["60 in"]
    assert seats(folder) == []
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_who_does_not_wait_is_never_kept_out(folder: Path) -> None:
    with MemoryAdmission(folder).acquire(100), MemoryAdmission(folder).acquire(10**12):
        assert seats(folder) == ["100 in", f"{10**12} in"]


def test_a_run_that_fits_beside_the_others_does_not_wait(folder: Path, told: list[str]) -> None:
    admission = MemoryAdmission(folder, pause=stuck)
    with (
        admission.acquire(60),
        admission.wait_in_queue(40, limit=100, tell=told.append) as seat,
    ):
        assert (seat.queued, told) == (False, [])
        assert seats(folder) == ["60 in", "40 in"]


def test_a_run_waits_until_the_others_leave_enough(folder: Path, told: list[str]) -> None:
    first = ExitStack()
    seat = first.enter_context(MemoryAdmission(folder).acquire(80 * MIB))
    steps: Iterator[Callable[[], None]] = iter([lambda: seat.resize(70 * MIB), first.close])
    admission = MemoryAdmission(folder, pause=lambda: next(steps)())
    with admission.wait_in_queue(40 * MIB, limit=100 * MIB, tell=told.append) as mine:
        assert mine.queued
        assert list(steps) == []
        assert seats(folder) == [f"{40 * MIB} in"]
    assert told == [
        "waiting for memory: 41.9 MB of 100 MiB (104.9 MB) are needed, 1 other run holds 83.9 MB"
    ]


def test_who_waits_longer_is_let_in_first(folder: Path, told: list[str]) -> None:
    """A small run that would fit waits behind a large one that does not."""
    with ExitStack() as first:
        first.enter_context(MemoryAdmission(folder).acquire(80))

        def second_comes() -> None:
            small = MemoryAdmission(folder, pause=stuck)
            with (
                pytest.raises(AdmissionPauseError),
                small.wait_in_queue(10, limit=100, tell=told.append),
            ):
                pass
            assert "; 1 waits longer" in told[-1]
            first.close()

        large = MemoryAdmission(folder, pause=second_comes)
        with large.wait_in_queue(50, limit=100, tell=told.append) as seat:
            assert seat.queued


def test_who_gives_up_waiting_leaves_nothing(folder: Path, told: list[str]) -> None:
    with MemoryAdmission(folder).acquire(80):
        waiting = MemoryAdmission(folder, pause=stuck)
        with (
            pytest.raises(AdmissionPauseError),
            waiting.wait_in_queue(50, limit=100, tell=told.append),
        ):
            pass
        assert seats(folder) == ["80 in"]


def test_who_waits_takes_no_room(folder: Path, told: list[str]) -> None:
    def another_comes() -> None:
        with MemoryAdmission(folder, pause=stuck).acquire(90):
            assert seats(folder) == ["80 in", "90 waits", "90 in"]
        raise AdmissionPauseError

    with MemoryAdmission(folder).acquire(80):
        waiting = MemoryAdmission(folder, pause=another_comes)
        with (
            pytest.raises(AdmissionPauseError),
            waiting.wait_in_queue(90, limit=100, tell=told.append),
        ):
            pass


HOLDER = """
import sys
from pathlib import Path
from expertctl.engine.memory.process_registry import MemoryAdmission
with MemoryAdmission(Path(sys.argv[1])).acquire(int(sys.argv[2])):
    print("in", flush=True)
    sys.stdin.read()
"""


def test_a_killed_process_frees_its_seat(folder: Path, told: list[str]) -> None:
    words = [sys.executable, "-c", HOLDER, str(folder), "80"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"in\n"

        def kill() -> None:
            os.kill(other.pid, signal.SIGKILL)
            other.wait()

        with MemoryAdmission(folder, pause=kill).wait_in_queue(
            50, limit=100, tell=told.append
        ) as seat:
            assert seat.queued
            assert seats(folder) == ["50 in"]


TAKER = """
import os, random, sys
from pathlib import Path
from expertctl.engine.memory.process_registry import MemoryAdmission
folder, log, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
numbers = random.Random(seed)
def waited(text):
    assert text.startswith("waiting for memory"), text
    os.write(handle, b"0\\n")
for _ in range(8):
    size = numbers.randint(20, 100)
    admission = MemoryAdmission(folder, pause=lambda: None)
    with admission.wait_in_queue(size, limit=100, tell=waited):
        os.write(handle, b"%d\\n" % size)
        for _ in range(20):
            os.listdir(folder)
        os.write(handle, b"%d\\n" % -size)
"""


def test_processes_that_queue_never_take_more_than_the_limit_together(
    folder: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    log.touch()
    words = [sys.executable, "-c", TAKER, str(folder), str(log)]
    with MemoryAdmission(folder).acquire(100):
        runs = [subprocess.Popen([*words, str(seed)]) for seed in range(3)]
        while log.read_text().count("0\n") < 3:  # until each of them waits
            assert all(run.poll() is None for run in runs)
    assert [run.wait() for run in runs] == [0, 0, 0]
    steps = [int(line) for line in log.read_text().splitlines()]
    sums = list(accumulate(steps))
    assert len([step for step in steps if step]) == 2 * 3 * 8
    assert (min(sums), max(sums) <= 100, sums[-1]) == (0, True, 0)
    assert seats(folder) == []


@pytest.mark.parametrize("name", ["000000000001-ab", "000000000009-ff"])
def test_what_a_dead_run_left_half_made_is_removed(folder: Path, name: str) -> None:
    (folder / name).mkdir(parents=True)
    (folder / name / "seat").write_text("90 i")
    with MemoryAdmission(folder, pause=stuck).wait_in_queue(50, limit=100, tell=print):
        assert seats(folder) == ["50 in"]


def test_what_is_no_seat_is_left_alone(folder: Path) -> None:
    (folder / "notes").mkdir(parents=True)
    with MemoryAdmission(folder, pause=stuck).wait_in_queue(50, limit=100, tell=print):
        pass
    assert (folder / "notes").is_dir()


def test_a_seat_that_is_just_being_removed_takes_no_room(folder: Path, told: list[str]) -> None:
    """A run that ends lets go of its lock and then removes its folder; others look meanwhile."""
    with MemoryAdmission(folder).acquire(80):
        [other] = [path for path in folder.iterdir() if path.is_dir()]
        (other / "seat").unlink()
        with MemoryAdmission(folder, pause=stuck).wait_in_queue(
            50, limit=100, tell=told.append
        ) as seat:
            assert not seat.queued
    assert told == []


def test_a_seat_that_cannot_be_read_is_told(folder: Path) -> None:
    with MemoryAdmission(folder).acquire(10):
        [other] = [path for path in folder.iterdir() if path.is_dir()]
        (other / "seat").write_text("much")
        told: list[str] = []
        with MemoryAdmission(folder, pause=stuck).wait_in_queue(
            50, limit=100, tell=told.append
        ) as seat:
            assert not seat.queued
        assert "not the lease of a run" in told[0]


def test_where_nobody_may_write_a_run_goes_on(tmp_path: Path, told: list[str]) -> None:
    (tmp_path / "running").write_text("a file where the folder should be")
    admission = MemoryAdmission(tmp_path / "running", pause=stuck)
    with admission.acquire(10) as seat:
        seat.resize(5)
    assert told == []
    with admission.wait_in_queue(10, limit=100, tell=told.append) as seat:
        assert not seat.queued
    assert told[0].startswith("warning: cannot wait for other runs: ")


def test_a_seat_whose_folder_was_removed_is_no_error(folder: Path) -> None:
    with MemoryAdmission(folder).acquire(10) as seat:
        [own] = [path for path in folder.iterdir() if path.is_dir()]
        (own / "seat").unlink()
        (own / "lock").unlink()
        own.rmdir()
        seat.resize(5)
        assert not own.exists(), "who was removed takes no room again"
        with MemoryAdmission(folder, pause=stuck).wait_in_queue(
            100, limit=100, tell=print
        ) as other:
            assert not other.queued
