"""Accounts of a registry: users, namespaces, publisher keys, access tokens and login.

A secret, of a token or of a new user, is returned once and stored nowhere here.
"""

import base64
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from expertctl.errors import (
    ForbiddenError,
    NotFoundError,
    Notify,
    UnauthenticatedError,
    UsageError,
    sanitise_text,
)
from expertctl.reference import NAME_PATTERN
from expertctl.registry.address import RegistryAddress
from expertctl.registry.client import (
    ApiClient,
    OciClient,
    has_expert_api,
    iterate_pages,
    parse_answer,
)
from expertctl.registry.credentials import Credential, UnsavedCredential
from expertctl.registry.http import open_http
from expertctl.schema.strict_json import JsonObject
from expertctl.settings import Settings
from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.keys import KeyRing, PrivateKey, PublicKey, read_pem

_ID = re.compile(r"[0-9a-f]{1,64}")
_SCOPE = re.compile(
    rf"admin|(read|push|delete|yank|manage)(:{NAME_PATTERN}(/[a-z0-9]+([._/-]+[a-z0-9]+)*)?)?"
)
_LIFETIME = re.compile(r"([1-9][0-9]{0,4})([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclass(frozen=True, slots=True)
class AccessToken:
    """A token as it is listed: without its secret."""

    id: str
    name: str
    scopes: tuple[str, ...] = ()
    created: str | None = None
    expires: str | None = None
    last_used: str | None = None


@dataclass(frozen=True, slots=True)
class TokenWithSecret(AccessToken):
    """A token with its secret, which the registry returns only once."""

    token: str = ""


@dataclass(frozen=True, slots=True)
class _TokenPage:
    tokens: tuple[AccessToken, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class LoginIdentity:
    """The user that the registry recognises."""

    user: str | None
    admin: bool = False
    token: AccessToken | None = None


def parse_lifetime(text: str) -> int:
    """Parse the lifetime of a token, such as ``90d``; return seconds.

    Raises:
        UsageError: for anything else.
    """
    match = _LIFETIME.fullmatch(text)
    if match is None:
        raise UsageError(f"{text[:40]!r} is not a lifetime", hint="write 90d, 12h or 2w")
    return int(match.group(1)) * _SECONDS[match.group(2)]


def fetch_identity(api: ApiClient) -> LoginIdentity:
    """Return the user that the registry recognises."""
    return parse_answer(api.get("whoami"), LoginIdentity, host=api.address.host)


def list_tokens(api: ApiClient) -> list[AccessToken]:
    """Return the user's live tokens."""
    return [each for page in iterate_pages(api, "tokens", _TokenPage) for each in page.tokens]


def create_token(
    api: ApiClient, name: str, *, scopes: list[str], lifetime: int | None
) -> TokenWithSecret:
    """Create a token with some scopes; without scopes it may do everything the user may.

    Raises:
        UsageError: when that is no scope.
    """
    for scope in scopes:
        if not _SCOPE.fullmatch(scope):
            hint = "write read, push:acme, push:acme/sql, yank:acme or admin"
            raise UsageError(f"{sanitise_text(scope, 80)!r} is not a scope", hint=hint)
    document = api.post("tokens", {"name": name, "scopes": list(scopes), "expires_in": lifetime})
    return parse_answer(document, TokenWithSecret, host=api.address.host)


def revoke_token(api: ApiClient, token_id: str) -> None:
    """Revoke a token.

    Raises:
        UsageError: when that is no id.
        NotFoundError: when there is none, or it is somebody else's.
    """
    if not _ID.fullmatch(token_id):
        hint = "`expertctl token list` shows the ids"
        raise UsageError("that is not a token id", hint=hint)  # perhaps the token itself
    api.delete(f"tokens/{token_id}")


MAX_NAME = 64
_NAME = re.compile(NAME_PATTERN)

Role = Literal["owner", "publisher"]
ReadAccess = Literal["public", "token"]


@dataclass(frozen=True, slots=True)
class RegistryUser:
    """A user with an account."""

    name: str
    admin: bool = False
    created: str | None = None


@dataclass(frozen=True, slots=True)
class UserWithToken:
    """A new user with the first token, which is returned only once."""

    user: RegistryUser
    token: str


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """A key that may sign the packages of a namespace, or could before it was revoked."""

    key_id: str
    public_key: str = ""
    revoked: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class KeyAddition:
    """A key that was just added, and the registry's remarks about it."""

    key_id: str
    vouched_by: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NamespaceDetails:
    """A namespace: its members, its keys, and its quota in bytes."""

    name: str
    kind: str = "expert"
    read: str = "token"
    quota: int | None = None
    used: int = 0
    owners: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    keys: tuple[NamespaceKey, ...] = ()

    def find_key(self, key_id: str) -> NamespaceKey | None:
        """Return one of its keys."""
        return next((key for key in self.keys if key.key_id == key_id), None)


@dataclass(frozen=True, slots=True)
class _UserPage:
    users: tuple[RegistryUser, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class _NamespacePage:
    namespaces: tuple[NamespaceDetails, ...]
    next: str | None = None


def list_users(api: ApiClient) -> list[RegistryUser]:
    """Return all users."""
    return [each for page in iterate_pages(api, "users", _UserPage) for each in page.users]


def create_user(api: ApiClient, name: str, *, admin: bool) -> UserWithToken:
    """Create a user with a first token."""
    made = api.post("users", {"name": _path_segment(name), "admin": admin})
    return parse_answer(made, UserWithToken, host=api.address.host)


def remove_user(api: ApiClient, name: str) -> None:
    """Remove a user; the name is never given to another."""
    api.delete(f"users/{_path_segment(name)}")


def list_namespaces(api: ApiClient) -> list[NamespaceDetails]:
    """Return the namespaces that the user may see."""
    return [
        each
        for page in iterate_pages(api, "namespaces", _NamespacePage)
        for each in page.namespaces
    ]


def fetch_namespace(api: ApiClient, name: str) -> NamespaceDetails:
    """Return one namespace.

    Raises:
        NotFoundError: when there is none that the user may see.
    """
    found = api.get(f"namespaces/{_path_segment(name)}")
    return parse_answer(found, NamespaceDetails, host=api.address.host)


def create_namespace(api: ApiClient, name: str, options: JsonObject) -> NamespaceDetails:
    """Create a namespace."""
    made = api.post("namespaces", {"name": _path_segment(name), **options})
    return parse_answer(made, NamespaceDetails, host=api.address.host)


def update_namespace(api: ApiClient, name: str, options: JsonObject) -> NamespaceDetails:
    """Change a namespace's read access or quota."""
    changed = api.patch(f"namespaces/{_path_segment(name)}", options)
    return parse_answer(changed, NamespaceDetails, host=api.address.host)


def add_member(api: ApiClient, name: str, user: str, role: Role) -> None:
    """Give a user a role in a namespace."""
    api.put(_member_path(name, user), {"role": role})


def remove_member(api: ApiClient, name: str, user: str) -> None:
    """Remove a user's role in a namespace."""
    api.delete(_member_path(name, user))


def read_public_key(ring: KeyRing, text: str) -> PublicKey:
    """Return the public half of an own key, or the key in a file.

    Raises:
        NotFoundError: when neither is called so.
        InvalidPackageError: when the file holds something else.
    """
    if text in ring.list_names():
        return ring.read_public(text)
    if not Path(text).exists():
        hint = "`expertctl keys list` shows your keys; a public key comes as a PEM file"
        raise NotFoundError(f"no key of yours and no file is called {text[:80]!r}", hint=hint)
    return PublicKey.from_pem(read_pem(Path(text)), what=text)


def find_vouching_key(found: NamespaceDetails, ring: KeyRing, new: PublicKey) -> PrivateKey | None:
    """Return an own key that is valid in the namespace already and so can vouch for another."""
    live = {key.key_id for key in found.keys if not key.revoked} - {new.key_id}
    name = next((name for name in ring.list_names() if ring.read_public(name).key_id in live), None)
    return ring.read_private(name) if name is not None else None


def add_key(api: ApiClient, name: str, key: PublicKey, *, by: PrivateKey | None) -> KeyAddition:
    """Allow a key to sign packages of a namespace; ``by`` is an older key that vouches for it."""
    statement = sign_key_statement(namespace=name, new=key, by=by) if by is not None else None
    vouched = base64.b64encode(statement).decode("ascii") if statement is not None else None
    body: JsonObject = {"public_key": key.pem().decode("ascii"), "statement": vouched}
    document = api.post(f"namespaces/{_path_segment(name)}/keys", body)
    return parse_answer(document, KeyAddition, host=api.address.host)


def revoke_key(api: ApiClient, name: str, key_id: str, *, reason: str) -> None:
    """Revoke a key for a namespace; clients learn it from the index."""
    api.delete(f"namespaces/{_path_segment(name)}/keys/{quote(key_id)}", {"reason": reason})


def _member_path(name: str, user: str) -> str:
    return f"namespaces/{_path_segment(name)}/members/{_path_segment(user)}"


def _path_segment(text: str) -> str:
    """Return a valid name as a segment of a path.

    Raises:
        UsageError: for anything else.
    """
    if not (_NAME.fullmatch(text) and len(text) <= MAX_NAME):
        hint = "lower-case letters, digits and single dashes, at most 64"
        raise UsageError(f"{text[:80]!r} is not the name of a user or namespace", hint=hint)
    return text


@dataclass(frozen=True, slots=True)
class LoginResult:
    """What a registry knows of the user."""

    address: RegistryAddress
    credential: Credential
    admin: bool = False
    token: AccessToken | None = None
    """What our own registry says about the token; other registries say nothing."""
    checked: bool = True
    """False where a registry admits anybody and so never checked the credential."""


def verify_login(
    settings: Settings,
    address: RegistryAddress,
    credential: Credential,
    environment: Mapping[str, str],
    *,
    notify: Notify | None = None,
) -> LoginResult:
    """Show a credential to its registry and return the user that it identifies.

    Raises:
        UnauthenticatedError: when the registry does not accept it.
        UnreachableError: when it cannot be asked.
    """
    with open_http(
        settings, UnsavedCredential(address, credential), environment, notify=notify
    ) as http:
        if has_expert_api(ApiClient(http, address)):
            return _fetch_login(ApiClient(http, address), credential)
        OciClient(http, address).ping()
        return LoginResult(address, credential, checked=http.has_authenticated(address))


def check_reachable(
    settings: Settings,
    address: RegistryAddress,
    environment: Mapping[str, str],
    *,
    notify: Notify | None = None,
) -> None:
    """Check that a registry answers, before the user is asked for a token.

    Raises:
        OfflineError: when the network is switched off.
        UnreachableError: when it cannot be asked.
    """
    with (
        open_http(settings, UnsavedCredential(address, None), environment, notify=notify) as http,
        suppress(UnauthenticatedError, ForbiddenError),
    ):
        if not has_expert_api(ApiClient(http, address)):
            OciClient(http, address).ping()


def _fetch_login(api: ApiClient, credential: Credential) -> LoginResult:
    found = fetch_identity(api)
    if found.user is None:
        message = f"{api.address.host}: the token is not known there"
        raise UnauthenticatedError(message, hint="make one with `expertctl token new`, or ask")
    known = Credential(found.user, credential.secret, credential.realm)
    return LoginResult(api.address, known, found.admin, found.token)
