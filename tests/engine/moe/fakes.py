"""A device in play: work is queued on streams and done when somebody waits for it.

What computes is a function on the `usual` stream. A stream does what is queued in order, and an
event came to pass when all is done that was queued before it was recorded. What a true device does
is in ``test_stacked_on_cuda``.

Who reads the rows of a stack, and what a copy into one waits for, on a device in play.

A device that computes later than it is asked would read the next expert where a copy does not wait
for the last work that reads the one before.

Experts that come at once, so that no clock says how many of those who are asked for hit.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from expertctl.engine.moe import expert_loader
from expertctl.engine.torch import devices, expert_stack
from expertctl.engine.torch.devices import StreamPool
from expertctl.engine.torch.expert_stack import DUMMY_ROW, CopyStream, ExpertStack

Work = Callable[[], object]
_RUN_LOCK = threading.RLock()
"""Threads may wait at once, a stream for another one."""


class FakeStream:
    """A queue; some of it is done."""

    def __init__(self, _: object = None) -> None:
        self.queue: list[Work] = []
        self.done = 0

    def wait_event(self, event: "FakeEvent") -> None:
        self.queue.append(event.synchronize)

    def run_queued(self, count: int) -> None:
        with _RUN_LOCK:
            while self.done < count:
                self.done += 1
                self.queue[self.done - 1]()


class FakeEvent:
    """A place in the queue of a stream, wherever it was recorded last."""

    def __init__(self, **_: object) -> None:
        self.stream, self.count = FakeStream(), 0

    def record(self, stream: FakeStream) -> None:
        self.stream, self.count = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.run_queued(self.count)


class FakeDevice:
    """What of CUDA the order of copies needs."""

    def __init__(self) -> None:
        self.usual = FakeStream()
        self._here = threading.local()  # each thread has a stream that is current

    @property
    def current(self) -> FakeStream:
        found: FakeStream = getattr(self._here, "stream", self.usual)
        return found

    def launch(self, work: Work) -> None:
        """Queue what computes."""
        self.usual.queue.append(work)

    @contextmanager
    def get_queue(self, stream: FakeStream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def wrap_tensor(self, there: Tensor) -> Any:
        """Return what a tensor of the device is to copies: they are queued."""
        device = self

        class There:
            def copy_(self, here: Tensor, *, non_blocking: bool) -> None:
                assert non_blocking
                device.current.queue.append(lambda: there.copy_(here))

        return There()


def install_fake_device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Have such a device stand for CUDA; tensors stay where they are."""
    device = FakeDevice()
    monkeypatch.setattr(expert_stack, "is_queued", lambda _: True)
    monkeypatch.setattr(devices, "STREAM_POOL", StreamPool())
    for name, value in {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "stream": device.get_queue,
        "current_stream": lambda _: device.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device


@dataclass
class RowAccessLog:
    """What was seen until now; a row is known by its address."""

    device: FakeDevice
    read: dict[int, int] = field(default_factory=dict)
    """After which place in the queue of what computes nobody reads a row any more."""
    overwritten: int = 0
    """How many copies came into rows that were read before."""
    early: list[str] = field(default_factory=list)
    """Copies that did not wait for that."""

    def record_reads(self, stack: ExpertStack, rows: Iterable[int]) -> None:
        """Queue work that reads some rows."""
        self.device.launch(lambda: None)
        for row in set(rows) - {DUMMY_ROW}:
            self.read[stack.gate_up[row].data_ptr()] = len(self.device.usual.queue)

    def record_copy(self, there: Tensor, after: FakeEvent | None) -> None:
        """See what a copy into a row waits for."""
        last = self.read.get(there.data_ptr(), 0)
        self.overwritten += last > 0
        waits = after.count if after is not None and after.stream is self.device.usual else -1
        if waits < last:
            self.early.append(f"a copy waits for work {waits}, its row is read by {last}")


def record_row_accesses(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> RowAccessLog:
    """See all that reads rows of stacks from now on, steps and prompts, and all that fills them."""
    seen = RowAccessLog(device)
    apply, expert, copy = ExpertStack.apply, ExpertStack.expert, CopyStream.copy

    def applied(self: ExpertStack, x: Tensor, rows: Tensor) -> Tensor:
        seen.record_reads(self, rows.flatten().tolist())
        return apply(self, x, rows)

    def taken(self: ExpertStack, row: int, module: str) -> Any:
        seen.record_reads(self, [row])
        return expert(self, row, module)

    def copied(self: CopyStream, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Any) -> None:
        parts = list(pairs)
        seen.record_copy(parts[0][0], after)
        copy(self, parts, after=after)

    monkeypatch.setattr(ExpertStack, "apply", applied)
    monkeypatch.setattr(ExpertStack, "expert", taken)
    monkeypatch.setattr(CopyStream, "copy", copied)
    return seen


class SynchronousExecutor(Executor):
    """Does what it is given before anything else is done."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done = Future[Any]()
        done.set_running_or_notify_cancel()
        done.set_result(fn(*args, **options))
        return done


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read whoever is wanted, or foreseen, at once."""
    monkeypatch.setattr(expert_loader, "ThreadPoolExecutor", SynchronousExecutor)
