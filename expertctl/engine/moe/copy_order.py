"""In which order a device reads rows of memory and copies experts into them, kept by events.

Computation is queued on one stream, every copy on one of several others. A copy into a row waits
for the last work that could read the row's old expert, and for nothing that was queued after that:

    host      ask L   .   .   .   .   .   .   all have come; lookup    .   passed
    compute   choose L | there L | E1                 | rest L | E2 | choose of the next layer
    copying       after E0: copy missing experts   | C1
                           after E1: copy experts read ahead    .   .   .  | C2

`there` and `rest` read the rows that were in the lookup of their layer. Each records an event, E1
and E2, which is noted for these rows. A row that is taken at `ask` is in no lookup any more, so the
copy into it waits for the event that was noted for it then, E0, and runs beside `there`. A row that
is taken after `there` was queued may be one that `there` reads, so the copy into it waits for E1. A
copy records an event, too: C1. Until that has happened, the expert is not reported as present, and
the memory that it is copied from is not overwritten. So no computation waits for a copy on the
device: it is queued when the copy is over.

On a CPU all work is done immediately, and nothing waits.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from expertctl.engine.device_streams import lend_stream

Rows = np.ndarray[Any, Any] | slice
_ALL = slice(None)


class LastReads:
    """The event after the last work that could read each row.

    One thread notes what is read. Others may ask for a row that was taken: no new work reads it.
    """

    def __init__(self, device: torch.device, *, rows: int) -> None:
        """Begin with the work of previous owners of the memory."""
        self._device = device
        self._is_queued = is_queued(device)
        self._events = np.full(rows, None, object)
        self._newest: torch.cuda.Event | None = None
        self.note(_ALL)

    def note(self, rows: Rows) -> None:
        """Note that the work queued until now could read these rows."""
        if self._is_queued:
            self._newest = event = new_event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[rows] = event

    def of(self, row: int) -> "torch.cuda.Event | None":
        """Return the event that a copy into a row has to wait for, if any."""
        found: torch.cuda.Event | None = self._events[row]
        return found

    def wait(self) -> None:
        """Wait until the work that was noted last is done."""
        if self._newest is not None:
            self._newest.synchronize()


class CopyStream:
    """A stream for copies, one at a time, each out of the same memory of the machine.

    It has one owner: no copy waits for another's, nor gets into a graph that is captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with no copy under way."""
        is_queue = is_queued(device)
        self._lent = lend_stream(device, computes=False) if is_queue else None
        self._copied = new_event() if is_queue else None

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: "torch.cuda.Event | None"
    ) -> None:
        """Copy into the first of each pair after that event; return when the copy is over."""
        if self._lent is None or self._copied is None:
            _copy(pairs)
            return
        stream = self._lent.stream
        if after is not None:
            stream.wait_event(after)
        try:
            with torch.cuda.stream(stream):
                _copy(pairs)
        finally:  # what was queued before an error still uses its memory
            self._copied.record(stream)
            self._copied.synchronize()

    def wait(self) -> None:
        """Wait until no copy is under way, even if one ended with an error."""
        if self._copied is not None:
            self._copied.synchronize()


def is_queued(device: torch.device) -> bool:
    """Tell whether a device does its work later, in the order of its streams."""
    return device.type == "cuda"


def new_event() -> torch.cuda.Event:
    """Return an event for which a thread waits asleep, without polling."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        there.copy_(here, non_blocking=True)
