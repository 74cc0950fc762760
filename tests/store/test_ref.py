"""The record of an installed expert."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import InvalidPackageError
from expertctl.reference import Digest, FileDigest, PackageName, Version
from expertctl.store.refs import RequiredBase, StoredExpert, encode_ref, parse_ref

D = [Digest(f"{i:x}" * 64) for i in range(8)]
EXPERT = StoredExpert(
    registry="local",
    package=PackageName("acme", "sql"),
    version=Version.parse("1.2.0-rc.1"),
    content_digest=D[0],
    package_digest=D[1],
    files=(FileDigest("adapter.safetensors", 10, D[2]), FileDigest("expert.json", 5, D[3])),
    signature=FileDigest("model.sig", 7, D[4]),
    signer=str(D[5]),
    base=RequiredBase("Qwen/Qwen3-0.6B", None, D[6], D[7], D[0], (D[1],)),
    requires=("acme/english@^1",),
    conflicts=("acme/old@*",),
    warnings=("note é",),
)


def test_a_ref_is_read_as_it_was_written() -> None:
    assert parse_ref(encode_ref(EXPERT), what="ref") == EXPERT


def test_an_unsigned_expert_without_weights_digest_is_read_as_it_was_written() -> None:
    expert = replace(
        EXPERT, signature=None, signer=None, base=replace(EXPERT.base, weights=None, revision="r")
    )
    assert parse_ref(encode_ref(expert), what="ref") == expert


def test_a_ref_of_an_expert_with_a_canonical_tokenizer_is_read_as_it_was_written() -> None:
    expert = replace(EXPERT, base=replace(EXPERT.base, tokenizer_version=2))
    assert json.loads(encode_ref(expert))["base"]["tokenizer_version"] == 2
    assert parse_ref(encode_ref(expert), what="ref") == expert


def test_a_ref_of_version_1_is_what_earlier_releases_wrote() -> None:
    base = json.loads(encode_ref(EXPERT))["base"]
    assert sorted(base) == ["accepts", "arch", "name", "revision", "tokenizer", "weights"]
    with pytest.raises(InvalidPackageError, match="not as expertctl wrote it"):
        parse_ref(changed(base={**base, "tokenizer_version": 1}), what="ref")


def test_the_size_counts_every_file_and_the_signature() -> None:
    assert EXPERT.size == 22
    assert EXPERT.ref == "acme/sql@1.2.0-rc.1"
    assert EXPERT.find_file("expert.json").size == 5
    assert [file.path for file in EXPERT.layers][-1] == "model.sig"


def test_a_mismatch_is_seen_in_the_warnings() -> None:
    assert not EXPERT.allows_mismatch
    assert replace(EXPERT, warnings=("x: base mismatch allowed: y",)).allows_mismatch


def changed(**keys: Any) -> bytes:
    return (json.dumps({**json.loads(encode_ref(EXPERT)), **keys}, indent=1) + "\n").encode()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{}",
        b"[]",
        b"null",
        encode_ref(EXPERT)[:-1],
        encode_ref(EXPERT) + b"\n",
        encode_ref(EXPERT).replace(b'"schema": 1', b'"schema": 1, "schema": 1'),
        changed(schema=2),
        changed(schema=True),
        changed(size=23),
        changed(size=-1),
        changed(extra=1),
        changed(name="../sql"),
        changed(name=5),
        changed(version="1.2"),
        changed(version="01.2.0"),
        changed(content_digest="sha256:../../etc"),
        changed(content_digest="SHA256:" + "0" * 64),
        changed(signer="me"),
        changed(files={}),
        encode_ref(replace(EXPERT, files=EXPERT.files[:1])),
        changed(files=[{"path": "a", "size": 1}]),
        changed(files=[{"path": "a", "size": 1.5, "digest": str(D[0])}]),
        changed(base=None),
        changed(base={"name": "x"}),
        changed(requires=[1]),
        changed(warnings="text"),
    ],
)
def test_anything_else_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidPackageError, match=r"^ref: "):
        parse_ref(data, what="ref")


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_one_flipped_bit_never_passes_as_something_it_is_not(data: st.DataObject) -> None:
    raw = bytearray(encode_ref(EXPERT))
    position = data.draw(st.integers(0, len(raw) * 8 - 1))
    raw[position // 8] ^= 1 << (position % 8)
    try:
        expert = parse_ref(bytes(raw), what="ref")
    except InvalidPackageError:
        return
    assert encode_ref(expert) == bytes(raw)
    assert expert != EXPERT
