"""The *habits* of a base: which routed experts its answers asked for, kept for the next start.

The file has three lines of JSON, each read by its own reader: which base it is of, what was counted
(`activity_document`), and which experts had a slot last (`saved_state`), which may be empty. It
has no word of any text; but which experts are asked for tells something of the subject, so it is
as private as a history.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from expertctl.digest import Digest
from expertctl.engine.moe.activity_document import (
    ActivityDocument,
    read_activity,
    write_activity,
)
from expertctl.engine.moe.activity_sum import NOTHING, added
from expertctl.engine.moe.guide import Guide, guide_of
from expertctl.engine.moe.large_document import shaped
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.saved_state import (
    SavedState,
    check_state,
    read_state,
    state_of,
    write_state,
)
from expertctl.errors import DigestError, InvalidPackageError
from expertctl.package.base_model import BaseIdentity
from expertctl.package.experts_config import ExpertsConfig
from expertctl.schema.strict_json import load_object

VERSION = 1
_LINES = 3
_MOST_HEAD = 4096


@dataclass(frozen=True, slots=True)
class Habits:
    """The habits of one base: what was counted, and which experts had a slot last."""

    base: Digest
    """Identifies its weights and its architecture, see `base_digest`."""
    activity: ActivityDocument = NOTHING
    state: SavedState | None = None

    def grown(
        self,
        more: ActivityDocument,
        slots: Mapping[int, LayerSlots],
        *,
        timestamp: float,
    ) -> "Habits":
        """Return them with what was counted since, and with the experts that have slots now.

        Raises:
            IncompatibleError: when it was counted on other experts.
        """
        state = state_of(slots, timestamp=timestamp) if slots else self.state
        return Habits(self.base, added(self.activity, more), state)

    def guide(self, routed: ExpertsConfig, *, what: str) -> Guide:
        """Return what they say of a base with such experts.

        Raises:
            IncompatibleError: when their numbers do not fit it.
        """
        if self.state is not None:
            check_state(self.state, routed.layers, experts=routed.count)
        return guide_of(self.activity, routed, what=what)


def base_digest(identity: BaseIdentity) -> Digest:
    """Return what identifies a base in its habits, whatever its name."""
    return Digest.of(f"{identity.arch} {identity.weights}".encode())


def read_habits(data: bytes, *, what: str) -> Habits:
    """Read habits.

    Raises:
        InvalidPackageError: when they are of another version, malformed or too large.
    """
    lines = data.split(b"\n", _LINES)
    if len(lines) != _LINES + 1 or lines[_LINES]:
        raise InvalidPackageError(what, [f"these are not {_LINES} lines"])
    head = shaped(load_object(lines[0], what=what, max_bytes=_MOST_HEAD), _Head, what=what)
    if head.version != VERSION:
        raise InvalidPackageError(what, [f"version {head.version} is not read, only {VERSION}"])
    return Habits(
        _digest(head.base, what),
        read_activity(lines[1], what=what),
        read_state(lines[2], what=what) if lines[2] else None,
    )


def write_habits(habits: Habits) -> bytes:
    """Return habits as bytes."""
    head = json.dumps({"version": VERSION, "base": str(habits.base)}).encode()
    state = b"" if habits.state is None else write_state(habits.state)
    return b"\n".join((head, write_activity(habits.activity), state, b""))


class _Head(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    base: str


def _digest(text: str, what: str) -> Digest:
    try:
        return Digest.parse(text)
    except DigestError as error:
        raise InvalidPackageError(what, [f"base: {error.message}"]) from error
