"""`ApiKeyStore`: the API keys of a server, stored below ``EXPERT_HOME`` as hashes only.

A secret is ``xpk_`` and 256 random bits. It is shown once, when created; the file holds its
SHA-256, which needs no salt and no slow hash at that length. A server rereads the file when it
changes, so a revocation takes effect at once.

While the file exists every caller needs a key, even after the last key is revoked.
"""

import hashlib
import hmac
import os
import re
import secrets
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from expertctl.errors import ConflictError, InvalidPackageError, NotFoundError, UsageError
from expertctl.files import hold_lock, make_folders, open_regular_file, write_atomic
from expertctl.schema.strict_json import load_object
from expertctl.schema.validation import convert_document

KEY_PREFIX = "xpk_"
KEY_LENGTH = len(KEY_PREFIX) + 43
MAX_KEYS = 1000
MAX_PER_MINUTE = 10**9
_FORMAT = 1
_MAX_BYTES = 1 << 20
_LOCK_SECONDS = 10.0
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_MAX_NAME = 64
FileStamp = tuple[int, int, int]


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A key without its secret; times are in seconds since the epoch."""

    id: str
    name: str
    hash: str
    created: float
    expires: float | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    manages: bool = False
    """Whether it may also change settings that affect other callers."""


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    format: int
    keys: list[ApiKey]


@dataclass(frozen=True, slots=True)
class MadeKey:
    """A new key; its ``secret`` is stored nowhere else."""

    key: ApiKey
    secret: str

    def __repr__(self) -> str:
        """Return a text without the secret, for logs and tracebacks."""
        return f"MadeKey({self.key!r})"


class ApiKeyStore:
    """The keys of one file; changes are made under a file lock."""

    def __init__(self, path: Path) -> None:
        """Use the file at ``path``; nothing is read yet."""
        self.path = path
        self._stamp: FileStamp | None = None
        self._by_hash: dict[str, ApiKey] = {}

    @property
    def are_required(self) -> bool:
        """Whether a request without a key is refused."""
        return self.path.exists()

    def list_keys(self) -> tuple[ApiKey, ...]:
        """Return all keys by name, including expired ones.

        Raises:
            InvalidPackageError: when the file cannot be read as keys.
        """
        return tuple(sorted(self._read(), key=lambda key: key.name))

    def find(self, secret: str, *, now: float) -> ApiKey | None:
        """Return the key of a secret; None if it is unknown or expired."""
        if len(secret) != KEY_LENGTH or not secret.startswith(KEY_PREFIX):
            return None
        self._refresh()
        hashed = _digest(secret)
        key = self._by_hash.get(hashed)
        if key is None or not hmac.compare_digest(key.hash, hashed):
            return None
        return key if key.expires is None or now < key.expires else None

    def create(
        self,
        name: str,
        *,
        now: float,
        expires: float | None = None,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        manages: bool = False,
    ) -> MadeKey:
        """Create a key.

        Raises:
            UsageError: when the name or a limit is invalid, or there are too many keys.
            ConflictError: when the name is taken.
        """
        _check_key(name, requests_per_minute, tokens_per_minute)
        secret = KEY_PREFIX + secrets.token_urlsafe(32)
        key = ApiKey(
            id=secrets.token_hex(8),
            name=name,
            hash=_digest(secret),
            created=now,
            expires=expires,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            manages=manages,
        )
        with self._hold_lock():
            known = self._read()
            if any(each.name == name for each in known):
                hint = f"run `expertctl serve key revoke {name}` first, or choose another name"
                raise ConflictError(f"a key {name} already exists", hint=hint)
            if len(known) >= MAX_KEYS:
                raise UsageError(f"there are already {MAX_KEYS} keys, the maximum")
            self._write([*known, key])
        return MadeKey(key, secret)

    def revoke(self, name: str) -> ApiKey:
        """Revoke a key by name or id.

        Raises:
            NotFoundError: when there is no such key.
        """
        with self._hold_lock():
            known = self._read()
            gone = [key for key in known if name in {key.name, key.id}]
            if not gone:
                hint = "list all with `expertctl serve key list`"
                raise NotFoundError(f"there is no key {name[:80]!r}", hint=hint)
            self._write([key for key in known if key not in gone])
        return gone[0]

    def _refresh(self) -> None:
        stamp = _read_stamp(self.path)
        if stamp != self._stamp:
            self._by_hash = {key.hash: key for key in self._read()}
            self._stamp = stamp

    def _read(self) -> list[ApiKey]:
        if not self.path.exists():
            return []
        with open_regular_file(self.path) as stream:
            data = stream.read(_MAX_BYTES + 1)
        document = load_object(data, what=str(self.path), max_bytes=_MAX_BYTES)
        try:
            read = convert_document(document, _KeyFile)
        except msgspec.ValidationError as error:
            raise InvalidPackageError(str(self.path), [str(error)]) from error
        if read.format != _FORMAT:
            raise InvalidPackageError(str(self.path), ["unsupported format version"])
        return read.keys

    def _write(self, keys: list[ApiKey]) -> None:
        content = msgspec.json.format(msgspec.json.encode(_KeyFile(_FORMAT, keys)), indent=2)
        write_atomic(self.path, content + b"\n", mode=0o600)

    def _hold_lock(self) -> AbstractContextManager[None]:
        make_folders(self.path.parent, mode=0o700)
        lock = self.path.with_name(f"{self.path.name}.lock")
        return hold_lock(lock, guarded=self.path, seconds=_LOCK_SECONDS)


def _read_stamp(path: Path) -> FileStamp | None:
    """Return a fingerprint that changes with the file; a replaced file has another inode."""
    try:
        found = os.stat(path)  # noqa: PTH116  # a call for each request: Path.stat takes twice as long
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def _digest(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


def _check_key(name: str, *limits: int | None) -> None:
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        hint = "use lower-case letters and digits, separated by single dashes"
        raise UsageError(f"{name[:80]!r} is not a valid key name", hint=hint)
    if any(limit is not None and not 1 <= limit <= MAX_PER_MINUTE for limit in limits):
        raise UsageError(f"a limit must be 1 to {MAX_PER_MINUTE} per minute")
