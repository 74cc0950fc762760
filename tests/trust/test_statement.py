"""The signed statement: what it says, and every way in which one is refused (attacks 31 to 36)."""

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import SignatureError
from expertctl.reference import Digest, FileDigest
from expertctl.trust.bundle import MAX_BYTES, SignedFile, SignedStatement, check_path
from tests.trust.forged_bundles import (
    CONTENT,
    Document,
    Edit,
    compute_root_digest,
    hash_content,
    make_resource,
    make_statement,
    removing,
    setting,
)


def parsed(document: Document) -> SignedStatement:
    return SignedStatement.parse(json.dumps(document).encode())


def listing(*resources: Document) -> Document:
    return make_statement(list(resources))


def test_a_statement_by_hand_is_read() -> None:
    found = parsed(make_statement())
    assert found.name == "acme/sql@1.0.0"
    assert found.files == tuple(SignedFile(n, Digest.compute(CONTENT[n])) for n in sorted(CONTENT))


def test_our_statement_is_the_one_by_hand_in_canonical_json() -> None:
    ours = SignedStatement.from_files(reversed(hash_content()), name="acme/sql@1.0.0")
    assert ours.encode() == rfc8785.dumps(make_statement())
    assert SignedStatement.parse(ours.encode()) == ours


def test_files_are_sorted_by_the_parts_of_their_paths() -> None:
    ours = SignedStatement.from_files(
        hash_content({"a-b": b"1", "a/b": b"2", "a.c": b"3"}), name="x"
    )
    assert [file.path for file in ours.files] == ["a/b", "a-b", "a.c"]
    assert [f.path for f in parsed(json.loads(ours.encode())).files] == ["a/b", "a-b", "a.c"]


def test_the_default_ignored_paths_of_the_public_tool_are_accepted() -> None:
    document = make_statement()
    document["predicate"]["serialization"]["ignore_paths"] = [
        ".github",
        ".gitignore",
        "model.sig",
        ".git",
        ".gitattributes",
    ]
    assert len(parsed(document).files) == len(CONTENT)
    del document["predicate"]["serialization"]["ignore_paths"]
    assert len(parsed(document).files) == len(CONTENT)


SERIALIZATION = ("predicate", "serialization")
FIRST = ("predicate", "resources", 0)
HEX = "ab" * 32
HOSTILE: dict[str, tuple[Edit, str]] = {
    # 31: types and the predicate
    "statement type v0.1": (setting("_type", value="https://in-toto.io/Statement/v0.1"), "_type"),
    "statement type missing": (removing("_type"), "no '_type'"),
    "statement type is a number": (setting("_type", value=1), "_type"),
    "predicate type of an old release": (
        setting("predicateType", value="https://model_signing/Digests/v0.1"),
        "predicateType",
    ),
    "predicate type missing": (removing("predicateType"), "no 'predicateType'"),
    "predicate missing": (removing("predicate"), "no 'predicate'"),
    "predicate is null": (setting("predicate", value=None), "not an object"),
    "predicate with another key": (setting("predicate", "model", value={}), "unknown key 'model'"),
    "statement with another key": (setting("extra", value=1), "unknown key 'extra'"),
    # the subject
    "no subject": (setting("subject", value=[]), "0 entries in the subject"),
    "two subjects": (
        lambda d: d["subject"].append(d["subject"][0]),
        "2 entries in the subject",
    ),
    "subject is an object": (setting("subject", value={}), "not an array"),
    "subject digest of other files": (
        setting("subject", 0, "digest", "sha256", value=HEX),
        "subject's digest is not",
    ),
    "subject digest under two algorithms": (
        setting("subject", 0, "digest", "sha512", value=HEX),
        "unknown key 'sha512'",
    ),
    "subject digest upper case": (
        lambda d: setting(
            "subject", 0, "digest", "sha256", value=d["subject"][0]["digest"]["sha256"].upper()
        )(d),
        "subject's digest is not",
    ),
    "subject name empty": (setting("subject", 0, "name", value=""), "name is empty"),
    "subject name with an escape": (
        setting("subject", 0, "name", value="a\x1b[2J"),
        "not printable",
    ),
    "subject name endless": (setting("subject", 0, "name", value="a" * 2000), "too long"),
    "subject name is a number": (setting("subject", 0, "name", value=7), "not a string"),
    # 32, 33: resources
    "no resources": (lambda d: d.update(listing()), "no file is listed"),
    "resources is an object": (setting("predicate", "resources", value={}), "not an array"),
    "resource is a string": (setting(*FIRST, value="x"), "a resource is not an object"),
    "resource with a size": (setting(*FIRST, "size", value=1), "unknown key 'size'"),
    "resource name is a number": (setting(*FIRST, "name", value=7), "not a string"),
    "digest too short": (setting(*FIRST, "digest", value=HEX[:-2]), "64 lower-case hex"),
    "digest too long": (setting(*FIRST, "digest", value=HEX + "00"), "64 lower-case hex"),
    "digest upper case": (setting(*FIRST, "digest", value=HEX.upper()), "64 lower-case hex"),
    "digest of odd length": (setting(*FIRST, "digest", value=HEX[:-1]), "64 lower-case hex"),
    "digest with its algorithm": (
        setting(*FIRST, "digest", value=f"sha256:{HEX}"),
        "lower-case hex",
    ),
    "digest with a newline": (setting(*FIRST, "digest", value=HEX + "\n"), "64 lower-case hex"),
    "digest is a number": (setting(*FIRST, "digest", value=7), "not a string"),
    "algorithm of a file unknown": (
        setting(*FIRST, "algorithm", value="md5"),
        "'md5', not 'sha256'",
    ),
    "algorithm of a file unlike the hash type": (
        setting(*FIRST, "algorithm", value="blake2b"),
        "algorithm of 'README.md'",
    ),
    "algorithm of a file missing": (removing(*FIRST, "algorithm"), "no 'algorithm'"),
    # 33, 34, 36: serialization
    "hash type blake2": (setting(*SERIALIZATION, "hash_type", value="blake2b"), "hash_type"),
    "method shards": (setting(*SERIALIZATION, "method", value="shards"), "'shards', not 'files'"),
    "method shards with a size": (
        setting("predicate", "serialization", value={"method": "shards", "shard_size": 1}),
        "'shards', not 'files'",
    ),
    "method missing": (removing(*SERIALIZATION, "method"), "method is 'None'"),
    "shard size beside files": (setting(*SERIALIZATION, "shard_size", value=1), "'shard_size'"),
    "symlinks allowed": (setting(*SERIALIZATION, "allow_symlinks", value=True), "allow_symlinks"),
    "symlinks as zero": (setting(*SERIALIZATION, "allow_symlinks", value=0), "allow_symlinks"),
    "symlinks as text": (
        setting(*SERIALIZATION, "allow_symlinks", value="false"),
        "allow_symlinks",
    ),
    "serialization is a string": (setting(*SERIALIZATION, value="files"), "not an object"),
    # 35: ignored paths
    "weights ignored": (
        setting(*SERIALIZATION, "ignore_paths", value=["model.sig", "adapter_model.safetensors"]),
        "leave 'adapter_model.safetensors' unsigned",
    ),
    "everything ignored": (
        setting(*SERIALIZATION, "ignore_paths", value=["."]),
        "leave '.' unsigned",
    ),
    "ignored twice": (setting(*SERIALIZATION, "ignore_paths", value=["model.sig"] * 2), "twice"),
    "ignored is a string": (
        setting(*SERIALIZATION, "ignore_paths", value="model.sig"),
        "not an array",
    ),
    "ignored is a number": (setting(*SERIALIZATION, "ignore_paths", value=[1]), "not a string"),
    "listed and ignored": (
        lambda d: (
            d.update(listing(make_resource(".github/payload.py"), make_resource("expert.json"))),
            setting(*SERIALIZATION, "ignore_paths", value=[".github"])(d),
        ),
        "both listed and ignored",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_statement_outside_the_strict_form_is_refused(name: str) -> None:
    edit, message = HOSTILE[name]
    document = make_statement()
    edit(document)
    with pytest.raises(SignatureError, match=message):
        parsed(document)


HOSTILE_NAMES = {
    "": "not a plain relative path",
    "/etc/passwd": "not a plain relative path",
    "../escape": "not a plain relative path",
    "a/../b": "not a plain relative path",
    "..": "not a plain relative path",
    ".": "not a plain relative path",
    "./a": "not a plain relative path",
    "a/./b": "not a plain relative path",
    "a//b": "not a plain relative path",
    "a/": "not a plain relative path",
    "a\\b": "backslash",
    "\\\\server\\share": "backslash",
    "C:\\windows": "backslash",
    "a:b": "colon",
    "weights.bin:0:100": "colon",
    "a\0b": "control character",
    "a\nb": "control character",
    "a\x7fb": "control character",
    "a\u0308.txt": "normal form C",
    "\u212b": "normal form C",
    "a" * 1025: "too long",
    "model.sig": "signature itself",
}


@pytest.mark.parametrize("name", HOSTILE_NAMES)
def test_a_file_name_that_is_not_plain_is_neither_read_nor_signed(name: str) -> None:
    with pytest.raises(SignatureError, match=HOSTILE_NAMES[name]):
        parsed(listing(make_resource(name)))
    with pytest.raises(SignatureError, match=HOSTILE_NAMES[name]):
        SignedStatement.from_files([FileDigest(name, 0, Digest.compute(b""))], name="x")


def test_a_file_name_that_is_not_utf8_is_not_signed() -> None:
    name = b"a\xff".decode("utf-8", "surrogateescape")
    with pytest.raises(SignatureError, match="surrogate"):
        SignedStatement.from_files([FileDigest(name, 0, Digest.compute(b""))], name="x")


@pytest.mark.parametrize("name", ["ä.txt", "a b", ".hidden", "…", "sub/model.sig", "a" * 1024])
def test_an_unusual_but_plain_file_name_is_fine(name: str) -> None:
    check_path(name)
    assert parsed(listing(make_resource(name))).files[0].path == name


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["a", "a"], "listed twice"),
        (["b", "a"], "not in sorted order"),
        (["a-b", "a/b"], "not in sorted order"),
        (["README", "readme"], "differ in case alone"),
        (["STRASSE", "stra\u00dfe"], "differ in case alone"),
        (["a", "a/b"], "is a file and the folder of"),
        (["A/b/c", "a"], "is a file and the folder of"),
    ],
)
def test_names_that_two_systems_could_confuse_are_refused(names: list[str], message: str) -> None:
    with pytest.raises(SignatureError, match=message):
        parsed(listing(*(make_resource(name) for name in names)))


@pytest.mark.parametrize("pair", [["a", "a"], ["A", "a"], ["a", "a/b"]])
def test_names_that_two_systems_could_confuse_are_not_signed(pair: list[str]) -> None:
    files = [FileDigest(name, 0, Digest.compute(b"")) for name in pair]
    with pytest.raises(SignatureError):
        SignedStatement.from_files(files, name="x")


def test_nothing_and_a_bad_name_are_not_signed() -> None:
    with pytest.raises(SignatureError, match="no file"):
        SignedStatement.from_files([], name="x")
    with pytest.raises(SignatureError, match="name is empty"):
        SignedStatement.from_files(hash_content(), name="")


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"", "not strict JSON"),
        (b"[]", "not a JSON object"),
        (b"\xef\xbb\xbf{}", "not strict JSON"),
        (b'{"_type":1,"_type":2}', "duplicate key"),
        (b'{"a":' + b"[" * 100 + b"]" * 100 + b"}", "nested deeper"),
        (b'{"a":' + b"[" * 100_000, "not strict JSON"),
        (b'{"a":' + b"9" * 5000 + b"}", "beyond"),
        (b'{"a":NaN}', "not a JSON number"),
        (b'{"a":"\xff"}', "not UTF-8"),
        (b'{"a":"\\ud800"}', "lone surrogate"),
        (b" " * (MAX_BYTES + 1), "at most"),
    ],
)
def test_json_that_two_readers_could_take_differently_is_refused(
    payload: bytes, message: str
) -> None:
    with pytest.raises(SignatureError, match=message):
        SignedStatement.parse(payload)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=6,
)
PATHS = [
    ("_type",),
    ("subject",),
    ("subject", 0),
    ("subject", 0, "digest"),
    ("predicateType",),
    ("predicate",),
    SERIALIZATION,
    (*SERIALIZATION, "ignore_paths"),
    ("predicate", "resources"),
    FIRST,
    (*FIRST, "name"),
    (*FIRST, "digest"),
]


@settings(deadline=None, max_examples=200)
@given(path=st.sampled_from(PATHS), value=JSON)
def test_no_value_in_any_place_makes_reading_fail_in_another_way(
    path: tuple[str | int, ...], value: Any
) -> None:
    document = make_statement()
    setting(*path, value=value)(document)
    try:
        found = parsed(document)
    except SignatureError:
        return
    assert found.files == SignedStatement.parse(json.dumps(document).encode()).files
    assert path[-1] in {"ignore_paths", "name"} or document == make_statement()


def test_the_subject_digest_is_over_the_raw_digests_in_order() -> None:
    resources = [make_resource("a", b"1"), make_resource("b", b"2")]
    swapped = [{**resources[0], "name": "b"}, {**resources[1], "name": "a"}]
    assert compute_root_digest(resources) != compute_root_digest(list(reversed(swapped)))
    document = listing(*resources)
    document["subject"][0]["digest"]["sha256"] = compute_root_digest(list(reversed(resources)))
    with pytest.raises(SignatureError, match="subject's digest is not"):
        parsed(document)
