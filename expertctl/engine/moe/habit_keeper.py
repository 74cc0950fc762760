"""`HabitKeeper`: reads the habits of a base when it is opened, and adds to them while it is used.

The keeper decides one start for each base and stays with it: what is learnt meanwhile counts for
the next keeper. Otherwise the base would be loaded again after each answer. Only the scores by
which residents are exchanged grow meanwhile. Habits that cannot be read, are damaged, of another
base or do not fit it are left out with a note, and replaced when something is learnt; they never
prevent an answer.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from expertctl.engine.moe.activity_document import ActivityDocument
from expertctl.engine.moe.activity_sum import NOTHING, grown, since
from expertctl.engine.moe.counters import Counters
from expertctl.engine.moe.exchanges import Scores
from expertctl.engine.moe.guide import Guide, read_guide
from expertctl.engine.moe.habits import Habits, base_digest, read_habits, write_habits
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.observation import activity_document
from expertctl.engine.moe.start import USUAL, Start, StartWishes, without_effect
from expertctl.errors import ExpertError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.store.base_habits import HabitsFile
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore

SECONDS = 30.0
"""Habits are kept at most this often while answers follow one another."""
_LEFT_OUT = "what was learnt before is left out"


def habits_in(file: HabitsFile) -> Habits | None:
    """Return the habits of a base; None where it has none.

    Raises:
        InvalidPackageError: when they are malformed.
        StoreError: when they are no file of this user alone, or cannot be read.
    """
    data = file.read()
    found = None if data is None else read_habits(data, what=str(file.path))
    return found if found and found.base == base_digest(file.base.identity) else None


def learnt_guide(file: HabitsFile, routed: ExpertsConfig) -> Guide | None:
    """Return what was learnt of a base; None if nothing was. Raises as `habits_in` does."""
    known = _known_in(file, routed)
    return None if known is None or not known[0].activity.is_usable else known[1]


def learn(file: HabitsFile, routed: ExpertsConfig, change: Callable[[Habits], Habits]) -> str:
    """Change the habits of a base; unusable ones begin anew.

    Return why they are unusable; empty where they are usable, or the base has none.

    Raises:
        ConflictError: when the base was removed or replaced meanwhile.
        StoreError: when nothing can be written.
    """
    nothing, left_out = Habits(base_digest(file.base.identity)), ""

    def changed(data: bytes | None) -> bytes:
        nonlocal left_out
        try:
            known = _known(data, file, routed)
        except ExpertError as error:
            known, left_out = None, error.message
        return write_habits(change(nothing if known is None else known[0]))

    file.change(changed)
    return left_out


def _known_in(file: HabitsFile, routed: ExpertsConfig) -> tuple[Habits, Guide] | None:
    return _known(file.read(), file, routed)


def _known(
    data: bytes | None, file: HabitsFile, routed: ExpertsConfig
) -> tuple[Habits, Guide] | None:
    """Return habits and what they say of a base; None where it has none."""
    found = None if data is None else read_habits(data, what=str(file.path))
    if found is None or found.base != base_digest(file.base.identity):
        return None
    return found, found.guide(routed, what=f"the habits of {file.base.name}")


class Watchable(Protocol):
    """What is learnt from: `ExpertCache`, or `WholeExperts`."""

    @property
    def counters(self) -> Counters:
        """What its layers were asked for until now."""

    @property
    def slots(self) -> tuple[LayerSlots, ...]:
        """The slots of each of them; empty where no expert needs one."""

    @property
    def scores(self) -> Sequence[Scores]:
        """What experts are worth to exchanges, by layer."""

    @property
    def exchange_rate(self) -> float:
        """The share of residents that an update may exchange by them; 0: none."""

    def guide(self, scores: Sequence[Scores], *, rate: float) -> None:
        """Exchange by these scores from the next update on."""

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what a person should know of experts that were to come by habit."""


@dataclass(slots=True)
class _Watched:
    """A base that is in memory: what is counted of it, and what of that is kept and scored."""

    file: HabitsFile
    cache: Watchable
    routed: ExpertsConfig
    kept: ActivityDocument = NOTHING
    kept_at: float = -math.inf
    scored: ActivityDocument | None = NOTHING
    """None while nothing is exchanged by scores: what is counted then is no part of them."""
    scored_at: float = -math.inf

    @property
    def seen(self) -> ActivityDocument:
        return activity_document(self.cache.counters.in_all(), used=self.routed.used)

    @property
    def slots(self) -> Mapping[int, LayerSlots]:
        slots = self.cache.slots
        return dict(zip(self.routed.layers, slots, strict=True)) if slots else {}

    def score(self) -> None:
        """Add what was counted since to the scores by which residents are exchanged."""
        cache, before = self.cache, self.scored
        self.scored = self.seen if cache.exchange_rate > 0 else None
        if before is not None and self.scored is not None:
            scores = grown(cache.scores, since(self.scored, before), self.routed.layers)
            cache.guide(scores, rate=cache.exchange_rate)


class HabitKeeper:
    """The owner of what is known of the bases that are run; one thread uses it at a time."""

    def __init__(self, bases: BaseStore, wishes: StartWishes = USUAL) -> None:
        """Know nothing yet."""
        self._bases, self._wishes = bases, wishes
        self._starts: dict[str, tuple[StoredBase, Start]] = {}
        self._watched: _Watched | None = None
        self._notes: list[str] = []
        self._told = set[str]()
        """Bases for which a start has noted already that their habits are left out."""
        self._dense = set[str]()
        """Bases for which it is noted already that they have no routed experts."""
        self._fails = False
        """Whether nothing could be kept the last time, which was noted."""

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

    def pass_over(self, base: StoredBase) -> None:
        """Note once, for a base without routed experts, which options have no effect on it."""
        if base.name not in self._dense:
            self._dense.add(base.name)
            self._notes += [without_effect(base.name, each) for each in self._wishes.options]

    def watch(self, base: StoredBase, routed: ExpertsConfig, cache: Watchable) -> None:
        """Learn from what a base counts from now on; keep what was counted of the last one."""
        self.forget()
        self._watched = _Watched(HabitsFile(self._bases, base), cache, routed)

    def keep(self, *, every: float = 0.0) -> None:
        """Learn from what was counted since the last time, if that is ``every`` seconds ago.

        It is called between two passes. An error is noted, and the next call tries again. Scores
        are in memory alone, so they grow at least every `SECONDS`.
        """
        watched, now = self._watched, time.monotonic()
        if watched is None:
            return
        if now - watched.scored_at >= min(every, SECONDS):
            watched.scored_at = now
            watched.score()
        if self._wishes.learns and now - watched.kept_at >= every:
            watched.kept_at = now
            self._keep(watched)

    def _keep(self, watched: _Watched) -> None:
        """Add to the habits what was not kept yet."""
        path, seen = watched.file.path, watched.seen
        more = since(seen, watched.kept)
        if not more.is_usable:
            return
        try:
            left_out = learn(
                watched.file,
                watched.routed,
                lambda habits: habits.grown(more, watched.slots, timestamp=time.time()),
            )
        except ExpertError as error:
            if not self._fails:
                self._notes.append(f"{path}: what was learnt is not kept: {error.message}")
            self._fails = True
            return
        watched.kept, self._fails = seen, False
        if left_out and watched.file.base.name not in self._told:
            self._notes.append(f"{path}: {_LEFT_OUT}: {left_out}")
        self._told.discard(watched.file.base.name)

    def forget(self) -> None:
        """Keep what was counted, and watch no base any more."""
        self.keep()
        self._hear()
        self._watched = None

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, what could not be read or kept, for a person to know."""
        self._hear()
        notes, self._notes = self._notes, []
        return tuple(dict.fromkeys(notes))

    def _hear(self) -> None:
        """Take over the notes of the base that is watched."""
        if (watched := self._watched) is not None:
            told = watched.cache.take_notes()
            self._notes += [f"{watched.file.base.name}: {each}" for each in told]

    def _new_start(self, base: StoredBase, routed: ExpertsConfig) -> Start:
        wishes = self._wishes
        if wishes.profile is not None:
            return Start(wishes, read_guide(wishes.profile, routed))
        if not wishes.learns:
            return self._nowhere()
        file = HabitsFile(self._bases, base)
        try:
            known = _known_in(file, routed)
        except ExpertError as error:
            self._told.add(base.name)
            self._notes.append(f"{file.path}: {_LEFT_OUT}: {error.message}")
            return Start(wishes)
        if known is None or not known[0].activity.is_usable:
            return self._nowhere()
        habits, guide = known
        return Start(wishes, guide, habits.state)

    def _nowhere(self) -> Start:
        """Begin without knowing anything; note that if experts were to be pinned."""
        if self._wishes.pins is not None:
            once = "run it once more, or " if self._wishes.learns else ""
            told = f"{once}give --moe-profile FILE"
            self._notes.append(f"--moe-pin pins no expert: nothing is known of the base; {told}")
        return Start(self._wishes)
