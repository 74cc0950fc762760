"""What a process has of its own, and what it may have."""

import mmap
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.routed.engine_processes import (
    ResidentSetWatch,
    limit_memory,
    measure_huge_page_share,
    read_io_bytes,
    read_status_bytes,
)
from expertctl.engine.memory.host import allocate

_MB = 1 << 20
_PATIENCE = 60.0


def test_the_most_that_was_held_is_seen_even_if_it_is_gone() -> None:
    watch, until = ResidentSetWatch(), time.monotonic() + _PATIENCE
    with watch:
        with hold_memory(64 * _MB):
            while watch.growth < 60 * _MB:
                assert time.monotonic() < until, "nobody looks"
        gone = watch.growth
    assert 60 * _MB < gone <= watch.growth < 128 * _MB


def test_what_is_held_when_it_ends_is_seen_however_short_it_was() -> None:
    watch = ResidentSetWatch()
    with hold_memory(64 * _MB), watch:
        pass
    with watch:
        pass
    assert 60 * _MB < watch.growth < 128 * _MB


@contextmanager
def hold_memory(size: int) -> Iterator[None]:
    """Hold memory of our own, every page of it, and give it back to the system."""
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for begin in range(0, size, mmap.PAGESIZE):
            block[begin] = 1
        yield


def test_figures_of_the_system_are_bytes() -> None:
    assert read_status_bytes("VmData") > read_status_bytes("RssAnon") > _MB
    assert read_io_bytes("rchar") > 0


def test_huge_pages_are_told_as_a_share_of_what_is_our_own(tmp_path: Path) -> None:
    maps = tmp_path / "smaps_rollup"
    kilobytes = {"Rss": 900, "Anonymous": 800, "KSM": 0, "AnonHugePages": 600, "FilePmdMapped": 50}
    lines = [f"{name}:{number:>15} kB\n" for name, number in kilobytes.items()]
    maps.write_text("".join(["55d0-7ffe ---p 00000000 00:00 0 [rollup]\n", *lines]))
    assert measure_huge_page_share(maps) == 0.75
    assert 0 <= measure_huge_page_share() <= 1, "the system's own file has these lines, too"


def test_a_process_gets_no_more_than_it_may_have() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_beyond) == ("given", "refused")


def _beyond() -> tuple[str, str]:
    limit_memory(96 * _MB)
    return _asked(32 * _MB), _asked(128 * _MB)


def _asked(size: int) -> str:
    try:
        allocate(size)
    except OSError:
        return "refused"
    return "given"
