"""The journal of the vectors: which rows of their file belong to which expert.

A header of one line of JSON, then records of 64 bytes, appended and never changed. A record counts
once it is whole: its check covers its bytes, its place and the header. So an append that broke off
is no record, and all records are read and checked by a few operations on one array.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from expertctl.digest import Digest
from expertctl.errors import DigestError
from expertctl.routing.vector_table import Keys, Mask, Rows, Vectors, counts_of
from expertctl.schema.shape import shape_json

FORMAT = "2"
RECORD = np.dtype(
    [
        ("kind", "<u4"),
        ("count", "<u4"),  # how many rows; 0 in a burial
        ("at", "<u8"),  # the first row; in a burial the position of the dead
        ("digest", "u1", (32,)),
        ("rows", "<u8"),  # the checksum of the rows; 0 in a burial
        ("check", "<u8"),
    ]
)
ADDED, BURIED = 1, 2

_WORDS = RECORD.itemsize // 8
_MAX_HEADER = 1 << 14
_ODD = np.uint64(0x9E3779B97F4A7C15)

Records = npt.NDArray[np.void]
"""An array of `RECORD`."""


class Header(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line: what made the rows, and in which file they are."""

    format: str
    encoder: str
    stamp: str
    dimensions: int
    rows: str

    def to_bytes(self) -> bytes:
        """Return the line, filled up to whole records."""
        line = json.dumps(msgspec.to_builtins(self)).encode()
        return line + b" " * (-(len(line) + 1) % RECORD.itemsize) + b"\n"


@dataclass(frozen=True, slots=True)
class Journal:
    """What was read: the records up to the first that is not whole.

    ``size`` is where they end. In a ``damaged`` journal whole records follow later, so the cause
    was not an append that broke off.
    """

    header: Header
    records: Records
    size: int
    damaged: bool

    def with_records(self, added: Records) -> "Journal":
        """Return the journal with the appended records."""
        records = np.concatenate([self.records, added])
        return replace(self, records=records, size=self.size + added.nbytes)


@dataclass(frozen=True, slots=True)
class Entries:
    """The entries that the records result in."""

    keys: Keys
    counts: Rows
    alive: Mask
    checks: npt.NDArray[np.uint64]  # the checksum of the rows of each


def read_journal(path: Path) -> Journal | None:
    """Read a journal; ``None`` when it is absent or has no header that can be read."""
    try:
        data = path.read_bytes()
        line = data[: data.index(b"\n", 0, _MAX_HEADER) + 1]
        header = shape_json(line, Header)
        Digest.parse(header.encoder)
    except (OSError, ValueError, msgspec.MsgspecError, DigestError):
        return None
    if header.format != FORMAT or header.to_bytes() != line:
        return None
    count = (len(data) - len(line)) // RECORD.itemsize
    records = np.frombuffer(data, RECORD, count=count, offset=len(line))
    whole = records["check"] == _checks(records, line, first=0)
    sound = count if whole.all() else int(whole.argmin())
    size = len(line) + sound * RECORD.itemsize
    return Journal(header, records[:sound], size, damaged=bool(whole[sound:].any()))


def replay(records: Records) -> Entries | None:
    """Return the entries that records result in; ``None`` when they contradict each other."""
    is_added = records["kind"] == ADDED
    added, buried = records[is_added], records[~is_added]
    counts = added["count"].astype(np.int64)
    at = buried["at"].astype(np.int64)
    known = np.cumsum(is_added)[~is_added]  # how many there were when it was buried
    sound = (
        (buried["kind"] == BURIED).all()
        and (counts > 0).all()
        and (added["at"] == np.cumsum(counts) - counts).all()
        and ((at >= 0) & (at < known)).all()
    )
    if not sound or (added["digest"][at] != buried["digest"]).any():
        return None
    alive = np.ones(len(added), np.bool_)
    alive[at] = False
    return Entries(np.ascontiguousarray(added["digest"]), counts, alive, added["rows"])


def added_records(added: Mapping[Digest, Vectors], *, row: int) -> Records:
    """Return the records of new entries whose rows begin at ``row``."""
    records = np.zeros(len(added), RECORD)
    counts = counts_of(added)
    records["kind"] = ADDED
    records["count"] = counts
    records["at"] = row + np.cumsum(counts) - counts
    records["rows"] = [rows_check(rows) for rows in added.values()]
    for record, digest in zip(records, added, strict=True):
        record["digest"] = np.frombuffer(bytes.fromhex(digest.hex), np.uint8)
    return records


def buried_records(keys: Keys, positions: Rows) -> Records:
    """Return the records that bury the entries at these positions."""
    records = np.zeros(len(positions), RECORD)
    records["kind"] = BURIED
    records["at"] = positions
    records["digest"] = keys[positions]
    return records


def sealed(records: Records, header: Header, *, first: int) -> bytes:
    """Return records as bytes, for the places from ``first`` on below this header."""
    checked = records.copy()
    checked["check"] = _checks(checked, header.to_bytes(), first=first)
    return checked.tobytes()


def rows_check(rows: Vectors) -> int:
    """Return the checksum of the rows of an entry."""
    return zlib.crc32(np.ascontiguousarray(rows).tobytes())


def _checks(records: Records, header: bytes, *, first: int) -> npt.NDArray[np.uint64]:
    """Mix all words of each record but the last with its place and the header."""
    words = np.ascontiguousarray(records).view(np.uint64).reshape(-1, _WORDS)
    places = np.arange(first, first + len(records), dtype=np.uint64)
    mixed = (places + np.uint64(1)) * _ODD ^ np.uint64(zlib.crc32(header))
    for word in words[:, :-1].T:
        mixed = (mixed ^ word) * _ODD
        mixed ^= mixed >> np.uint64(29)
    return mixed
