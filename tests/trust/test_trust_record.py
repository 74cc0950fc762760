"""What is trusted, as a value: the document, grants, revocations and the decision."""

import json
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from expertctl.errors import (
    DigestError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import Digest, PackageName
from expertctl.schema.validation import find_problems
from expertctl.trust.grants import (
    MAX_BYTES,
    Grant,
    Revocation,
    TrustedKey,
    make_grants,
    parse_namespace,
)
from expertctl.trust.keys import PrivateKey, PublicKey
from expertctl.trust.trust_record import TrustRecord
from tests.trust.forged_bundles import make_rfc_key, setting

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "trust"
SQL = PackageName("acme", "sql")
CONTENT = Digest.compute(b"content")
OTHER = Digest.compute(b"other")


def examples(kind: str) -> list[Path]:
    return sorted((EXAMPLES / kind).glob("*.json"))


def trusted(*grants: Grant, name: str = "me") -> TrustedKey:
    return TrustedKey(make_rfc_key().public, name, grants)


def authorise(record: TrustRecord, package: PackageName = SQL, content: Digest = CONTENT) -> str:
    key_id = make_rfc_key().public.key_id
    return record.authorise(key_id, package=package, content_digest=content).key_id


@pytest.mark.parametrize("path", examples("valid"), ids=lambda p: p.stem)
def test_a_valid_document_is_read_and_written_back_as_it_was(path: Path) -> None:
    data = path.read_bytes()
    assert TrustRecord.parse(data, what=path.name).encode() == data


@pytest.mark.parametrize("path", examples("invalid"), ids=lambda p: p.stem)
def test_an_invalid_document_is_refused_with_the_file_and_the_way_out(path: Path) -> None:
    with pytest.raises(InvalidPackageError, match=path.name):
        TrustRecord.parse(path.read_bytes(), what=path.name)


def edited(*path: str | int, value: object) -> bytes:
    document = json.loads((EXAMPLES / "valid" / "every-key.json").read_text())
    setting(*path, value=value)(document)
    return json.dumps(document).encode()


def test_every_invalid_example_is_refused_by_the_schema_already() -> None:
    assert len(examples("invalid")) >= 10
    for path in examples("invalid"):
        assert find_problems(json.loads(path.read_text()), "trust"), path.name
    for path in examples("valid"):
        assert find_problems(json.loads(path.read_text()), "trust") == []


GARBAGE = "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n"
TWO_LIMITS = [
    {"namespace": "acme", "content_digests": None},
    {"namespace": "acme", "content_digests": [str(CONTENT)]},
]
TWO_REASONS = [{"key_id": str(OTHER), "reason": reason} for reason in ("one", "two")]
TWO_NAMES = [
    {
        "key_id": make_rfc_key().public.key_id,
        "name": name,
        "public_key": make_rfc_key().public.pem().decode(),
        "grants": [{"namespace": "acme", "content_digests": None}],
    }
    for name in ("one", "two")
]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (edited("keys", 0, "key_id", value=str(OTHER)), "its key has"),
        (edited("keys", 0, "public_key", value=GARBAGE), "not a key in PEM"),
        (edited("keys", 0, "grants", value=TWO_LIMITS), "two grants for one namespace"),
        (edited("revoked", value=TWO_REASONS), "revoked: sha256:.* is there twice"),
        (edited("keys", value=TWO_NAMES), "keys: sha256:.* is there twice"),
        (edited("schema", value=1.0), "Expected `int`"),
    ],
)
def test_what_a_schema_cannot_say_is_checked_too(data: bytes, message: str) -> None:
    with pytest.raises(InvalidPackageError, match=message):
        TrustRecord.parse(data, what="trust.json")


def test_very_many_revocations_are_read_at_once() -> None:
    rows = [{"key_id": f"sha256:{number:064x}", "reason": ""} for number in range(50_000)]
    record = TrustRecord.parse(edited("revoked", value=rows), what="trust.json")
    assert len(record.revoked) == 50_000


def test_every_value_of_the_example_is_understood() -> None:
    record = TrustRecord.parse((EXAMPLES / "valid" / "every-key.json").read_bytes(), what="x")
    me, starter = record.keys
    assert me.key == make_rfc_key().public
    assert (me.name, me.namespaces) == ("me", ("acme", "local"))
    limits = (f"sha256:{'11' * 32}", f"sha256:{'22' * 32}")
    assert starter.grants == (Grant("starter", limits),)
    assert starter.key.algorithm == "ed25519"
    assert record.find_revocation(f"sha256:{'ab' * 32}") == Revocation(
        f"sha256:{'ab' * 32}", "laptop stolen"
    )
    assert record.find_revocation(starter.key_id) == Revocation(starter.key_id, "")
    assert record.find_revocation(me.key_id) is None


def test_all_problems_are_reported_at_once() -> None:
    document = json.loads((EXAMPLES / "valid" / "every-key.json").read_text())
    document["keys"][0]["name"] = "A B"
    document["revoked"][0]["key_id"] = "me"
    document["more"] = 1
    with pytest.raises(InvalidPackageError, match="3 problems") as refused:
        TrustRecord.parse(json.dumps(document).encode(), what="trust.json")
    assert "restore trust.json" in refused.value.hint


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"\xff", b'{"schema":1,"schema":1}', b" " * (MAX_BYTES + 1)],
)
def test_what_is_not_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError, match=r"trust\.json"):
        TrustRecord.parse(data, what="trust.json")


def test_a_key_may_sign_its_namespaces_alone() -> None:
    record = TrustRecord().with_key(trusted(Grant("acme"), Grant("local")))
    assert authorise(record) == make_rfc_key().public.key_id
    assert authorise(record, PackageName("local", "x")) == make_rfc_key().public.key_id
    for namespace in ("acm", "acme-two", "globex"):
        with pytest.raises(TrustError, match=f"may not sign '{namespace}/") as refused:
            authorise(record, PackageName(namespace, "sql"))
        assert not isinstance(refused.value, RevokedError)
        assert "trust list" in refused.value.hint


def test_an_unknown_key_is_refused_with_the_way_to_trust_it() -> None:
    with pytest.raises(TrustError, match=r"acme/sql: key sha256:.* is not trusted") as refused:
        authorise(TrustRecord())
    assert "trust add KEY.pem --namespace acme" in refused.value.hint


def test_a_key_limited_to_contents_vouches_for_those_alone() -> None:
    record = TrustRecord().with_key(trusted(Grant("acme", (str(CONTENT),))))
    assert authorise(record) == make_rfc_key().public.key_id
    with pytest.raises(TrustError, match="valid for fixed contents"):
        authorise(record, content=OTHER)


def test_adding_a_key_again_joins_its_grants_and_takes_the_newer_name() -> None:
    one, two = str(CONTENT), str(OTHER)
    record = TrustRecord()
    record = record.with_key(trusted(Grant("acme", (one,)), Grant("local"), name="old"))
    record = record.with_key(trusted(Grant("acme", (two,)), Grant("zoo", (one,)), name="new"))
    (key,) = record.keys
    assert key.name == "new"
    assert key.grants == (
        Grant("acme", tuple(sorted([one, two]))),
        Grant("local"),
        Grant("zoo", (one,)),
    )


def test_a_limit_in_one_namespace_is_not_lifted_by_a_grant_for_another() -> None:
    record = TrustRecord().with_key(trusted(Grant("acme", (str(CONTENT),))))
    record = record.with_key(trusted(Grant("local")))
    with pytest.raises(TrustError, match="valid for fixed contents"):
        authorise(record, content=OTHER)
    assert authorise(record, PackageName("local", "x"), OTHER) == make_rfc_key().public.key_id
    lifted = record.with_key(trusted(Grant("acme")))
    assert authorise(lifted, content=OTHER) == make_rfc_key().public.key_id


def test_a_revoked_key_authorises_nothing_whatever_it_was_granted() -> None:
    record = TrustRecord().with_key(trusted(Grant("acme"), Grant("local")))
    revoked = record.with_revocation(make_rfc_key().public.key_id, "laptop stolen")
    for package in (SQL, PackageName("local", "x"), PackageName("globex", "x")):
        with pytest.raises(RevokedError, match="was revoked: laptop stolen") as refused:
            authorise(revoked, package)
        assert str(package) in refused.value.hint


def test_a_revocation_outlives_the_removal_and_bars_the_return() -> None:
    key_id = make_rfc_key().public.key_id
    record = TrustRecord().with_key(trusted(Grant("acme"))).with_revocation(key_id, "lost")
    record = record.without_key(key_id)
    assert record.keys == ()
    with pytest.raises(RevokedError, match="lost"):
        authorise(record)
    with pytest.raises(RevokedError, match="was revoked: lost") as refused:
        record.with_key(trusted(Grant("acme")))
    assert "the key that replaces it" in refused.value.hint


def test_a_key_that_nobody_knows_can_be_revoked_in_advance() -> None:
    record = TrustRecord().with_revocation(make_rfc_key().public.key_id, "")
    with pytest.raises(RevokedError, match=r"was revoked$"):
        record.with_key(trusted(Grant("acme")))


def test_revoking_twice_keeps_the_first_reason() -> None:
    key_id = make_rfc_key().public.key_id
    record = TrustRecord().with_revocation(key_id, "first").with_revocation(key_id, "second")
    assert record.revoked == (Revocation(key_id, "first"),)


@pytest.mark.parametrize("key_id", ["", "me", "sha256:", "sha256:" + "AB" * 32, "ab" * 32])
def test_only_a_key_id_can_be_revoked(key_id: str) -> None:
    with pytest.raises(UsageError, match="is not a key id"):
        TrustRecord().with_revocation(key_id, "")


@pytest.mark.parametrize("reason", ["a\nb", "\x1b[31m", "x" * 501])
def test_a_reason_is_one_short_printable_line(reason: str) -> None:
    with pytest.raises(UsageError, match="one line"):
        TrustRecord().with_revocation(make_rfc_key().public.key_id, reason)


def test_a_key_that_is_not_trusted_cannot_be_removed() -> None:
    with pytest.raises(NotFoundError, match="is not trusted"):
        TrustRecord().without_key(make_rfc_key().public.key_id)


@pytest.mark.parametrize(
    ("text", "name"), [("acme", "acme"), ("acme/*", "acme"), ("local/*", "local"), ("a-1", "a-1")]
)
def test_a_namespace_may_be_written_with_its_star(text: str, name: str) -> None:
    assert parse_namespace(text) == name


@pytest.mark.parametrize(
    "text", ["", "*", "*/*", "/*", "acme/sql", "acme/", "Acme", "acm*", "a" * 65, "acme/*/*", "ä"]
)
def test_no_pattern_covers_more_or_less_than_a_namespace(text: str) -> None:
    with pytest.raises(UsageError, match="is not a namespace"):
        parse_namespace(text)


def test_grants_are_sorted_and_said_once() -> None:
    assert make_grants(["b", "a/*", "b/*"], None) == (Grant("a"), Grant("b"))
    twice = [str(OTHER), str(CONTENT), str(OTHER)]
    assert make_grants(["a"], twice) == (Grant("a", tuple(sorted(set(twice)))),)


def test_a_grant_needs_a_namespace_and_contents_if_limited() -> None:
    with pytest.raises(UsageError, match="for a namespace"):
        make_grants([], None)
    with pytest.raises(UsageError, match="no content at all"):
        make_grants(["acme"], [])
    with pytest.raises(DigestError):
        make_grants(["acme"], ["sha256:short"])


KEYS: list[PublicKey] = [PrivateKey.generate("ed25519").public for _ in range(3)]
NAMESPACES = ["acme", "local"]
CONTENTS = [str(CONTENT), str(OTHER)]


class TrustMachine(RuleBasedStateMachine):
    """Any order of changes, against a model of sets."""

    @initialize()
    def start(self) -> None:
        self.record = TrustRecord()
        self.granted: dict[tuple[str, str], set[str]] = {}
        self.revoked: set[str] = set()

    @rule(
        key=st.sampled_from(KEYS),
        namespaces=st.sets(st.sampled_from(NAMESPACES), min_size=1),
        contents=st.none() | st.sets(st.sampled_from(CONTENTS), min_size=1),
    )
    def add(self, key: PublicKey, namespaces: set[str], contents: set[str] | None) -> None:
        grants = make_grants(namespaces, None if contents is None else list(contents))
        if key.key_id in self.revoked:
            with pytest.raises(RevokedError):
                self.record.with_key(TrustedKey(key, "k", grants))
            return
        self.record = self.record.with_key(TrustedKey(key, "k", grants))
        for namespace in namespaces:
            known = self.granted.setdefault((key.key_id, namespace), set())
            known |= {*CONTENTS} if contents is None else contents

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: PublicKey) -> None:
        if any(key_id == key.key_id for key_id, _ in self.granted):
            self.record = self.record.without_key(key.key_id)
        else:
            with pytest.raises(NotFoundError):
                self.record.without_key(key.key_id)
        self.granted = {k: v for k, v in self.granted.items() if k[0] != key.key_id}

    @rule(key=st.sampled_from(KEYS))
    def revoke(self, key: PublicKey) -> None:
        self.record = self.record.with_revocation(key.key_id, "why")
        self.revoked.add(key.key_id)

    @invariant()
    def decisions_follow_the_model(self) -> None:
        for key in KEYS:
            for namespace in NAMESPACES:
                for content in CONTENTS:
                    granted = content in self.granted.get((key.key_id, namespace), set())
                    allowed = granted and key.key_id not in self.revoked
                    assert self.decides(key, namespace, content) == allowed

    @invariant()
    def the_document_says_the_same(self) -> None:
        assert TrustRecord.parse(self.record.encode(), what="x") == self.record

    def decides(self, key: PublicKey, namespace: str, content: str) -> bool:
        package, digest = PackageName(namespace, "x"), Digest.parse(content)
        try:
            found = self.record.authorise(key.key_id, package=package, content_digest=digest)
        except RevokedError:
            return False
        except TrustError:
            return key.key_id in self.revoked  # then the wrong error: the model says False
        return found == key


TestTrustMachine = TrustMachine.TestCase
TestTrustMachine.settings = settings(deadline=None, max_examples=25, stateful_step_count=12)


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"\xff", b"{}", b" " * (MAX_BYTES + 1)])
def test_every_kind_of_damage_has_the_same_way_out(data: bytes) -> None:
    with pytest.raises(InvalidPackageError) as refused:
        TrustRecord.parse(data, what="trust.json")
    assert "restore trust.json from a backup" in refused.value.hint
