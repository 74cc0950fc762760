"""What the engines of one home hold, said for other processes: `doctor --memory` reads it.

An engine that has loaded something has a folder in which its process holds a lock, so what a killed
process said is not believed, and the next engine removes it. No run fails for it: where nothing can
be written, an engine is not seen.

::

    engines/lock               held while a folder is made, or those of dead processes removed
    engines/<token>/lock       held by the process of one engine
    engines/<token>/holds      what it holds, as JSON
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from expertctl.durable import make_folders, remove_tree
from expertctl.engine.budget import PURPOSES, Budget
from expertctl.errors import StoreError
from expertctl.store.lock import claim, claimed_folders, exclusive, is_held

_FILE = "holds"
_MOST_BYTES = 1 << 20
_START_FIELD = 19
"""When a process began, among the fields behind its name in ``/proc/<pid>/stat``."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one engine said of itself last; sizes in bytes, ``experts`` are those used last."""

    pid: int
    began: int | None
    """When its process began, in the system's ticks: numbers of processes are used again."""
    answering: bool
    limit: int
    held: Mapping[str, int]
    base: str
    experts: tuple[str, ...]

    @property
    def total(self) -> int:
        """All that it holds by its ledger."""
        return sum(self.held.values())

    @property
    def resident_set(self) -> int | None:
        """What the system counts for its process, where the system tells."""
        if self.began is None or _began(self.pid) != self.began:
            return None
        return _resident_set(self.pid)


class Presence:
    """The owner of what one engine says; nothing is written before it has loaded something."""

    def __init__(self, folder: Path, budget: Budget) -> None:
        """Speak of a budget, below a folder that is made when there is something to say."""
        self._folder, self.budget = folder, budget
        self._claimed = ExitStack()
        self._own: Path | None = None
        self._maker = 0
        self._base, self._experts = "", tuple[str, ...]()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Say at the end what is still held."""
        try:
            yield
        finally:
            if self._own is not None:
                self._say(answering=False)

    def holds(self, *, base: str, experts: tuple[str, ...]) -> None:
        """Say what is held for an answer that begins now."""
        self._base, self._experts = base, experts
        if not self._is_there:
            self.close()
            with suppress(OSError, StoreError):
                self._own, self._maker = self._enter(), os.getpid()
        self._say(answering=True)

    def close(self) -> None:
        """Say nothing any more."""
        self._claimed.close()
        self._own = None

    @property
    def _is_there(self) -> bool:
        """Whether there is a folder of this very process, not of one that it was forked from."""
        return self._own is not None and self._maker == os.getpid() and self._own.is_dir()

    def _enter(self) -> Path:
        make_folders(self._folder, mode=0o700)
        with exclusive(self._folder / "lock"):
            for folder in claimed_folders(self._folder):
                if not is_held(folder):
                    remove_tree(folder)
            return self._claimed.enter_context(claim(self._folder))

    def _say(self, *, answering: bool) -> None:
        if self._own is None or self._maker != os.getpid():
            return
        pid = os.getpid()
        held: dict[str, int] = {purpose: self.budget.held(purpose) for purpose in PURPOSES}
        limit, named = self.budget.limit, (self._base, self._experts)
        said = msgspec.json.encode(Holding(pid, _began(pid), answering, limit, held, *named))
        with suppress(OSError):
            new = self._own / f"{_FILE}.new"
            new.write_bytes(said)
            new.replace(self._own / _FILE)


def present(folder: Path) -> list[Holding]:
    """Return what the live engines of a home say; changes nothing."""
    said = [_read(own / _FILE) for own in claimed_folders(folder) if is_held(own)]
    return sorted((one for one in said if one is not None), key=lambda one: one.pid)


def _read(path: Path) -> Holding | None:
    """Read what an engine says; None where it has said nothing yet, or is just ending."""
    with suppress(OSError, msgspec.MsgspecError), path.open("rb") as stream:
        return msgspec.json.decode(stream.read(_MOST_BYTES), type=Holding)
    return None


def _began(pid: int) -> int | None:
    if sys.platform != "linux":
        return None
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(fields.rpartition(")")[2].split()[_START_FIELD])
    return None


def _resident_set(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        found = [line for line in lines.splitlines() if line.startswith("VmRSS:")]
        return int(found[0].split()[1]) * 1024 if found else None
    return None
