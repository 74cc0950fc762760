"""`CredentialStore`, the tokens of registries in a private file, and `LoginSessions`.

A token belongs to exactly one scheme, host and port. ``EXPERT_TOKEN`` belongs to the registry that
``EXPERT_REGISTRY`` names and to no other. Nothing is read from ``.netrc`` or from docker.

A registry asks for Basic, or for Bearer with a token from its realm. A secret is sent only to the
address it belongs to, or to the realm that its owner named with it. Any other realm is asked
without it, or not at all where that would reach into a network: addresses and names of this machine
are refused here, other names by what they resolve to, in `expertctl.registry.transport`.
"""

import base64
import os
import re
import stat
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol
from urllib.parse import urlencode, urlsplit

from expertctl.errors import (
    ExpertError,
    InvalidPackageError,
    RegistryError,
    UnauthenticatedError,
    UsageError,
    sanitise_text,
)
from expertctl.files import hold_lock, make_folders, write_atomic
from expertctl.reference import is_loopback
from expertctl.registry.address import NetworkScope, RegistryAddress, looks_numeric
from expertctl.schema.strict_json import JsonObject, JsonValue, encode_canonical, load_object

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
    """The user name and secret for a registry."""

    user: str
    secret: str = field(repr=False)
    realm: str | None = None
    """The other address that may exchange it for a short-lived token, where the user said so."""

    def __post_init__(self) -> None:
        """Refuse a value that could not be a header.

        Raises:
            UsageError: for an empty or unprintable name or secret.
        """
        plain = self.secret.isascii() and self.secret.isprintable() and " " not in self.secret
        if not (plain and 0 < len(self.secret) <= MAX_SECRET):
            raise UsageError("a token is one word of printable ASCII characters")
        if not self.user.isprintable() or ":" in self.user or not 0 < len(self.user) <= 256:
            raise UsageError("a user name is printable, without a colon")


class CredentialSource(Protocol):
    """A source of credentials."""

    def find_credential(
        self, address: RegistryAddress, environment: Mapping[str, str]
    ) -> Credential | None:
        """Return the credential for a registry."""


@dataclass(frozen=True, slots=True)
class UnsavedCredential:
    """A credential that is not stored yet, for its registry alone; None: no login at all."""

    address: RegistryAddress
    credential: Credential | None

    def find_credential(
        self, address: RegistryAddress, environment: Mapping[str, str]
    ) -> Credential | None:
        """Return it for the registry that it belongs to."""
        del environment
        return self.credential if address == self.address else None


@dataclass(frozen=True, slots=True)
class CredentialStore:
    """The owner of ``credentials.json``.

    Methods raise `InvalidPackageError` when the file is damaged, or others may read it.
    """

    path: Path

    def add(self, address: RegistryAddress, credential: Credential) -> None:
        """Store a credential, replacing the one of the same address."""
        with self._update() as stored:
            stored[address.url] = credential

    def remove(self, address: RegistryAddress) -> bool:
        """Remove a credential; tell whether there was one."""
        with self._update() as stored:
            return stored.pop(address.url, None) is not None

    def list_credentials(self) -> dict[str, Credential]:
        """Return every credential by the URL of its registry."""
        try:
            with self.path.open("rb") as stream:
                _check_private(os.fstat(stream.fileno()).st_mode, self.path)
                data = stream.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return {}
        document = load_object(data, what=str(self.path), max_bytes=MAX_BYTES)
        return _parse_credentials(document, str(self.path))

    def check_integrity(self) -> None:
        """Assert that the file can be read, by its owner alone."""
        self.list_credentials()

    def find_credential(
        self, address: RegistryAddress, environment: Mapping[str, str] = os.environ
    ) -> Credential | None:
        """Return a registry's credential: ``EXPERT_TOKEN`` if it belongs there, or the login."""
        return read_environment_credential(address, environment) or self.list_credentials().get(
            address.url
        )

    @contextmanager
    def _update(self) -> Iterator[dict[str, Credential]]:
        make_folders(self.path.parent, mode=0o700)
        lock = self.path.with_name(f"{self.path.name}.lock")
        with hold_lock(lock, guarded=self.path, seconds=LOCK_SECONDS):
            stored = self.list_credentials()
            yield stored
            write_atomic(self.path, _encode_credentials(stored), mode=0o600)


def read_environment_credential(
    address: RegistryAddress, environment: Mapping[str, str]
) -> Credential | None:
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


def _encode_credentials(stored: Mapping[str, Credential]) -> bytes:
    entries = {
        url: {"user": c.user, "secret": c.secret, **({"realm": c.realm} if c.realm else {})}
        for url, c in stored.items()
    }
    return encode_canonical({"registries": entries})


def _parse_credentials(document: JsonObject, what: str) -> dict[str, Credential]:
    entries = document.get("registries")
    if set(document) != {"registries"} or not isinstance(entries, dict):
        raise InvalidPackageError(what, ["these are not the tokens of registries"], hint=_HINT)
    for url in entries:
        _check_url(url, what)
    return {url: _parse_credential(entry, what) for url, entry in entries.items()}


def _check_url(url: str, what: str) -> None:
    """Require the canonical spelling of an address; a login under another would not be found."""
    try:
        if RegistryAddress.parse(url, allow_http=True).url == url:
            return
    except UsageError:
        pass
    raise InvalidPackageError(what, [f"{url[:80]!r} is not a registry's address"], hint=_HINT)


def _parse_credential(entry: JsonValue, what: str) -> Credential:
    fields = entry if isinstance(entry, dict) else {}
    user, secret, realm = fields.get("user"), fields.get("secret"), fields.get("realm")
    known = set(fields) <= {"user", "secret", "realm"}
    if known and isinstance(user, str) and isinstance(secret, str):
        try:
            return Credential(user, secret, realm if isinstance(realm, str) else None)
        except ExpertError as error:
            raise InvalidPackageError(what, [error.message], hint=_HINT) from error
    raise InvalidPackageError(what, ["an entry has no user and secret"], hint=_HINT)


OUR_TOKEN = "xpt_"  # noqa: S105  # what tokens of our registry begin with
MAX_HEADER = 8 << 10
MAX_TOKEN = 16 << 10
MAX_ANSWER = 64 << 10
MIN_TOKEN_SECONDS = 60.0
_PART = re.compile(
    r"[\s,]*(?:([A-Za-z0-9_.~+/-]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))"
    r"|([A-Za-z0-9-]+)(?=[\s,]|\Z))"
)
_METADATA = frozenset({"metadata", "instance-data", "metadata.google.internal"})

FindCredential = Callable[[RegistryAddress], Credential | None]
NetworkScopes = frozenset[NetworkScope]
FetchToken = Callable[[str, str | None, NetworkScopes | None], bytes]
"""Requests a URL, with an ``Authorization`` or none, from addresses of these scopes only, where
they are given; returns the body, bounded by `MAX_ANSWER`."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """One login method that a 401 offers."""

    scheme: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _AuthSession:
    authorization: str
    until: float


class LoginSessions:
    """The authorisations for each registry; short-lived tokens are kept in memory."""

    def __init__(
        self,
        find: FindCredential,
        fetch: FetchToken,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Store the functions that find credentials and fetch tokens from realms."""
        self._find = find
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, str], _AuthSession] = {}

    def initial_authorization(self, address: RegistryAddress, scope: str) -> str | None:
        """Return the ``Authorization`` of a first request, if any."""
        credential = self._find(address)
        if credential and credential.secret.startswith(OUR_TOKEN):
            return f"Bearer {credential.secret}"
        for key in ((address.url, scope), (address.url, "")):
            session = self._sessions.get(key)
            if session and session.until > self._clock():
                return session.authorization
        return None

    def has_sent_login(self, address: RegistryAddress) -> bool:
        """Tell whether a registry asked for a login, or a token of its realm, and got one."""
        return any(url == address.url for url, _ in self._sessions)

    def answer_challenge(
        self,
        address: RegistryAddress,
        scope: str,
        header: str,
        *,
        refused: str | None,
        reachable: NetworkScopes,
    ) -> str | None:
        """Return the ``Authorization`` for a challenge; None where there is none.

        ``reachable`` limits the addresses that a realm elsewhere may resolve to.

        Raises:
            RegistryError: when the realm may not be asked or does not answer sensibly.
        """
        offers = {challenge.scheme: challenge for challenge in parse_challenges(header)}
        with self._lock:
            initial = self.initial_authorization(address, scope)
            if initial != refused:
                return initial
            credential = self._find(address)
            bearer = _find_bearer_realm(offers, credential, refused)
            session: _AuthSession | None
            if bearer is not None:
                session = self._ask_realm(address, scope, bearer, credential, reachable)
            else:
                session = _make_basic_session(offers, credential, refused)
            if session is None:
                return None
            basic = session.authorization.startswith("Basic ")
            self._sessions[(address.url, "" if basic else scope)] = session
            return session.authorization

    def _ask_realm(
        self,
        address: RegistryAddress,
        scope: str,
        fields: Mapping[str, str],
        credential: Credential | None,
        reachable: NetworkScopes,
    ) -> _AuthSession:
        realm = fields["realm"]
        origin = check_realm(realm, address)
        shows = credential if credential and _is_own_realm(origin, address, credential) else None
        wanted = scope or fields.get("scope", "")
        query = [("service", fields["service"])] if "service" in fields else []
        query += [("scope", one) for one in wanted.split()]
        separator = "&" if "?" in realm else "?"
        url = f"{realm}{separator}{urlencode(query)}" if query else realm
        try:
            allowed = None if origin == address.url else reachable
            body = self._fetch(url, _encode_basic(shows) if shows else None, allowed)
        except UnauthenticatedError as error:
            raise _login_refused_error(
                address, origin, shown_to_it=shows is not None, error=error
            ) from error
        token, life = _parse_token(body, origin)
        return _AuthSession(f"Bearer {token}", self._clock() + life)


def _find_bearer_realm(
    offers: Mapping[str, Challenge], credential: Credential | None, refused: str | None
) -> Mapping[str, str] | None:
    """Return the fields of the offer that names a realm, unless the token itself was refused."""
    bearer = offers.get("bearer")
    if bearer is None or "realm" not in bearer.fields or _was_refused(credential, refused):
        return None
    return bearer.fields


def _make_basic_session(
    offers: Mapping[str, Challenge], credential: Credential | None, refused: str | None
) -> _AuthSession | None:
    if credential is None or "basic" not in offers or _was_refused(credential, refused):
        return None
    return (
        None
        if refused == _encode_basic(credential)
        else _AuthSession(_encode_basic(credential), float("inf"))
    )


def _was_refused(credential: Credential | None, refused: str | None) -> bool:
    """Tell whether the secret was refused as a bearer token: then no other method takes it."""
    return credential is not None and refused == f"Bearer {credential.secret}"


def parse_challenges(header: str) -> list[Challenge]:
    """Parse ``WWW-Authenticate``, several challenges included; the first malformed one ends it."""
    challenges: list[Challenge] = []
    position = 0
    text = header[:MAX_HEADER]
    while match := _PART.match(text, position):
        name, quoted, plain, scheme = match.groups()
        if scheme is not None:
            challenges.append(Challenge(scheme.lower(), {}))
        elif challenges:
            value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else plain
            last = challenges[-1]
            challenges[-1] = Challenge(last.scheme, {name.lower(): value, **last.fields})
        position = match.end()
    return challenges


def check_realm(realm: str, registry: RegistryAddress) -> str:
    """Return the origin of a realm that may be asked.

    Raises:
        RegistryError: when it is no plain URL, unencrypted, or an address within a network.
    """
    origin = _parse_origin(realm)
    if origin is None:
        raise _realm_error(registry, realm, "that is no plain https URL")
    if origin == registry.url:
        return origin
    parts = urlsplit(origin)
    host = parts.hostname or ""
    if parts.scheme != "https" and registry.scheme == "https":
        raise _realm_error(registry, realm, "that is not encrypted")
    if looks_numeric(host) or host in _METADATA:
        raise _realm_error(registry, realm, "that is an address within a network")
    if is_loopback(host) and not registry.is_loopback:
        raise _realm_error(registry, realm, "that is this machine")
    return origin


def _parse_origin(url: str) -> str | None:
    """Return scheme, host and port of a URL in the form of `RegistryAddress.url`."""
    if not (url.isascii() and url.isprintable()) or "\\" in url or " " in url or "#" in url:
        return None
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.scheme not in {"http", "https"}:
            return None
        return RegistryAddress.parse(f"{parts.scheme}://{parts.netloc}", allow_http=True).url
    except (ValueError, ExpertError):
        return None


def _is_own_realm(origin: str, address: RegistryAddress, credential: Credential) -> bool:
    return origin in {address.url, credential.realm}


def _encode_basic(credential: Credential) -> str:
    pair = f"{credential.user}:{credential.secret}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def _parse_token(body: bytes, origin: str) -> tuple[str, float]:
    document = load_object(body, what=f"{origin}: its token", max_bytes=MAX_ANSWER)
    token = document.get("token") or document.get("access_token")
    plain = isinstance(token, str) and re.fullmatch(r"[!-~]+", token) is not None
    if not isinstance(token, str) or not plain or len(token) > MAX_TOKEN:
        raise RegistryError(f"{origin}: its answer holds no token")
    life = document.get("expires_in")
    seconds = float(life) if isinstance(life, int | float) and 0 < life < 1e9 else MIN_TOKEN_SECONDS
    return token, seconds * 0.9


def _realm_error(registry: RegistryAddress, realm: str, fact: str) -> RegistryError:
    return RegistryError(
        f"{registry.host}: it sends logins to {sanitise_text(realm, 200)!r}: {fact}",
        hint="nothing was sent there; tell the operator of the registry",
    )


def _login_refused_error(
    address: RegistryAddress, origin: str, *, shown_to_it: bool, error: ExpertError
) -> UnauthenticatedError:
    if shown_to_it or origin == address.url:
        hint = f"log in with `expertctl login {address.host}`"
    else:
        hint = f"if {origin} belongs to it: `expertctl login {address.host} --realm {origin}`"
    own = origin == address.url  # then the message names the registry already
    message = error.message if own else f"{address.host}: {error.message}"
    return UnauthenticatedError(message, hint=hint)
