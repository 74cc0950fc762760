"""Tokens for registries: one per address, in a file that only its owner can read.

A token belongs to exactly one scheme, host and port. ``EXPERT_TOKEN`` belongs to the registry that
``EXPERT_REGISTRY`` names and to no other. Nothing is read from ``.netrc`` or from docker.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from filelock import FileLock, Timeout

from expertctl.durable import make_folders, write_atomic
from expertctl.errors import ExpertError, InvalidPackageError, StoreError, UsageError
from expertctl.registry.address import RegistryAddress
from expertctl.schema.strict_json import JsonObject, JsonValue, canonical, load_object

MAX_BYTES = 1 << 20
MAX_SECRET = 16 << 10
LOCK_SECONDS = 30.0
TOKEN_VARIABLE = "EXPERT_TOKEN"  # noqa: S105  # the name of a variable
USER_VARIABLE = "EXPERT_USER"
REGISTRY_VARIABLE = "EXPERT_REGISTRY"
DEFAULT_USER = "token"
_HINT = "remove the file and run `expertctl login` again"


@dataclass(frozen=True, slots=True)
class Credential:
    """What identifies a user to a registry."""

    user: str
    secret: str = field(repr=False)
    realm: str | None = None
    """The other address that may exchange it for a short-lived token, where the user said so."""

    def __post_init__(self) -> None:
        """Refuse what could not be a header.

        Raises:
            UsageError: for an empty or unprintable name or secret.
        """
        plain = self.secret.isascii() and self.secret.isprintable() and " " not in self.secret
        if not (plain and 0 < len(self.secret) <= MAX_SECRET):
            raise UsageError("a token is one word of printable ASCII characters")
        if not self.user.isprintable() or ":" in self.user or not 0 < len(self.user) <= 256:
            raise UsageError("a user name is printable, without a colon")


class Credentials(Protocol):
    """Where credentials come from."""

    def for_address(
        self, address: RegistryAddress, environment: Mapping[str, str]
    ) -> Credential | None:
        """Return what to show a registry."""


@dataclass(frozen=True, slots=True)
class OneCredential:
    """A credential that is not kept yet, for its registry alone; None: no login at all."""

    address: RegistryAddress
    credential: Credential | None

    def for_address(
        self, address: RegistryAddress, environment: Mapping[str, str]
    ) -> Credential | None:
        """Return it for the registry that it belongs to."""
        del environment
        return self.credential if address == self.address else None


@dataclass(frozen=True, slots=True)
class CredentialStore:
    """Owns ``credentials.json``."""

    path: Path

    def add(self, address: RegistryAddress, credential: Credential) -> None:
        """Keep a credential, in place of the one that was there.

        Raises:
            InvalidPackageError: when the file is damaged.
        """
        with self._changing() as stored:
            stored[address.url] = credential

    def remove(self, address: RegistryAddress) -> bool:
        """Forget a credential; tell whether there was one.

        Raises:
            InvalidPackageError: when the file is damaged.
        """
        with self._changing() as stored:
            return stored.pop(address.url, None) is not None

    def all(self) -> dict[str, Credential]:
        """Return every credential by the URL of its registry.

        Raises:
            InvalidPackageError: when the file is damaged, or others may read it.
        """
        try:
            with self.path.open("rb") as stream:
                _check_private(os.fstat(stream.fileno()).st_mode, self.path)
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        document = load_object(data, what=str(self.path), max_bytes=MAX_BYTES)
        return _read(document, str(self.path))

    def check_integrity(self) -> None:
        """Assert that the file can be read, by its owner alone."""
        self.all()

    def for_address(
        self, address: RegistryAddress, environment: Mapping[str, str] = os.environ
    ) -> Credential | None:
        """Return what to show a registry: ``EXPERT_TOKEN`` if it is meant for it, or the login."""
        return from_environment(address, environment) or self.all().get(address.url)

    @contextmanager
    def _changing(self) -> Iterator[dict[str, Credential]]:
        make_folders(self.path.parent, mode=0o700)
        try:
            with FileLock(f"{self.path}.lock", timeout=LOCK_SECONDS, mode=0o600):
                stored = self.all()
                yield stored
                write_atomic(self.path, _encode(stored), mode=0o600)
        except Timeout as error:
            message = f"{self.path} is being changed by another process"
            raise StoreError(message, hint="try again when that has ended") from error


def from_environment(address: RegistryAddress, environment: Mapping[str, str]) -> Credential | None:
    """Return ``EXPERT_TOKEN`` for the registry of ``EXPERT_REGISTRY``, and for no other."""
    token, registry = environment.get(TOKEN_VARIABLE), environment.get(REGISTRY_VARIABLE)
    if not token or not registry:
        return None
    if RegistryAddress.parse(registry, allow_http=True) != address:
        return None
    return Credential(environment.get(USER_VARIABLE) or DEFAULT_USER, token.strip())


def _check_private(mode: int, path: Path) -> None:
    if os.name == "posix" and stat.S_IMODE(mode) & 0o077:
        problems = ["others may read it, and it holds tokens"]
        raise InvalidPackageError(str(path), problems, hint=f"chmod 600 {path}")


def _encode(stored: Mapping[str, Credential]) -> bytes:
    entries = {
        url: {"user": c.user, "secret": c.secret, **({"realm": c.realm} if c.realm else {})}
        for url, c in stored.items()
    }
    return canonical({"registries": entries})


def _read(document: JsonObject, what: str) -> dict[str, Credential]:
    entries = document.get("registries")
    if set(document) != {"registries"} or not isinstance(entries, dict):
        raise InvalidPackageError(what, ["these are not the tokens of registries"], hint=_HINT)
    for url in entries:
        _check_url(url, what)
    return {url: _credential(entry, what) for url, entry in entries.items()}


def _check_url(url: str, what: str) -> None:
    """Demand the one spelling of an address; a login under another would not be found."""
    try:
        if RegistryAddress.parse(url, allow_http=True).url == url:
            return
    except UsageError:
        pass
    raise InvalidPackageError(what, [f"{url[:80]!r} is not a registry's address"], hint=_HINT)


def _credential(entry: JsonValue, what: str) -> Credential:
    fields = entry if isinstance(entry, dict) else {}
    user, secret, realm = fields.get("user"), fields.get("secret"), fields.get("realm")
    known = set(fields) <= {"user", "secret", "realm"}
    if known and isinstance(user, str) and isinstance(secret, str):
        try:
            return Credential(user, secret, realm if isinstance(realm, str) else None)
        except ExpertError as error:
            raise InvalidPackageError(what, [error.message], hint=_HINT) from error
    raise InvalidPackageError(what, ["an entry has no user and secret"], hint=_HINT)
