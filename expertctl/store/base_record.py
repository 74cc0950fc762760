"""The record of a base, ``base.json``, as a value and as bytes.

A copy lies beside its record and is found from there, so a home can be moved.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from expertctl.digest import Digest
from expertctl.errors import ExpertError, StoreError
from expertctl.package.base_model import BaseIdentity
from expertctl.schema.shape import shape
from expertctl.schema.strict_json import load_object
from expertctl.store.base_files import BaseFile

COPY = "files"
"""The folder of a copy, beside its record."""
_MAX_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class StoredBase:
    """A base that was added: where it is, what it is, and how its files looked."""

    name: str
    path: Path
    identity: BaseIdentity
    files: tuple[BaseFile, ...]
    shapes: Mapping[str, tuple[int, int]]
    """(out, in) of every linear layer."""
    copied: bool
    added_ns: int
    foreign: bool = False
    """Whether only ``run --engine transformers`` runs it."""

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in self.files)


class _Identity(msgspec.Struct, forbid_unknown_fields=True):
    revision: str | None
    arch: str
    weights: str | None
    tokenizer: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    path: str
    size: int
    mtime_ns: str
    inode: str
    digest: str


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    schema: int
    name: str
    path: str
    copied: bool
    added_ns: str
    identity: _Identity
    files: list[_File]
    shapes: dict[str, tuple[int, int]]
    foreign: bool = False


def encode_base(base: StoredBase) -> bytes:
    """Return the bytes of a record; nanoseconds and inodes are text, as they may pass 2^53."""
    identity = base.identity
    weights = str(identity.weights) if identity.weights else None
    record = _Record(
        1,
        base.name,
        COPY if base.copied else str(base.path),
        base.copied,
        str(base.added_ns),
        _Identity(identity.revision, str(identity.arch), weights, str(identity.tokenizer)),
        [_File(f.path, f.size, str(f.mtime_ns), str(f.inode), str(f.digest)) for f in base.files],
        dict(base.shapes),
        base.foreign,
    )
    return json.dumps(msgspec.to_builtins(record), indent=1).encode() + b"\n"


def read_base_record(path: Path) -> StoredBase:
    """Read a record.

    Raises:
        StoreError: when it is damaged.
    """
    try:
        document: Any = load_object(path.read_bytes(), what=str(path), max_bytes=_MAX_BYTES)
        record = shape(document, _Record)
        return _base_of(record, path.parent)
    except (ExpertError, msgspec.ValidationError, ValueError) as error:
        hint = f"remove {path.parent} and add the base again"
        raise StoreError(f"{path} is damaged: {error}", hint=hint) from error


def _base_of(record: _Record, folder: Path) -> StoredBase:
    told = record.identity
    identity = BaseIdentity(
        name=record.name,
        revision=told.revision,
        arch=Digest.parse(told.arch),
        weights=Digest.parse(told.weights) if told.weights else None,
        tokenizer=Digest.parse(told.tokenizer),
    )
    files = tuple(
        BaseFile(f.path, f.size, int(f.mtime_ns), int(f.inode), Digest.parse(f.digest))
        for f in record.files
    )
    return StoredBase(
        name=record.name,
        path=folder / COPY if record.copied else Path(record.path),
        identity=identity,
        files=files,
        shapes=record.shapes,
        copied=record.copied,
        added_ns=int(record.added_ns),
        foreign=record.foreign,
    )
