import pytest
from sqlalchemy import Connection

from expertctl.errors import ConflictError, NotFoundError, UsageError
from registry_server.access import accounts, namespaces
from registry_server.access.rights import list_all_scopes


def test_users_are_listed_by_name_in_pages(connection: Connection) -> None:
    for name in ("carol", "alice", "bob"):
        accounts.create_user(connection, name)
    assert [u.name for u in accounts.list_users(connection, limit=2)] == ["alice", "bob"]
    assert [u.name for u in accounts.list_users(connection, limit=2, after="bob")] == ["carol"]


def test_what_is_no_name_is_refused(connection: Connection) -> None:
    with pytest.raises(UsageError, match="is not a name for a user"):
        accounts.create_user(connection, "Alice Smith")


def test_the_first_admin_alone_may_have_a_reserved_name(connection: Connection) -> None:
    assert accounts.create_user(connection, accounts.FIRST_ADMIN, admin=True).admin
    with pytest.raises(ConflictError, match="reserved"):
        accounts.create_user(connection, "administrator")


def test_attack_78_the_name_of_a_removed_user_is_never_free(connection: Connection) -> None:
    accounts.remove_user(connection, accounts.create_user(connection, "alice"))
    with pytest.raises(ConflictError, match="the name 'alice' is taken"):
        accounts.create_user(connection, "alice")


def test_attack_80_the_token_of_a_removed_user_is_dead_at_once(connection: Connection) -> None:
    user = accounts.create_user(connection, "alice")
    minted = accounts.create_token(connection, user, name="t", scopes=list_all_scopes(admin=False))
    assert accounts.find_identity(connection, minted.secret) is not None
    accounts.remove_user(connection, user)
    assert accounts.find_identity(connection, minted.secret) is None
    assert accounts.find_identity_by_id(connection, minted.token.id) is None
    with pytest.raises(NotFoundError, match="no user 'alice'"):
        accounts.get_user(connection, "alice")


def test_a_removed_user_has_no_role_left(connection: Connection) -> None:
    alice, bob = accounts.create_user(connection, "alice"), accounts.create_user(connection, "bob")
    row = namespaces.create_namespace(connection, "acme", kind="expert", read="token")
    namespaces.set_member(connection, row, "alice", "publisher")
    namespaces.set_member(connection, row, "bob", "owner")
    accounts.remove_user(connection, alice)
    assert namespaces.list_members(connection, row.id) == {"bob": "owner"}
    assert namespaces.find_role(connection, row.id, alice.id) is None
    with pytest.raises(ConflictError, match="bob is the only owner of acme"):
        accounts.remove_user(connection, bob)


def test_one_admin_stays(connection: Connection) -> None:
    boss = accounts.create_user(connection, "boss", admin=True)
    accounts.create_user(connection, "alice")
    with pytest.raises(ConflictError, match="boss is the only admin"):
        accounts.remove_user(connection, boss)
    accounts.create_user(connection, "second", admin=True)
    accounts.remove_user(connection, boss)
    assert [u.name for u in accounts.list_users(connection, limit=9)] == ["alice", "second"]
