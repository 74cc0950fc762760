"""Secrets are found wherever they stand in a file; public keys are none."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    KeySerializationEncryption,
    NoEncryption,
    PrivateFormat,
)

from expertctl.package.directory import find_secret_in_stream
from expertctl.trust.keys import PrivateKey

KEY = ec.generate_private_key(ec.SECP256R1())


def find_secret(path: Path) -> str | None:
    with path.open("rb") as stream:
        return find_secret_in_stream(stream)


@pytest.mark.parametrize(
    ("form", "encryption"),
    [
        (PrivateFormat.PKCS8, NoEncryption()),
        (PrivateFormat.PKCS8, BestAvailableEncryption(b"x")),
        (PrivateFormat.TraditionalOpenSSL, NoEncryption()),
        (PrivateFormat.OpenSSH, NoEncryption()),
    ],
    ids=["pkcs8", "encrypted", "ec", "openssh"],
)
@pytest.mark.parametrize("before", [0, (1 << 20) - 10, 1 << 20])
def test_a_private_key_is_found(
    form: PrivateFormat, encryption: KeySerializationEncryption, before: int, tmp_path: Path
) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"." * before + KEY.private_bytes(Encoding.PEM, form, encryption))
    assert find_secret(path)


def test_a_public_key_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(PrivateKey.generate().public.pem())
    assert not find_secret(tmp_path / "x")


def test_text_about_keys_is_no_secret(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("never paste your PRIVATE KEY ----- here")
    assert not find_secret(tmp_path / "x")


TOKEN = "xpt_" + "aZ09-_" * 7 + "x"


@pytest.mark.parametrize("before", [0, (1 << 20) - 10, 1 << 20])
def test_a_token_of_a_registry_is_found(before: int, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text("." * before + f"token: {TOKEN}\n")
    assert find_secret(path) == "an access token"


@pytest.mark.parametrize("text", ["xpt_short", f"a{TOKEN}", f"{TOKEN}b", "expt_" + "a" * 43])
def test_what_only_looks_like_a_token_is_none(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_text(f" {text} ")
    assert find_secret(path) is None
