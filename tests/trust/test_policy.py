"""The trust store on disk: modes, damage, crashes, and several processes at once."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    StoreError,
    TrustError,
    UsageError,
)
from expertctl.reference import Digest, PackageName
from expertctl.trust.keys import PrivateKey, PublicKey
from expertctl.trust.trust_store import TrustStore
from tests.trust.forged_bundles import make_rfc_key

SQL = PackageName("acme", "sql")
CONTENT = Digest.compute(b"content")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def store(tmp_path: Path) -> TrustStore:
    return TrustStore(tmp_path / "home" / "trust.json")


@pytest.fixture(scope="module")
def key() -> PublicKey:
    return make_rfc_key().public


def test_nobody_is_trusted_at_first_and_asking_writes_nothing(
    store: TrustStore, key: PublicKey
) -> None:
    assert store.list_keys() == []
    assert store.read().revoked == ()
    assert not store.is_revoked(key.key_id)
    with pytest.raises(TrustError, match="is not trusted"):
        store.authorise(key.key_id, package=SQL, content_digest=CONTENT)
    assert not store.path.parent.exists()


def test_a_trusted_key_is_kept_for_the_owner_alone(store: TrustStore, key: PublicKey) -> None:
    trusted = store.add(key, name="me", namespaces=["acme", "local/*"])
    assert trusted.namespaces == ("acme", "local")
    again = TrustStore(store.path)
    assert again.list_keys() == [trusted]
    assert again.authorise(key.key_id, package=SQL, content_digest=CONTENT) == key
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.path.parent.stat().st_mode) == 0o700
    store.check_integrity()


def test_a_key_limited_to_contents_stays_limited_on_disk(store: TrustStore, key: PublicKey) -> None:
    store.add(key, name="starter", namespaces=["starter"], content_digests=[str(CONTENT)])
    package = PackageName("starter", "sorting")
    assert store.authorise(key.key_id, package=package, content_digest=CONTENT) == key
    with pytest.raises(TrustError, match="fixed contents"):
        store.authorise(key.key_id, package=package, content_digest=Digest.compute(b"else"))


def test_revocation_outlives_removal_on_disk(store: TrustStore, key: PublicKey) -> None:
    store.add(key, name="me", namespaces=["acme"])
    assert store.revoke(key.key_id, "stolen").reason == "stolen"
    store.remove(key.key_id)
    again = TrustStore(store.path)
    assert again.list_keys() == []
    assert again.is_revoked(key.key_id)
    assert [r.reason for r in again.read().revoked] == ["stolen"]
    with pytest.raises(RevokedError, match="stolen"):
        again.add(key, name="me", namespaces=["acme"])
    with pytest.raises(RevokedError, match="stolen"):
        again.authorise(key.key_id, package=SQL, content_digest=CONTENT)
    again.check_integrity()


def test_keys_are_found_by_name_or_id(store: TrustStore, key: PublicKey) -> None:
    other = PrivateKey.generate("ed25519").public
    store.add(key, name="acme", namespaces=["acme"])
    store.add(other, name="globex", namespaces=["globex"])
    assert store.find_key("acme").key == key
    assert store.find_key(other.key_id).key == other
    with pytest.raises(NotFoundError, match="'nobody'"):
        store.find_key("nobody")
    store.add(other, name="acme", namespaces=["globex"])
    with pytest.raises(UsageError, match="2 keys are called 'acme'") as refused:
        store.find_key("acme")
    assert key.key_id in refused.value.hint
    assert other.key_id in refused.value.hint


def test_what_cannot_be_done_changes_nothing(store: TrustStore, key: PublicKey) -> None:
    store.add(key, name="me", namespaces=["acme"])
    before = store.path.read_bytes()
    with pytest.raises(NotFoundError):
        store.remove("sha256:" + "00" * 32)
    with pytest.raises(UsageError):
        store.add(key, name="../me", namespaces=["acme"])
    with pytest.raises(UsageError):
        store.add(key, name="me", namespaces=["*"])
    with pytest.raises(UsageError):
        store.revoke("me")
    assert store.path.read_bytes() == before


def test_a_change_that_changes_nothing_does_not_touch_the_file(
    store: TrustStore, key: PublicKey
) -> None:
    store.add(key, name="me", namespaces=["acme"])
    before = store.path.stat().st_ino
    store.add(key, name="me", namespaces=["acme/*"])
    assert store.path.stat().st_ino == before


@pytest.mark.parametrize("data", [b"", b"{}", b"not json", b'{"schema": 2}'])
def test_a_damaged_file_is_refused_and_never_replaced(
    store: TrustStore, key: PublicKey, data: bytes
) -> None:
    store.path.parent.mkdir()
    store.path.write_bytes(data)
    store.path.chmod(0o600)
    for use in (
        store.list_keys,
        lambda: store.is_revoked(key.key_id),
        lambda: store.add(key, name="me", namespaces=["acme"]),
        lambda: store.revoke(key.key_id),
    ):
        with pytest.raises(InvalidPackageError, match=r"trust\.json"):
            use()
    assert store.path.read_bytes() == data


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_believed(
    store: TrustStore, key: PublicKey, mode: int
) -> None:
    store.add(key, name="me", namespaces=["acme"])
    store.path.chmod(mode)
    with pytest.raises(TrustError, match="others may change") as refused:
        store.authorise(key.key_id, package=SQL, content_digest=CONTENT)
    assert "chmod 600" in refused.value.hint


def test_a_crash_before_the_rename_keeps_what_was_there(
    store: TrustStore, key: PublicKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add(key, name="me", namespaces=["acme"])
    before = store.path.read_bytes()

    def crash(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="Input/output"):
            store.revoke(key.key_id)
    assert store.path.read_bytes() == before
    assert sorted(p.name for p in store.path.parent.iterdir()) == ["trust.json", "trust.json.lock"]
    store.revoke(key.key_id)
    assert store.is_revoked(key.key_id)


def test_a_writer_that_never_ends_is_named_and_readers_go_on(
    store: TrustStore, key: PublicKey
) -> None:
    store.add(key, name="me", namespaces=["acme"])
    impatient = TrustStore(store.path, lock_seconds=0.0)
    with FileLock(f"{store.path}.lock"):
        with pytest.raises(StoreError, match="being changed by another process"):
            impatient.revoke(key.key_id)
        assert impatient.authorise(key.key_id, package=SQL, content_digest=CONTENT) == key


def test_processes_that_change_it_at_once_lose_nothing(store: TrustStore) -> None:
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from expertctl.trust.keys import PrivateKey\n"
        "from expertctl.trust.trust_store import TrustStore\n"
        "store, me = TrustStore(Path(sys.argv[1])), int(sys.argv[2])\n"
        "for number in range(8):\n"
        "    store.revoke(f'sha256:{me * 8 + number:064x}', 'storm')\n"
        "    key = PrivateKey.generate('ed25519').public\n"
        "    store.add(key, name=f'k{me}', namespaces=[f'n{number}'])\n"
        "    store.read()\n"
    )
    command = [sys.executable, "-c", program, str(store.path)]
    running = [subprocess.Popen([*command, str(me)], cwd=ROOT) for me in range(3)]
    assert [process.wait() for process in running] == [0, 0, 0]
    assert {r.key_id for r in store.read().revoked} == {f"sha256:{n:064x}" for n in range(24)}
    named = sorted((entry.name, entry.namespaces[0]) for entry in store.list_keys())
    assert named == sorted((f"k{me}", f"n{number}") for me in range(3) for number in range(8))
    store.check_integrity()


def test_the_file_is_plain_json_for_people(store: TrustStore, key: PublicKey) -> None:
    store.add(key, name="me", namespaces=["acme"])
    document = json.loads(store.path.read_text())
    assert document["schema"] == 1
    assert document["keys"][0]["key_id"] == key.key_id
    assert document["keys"][0]["grants"] == [{"namespace": "acme", "content_digests": None}]
