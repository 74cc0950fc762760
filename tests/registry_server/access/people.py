"""Somebody who asks."""

from sqlalchemy import Connection

from registry_server.access import tokens, users
from registry_server.access.identity import Identity, Scope, all_scopes


def identity_of(connection: Connection, name: str, *scopes: str, admin: bool = False) -> Identity:
    """Make a user, where there is none, with a token of these scopes; return who that is."""
    known = {user.name for user in users.listed(connection, limit=1000)}
    if name not in known:
        users.create(connection, name, admin=admin)
    user = users.get(connection, name)
    limits = tuple(map(Scope.parse, scopes)) or all_scopes(admin=user.admin)
    minted = tokens.create(connection, user, name="test", scopes=limits)
    found = tokens.find(connection, minted.secret)
    assert found is not None
    return found
