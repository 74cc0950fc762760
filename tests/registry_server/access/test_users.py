import pytest
from sqlalchemy import Connection

from expertctl.errors import ConflictError, NotFoundError, UsageError
from registry_server.access import namespaces, tokens, users
from registry_server.access.identity import all_scopes


def test_users_are_listed_by_name_in_pages(connection: Connection) -> None:
    for name in ("carol", "alice", "bob"):
        users.create(connection, name)
    assert [u.name for u in users.listed(connection, limit=2)] == ["alice", "bob"]
    assert [u.name for u in users.listed(connection, limit=2, after="bob")] == ["carol"]


def test_what_is_no_name_is_refused(connection: Connection) -> None:
    with pytest.raises(UsageError, match="is not a name for a user"):
        users.create(connection, "Alice Smith")


def test_the_first_admin_alone_may_have_a_reserved_name(connection: Connection) -> None:
    assert users.create(connection, users.FIRST_ADMIN, admin=True).admin
    with pytest.raises(ConflictError, match="reserved"):
        users.create(connection, "administrator")


def test_attack_78_the_name_of_a_removed_user_is_never_free(connection: Connection) -> None:
    users.remove(connection, users.create(connection, "alice"))
    with pytest.raises(ConflictError, match="the name 'alice' is taken"):
        users.create(connection, "alice")


def test_attack_80_the_token_of_a_removed_user_is_dead_at_once(connection: Connection) -> None:
    user = users.create(connection, "alice")
    minted = tokens.create(connection, user, name="t", scopes=all_scopes(admin=False))
    assert tokens.find(connection, minted.secret) is not None
    users.remove(connection, user)
    assert tokens.find(connection, minted.secret) is None
    assert tokens.find_by_id(connection, minted.token.id) is None
    with pytest.raises(NotFoundError, match="no user 'alice'"):
        users.get(connection, "alice")


def test_a_removed_user_has_no_role_left(connection: Connection) -> None:
    alice, bob = users.create(connection, "alice"), users.create(connection, "bob")
    row = namespaces.create(connection, "acme", kind="expert", read="token")
    namespaces.set_member(connection, row, "alice", "publisher")
    namespaces.set_member(connection, row, "bob", "owner")
    users.remove(connection, alice)
    assert namespaces.members(connection, row.id) == {"bob": "owner"}
    assert namespaces.role(connection, row.id, alice.id) is None
    with pytest.raises(ConflictError, match="bob is the only owner of acme"):
        users.remove(connection, bob)


def test_one_admin_stays(connection: Connection) -> None:
    boss = users.create(connection, "boss", admin=True)
    users.create(connection, "alice")
    with pytest.raises(ConflictError, match="boss is the only admin"):
        users.remove(connection, boss)
    users.create(connection, "second", admin=True)
    users.remove(connection, boss)
    assert [u.name for u in users.listed(connection, limit=9)] == ["alice", "second"]
