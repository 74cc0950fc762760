"""Who reads the habits of a base when it is opened, and adds to them while it is used.

One start is decided for each base and kept as long as this lives: what is learnt meanwhile counts
for the next one, or the base would be loaded anew after each answer. Habits that cannot be read,
are damaged or of another base are left out with a note, and replaced when something is learnt; they
are never worth an answer.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from expertctl.engine.moe.activity_document import ActivityDocument
from expertctl.engine.moe.activity_sum import NOTHING, since
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.guide import Guide, guide_of, read_guide
from expertctl.engine.moe.habits import Habits, base_digest, read_habits, write_habits
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.observation import activity_document
from expertctl.engine.moe.saved_state import check_state
from expertctl.engine.moe.start import USUAL, Start, StartWishes
from expertctl.errors import ExpertError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.store.base_habits import HabitsFile
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

SECONDS = 30.0
"""Habits are kept at most so often while answers follow one another."""


def habits_in(file: HabitsFile) -> Habits | None:
    """Return the habits of a base; None where there are none of it.

    Raises:
        InvalidPackageError: when they are malformed.
        StoreError: when they are no file of this user alone, or cannot be read.
    """
    data = file.read()
    found = None if data is None else read_habits(data, what=str(file.path))
    return found if found and found.base == base_digest(file.base.identity) else None


def learnt_guide(file: HabitsFile, routed: ExpertsConfig) -> Guide | None:
    """Return what was learnt of a base; None where nothing was. Raises as `habits_in` does."""
    habits = habits_in(file)
    if habits is None or not habits.activity.is_usable:
        return None
    return guide_of(habits.activity, routed, what=f"the habits of {file.base.name}")


def learn(file: HabitsFile, change: Callable[[Habits], Habits]) -> None:
    """Change the habits of a base; those that cannot be read begin anew.

    Raises:
        ConflictError: when the base was removed or replaced meanwhile.
        StoreError: when nothing can be written.
    """
    nothing = Habits(base_digest(file.base.identity))

    def changed(data: bytes | None) -> bytes:
        before = nothing
        if data is not None:
            try:
                before = read_habits(data, what=str(file.path))
            except ExpertError:
                before = nothing  # whoever began with them has told
        return write_habits(change(before if before.base == nothing.base else nothing))

    file.change(changed)


class Watchable(Protocol):
    """What is learnt from: `ExpertCache`."""

    @property
    def counters(self) -> Counters:
        """What its layers were asked for until now."""

    @property
    def slots(self) -> tuple[LayerSlots, ...]:
        """Who has a slot in each of them."""


@dataclass(slots=True)
class _Watched:
    """A base that is in memory: what is counted of it, and what of that is kept."""

    file: HabitsFile
    cache: Watchable
    routed: ExpertsConfig
    kept: ActivityDocument = NOTHING
    at: float = 0.0

    @property
    def seen(self) -> ActivityDocument:
        return activity_document(self.cache.counters.observed(), used=self.routed.used)

    @property
    def slots(self) -> Mapping[int, LayerSlots]:
        return dict(zip(self.routed.layers, self.cache.slots, strict=True))


class HabitKeeper:
    """The owner of what is known of the bases that are run; one thread uses it at a time."""

    def __init__(self, bases: BaseStore, wishes: StartWishes = USUAL) -> None:
        """Know nothing yet."""
        self._bases, self._wishes = bases, wishes
        self._starts: dict[str, tuple[StoredBase, Start]] = {}
        self._watched: _Watched | None = None
        self._notes: list[str] = []

    def start(self, base: StoredBase, routed: ExpertsConfig) -> Start:
        """Return how a base begins; the same each time.

        Raises:
            ExpertError: when a file that was named cannot be read, or is of another base.
        """
        known, start = self._starts.get(base.name, (None, Start()))
        if known is None or known.identity != base.identity:
            start = self._new_start(base, routed)
            self._starts[base.name] = base, start
        return start

    def watch(self, base: StoredBase, routed: ExpertsConfig, cache: Watchable) -> None:
        """Learn from what is counted of a base from now on; what another one did is kept."""
        self.keep()
        if self._wishes.learns:
            self._watched = _Watched(HabitsFile(self._bases, base), cache, routed)

    def keep(self, *, every: float = 0.0) -> None:
        """Add to the habits what was counted since, if that is so many seconds ago.

        What hinders that is noted.
        """
        watched = self._watched
        if watched is None or time.monotonic() - watched.at < every:
            return
        seen = watched.seen
        more = since(seen, watched.kept)
        if not more.is_usable:
            return
        watched.at = time.monotonic()
        try:
            learn(
                watched.file,
                lambda habits: habits.grown(more, watched.slots, timestamp=time.time()),
            )
        except ExpertError as error:
            path = watched.file.path
            self._notes.append(f"{path}: what was learnt is not kept: {error.message}")
        watched.kept = seen

    def forget(self) -> None:
        """Keep what was counted, and watch no base any more."""
        self.keep()
        self._watched = None

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what could not be read or kept, for a person to know."""
        notes, self._notes = tuple(dict.fromkeys(self._notes)), []
        return notes

    def _new_start(self, base: StoredBase, routed: ExpertsConfig) -> Start:
        wishes = self._wishes
        if wishes.profile is not None:
            return Start(wishes, read_guide(wishes.profile, routed))
        if not wishes.learns:
            return self._nowhere()
        file = HabitsFile(self._bases, base)
        try:
            habits = habits_in(file)
            if habits is None or not habits.activity.is_usable:
                return self._nowhere()
            guide = guide_of(habits.activity, routed, what=f"the habits of {base.name}")
            if habits.state is not None:
                check_state(habits.state, routed.layers, experts=routed.count)
        except ExpertError as error:
            self._notes.append(f"{file.path}: what was learnt before is left out: {error.message}")
            return Start(wishes)
        return Start(wishes, guide, habits.state)

    def _nowhere(self) -> Start:
        """Begin without knowing anything; say so where somebody is to be pinned."""
        if self._wishes.pins is not None:
            told = "run it once more, or give --moe-profile FILE"
            self._notes.append(f"--moe-pin pins nobody: nothing is known of the base; {told}")
        return Start(self._wishes)
