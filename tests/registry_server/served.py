"""A registry in a folder, its application, and clients in process: what server tests stand on."""

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from starlette.applications import Starlette
from starlette.testclient import TestClient

from registry_server.access import namespaces, tokens, users
from registry_server.access.identity import Identity, Scope, all_scopes
from registry_server.app import app_of
from registry_server.database.connection import Database
from registry_server.publishing.index_key import create_index_key
from registry_server.registry import Registry, open_registry
from registry_server.settings import Limits, ServerSettings

URL = "http://127.0.0.1:8080"


@dataclass
class Served:
    """One open registry and what talks to it without sockets."""

    registry: Registry
    app: Starlette
    opened: list[TestClient] = field(default_factory=list)

    @property
    def settings(self) -> ServerSettings:
        return self.registry.settings

    def client(self, secret: str | None = None, *, raises: bool = True) -> TestClient:
        """A client with a token, or with none; `raises` shows the server's own bugs."""
        headers = {"Authorization": f"Bearer {secret}"} if secret else {}
        client = TestClient(self.app, base_url=URL, headers=headers, raise_server_exceptions=raises)
        client.follow_redirects = False
        self.opened.append(client)
        return client

    def user(self, name: str, *, admin: bool = False, scopes: tuple[Scope, ...] = ()) -> str:
        """Make a user and return the secret of a token."""
        with self.registry.database.write() as connection:
            user = users.create(connection, name, admin=admin)
            given = scopes or all_scopes(admin=admin)
            return tokens.create(connection, user, name="test", scopes=given).secret

    def token(self, name: str, *scopes: Scope, expires: float | None = None) -> str:
        """Make another token for a user and return its secret."""
        with self.registry.database.write() as connection:
            user = users.get(connection, name)
            given = scopes or all_scopes(admin=user.admin)
            return tokens.create(
                connection, user, name="more", scopes=given, expires=expires
            ).secret

    def namespace(
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
            row = namespaces.create(connection, name, kind=kind, read=read, quota=quota)
            for user, role in ((owner, "owner"), (publisher, "publisher")):
                if user is not None:
                    namespaces.set_member(connection, row, user, role)
            return row.id

    def identity(self, secret: str) -> Identity:
        """Who a token says one is."""
        with self.registry.database.read() as connection:
            found = tokens.find(connection, secret)
        assert found is not None
        return found

    def reopened(self) -> "Served":
        """The same data folder, opened anew, as after a restart."""
        self.registry.close()
        return serve(self.settings)

    def close(self) -> None:
        for client in self.opened:
            client.close()
        self.registry.close()


def serve(settings: ServerSettings) -> Served:
    """Open a registry that is there, with its application."""
    registry = open_registry(settings)
    return Served(registry, app_of(registry))


def new_settings(folder: Path, **limits: float) -> ServerSettings:
    """Settings of a registry in a folder; names of `Limits` change them."""
    known = {name: type(getattr(Limits(), name))(value) for name, value in limits.items()}
    return ServerSettings(data=folder, limits=replace(Limits(), **known))


def new_registry(settings: ServerSettings) -> Served:
    """Make a registry in an empty folder."""
    settings.data.mkdir(mode=0o700, parents=True)
    create_index_key(settings.index_key)
    settings.database.write_bytes(_empty_database())
    return serve(settings)


@cache
def _empty_database() -> bytes:
    """The file that the migrations make, which take longer than most tests."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "registry.db"
        Database.open(path).close()
        return path.read_bytes()
