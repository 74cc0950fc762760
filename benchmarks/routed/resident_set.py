"""How much memory this process has of its own, at every moment, and how much it may have."""

import resource
import threading
from pathlib import Path
from types import TracebackType

_APART = 0.002
_STATUS, _IO, _MAPS = (Path("/proc/self") / name for name in ("status", "io", "smaps_rollup"))


class Watch:
    """Looks every other millisecond at the anonymous memory of this process, inside ``with``.

    It looks when it is entered and when it is left too, however late its thread comes to it.
    """

    def __init__(self) -> None:
        """Note how much there is now; growth is measured from there."""
        self._begin, self._most = status_bytes("RssAnon"), 0
        self._ended = threading.Event()
        self._looks: threading.Thread | None = None

    def __enter__(self) -> "Watch":
        """Look from now on; it may be left and entered again."""
        self._look()
        self._ended.clear()
        self._looks = threading.Thread(target=self._look_again, daemon=True)
        self._looks.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Look once more, and then no more."""
        assert self._looks is not None
        self._ended.set()
        self._looks.join()
        self._look()

    @property
    def grown(self) -> int:
        """The most bytes that were seen until now, less those at the beginning."""
        return self._most - self._begin

    def _look_again(self) -> None:
        while not self._ended.wait(_APART):
            self._look()

    def _look(self) -> None:
        self._most = max(self._most, status_bytes("RssAnon"))


def limit_memory(more: int) -> None:
    """Let this process take so many bytes more of its own and not one beyond them."""
    limit = status_bytes("VmData") + more
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def huge_share(maps: Path = _MAPS) -> float:
    """Return how much of this process's own memory lies in huge pages, of 1.

    Where the system has none left, weights are looked up page by page, and read more slowly.
    """
    return _number(maps, "AnonHugePages") / _number(maps, "Anonymous")


def status_bytes(name: str) -> int:
    """Return what the system counts for this process under a name, in bytes."""
    return _number(_STATUS, name) * 1024


def io_bytes(name: str) -> int:
    """Return what this process had read or written, under a name of the system."""
    return _number(_IO, name)


def _number(file: Path, name: str) -> int:
    lines = file.read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith(f"{name}:")]
    return int(line.split()[1])
