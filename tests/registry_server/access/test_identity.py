import pytest

from expertctl.errors import UsageError
from registry_server.access.rights import ANONYMOUS, Action, Identity, TokenScope, list_all_scopes


@pytest.mark.parametrize(
    "text",
    ["read", "admin", "push:acme", "push:acme/sql", "delete:acme/a/b.c_d", "yank:a-1/b", "manage"],
)
def test_a_scope_reads_as_it_was_written(text: str) -> None:
    assert str(TokenScope.parse(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "write",
        "READ",
        "read:",
        "read:Acme",
        "read:acme/",
        "read:acme/../x",
        "read:acme//x",
        "read:*",
        "read:acme ",
        "read:acme\n",
        "admin:acme",
        "read:a_b",
        "push:" + "a" * 400,
    ],
)
def test_what_is_no_scope_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="is not a scope"):
        TokenScope.parse(text)


@pytest.mark.parametrize(
    ("scope", "action", "namespace", "package", "covered"),
    [
        ("admin", Action.ADMIN, None, None, True),
        ("admin", Action.PUSH, "acme", "sql", True),
        ("push", Action.PUSH, "acme", "sql", True),
        ("push", Action.READ, "acme", "sql", True),
        ("push", Action.YANK, "acme", "sql", False),
        ("push", Action.ADMIN, None, None, False),
        ("read", Action.PUSH, "acme", "sql", False),
        ("push:acme", Action.PUSH, "acme", "sql", True),
        ("push:acme", Action.PUSH, "acme", None, True),
        ("push:acme", Action.PUSH, "other", "sql", False),
        ("push:acme", Action.PUSH, None, None, False),
        ("push:acme/sql", Action.PUSH, "acme", "sql", True),
        ("push:acme/sql", Action.READ, "acme", "sql", True),
        ("push:acme/sql", Action.PUSH, "acme", "sql2", False),
        ("push:acme/sql", Action.PUSH, "acme", "sql/more", False),
        ("push:acme/sql", Action.PUSH, "acme", None, False),
        ("push:acme/sql", Action.PUSH, "acme", "", False),
    ],
)
def test_a_scope_covers_its_place_and_reading_there(
    scope: str, action: Action, namespace: str | None, package: str | None, covered: bool
) -> None:
    assert TokenScope.parse(scope).covers(action, namespace, package) is covered


def test_who_has_no_scope_covers_nothing() -> None:
    assert not ANONYMOUS.covers(Action.READ, None)
    identity = Identity(1, "bob", scopes=list_all_scopes(admin=False))
    assert identity.covers(Action.MANAGE, None)
    assert not identity.covers(Action.ADMIN, None)
    assert Identity(1, "bob", scopes=list_all_scopes(admin=True)).covers(Action.ADMIN, None)
