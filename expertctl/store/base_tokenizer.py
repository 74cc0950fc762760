"""The canonical digest of a base's tokenizer, kept in a file beside the record of the base.

It follows from ``tokenizer.json`` alone, so the record does not hold it: records that earlier
releases wrote get it when they are first read, and earlier releases go on reading the records.
"""

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from expertctl.digest import Digest
from expertctl.durable import write_atomic
from expertctl.errors import ExpertError
from expertctl.package.base_model import TOKENIZER_FILE
from expertctl.package.tokenizer_form import (
    FORM_VERSION,
    MAX_TOKENIZER_BYTES,
    tokenizer_digest,
)
from expertctl.schema.shape import shape_json
from expertctl.schema.strict_json import read_bounded
from expertctl.store.base_record import StoredBase
from expertctl.store.copies_folder import TOKENIZER_DIGEST


class _Kept(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    file: str
    canonical: str | None
    """``None`` where the file has no canonical form."""


def with_canonical_tokenizer(base: StoredBase, home: Path) -> StoredBase:
    """Return a base whose identity has the canonical digest of the tokenizer that was added.

    It has none where ``tokenizer.json`` is not that file any more, or has no canonical form.
    """
    file = next((file.digest for file in base.files if file.path == TOKENIZER_FILE), None)
    if file is None:
        return base
    kept = _read(home)
    if kept is None or (kept.version, kept.file) != (FORM_VERSION, str(file)):
        kept = _compute(base.path / TOKENIZER_FILE, file)
        if kept is not None:
            _write(home, kept)
    return _named(base, kept.canonical if kept else None)


def keep_canonical_tokenizer(base: StoredBase, home: Path) -> None:
    """Keep what is known of a base that was just read; a failure costs the next reader time."""
    canonical = base.identity.canonical_tokenizer
    for file in base.files if canonical else ():
        if file.path == TOKENIZER_FILE:
            _write(home, _Kept(FORM_VERSION, str(file.digest), str(canonical)))


def _named(base: StoredBase, canonical: str | None) -> StoredBase:
    digest = Digest.parse(canonical) if canonical else None
    return replace(base, identity=replace(base.identity, canonical_tokenizer=digest))


def _read(home: Path) -> _Kept | None:
    try:
        kept = shape_json((home / TOKENIZER_DIGEST).read_bytes(), _Kept)
        Digest.parse(kept.canonical or kept.file)
    except (OSError, msgspec.MsgspecError, ExpertError):  # it can be made again
        return None
    return kept


def _compute(path: Path, file: Digest) -> _Kept | None:
    """Read the tokenizer; None where it is not the one that was added."""
    try:
        data = read_bounded(path, max_bytes=MAX_TOKENIZER_BYTES)
    except OSError:
        return None
    if Digest.of(data) != file:
        return None
    try:
        canonical = str(tokenizer_digest(data, what=str(path)))
    except ExpertError:
        canonical = None
    return _Kept(FORM_VERSION, str(file), canonical)


def _write(home: Path, kept: _Kept) -> None:
    with suppress(OSError):
        write_atomic(home / TOKENIZER_DIGEST, msgspec.json.encode(kept) + b"\n", mode=0o600)
