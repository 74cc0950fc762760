"""Keys are known by their hashes, end when they should, and open nothing by their absence."""

import json
import os
import stat
from pathlib import Path

import pytest

from expertctl.errors import ConflictError, InvalidPackageError, NotFoundError, UsageError
from expertctl.server.api_keys import ApiKeyStore

NOW = 1_800_000_000.0


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeyStore:
    return ApiKeyStore(tmp_path / "home" / "api-keys.json")


def test_a_secret_finds_its_key_and_no_other(keys: ApiKeyStore) -> None:
    first, second = keys.create("first", now=NOW), keys.create("second", now=NOW)
    assert keys.find(first.secret, now=NOW) == first.key
    assert keys.find(second.secret, now=NOW) == second.key
    assert first.key.id != second.key.id


@pytest.mark.parametrize(
    "secret", ["", "xpk_", "xpk_" + "a" * 43, "a" * 47, "xpk_" + "\udcff" * 43]
)
def test_what_is_no_secret_finds_nothing(keys: ApiKeyStore, secret: str) -> None:
    keys.create("first", now=NOW)
    assert keys.find(secret, now=NOW) is None


def test_only_hashes_are_kept_for_the_owner_alone(keys: ApiKeyStore) -> None:
    made = keys.create("first", now=NOW)
    text = keys.path.read_text()
    assert made.secret not in text
    assert made.secret[4:] not in text
    assert made.key.hash in text
    assert stat.S_IMODE(keys.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(keys.path.parent.stat().st_mode) == 0o700
    assert made.secret not in repr(made)


def test_a_key_ends_when_it_expires(keys: ApiKeyStore) -> None:
    made = keys.create("first", now=NOW, expires=NOW + 60)
    assert keys.find(made.secret, now=NOW + 59) == made.key
    assert keys.find(made.secret, now=NOW + 60) is None


def test_a_key_that_was_made_before_keys_could_manage_does_not(keys: ApiKeyStore) -> None:
    made = keys.create("first", now=NOW, manages=True)
    found = keys.find(made.secret, now=NOW)
    assert found is not None
    assert found.manages
    text = keys.path.read_text()
    assert '"manages":true' in text.replace(" ", "")
    document = json.loads(text)
    for each in document["keys"]:
        del each["manages"]
    keys.path.write_text(json.dumps(document))
    older = ApiKeyStore(keys.path).find(made.secret, now=NOW)
    assert older is not None
    assert not older.manages


@pytest.mark.parametrize("by", ["name", "id"])
def test_a_revoked_key_ends_at_once_for_a_server_that_runs(keys: ApiKeyStore, by: str) -> None:
    server = ApiKeyStore(keys.path)
    made, other = keys.create("first", now=NOW), keys.create("other", now=NOW)
    assert server.find(made.secret, now=NOW) == made.key
    assert keys.revoke(getattr(made.key, by)) == made.key
    assert server.find(made.secret, now=NOW) is None
    assert server.find(other.secret, now=NOW) == other.key


def test_a_server_that_runs_knows_a_new_key_at_once(keys: ApiKeyStore) -> None:
    server = ApiKeyStore(keys.path)
    assert server.find("xpk_" + "a" * 43, now=NOW) is None
    made = keys.create("first", now=NOW)
    assert server.find(made.secret, now=NOW) == made.key


def test_revoking_the_last_key_opens_nothing(keys: ApiKeyStore) -> None:
    assert not keys.are_required
    keys.create("first", now=NOW)
    keys.revoke("first")
    assert keys.list_keys() == ()
    assert keys.are_required


def test_names_are_taken_once(keys: ApiKeyStore) -> None:
    keys.create("first", now=NOW)
    with pytest.raises(ConflictError, match="first"):
        keys.create("first", now=NOW)
    assert [key.name for key in keys.list_keys()] == ["first"]


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a--b", "a/b", "a" * 65, "../a", "é"])
def test_a_name_is_one_word(keys: ApiKeyStore, name: str) -> None:
    with pytest.raises(UsageError, match="not a valid key name"):
        keys.create(name, now=NOW)
    assert not keys.path.exists()


@pytest.mark.parametrize("limit", [0, -1, 10**9 + 1])
def test_a_limit_is_at_least_one_in_a_minute(keys: ApiKeyStore, limit: int) -> None:
    with pytest.raises(UsageError, match="a limit must be"):
        keys.create("first", now=NOW, requests_per_minute=limit)


def test_what_is_not_there_cannot_be_revoked(keys: ApiKeyStore) -> None:
    with pytest.raises(NotFoundError, match="no key 'nobody'"):
        keys.revoke("nobody")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b'{"format": 1}',
        b'{"format": 2, "keys": []}',
        b'{"format": 1, "keys": [{}]}',
        b'{"format": 1, "keys": [], "more": 1}',
        b'{"format": 1, "keys": [], "keys": []}',
        b" " * (2 << 20),
    ],
)
def test_a_damaged_file_lets_nobody_in(keys: ApiKeyStore, content: bytes) -> None:
    made = keys.create("first", now=NOW)
    keys.path.write_bytes(content)
    with pytest.raises(InvalidPackageError, match=r"api-keys\.json"):
        keys.find(made.secret, now=NOW)
    assert keys.are_required


def test_a_link_is_not_followed(keys: ApiKeyStore, tmp_path: Path) -> None:
    made = keys.create("first", now=NOW)
    elsewhere = tmp_path / "elsewhere"
    keys.path.rename(elsewhere)
    os.mkfifo(keys.path)
    with pytest.raises(InvalidPackageError):
        keys.find(made.secret, now=NOW)
