"""Runs that share one memory: which runs of a home are in, which wait, with how many bytes.

Every run has a seat: a folder in which its process holds a lock, so a killed process frees its
seat. A run that waits is let in when all that have waited longer are in, and its bytes fit into its
limit beside those of the runs that are in. A run that does not wait is never kept out.

::

    running/lock                     held while seats are read or changed
    running/<number>-<token>/lock    held by the process of one run
    running/<number>-<token>/seat    how many bytes, and whether it waits
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from expertctl.durable import make_folders, remove_tree
from expertctl.errors import StoreError
from expertctl.settings import human_limit, human_size
from expertctl.store.lock import claim, claimed_folders, exclusive, is_held
from expertctl.telling import Tell

PAUSE_SECONDS = 0.1
_NAME = re.compile(r"[0-9]{12}-[0-9a-f]+")
_SEAT = re.compile(r"(?P<size>[0-9]{1,18}) (?P<state>in|waits)")


def pause() -> None:
    """Let some time pass before looking again."""
    time.sleep(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class Taken:
    """The seat of a run that is alive."""

    number: int
    size: int
    waits: bool


class Seat:
    """The place of one run among the others; ``queued`` when it had to wait for it."""

    def __init__(self, folder: Path | None, *, queued: bool = False) -> None:
        """Belong to a folder, or to none where nothing can be written."""
        self.queued = queued
        self._folder = folder

    def resize(self, size: int) -> None:
        """Say how many bytes the run takes now."""
        if self._folder is None:
            return
        with suppress(OSError, StoreError), _looking(self._folder.parent):  # not worth an error
            _write(self._folder, size, waits=False)


class Admission:
    """The seats of one home."""

    def __init__(self, folder: Path, *, pause: Callable[[], None] = pause) -> None:
        """Name the folder, made for the first seat; what ``pause`` raises ends the waiting."""
        self._folder, self._pause = folder, pause

    @contextmanager
    def seat(self, size: int) -> Iterator[Seat]:
        """Take a seat at once; where nothing can be written, one that others do not see."""
        with ExitStack() as stack:
            try:
                seat = Seat(self._enter(size, stack, waits=False))
            except (OSError, StoreError):
                seat = Seat(None)  # a read-only home can be run from all the same
            yield seat

    @contextmanager
    def queue(self, size: int, *, limit: int, tell: Tell) -> Iterator[Seat]:
        """Take a seat when the bytes fit into the limit beside the others, waiting for that.

        ``tell`` gets a sentence on what is waited for, or why that is impossible. The caller has
        checked that the bytes fit into the limit.
        """
        with ExitStack() as stack:
            try:
                folder = self._enter(size, stack, waits=True)
            except (OSError, StoreError) as error:
                tell(f"other runs cannot be waited for: {error}")
                yield Seat(None)
                return
            yield Seat(folder, queued=self._wait(folder, size, limit, tell))

    def _enter(self, size: int, stack: ExitStack, *, waits: bool) -> Path:
        make_folders(self._folder, mode=0o700)
        with ExitStack() as made, _looking(self._folder):
            number = max((other.number for other in self._others()), default=0) + 1
            own = made.enter_context(claim(self._folder, prefix=f"{number:012d}-"))
            _write(own, size, waits=waits)
            stack.enter_context(made.pop_all())
        return own

    def _wait(self, own: Path, size: int, limit: int, tell: Tell) -> bool:
        """Wait until the run is in, and tell once what for; return whether it waited."""
        told = False
        while why := self._admit(own, size, limit):
            if not told:
                tell(why)
            told = True
            self._pause()
        return told

    def _admit(self, own: Path, size: int, limit: int) -> str:
        """Let a run in if it is its turn and there is room; else say what it waits for."""
        with _looking(self._folder):
            others = self._others(own)
            ahead = [other for other in others if other.waits and other.number < _number(own)]
            inside = [other for other in others if not other.waits]
            if ahead or sum(other.size for other in inside) + size > limit:
                return _waiting(size, limit, inside, ahead)
            _write(own, size, waits=False)
            return ""

    def _others(self, own: Path | None = None) -> list[Taken]:
        """Read the seats of live runs; remove what dead ones left."""
        others = []
        for folder in claimed_folders(self._folder):
            if folder == own or not _NAME.fullmatch(folder.name):
                continue
            if not is_held(folder):
                remove_tree(folder)
            elif (other := _read(folder)) is not None:
                others.append(other)
        return others


def seats(folder: Path) -> list[Taken]:
    """Return the seats of the live runs of a home, the oldest first; changes nothing."""
    found = []
    for own in claimed_folders(folder):
        if _NAME.fullmatch(own.name) and is_held(own):
            with suppress(OSError, StoreError):  # being made, removed, or damaged: none to count
                found.append(_read(own))
    return [seat for seat in found if seat is not None]


def _looking(folder: Path) -> AbstractContextManager[None]:
    return exclusive(folder / "lock")


def _write(folder: Path, size: int, *, waits: bool) -> None:
    (folder / "seat").write_text(f"{size} {'waits' if waits else 'in'}", encoding="ascii")


def _read(folder: Path) -> Taken | None:
    """Read a seat; None when its run has just ended and is removing it."""
    try:
        text = (folder / "seat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
    match = _SEAT.fullmatch(text)
    if match is None:
        hint = f"remove {folder} when no run needs it"
        raise StoreError(f"{folder}: this is not the seat of a run", hint=hint)
    return Taken(_number(folder), int(match["size"]), match["state"] == "waits")


def _number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


def _waiting(size: int, limit: int, inside: Sequence[Taken], ahead: Sequence[Taken]) -> str:
    taken = human_size(sum(other.size for other in inside))
    others = "1 other run holds" if len(inside) == 1 else f"{len(inside)} other runs hold"
    turn = f"; {len(ahead)} {'waits' if len(ahead) == 1 else 'wait'} longer" if ahead else ""
    return (
        f"waiting for memory: {human_size(size)} of {human_limit(limit)} are needed, "
        f"{others} {taken}{turn}"
    )
