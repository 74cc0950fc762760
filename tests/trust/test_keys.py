"""Keys: published vectors, strict encodings, and a key ring that guards its files."""

import hashlib
import os
import stat
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed448, ed25519, rsa
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    SignatureError,
    TrustError,
    UsageError,
)
from expertctl.trust.keys import (
    ALGORITHMS,
    MAX_PEM,
    Algorithm,
    KeyRing,
    PrivateKey,
    PublicKey,
    read_pem,
    write_new_file,
)
from tests.trust.forged_bundles import (
    P256_ORDER,
    RFC_SECRET,
    encode_pkcs8,
    encode_spki,
    make_ec_key,
    make_rfc_key,
)

# RFC 6979, appendix A.2.5: P-256 with SHA-256, (message, r, s).
RFC_VECTORS = [
    (
        b"sample",
        0xEFD48B2AACB6A8FD1140DD9CD45E81D69D2C877B56AAF991C34D0EA84EAF3716,
        0xF7CB1C942D657C41D436C7A1B6E29F65F3E900DBB9AFF4064DC4AB2F843ACDA8,
    ),
    (
        b"test",
        0xF1ABB023518351CD71D881567B1EA663ED3EFCF6C5132B354F28D3B0B7D38367,
        0x019F4113742A2B14BD25926B49C649155F267E60D3814B4C0CC84250E46F0083,
    ),
]
# RFC 6979, appendix A.2.5: the public point that belongs to the secret.
RFC_X = 0x60FED4BA255A9D31C961EB74C6356D68C049B8923B61FA6CE669622E60F29FB6
RFC_Y = 0x7903FE1008B8BC99A41AE9E95628BC64F2F1B20C2D7E9F5177A3C294D4462299
# RFC 8032, section 7.1, test 2: secret, message, signature.
ED_SECRET = bytes.fromhex("4ccd089b28ff96da9db6c346ec114e0f5b8a319f35aba624da8cf6ed4fb8a6fb")
ED_MESSAGE = bytes.fromhex("72")
ED_SIGNATURE = bytes.fromhex(
    "92a009a9f0d4cab8720e820b5f642540a2b27b5416503f8fb3762223ebdb69da"
    "085ac1e43e15996e458f3613d0f11d8c387b2eaeb4302aeeb00d291612bb0c00"
)


@pytest.fixture
def ring(tmp_path: Path) -> KeyRing:
    return KeyRing(tmp_path / "home" / "keys")


def test_the_test_key_is_the_one_of_rfc_6979() -> None:
    numbers = make_ec_key(RFC_SECRET).public_key().public_numbers()
    assert (numbers.x, numbers.y) == (RFC_X, RFC_Y)


@pytest.mark.parametrize(("message", "r", "s"), RFC_VECTORS)
def test_ecdsa_is_rfc_6979_with_the_lower_s(message: bytes, r: int, s: int) -> None:
    signature = make_rfc_key().sign(message)
    assert decode_dss_signature(signature) == (r, min(s, P256_ORDER - s))
    make_rfc_key().public.verify(signature, message)


def test_ed25519_is_rfc_8032() -> None:
    key = PrivateKey.from_pem(encode_pkcs8(ed25519.Ed25519PrivateKey.from_private_bytes(ED_SECRET)))
    assert key.sign(ED_MESSAGE) == ED_SIGNATURE
    key.public.verify(ED_SIGNATURE, ED_MESSAGE)


def test_a_key_id_is_the_sha256_of_the_pem_text() -> None:
    pem = encode_spki(make_ec_key(RFC_SECRET).public_key())
    assert make_rfc_key().public.key_id == f"sha256:{hashlib.sha256(pem).hexdigest()}"
    assert make_rfc_key().public.pem() == pem


def test_the_same_key_has_one_id_however_its_pem_is_laid_out() -> None:
    pem = make_rfc_key().public.pem()
    body = b"".join(pem.splitlines()[1:-1])
    for other in (
        pem.replace(b"\n", b"\r\n"),
        b"a comment\n" + pem,
        b"-----BEGIN PUBLIC KEY-----\n" + body + b"\n-----END PUBLIC KEY-----\n",
    ):
        assert PublicKey.from_pem(other) == make_rfc_key().public


def test_a_compressed_point_is_the_same_key() -> None:
    point = make_ec_key(RFC_SECRET).public_key()
    compressed = point.public_bytes(
        serialization.Encoding.X962, serialization.PublicFormat.CompressedPoint
    )
    again = ec.EllipticCurvePublicKey.from_encoded_point(ec.SECP256R1(), compressed)
    assert PublicKey.from_pem(encode_spki(again)) == make_rfc_key().public


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@settings(deadline=None, max_examples=20)
@given(data=st.binary(max_size=200), position=st.integers(min_value=0))
def test_what_a_key_signed_verifies_and_nothing_near_it(
    algorithm: Algorithm, data: bytes, position: int
) -> None:
    key = PrivateKey.generate(algorithm)
    signature = key.sign(data)
    assert signature == key.sign(data)
    key.public.verify(signature, data)
    with pytest.raises(SignatureError):
        key.public.verify(signature, data + b"\0")
    changed = bytearray(signature)
    changed[position % len(changed)] ^= 1
    with pytest.raises(SignatureError):
        key.public.verify(bytes(changed), data)
    with pytest.raises(SignatureError, match=r"is not one by key|DER"):
        PrivateKey.generate(algorithm).public.verify(signature, data)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_private_key_survives_pem(algorithm: Algorithm) -> None:
    key = PrivateKey.generate(algorithm)
    again = PrivateKey.from_pem(key.pem())
    assert again.public == key.public
    assert again.public.algorithm == algorithm
    assert again.sign(b"x") == key.sign(b"x")


def test_a_private_key_never_shows_itself() -> None:
    key = PrivateKey.generate()
    assert key.public.key_id in repr(key)
    assert "PrivateKey object" not in repr(key)


def signed(r: int, s: int) -> bytes:
    return encode_dss_signature(r, s)


R, S = RFC_VECTORS[1][1:]
HOSTILE_DER = {
    "empty": (b"", "not in DER"),
    "garbage": (b"\x30\x06garbage", "not in DER"),
    "trailing bytes": (signed(R, S) + b"\0", "not in DER"),
    "ber long form of the length": (b"\x30\x81" + signed(R, S)[1:], "not in DER"),
    "padded integer": (
        b"\x30\x46\x02\x22\x00" + signed(R, S)[3:4] + signed(R, S)[4:],
        "not in DER",
    ),
    "raw r and s": (R.to_bytes(32, "big") + S.to_bytes(32, "big"), "not in DER"),
    "r is zero": (signed(0, S), "outside 1"),
    "s is zero": (signed(R, 0), "outside 1"),
    "r is the order": (signed(P256_ORDER, S), "outside 1"),
    "s is beyond the order": (signed(R, S + P256_ORDER), "outside 1"),
    "r is negative": (b"\x30\x06\x02\x01\xff\x02\x01\x01", r"not in DER|outside 1"),
    "the higher s": (signed(R, P256_ORDER - S), "higher s"),
    "r and s swapped": (signed(S, R % (P256_ORDER // 2)), "is not one by key"),
}


@pytest.mark.parametrize("name", HOSTILE_DER)
def test_a_signature_in_another_encoding_is_refused(name: str) -> None:
    signature, message = HOSTILE_DER[name]
    make_rfc_key().public.verify(signed(R, S), b"test")
    with pytest.raises(SignatureError, match=message):
        make_rfc_key().public.verify(signature, b"test")


def test_the_higher_s_is_refused_though_it_is_mathematically_valid() -> None:
    high = signed(R, P256_ORDER - S)
    make_ec_key(RFC_SECRET).public_key().verify(high, b"test", ec.ECDSA(hashes.SHA256()))
    with pytest.raises(SignatureError, match="higher s") as refused:
        make_rfc_key().public.verify(high, b"test")
    assert "expertctl sign" in refused.value.hint


def test_an_ed25519_signature_with_a_larger_s_is_refused() -> None:
    key = PrivateKey.from_pem(encode_pkcs8(ed25519.Ed25519PrivateKey.from_private_bytes(ED_SECRET)))
    group_order = 2**252 + 27742317777372353535851937790883648493  # RFC 8032, section 5.1
    s = int.from_bytes(ED_SIGNATURE[32:], "little") + group_order
    with pytest.raises(SignatureError, match="is not one by key"):
        key.public.verify(ED_SIGNATURE[:32] + s.to_bytes(32, "little"), ED_MESSAGE)


FOREIGN = {
    "P-384": lambda: make_ec_key(RFC_SECRET, ec.SECP384R1()),
    "secp256k1": lambda: make_ec_key(RFC_SECRET, ec.SECP256K1()),
    "RSA": lambda: rsa.generate_private_key(65537, 2048),
    "Ed448": ed448.Ed448PrivateKey.generate,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_key_of_another_kind_is_refused_by_name(kind: str) -> None:
    key = FOREIGN[kind]()
    known = {"P-384": "secp384r1"}.get(kind, kind)
    with pytest.raises(InvalidPackageError, match=known):
        PublicKey.from_pem(encode_spki(key.public_key()))  # type: ignore[attr-defined]  # all have one
    with pytest.raises(InvalidPackageError, match=known):
        PrivateKey.from_pem(encode_pkcs8(key))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 PEM blocks"),
        (b"\x00\xff", "0 PEM blocks"),
        (make_rfc_key().public.pem() * 2, "2 PEM blocks"),
        (b"-----BEGIN PUBLIC KEY-----\n!!!\n-----END PUBLIC KEY-----\n", "not a key in PEM"),
        (b"-----BEGIN PUBLIC KEY-----\nAAAA\n", "not a key in PEM"),
        (b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "not a key in PEM"),
        (make_rfc_key().public.pem() + b" " * MAX_PEM, "too many"),
        (make_rfc_key().pem(), "private key"),
    ],
)
def test_what_is_not_one_public_key_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(InvalidPackageError, match=message):
        PublicKey.from_pem(data, what="acme.pem")


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_no_bytes_make_the_key_readers_fail_in_another_way(body: bytes) -> None:
    for data in (body, b"-----BEGIN PUBLIC KEY-----\n" + body + b"\n-----END PUBLIC KEY-----\n"):
        for read in (PublicKey.from_pem, PrivateKey.from_pem):
            with pytest.raises(InvalidPackageError):
                read(data)


def test_an_encrypted_key_is_refused_with_the_way_out() -> None:
    encrypted = make_ec_key(7).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    with pytest.raises(InvalidPackageError, match="encrypted") as refused:
        PrivateKey.from_pem(encrypted)
    assert "openssl pkey" in refused.value.hint


def test_a_public_key_is_not_taken_for_a_private_one() -> None:
    with pytest.raises(InvalidPackageError, match="this is a public key") as refused:
        PrivateKey.from_pem(make_rfc_key().public.pem())
    assert "trust add" in refused.value.hint


def test_a_curve_key_as_openssl_writes_it_is_read() -> None:
    sec1 = make_ec_key(RFC_SECRET).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.TraditionalOpenSSL,
        serialization.NoEncryption(),
    )
    assert sec1.startswith(b"-----BEGIN EC PRIVATE KEY-----")
    assert PrivateKey.from_pem(sec1).public == make_rfc_key().public


def test_a_new_key_is_kept_for_its_owner_alone(ring: KeyRing) -> None:
    key = ring.create("me")
    assert ring.list_names() == ["me"]
    assert ring.read_private("me").public == key.public
    assert ring.read_public("me").pem() == key.public.pem()
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(ring.path("me").stat().st_mode) == 0o600
    assert b"BEGIN PRIVATE KEY" in ring.path("me").read_bytes()
    ring.check_integrity()


def test_a_umask_that_shares_everything_does_not_share_a_key(ring: KeyRing) -> None:
    before = os.umask(0)
    try:
        ring.create("me")
    finally:
        os.umask(before)
    assert stat.S_IMODE(ring.folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(ring.path("me").stat().st_mode) == 0o600


def test_an_imported_key_is_the_same_key(ring: KeyRing) -> None:
    ring.add("work", PrivateKey.from_pem(make_rfc_key().pem()))
    assert ring.read_public("work") == make_rfc_key().public


def test_a_taken_name_is_refused_and_the_key_stays(ring: KeyRing) -> None:
    key = ring.create("me")
    with pytest.raises(UsageError, match="exists already"):
        ring.create("me")
    with pytest.raises(UsageError, match="exists already"):
        ring.add("me", make_rfc_key())
    assert ring.read_public("me") == key.public


@pytest.mark.parametrize(
    "name", ["", "Me", "a/b", "../me", ".me", "me.pem", "a--b", "-a", "ä", "a" * 65, "a\0b", "a b"]
)
def test_a_name_outside_the_grammar_names_no_key(ring: KeyRing, name: str) -> None:
    for use in (ring.create, ring.read_private, ring.read_public):
        with pytest.raises(UsageError, match="cannot name a key"):
            use(name)
    assert not ring.folder.exists()


def test_a_missing_key_is_not_found(ring: KeyRing) -> None:
    assert ring.list_names() == []
    with pytest.raises(NotFoundError, match="'me'") as refused:
        ring.read_private("me")
    assert "keys new me" in refused.value.hint


def test_only_key_files_are_listed(ring: KeyRing) -> None:
    ring.create("me")
    (ring.folder / "notes.txt").write_text("")
    (ring.folder / ".me.pem.swp").write_text("")
    (ring.folder / "Upper.pem").write_text("")
    assert ring.list_names() == ["me"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_a_key_file_that_others_can_reach_is_refused(ring: KeyRing, mode: int) -> None:
    ring.create("me")
    ring.path("me").chmod(mode)
    with pytest.raises(TrustError, match="others may read") as refused:
        ring.read_private("me")
    assert "chmod 600" in refused.value.hint
    with pytest.raises(TrustError, match="others may read"):
        ring.check_integrity()


def test_a_key_that_is_a_link_is_refused(ring: KeyRing, tmp_path: Path) -> None:
    ring.create("real")
    elsewhere = tmp_path / "secret.pem"
    ring.path("real").rename(elsewhere)
    ring.path("real").symlink_to(elsewhere)
    with pytest.raises(TrustError, match="is a link"):
        ring.read_private("real")


def test_a_new_key_is_not_written_through_a_link(ring: KeyRing, tmp_path: Path) -> None:
    ring.create("other")
    target = tmp_path / "planted.pem"
    ring.path("me").symlink_to(target)
    with pytest.raises(UsageError, match="exists already"):
        ring.create("me")
    assert not target.exists()


def test_a_fifo_in_the_place_of_a_key_is_refused_without_waiting(ring: KeyRing) -> None:
    ring.create("other")
    os.mkfifo(ring.path("me"), 0o600)
    with pytest.raises(TrustError, match="not a plain file"):
        ring.read_private("me")


@pytest.mark.parametrize("mode", [0o755, 0o750, 0o701])
def test_a_folder_that_others_may_enter_gets_no_key(ring: KeyRing, mode: int) -> None:
    ring.folder.mkdir(parents=True)
    ring.folder.chmod(mode)
    with pytest.raises(TrustError, match="others may enter") as refused:
        ring.create("me")
    assert "chmod 700" in refused.value.hint
    assert list(ring.folder.iterdir()) == []


def test_a_damaged_key_file_is_named(ring: KeyRing) -> None:
    ring.create("me")
    ring.path("me").write_bytes(b"")
    with pytest.raises(InvalidPackageError, match=r"me\.pem"):
        ring.read_private("me")


def test_a_full_disk_leaves_no_half_key(ring: KeyRing, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        ring.create("me")
    assert list(ring.folder.iterdir()) == []


def test_a_new_file_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "out.pem"
    write_new_file(path, b"one", mode=0o644)
    with pytest.raises(UsageError, match="exists already"):
        write_new_file(path, b"two", mode=0o644)
    assert path.read_bytes() == b"one"


def test_reading_a_pem_file_is_bounded_and_names_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "big.pem"
    path.write_bytes(b"x" * (MAX_PEM * 4))
    assert len(read_pem(path)) == MAX_PEM + 1
    with pytest.raises(NotFoundError, match="no such file"):
        read_pem(tmp_path / "absent.pem")


def test_a_key_is_not_read_from_a_folder_or_a_pipe(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(InvalidPackageError, match="not a regular file"):
            read_pem(path)
