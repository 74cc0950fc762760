"""Logins of the web pages: their cookies, their rows, and the keys of their forms.

A browser logs in with a token, and gets a cookie with 256 random bits; the database stores the
sha256 of it. A session has the rights of its token, ends after `MAX_SECONDS`, and ends at once when
the token is revoked or expires, when its user is removed, or on logout.

Only the pages accept the cookie; the API, ``/v2/`` and ``/token`` ignore it. It is ``HttpOnly`` and
``SameSite=Strict``. If the public URL is https, it is ``Secure`` too, and its name begins with
``__Host-``, which browsers accept only for the whole host and over TLS.

Every form contains a key derived from a cookie of the browser, so that only pages of this registry
can send one. The login form, which comes before the session, uses a cookie of its own.
`LimitsMiddleware` also refuses forms with the ``Origin`` of another site.
"""

import hmac
import re
import secrets
import time
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import urlsplit

from sqlalchemy import Connection, delete, insert, select
from starlette.requests import HTTPConnection
from starlette.responses import Response

from expertctl.errors import ForbiddenError
from registry_server.access.accounts import find_identity_by_id, hash_secret
from registry_server.access.rights import Identity
from registry_server.database.tables import BROWSER_SESSIONS
from registry_server.settings import ServerSettings

MAX_SECONDS = 12 * 3600
"""How long a login of the pages lasts, in seconds."""
MAX_PER_TOKEN = 20
"""Maximum logins with one token at the same time; another one ends the oldest."""
_SECRET_LENGTH = 43
_SECRET_SYNTAX = re.compile(rf"[A-Za-z0-9_-]{{{_SECRET_LENGTH}}}")


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A login of the pages with the rights of its token; it expires no later than the token."""

    identity: Identity
    expires: float


def start_session(connection: Connection, token_id: str) -> str:
    """Start a session with the rights of a token, and return the value of its cookie."""
    now, secret = time.time(), secrets.token_urlsafe(32)
    connection.execute(delete(BROWSER_SESSIONS).where(BROWSER_SESSIONS.c.expires <= now))
    own = select(BROWSER_SESSIONS.c.hash).where(BROWSER_SESSIONS.c.token_id == token_id)
    oldest = own.order_by(BROWSER_SESSIONS.c.created.desc()).offset(MAX_PER_TOKEN - 1)
    connection.execute(delete(BROWSER_SESSIONS).where(BROWSER_SESSIONS.c.hash.in_(oldest)))
    values = {"token_id": token_id, "created": now, "expires": now + MAX_SECONDS}
    connection.execute(insert(BROWSER_SESSIONS).values(hash=hash_secret(secret), **values))
    return secret


def find_session(connection: Connection, secret: str) -> BrowserSession | None:
    """Return the session that the value of a cookie belongs to; None unless it is valid."""
    query = select(BROWSER_SESSIONS.c.token_id, BROWSER_SESSIONS.c.expires)
    row = connection.execute(query.where(BROWSER_SESSIONS.c.hash == hash_secret(secret))).first()
    if row is None or row.expires <= time.time():
        return None
    identity = find_identity_by_id(connection, row.token_id)
    if identity is None:
        return None
    ends = row.expires if identity.expires is None else min(row.expires, identity.expires)
    return BrowserSession(identity, ends)


def end_session(connection: Connection, secret: str) -> None:
    """End a session at once."""
    own = BROWSER_SESSIONS.c.hash == hash_secret(secret)
    connection.execute(delete(BROWSER_SESSIONS).where(own))


def read_session_cookie(request: HTTPConnection, settings: ServerSettings) -> str | None:
    """Return the value of the session cookie; None if there is none of the right form."""
    return _read_cookie(request, _cookie_name(settings, "session"))


def set_session_cookie(response: Response, settings: ServerSettings, secret: str) -> None:
    """Give the browser a session; the cookie of the login form is no longer needed."""
    _set_cookie(response, settings, "session", secret, seconds=MAX_SECONDS)
    _set_cookie(response, settings, "form", "", seconds=0)


def delete_session_cookie(response: Response, settings: ServerSettings) -> None:
    """Make the browser forget its session."""
    _set_cookie(response, settings, "session", "", seconds=0)


@dataclass(frozen=True, slots=True)
class FormKey:
    """What the key in the forms of a browser is derived from."""

    secret: str
    is_new: bool
    """Whether the browser does not have the secret yet; `set_cookie` gives it."""

    @classmethod
    def read_session(cls, request: HTTPConnection) -> "FormKey":
        """Return the session of the browser."""
        return cls._make(request.scope.get("state", {}).get("session"))

    @classmethod
    def read_login(cls, request: HTTPConnection, settings: ServerSettings) -> "FormKey":
        """Return the cookie of the login form.

        A browser may show that form although it has a session: it does not send the cookie of the
        session with a link from another site.
        """
        return cls._make(_read_cookie(request, _cookie_name(settings, "form")))

    @classmethod
    def _make(cls, known: str | None) -> "FormKey":
        return cls(known or secrets.token_urlsafe(32), known is None)

    def derive(self) -> str:
        """Return the key that a form must contain."""
        return hmac.new(self.secret.encode("ascii"), b"form", sha256).hexdigest()

    def set_cookie(self, response: Response, settings: ServerSettings) -> None:
        """Give the browser the secret of the login form for another hour."""
        _set_cookie(response, settings, "form", self.secret, seconds=3600)

    def check(self, given: str) -> None:
        """Check the key of a form.

        Raises:
            ForbiddenError: when a page of this browser's session did not contain the form.
        """
        expected = self.derive().encode("ascii")
        if self.is_new or not hmac.compare_digest(expected, given.encode("utf-8", "replace")):
            hint = "go back, load the page again and repeat it; the pages need cookies"
            raise ForbiddenError("this form is too old, or of another login", hint=hint)


def _cookie_name(settings: ServerSettings, purpose: str) -> str:
    """Return a name that a registry on another port of the same host does not use."""
    port = urlsplit(settings.public_url).port
    prefix, suffix = "__Host-" if settings.is_encrypted else "", f"-{port}" if port else ""
    return f"{prefix}expertctl-{purpose}{suffix}"


def _read_cookie(request: HTTPConnection, name: str) -> str | None:
    value = request.cookies.get(name, "")
    return value if _SECRET_SYNTAX.fullmatch(value) else None


def _set_cookie(
    response: Response, settings: ServerSettings, purpose: str, value: str, *, seconds: int
) -> None:
    response.set_cookie(
        _cookie_name(settings, purpose),
        value,
        max_age=seconds,
        path="/",
        secure=settings.is_encrypted,
        httponly=True,
        samesite="strict",
    )
