import hashlib

import pytest

from expertctl.errors import DigestError
from registry_server.registry import BlobDigest

EMPTY_SHA256 = "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"


def test_a_digest_is_read_in_its_one_form() -> None:
    digest = BlobDigest.parse(EMPTY_SHA256)
    assert (digest.algorithm, digest.hex) == ("sha256", EMPTY_SHA256.removeprefix("sha256:"))
    assert str(digest) == EMPTY_SHA256
    assert BlobDigest.compute(b"") == digest


def test_sha512_is_a_digest_too() -> None:
    digest = BlobDigest.compute(b"x", algorithm="sha512")
    assert digest.hex == hashlib.sha512(b"x").hexdigest()
    assert BlobDigest.parse(str(digest)) == digest


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "sha256:",
        "sha256",
        EMPTY_SHA256.upper(),
        EMPTY_SHA256[:-1],
        EMPTY_SHA256 + "0",
        EMPTY_SHA256[:-1] + "\n",
        EMPTY_SHA256 + "\n",
        " " + EMPTY_SHA256,
        EMPTY_SHA256.replace("sha256", "sha512"),
        EMPTY_SHA256.replace("sha256", "md5"),
        "sha256:" + "../" * 21 + "x",
        "sha256:" + "\u0661" * 64,
        "sha256:sha256:" + "0" * 57,
    ],
)
def test_anything_else_is_no_digest(text: str) -> None:
    with pytest.raises(DigestError):
        BlobDigest.parse(text)
