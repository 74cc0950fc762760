import base64
import json
import time
from dataclasses import replace

import pytest
from sqlalchemy import Connection

from expertctl.errors import UsageError
from expertctl.trust.keys import PrivateKey
from registry_server.access import accounts
from registry_server.access.accounts import SESSION_SECONDS, SessionKey, parse_requested_scopes
from registry_server.access.rights import ANONYMOUS, Identity, TokenScope
from tests.registry_server.harness import create_identity

SCOPES = (TokenScope.parse("push:acme/sql"), TokenScope.parse("read:acme/sql"))


@pytest.fixture(scope="module")
def index_key() -> PrivateKey:
    return PrivateKey.generate()


@pytest.fixture
def key(index_key: PrivateKey) -> SessionKey:
    return SessionKey.derive(index_key)


@pytest.fixture
def bob(connection: Connection) -> Identity:
    return create_identity(connection, "bob")


def test_a_session_stands_for_the_user_with_its_own_scopes_and_end(
    connection: Connection, key: SessionKey, bob: Identity
) -> None:
    found = key.find(connection, key.issue(bob, SCOPES))
    assert found is not None
    assert found.expires == pytest.approx(time.time() + SESSION_SECONDS, abs=60)
    assert found == replace(bob, scopes=SCOPES, expires=found.expires)


def test_every_worker_reads_the_sessions_of_the_others(
    connection: Connection, index_key: PrivateKey, bob: Identity
) -> None:
    secret = SessionKey.derive(index_key).issue(bob, SCOPES)
    assert SessionKey.derive(index_key).find(connection, secret) is not None
    assert SessionKey.derive(PrivateKey.generate()).find(connection, secret) is None


def test_nobody_can_have_a_session_of_nobody(connection: Connection, key: SessionKey) -> None:
    found = key.find(connection, key.issue(ANONYMOUS, ()))
    assert found is not None
    assert (found.user_id, found.scopes) == (None, ())


def test_attack_80_a_session_dies_with_its_token(
    connection: Connection, key: SessionKey, bob: Identity
) -> None:
    secret = key.issue(bob, SCOPES)
    accounts.revoke_token(connection, bob.token_id or "")
    assert key.find(connection, secret) is None


def test_attack_80_a_session_dies_with_its_user(
    connection: Connection, key: SessionKey, bob: Identity
) -> None:
    secret = key.issue(bob, SCOPES)
    accounts.remove_user(connection, accounts.get_user(connection, "bob"))
    assert key.find(connection, secret) is None


def test_attack_80_a_session_ends_no_later_than_its_token(
    connection: Connection, key: SessionKey, bob: Identity
) -> None:
    ends = time.time() + 10
    found = key.find(connection, key.issue(replace(bob, expires=ends), ()))
    assert found is not None
    assert found.expires == ends
    assert key.find(connection, key.issue(replace(bob, expires=time.time() - 1), ())) is None


CHANGES = (
    "wider",
    "no mac",
    "no dot",
    "zero mac",
    "bad mac",
    "wide",
    "other prefix",
    "endless",
    "empty",
)


def tampered(secret: str) -> dict[str, str]:
    payload, mac = secret.removeprefix("xps_").split(".")
    fields = json.loads(base64.urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    fields[1] = ["admin"]
    wider = base64.urlsafe_b64encode(json.dumps(fields).encode()).rstrip(b"=").decode()
    return {
        "wider": f"xps_{wider}.{mac}",
        "no mac": f"xps_{payload}.",
        "no dot": f"xps_{payload}{mac}",
        "zero mac": f"xps_{payload}.{'A' * 43}",
        "bad mac": f"xps_{payload}.{'!' * 43}",
        "wide": f"xps_{payload}.{'é' * 43}",
        "other prefix": f"xpt_{payload}.{mac}",
        "endless": f"xps_{payload * 1000}.{mac}",
        "empty": "xps_",
    }


@pytest.mark.parametrize("change", CHANGES)
def test_attack_80_a_session_that_was_changed_stands_for_nobody(
    connection: Connection, key: SessionKey, bob: Identity, change: str
) -> None:
    assert key.find(connection, tampered(key.issue(bob, SCOPES))[change]) is None


def test_the_key_is_in_no_text(key: SessionKey) -> None:
    assert repr(key) == "SessionKey()"


def test_what_is_asked_for_is_read_and_what_is_unknown_left_out() -> None:
    texts = [
        "repository:acme/sql:pull,push repository:other/a/b:*",
        "repository:acme/x:delete,fly",
        "registry:catalog:*",
        "repository:alpine:pull",
        "repository:Bad/Name:pull",
        "repository:acme/../x:pull",
        "nonsense",
        "",
    ]
    assert [str(scope) for scope in parse_requested_scopes(texts)] == [
        "push:acme/sql",
        "read:acme/sql",
        "delete:other/a/b",
        "push:other/a/b",
        "read:other/a/b",
        "delete:acme/x",
    ]


def test_what_is_asked_for_is_bounded() -> None:
    with pytest.raises(UsageError, match="too many scopes"):
        parse_requested_scopes(["repository:a/b:pull"] * 51)
    with pytest.raises(UsageError, match="too many scopes"):
        parse_requested_scopes([f"repository:a/{'b' * 9000}:pull"])
