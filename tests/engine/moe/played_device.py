"""A device in play: work is queued on streams and done when somebody waits for it.

What computes is a function on the `usual` stream. A stream does what is queued in order, and an
event came to pass when all is done that was queued before it was recorded. What a true device does
is in ``test_stacked_on_cuda``.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from expertctl.engine import device_streams
from expertctl.engine.device_streams import DeviceStreams
from expertctl.engine.moe import copy_order

Work = Callable[[], object]
_DOING = threading.RLock()
"""Threads may wait at once, a stream for another one."""


class Stream:
    """A queue; some of it is done."""

    def __init__(self, _: object = None) -> None:
        self.queue: list[Work] = []
        self.done = 0

    def wait_event(self, event: "Event") -> None:
        self.queue.append(event.synchronize)

    def do(self, count: int) -> None:
        with _DOING:
            while self.done < count:
                self.done += 1
                self.queue[self.done - 1]()


class Event:
    """A place in the queue of a stream, wherever it was recorded last."""

    def __init__(self, **_: object) -> None:
        self.stream, self.count = Stream(), 0

    def record(self, stream: Stream) -> None:
        self.stream, self.count = stream, len(stream.queue)

    def synchronize(self) -> None:
        self.stream.do(self.count)


class Device:
    """What of CUDA the order of copies needs."""

    def __init__(self) -> None:
        self.usual = Stream()
        self._here = threading.local()  # each thread has a stream that is current

    @property
    def current(self) -> Stream:
        found: Stream = getattr(self._here, "stream", self.usual)
        return found

    def launch(self, work: Work) -> None:
        """Queue what computes."""
        self.usual.queue.append(work)

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self._here.stream = self.current, stream
        try:
            yield
        finally:
            self._here.stream = before

    def into(self, there: Tensor) -> Any:
        """Return what a tensor of the device is to copies: they are queued."""
        device = self

        class There:
            def copy_(self, here: Tensor, *, non_blocking: bool) -> None:
                assert non_blocking
                device.current.queue.append(lambda: there.copy_(here))

        return There()


def play(monkeypatch: pytest.MonkeyPatch) -> Device:
    """Have such a device stand for CUDA; tensors stay where they are."""
    device = Device()
    monkeypatch.setattr(copy_order, "is_queued", lambda _: True)
    monkeypatch.setattr(device_streams, "STREAMS", DeviceStreams())
    for name, value in {
        "Stream": Stream,
        "Event": Event,
        "stream": device.stream,
        "current_stream": lambda _: device.current,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    return device
