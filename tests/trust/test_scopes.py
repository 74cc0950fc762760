"""What counts where: grants and revocations of a registry, and of the person."""

import json
from pathlib import Path

import pytest

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import Digest, PackageName, find_authorities, find_namespace_registries
from expertctl.trust import grants as grants_module
from expertctl.trust.grants import Grant, KnownRegistry, TrustedKey, make_grants
from expertctl.trust.keys import PrivateKey, PublicKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore
from tests.trust.forged_bundles import make_rfc_key

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "trust" / "valid"
ONE, TWO = "one.example.com", "two.example.com"
SQL = PackageName("acme", "sql")
CONTENT = Digest.compute(b"content")
KEY = make_rfc_key().public
INDEX = PrivateKey.generate("ed25519").public


def registry(host: str, *namespaces: str, index_key: PublicKey = INDEX) -> KnownRegistry:
    return KnownRegistry(host, f"https://{host}", index_key, namespaces)


def both_known() -> TrustRecord:
    return TrustRecord().with_registry(registry(ONE)).with_registry(registry(TWO))


def pinned(*hosts: str) -> TrustRecord:
    record = both_known()
    for host in hosts:
        record = record.with_pins(host, "acme", [KEY])
    return record


def given(*grants: Grant) -> TrustRecord:
    return both_known().with_key(TrustedKey(KEY, "acme", grants))


def may(record: TrustRecord, host: str | None = None, package: PackageName = SQL) -> bool:
    try:
        record.authorise(KEY.key_id, package=package, content_digest=CONTENT, registry=host)
    except TrustError:
        return False
    return True


@pytest.mark.parametrize("host", [None, "local", ONE, TWO])
def test_what_the_person_grants_counts_wherever_a_package_comes_from(host: str | None) -> None:
    assert may(given(Grant("acme")), host)


def test_what_a_registry_grants_counts_for_packages_from_there() -> None:
    record = pinned(ONE)
    assert may(record, ONE)
    assert not may(record, TWO)
    assert not may(record, ONE, PackageName("zoo", "ants"))


@pytest.mark.parametrize("host", [None, "local"])
def test_a_file_counts_as_from_the_one_registry_of_its_namespace(host: str | None) -> None:
    ambiguous = given(Grant("acme", None, ONE), Grant("acme", None, TWO))
    assert may(pinned(ONE), host)
    assert not may(ambiguous, host)
    assert may(ambiguous.with_registry(registry(TWO, "acme")), host)
    assert not may(TrustRecord(), host)


def test_a_namespace_stays_that_of_its_first_registry_when_another_is_pinned() -> None:
    record = pinned(ONE, TWO)
    assert record.list_registries_for("acme") == (ONE,)
    assert record.find_conflicting_registry("acme", TWO) == ONE
    assert record.find_conflicting_registry("acme", ONE) is None
    assert record.find_conflicting_registry("acme", "local") is None
    assert record.with_registry(registry(TWO, "acme")).list_registries_for("acme") == (TWO,)


def test_a_revocation_by_a_registry_holds_there_and_for_files_of_its_namespace() -> None:
    record = pinned(ONE).with_registry_revocations(ONE, "acme", [(KEY.key_id, "stolen")])
    record = record.with_key(TrustedKey(KEY, "acme", (Grant("acme"), Grant("zoo"))))
    for host in (ONE, "local", None):
        with pytest.raises(RevokedError, match=f"revoked by {ONE}: stolen"):
            record.authorise(KEY.key_id, package=SQL, content_digest=CONTENT, registry=host)
    assert may(record, TWO)
    assert may(record, ONE, PackageName("zoo", "ants"))
    assert record.find_revocation(KEY.key_id) is None
    assert record.find_revocation(KEY.key_id, namespace="acme") is not None
    assert record.find_revocation(KEY.key_id, namespace="acme", registry=TWO) is None


def test_a_total_revocation_holds_everywhere() -> None:
    record = pinned(ONE, TWO).with_revocation(KEY.key_id, "stolen")
    assert [may(record, host) for host in (ONE, TWO, None)] == [False] * 3


def test_a_total_and_a_scoped_revocation_stand_side_by_side() -> None:
    record = TrustRecord().with_registry_revocations(ONE, "acme", [(KEY.key_id, "by one")])
    record = record.with_registry_revocations(ONE, "acme", [(KEY.key_id, "again")])
    record = record.with_revocation(KEY.key_id, "by me")
    assert [(r.reason, r.scope) for r in record.revoked] == [
        ("by one", (ONE, "acme")),
        ("by me", None),
    ]
    assert TrustRecord.parse(record.encode(), what="it") == record


def test_nothing_is_granted_where_it_was_revoked() -> None:
    record = both_known().with_registry_revocations(ONE, "acme", [(KEY.key_id, "stolen")])
    with pytest.raises(RevokedError, match="stolen"):
        record.with_pins(ONE, "acme", [KEY])
    assert may(record.with_pins(TWO, "acme", [KEY]), TWO)
    assert not may(record.with_key(TrustedKey(KEY, "acme", (Grant("acme"),))), ONE)


def test_a_bad_revocation_of_a_registry_is_refused() -> None:
    with pytest.raises(UsageError, match="not a key id"):
        TrustRecord().with_registry_revocations(ONE, "acme", [("me", "")])
    with pytest.raises(UsageError, match="one line"):
        TrustRecord().with_registry_revocations(ONE, "acme", [(KEY.key_id, "a\nb")])


def test_grants_of_one_namespace_from_two_places_stand_side_by_side() -> None:
    content = (str(CONTENT),)
    record = given(Grant("acme", content)).with_pins(ONE, "acme", [KEY])
    trusted = record.find_key(KEY.key_id)
    assert trusted is not None
    assert trusted.grants == (Grant("acme", content), Grant("acme", None, ONE))
    assert trusted.namespaces == ("acme",)
    other = Digest.compute(b"other")
    with pytest.raises(TrustError, match="fixed contents"):
        record.authorise(KEY.key_id, package=SQL, content_digest=other, registry=TWO)
    assert record.authorise(KEY.key_id, package=SQL, content_digest=other, registry=ONE) == KEY


def test_removing_a_registry_takes_its_pins_and_leaves_its_revocations() -> None:
    lost = PrivateKey.generate("ed25519").public.key_id
    record = pinned(ONE, TWO).with_registry_revocations(ONE, "acme", [(lost, "")])
    record = record.without_registry(ONE)
    assert record.list_pinned_keys(ONE, "acme") == []
    assert may(record, TWO)
    assert record.list_registries_for("acme") == (TWO,)
    assert record.find_revocation(lost, namespace="acme", registry=ONE) is not None
    assert record.without_registry(TWO).keys == ()
    with pytest.raises(NotFoundError, match="no registry is known as"):
        record.without_registry(ONE)


def test_accepting_a_registry_again_keeps_what_was_pinned_and_adds_namespaces() -> None:
    record = pinned(ONE).with_registry(registry(ONE, "zoo"))
    renewed = PrivateKey.generate("ed25519").public
    record = record.with_registry(registry(ONE, "acme", index_key=renewed))
    known = record.find_registry(ONE)
    assert known is not None
    assert known.namespaces == ("acme", "zoo")
    assert known.pinned == ("acme",)
    assert known.index_key == renewed


def test_no_registry_is_called_as_files_are() -> None:
    with pytest.raises(UsageError, match="stands for what came from files"):
        TrustRecord().with_registry(registry("local"))


def test_the_way_out_names_the_registry_when_there_is_one() -> None:
    with pytest.raises(TrustError, match="not trusted") as refused:
        TrustRecord().authorise(KEY.key_id, package=SQL, content_digest=CONTENT, registry=ONE)
    assert f"--registry {ONE}" in refused.value.hint
    with pytest.raises(TrustError, match="not trusted") as refused:
        TrustRecord().authorise(KEY.key_id, package=SQL, content_digest=CONTENT, registry="local")
    assert "--registry" not in refused.value.hint
    with pytest.raises(TrustError, match=f"may not sign 'acme/\\*' from {TWO}"):
        pinned(ONE).authorise(KEY.key_id, package=SQL, content_digest=CONTENT, registry=TWO)


def test_homes_are_what_the_person_meant_or_else_what_was_pinned() -> None:
    assert find_namespace_registries(
        "acme", assigned=[(ONE, "zoo")], pinned=[(TWO, "acme"), (ONE, "acme")]
    ) == (ONE, TWO)
    assert find_namespace_registries("acme", assigned=[(ONE, "acme")], pinned=[(TWO, "acme")]) == (
        ONE,
    )
    assert find_namespace_registries("acme", assigned=[], pinned=[]) == ()


@pytest.mark.parametrize(
    ("registry", "belongs_to", "hosts"),
    [
        (None, [ONE], {ONE}),
        ("local", [ONE], {ONE}),
        ("local", [ONE, TWO], set()),
        ("local", [], set()),
        (ONE, [TWO], {ONE}),
        ("mirror.example", [ONE], {ONE, "mirror.example"}),
        ("mirror.example", [ONE, TWO], {"mirror.example"}),
    ],
)
def test_a_known_registry_speaks_for_itself_and_a_home_for_files_and_mirrors(
    registry: str | None, belongs_to: list[str], hosts: set[str]
) -> None:
    assert find_authorities(registry, registries=belongs_to, known=[ONE, TWO]) == hosts


def test_a_mirror_without_an_index_carries_what_the_home_says() -> None:
    """Attack: what a registry revoked comes again by way of a host that has no index."""
    mirror = "mirror.example"
    record = pinned(ONE)
    assert may(record, mirror)
    revoked = record.with_registry_revocations(ONE, "acme", [(KEY.key_id, "stolen")])
    own = revoked.with_key(TrustedKey(KEY, "acme", (Grant("acme"),)))
    assert not may(revoked, mirror)
    assert not may(own, mirror)
    assert may(own, TWO)
    with pytest.raises(RevokedError, match=f"revoked by {ONE}"):
        own.with_key(TrustedKey(KEY, "acme", (Grant("acme", None, mirror),)))


def test_what_a_removed_registry_revoked_stays_revoked_for_what_came_from_there() -> None:
    record = pinned(ONE).with_registry_revocations(ONE, "acme", [(KEY.key_id, "stolen")])
    record = record.with_key(TrustedKey(KEY, "acme", (Grant("acme"),))).without_registry(ONE)
    assert not may(record, ONE)


def test_a_file_of_before_registries_is_read_and_written_back_as_it_was() -> None:
    old = (EXAMPLES / "every-key.json").read_bytes()
    assert b"registr" not in old
    record = TrustRecord.parse(old, what="trust.json")
    assert record.registries == ()
    assert {grant.registry for key in record.keys for grant in key.grants} == {None}
    assert {revocation.scope for revocation in record.revoked} == {None}
    assert record.encode() == old


def test_a_file_of_before_registries_goes_on_with_them(tmp_path: Path) -> None:
    path = tmp_path / "trust.json"
    path.write_bytes((EXAMPLES / "every-key.json").read_bytes())
    path.chmod(0o600)
    store, before = TrustStore(path), TrustStore(path).read()
    store.add_registry(registry(ONE, "acme"))
    store.add(INDEX, name="bob", namespaces=["acme"], registry=ONE)
    after = store.read()
    assert after.keys[: len(before.keys)] == before.keys
    assert after.revoked == before.revoked
    assert after.list_registries_for("acme") == (ONE,)
    store.remove_registry(ONE)
    assert store.read() == before
    assert path.read_bytes() == (EXAMPLES / "every-key.json").read_bytes()


INCONSISTENT = {
    "a registry twice": lambda d: d["registries"].append(
        {**d["registries"][0], "url": "https://other.example"}
    ),
    "a namespace of two registries": lambda d: d["registries"][0].update(namespaces=["acme"]),
    "a scoped revocation twice": lambda d: d["revoked"].append(
        {**d["revoked"][-1], "reason": "again"}
    ),
    "two grants for one place": lambda d: d["keys"][0]["grants"].append(
        {**d["keys"][0]["grants"][1], "content_digests": [f"sha256:{'ab' * 32}"]}
    ),
    "an index key that is none": lambda d: d["registries"][0].update(
        index_key="-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
    ),
}


@pytest.mark.parametrize("edit", INCONSISTENT.values(), ids=INCONSISTENT.keys())
def test_what_contradicts_itself_is_refused(edit: object) -> None:
    document = json.loads((EXAMPLES / "registries.json").read_text())
    edit(document)  # type: ignore[operator]  # a function of a document
    with pytest.raises(InvalidPackageError, match=r"trust\.json"):
        TrustRecord.parse(json.dumps(document).encode(), what="trust.json")


def test_a_file_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attack: a registry lists so much that nothing could be trusted any more."""
    store = TrustStore(tmp_path / "trust.json")
    store.add(KEY, name="me", namespaces=["acme"])
    before = store.path.read_bytes()
    monkeypatch.setattr(grants_module, "MAX_BYTES", len(before) + 10)
    with pytest.raises(TrustError, match="fills"):
        store.update(
            lambda record: record.with_registry_revocations(ONE, "acme", [(KEY.key_id, "x")])
        )
    assert store.path.read_bytes() == before


def test_grants_for_a_registry_are_made_for_it_alone() -> None:
    assert make_grants(["acme/*", "zoo"], None, registry=ONE) == (
        Grant("acme", None, ONE),
        Grant("zoo", None, ONE),
    )
