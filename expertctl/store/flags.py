"""Flags: what looks as if it were made to mislead the router, in a file that is fast to read.

``flagged.json`` repeats what `store.suspicions` decided, for those that only read: `list`, and the
router. It names only contents that have flags, so it is mostly nearly empty.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest
from expertctl.durable import write_atomic
from expertctl.errors import DigestError

FILE = "flagged.json"
SUSPICIOUS = "looks as if it were made to mislead the router"
"""What messages say of a package that has a flag."""
GRAB_ALL = "grab-all"
"""The code of a package whose examples are about everything."""
MODE = 0o600


@dataclass(frozen=True, slots=True)
class Flag:
    """One thing about a package that looks as if it were made to mislead the router."""

    code: str
    """``copied``, ``stuffed`` and so on: for programs."""
    sentence: str
    """For people; names what was found."""
    other: str | None = None
    """The other package that the flag is about, if any."""


Flagged = Mapping[Digest, tuple[Flag, ...]]
"""Content digest → its flags; contents without any are left out."""


def read_flagged(path: Path) -> dict[Digest, tuple[Flag, ...]]:
    """Read all flags; a missing or damaged file has none (`doctor` checks the record)."""
    try:
        document = json.loads(path.read_bytes())
        return {Digest.parse(digest): decode_flags(flags) for digest, flags in document.items()}
    except (OSError, ValueError, TypeError, AttributeError, DigestError):
        return {}


def write_flagged(path: Path, flagged: Flagged) -> None:
    """Replace the file."""
    document = {str(digest): encode_flags(flags) for digest, flags in sorted(flagged.items())}
    write_atomic(path, json.dumps(document).encode(), mode=MODE)


def suspicion_of(flags: Iterable[Flag]) -> str:
    """Say in one line what a package with flags looks like, and why: each reason once."""
    return f"{SUSPICIOUS}: {'; '.join(dict.fromkeys(flag.sentence for flag in flags))}"


def encode_flags(flags: Iterable[Flag]) -> list[list[str | None]]:
    """Return flags as they are stored."""
    return [[flag.code, flag.sentence, flag.other] for flag in flags]


def decode_flags(stored: list[list[str]]) -> tuple[Flag, ...]:
    """Return stored flags."""
    return tuple(Flag(code, sentence, other) for code, sentence, other in stored)


def flag_documents(flags: Iterable[Flag]) -> list[Mapping[str, str | None]]:
    """Return flags as ``--json`` shows them."""
    return [{"code": f.code, "sentence": f.sentence, "other": f.other} for f in flags]
