import pytest
from sqlalchemy import Connection, true

from expertctl.errors import ConflictError, NotFoundError, UsageError
from registry_server.access import accounts, namespaces
from registry_server.access.namespaces import NamespaceRow


@pytest.fixture
def acme(connection: Connection) -> NamespaceRow:
    """A namespace with the owner Alice; Bob is there, and no member."""
    accounts.create_user(connection, "alice")
    accounts.create_user(connection, "bob")
    row = namespaces.create_namespace(connection, "acme", kind="expert", read="token")
    namespaces.set_member(connection, row, "alice", "owner")
    return row


def test_a_namespace_is_found_as_it_was_made(connection: Connection) -> None:
    made = namespaces.create_namespace(connection, "acme", kind="oci", read="public", quota=7)
    assert made == NamespaceRow(made.id, "acme", "oci", "public", 7)
    assert namespaces.find_namespace(connection, "acme") == made
    assert namespaces.find_namespace(connection, "other") is None
    with pytest.raises(NotFoundError, match="no namespace 'other'"):
        namespaces.get_namespace(connection, "other")


@pytest.mark.parametrize(
    "name", ["", "Acme", "a--b", "-a", "a_b", "a.b", "\uff41cme", "a" * 65, "a\n"]
)
def test_what_is_no_name_is_refused(connection: Connection, name: str) -> None:
    with pytest.raises(UsageError, match="is not a name for a namespace"):
        namespaces.create_namespace(connection, name, kind="expert", read="token")


@pytest.mark.parametrize("words", [("secret", "token"), ("expert", "everybody")])
def test_kind_and_readers_are_one_of_two_words(
    connection: Connection, words: tuple[str, str]
) -> None:
    with pytest.raises(UsageError):
        namespaces.create_namespace(connection, "acme", kind=words[0], read=words[1])


@pytest.mark.parametrize("name", ["api", "v2", "tuf", "admin", "adm1n", "tokens", "r00t"])
def test_attack_78_a_namespace_that_speaks_for_the_registry(
    connection: Connection, name: str
) -> None:
    with pytest.raises(ConflictError, match="reserved"):
        namespaces.create_namespace(connection, name, kind="expert", read="token")


@pytest.mark.parametrize("name", ["apple-1abs", "app1e-labs", "applelabs", "a-pple-labs"])
def test_attack_78_a_namespace_that_looks_like_another(connection: Connection, name: str) -> None:
    namespaces.create_namespace(connection, "apple-labs", kind="expert", read="token")
    with pytest.raises(ConflictError, match=r"looks like 'apple-labs', which is taken"):
        namespaces.create_namespace(connection, name, kind="expert", read="token")


def test_attack_78_a_namespace_that_is_taken(connection: Connection) -> None:
    namespaces.create_namespace(connection, "acme", kind="expert", read="token")
    with pytest.raises(ConflictError, match="the name 'acme' is taken"):
        namespaces.create_namespace(connection, "acme", kind="oci", read="token")


def test_namespaces_are_listed_by_name_in_pages(connection: Connection) -> None:
    for name in ("cc", "aa", "bb"):
        namespaces.create_namespace(connection, name, kind="expert", read="token")
    first = namespaces.list_namespaces(connection, true(), limit=2)
    assert [row.name for row in first] == ["aa", "bb"]
    rest = namespaces.list_namespaces(connection, true(), limit=2, after="bb")
    assert [row.name for row in rest] == ["cc"]


def test_readers_and_quota_can_change(connection: Connection, acme: NamespaceRow) -> None:
    namespaces.update_namespace(connection, acme, read="public", quota=9)
    assert namespaces.get_namespace(connection, "acme") == NamespaceRow(
        acme.id, "acme", "expert", "public", 9
    )


def test_a_member_has_one_role(connection: Connection, acme: NamespaceRow) -> None:
    namespaces.set_member(connection, acme, "bob", "publisher")
    assert namespaces.list_members(connection, acme.id) == {"alice": "owner", "bob": "publisher"}
    namespaces.set_member(connection, acme, "bob", "owner")
    namespaces.set_member(connection, acme, "alice", "publisher")
    assert namespaces.list_members(connection, acme.id) == {"alice": "publisher", "bob": "owner"}
    namespaces.remove_member(connection, acme, "alice")
    assert namespaces.list_members(connection, acme.id) == {"bob": "owner"}


def test_one_owner_stays(connection: Connection, acme: NamespaceRow) -> None:
    for take in (
        lambda: namespaces.set_member(connection, acme, "alice", "publisher"),
        lambda: namespaces.remove_member(connection, acme, "alice"),
    ):
        with pytest.raises(ConflictError, match="alice is the only owner of acme"):
            take()
    assert namespaces.list_solely_owned(connection, accounts.get_user(connection, "alice").id) == [
        "acme"
    ]
    namespaces.set_member(connection, acme, "bob", "owner")
    assert namespaces.list_solely_owned(connection, accounts.get_user(connection, "alice").id) == []


def test_only_users_have_roles(connection: Connection, acme: NamespaceRow) -> None:
    with pytest.raises(NotFoundError, match="no user 'eve'"):
        namespaces.set_member(connection, acme, "eve", "owner")
    with pytest.raises(UsageError, match="'king' is not a role"):
        namespaces.set_member(connection, acme, "bob", "king")
    with pytest.raises(NotFoundError, match="'bob' is not a member of acme"):
        namespaces.remove_member(connection, acme, "bob")
