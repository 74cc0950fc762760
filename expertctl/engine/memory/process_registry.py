"""Runs and engines of one home that share the machine's memory, and the report about them.

Every run has a lease: a folder in which its process holds a lock, so a killed process frees its
lease. A waiting run is admitted when all that have waited longer are, and its bytes fit into its
limit together with those of the admitted runs. A run that does not wait is always admitted.

::

    running/lock                     held while leases are read or changed
    running/<number>-<token>/lock    held by the process of one run
    running/<number>-<token>/seat    size in bytes, and whether it waits

An engine that has loaded something publishes what it holds, for `doctor --memory` in other
processes. It also locks a folder, so the record of a killed process is ignored, and the next engine
removes it. Publishing never fails a run: without write access, an engine is not listed.

::

    engines/lock               held while a folder is created, or dead ones are removed
    engines/<token>/lock       held by the process of one engine
    engines/<token>/holds      what it holds, as JSON

The report needs the engine only for the sizes of bases and experts in memory; they are omitted
where a library of the extra ``engine`` is not installed.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec

from expertctl.engine.memory.budget import PURPOSES, MemoryBudget
from expertctl.engine.memory.host import (
    find_container_limit,
    find_default_budget,
    find_unused_bytes,
    get_machine_bytes,
)
from expertctl.errors import WARNING_PREFIX, Notify, StoreError
from expertctl.files import make_folders, remove_tree
from expertctl.settings import Home, format_limit, format_size
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.locks import claim_folder, exclusive_lock, is_claimed, list_claimed_folders
from expertctl.store.server_record import read_process_start
from expertctl.store.store import Store

PAUSE_SECONDS = 0.1
_LEASE_FOLDER = re.compile(r"[0-9]{12}-[0-9a-f]+")
_LEASE_LINE = re.compile(r"(?P<size>[0-9]{1,18}) (?P<state>in|waits)")


def sleep_before_retry() -> None:
    """Sleep before the next attempt."""
    time.sleep(PAUSE_SECONDS)


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """The lease of a live run."""

    number: int
    size: int
    is_waiting: bool


class MemoryLease:
    """The reservation of one run; ``queued`` is True if it had to wait."""

    def __init__(self, folder: Path | None, *, queued: bool = False) -> None:
        """Belong to a folder, or to none where nothing can be written."""
        self.queued = queued
        self._folder = folder

    def resize(self, size: int) -> None:
        """Record the bytes that the run takes now."""
        if self._folder is None:
            return
        with suppress(OSError, StoreError), _lock_leases(self._folder.parent):  # not worth an error
            _write_lease(self._folder, size, waits=False)


class MemoryAdmission:
    """The leases of one home."""

    def __init__(self, folder: Path, *, pause: Callable[[], None] = sleep_before_retry) -> None:
        """Use a folder, created for the first lease; ``pause`` may raise to end the waiting."""
        self._folder, self._pause = folder, pause

    @contextmanager
    def acquire(self, size: int) -> Iterator[MemoryLease]:
        """Take a lease at once; without write access, one that others cannot see."""
        with ExitStack() as stack:
            try:
                lease = MemoryLease(self._create_lease(size, stack, waits=False))
            except (OSError, StoreError):
                lease = MemoryLease(None)  # a read-only home can be run from, too
            yield lease

    @contextmanager
    def wait_in_queue(self, size: int, *, limit: int, tell: Notify) -> Iterator[MemoryLease]:
        """Wait until the bytes fit into the limit together with other runs, then take a lease.

        ``tell`` gets a message about the wait, or why waiting is impossible. The caller has checked
        that the bytes fit into the limit alone.
        """
        with ExitStack() as stack:
            try:
                folder = self._create_lease(size, stack, waits=True)
            except (OSError, StoreError) as error:
                tell(f"{WARNING_PREFIX}cannot wait for other runs: {error}")
                yield MemoryLease(None)
                return
            yield MemoryLease(folder, queued=self._wait(folder, size, limit, tell))

    def _create_lease(self, size: int, stack: ExitStack, *, waits: bool) -> Path:
        make_folders(self._folder, mode=0o700)
        with ExitStack() as made, _lock_leases(self._folder):
            number = max((other.number for other in self._read_others()), default=0) + 1
            own = made.enter_context(claim_folder(self._folder, prefix=f"{number:012d}-"))
            _write_lease(own, size, waits=waits)
            stack.enter_context(made.pop_all())
        return own

    def _wait(self, own_folder: Path, size: int, limit: int, tell: Notify) -> bool:
        """Wait until the run is admitted, and report the reason once; return whether it waited."""
        notified = False
        while why := self._try_admit(own_folder, size, limit):
            if not notified:
                tell(why)
            notified = True
            self._pause()
        return notified

    def _try_admit(self, own_folder: Path, size: int, limit: int) -> str:
        """Admit a run if it is its turn and there is memory; else return the reason for waiting."""
        with _lock_leases(self._folder):
            others = self._read_others(own_folder)
            number = _parse_lease_number(own_folder)
            ahead = [other for other in others if other.is_waiting and other.number < number]
            inside = [other for other in others if not other.is_waiting]
            if ahead or sum(other.size for other in inside) + size > limit:
                return _describe_wait(size, limit, inside, ahead)
            _write_lease(own_folder, size, waits=False)
            return ""

    def _read_others(self, own_folder: Path | None = None) -> list[LeaseRecord]:
        """Read the leases of live runs; remove those of dead ones."""
        others = []
        for folder in list_claimed_folders(self._folder):
            if folder == own_folder or not _LEASE_FOLDER.fullmatch(folder.name):
                continue
            if not is_claimed(folder):
                remove_tree(folder)
            elif (other := _read_lease(folder)) is not None:
                others.append(other)
        return others


def list_leases(folder: Path) -> list[LeaseRecord]:
    """Return the leases of the live runs of a home, the oldest first; changes nothing."""
    found = []
    for own in list_claimed_folders(folder):
        if _LEASE_FOLDER.fullmatch(own.name) and is_claimed(own):
            with suppress(OSError, StoreError):  # being created, removed, or damaged: not counted
                found.append(_read_lease(own))
    return [lease for lease in found if lease is not None]


def _lock_leases(folder: Path) -> AbstractContextManager[None]:
    return exclusive_lock(folder / "lock")


def _write_lease(folder: Path, size: int, *, waits: bool) -> None:
    (folder / "seat").write_text(f"{size} {'waits' if waits else 'in'}", encoding="ascii")


def _read_lease(folder: Path) -> LeaseRecord | None:
    """Read a lease; None when its run has just ended and is removing it."""
    try:
        text = (folder / "seat").read_text(encoding="ascii", errors="replace")
    except FileNotFoundError:
        return None
    match = _LEASE_LINE.fullmatch(text)
    if match is None:
        hint = f"remove {folder} when no run needs it"
        raise StoreError(f"{folder}: not the lease of a run", hint=hint)
    return LeaseRecord(_parse_lease_number(folder), int(match["size"]), match["state"] == "waits")


def _parse_lease_number(folder: Path) -> int:
    return int(folder.name.partition("-")[0])


def _describe_wait(
    size: int, limit: int, running: Sequence[LeaseRecord], waiting: Sequence[LeaseRecord]
) -> str:
    taken = format_size(sum(other.size for other in running))
    others = "1 other run holds" if len(running) == 1 else f"{len(running)} other runs hold"
    turn = f"; {len(waiting)} {'waits' if len(waiting) == 1 else 'wait'} longer" if waiting else ""
    return (
        f"waiting for memory: {format_size(size)} of {format_limit(limit)} are needed, "
        f"{others} {taken}{turn}"
    )


_RECORD_FILE = "holds"
_MAX_RECORD_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class EngineRecord:
    """What one engine last published; sizes in bytes, ``experts`` are those last used."""

    pid: int
    began: int | None
    """Start time of its process, in the system's ticks: process ids are reused."""
    answering: bool
    limit: int
    held: Mapping[str, int]
    base: str
    experts: tuple[str, ...]

    @property
    def total(self) -> int:
        """Total reserved bytes."""
        return sum(self.held.values())

    @property
    def resident_bytes(self) -> int | None:
        """Resident set of its process; None where it is unknown."""
        if self.began is None or read_process_start(self.pid) != self.began:
            return None
        return _read_resident_set(self.pid)


class EngineRegistration:
    """Publishes the state of one engine; nothing is written before it has loaded something."""

    def __init__(self, folder: Path, budget: MemoryBudget) -> None:
        """Publish a budget, below a folder that is created for the first record."""
        self._folder, self.budget = folder, budget
        self._claimed = ExitStack()
        self._own: Path | None = None
        self._maker = 0
        self._base, self._experts = "", tuple[str, ...]()

    @contextmanager
    def mark_answering(self) -> Iterator[None]:
        """Publish at the end of the block what is still held."""
        try:
            yield
        finally:
            if self._own is not None:
                self._write_record(answering=False)

    def publish(self, *, base: str, experts: tuple[str, ...]) -> None:
        """Publish what is held for an answer that starts now."""
        self._base, self._experts = base, experts
        if not self._is_registered:
            self.close()
            with suppress(OSError, StoreError):
                self._own, self._maker = self._register(), os.getpid()
        self._write_record(answering=True)

    def close(self) -> None:
        """Remove the record; what cannot be removed is removed with those of dead processes."""
        self._own = None
        with suppress(OSError):
            self._claimed.close()

    @property
    def _is_registered(self) -> bool:
        """Whether the folder belongs to this process, not to the one that it was forked from."""
        return self._own is not None and self._maker == os.getpid() and self._own.is_dir()

    def _register(self) -> Path:
        make_folders(self._folder, mode=0o700)
        with exclusive_lock(self._folder / "lock"):
            for folder in list_claimed_folders(self._folder):
                if not is_claimed(folder):
                    remove_tree(folder)
            return self._claimed.enter_context(claim_folder(self._folder))

    def _write_record(self, *, answering: bool) -> None:
        if self._own is None or self._maker != os.getpid():
            return
        pid = os.getpid()
        held: dict[str, int] = {p: self.budget.reserved_bytes(p) for p in PURPOSES}
        limit, named = self.budget.limit, (self._base, self._experts)
        document = msgspec.json.encode(
            EngineRecord(pid, read_process_start(pid), answering, limit, held, *named)
        )
        with suppress(OSError):
            new = self._own / f"{_RECORD_FILE}.new"
            new.write_bytes(document)
            new.replace(self._own / _RECORD_FILE)


def list_engines(folder: Path) -> list[EngineRecord]:
    """Return the records of the live engines of a home; changes nothing."""
    records = [
        _read_record(own / _RECORD_FILE) for own in list_claimed_folders(folder) if is_claimed(own)
    ]
    return sorted((one for one in records if one is not None), key=lambda one: one.pid)


def _read_record(path: Path) -> EngineRecord | None:
    """Read a record; None where an engine has written none yet, or is ending."""
    with suppress(OSError, msgspec.MsgspecError), path.open("rb") as stream:
        return msgspec.json.decode(stream.read(_MAX_RECORD_BYTES), type=EngineRecord)
    return None


def _read_resident_set(pid: int) -> int | None:
    with suppress(OSError, ValueError):
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace")
        found = [line for line in lines.splitlines() if line.startswith("VmRSS:")]
        return int(found[0].split()[1]) * 1024 if found else None
    return None


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The machine's memory and its limits, in bytes; None where unknown or unlimited."""

    machine: int
    container: int | None
    unused: int | None
    budget: int
    """Budget of each engine."""
    chosen: bool
    """Whether the user set the budget."""


@dataclass(frozen=True, slots=True)
class BaseSize:
    """Size of a base: on the disk, and in memory in each supported data type."""

    name: str
    on_disk: int
    weights: Mapping[str, int]
    token: int | None
    """Bytes of the keys and values of one token in a run without ``--dtype``."""


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """Size of an expert's weights in memory."""

    ref: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class DiskCache:
    """Cached data on the disk; it may be deleted at any time."""

    what: str
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """The complete report; ``experts`` are sorted by size, the largest first."""

    limits: MemoryLimits
    engines: tuple[EngineRecord, ...]
    runs: tuple[LeaseRecord, ...]
    bases: tuple[BaseSize, ...]
    experts: tuple[ExpertSize, ...]
    caches: tuple[DiskCache, ...]
    has_sizes: bool


def build_memory_report(home: Home, *, budget: int | None) -> MemoryReport:
    """Inspect a home and this machine; changes nothing.

    Raises:
        StoreError: when the record of a base is damaged.
    """
    store, bases = Store(home.store), BaseStore(home.bases)
    chosen = budget is not None
    limit = find_default_budget() if budget is None else budget
    known, has_sizes = bases.list_bases(), has_engine()
    return MemoryReport(
        limits=MemoryLimits(
            get_machine_bytes(), find_container_limit(), find_unused_bytes(), limit, chosen
        ),
        engines=tuple(list_engines(home.engines)),
        runs=tuple(list_leases(store.paths.running)),
        bases=tuple(_measure_base(base, has_sizes=has_sizes) for base in known),
        experts=tuple(_measure_experts(store)) if has_sizes else (),
        caches=tuple(cache for cache in _list_caches(home, store, bases, known) if cache.nbytes),
        has_sizes=has_sizes,
    )


def _measure_base(base: StoredBase, *, has_sizes: bool) -> BaseSize:
    if not has_sizes or base.foreign:
        return BaseSize(base.name, base.size, {}, None)
    from expertctl.engine.load_plan import estimate_base_sizes

    weights, token = estimate_base_sizes(base)
    return BaseSize(base.name, base.size, {str(d): size for d, size in weights.items()}, token)


def _measure_experts(store: Store) -> list[ExpertSize]:
    experts = store.list_experts()
    if not experts:
        return []
    from expertctl.engine.load_plan import estimate_expert_size

    sizes = [ExpertSize(expert.ref, estimate_expert_size(store, expert)) for expert in experts]
    return sorted(sizes, key=lambda one: (-(one.nbytes or 0), one.ref))


def _list_caches(
    home: Home, store: Store, bases: BaseStore, known: list[StoredBase]
) -> Iterator[DiskCache]:
    folders = {
        "compiled kernels": home.kernels,
        "gains of DoRA": store.paths.derived,
        "vectors of the encoder static": home.static_encoder,
        **{f"{base.name}, quantised": bases.copies_folder(base) for base in known},
    }
    for what, path in folders.items():
        size = sum(map(_measure_folder, path.rglob("*"))) if path.is_dir() else 0
        yield DiskCache(what, path, size)


def _measure_folder(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # removed meanwhile
        return 0


ENGINE_MODULES = ("jinja2", "numba", "llvmlite")
"""Libraries of the extra ``engine``; torch belongs to the extra ``cuda``."""


def has_engine() -> bool:
    """Return whether all libraries of the engine are installed, without importing them."""
    return all(find_spec(name) is not None for name in ENGINE_MODULES)
