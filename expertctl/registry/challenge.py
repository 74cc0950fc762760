"""Logins that a registry asks for: Basic, or Bearer with a token from its realm.

A secret goes only to the address it belongs to, or to the realm that its owner named beside it.
Any other realm is asked without it, or not at all where that would reach into a network: addresses
and names of this machine are refused here, other names by what they resolve to, in `wire`.
"""

import base64
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode, urlsplit

from expertctl.errors import ExpertError, RegistryError, UnauthenticatedError
from expertctl.registry.address import RegistryAddress, is_loopback, looks_numeric
from expertctl.registry.credentials import Credential
from expertctl.registry.network_scope import Scope
from expertctl.registry.refusal import shown
from expertctl.schema.strict_json import load_object

OUR_TOKEN = "xpt_"  # noqa: S105  # what tokens of our registry begin with
MAX_HEADER = 8 << 10
MAX_TOKEN = 16 << 10
MAX_ANSWER = 64 << 10
SHORTEST_LIFE = 60.0
_PART = re.compile(
    r"[\s,]*(?:([A-Za-z0-9_.~+/-]+)\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^\s,\"]+))"
    r"|([A-Za-z0-9-]+)(?=[\s,]|\Z))"
)
_METADATA = frozenset({"metadata", "instance-data", "metadata.google.internal"})

Find = Callable[[RegistryAddress], Credential | None]
Scopes = frozenset[Scope]
Fetch = Callable[[str, str | None, Scopes | None], bytes]
"""Gets a URL, with an ``Authorization`` or none, from addresses of these scopes only, where they
are given; the body, bounded by `MAX_ANSWER`."""


@dataclass(frozen=True, slots=True)
class Challenge:
    """One way to log in that a 401 offers."""

    scheme: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Session:
    authorization: str
    until: float


class Logins:
    """The logins to show to each registry; short-lived tokens are kept in memory."""

    def __init__(
        self, find: Find, fetch: Fetch, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Keep where credentials come from and how a realm is asked."""
        self._find = find
        self._fetch = fetch
        self._clock = clock
        self._lock = threading.Lock()
        self._sessions: dict[tuple[str, str], _Session] = {}

    def known(self, address: RegistryAddress, scope: str) -> str | None:
        """Return the ``Authorization`` to begin with, if any."""
        credential = self._find(address)
        if credential and credential.secret.startswith(OUR_TOKEN):
            return f"Bearer {credential.secret}"
        for key in ((address.url, scope), (address.url, "")):
            session = self._sessions.get(key)
            if session and session.until > self._clock():
                return session.authorization
        return None

    def shown(self, address: RegistryAddress) -> bool:
        """Tell whether a registry asked for a login, or a token of its realm, and was given one."""
        return any(url == address.url for url, _ in self._sessions)

    def answer(
        self,
        address: RegistryAddress,
        scope: str,
        header: str,
        *,
        refused: str | None,
        reachable: Scopes,
    ) -> str | None:
        """Return the ``Authorization`` that a challenge wants, None where there is none to give.

        ``reachable`` limits to which addresses a realm elsewhere may resolve.

        Raises:
            RegistryError: when the realm may not be asked or does not answer sensibly.
        """
        offers = {challenge.scheme: challenge for challenge in read_challenges(header)}
        with self._lock:
            begun = self.known(address, scope)
            if begun != refused:
                return begun
            credential = self._find(address)
            bearer = _bearer_realm(offers, credential, refused)
            session: _Session | None
            if bearer is not None:
                session = self._ask_realm(address, scope, bearer, credential, reachable)
            else:
                session = _basic_session(offers, credential, refused)
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
        reachable: Scopes,
    ) -> _Session:
        realm = fields["realm"]
        origin = check_realm(realm, address)
        shows = credential if credential and _belongs(origin, address, credential) else None
        wanted = scope or fields.get("scope", "")
        query = [("service", fields["service"])] if "service" in fields else []
        query += [("scope", one) for one in wanted.split()]
        separator = "&" if "?" in realm else "?"
        url = f"{realm}{separator}{urlencode(query)}" if query else realm
        try:
            allowed = None if origin == address.url else reachable
            body = self._fetch(url, _basic(shows) if shows else None, allowed)
        except UnauthenticatedError as error:
            raise _refused(address, origin, shown_to_it=shows is not None, error=error) from error
        token, life = _read_token(body, origin)
        return _Session(f"Bearer {token}", self._clock() + life)


def _bearer_realm(
    offers: Mapping[str, Challenge], credential: Credential | None, refused: str | None
) -> Mapping[str, str] | None:
    """Return the fields of the offer that names a realm, unless the token itself was refused."""
    bearer = offers.get("bearer")
    if bearer is None or "realm" not in bearer.fields or _was_refused(credential, refused):
        return None
    return bearer.fields


def _basic_session(
    offers: Mapping[str, Challenge], credential: Credential | None, refused: str | None
) -> _Session | None:
    if credential is None or "basic" not in offers or _was_refused(credential, refused):
        return None
    return None if refused == _basic(credential) else _Session(_basic(credential), float("inf"))


def _was_refused(credential: Credential | None, refused: str | None) -> bool:
    """Tell whether the secret was shown as a token and refused: it is worth nothing elsewhere."""
    return credential is not None and refused == f"Bearer {credential.secret}"


def read_challenges(header: str) -> list[Challenge]:
    """Read ``WWW-Authenticate``, several challenges included; the first malformed one ends it."""
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
    origin = _origin(realm)
    if origin is None:
        raise _bad_realm(registry, realm, "that is no plain https URL")
    if origin == registry.url:
        return origin
    parts = urlsplit(origin)
    host = parts.hostname or ""
    if parts.scheme != "https" and registry.scheme == "https":
        raise _bad_realm(registry, realm, "that is not encrypted")
    if looks_numeric(host) or host in _METADATA:
        raise _bad_realm(registry, realm, "that is an address within a network")
    if is_loopback(host) and not registry.is_loopback:
        raise _bad_realm(registry, realm, "that is this machine")
    return origin


def _origin(url: str) -> str | None:
    """Return scheme, host and port of a URL as `RegistryAddress.url` writes them."""
    if not (url.isascii() and url.isprintable()) or "\\" in url or " " in url or "#" in url:
        return None
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc or parts.scheme not in {"http", "https"}:
            return None
        return RegistryAddress.parse(f"{parts.scheme}://{parts.netloc}", allow_http=True).url
    except (ValueError, ExpertError):
        return None


def _belongs(origin: str, address: RegistryAddress, credential: Credential) -> bool:
    return origin in {address.url, credential.realm}


def _basic(credential: Credential) -> str:
    pair = f"{credential.user}:{credential.secret}".encode()
    return f"Basic {base64.b64encode(pair).decode('ascii')}"


def _read_token(body: bytes, origin: str) -> tuple[str, float]:
    document = load_object(body, what=f"{origin}: its token", max_bytes=MAX_ANSWER)
    token = document.get("token") or document.get("access_token")
    plain = isinstance(token, str) and re.fullmatch(r"[!-~]+", token) is not None
    if not isinstance(token, str) or not plain or len(token) > MAX_TOKEN:
        raise RegistryError(f"{origin}: its answer holds no token")
    life = document.get("expires_in")
    seconds = float(life) if isinstance(life, int | float) and 0 < life < 1e9 else SHORTEST_LIFE
    return token, seconds * 0.9


def _bad_realm(registry: RegistryAddress, realm: str, fact: str) -> RegistryError:
    return RegistryError(
        f"{registry.host}: it sends logins to {shown(realm, 200)!r}: {fact}",
        hint="nothing was sent there; tell whoever runs the registry",
    )


def _refused(
    address: RegistryAddress, origin: str, *, shown_to_it: bool, error: ExpertError
) -> UnauthenticatedError:
    if shown_to_it or origin == address.url:
        hint = f"log in with `expertctl login {address.host}`"
    else:
        hint = f"if {origin} belongs to it: `expertctl login {address.host} --realm {origin}`"
    own = origin == address.url  # then the message names the registry already
    message = error.message if own else f"{address.host}: {error.message}"
    return UnauthenticatedError(message, hint=hint)
