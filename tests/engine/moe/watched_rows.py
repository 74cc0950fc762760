"""Who reads the rows of a stack, and what a copy into one waits for, on a device in play.

A device that computes later than it is asked would read the next expert where a copy does not wait
for the last work that reads the one before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from expertctl.engine.moe.copy_order import CopyStream
from expertctl.engine.moe.expert_stack import DUMMY, ExpertStack
from tests.engine.moe.played_device import Device, Event


@dataclass
class WatchedRows:
    """What was seen until now; a row is known by its address."""

    device: Device
    read: dict[int, int] = field(default_factory=dict)
    """After which place in the queue of what computes nobody reads a row any more."""
    overwritten: int = 0
    """How many copies came into rows that were read before."""
    early: list[str] = field(default_factory=list)
    """Copies that did not wait for that."""

    def reads(self, stack: ExpertStack, rows: Iterable[int]) -> None:
        """Queue work that reads some rows."""
        self.device.launch(lambda: None)
        for row in set(rows) - {DUMMY}:
            self.read[stack.gate_up[row].data_ptr()] = len(self.device.usual.queue)

    def copies(self, there: Tensor, after: Event | None) -> None:
        """See what a copy into a row waits for."""
        last = self.read.get(there.data_ptr(), 0)
        self.overwritten += last > 0
        waits = after.count if after is not None and after.stream is self.device.usual else -1
        if waits < last:
            self.early.append(f"a copy waits for work {waits}, its row is read by {last}")


def watch(monkeypatch: pytest.MonkeyPatch, device: Device) -> WatchedRows:
    """See all that reads rows of stacks from now on, steps and prompts, and all that fills them."""
    seen = WatchedRows(device)
    apply, expert, copy = ExpertStack.apply, ExpertStack.expert, CopyStream.copy

    def applied(self: ExpertStack, x: Tensor, rows: Tensor) -> Tensor:
        seen.reads(self, rows.flatten().tolist())
        return apply(self, x, rows)

    def taken(self: ExpertStack, row: int, module: str) -> Any:
        seen.reads(self, [row])
        return expert(self, row, module)

    def copied(self: CopyStream, pairs: Iterable[tuple[Tensor, Tensor]], *, after: Any) -> None:
        parts = list(pairs)
        seen.copies(parts[0][0], after)
        copy(self, parts, after=after)

    monkeypatch.setattr(ExpertStack, "apply", applied)
    monkeypatch.setattr(ExpertStack, "expert", taken)
    monkeypatch.setattr(CopyStream, "copy", copied)
    return seen
