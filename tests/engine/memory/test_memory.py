"""Memory for weights: zeroed, writable, of the size that was asked for."""

from pathlib import Path

import pytest

from expertctl.engine.memory import host


@pytest.mark.parametrize("size", [0, 1, 4096, host.HUGE_PAGE_BYTES + 1])
def test_a_block_has_the_size_asked_for_and_is_zero(size: int) -> None:
    block = host.allocate(size)
    assert len(block) == size
    assert not any(block[:1])
    assert not any(block[-1:])
    block[:] = b"\x07" * size
    assert bytes(block[-1:]) == b"\x07"[:size]


def test_two_blocks_are_not_the_same_memory() -> None:
    one, other = host.allocate(16), host.allocate(16)
    one[0] = 1
    assert other[0] == 0


def test_the_machine_has_some_memory() -> None:
    assert 1 << 26 < host.find_available_bytes() < 1 << 60
    unused = host.find_unused_bytes()
    assert unused is None or 0 < unused < host.get_machine_bytes()


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The control group of this process, three below the root of them all."""
    own = tmp_path / "groups" / "user" / "session" / "own"
    own.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/\n0::/user/session/own\n")
    monkeypatch.setattr(host, "_CGROUPS", tmp_path / "groups")
    monkeypatch.setattr(host, "_OLD_LIMIT", tmp_path / "groups" / "limit_in_bytes")
    monkeypatch.setattr(host, "_OWN_CGROUP", tmp_path / "cgroup")
    return own


def test_a_container_with_less_memory_decides(group: Path) -> None:
    (group / "memory.max").write_text("max\n")
    assert host.find_container_limit() is None
    assert host.find_available_bytes() == host.get_machine_bytes()
    (group / "memory.max").write_text("1048576\n")
    assert host.find_available_bytes() == 1048576 < host.get_machine_bytes()
    assert host.find_default_budget() == 838860


def test_of_nested_containers_the_least_limit_decides(group: Path) -> None:
    (group / "memory.max").write_text("3000000\n")
    (group.parent / "memory.max").write_text("2000000\n")
    (group.parent.parent / "memory.max").write_text("max\n")
    assert host.find_container_limit() == 2000000


def test_what_a_container_has_left_is_all_that_can_be_given(
    group: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    4000 kB\n")
    monkeypatch.setattr(host, "_MEMINFO", tmp_path / "meminfo")
    assert host.find_unused_bytes() == 4_096_000
    (group.parent / "memory.max").write_text("3000000\n")
    (group.parent / "memory.current").write_text("2500000\n")
    (group.parent / "memory.stat").write_text("anon 1000000\ninactive_file 400000\nslab 5\n")
    assert host.find_unused_bytes() == 900_000, "files that it reads anew when it must"
    (group.parent / "memory.current").write_text("3600000\n")
    assert host.find_unused_bytes() == 0
    (group.parent / "memory.max").write_text("max\n")
    assert host.find_unused_bytes() == 4_096_000


def test_the_older_kind_of_container_counts_unless_it_has_no_limit(group: Path) -> None:
    (group.parent.parent.parent / "limit_in_bytes").write_text("9223372036854771712\n")
    assert host.find_container_limit() is None
    (group.parent.parent.parent / "limit_in_bytes").write_text("1048576\n")
    assert host.find_container_limit() == 1048576


def test_a_system_without_control_groups_has_no_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CGROUPS", "_OLD_LIMIT", "_OWN_CGROUP", "_MEMINFO"):
        monkeypatch.setattr(host, name, tmp_path / "absent")
    assert (host.find_container_limit(), host.find_unused_bytes()) == (None, None)
