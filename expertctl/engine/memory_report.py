"""What holds memory, and what things would take: what `doctor --memory` tells.

Only sizes of bases and experts in memory need the engine: they are left out where something that it
needs is not installed.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from expertctl.engine.admission import Taken, seats
from expertctl.engine.extra import has_engine
from expertctl.engine.memory import container, machine, unused, usual_budget
from expertctl.engine.presence import Holding, present
from expertctl.settings import Home
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.store import Store


@dataclass(frozen=True, slots=True)
class Limits:
    """What memory there is, in bytes; None where the system does not tell, or sets no limit."""

    machine: int
    container: int | None
    unused: int | None
    budget: int
    """Of each engine."""
    chosen: bool
    """Whether the user chose the budget."""


@dataclass(frozen=True, slots=True)
class BaseSize:
    """What a base takes: on the disk, and in memory in each dtype that it can be held in."""

    name: str
    on_disk: int
    weights: Mapping[str, int]
    token: int | None
    """Bytes of the keys and values of one token in a run that is told no dtype."""


@dataclass(frozen=True, slots=True)
class ExpertSize:
    """What the weights of an expert take in memory."""

    ref: str
    nbytes: int | None


@dataclass(frozen=True, slots=True)
class Cache:
    """What is on the disk so that it need not be made again; it may be deleted at any time."""

    what: str
    path: Path
    nbytes: int


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """All of it; ``experts`` begin with the largest."""

    limits: Limits
    engines: tuple[Holding, ...]
    runs: tuple[Taken, ...]
    bases: tuple[BaseSize, ...]
    experts: tuple[ExpertSize, ...]
    caches: tuple[Cache, ...]
    has_sizes: bool


def memory_report(home: Home, *, budget: int | None) -> MemoryReport:
    """Look at a home and at this machine; changes nothing.

    Raises:
        StoreError: when the record of a base is damaged.
    """
    store, bases = Store(home.store), BaseStore(home.bases)
    chosen = budget is not None
    limit = usual_budget() if budget is None else budget
    known, has_sizes = bases.bases(), has_engine()
    return MemoryReport(
        limits=Limits(machine(), container(), unused(), limit, chosen),
        engines=tuple(present(home.engines)),
        runs=tuple(seats(store.paths.running)),
        bases=tuple(_base(base, has_sizes=has_sizes) for base in known),
        experts=tuple(_experts(store)) if has_sizes else (),
        caches=tuple(cache for cache in _caches(home, store, bases, known) if cache.nbytes),
        has_sizes=has_sizes,
    )


def _base(base: StoredBase, *, has_sizes: bool) -> BaseSize:
    if not has_sizes or base.foreign:
        return BaseSize(base.name, base.size, {}, None)
    from expertctl.engine.sizes import base_sizes

    weights, token = base_sizes(base)
    return BaseSize(base.name, base.size, {str(d): size for d, size in weights.items()}, token)


def _experts(store: Store) -> list[ExpertSize]:
    experts = store.experts()
    if not experts:
        return []
    from expertctl.engine.sizes import expert_size

    sizes = [ExpertSize(expert.ref, expert_size(store, expert)) for expert in experts]
    return sorted(sizes, key=lambda one: (-(one.nbytes or 0), one.ref))


def _caches(home: Home, store: Store, bases: BaseStore, known: list[StoredBase]) -> Iterator[Cache]:
    folders = {
        "compiled kernels": home.kernels,
        "gains of DoRA": store.paths.derived,
        "vectors of the encoder static": home.static_encoder,
        **{f"{base.name}, quantised": bases.copies_of(base) for base in known},
    }
    for what, path in folders.items():
        yield Cache(what, path, sum(map(_size, path.rglob("*"))) if path.is_dir() else 0)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # removed meanwhile
        return 0
