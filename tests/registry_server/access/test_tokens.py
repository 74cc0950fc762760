import hashlib
import re
import time

import pytest
from sqlalchemy import Connection, select, update

from expertctl.errors import ForbiddenError, NotFoundError, UsageError
from registry_server.access import accounts, namespaces
from registry_server.access.accounts import MintedToken
from registry_server.access.rights import Identity, TokenScope, list_all_scopes
from registry_server.database.tables import TOKENS
from tests.registry_server.harness import create_identity


def scopes(*texts: str) -> tuple[TokenScope, ...]:
    return tuple(map(TokenScope.parse, texts))


def minted_for(
    connection: Connection, identity: Identity, *texts: str, seconds: int | None = None
) -> MintedToken:
    user = accounts.get_user(connection, identity.name or "")
    return accounts.mint_token(
        connection, identity, user, name="ci", scopes=scopes(*texts), seconds=seconds
    )


@pytest.fixture
def bob(connection: Connection) -> Identity:
    """A user who publishes in ``acme``; there is another namespace, ``other``."""
    identity = create_identity(connection, "bob")
    for name in ("acme", "other"):
        namespaces.create_namespace(connection, name, kind="expert", read="token")
    namespaces.set_member(
        connection, namespaces.get_namespace(connection, "acme"), "bob", "publisher"
    )
    return identity


def test_a_secret_is_long_random_and_kept_as_its_hash_alone(connection: Connection) -> None:
    user = accounts.create_user(connection, "bob")
    minted = [accounts.create_token(connection, user, name="t", scopes=()) for _ in range(2)]
    first, second = (m.secret for m in minted)
    assert re.fullmatch(r"xpt_[A-Za-z0-9_-]{43}", first)
    assert first != second
    hashes = set(connection.execute(select(TOKENS.c.hash)).scalars())
    assert hashes == {hashlib.sha256(s.encode()).hexdigest() for s in (first, second)}
    everything = repr(connection.execute(select(TOKENS)).all())
    assert first not in everything
    assert first[4:] not in everything


def test_attack_80_a_secret_is_in_no_text_of_its_value(connection: Connection) -> None:
    user = accounts.create_user(connection, "bob")
    minted = accounts.create_token(connection, user, name="t", scopes=())
    assert minted.secret not in f"{minted} {minted!r} {minted.token!r}"


def test_a_secret_stands_for_its_user_with_its_scopes(connection: Connection) -> None:
    user = accounts.create_user(connection, "boss", admin=True)
    given = scopes("push:acme", "read")
    minted = accounts.create_token(connection, user, name="t", scopes=given, expires=2e9)
    assert accounts.find_identity(connection, minted.secret) == Identity(
        user.id, "boss", True, minted.token.id, given, None, 2e9
    )


@pytest.mark.parametrize("change", ["", "xpt_", "cut", "longer", "case", "other", "nul", "wide"])
def test_attack_80_what_is_no_secret_stands_for_nobody(connection: Connection, change: str) -> None:
    minted = accounts.create_token(
        connection, accounts.create_user(connection, "bob"), name="t", scopes=()
    )
    wrong = {
        "cut": minted.secret[:-1],
        "longer": minted.secret + "A",
        "case": minted.secret.upper(),
        "other": "xpt_" + "A" * 43,
        "nul": "xpt_" + "\0" * 43,
        "wide": "xpt_" + "é" * 43,
    }
    assert accounts.find_identity(connection, wrong.get(change, change)) is None


def test_attack_80_an_expired_or_revoked_token_is_dead_at_once(connection: Connection) -> None:
    user = accounts.create_user(connection, "bob")
    expired = accounts.create_token(connection, user, name="t", scopes=(), expires=time.time() - 1)
    revoked = accounts.create_token(connection, user, name="t", scopes=())
    assert accounts.find_identity(connection, revoked.secret) is not None
    accounts.revoke_token(connection, revoked.token.id)
    for minted in (expired, revoked):
        assert accounts.find_identity(connection, minted.secret) is None
        with pytest.raises(NotFoundError, match="no token"):
            accounts.get_token(connection, minted.token.id)
    assert accounts.list_tokens(connection, "bob", limit=9) == []


def test_a_token_mints_a_narrower_one(connection: Connection, bob: Identity) -> None:
    minted = minted_for(connection, bob, "push:acme/sql", "read:other", seconds=60)
    assert minted.token.scopes == scopes("push:acme/sql", "read:other")
    assert minted.token.expires == pytest.approx(time.time() + 60, abs=30)
    found = accounts.find_identity(connection, minted.secret)
    assert found is not None
    assert found.scopes == minted.token.scopes


def test_without_scopes_a_minted_token_has_those_of_the_one_used(
    connection: Connection, bob: Identity
) -> None:
    assert minted_for(connection, bob).token.scopes == list_all_scopes(admin=False)


@pytest.mark.parametrize(
    ("own", "wanted"),
    [
        (["read"], "push:acme"),
        (["push:acme/sql"], "push:acme"),
        (["push:acme/sql"], "push"),
        (["push:acme/sql"], "push:acme/other"),
        (["push:acme"], "yank:acme"),
        (["push", "read", "manage"], "admin"),
        ([], "admin"),
        ([], "push:other"),
        ([], "manage:acme"),
        ([], "push:missing"),
    ],
)
def test_attack_80_a_token_mints_no_scope_that_it_or_its_user_has_not(
    connection: Connection, bob: Identity, own: list[str], wanted: str
) -> None:
    used = create_identity(connection, "bob", *own)
    with pytest.raises(ForbiddenError, match=f"cannot grant the scope {wanted}"):
        minted_for(connection, used, wanted)


def test_attack_80_an_admin_scope_is_minted_by_admins_alone(connection: Connection) -> None:
    boss = create_identity(connection, "boss", admin=True)
    assert minted_for(connection, boss, "admin").token.scopes == scopes("admin")
    narrow = create_identity(connection, "boss", "read")
    with pytest.raises(ForbiddenError):
        minted_for(connection, narrow, "admin")


def test_attack_80_a_token_mints_none_that_outlives_it(
    connection: Connection, bob: Identity
) -> None:
    ends = time.time() + 1000
    connection.execute(update(TOKENS).values(expires=ends))
    used = accounts.find_identity_by_id(connection, bob.token_id or "")
    assert used is not None
    assert minted_for(connection, used, "read").token.expires == ends
    assert minted_for(connection, used, "read", seconds=5000).token.expires == ends
    assert minted_for(connection, used, "read", seconds=10).token.expires < ends  # type: ignore[operator]  # it has one


def test_attack_80_a_session_without_scopes_mints_nothing(
    connection: Connection, bob: Identity
) -> None:
    empty = Identity(bob.user_id, bob.name, False, bob.token_id, ())
    with pytest.raises(ForbiddenError, match="it does not have it"):
        minted_for(connection, empty)


@pytest.mark.parametrize("seconds", [0, -1, accounts.MAX_TOKEN_SECONDS + 1])
def test_a_token_lives_for_a_sensible_time(
    connection: Connection, bob: Identity, seconds: int
) -> None:
    with pytest.raises(UsageError, match="lives at most 10 years"):
        minted_for(connection, bob, "read", seconds=seconds)


def test_a_token_has_a_sensible_number_of_scopes(connection: Connection, bob: Identity) -> None:
    with pytest.raises(UsageError, match="at most 50 scopes"):
        minted_for(connection, bob, *["read"] * 51)


def test_tokens_are_listed_newest_first_for_their_user_alone(connection: Connection) -> None:
    alice, bob = accounts.create_user(connection, "alice"), accounts.create_user(connection, "bob")
    made = [accounts.create_token(connection, alice, name="t", scopes=()).token for _ in range(3)]
    own = [t.id for t in sorted(made, key=lambda t: (t.created, t.id), reverse=True)]
    accounts.create_token(connection, bob, name="t", scopes=())
    assert [t.id for t in accounts.list_tokens(connection, "alice", limit=2)] == own[:2]
    assert [t.id for t in accounts.list_tokens(connection, "alice", limit=2, after=own[1])] == own[
        2:
    ]
    assert accounts.list_tokens(connection, "alice", limit=2, after="gone") == []


def test_the_last_use_is_kept_to_the_minute(connection: Connection) -> None:
    minted = accounts.create_token(
        connection, accounts.create_user(connection, "bob"), name="t", scopes=()
    )
    assert accounts.get_token(connection, minted.token.id).last_used is None
    accounts.mark_used(connection, minted.token.id)
    used = accounts.get_token(connection, minted.token.id).last_used
    assert used == pytest.approx(time.time(), abs=60)
    accounts.mark_used(connection, minted.token.id)
    assert accounts.get_token(connection, minted.token.id).last_used == used
    connection.execute(update(TOKENS).values(last_used=5.0))
    accounts.mark_used(connection, minted.token.id)
    assert accounts.get_token(connection, minted.token.id).last_used != 5.0
