import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import pytest
from sqlalchemy import Connection

from expertctl.errors import StoreError
from registry_server.access import accounts
from registry_server.access.accounts import SessionKey
from registry_server.access.authentication import MAX_CACHED_IDENTITIES, IdentityCache
from registry_server.access.rights import Identity
from registry_server.database.connection import Database
from tests.registry_server.harness import RegistryHarness


@pytest.fixture
def known(served: RegistryHarness) -> IdentityCache:
    sessions = SessionKey.derive(served.registry.index_key)
    return IdentityCache(served.registry.database, sessions)


def test_the_same_secret_is_looked_up_once_between_two_writes(
    served: RegistryHarness, known: IdentityCache
) -> None:
    secret = served.create_user("bob")
    first = known.find(secret)
    assert first is not None
    assert first.name == "bob"
    assert known.find(secret) is first


def test_attack_80_a_revoked_token_is_not_remembered(
    served: RegistryHarness, known: IdentityCache
) -> None:
    secret = served.create_user("bob")
    found = known.find(secret)
    assert found is not None
    with served.registry.database.write() as connection:
        accounts.revoke_token(connection, found.token_id or "")
    assert known.find(secret) is None


def test_attack_80_what_another_process_revokes_is_not_remembered(
    served: RegistryHarness, known: IdentityCache
) -> None:
    secret = served.create_user("bob")
    assert known.find(secret) is not None
    other = Database.open(served.settings.database)
    with other.write() as connection:
        accounts.remove_user(connection, accounts.get_user(connection, "bob"))
    other.close()
    assert known.find(secret) is None


def test_attack_80_a_token_that_expires_is_not_remembered(
    served: RegistryHarness, known: IdentityCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    served.create_user("bob")
    ends = time.time() + 1000
    secret = served.create_token("bob", expires=ends)
    assert known.find(secret) is not None
    monkeypatch.setattr(time, "time", lambda: ends)
    assert known.find(secret) is None


def test_a_session_is_remembered_like_a_token(
    served: RegistryHarness, known: IdentityCache
) -> None:
    identity = served.authenticate(served.create_user("bob"))
    session = known.sessions.issue(identity, ())
    assert known.find(session) is not None
    with served.registry.database.write() as connection:
        accounts.revoke_token(connection, identity.token_id or "")
    assert known.find(session) is None


def test_wrong_secrets_are_not_remembered_and_memory_is_bounded(
    served: RegistryHarness, known: IdentityCache
) -> None:
    assert known.find("xpt_" + "A" * 43) is None
    assert known._identities == {}
    secret = served.create_user("bob")
    found = known.find(secret)
    assert found is not None
    known._identities.update({str(number): found for number in range(MAX_CACHED_IDENTITIES)})
    assert known.find(secret) == found
    assert len(known._identities) == 1


def test_attack_88_without_a_database_nobody_is_known(
    served: RegistryHarness, known: IdentityCache
) -> None:
    secret = served.create_user("bob")
    assert known.find(secret) is not None
    served.registry.database.close()
    for path in served.settings.data.glob("registry.db*"):
        path.unlink()
    with pytest.raises(StoreError):
        known.find(secret)


def test_an_identity_is_read_without_the_lock_and_kept_only_if_it_is_the_newest(
    served: RegistryHarness,
) -> None:
    """While one thread reads, the event loop looks up another secret, and a token is revoked."""
    alice, bob = served.create_user("alice"), served.create_user("bob")
    database = served.registry.database
    interruptions: list[Identity | None] = []

    @dataclass
    class InterruptedDatabase:
        def version(self) -> int:
            return database.version()

        @contextmanager
        def read(self) -> Iterator[Connection]:
            with database.read() as connection:
                yield connection
            if not interruptions:
                interruptions.append(None)
                with database.write() as connection:
                    token = served.authenticate(alice).token_id or ""
                    accounts.revoke_token(connection, token)
                interruptions.append(cache.find(bob))

    key = SessionKey.derive(served.registry.index_key)
    cache = IdentityCache(cast(Database, InterruptedDatabase()), key)
    assert cache.find(alice) is not None  # as it was when the request came
    assert [found.name for found in interruptions if found] == ["bob"]
    assert cache.find(alice) is None
