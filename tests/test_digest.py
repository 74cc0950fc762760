"""Digests: the strict grammar, and hashing against hashlib and the vectors of FIPS 180-4."""

import hashlib
import io
from pathlib import Path

import pytest

from expertctl.digest import Digest, hash_file, hash_stream
from expertctl.errors import DigestError

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
