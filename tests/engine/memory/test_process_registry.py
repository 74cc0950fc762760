"""What engines hold is seen from other processes, as long as they live."""

import gc
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.memory.process_registry import EngineRecord, EngineRegistration, list_engines
from tests.engine.process_with_base import read_process_line

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "engines"


@pytest.fixture
def other(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Another process, whose engine answers."""
    words = [sys.executable, "-m", "tests.engine.process_with_base", str(folder)]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        read_process_line(process)
        yield process
        process.kill()


def test_an_engine_in_another_process_is_seen_with_all_that_it_holds(
    folder: Path, other: subprocess.Popen[bytes]
) -> None:
    [seen] = list_engines(folder)
    assert (seen.pid, seen.answering, seen.limit) == (other.pid, True, 100_000_000)
    assert seen.held == {"base": 60_000_000, "experts": 0, "kv": 1_000, "buffers": 0}
    assert (seen.total, seen.base) == (60_001_000, "a base")
    assert seen.experts == ("acme/sql@1.0.0", "acme/dates@2.0.0")
    if sys.platform == "linux":
        assert seen.resident_bytes is not None
        assert seen.resident_bytes == psutil.Process(other.pid).memory_info().rss


def test_between_answers_an_engine_still_holds_its_base(
    folder: Path, other: subprocess.Popen[bytes]
) -> None:
    read_process_line(other, "answered")
    [seen] = list_engines(folder)
    assert not seen.answering
    assert seen.held == {"base": 60_000_000, "experts": 0, "kv": 0, "buffers": 0}


def test_who_ends_or_is_killed_is_seen_no_more_and_the_next_removes_what_it_left(
    folder: Path, other: subprocess.Popen[bytes]
) -> None:
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert list_engines(folder) == []
    [left] = [path for path in folder.iterdir() if path.is_dir()]
    mine = EngineRegistration(folder, MemoryBudget(10))
    mine.publish(base="mine", experts=())
    assert [seen.pid for seen in list_engines(folder)] == [os.getpid()]
    assert not left.exists()
    mine.close()
    assert list_engines(folder) == []
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_an_engine_that_has_loaded_nothing_leaves_no_trace(folder: Path) -> None:
    presence = EngineRegistration(folder, MemoryBudget(10))
    with presence.mark_answering():
        assert list_engines(folder) == []
    presence.close()
    assert not folder.exists()


def test_only_its_user_can_see_it(folder: Path) -> None:
    presence = EngineRegistration(folder, MemoryBudget(10))
    presence.publish(base="mine", experts=())
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    presence.close()


def test_a_process_of_the_same_number_is_not_mistaken_for_it(folder: Path) -> None:
    other = EngineRecord(os.getpid(), 1, False, 10, {}, "gone", ())
    assert other.resident_bytes is None


@pytest.mark.parametrize("said", [b"", b"{", b"[]", b'{"pid": "x"}', b"\xff" * 100])
def test_what_nobody_can_read_is_left_out(folder: Path, said: bytes) -> None:
    presence = EngineRegistration(folder, MemoryBudget(10))
    presence.publish(base="mine", experts=())
    [path] = folder.rglob("holds")
    assert json.loads(path.read_bytes())["base"] == "mine"
    path.write_bytes(said)
    assert list_engines(folder) == []
    presence.close()


def test_where_nobody_may_write_an_engine_is_not_seen_and_works(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    presence = EngineRegistration(tmp_path / "file" / "engines", MemoryBudget(10))
    with presence.mark_answering():
        presence.publish(base="mine", experts=())
    assert list_engines(tmp_path / "file" / "engines") == []


def a_child(does: Callable[[], None]) -> None:
    """Fork, do something in the child, end it there."""
    pid = os.fork()
    if not pid:
        try:
            does()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


def test_a_forked_child_that_ends_its_copy_takes_nothing_from_its_parent(folder: Path) -> None:
    """Closing the copy, collecting it, and using it."""
    presence = EngineRegistration(folder, MemoryBudget(10))
    presence.publish(base="mine", experts=())

    def collected() -> None:
        presence.__dict__.clear()
        gc.collect()

    def answered() -> None:
        with presence.mark_answering():
            presence.publish(base="of the child", experts=())

    for does in (presence.close, collected, answered):
        a_child(does)
        assert [(seen.pid, seen.base) for seen in list_engines(folder)] == [(os.getpid(), "mine")]
    presence.close()
    assert list_engines(folder) == []


def test_who_lost_its_folder_makes_another_one(folder: Path) -> None:
    presence = EngineRegistration(folder, MemoryBudget(10))
    presence.publish(base="mine", experts=())
    shutil.rmtree(folder)
    presence.publish(base="mine", experts=())
    assert [seen.pid for seen in list_engines(folder)] == [os.getpid()]
    presence.close()
    assert [path.name for path in folder.iterdir()] == ["lock"]
