"""Memory for weights: zeroed, writable, of the size that was asked for."""

from pathlib import Path

import pytest

from expertctl.engine import memory


@pytest.mark.parametrize("size", [0, 1, 4096, memory.HUGE + 1])
def test_a_block_has_the_size_asked_for_and_is_zero(size: int) -> None:
    block = memory.allocate(size)
    assert len(block) == size
    assert not any(block[:1])
    assert not any(block[-1:])
    block[:] = b"\x07" * size
    assert bytes(block[-1:]) == b"\x07"[:size]


def test_two_blocks_are_not_the_same_memory() -> None:
    one, other = memory.allocate(16), memory.allocate(16)
    one[0] = 1
    assert other[0] == 0


def test_the_machine_has_some_memory() -> None:
    assert 1 << 26 < memory.available() < 1 << 60


def test_a_container_with_less_memory_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = (tmp_path / "memory.max", tmp_path / "absent")
    limits[0].write_text("max\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", limits)
    machine = memory.available()
    limits[0].write_text("1048576\n")
    assert memory.available() == 1048576 < machine
