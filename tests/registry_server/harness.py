"""A registry in a folder, its application, and clients in process: what server tests stand on.

Somebody who asks.

A client of the API that gives back statuses and JSON.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from sqlalchemy import Connection, Dialect, Engine
from starlette.applications import Starlette
from starlette.testclient import TestClient

from registry_server.access import accounts, namespaces
from registry_server.access.rights import Identity, TokenScope, list_all_scopes
from registry_server.app import build_app
from registry_server.database.connection import Database
from registry_server.registry import Registry, create_index_key, open_registry
from registry_server.settings import RegistryLimits, ServerSettings

URL = "http://127.0.0.1:8080"


@dataclass
class RegistryHarness:
    """One open registry and what talks to it without sockets."""

    registry: Registry
    app: Starlette
    clients: list[TestClient] = field(default_factory=list)

    @property
    def settings(self) -> ServerSettings:
        return self.registry.settings

    def client(self, secret: str | None = None, *, raises: bool = True) -> TestClient:
        """A client with a token, or with none; `raises` shows the server's own bugs."""
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        client = TestClient(self.app, base_url=URL, headers=headers, raise_server_exceptions=raises)
        client.follow_redirects = False
        self.clients.append(client)
        return client

    def create_user(
        self, name: str, *, admin: bool = False, scopes: tuple[TokenScope, ...] = ()
    ) -> str:
        """Make a user and return the secret of a token."""
        with self.registry.database.write() as connection:
            user = accounts.create_user(connection, name, admin=admin)
            given = scopes or list_all_scopes(admin=admin)
            return accounts.create_token(connection, user, name="test", scopes=given).secret

    def create_token(self, name: str, *scopes: TokenScope, expires: float | None = None) -> str:
        """Make another token for a user and return its secret."""
        with self.registry.database.write() as connection:
            user = accounts.get_user(connection, name)
            given = scopes or list_all_scopes(admin=user.admin)
            return accounts.create_token(
                connection, user, name="more", scopes=given, expires=expires
            ).secret

    def create_namespace(
        self,
        name: str,
        *,
        kind: str = "oci",
        read: str = "token",
        quota: int | None = None,
        owner: str | None = None,
        publisher: str | None = None,
    ) -> int:
        """Make a namespace with these members and return its row's id."""
        with self.registry.database.write() as connection:
            row = namespaces.create_namespace(connection, name, kind=kind, read=read, quota=quota)
            for user, role in ((owner, "owner"), (publisher, "publisher")):
                if user is not None:
                    namespaces.set_member(connection, row, user, role)
            return row.id

    def authenticate(self, secret: str) -> Identity:
        """Who a token says one is."""
        with self.registry.database.read() as connection:
            found = accounts.find_identity(connection, secret)
        assert found is not None
        return found

    def reopen(self) -> "RegistryHarness":
        """The same data folder, opened anew, as after a restart."""
        self.registry.close()
        return open_harness(self.settings)

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.registry.close()


def open_harness(settings: ServerSettings) -> RegistryHarness:
    """Open a registry that is there, with its application."""
    registry = open_registry(settings)
    _share_statements(registry.database._engine)
    return RegistryHarness(registry, build_app(registry))


_STATEMENTS: list[tuple[Dialect, Any]] = []


def _share_statements(engine: Engine) -> None:
    """Compile each statement once for all registries; that takes longer than to run it."""
    if not _STATEMENTS:
        _STATEMENTS.append((engine.dialect, engine._compiled_cache))
    engine.dialect, engine._compiled_cache = _STATEMENTS[0]


def make_settings(folder: Path, **limits: float) -> ServerSettings:
    """Settings of a registry in a folder; names of `Limits` change them."""
    known = {name: type(getattr(RegistryLimits(), name))(value) for name, value in limits.items()}
    return ServerSettings(data=folder, limits=replace(RegistryLimits(), **known))


def create_registry(settings: ServerSettings) -> RegistryHarness:
    """Make a registry in an empty folder."""
    settings.data.mkdir(mode=0o700, parents=True)
    create_index_key(settings.index_key)
    settings.database.write_bytes(_make_empty_database())
    return open_harness(settings)


@cache
def _make_empty_database() -> bytes:
    """The file that the migrations make, which take longer than most tests."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        Database.open(path).close()
        return path.read_bytes()


def create_identity(
    connection: Connection, name: str, *scopes: str, admin: bool = False
) -> Identity:
    """Make a user, where there is none, with a token of these scopes; return who that is."""
    known = {user.name for user in accounts.list_users(connection, limit=1000)}
    if name not in known:
        accounts.create_user(connection, name, admin=admin)
    user = accounts.get_user(connection, name)
    limits = tuple(map(TokenScope.parse, scopes)) or list_all_scopes(admin=user.admin)
    minted = accounts.create_token(connection, user, name="test", scopes=limits)
    found = accounts.find_identity(connection, minted.secret)
    assert found is not None
    return found


Publish = Callable[..., None]


@dataclass(frozen=True)
class JsonApiClient:
    """A client of the API; each method returns the status and the JSON of the answer."""

    client: TestClient

    def __call__(self, method: str, path: str, body: object = None) -> tuple[int, Any]:
        answer = self.client.request(method, f"/api/v1/{path}", json=body)
        return answer.status_code, answer.json() if answer.content else {}
