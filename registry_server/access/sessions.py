"""Session tokens: what ``/token`` gives to container clients; five minutes, a few repositories.

A session token names the token that it was made with and carries its own scopes and end, under a
MAC. Nothing of it is stored. It grants no more than that token does now: when the token is revoked
or its user removed, the session ends. The MAC key is derived from the index key, so that all
workers have the same one and the database alone is of no use for making sessions.
"""

import base64
import binascii
import hashlib
import hmac
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from sqlalchemy import Connection

from expertctl.errors import UsageError
from expertctl.trust.keys import PrivateKey
from registry_server.access import tokens
from registry_server.access.identity import ANONYMOUS, Identity, Scope

PREFIX = "xps_"
SECONDS = 300
MAX_LENGTH = 12_000
_MAC = hashlib.sha256
_MAC_BYTES = 32
_ENCODED_MAC = 43


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Makes and reads session tokens."""

    _key: bytes

    @classmethod
    def derive(cls, key: PrivateKey) -> "SessionKey":
        """Return the key for sessions that belongs to an index key."""
        derivation = HKDF(hashes.SHA256(), _MAC_BYTES, salt=None, info=b"expertctl session v1")
        return cls(derivation.derive(key.pem()))

    def __repr__(self) -> str:
        """Return a text without the key."""
        return "SessionKey()"

    def issue(self, identity: Identity, scopes: Sequence[Scope]) -> str:
        """Return a session of this identity with these scopes."""
        ends = time.time() + SECONDS
        ends = ends if identity.expires is None else min(ends, identity.expires)
        fields = [identity.token_id, [str(scope) for scope in scopes], ends]
        payload = _encoded(json.dumps(fields, separators=(",", ":")).encode("ascii"))
        return f"{PREFIX}{payload}.{_encoded(self._mac(payload))}"

    def find(self, connection: Connection, secret: str) -> Identity | None:
        """Return whom a session stands for now; None for anything that is not a living one."""
        if not self.made(secret):
            return None
        payload = secret.removeprefix(PREFIX).partition(".")[0]
        token_id, scopes, ends = json.loads(_decoded(payload))
        if ends <= time.time():
            return None
        parent = ANONYMOUS if token_id is None else tokens.find_by_id(connection, token_id)
        if parent is None:
            return None
        return replace(parent, scopes=tuple(Scope.parse(s) for s in scopes), expires=ends)

    def made(self, secret: str) -> bool:
        """Tell whether this key made a session, which may have ended."""
        payload, dot, mac = secret.removeprefix(PREFIX).partition(".")
        fits = secret.startswith(PREFIX) and len(secret) <= MAX_LENGTH and secret.isascii()
        return fits and bool(dot) and len(mac) == _ENCODED_MAC and self._authentic(payload, mac)

    def _mac(self, payload: str) -> bytes:
        return hmac.digest(self._key, payload.encode("ascii"), _MAC)

    def _authentic(self, payload: str, mac: str) -> bool:
        try:
            return hmac.compare_digest(_decoded(mac), self._mac(payload))
        except (ValueError, binascii.Error):
            return False


def asked_scopes(texts: Sequence[str]) -> list[Scope]:
    """Read the ``scope`` parameters of the docker token protocol, leaving out what is unknown.

    ``repository:acme/sql:pull,push`` asks to read and to push there.
    """
    words = [word for text in texts for word in text.split(" ") if word]
    if len(words) > tokens.MAX_SCOPES or sum(map(len, words)) > MAX_LENGTH // 2:
        raise UsageError("too many scopes are asked for")
    return [scope for word in words for scope in _of_repository(word)]


_ACTIONS: dict[str, tuple[str, ...]] = {
    "pull": ("read",),
    "push": ("push",),
    "delete": ("delete",),
    "*": ("read", "push", "delete"),
}


def _of_repository(word: str) -> list[Scope]:
    kind, _, rest = word.partition(":")
    name, _, actions = rest.rpartition(":")
    if kind != "repository" or "/" not in name:
        return []
    asked = {known for action in actions.split(",") for known in _ACTIONS.get(action, ())}
    try:
        return [Scope.parse(f"{action}:{name}") for action in sorted(asked)]
    except UsageError:
        return []


def _encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode("ascii")


def _decoded(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
