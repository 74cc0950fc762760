"""Publisher keys from an index: pinned once, followed by their own word, never taken on trust."""

from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import pytest

from expertctl.errors import RevokedError, SignatureError, TrustError
from expertctl.reference import PackageName
from expertctl.registry.index_document import IndexDocument, KeyEntry
from expertctl.registry.registry_trust import (
    apply_revocations,
    find_signer_problem,
    pin_index_keys,
    pin_verified_keys,
)
from expertctl.trust.dsse import sign_key_statement
from expertctl.trust.grants import Grant, TrustedKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore
from tests.registry.indexes import (
    HOST,
    SQL,
    compute_named_key_id,
    make_index_document,
    make_key_entry,
    make_known_registry,
    make_named_key,
    make_release,
)

KNOWN = make_known_registry()
OTHER_HOST = "127.0.0.1:9090"


def pin(document: IndexDocument, trust: TrustStore) -> list[str]:
    """Pin the keys of a document after a verification that succeeds; what the user is told."""
    _, keys = pin_verified_keys([(document, KNOWN)], trust, lambda record: record)
    return [key.message for key in keys]


def start() -> TrustRecord:
    return TrustRecord().with_registry(KNOWN)


def believed(*documents: IndexDocument, record: TrustRecord | None = None) -> TrustRecord:
    result = start() if record is None else record
    for document in documents:
        result = pin_index_keys(result, document, KNOWN)
    return result


def may_sign(record: TrustRecord, name: str, *, host: str = HOST, namespace: str = "acme") -> bool:
    one = make_release("1.0.0", name)
    package = PackageName(namespace, "sql")
    form = one.forms[0]
    return find_signer_problem(form, one, package=package, host=host, record=record) is None


def require_signer(record: TrustRecord, version: str, name: str) -> None:
    release = make_release(version, name)
    problem = find_signer_problem(release.forms[0], release, package=SQL, host=HOST, record=record)
    if problem is not None:
        raise problem


def signers(record: TrustRecord, *names: str) -> list[str]:
    return [name for name in names if may_sign(record, name)]


def test_at_the_first_install_all_keys_of_the_index_are_pinned() -> None:
    record = believed(make_index_document(keys=[make_key_entry("alice"), make_key_entry("bob")]))
    assert signers(record, "alice", "bob", "mallory") == ["alice", "bob"]
    known_now = record.find_registry(HOST)
    assert known_now is not None
    assert known_now.pinned == ("acme",)


def test_a_key_that_the_index_itself_revokes_is_never_pinned() -> None:
    record = believed(
        make_index_document(keys=[make_key_entry("alice"), make_key_entry("bob")], revoked=["bob"])
    )
    assert signers(record, "alice", "bob") == ["alice"]


def test_pins_count_for_their_namespace_of_their_registry_alone() -> None:
    record = believed(make_index_document(keys=[make_key_entry("alice")])).with_registry(
        make_known_registry(OTHER_HOST)
    )
    assert may_sign(record, "alice")
    assert not may_sign(record, "alice", host=OTHER_HOST)
    assert not may_sign(record, "alice", namespace="zoo")


def test_a_new_key_without_a_word_of_an_old_one_is_not_believed() -> None:
    """Attack: a registry that was taken over lists a key of its own."""
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[make_key_entry("mallory")]),
    )
    assert signers(record, "alice", "mallory") == ["alice"]


def test_what_an_unpinned_key_signed_is_refused_with_the_way_out() -> None:
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[make_key_entry("mallory")]),
    )
    with pytest.raises(TrustError, match="no key that is trusted for acme vouches") as refused:
        require_signer(record, "2.0.0", "mallory")
    assert f"trust add KEY.pem --namespace acme --registry {HOST}" in refused.value.hint
    assert not isinstance(refused.value, RevokedError)


def test_a_new_key_with_the_word_of_a_pinned_one_is_pinned() -> None:
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(
            2, keys=[make_key_entry("alice"), make_key_entry("bob", endorsed_by="alice")]
        ),
    )
    assert signers(record, "alice", "bob") == ["alice", "bob"]


def test_a_key_stays_pinned_when_the_index_leaves_it_out() -> None:
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[make_key_entry("bob", endorsed_by="alice")]),
    )
    assert signers(record, "alice", "bob") == ["alice", "bob"]


def test_a_chain_of_words_counts_in_any_order() -> None:
    chain = [
        make_key_entry("bob", endorsed_by="alice"),
        make_key_entry("carol", endorsed_by="bob"),
        make_key_entry("dave", endorsed_by="carol"),
    ]
    for order in permutations(chain):
        record = believed(
            make_index_document(1, keys=[make_key_entry("alice")]),
            make_index_document(2, keys=order),
        )
        assert signers(record, "alice", "bob", "carol", "dave") == ["alice", "bob", "carol", "dave"]


def test_keys_that_vouch_for_each_other_vouch_for_nothing() -> None:
    ring = [
        make_key_entry("mallory", endorsed_by="eve"),
        make_key_entry("eve", endorsed_by="mallory"),
    ]
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]), make_index_document(2, keys=ring)
    )
    assert signers(record, "mallory", "eve") == []


def test_a_revoked_key_vouches_for_nobody() -> None:
    """Attack: who stole the old key makes a new one and has the old one revoked."""
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(
            2, keys=[make_key_entry("mallory", endorsed_by="alice")], revoked=["alice"]
        ),
    )
    assert signers(record, "alice", "mallory") == []


def test_a_chain_breaks_at_a_revoked_key() -> None:
    chain = [make_key_entry("bob", endorsed_by="alice"), make_key_entry("carol", endorsed_by="bob")]
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=chain, revoked=["bob"]),
    )
    assert signers(record, "alice", "bob", "carol") == ["alice"]


BAD_WORDS = {
    "for another namespace": KeyEntry(
        make_named_key("bob").public,
        sign_key_statement(
            namespace="zoo", new=make_named_key("bob").public, by=make_named_key("alice")
        ),
    ),
    "for another key": KeyEntry(
        make_named_key("bob").public,
        sign_key_statement(
            namespace="acme", new=make_named_key("carol").public, by=make_named_key("alice")
        ),
    ),
    "of itself": make_key_entry("bob", endorsed_by="bob"),
    "of a stranger": make_key_entry("bob", endorsed_by="mallory"),
    "forged": KeyEntry(
        make_named_key("bob").public,
        sign_key_statement(
            namespace="acme", new=make_named_key("bob").public, by=make_named_key("mallory")
        ).replace(compute_named_key_id("mallory").encode(), compute_named_key_id("alice").encode()),
    ),
    "malformed": KeyEntry(make_named_key("bob").public, b"{}"),
}


@pytest.mark.parametrize("bad", BAD_WORDS.values(), ids=BAD_WORDS.keys())
def test_a_bad_word_counts_as_none_and_spoils_nothing_else(bad: KeyEntry) -> None:
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[bad, make_key_entry("dave", endorsed_by="alice")]),
    )
    assert signers(record, "alice", "bob", "dave") == ["alice", "dave"]


def test_what_the_person_trusts_for_the_namespace_may_vouch() -> None:
    mine = TrustedKey(make_named_key("me").public, "me", (Grant("acme"),))
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[make_key_entry("bob", endorsed_by="me")]),
        record=start().with_key(mine),
    )
    assert signers(record, "alice", "bob", "me") == ["alice", "bob", "me"]


def test_a_key_for_fixed_contents_may_not_vouch() -> None:
    content = str(make_release("1.0.0").content_digest)
    mine = TrustedKey(make_named_key("me").public, "me", (Grant("acme", (content,)),))
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=[make_key_entry("bob", endorsed_by="me")]),
        record=start().with_key(mine),
    )
    assert signers(record, "alice", "bob") == ["alice"]


def test_a_key_that_was_added_for_the_registry_leaves_no_first_word_to_it() -> None:
    mine = TrustedKey(make_named_key("alice").public, "alice", (Grant("acme", None, HOST),))
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice"), make_key_entry("mallory")]),
        record=start().with_key(mine),
    )
    assert signers(record, "alice", "mallory") == ["alice"]


def test_a_key_that_was_taken_away_is_not_pinned_again_at_the_registrys_word() -> None:
    document = make_index_document(1, keys=[make_key_entry("alice")])
    record = believed(document).without_key(compute_named_key_id("alice"))
    assert signers(believed(document, record=record), "alice") == []


def test_a_revocation_in_the_index_holds_at_once_and_for_good() -> None:
    keys = [make_key_entry("alice"), make_key_entry("bob")]
    record = believed(
        make_index_document(1, keys=keys), make_index_document(2, keys=keys, revoked=["alice"])
    )
    assert signers(record, "alice", "bob") == ["bob"]
    assert signers(believed(make_index_document(3, keys=keys), record=record), "alice", "bob") == [
        "bob"
    ]
    with pytest.raises(RevokedError, match=f"was revoked by {HOST}: alice was lost"):
        require_signer(record, "1.0.0", "alice")


def test_a_registry_revokes_nothing_outside_its_own_namespace() -> None:
    """Attack: a registry revokes the keys of another, or of the person."""
    zoo = make_index_document(1, keys=[make_key_entry("alice")], package=PackageName("zoo", "ants"))
    other = make_known_registry(OTHER_HOST)
    record = believed(make_index_document(1, keys=[make_key_entry("alice")]), zoo).with_registry(
        other
    )
    record = pin_index_keys(
        record, make_index_document(1, keys=[make_key_entry("eve")], revoked=["alice"]), other
    )
    record = record.with_key(TrustedKey(make_named_key("alice").public, "mine", (Grant("local"),)))
    assert may_sign(record, "alice")
    assert may_sign(record, "alice", namespace="zoo")
    assert may_sign(record, "alice", namespace="local")
    assert not may_sign(record, "alice", host=OTHER_HOST)


def test_a_key_that_the_person_revoked_is_never_pinned() -> None:
    record = start().with_revocation(compute_named_key_id("alice"), "stolen")
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice"), make_key_entry("bob")]), record=record
    )
    assert signers(record, "alice", "bob") == ["bob"]


def test_an_index_without_a_usable_key_pins_nothing_yet() -> None:
    record = believed(make_index_document(1, keys=[make_key_entry("alice")], revoked=["alice"]))
    assert not record.is_pinned(HOST, "acme")
    assert signers(
        believed(make_index_document(2, keys=[make_key_entry("bob")]), record=record), "bob"
    ) == ["bob"]


def test_a_registry_cannot_rename_the_keys_of_the_person() -> None:
    mine = TrustedKey(make_named_key("alice").public, "my-laptop", (Grant("local"),))
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]), record=start().with_key(mine)
    )
    trusted = record.find_key(compute_named_key_id("alice"))
    assert trusted is not None
    assert trusted.name == "my-laptop"
    assert trusted.grants == (Grant("acme", None, HOST), Grant("local"))


def test_a_thousand_keys_in_one_chain_are_followed() -> None:
    keys = [make_named_key(f"link {n}") for n in range(1000)]
    entries = [
        KeyEntry(new.public, sign_key_statement(namespace="acme", new=new.public, by=old))
        for old, new in zip([make_named_key("alice"), *keys], keys, strict=False)
    ]
    record = believed(
        make_index_document(1, keys=[make_key_entry("alice")]),
        make_index_document(2, keys=entries[::-1]),
    )
    assert len(record.list_pinned_keys(HOST, "acme")) == 1001


class TestStore:
    """The same on disk, with what a person is told."""

    @pytest.fixture
    def trust(self, tmp_path: Path) -> TrustStore:
        store = TrustStore(tmp_path / "trust.json")
        store.add_registry(KNOWN)
        return store

    def test_every_change_is_told_once(self, trust: TrustStore) -> None:
        first = make_index_document(1, keys=[make_key_entry("alice")])
        assert pin(first, trust) == [
            f"pinned for acme/* of {HOST}: key {compute_named_key_id('alice')} (first install of "
            "the namespace; compare it with what the publisher says)"
        ]
        assert pin(first, trust) == []
        second = make_index_document(
            2, keys=[make_key_entry("bob", endorsed_by="alice")], revoked=["carol"]
        )
        assert pin(second, trust) == [
            f"pinned for acme/* of {HOST}: key {compute_named_key_id('bob')} (a key that you "
            "trust already vouches for it)"
        ]
        assert trust.read().find_revocation(
            compute_named_key_id("carol"), namespace="acme", registry=HOST
        )
        assert signers(TrustStore(trust.path).read(), "alice", "bob") == ["alice", "bob"]
        trust.check_integrity()

    def test_nothing_is_pinned_when_a_signature_is_wrong(self, trust: TrustStore) -> None:
        """Attack 113: the first install of a namespace fails, and must leave no key behind."""
        before = trust.path.read_bytes()

        def refuse(record: TrustRecord) -> None:
            assert signers(record, "alice") == ["alice"]  # it is verified with the key
            raise SignatureError("wrong")

        with pytest.raises(SignatureError):
            pin_verified_keys(
                [(make_index_document(1, keys=[make_key_entry("alice")]), KNOWN)], trust, refuse
            )
        assert trust.path.read_bytes() == before

    def test_it_is_verified_with_what_another_process_pinned_meanwhile(
        self, trust: TrustStore
    ) -> None:
        """The keys of the document count no more once others were pinned."""
        seen: list[list[str]] = []

        class Raced(TrustStore):
            """Another process pins bob between the first look and the change."""

            def update(self, change: Callable[[TrustRecord], TrustRecord]) -> TrustRecord:
                pin(make_index_document(2, keys=[make_key_entry("bob")]), trust)
                return super().update(change)

        pin_verified_keys(
            [(make_index_document(1, keys=[make_key_entry("alice")]), KNOWN)],
            Raced(trust.path),
            lambda record: seen.append(signers(record, "alice", "bob")),
        )
        assert seen == [["bob"]]
        assert signers(trust.read(), "alice", "bob") == ["bob"]

    def test_who_only_asked_hears_what_is_revoked_and_pins_nothing(self, trust: TrustStore) -> None:
        assert (
            apply_revocations(
                make_index_document(1, keys=[make_key_entry("alice")], revoked=["bob"]),
                KNOWN,
                trust,
            )
            == []
        )
        assert not trust.read().is_pinned(HOST, "acme")
        pin(make_index_document(1, keys=[make_key_entry("alice"), make_key_entry("bob")]), trust)
        later = make_index_document(
            2,
            keys=[make_key_entry("alice"), make_key_entry("dave", endorsed_by="alice")],
            revoked=["bob"],
        )
        assert apply_revocations(later, KNOWN, trust) == [
            f"{compute_named_key_id('bob')} was revoked for acme/* of {HOST}: bob was lost"
        ]
        assert apply_revocations(later, KNOWN, trust) == []
        assert signers(trust.read(), "alice", "bob", "dave") == ["alice"]

    def test_nothing_is_written_when_nothing_changes(self, trust: TrustStore) -> None:
        pin(make_index_document(1, keys=[make_key_entry("alice")]), trust)
        before = trust.path.stat().st_ino
        pin(
            make_index_document(2, keys=[make_key_entry("alice"), make_key_entry("mallory")]), trust
        )
        assert trust.path.stat().st_ino == before
