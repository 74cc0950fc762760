"""Users, namespaces and their publisher keys, as a registry keeps them."""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from expertctl.errors import NotFoundError, UsageError
from expertctl.reference import NAME_PATTERN
from expertctl.registry.answers import answer, pages
from expertctl.registry.api_client import ApiClient
from expertctl.registry.key_statement import sign_statement
from expertctl.schema.strict_json import JsonObject
from expertctl.trust.keys import KeyRing, PrivateKey, PublicKey, read_pem

MAX_NAME = 64
_NAME = re.compile(NAME_PATTERN)

Role = Literal["owner", "publisher"]
Read = Literal["public", "token"]


@dataclass(frozen=True, slots=True)
class User:
    """Somebody with an account."""

    name: str
    admin: bool = False
    created: str | None = None


@dataclass(frozen=True, slots=True)
class NewUser:
    """A user who was just made, with the first token, which is shown once."""

    user: User
    token: str


@dataclass(frozen=True, slots=True)
class NamespaceKey:
    """A key that may sign the packages of a namespace, or could once."""

    key_id: str
    public_key: str = ""
    revoked: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True)
class AddedKey:
    """A key that was just added, and what the registry has to say about that."""

    key_id: str
    vouched_by: str | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Namespace:
    """A namespace: who may publish, with which keys, and how much room there is."""

    name: str
    kind: str = "expert"
    read: str = "token"
    quota: int | None = None
    used: int = 0
    owners: tuple[str, ...] = ()
    publishers: tuple[str, ...] = ()
    keys: tuple[NamespaceKey, ...] = ()

    def key(self, key_id: str) -> NamespaceKey | None:
        """Return one of its keys."""
        return next((key for key in self.keys if key.key_id == key_id), None)


@dataclass(frozen=True, slots=True)
class _Users:
    users: tuple[User, ...]
    next: str | None = None


@dataclass(frozen=True, slots=True)
class _Namespaces:
    namespaces: tuple[Namespace, ...]
    next: str | None = None


def users(api: ApiClient) -> list[User]:
    """Return everybody who has an account."""
    return [each for page in pages(api, "users", _Users) for each in page.users]


def add_user(api: ApiClient, name: str, *, admin: bool) -> NewUser:
    """Make a user with a first token."""
    made = api.post("users", {"name": _named(name), "admin": admin})
    return answer(made, NewUser, host=_host(api))


def remove_user(api: ApiClient, name: str) -> None:
    """Let a user in no longer; the name is never given to another."""
    api.delete(f"users/{_named(name)}")


def namespaces(api: ApiClient) -> list[Namespace]:
    """Return the namespaces that the user may see."""
    return [each for page in pages(api, "namespaces", _Namespaces) for each in page.namespaces]


def namespace(api: ApiClient, name: str) -> Namespace:
    """Return one namespace.

    Raises:
        NotFoundError: when there is none that the user may see.
    """
    return answer(api.get(f"namespaces/{_named(name)}"), Namespace, host=_host(api))


def add_namespace(api: ApiClient, name: str, options: JsonObject) -> Namespace:
    """Make a namespace."""
    made = api.post("namespaces", {"name": _named(name), **options})
    return answer(made, Namespace, host=_host(api))


def set_namespace(api: ApiClient, name: str, options: JsonObject) -> Namespace:
    """Change who may read a namespace, or its quota."""
    path = f"namespaces/{_named(name)}"
    return answer(api.patch(path, options), Namespace, host=_host(api))


def add_member(api: ApiClient, name: str, user: str, role: Role) -> None:
    """Let a user publish in a namespace, or manage it."""
    api.put(_member(name, user), {"role": role})


def remove_member(api: ApiClient, name: str, user: str) -> None:
    """Take from a user all rights in a namespace."""
    api.delete(_member(name, user))


def find_key(ring: KeyRing, text: str) -> PublicKey:
    """Return the public half of an own key, or what a file holds.

    Raises:
        NotFoundError: when neither is called so.
        InvalidPackageError: when the file holds something else.
    """
    if text in ring.names():
        return ring.public(text)
    if not Path(text).exists():
        hint = "`expertctl keys list` shows your keys; a public key comes as a PEM file"
        raise NotFoundError(f"no key of yours and no file is called {text[:80]!r}", hint=hint)
    return PublicKey.from_pem(read_pem(Path(text)), what=text)


def vouching(found: Namespace, ring: KeyRing, new: PublicKey) -> PrivateKey | None:
    """Return an own key that counts in the namespace already, and so can vouch for another."""
    live = {key.key_id for key in found.keys if not key.revoked} - {new.key_id}
    name = next((name for name in ring.names() if ring.public(name).key_id in live), None)
    return ring.private(name) if name is not None else None


def add_key(api: ApiClient, name: str, key: PublicKey, *, by: PrivateKey | None) -> AddedKey:
    """Let a key sign packages of a namespace; ``by`` is an older key that vouches for it."""
    statement = sign_statement(namespace=name, new=key, by=by) if by is not None else None
    vouched = base64.b64encode(statement).decode("ascii") if statement is not None else None
    body: JsonObject = {"public_key": key.pem().decode("ascii"), "statement": vouched}
    document = api.post(f"namespaces/{_named(name)}/keys", body)
    return answer(document, AddedKey, host=_host(api))


def revoke_key(api: ApiClient, name: str, key_id: str, *, reason: str) -> None:
    """Let a key sign nothing more, and tell everybody who installs from the namespace."""
    api.delete(f"namespaces/{_named(name)}/keys/{quote(key_id)}", {"reason": reason})


def _host(api: ApiClient) -> str:
    return api.address.host


def _member(name: str, user: str) -> str:
    return f"namespaces/{_named(name)}/members/{_named(user)}"


def _named(text: str) -> str:
    """Return a name as a segment of a path, once it is one.

    Raises:
        UsageError: for anything else.
    """
    if not (_NAME.fullmatch(text) and len(text) <= MAX_NAME):
        hint = "lower-case letters, digits and single dashes, at most 64"
        raise UsageError(f"{text[:80]!r} is not the name of a user or namespace", hint=hint)
    return text
