"""Where a request comes from, as far as that can be believed.

``X-Forwarded-For`` counts only when the peer itself is a trusted proxy; it is read from its end,
where proxies append, to the first address that is no trusted proxy. Everything before that was
written by the client.

The ``Authorization`` header: the one place where a request may carry a secret.

Bearer carries the token itself; Basic carries it as the password, for clients that know nothing
else, and its user name is not looked at. Secrets in the URL or in cookies are ignored.

The identities that secrets stand for, remembered until anything is written.

Every request names a secret, and most come between two writes: then the last answer still holds.
Any commit, by any worker, forgets everything, so that a revoked token is dead at once. Identities
that expire carry their expiry. Secrets are remembered by their hash.

How often wrong secrets may be tried: limits that never hold up a right one.

A secret is looked up before any limit is asked, so a valid token gets through whatever else comes
from its address. A look-up costs one hash and one indexed read, and no read at all for what this
registry cannot have made. What is limited is what a wrong secret is answered: each beginning of a
secret on its own, so that a machine with an old token does not silence others at its address, and
all of an address together.

Audit rows of what was refused: failed logins, and changes that were not allowed or not possible.

A refusal costs whoever causes it nothing, so the rows are bounded: one a minute for the same thing
from the same place, and `MAX_REFUSALS_PER_MINUTE` of each kind, so that failed logins, which
anybody can cause, hide no refused change. What is not written is counted, and the next row says how
many there were. They are written after the answer, without waiting for the disk.
"""

import base64
import binascii
import ipaddress
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from starlette.datastructures import Headers
from starlette.types import Scope

from expertctl.errors import DiskFullError, StoreError
from expertctl.http.limits import RateLimiter
from registry_server.access import accounts, rights
from registry_server.access.accounts import SESSION_PREFIX, SessionKey
from registry_server.access.rights import Identity
from registry_server.database.connection import Database

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network

UNKNOWN_ADDRESS = "unknown"
MAX_HOPS = 20


def resolve_client_address(scope: Scope, proxies: Sequence[Network]) -> str:
    """Return the client's address; ``unknown`` when the server was not told one."""
    client = scope.get("client")
    peer = _parse_address(client[0]) if client else None
    if peer is None:
        return UNKNOWN_ADDRESS
    if not _is_trusted(peer, proxies):
        return str(peer)
    hops = ",".join(Headers(scope=scope).getlist("x-forwarded-for")).split(",")[-MAX_HOPS:]
    for hop in reversed(hops):
        found = _parse_address(hop.strip())
        if found is None:
            break
        peer = found
        if not _is_trusted(peer, proxies):
            break
    return str(peer)


def get_rate_limit_key(address: str) -> str:
    """Return what is limited together: one IPv4 address, or the /64 network of an IPv6 one."""
    parsed = _parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


def parse_networks(cidrs: Sequence[str]) -> tuple[Network, ...]:
    """Read the networks of the settings."""
    return tuple(ipaddress.ip_network(text, strict=False) for text in cidrs)


def _is_trusted(address: Address, proxies: Sequence[Network]) -> bool:
    return any(address in network for network in proxies)


def _parse_address(text: str) -> Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    mapped = getattr(address, "ipv4_mapped", None)
    return mapped or address


MAX_AUTHORIZATION_HEADER = 16_000
_EMPTY_BASIC = "basic og=="


def is_anonymous(headers: Headers) -> bool:
    """Tell whether a request carries no login: no header, or Basic with neither name nor secret.

    That is what skopeo sends where it has no login and was told that Basic will do.
    """
    values = headers.getlist("authorization")
    return not values or (len(values) == 1 and values[0].lower() == _EMPTY_BASIC)


def read_secret(headers: Headers) -> str | None:
    """Return the secret of a request; None when the header is neither of the two kinds."""
    values = headers.getlist("authorization")
    if len(values) != 1 or len(values[0]) > MAX_AUTHORIZATION_HEADER or not values[0].isascii():
        return None
    scheme, _, value = values[0].partition(" ")
    return _parse_secret(scheme.lower(), value.strip(" "))


def _parse_secret(scheme: str, value: str) -> str | None:
    if scheme == "bearer":
        return value
    if scheme != "basic":
        return None
    try:
        pair = base64.b64decode(value, validate=True).decode("ascii")
    except (ValueError, binascii.Error):
        return None
    return pair.partition(":")[2]


MAX_CACHED_IDENTITIES = 10_000


@dataclass(slots=True)
class IdentityCache:
    """The identities of one state of the database."""

    database: Database
    sessions: SessionKey
    _version: int = -1
    _identities: dict[str, Identity] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def find(self, secret: str) -> Identity | None:
        """Return the identity that a secret stands for now, None when there is none.

        Raises:
            StoreError: when the database cannot be read; no secret is believed then.
        """
        if not self._may_be_issued_here(secret):
            return None
        hashed = accounts.hash_secret(secret)
        with self._lock:
            self._clear_after_commit()
            found = self._identities.get(hashed)
            if found is None and (found := self._load(secret)) is not None:
                self._identities[hashed] = found
        ended = found is not None and found.expires is not None and found.expires <= time.time()
        return None if ended else found

    def was_issued_here(self, secret: str) -> bool:
        """Tell whether a secret that is not valid now was made by this registry.

        Raises:
            StoreError: when the database cannot be read.
        """
        if not self._may_be_issued_here(secret):
            return False
        if secret.startswith(SESSION_PREFIX):
            return True
        with self.database.read() as connection:
            return accounts.was_minted(connection, secret)

    def _may_be_issued_here(self, secret: str) -> bool:
        """Tell, without the database, whether this registry may have made a secret."""
        is_session = secret.startswith(SESSION_PREFIX)
        return (
            self.sessions.is_authentic(secret) if is_session else accounts.looks_like_token(secret)
        )

    def _clear_after_commit(self) -> None:
        version = self.database.version()
        if version != self._version or len(self._identities) >= MAX_CACHED_IDENTITIES:
            self._identities.clear()
            self._version = version

    def _load(self, secret: str) -> Identity | None:
        with self.database.read() as connection:
            if secret.startswith(SESSION_PREFIX):
                return self.sessions.find(connection, secret)
            return accounts.find_identity(connection, secret)


ADDRESS_FACTOR = 5
"""How many times the failures of one beginning an address may have in all."""
PRINTABLE_PREFIX_LENGTH = 12
"""How many characters of a secret tell it from others; a token has 35 more."""


@dataclass(frozen=True, slots=True)
class FailedLoginLimiter:
    """Failed logins of each address and beginning, and of each address."""

    _per_secret_prefix: RateLimiter
    _per_address: RateLimiter

    @classmethod
    def create(cls, per_minute: int, clock: Callable[[], float]) -> "FailedLoginLimiter":
        """Allow so many failures per minute of one beginning at one address."""
        return cls(RateLimiter(per_minute, clock), RateLimiter(ADDRESS_FACTOR * per_minute, clock))

    def wait(self, address: str, secret: str | None) -> int:
        """Return the seconds until such a failure may happen again, 0 when it may now."""
        alike = self._per_secret_prefix.get_wait(_failure_key(address, secret))
        return max(alike, self._per_address.get_wait(address))

    def count(self, address: str, secret: str | None) -> None:
        """Count one failure."""
        self._per_secret_prefix.take(_failure_key(address, secret))
        self._per_address.take(address)


def extract_printable_prefix(secret: str | None) -> str:
    """Return what may be shown of a wrong secret: nothing unless it looks like one of ours."""
    known = secret is not None and secret.startswith(
        (accounts.TOKEN_PREFIX, accounts.SESSION_PREFIX)
    )
    return secret[:PRINTABLE_PREFIX_LENGTH] if secret is not None and known else ""


def _failure_key(address: str, secret: str | None) -> str:
    return f"{address} {extract_printable_prefix(secret)}"


LOGIN_REFUSED = "login.refused"
CHANGE_REFUSED = "change.refused"
MAX_REFUSALS_PER_MINUTE = 20
"""Of each kind, `LOGIN` and `CHANGE_REFUSED`, by one process."""
_WRITE_METHODS = {"PUT", "POST", "PATCH", "DELETE"}
_NEGOTIATION_STATUSES = {401, 408, 416, 421, 429}
"""Statuses that clients meet on their way: a challenge, a wrong offset, a limit, a broken body."""
_DISK_FULL = 507


class RefusalLog:
    """Writes down what was refused; its methods block, so async code calls them in threads."""

    def __init__(self, database: Database, clock: Callable[[], float]) -> None:
        """Begin with nothing refused."""
        self._database = database
        self._per_event = RateLimiter(1, clock)
        self._per_action = RateLimiter(MAX_REFUSALS_PER_MINUTE, clock)
        self._suppressed = 0
        self._lock = threading.Lock()

    def record_failed_login(self, address: str, secret: str | None) -> None:
        """Write down that a secret was refused; of the secret, only its beginning."""
        target = extract_printable_prefix(secret) or "not a token of this registry"
        self._write(Identity(address=address), LOGIN_REFUSED, target, "")

    def record_refused_change(
        self, identity: Identity, *, method: str, path: str, status: int
    ) -> None:
        """Write down that somebody known could not make a change."""
        if is_refused_write(method, status) and identity.token_id is not None:
            self._write(identity, CHANGE_REFUSED, path, f"{method}: {status}")

    def _write(self, identity: Identity, action: str, target: str, detail: str) -> None:
        who = identity.token_id or identity.address
        with self._lock:
            alike = f"{who} {action} {target} {detail}"
            if self._per_action.get_wait(action) or self._per_event.take(
                alike
            ):  # bounds what is remembered
                self._suppressed += 1
                return
            self._per_action.take(action)
            unwritten, self._suppressed = self._suppressed, 0
        more = f"{unwritten} refusals before this one were not written down" if unwritten else ""
        text = "; ".join(part for part in (detail, more) if part)
        with suppress(StoreError, DiskFullError), self._database.write_relaxed() as connection:
            rights.write_audit_row(connection, identity, action, target, text)


def is_refused_write(method: str, status: int) -> bool:
    """Tell whether an answer refuses a change."""
    refused = 400 <= status < 500 and status not in _NEGOTIATION_STATUSES
    return method in _WRITE_METHODS and (refused or status == _DISK_FULL)
