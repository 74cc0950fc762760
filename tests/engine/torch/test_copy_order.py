"""Copies into rows that were read: what they wait for and what not, on a device in play."""

from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.torch.expert_stack import CopyStream, ReadEvents
from tests.engine.moe.fakes import FakeDevice, install_fake_device

CPU = torch.device("cpu")


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install_fake_device(monkeypatch)


def test_a_copy_waits_for_the_last_pass_that_could_read_its_row_and_for_none_behind_it(
    device: FakeDevice,
) -> None:
    memory, seen, behind = torch.arange(4.0), list[float](), list[float]()
    reads, stream = ReadEvents(CPU, rows=4), CopyStream(CPU)
    device.launch(lambda: seen.append(float(memory[2])))
    reads.record(np.array([1, 2]))
    device.launch(lambda: behind.append(float(memory[3])))
    reads.record(np.array([3]))
    stream.copy([(device.wrap_tensor(memory[2]), torch.tensor(9.0))], after=reads.find_event(2))
    assert seen == [2.0], "who was there was read before he was written over"
    assert behind == []
    assert float(memory[2]) == 9.0, "it is there when copying is said to be over"
    reads.wait()
    assert behind == [3.0]


def test_a_row_that_nobody_read_waits_for_whoever_had_the_memory_before(device: FakeDevice) -> None:
    before = list[str]()
    device.launch(lambda: before.append("zeroed"))
    reads = ReadEvents(CPU, rows=2)
    device.launch(lambda: before.append("another"))
    CopyStream(CPU).copy(
        [(device.wrap_tensor(torch.zeros(1)), torch.ones(1))], after=reads.find_event(1)
    )
    assert before == ["zeroed"]


def test_copies_of_two_streams_do_not_wait_for_each_other(device: FakeDevice) -> None:
    first, second = torch.zeros(1), torch.zeros(1)
    streams = [CopyStream(CPU), CopyStream(CPU)]
    assert streams[0]._lease is not None
    with torch.cuda.stream(streams[0]._lease.stream):  # queued, and nobody has waited for it
        device.wrap_tensor(first).copy_(torch.ones(1), non_blocking=True)
    streams[1].copy([(device.wrap_tensor(second), torch.ones(1))], after=None)
    assert (float(first), float(second)) == (0.0, 1.0)


def test_what_was_queued_before_a_copy_broke_is_done_before_anybody_hears_of_it(
    device: FakeDevice,
) -> None:
    """Both memories are somebody else's then."""
    there, here = torch.zeros(1), torch.ones(1)
    stream = CopyStream(CPU)
    with pytest.raises(RuntimeError, match="no such memory"):
        stream.copy([(device.wrap_tensor(there), here), _broken()], after=None)
    here.fill_(5.0)
    assert float(there) == 1.0
    stream.wait()
    assert float(there) == 1.0


def test_on_a_processor_copies_are_done_at_once() -> None:
    there, reads = torch.zeros(3), ReadEvents(CPU, rows=3)
    reads.record(np.array([0]))
    stream = CopyStream(CPU)
    stream.copy([(there[0], torch.tensor(4.0))], after=reads.find_event(0))
    stream.wait()
    reads.wait()
    assert there.tolist() == [4.0, 0.0, 0.0]


def _broken() -> Any:
    class Broken:
        def copy_(self, *_: object, **__: object) -> None:
            raise RuntimeError("no such memory")

    return Broken(), torch.ones(1)
