"""In which order a device reads rows of memory and has others copied into them, told by events.

What computes is queued on one stream, every copy on one of several others. A copy into a row waits
for the last work that could read who was there before, and for nothing that was queued after that:

    host      ask L   .   .   .   .   .   .   everybody came; lookup   .   passed
    compute   choose L | there L | E1                 | rest L | E2 | choose of the next layer
    copying       after E0: copy of who is missing | C1
                           after E1: copy of who is read ahead  .   .   .  | C2

`there` and `rest` read the rows that the lookup of their layer had. Each leaves an event, E1 and
E2, and these rows know it. Whose row is taken at `ask` is in no lookup any more, so its copy waits
for the event that the row knew then, E0, and runs beside `there`; whose row is taken after `there`
was queued may be one that `there` reads, and waits for E1. A copy leaves an event too, C1. Until it
came to pass nobody is told of the expert, and the memory that it was copied from is not written to.
So nothing that is computed waits for a copy on the device: it is queued when the copy is over.

On a processor all is done when it is asked for, and nobody waits.
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
    """Which event follows the last work that could read each row.

    One thread notes what is read. Others may ask for a row that was taken, for nobody reads it.
    """

    def __init__(self, device: torch.device, *, rows: int) -> None:
        """Begin with the work of whoever had the memory before."""
        self._device = device
        self._is_queued = is_queued(device)
        self._events = np.full(rows, None, object)
        self._newest: torch.cuda.Event | None = None
        self.note(_ALL)

    def note(self, rows: Rows) -> None:
        """Learn that the work that was queued until now could read these rows."""
        if self._is_queued:
            self._newest = event = new_event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[rows] = event

    def of(self, row: int) -> "torch.cuda.Event | None":
        """Return what a copy into a row has to wait for."""
        found: torch.cuda.Event | None = self._events[row]
        return found

    def wait(self) -> None:
        """Wait until the work that was noted last is done."""
        if self._newest is not None:
            self._newest.synchronize()


class CopyStream:
    """A stream that copies go on, one at a time, each out of the same memory of the machine.

    It is nobody else's: no copy waits for another, nor comes into a graph that is captured.
    """

    def __init__(self, device: torch.device) -> None:
        """Begin with none under way."""
        is_queue = is_queued(device)
        self._lent = lend_stream(device, computes=False) if is_queue else None
        self._copied = new_event() if is_queue else None

    def copy(
        self, pairs: Iterable[tuple[Tensor, Tensor]], *, after: "torch.cuda.Event | None"
    ) -> None:
        """Copy into the first of each pair once that event came to pass; return at the end."""
        if self._lent is None or self._copied is None:
            _copy(pairs)
            return
        stream = self._lent.stream
        if after is not None:
            stream.wait_event(after)
        try:
            with torch.cuda.stream(stream):
                _copy(pairs)
        finally:  # what was queued before an error is under way, and nobody may have its memory
            self._copied.record(stream)
            self._copied.synchronize()

    def wait(self) -> None:
        """Wait until nothing is under way, though a copy ended with an error."""
        if self._copied is not None:
            self._copied.synchronize()


def is_queued(device: torch.device) -> bool:
    """Tell whether what a device is asked for is done later, in the order of its streams."""
    return device.type == "cuda"


def new_event() -> torch.cuda.Event:
    """Return an event for which a thread waits asleep, not asking again and again."""
    return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch has no types


def _copy(pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
    for there, here in pairs:
        there.copy_(here, non_blocking=True)
