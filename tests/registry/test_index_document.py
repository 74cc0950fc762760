"""The index document as a value and as bytes: what is read is what was written, and only that."""

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.reference import Digest, PackageName, Version
from expertctl.registry import index_document
from expertctl.registry.index_document import (
    IndexDocument,
    Release,
    SignedForm,
    format_time,
    parse_time,
)
from expertctl.schema.manifest import BaseRequirement
from tests.registry.indexes import (
    SQL,
    TIME,
    compute_named_key_id,
    make_index_document,
    make_key_entry,
    make_named_key,
    make_release,
)

EXAMPLES = Path(__file__).parents[2] / "schemas" / "examples" / "index"
Edit = Callable[[dict[str, Any]], object]

names = st.from_regex(r"[a-z0-9]{1,5}(-[a-z0-9]{1,5})?", fullmatch=True)
digests = st.binary(max_size=8).map(Digest.compute)
lines = st.text(st.characters(blacklist_categories=("Cc", "Cs", "Zl", "Zp")), max_size=20)
versions = st.builds(
    Version,
    *[st.integers(0, 3)] * 3,
    st.one_of(st.just(()), st.tuples(st.sampled_from(["rc", "1", "beta-2"]))),
)
times = st.datetimes(datetime(2000, 1, 1), datetime(2100, 1, 1)).map(
    lambda moment: format_time(moment.replace(tzinfo=UTC))
)
bases = st.builds(
    BaseRequirement,
    name=lines.filter(bool),
    arch=digests.map(str),
    tokenizer=digests.map(str),
    revision=st.none() | lines.filter(bool),
    weights=st.none() | digests.map(str),
    accepts=st.lists(digests.map(str), max_size=2).map(tuple),
    tokenizer_version=st.sampled_from([1, 2]),
)
references = st.lists(st.sampled_from(["acme/x", "acme/y@^1.2", "r.example.com/a/b@*"]), max_size=2)


@st.composite
def documents(draw: st.DrawFn) -> IndexDocument:
    used = draw(st.lists(versions, unique=True, max_size=4))
    releases = []
    for number, version in enumerate(sorted(used)):
        forms = tuple(
            SignedForm(
                Digest.compute(f"{number} {n}".encode()),
                compute_named_key_id("alice"),
                draw(st.integers(0, 9)),
            )
            for n in range(draw(st.integers(1, 3)))
        )
        releases.append(
            Release(
                version=version,
                content_digest=draw(digests),
                forms=forms,
                size=draw(st.integers(0, 2**53 - 1)),
                published=draw(times),
                yanked=draw(st.none() | lines),
                kinds=draw(st.sampled_from([("lora",), ("ia3", "soft_prompt")])),
                base=draw(bases),
                requires=tuple(draw(references)),
                conflicts=tuple(draw(references)),
                description=draw(st.text(st.characters(blacklist_categories=("Cs",)), max_size=9)),
            )
        )
    keys = draw(
        st.sampled_from(
            [
                (),
                (make_key_entry("alice"),),
                (make_key_entry("alice"), make_key_entry("bob", endorsed_by="alice")),
            ]
        )
    )
    return replace(
        make_index_document(draw(st.integers(1, 2**53 - 1)), releases=releases, revoked=["carol"]),
        package=PackageName(draw(names), draw(names)),
        updated=draw(times),
        keys=keys,
    )


@given(documents())
def test_a_document_is_read_as_it_was_written(document: IndexDocument) -> None:
    data = document.encode()
    assert IndexDocument.parse(data, what="index") == document
    assert rfc8785.dumps(json.loads(data)) == data


def test_the_bytes_are_those_of_the_format() -> None:
    document = make_index_document(3, releases=[make_release()], keys=[make_key_entry("alice")])
    pem = make_named_key("alice").public.pem().decode()
    base = {
        "accepts": [],
        "arch": str(Digest.compute(b"arch")),
        "name": "tiny",
        "revision": None,
        "tokenizer": str(Digest.compute(b"tokenizer")),
        "weights": None,
    }
    form = {
        "package_digest": str(Digest.compute(b"1.0.0  alice")),
        "signer": compute_named_key_id("alice"),
        "size": 1234,
    }
    released = {
        "base": base,
        "conflicts": [],
        "content_digest": str(Digest.compute(b"content of 1.0.0 ")),
        "description": "",
        "forms": [form],
        "kinds": ["lora"],
        "published": TIME,
        "requires": [],
        "size": 5678,
        "version": "1.0.0",
        "yanked": None,
    }
    expected = {
        "description": "Writes SQL",
        "keys": [{"key_id": compute_named_key_id("alice"), "public_key": pem, "statement": None}],
        "package": "acme/sql",
        "releases": [released],
        "revision": 3,
        "revoked": [],
        "schema": 1,
        "updated": TIME,
    }
    assert document.encode() == json.dumps(expected, separators=(",", ":")).encode()


@pytest.mark.parametrize("path", sorted((EXAMPLES / "valid").glob("*.json")), ids=lambda p: p.stem)
def test_a_valid_example_is_read_and_written_back_the_same(path: Path) -> None:
    document = IndexDocument.parse(path.read_bytes(), what=path.name)
    assert json.loads(document.encode()) == json.loads(path.read_text())


def edited(edit: Edit) -> bytes:
    document = json.loads((EXAMPLES / "valid" / "every-key.json").read_text())
    edit(document)
    return json.dumps(document).encode()


def set_in(*path: str | int, value: Any) -> Edit:
    def edit(document: Any) -> None:
        for step in path[:-1]:
            document = document[step]
        document[path[-1]] = value

    return edit


def swap_releases(document: dict[str, Any]) -> None:
    document["releases"].reverse()


def repeat_release(document: dict[str, Any]) -> None:
    document["releases"].append(document["releases"][-1])


def repeat_form(document: dict[str, Any]) -> None:
    document["releases"][1]["forms"].append(document["releases"][0]["forms"][0])


def repeat_key(document: dict[str, Any]) -> None:
    document["keys"].append(document["keys"][0])


def repeat_revoked(document: dict[str, Any]) -> None:
    document["revoked"].append(document["revoked"][0])


def swap_key_ids(document: dict[str, Any]) -> None:
    one, two = document["keys"]
    one["key_id"], two["key_id"] = two["key_id"], one["key_id"]


BAD = {
    "a lower schema": (set_in("schema", value=0), "schema"),
    "a revision that is no whole number": (set_in("revision", value=1.0), "revision"),
    "a huge revision": (set_in("revision", value=2**53), "2\\^53"),
    "a package without namespace": (set_in("package", value="sql"), "package"),
    "a package of another case": (set_in("package", value="acme/SQL"), "package"),
    "an escape in a reason": (set_in("revoked", 0, "reason", value="\x1b[2J"), "reason"),
    "an escape in a yank": (set_in("releases", 0, "yanked", value="a\nb"), "yanked"),
    "a version with build data": (set_in("releases", 0, "version", value="1.0.0+x"), "version"),
    "a version with a leading zero": (set_in("releases", 0, "version", value="01.0.0"), "version"),
    "an odd prerelease": (set_in("releases", 0, "version", value="1.0.0-01"), "version"),
    "releases out of order": (swap_releases, "does not sort after"),
    "a version twice": (repeat_release, "does not sort after"),
    "a package digest twice": (repeat_form, "package_digest: .* is there twice"),
    "a key twice": (repeat_key, "keys: .* is there twice"),
    "a revocation twice": (repeat_revoked, "revoked: .* is there twice"),
    "key ids that were swapped": (swap_key_ids, "its key has"),
    "a day that is none": (set_in("updated", value="2026-02-30T00:00:00Z"), "no moment"),
    "a leap second": (set_in("updated", value="2016-12-31T23:59:60Z"), "no moment"),
    "a key that is none": (
        set_in(
            "keys",
            0,
            "public_key",
            value="-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----\n",
        ),
        "not a key",
    ),
    "a statement that is no base64": (set_in("keys", 1, "statement", value="AAA"), "base64"),
    "a requirement that is none": (
        set_in("releases", 0, "requires", value=["../../etc/passwd@1"]),
        "registry host|package name",
    ),
    "a constraint that is none": (
        set_in("releases", 0, "conflicts", value=["acme/x@newest"]),
        "not a version constraint",
    ),
    "a size below nothing": (set_in("releases", 0, "size", value=-1), "size"),
    "a truth for a number": (set_in("releases", 0, "size", value=True), "size"),
}


@pytest.mark.parametrize(("edit", "problem"), BAD.values(), ids=BAD.keys())
def test_what_is_not_exact_is_refused(edit: Edit, problem: str) -> None:
    with pytest.raises(InvalidPackageError, match=problem):
        IndexDocument.parse(edited(edit), what="the index")


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"\xff", b"\xef\xbb\xbf{}", b'{"schema":1,"schema":1}', b"[" * 100_000, b"NaN"],
    ids=["nothing", "array", "no utf-8", "bom", "duplicate key", "deep", "nan"],
)
def test_what_is_no_strict_json_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError):
        IndexDocument.parse(data, what="the index")


@pytest.mark.parametrize("kind", ["rsa", "p-384"])
def test_a_key_of_a_kind_that_is_not_used_is_refused_by_name(kind: str) -> None:
    new = rsa.generate_private_key(65537, 2048) if kind == "rsa" else ec.generate_private_key(
        ec.SECP384R1()
    )  # fmt: skip
    pem = new.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    edit = set_in("keys", 0, "public_key", value=pem.decode())
    with pytest.raises(InvalidPackageError, match="is not used here"):
        IndexDocument.parse(edited(edit), what="the index")


def test_all_problems_are_told_at_once() -> None:
    def edit(document: dict[str, Any]) -> None:
        swap_releases(document)
        repeat_key(document)

    with pytest.raises(InvalidPackageError) as refused:
        IndexDocument.parse(edited(edit), what="the index")
    assert len(refused.value.problems) == 2


def test_a_document_has_a_largest_size_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    document = make_index_document()
    size = len(document.encode())
    monkeypatch.setattr(index_document, "MAX_BYTES", size)
    data = document.encode()
    assert IndexDocument.parse(data, what="index") == document
    monkeypatch.setattr(index_document, "MAX_BYTES", size - 1)
    with pytest.raises(InvalidPackageError, match="too many bytes"):
        IndexDocument.parse(data, what="index")
    with pytest.raises(InvalidPackageError, match="acme/sql: its index document has"):
        document.encode()


def test_releases_and_forms_are_found() -> None:
    document = make_index_document(
        releases=[make_release("1.0.0", "alice", "bob"), make_release("2.0.0-rc.1")]
    )
    first = document.releases[0]
    assert document.find_release(Version(1, 0, 0)) is first
    assert document.find_release(Version(2, 0, 0)) is None
    assert first.find_form(first.forms[1].package_digest) is first.forms[1]
    assert first.find_form(Digest.compute(b"else")) is None


def test_a_revoked_key_is_told_from_others() -> None:
    document = make_index_document(revoked=["bob"])
    assert document.is_revoked(compute_named_key_id("bob"))
    assert not document.is_revoked(compute_named_key_id("alice"))


def test_times_are_kept_to_the_second_in_utc() -> None:
    moment = datetime(2026, 1, 2, 5, 4, 5, 999_999, tzinfo=timezone(timedelta(hours=2)))
    assert format_time(moment) == TIME
    assert parse_time(TIME) == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert make_release().published_at == parse_time(TIME)


def test_the_package_of_a_document_is_the_one_it_was_made_for() -> None:
    assert IndexDocument.parse(make_index_document().encode(), what="index").package == SQL


@pytest.mark.parametrize(
    ("interval", "age", "overdue"),
    [
        (None, timedelta(days=900), None),
        (7, timedelta(days=7), None),
        (7, timedelta(days=7, seconds=1), 7),
        (7, timedelta(days=9, hours=3), 9),
        (7, timedelta(days=-1), None),
    ],
)
def test_a_document_is_overdue_after_the_interval_that_it_states(
    interval: int | None, age: timedelta, overdue: int | None
) -> None:
    document = replace(make_index_document(), interval_days=interval)
    assert IndexDocument.parse(document.encode(), what="it") == document
    assert document.overdue_days(parse_time(TIME) + age) == overdue
