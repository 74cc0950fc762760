"""References, versions and constraints, with precedence cases from semver.org; and digests.

Hashing is held against hashlib and the vectors of FIPS 180-4.
"""

import hashlib
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from expertctl.errors import DigestError, UsageError
from expertctl.reference import (
    Constraint,
    Digest,
    PackageName,
    Reference,
    Version,
    hash_file,
    hash_stream,
    parse_target,
)
from expertctl.registry.address import RegistryAddress

# semver.org section 11, the chain of precedence that it prints, plus its 1.0.0 < 2.0.0 < 2.1.0.
PRECEDENCE = [
    "1.0.0-alpha",
    "1.0.0-alpha.1",
    "1.0.0-alpha.beta",
    "1.0.0-beta",
    "1.0.0-beta.2",
    "1.0.0-beta.11",
    "1.0.0-rc.1",
    "1.0.0",
    "2.0.0",
    "2.1.0",
    "2.1.1",
]


def test_versions_are_ordered_as_semver_says() -> None:
    versions = [Version.parse(text) for text in PRECEDENCE]
    assert sorted(reversed(versions)) == versions


@pytest.mark.parametrize(
    "text",
    [
        "1.0", "v1.0.0", "01.0.0", "1.0.0+build", "1.0.0-", "1.0.0-01", "1.0.0-a..b", "1.0.0 ",
        "\u0661.0.0", "", "1.0.0-é", "9999999999.0.0", "-1.0.0", "1.0.0\n",
    ],
)  # fmt: skip
def test_a_version_outside_strict_semver_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Version.parse(text)


@pytest.mark.parametrize(
    ("constraint", "inside", "outside"),
    [
        ("1.2.0", ["1.2.0"], ["1.2.1", "1.2.0-rc.1"]),
        ("1.2", ["1.2.0", "1.2.9"], ["1.3.0", "1.1.9"]),
        ("^1.2", ["1.2.0", "1.9.9"], ["1.1.9", "2.0.0"]),
        ("^1.2.3", ["1.2.3", "1.3.0"], ["1.2.2", "2.0.0"]),
        ("^0.2.3", ["0.2.3", "0.2.9"], ["0.3.0", "0.2.2"]),
        ("^0.0.3", ["0.0.3"], ["0.0.4"]),
        ("^0.0", ["0.0.0", "0.0.9"], ["0.1.0"]),
        ("^0", ["0.0.1", "0.9.0"], ["1.0.0"]),
        ("~1.2", ["1.2.0", "1.2.9"], ["1.3.0"]),
        ("~1.2.3", ["1.2.3", "1.2.9"], ["1.2.2", "1.3.0"]),
        ("~1", ["1.0.0", "1.9.0"], ["2.0.0"]),
        (">=1,<2", ["1.0.0", "1.9.9"], ["0.9.9", "2.0.0"]),
        (">1", ["2.0.0"], ["1.0.0", "1.9.0"]),
        ("<=1", ["1.9.9", "0.1.0"], ["2.0.0"]),
        ("*", ["0.0.0", "9.9.9"], ["1.0.0-rc.1"]),
        ("^1.0.0-rc.1", ["1.0.0-rc.1", "1.0.0", "1.5.0"], ["1.0.0-beta", "1.1.0-rc.1"]),
    ],
)  # fmt: skip
def test_a_constraint_allows_what_cargo_allows(
    constraint: str, inside: list[str], outside: list[str]
) -> None:
    parsed = Constraint.parse(constraint)
    assert [v for v in inside if not parsed.allows(Version.parse(v))] == []
    assert [v for v in outside if parsed.allows(Version.parse(v))] == []


@pytest.mark.parametrize("text", ["", "^", "==1", "1.*", ">=1,,<2", "^1 || ^2", "latest", "~>1"])
def test_a_constraint_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Constraint.parse(text)


@pytest.mark.parametrize(
    ("text", "registry", "name", "constraint"),
    [
        ("acme/sql-gen", None, "acme/sql-gen", "*"),
        ("acme/sql@^1.2", None, "acme/sql", "^1.2"),
        ("experts.example.com/acme/sql", "experts.example.com", "acme/sql", "*"),
        ("localhost:5000/acme/sql@1.0.0", "localhost:5000", "acme/sql", "1.0.0"),
        ("[::1]:5000/acme/sql", "[::1]:5000", "acme/sql", "*"),
    ],
)
def test_a_reference_is_read_and_shown_again(
    text: str, registry: str | None, name: str, constraint: str
) -> None:
    reference = Reference.parse(text)
    assert (reference.registry, str(reference.package)) == (registry, name)
    assert (str(reference.constraint), str(reference)) == (constraint, text)


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("Hub.Example:443", "hub.example"),
        ("hub.example:0080", "hub.example:80"),
        ("[2001:0:0:0:0:0:0:1]", "[2001::1]"),
        ("LOCALHOST", "localhost:80"),
        ("localhost:443", "localhost:443"),
        ("[0:0:0:0:0:0:0:1]", "[::1]:80"),
        ("[::FFFF:1.2.3.4]:443", None),
        ("[::0001]:08443", "[::1]:8443"),
        ("[1:2]:5000", None),
    ],
)
def test_a_host_has_one_writing_however_it_was_typed(text: str, host: str | None) -> None:
    if host is None:
        with pytest.raises(UsageError, match="is not a registry host"):
            Reference.parse(f"{text}/acme/sql")
    else:
        assert Reference.parse(f"{text}/acme/sql").registry == host
        assert RegistryAddress.parse(text, allow_http=True).host == host


@pytest.mark.parametrize(
    "text",
    [
        "sql", "Acme/sql", "acme/sql_gen", "acme/-sql", "acme/sql--gen", "acme/", "/sql", "a/b/c/d",
        "../../etc/passwd", "acme/sql@", "acme/..", "acme/sql\x00", "acme/sql ", "http://h/a/b",
        "a@h/acme/sql", "acme/" + "s" * 65, "acme\\sql", "acme/sql@1.0.0\n", "x" * 300,
    ],
)  # fmt: skip
def test_a_reference_outside_the_grammar_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(text)


@given(st.text(max_size=80))
def test_reading_any_text_as_a_reference_gives_a_reference_or_a_usage_error(text: str) -> None:
    try:
        reference = Reference.parse(text)
    except UsageError:
        return
    assert Reference.parse(str(reference)) == reference


def test_names_compare_by_namespace_then_name() -> None:
    names = [PackageName.parse(t) for t in ("b/a", "a/b", "a/a")]
    assert [str(n) for n in sorted(names)] == ["a/a", "a/b", "b/a"]


HEX = "0123456789abcdef" * 4


def test_a_reference_may_name_exact_bytes_in_place_of_versions() -> None:
    reference = Reference.parse(f"hub.example:8080/acme/sql@sha256:{HEX}")
    assert (reference.registry, str(reference.package)) == ("hub.example:8080", "acme/sql")
    assert reference.digest == Digest(HEX)
    assert str(reference) == f"hub.example:8080/acme/sql@sha256:{HEX}"
    assert Reference.parse(str(reference)) == reference
    assert reference.allows(Version.parse("9.9.9"), Digest.compute(b""), Digest(HEX))
    assert not reference.allows(Version.parse("9.9.9"), Digest.compute(b""))


@pytest.mark.parametrize(
    "digest",
    [
        "sha256:",
        f"sha256:{HEX.upper()}",
        f"sha256:{HEX}0",
        f"sha256:{HEX[1:]}",
        f"sha512:{HEX}",
        f"sha256:{HEX},^1",
        f"sha256:../../{HEX[6:]}",
    ],
)
def test_a_digest_outside_the_grammar_is_refused(digest: str) -> None:
    with pytest.raises(UsageError):
        Reference.parse(f"acme/sql@{digest}")


def test_hosts_are_compared_without_case() -> None:
    assert Reference.parse("HUB.example/acme/sql") == Reference.parse("hub.example/acme/sql")


def test_a_constraint_tells_whether_it_is_one_version() -> None:
    version = Version.parse("1.2.0-rc.1")
    assert Constraint.parse("1.2.0-rc.1").pinned == version
    assert Constraint.for_version(version).allows(version)
    assert [Constraint.parse(text).pinned for text in ("*", "^1.2.0", "1.2", ">=1.2.0")] == [
        None
    ] * 4


# FIPS 180-4, example "abc".
ABC = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_the_digest_of_abc_is_the_published_one() -> None:
    assert str(Digest.compute(b"abc")) == f"sha256:{ABC}"


@pytest.mark.parametrize(
    "text",
    [
        ABC,
        f"sha256:{ABC.upper()}",
        f"sha256:{ABC[:-1]}",
        f"sha256:{ABC}0",
        f"sha512:{ABC}",
        f"sha256:{ABC}\n",
        "sha256:../../etc/passwd",
        f"SHA256:{ABC}",
        "",
    ],
)
def test_another_grammar_of_a_digest_is_refused(text: str) -> None:
    with pytest.raises(DigestError):
        Digest.parse(text)


def test_hashing_a_stream_reports_every_byte_once() -> None:
    data = bytes(range(256)) * 20_000
    counts: list[int] = []
    size, digest = hash_stream(io.BytesIO(data), progress=counts.append)
    assert (size, sum(counts)) == (len(data), len(data))
    assert digest.hex == hashlib.sha256(data).hexdigest()


def test_hashing_a_file_equals_hashing_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert hash_file(path) == (3, Digest(ABC))


def test_what_a_person_types_is_a_reference_or_a_digest() -> None:
    assert parse_target("acme/sql@^1") == Reference.parse("acme/sql@^1")
    assert parse_target(str(Digest.compute(b""))) == Digest.compute(b"")
    with pytest.raises(UsageError, match="sha256:<64 hex digits>"):
        parse_target("sha256:../../etc/passwd")
    with pytest.raises(UsageError):
        parse_target("../etc/passwd")
