"""`ExpertUsageStore`: the learnt usage of bases, kept for the next start, and what is observed now.

The file of a base has three lines of JSON, each with its own reader: the base, the counts (an
activity document), and the experts that had a slot last (a saved cache state), which may be empty.
It contains no text; but which experts are chosen tells something about the subject, so it is as
private as a history.

The store decides once how each base starts: what is learnt meanwhile counts for the next process.
Otherwise the base would be loaded again after each request. Only the scores of swaps grow
meanwhile. A file that cannot be read, is damaged, of another base or does not fit it is ignored
with a note, and replaced when something is learnt; it never prevents a request.
"""

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import msgspec

from expertctl.engine.moe.counters import CounterSnapshot, ExpertResidency
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.profile_codecs import (
    activity_to_json,
    decode_record,
    read_activity,
    read_profile,
    write_activity,
)
from expertctl.engine.moe.usage_profile import (
    EMPTY_PROFILE,
    UsageProfile,
    accumulate_scores,
    add_profiles,
    build_counted_profile,
    subtract_profile,
)
from expertctl.engine.moe.warmup import (
    ActiveProfile,
    SavedCacheState,
    WarmupPlan,
    capture_state,
    check_state,
    describe_unused_option,
    find_active_profile,
    read_state,
    write_state,
)
from expertctl.engine_config import DEFAULT_WARMUP, WarmupConfig
from expertctl.errors import DigestError, ExpertError, InvalidPackageError
from expertctl.package.architectures import ExpertsConfig
from expertctl.package.base_model import BaseIdentity
from expertctl.reference import Digest
from expertctl.schema.strict_json import JsonObject, load_object
from expertctl.store.base_record import StoredBase
from expertctl.store.bases import BaseStore
from expertctl.store.quantised_cache import UsageProfileFile

if TYPE_CHECKING:
    from expertctl.engine.backend import RunnableModel

USAGE_VERSION = 1
_LINE_COUNT = 3
_MAX_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class LearntUsage:
    """The learnt usage of one base: its counts, and the experts that had a slot last."""

    base: Digest
    """Identifies its weights and its architecture, see `compute_base_digest`."""
    profile: UsageProfile = EMPTY_PROFILE
    state: SavedCacheState | None = None

    def add_profile(
        self, more: UsageProfile, slots: Mapping[int, LayerSlots], *, timestamp: float
    ) -> "LearntUsage":
        """Return it with further counts, and with the experts that have slots now.

        Raises:
            IncompatibleError: when the counts are of other experts.
        """
        state = capture_state(slots, timestamp=timestamp) if slots else self.state
        return LearntUsage(self.base, add_profiles(self.profile, more), state)

    def check_fits(self, routed: ExpertsConfig) -> None:
        """Check that it can be of a base with such experts.

        Raises:
            IncompatibleError: when its counts or its state cannot.
        """
        if self.state is not None:
            check_state(self.state, routed.layers, experts=routed.count)
        self.profile.check_fits(routed)


def compute_base_digest(identity: BaseIdentity) -> Digest:
    """Return the identity of a base in its file, whatever its name."""
    return Digest.compute(f"{identity.arch} {identity.weights}".encode())


def parse_learnt_usage(data: bytes, *, what: str) -> LearntUsage:
    """Parse the contents of a file.

    Raises:
        InvalidPackageError: when they are of another version, malformed or too large.
    """
    lines = data.split(b"\n", _LINE_COUNT)
    if len(lines) != _LINE_COUNT + 1 or lines[_LINE_COUNT]:
        raise InvalidPackageError(what, [f"expected {_LINE_COUNT} lines"])
    header = decode_record(
        load_object(lines[0], what=what, max_bytes=_MAX_HEADER_BYTES), _UsageHeader, what=what
    )
    if header.version != USAGE_VERSION:
        raise InvalidPackageError(
            what, [f"version {header.version} is not supported, only {USAGE_VERSION}"]
        )
    return LearntUsage(
        _parse_digest(header.base, what),
        read_activity(lines[1], what=what),
        read_state(lines[2], what=what) if lines[2] else None,
    )


def encode_learnt_usage(learnt: LearntUsage) -> bytes:
    """Return the contents of a file."""
    header = json.dumps({"version": USAGE_VERSION, "base": str(learnt.base)}).encode()
    state = b"" if learnt.state is None else write_state(learnt.state)
    return b"\n".join((header, write_activity(learnt.profile), state, b""))


class _UsageHeader(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    base: str


def _parse_digest(text: str, what: str) -> Digest:
    try:
        return Digest.parse(text)
    except DigestError as error:
        raise InvalidPackageError(what, [f"base: {error.message}"]) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """The state of the routed experts of a base in memory, at one moment."""

    base: str
    document: UsageProfile
    residence: ExpertResidency | None = None
    """None if it has none."""
    active_profile: ActiveProfile | None = None
    """The effect of profiles; None if no expert can be missing."""

    def to_json(self) -> JsonObject:
        """Return the document with the base and its state; only the document if the mode is off."""
        document = activity_to_json(self.document)
        if self.document.mode == "off" or self.residence is None:
            return document
        document |= {"base": self.base, "residence": self.residence.to_json()}
        return (
            document
            if self.active_profile is None
            else {**document, "guide": self.active_profile.to_json()}
        )


def make_observation(
    counters: CounterSnapshot | None,
    *,
    base: str,
    routed: ExpertsConfig | None,
    model: "RunnableModel",
) -> Observation:
    """Return the observation of a base; its mode is "off" if nothing was counted."""
    document, profile = UsageProfile("off"), None
    if counters is not None and routed is not None:
        document, cache = build_counted_profile(counters, used=routed.used), model.experts
        profile = None if cache is None else find_active_profile(cache)
    residence = None if (report := model.routed) is None else report.residence
    return Observation(base=base, document=document, residence=residence, active_profile=profile)


SAVE_INTERVAL = 30.0
"""Longest time between two updates of scores, in seconds."""
_LEFT_OUT = "the learnt usage is ignored"


def load_learnt_usage(file: UsageProfileFile) -> LearntUsage | None:
    """Return the learnt usage of a base; None if it has none.

    Raises:
        InvalidPackageError: when it is malformed.
        StoreError: when its file does not belong to this user alone, or cannot be read.
    """
    return _parse_own(file.read(), file)


def load_learnt_profile(file: UsageProfileFile, routed: ExpertsConfig) -> UsageProfile | None:
    """Return the usage of a base; None if nothing was learnt.

    Raises:
        ExpertError: as `load_learnt_usage`, or when it does not fit the base.
    """
    known = _load_known(file, routed)
    return None if known is None or not known.profile.is_usable else known.profile


def update_learnt_usage(
    file: UsageProfileFile, routed: ExpertsConfig, change: Callable[[LearntUsage], LearntUsage]
) -> str:
    """Change the learnt usage of a base; one that cannot be used is replaced.

    Return why it could not be used; empty if it could, or the base has none.

    Raises:
        ConflictError: when the base was removed or replaced meanwhile.
        StoreError: when nothing can be written.
    """
    nothing, left_out = LearntUsage(compute_base_digest(file.base.identity)), ""

    def changed(data: bytes | None) -> bytes:
        nonlocal left_out
        known = None
        try:
            known = _parse_own(data, file)
            if known is not None:
                known.check_fits(routed)
        except ExpertError as error:
            known, left_out = None, error.message
        return encode_learnt_usage(change(known or nothing))

    file.update(changed)
    return left_out


def _load_known(file: UsageProfileFile, routed: ExpertsConfig) -> LearntUsage | None:
    found = load_learnt_usage(file)
    if found is not None:
        found.check_fits(routed)
    return found


def _parse_own(data: bytes | None, file: UsageProfileFile) -> LearntUsage | None:
    """Return the usage in ``data`` if it is of the base of the file."""
    found = None if data is None else parse_learnt_usage(data, what=str(file.path))
    if found is None or found.base != compute_base_digest(file.base.identity):
        return None
    source = f"the learnt usage of {file.base.name}"
    return replace(found, profile=replace(found.profile, source=source))


@dataclass(slots=True)
class _ObservedBase:
    """A base in memory, with the counts that were saved and scored."""

    file: UsageProfileFile
    model: "RunnableModel"
    routed: ExpertsConfig
    saved: UsageProfile = EMPTY_PROFILE
    saved_at: float = -math.inf
    scored: UsageProfile | None = EMPTY_PROFILE
    """None while nothing is swapped by scores: counts of that time are not added to them."""
    scored_at: float = -math.inf

    @property
    def snapshot(self) -> UsageProfile:
        counters = self.model.counters
        assert counters is not None, "a model that counts"
        return build_counted_profile(counters.cumulative_snapshot(), used=self.routed.used)

    @property
    def slots(self) -> Mapping[int, LayerSlots]:
        return {} if self.model.experts is None else self.model.experts.slots_by_layer

    def update_scores(self) -> None:
        """Add new counts to the scores by which residents are swapped."""
        cache, before = self.model.experts, self.scored
        if cache is None:
            return
        self.scored = self.snapshot if cache.exchange_rate > 0 else None
        if before is not None and self.scored is not None:
            scores = accumulate_scores(
                cache.scores, subtract_profile(self.scored, before), self.routed.layers
            )
            cache.set_scores(scores, rate=cache.exchange_rate)


class ExpertUsageStore:
    """Owner of the learnt usage of all bases that run; one thread uses it at a time."""

    def __init__(self, bases: BaseStore, config: WarmupConfig = DEFAULT_WARMUP) -> None:
        """Start without reading anything."""
        self._bases, self._config = bases, config
        self._warmups: dict[str, tuple[StoredBase, WarmupPlan]] = {}
        self._observed: _ObservedBase | None = None
        self._notes: list[str] = []
        self._noted_bases = set[str]()
        """Bases whose start already noted that their learnt usage is ignored."""
        self._dense_bases = set[str]()
        """Bases that were already noted to have no routed experts."""
        self._save_failed = False
        """Whether the last save failed, which was noted."""

    def plan_warmup(self, base: StoredBase, routed: ExpertsConfig) -> WarmupPlan:
        """Return how a base starts; the same each time.

        Raises:
            ExpertError: when a file that was named cannot be read, or is of another base.
        """
        known, start = self._warmups.get(base.name, (None, WarmupPlan()))
        if known is None or known.identity != base.identity:
            start = self._plan_new_warmup(base, routed)
            self._warmups[base.name] = base, start
        return start

    def note_dense_base(self, base: StoredBase) -> None:
        """Note once, for a base without routed experts, which options have no effect on it."""
        if base.name not in self._dense_bases:
            self._dense_bases.add(base.name)
            self._notes += [
                describe_unused_option(base.name, each) for each in self._config.options
            ]

    def observe(self, base: StoredBase, routed: ExpertsConfig, model: "RunnableModel") -> None:
        """Learn from the counts of a model from now on; save those of the last one.

        Nothing is done for the observed model, and for one that counts nothing.
        """
        observed = self._observed
        if (observed is not None and observed.model is model) or model.counters is None:
            return
        self.stop_observing()
        self._observed = _ObservedBase(UsageProfileFile(self._bases, base), model, routed)

    def save(self, *, interval: float = 0.0) -> None:
        """Save new counts, if the last save was ``interval`` seconds ago.

        It is called between two passes. An error is noted, and the next call tries again. Scores
        are in memory only, so they are updated at least every `SAVE_INTERVAL`.
        """
        observed, now = self._observed, time.monotonic()
        if observed is None:
            return
        if now - observed.scored_at >= min(interval, SAVE_INTERVAL):
            observed.scored_at = now
            observed.update_scores()
        if self._config.learns and now - observed.saved_at >= interval:
            observed.saved_at = now
            self._save(observed)

    def _save(self, observed: _ObservedBase) -> None:
        """Add new counts to the file."""
        path, seen = observed.file.path, observed.snapshot
        more = subtract_profile(seen, observed.saved)
        if not more.is_usable:
            return
        try:
            left_out = update_learnt_usage(
                observed.file,
                observed.routed,
                lambda learnt: learnt.add_profile(more, observed.slots, timestamp=time.time()),
            )
        except ExpertError as error:
            if not self._save_failed:
                self._notes.append(f"{path}: the learnt usage is not saved: {error.message}")
            self._save_failed = True
            return
        observed.saved, self._save_failed = seen, False
        if left_out and observed.file.base.name not in self._noted_bases:
            self._notes.append(f"{path}: {_LEFT_OUT}: {left_out}")
        self._noted_bases.discard(observed.file.base.name)

    def stop_observing(self) -> None:
        """Save the counts of the observed base, and observe none."""
        self.save()
        self._collect_notes()
        self._observed = None

    def take_notes(self) -> tuple[str, ...]:
        """Return, once, notes for the user about what could not be read or saved."""
        self._collect_notes()
        notes, self._notes = self._notes, []
        return tuple(dict.fromkeys(notes))

    def _collect_notes(self) -> None:
        """Take the notes of the observed base."""
        if (observed := self._observed) is not None and (cache := observed.model.experts):
            name = observed.file.base.name
            self._notes += [f"{name}: {note}" for note in cache.take_notes()]

    def _plan_new_warmup(self, base: StoredBase, routed: ExpertsConfig) -> WarmupPlan:
        config = self._config
        if config.profile is not None:
            return WarmupPlan(config, read_profile(config.profile, routed))
        if not config.learns:
            return self._plan_unknown_warmup()
        file = UsageProfileFile(self._bases, base)
        try:
            known = _load_known(file, routed)
        except ExpertError as error:
            self._noted_bases.add(base.name)
            self._notes.append(f"{file.path}: {_LEFT_OUT}: {error.message}")
            return WarmupPlan(config)
        if known is None or not known.profile.is_usable:
            return self._plan_unknown_warmup()
        return WarmupPlan(config, known.profile, known.state)

    def _plan_unknown_warmup(self) -> WarmupPlan:
        """Start with unknown usage; note that if experts were to be pinned."""
        if self._config.pins is not None:
            once = "run it once more, or " if self._config.learns else ""
            advice = f"{once}give --moe-profile FILE"
            self._notes.append(
                f"--moe-pin pins no expert: the usage of the base is unknown; {advice}"
            )
        return WarmupPlan(self._config)
