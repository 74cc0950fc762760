"""Streams of a CUDA device, each lent to one owner at a time.

Torch has 32 streams for a device and hands them out in turn, so it soon returns one that another
owner has. Two owners must not share one: what is copied on a stream that is being captured would
become part of the graph. And with the first graph that goes, torch lets go of the workspace that
libraries have for its stream, which graphs of another owner would still use.

A stream that was given back is lent again before another is taken. Libraries keep a workspace for
each stream that ever computed products, so these are lent to compute, and others to copy.
"""

import threading
from weakref import WeakValueDictionary

import torch

from expertctl.errors import BudgetError

_DRAWS = 64
"""So often torch is asked for a stream that is not known yet; it has 32."""


class LentStream:
    """A stream that is not lent again while this object is referred to."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        """Have it."""
        self.stream = stream


class DeviceStreams:
    """The owner of all streams taken from torch; several threads may ask at once."""

    def __init__(self) -> None:
        """Begin with none."""
        self._lock = threading.Lock()
        self._known: list[torch.cuda.Stream] = []
        self._computed = set[int]()
        self._lent: WeakValueDictionary[int, LentStream] = WeakValueDictionary()

    def lend(self, device: torch.device, *, computes: bool) -> LentStream:
        """Lend a stream that no other owner has, to compute products on it or not.

        Raises:
            BudgetError: when all that torch has are lent.
        """
        with self._lock:
            free = [number for number in range(len(self._known)) if number not in self._lent]
            known = [number for number in free if number in self._computed]
            if computes:
                number = next(iter(known or free), None)
            else:
                number = next((number for number in free if number not in known), None)
            if number is None:
                number = self._take(device, else_=known)
            if computes:
                self._computed.add(number)
            lent = self._lent[number] = LentStream(self._known[number])
            return lent

    def _take(self, device: torch.device, *, else_: list[int]) -> int:
        """Take a stream of torch that is not known yet, else one of these; return its number."""
        for _ in range(_DRAWS):
            stream = _new_stream(device)
            if stream not in self._known:
                self._known.append(stream)
                return len(self._known) - 1
        if else_:
            return else_[0]
        raise BudgetError(
            f"all {len(self._known)} streams of the CUDA device are in use",
            hint="close engines that are not needed any more",
        )


STREAMS = DeviceStreams()
"""Those of this process: torch has one pool for all of it, too."""


def lend_stream(device: torch.device, *, computes: bool) -> LentStream:
    """Lend a stream of this process, as `DeviceStreams.lend` does and with its errors."""
    return STREAMS.lend(device, computes=computes)


def _new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch has no types for it
