"""Tokens of registries: private, per address, and EXPERT_TOKEN for one registry only."""

import json
from pathlib import Path

import pytest

from expertctl.errors import InvalidPackageError, StoreError, UsageError
from expertctl.registry import credentials
from expertctl.registry.address import RegistryAddress
from expertctl.registry.credentials import Credential, CredentialStore

HERE = RegistryAddress.parse("r.example")
OTHER = RegistryAddress.parse("r.example:8443")
LOGIN = Credential("me", "xpt_abc")


@pytest.fixture
def store(tmp_path: Path) -> CredentialStore:
    return CredentialStore(tmp_path / "home" / "credentials.json")


def test_a_login_is_kept_for_its_address_alone(store: CredentialStore) -> None:
    store.add(HERE, LOGIN)
    store.add(OTHER, Credential("you", "other", "https://auth.example"))
    assert store.find_credential(HERE, {}) == LOGIN
    assert store.find_credential(OTHER, {}) == Credential("you", "other", "https://auth.example")
    plain = RegistryAddress.parse("http://r.example", allow_http=True)
    assert store.find_credential(plain, {}) is None
    assert store.remove(HERE) is True
    assert store.remove(HERE) is False
    assert store.find_credential(HERE, {}) is None
    assert store.find_credential(OTHER, {}) is not None


def test_nobody_else_can_read_the_file(store: CredentialStore) -> None:
    store.add(HERE, LOGIN)
    store.check_integrity()
    assert store.path.stat().st_mode & 0o777 == 0o600
    assert store.path.parent.stat().st_mode & 0o777 == 0o700


def test_a_file_that_others_can_read_is_refused(store: CredentialStore) -> None:
    store.add(HERE, LOGIN)
    store.path.chmod(0o644)
    with pytest.raises(InvalidPackageError, match="others may read it") as caught:
        store.find_credential(HERE, {})
    assert "chmod 600" in caught.value.hint


def test_a_secret_is_not_shown_by_accident() -> None:
    assert "xpt_abc" not in repr(LOGIN)


@pytest.mark.parametrize(
    ("registry", "address", "sent"),
    [
        ("r.example", HERE, True),
        ("https://R.example:443", HERE, True),
        ("r.example", OTHER, False),
        ("r.example:8443", HERE, False),
        ("http://r.example", HERE, False),
        ("evil.r.example", HERE, False),
        ("", HERE, False),
    ],
)
def test_expert_token_goes_to_the_registry_of_expert_registry_alone(
    store: CredentialStore, registry: str, address: RegistryAddress, sent: bool
) -> None:
    environment = {"EXPERT_TOKEN": "from-environment", "EXPERT_REGISTRY": registry}
    found = store.find_credential(address, environment)
    assert (found is not None) is sent
    assert found is None or (found.user, found.secret) == ("token", "from-environment")


def test_expert_token_wins_over_the_login(store: CredentialStore) -> None:
    store.add(HERE, LOGIN)
    environment = {"EXPERT_TOKEN": " new\n", "EXPERT_REGISTRY": "r.example", "EXPERT_USER": "ci"}
    assert store.find_credential(HERE, environment) == Credential("ci", "new")


@pytest.mark.parametrize(
    "secret", ["", "two words", "line\nbreak", "ünicode", "\x1b", "x" * 20_000]
)
def test_a_token_that_cannot_be_a_header_is_refused(secret: str) -> None:
    with pytest.raises(UsageError):
        Credential("me", secret)


@pytest.mark.parametrize("user", ["", "a:b", "a\r\nX: y", "u" * 300])
def test_a_user_that_cannot_be_a_header_is_refused(user: str) -> None:
    with pytest.raises(UsageError):
        Credential(user, "secret")


@pytest.mark.parametrize(
    "document",
    [
        "{", "[]", "{}", '{"registries": []}', '{"registries": {}, "more": 1}',
        '{"registries": {"https://r.example": 1}}', '{"registries": {"r.example/x": {}}}',
        '{"registries": {"https://R.example": {"user": "me", "secret": "a"}}}',
        '{"registries": {"https://r.example": {"user": "me"}}}',
        '{"registries": {"https://r.example": {"user": "me", "secret": "a b"}}}',
        '{"registries": {"https://r.example": {"user": "me", "secret": "a", "more": 1}}}',
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(store: CredentialStore, document: str) -> None:
    store.path.parent.mkdir()
    store.path.write_text(document)
    store.path.chmod(0o600)
    with pytest.raises(InvalidPackageError, match=r"credentials\.json"):
        store.find_credential(HERE, {})


def test_neither_netrc_nor_docker_is_asked(
    store: CredentialStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine r.example login me password netrc-secret\n")
    (tmp_path / ".docker").mkdir()
    auths = {"auths": {"r.example": {"auth": "bWU6ZG9ja2Vy"}}}
    (tmp_path / ".docker/config.json").write_text(json.dumps(auths))
    assert store.find_credential(HERE, {}) is None


def test_a_file_that_is_being_changed_is_waited_for_and_then_named(
    store: CredentialStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from filelock import FileLock

    monkeypatch.setattr(credentials, "LOCK_SECONDS", 0.0)
    store.path.parent.mkdir()
    with FileLock(f"{store.path}.lock"), pytest.raises(StoreError, match="another process"):
        store.add(HERE, LOGIN)
