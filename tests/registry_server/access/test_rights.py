import pytest
from sqlalchemy import Connection, select

from expertctl.errors import ForbiddenError, NotFoundError, UnauthenticatedError
from registry_server.access import namespaces, rights
from registry_server.access.rights import ANONYMOUS, Action, Identity
from registry_server.database.tables import NAMESPACES
from tests.registry_server.harness import create_identity

IN_NAMESPACES = [Action.READ, Action.PUSH, Action.DELETE, Action.YANK, Action.MANAGE]


@pytest.fixture(autouse=True)
def two_namespaces(connection: Connection) -> None:
    """``acme``, read with a token, with an owner and a publisher; ``open``, read by all."""
    for name in ("olga", "paul", "rita"):
        create_identity(connection, name)
    create_identity(connection, "boss", admin=True)
    acme = namespaces.create_namespace(connection, "acme", kind="expert", read="token")
    namespaces.set_member(connection, acme, "olga", "owner")
    namespaces.set_member(connection, acme, "paul", "publisher")
    namespaces.create_namespace(connection, "open", kind="expert", read="public")


def actions(connection: Connection, identity: Identity, namespace: str) -> list[Action]:
    allowed = []
    for action in IN_NAMESPACES:
        try:
            row = rights.authorise(connection, identity, action, namespace, "sql")
        except (UnauthenticatedError, ForbiddenError):
            continue
        assert row.name == namespace
        allowed.append(action)
    return allowed


@pytest.mark.parametrize(
    ("name", "acme", "open_"),
    [
        ("boss", IN_NAMESPACES, IN_NAMESPACES),
        ("olga", IN_NAMESPACES, [Action.READ]),
        ("paul", [Action.READ, Action.PUSH], [Action.READ]),
        ("rita", [Action.READ], [Action.READ]),
    ],
)
def test_a_role_gives_rights_in_its_namespace_alone(
    connection: Connection, name: str, acme: list[Action], open_: list[Action]
) -> None:
    identity = create_identity(connection, name)
    assert actions(connection, identity, "acme") == acme
    assert actions(connection, identity, "open") == open_


def test_nobody_may_read_what_is_public_and_nothing_else(connection: Connection) -> None:
    assert actions(connection, ANONYMOUS, "acme") == []
    assert actions(connection, ANONYMOUS, "open") == [Action.READ]
    with pytest.raises(UnauthenticatedError, match="needs a token"):
        rights.authorise(connection, ANONYMOUS, Action.PUSH, "open")


@pytest.mark.parametrize(
    ("scopes", "acme"),
    [
        (["read"], [Action.READ]),
        (["push:acme/sql"], [Action.READ, Action.PUSH]),
        (["push:acme/other"], []),
        (["push:open"], []),
        (["yank", "manage:acme"], [Action.READ, Action.YANK, Action.MANAGE]),
        (["admin"], IN_NAMESPACES),
    ],
)
def test_attack_80_a_scope_limits_what_the_role_gives(
    connection: Connection, scopes: list[str], acme: list[Action]
) -> None:
    assert actions(connection, create_identity(connection, "olga", *scopes), "acme") == acme


def test_a_scope_gives_no_right_that_the_role_has_not(connection: Connection) -> None:
    for name in ("paul", "rita"):
        identity = create_identity(connection, name, "yank:acme")
        with pytest.raises(ForbiddenError, match=f"{name} may not yank in acme"):
            rights.authorise(connection, identity, Action.YANK, "acme", "sql")


def test_no_token_allows_less_than_none(connection: Connection) -> None:
    identity = create_identity(connection, "rita", "push:acme/sql")
    assert actions(connection, identity, "open") == [Action.READ]


@pytest.mark.parametrize("scopes", [[], ["read"], ["push:acme"]])
@pytest.mark.parametrize("action", IN_NAMESPACES)
def test_whether_a_private_namespace_is_there_is_told_to_no_stranger(
    connection: Connection, scopes: list[str], action: Action
) -> None:
    """For nobody, and for a token that is for other places, there and not there are the same."""
    namespaces.create_namespace(connection, "hidden", kind="expert", read="token")
    strangers = [ANONYMOUS]
    if scopes == ["push:acme"]:
        strangers.append(create_identity(connection, "rita", *scopes))
    for identity in strangers:
        answers = []
        for name in ("hidden", "absent"):
            with pytest.raises((UnauthenticatedError, ForbiddenError)) as caught:
                rights.authorise(connection, identity, action, name)
            answers.append((type(caught.value), caught.value.message.replace(name, "NAME")))
        assert answers[0] == answers[1]


def test_who_may_read_everything_is_told_what_is_missing(connection: Connection) -> None:
    identity = create_identity(connection, "rita")
    with pytest.raises(NotFoundError, match="no namespace 'absent'"):
        rights.authorise(connection, identity, Action.READ, "absent")


def test_what_a_user_may_do_whatever_the_token(connection: Connection) -> None:
    acme, open_ = (namespaces.get_namespace(connection, name) for name in ("acme", "open"))
    paul = create_identity(connection, "paul", "read")
    assert rights.has_right(connection, paul, Action.PUSH, acme)
    assert not rights.has_right(connection, paul, Action.YANK, acme)
    assert rights.has_right(connection, ANONYMOUS, Action.READ, open_)
    assert not rights.has_right(connection, ANONYMOUS, Action.READ, acme)
    assert not rights.has_right(connection, ANONYMOUS, Action.PUSH, open_)


def test_only_an_admin_with_a_token_for_it_is_an_admin(connection: Connection) -> None:
    rights.require_right(create_identity(connection, "boss"), Action.ADMIN)
    with pytest.raises(UnauthenticatedError):
        rights.require_right(ANONYMOUS, Action.ADMIN)
    with pytest.raises(ForbiddenError, match="this token is not for admin"):
        rights.require_right(create_identity(connection, "boss", "read", "manage"), Action.ADMIN)
    with pytest.raises(ForbiddenError, match="olga is not an admin"):
        rights.require_right(create_identity(connection, "olga", "admin"), Action.ADMIN)


@pytest.mark.parametrize(
    ("scopes", "names"),
    [
        (["read"], ["acme", "open"]),
        (["admin"], ["acme", "open"]),
        (["push:acme"], ["acme", "open"]),
        (["push:acme/sql"], ["open"]),
        (["push:other"], ["open"]),
    ],
)
def test_lists_show_what_the_token_may_read(
    connection: Connection, scopes: list[str], names: list[str]
) -> None:
    def shown(identity: Identity) -> list[str]:
        query = (
            select(NAMESPACES.c.name).where(rights.build_readable_filter(identity)).order_by("name")
        )
        return list(connection.execute(query).scalars())

    assert shown(create_identity(connection, "rita", *scopes)) == names
    assert shown(ANONYMOUS) == ["open"]
