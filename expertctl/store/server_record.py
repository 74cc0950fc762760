"""`ServerRecord`: where a running `serve` of this home listens, for commands of the same user.

::

    servers/                    mode 0700
    servers/<pid>-<token>.json  mode 0600: one record for each server that accepts jobs

A record holds a secret that only the server and readers of the record know. A command sends
nothing but a nonce before the server has proved the secret (`make_proof`), so a process that took
over the port of a dead server gets no prompt; the key derived from the same secret (`derive_key`)
then shows the server that the command belongs to the owner of the home. Neither is ever logged.

A record counts only where the reader's user owns the file and nobody else may read or write it. One
whose process has ended is removed. The process is known by id and start time, since ids are reused,
and by the machine: machines and containers that share a home have loopback addresses of their own.
Records of other machines are removed after 30 days: one may be this machine before a restart.
"""

import hashlib
import hmac
import os
import platform
import secrets
import stat
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from expertctl.errors import StoreError
from expertctl.files import make_folders, write_atomic
from expertctl.settings import Settings
from expertctl.store.pins import is_project

RECORD_FORMAT = 1
"""Changes when commands of another version could not use the server of a record."""
_MAX_BYTES = 1 << 16
_MAX_RECORDS = 100
_KEPT_DAYS = 30
_SECRET_BYTES = 32
_START_FIELD = 19
"""Index of a process's start time among the fields after its name in ``/proc/<pid>/stat``."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO
_KEY_PREFIX = "xpo_"

Policy = Mapping[str, str | float | bool | None]
"""What may change an answer besides the request: data types, device, project, limits."""


def describe_home_policy(settings: Settings, folder: Path | None) -> Policy:
    """Return the part that settings and the project of a working folder decide."""
    in_project = folder is not None and is_project(folder, settings.home)
    return {
        "encoder": settings.encoder,
        "preferred_base": settings.base,
        "project": str(folder) if in_project else None,
    }


class ServerRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One server of a home."""

    format: int
    pid: int
    began: int | None
    """Start time of its process, in the system's ticks; None where it is unknown."""
    machine: str
    url: str
    base: str
    policy: dict[str, str | float | bool | None]
    secret: str

    def __repr__(self) -> str:
        """Return a text without the secret, for logs and tracebacks."""
        return f"ServerRecord(pid={self.pid}, url={self.url!r}, base={self.base!r})"


def create_secret() -> str:
    """Return a new secret for one server process."""
    return secrets.token_hex(_SECRET_BYTES)


def create_nonce() -> str:
    """Return a new nonce: 64 hexadecimal digits."""
    return secrets.token_hex(_SECRET_BYTES)


def make_proof(secret: str, nonce: str) -> str:
    """Return the proof that the maker knows the secret, for one nonce (HMAC-SHA256)."""
    return _authenticate(secret, f"proof {nonce}")


def is_proof(secret: str, nonce: str, proof: str) -> bool:
    """Tell whether a proof was made with this secret for this nonce."""
    expected, found = make_proof(secret, nonce).encode(), proof.encode("utf-8", "replace")
    return hmac.compare_digest(expected, found)


def derive_key(secret: str) -> str:
    """Return the API key of the home's owner on the server with this secret."""
    return _KEY_PREFIX + _authenticate(secret, "owner")


def is_owner_key(secret: str, key: str) -> bool:
    """Tell whether a key is the owner's on the server with this secret."""
    return hmac.compare_digest(derive_key(secret).encode(), key.encode("utf-8", "replace"))


def _authenticate(secret: str, text: str) -> str:
    return hmac.new(bytes.fromhex(secret), text.encode("utf-8"), hashlib.sha256).hexdigest()


def identify_machine() -> str:
    """Return what tells apart the machines and containers that may share a home."""
    if sys.platform == "linux":
        with suppress(OSError):
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            spaces = [Path(f"/proc/self/ns/{name}").stat().st_ino for name in ("net", "pid")]
            return "/".join([boot, *map(str, spaces)])
    return platform.node()


def read_process_start(pid: int) -> int | None:
    """Return the start time of a process, in the system's ticks; None where it is unknown."""
    if sys.platform != "linux":
        return None
    with suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return int(fields.rpartition(")")[2].split()[_START_FIELD])
    return None


class ServerRegistration:
    """The record of one server; it exists from `publish` to `withdraw`."""

    def __init__(self, folder: Path, *, secret: str) -> None:
        """Publish below a folder, which is created for the first record."""
        self._folder, self._secret = folder, secret
        self._path: Path | None = None

    def publish(self, *, pid: int, url: str, base: str, policy: Policy) -> None:
        """Write the record of a server that accepts jobs; remove those of dead ones.

        Those of other machines, of which nothing is known, are removed after `_KEPT_DAYS`.

        Raises:
            OSError: when it cannot be written.
            StoreError: when the folder belongs to somebody else.
        """
        record = ServerRecord(
            format=RECORD_FORMAT,
            pid=pid,
            began=read_process_start(pid),
            machine=identify_machine(),
            url=url,
            base=base,
            policy=dict(policy),
            secret=self._secret,
        )
        make_folders(self._folder, mode=0o700)
        _require_private_folder(self._folder)
        list_servers(self._folder)
        _remove_old_records(self._folder)
        path = self._folder / f"{pid}-{secrets.token_hex(4)}.json"
        write_atomic(path, msgspec.json.encode(record), mode=0o600)
        self._path = path

    def withdraw(self) -> None:
        """Remove the record, if there is one; commands then answer without this server."""
        path, self._path = self._path, None
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class FoundServers:
    """The live servers of a home, the newest first, and why other records are not used."""

    records: tuple[ServerRecord, ...] = ()
    problems: tuple[str, ...] = ()


def list_servers(folder: Path) -> FoundServers:
    """Return the servers of this user and machine; remove records of processes that have ended."""
    if not hasattr(os, "getuid"):  # modes say nothing about who may read: Windows
        return FoundServers()
    try:
        paths = _list_newest(folder)[:_MAX_RECORDS]
        if paths:
            _require_private_folder(folder)
    except OSError:
        return FoundServers()
    except StoreError as error:
        return FoundServers(problems=(error.message,))
    here, found, problems = identify_machine(), list[ServerRecord](), list[str]()
    for path in paths:
        try:
            record = _read_record(path)
        except StoreError as error:
            problems.append(error.message)
            continue
        if record is None or record.machine != here or record.format != RECORD_FORMAT:
            continue
        if _is_alive(record):
            found.append(record)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    newest = sorted(found, key=lambda one: (one.began or 0, one.pid), reverse=True)
    return FoundServers(tuple(newest), tuple(problems))


def _list_newest(folder: Path) -> list[Path]:
    """Return the records of a folder, the one written last first."""
    written = list[tuple[float, Path]]()
    for path in folder.glob("*.json"):
        with suppress(FileNotFoundError):  # withdrawn meanwhile
            written.append((path.lstat().st_mtime, path))
    return [path for _, path in sorted(written, reverse=True)]


def _remove_old_records(folder: Path) -> None:
    here, least = identify_machine(), time.time() - _KEPT_DAYS * 86_400
    for path in reversed(_list_newest(folder)):
        with suppress(OSError, StoreError):
            if path.lstat().st_mtime >= least:
                return
            record = _read_record(path)
            if record is not None and record.machine != here:
                path.unlink()


def _require_private_folder(folder: Path) -> None:
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & _OTHERS:
        raise StoreError(
            f"{folder} is not used: it is not a folder that only you may read and write",
            hint=f"chmod 700 {folder}",
        )


def _read_record(path: Path) -> ServerRecord | None:
    """Read a record; None for one that has just been removed, or is of another version.

    Raises:
        StoreError: when somebody else may have written or read it.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"{path} is not used: {error.strerror}") from error
    with os.fdopen(handle, "rb", buffering=0) as stream:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid():
            raise StoreError(f"{path} is not used: it is not a file of yours")
        if found.st_mode & _OTHERS:
            raise StoreError(f"{path} is not used: others may read it; restart the server")
        data = stream.read(_MAX_BYTES)
    try:
        record = msgspec.json.decode(data, type=ServerRecord)
        bytes.fromhex(record.secret)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None
    return record if len(record.secret) == 2 * _SECRET_BYTES else None


def _is_alive(record: ServerRecord) -> bool:
    began = read_process_start(record.pid)
    if began is not None or record.began is not None:
        return began == record.began
    try:
        os.kill(record.pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # of another user: not ours
        return False
    return record.pid > 0
