"""Documents that may be large: all problems of a small one, soon the first of a large one."""

import json
from types import MappingProxyType
from typing import Any

import msgspec
import pytest

from expertctl.engine.moe.profile_codecs import MAX_BYTES, load_document, parse_document
from expertctl.errors import InvalidPackageError

PAIRS = MappingProxyType({"hostile": [[]], "sound": [[1, 2]]})


class LayersDocument(msgspec.Struct):
    layers: list[object]


def document(pair: str, pairs: int, layers: int) -> bytes:
    record: dict[str, Any] = {"layer": 0, "experts": PAIRS[pair] * pairs}
    whole = {"schema": "llama.cpp.moe_layer_perf.v1", "layers": [record] * layers}
    return json.dumps(whole, separators=(",", ":")).encode()


def read(data: bytes) -> LayersDocument:
    document = load_document(data, what="a profile")
    return parse_document(document, LayersDocument, what="a profile", schema="moe-activity")


def test_all_problems_of_a_small_document_are_told() -> None:
    with pytest.raises(InvalidPackageError) as refused:
        read(document("hostile", 20, 2))
    assert len(refused.value.problems) == 40


def test_the_first_problem_of_a_large_document_is_told() -> None:
    data = document("hostile", 4000, 20)
    assert len(data) < MAX_BYTES
    with pytest.raises(InvalidPackageError) as refused:
        read(data)
    first, more = refused.value.problems
    assert first == "layers/0/experts/0: [] has less than 2 items"
    assert more == "… and more"


def test_how_many_problems_are_told_depends_on_the_values_not_on_the_bytes() -> None:
    """One bound for all documents, whoever reads them: that of `schema.validation`."""
    long = b'{"note":"%s",' % (b"x" * (1 << 20))
    with pytest.raises(InvalidPackageError) as refused:
        read(document("hostile", 5, 2).replace(b"{", long, 1))
    assert len(refused.value.problems) == 10


def test_what_is_told_of_a_large_document_is_short() -> None:
    with pytest.raises(InvalidPackageError) as refused:
        read(b'{"schema":"%s","layers":[]}' % (b"x" * (64 << 10)))
    assert len(refused.value.problems[0]) < 400
    assert "is not one of" in refused.value.problems[0]


def test_a_large_document_without_a_problem_is_read() -> None:
    assert len(read(document("sound", 4000, 10)).layers) == 10


def test_a_document_beyond_the_limit_is_refused_unread() -> None:
    with pytest.raises(InvalidPackageError, match="at most 16777216"):
        read(b" " * (MAX_BYTES + 1))
