"""Keys that sign and verify, and `KeyRing`, the folder of the user's own private keys.

ECDSA on P-256 by default; Ed25519 is supported too. A key id is ``sha256:`` and the hash of the
public key's PEM text, which is the key hint of an OpenSSF Model Signing bundle. Signatures are
deterministic: RFC 6979 nonces for ECDSA, and the lower of the two equivalent ``s``, so one message
has one signature. A private key is an unencrypted PKCS#8 file that only its owner can read.
"""

import hashlib
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self, TypeVar, get_args

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.asymmetric.types import PrivateKeyTypes, PublicKeyTypes
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)

from expertctl.errors import (
    InvalidPackageError,
    NotFoundError,
    SignatureError,
    TrustError,
    UsageError,
)
from expertctl.files import open_regular_file, sync_folder
from expertctl.reference import NAME_PATTERN

Algorithm = Literal["ecdsa-p256", "ed25519"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
MAX_PEM = 16 << 10
MAX_NAME = 64
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

_EcPublicKey = ec.EllipticCurvePublicKey
_EcPrivateKey = ec.EllipticCurvePrivateKey
_EdPublicKey = ed25519.Ed25519PublicKey
_EdPrivateKey = ed25519.Ed25519PrivateKey
_HASH = hashes.SHA256()
_NAME = re.compile(NAME_PATTERN)
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
_BINARY = getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0)
_Key = TypeVar("_Key")


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A key that verifies signatures; two keys are equal when their ids are."""

    key_id: str
    algorithm: Algorithm
    _key: _EcPublicKey | _EdPublicKey = field(repr=False, compare=False)

    @classmethod
    def from_pem(cls, data: bytes, *, what: str = "public key") -> Self:
        """Parse one ``PUBLIC KEY`` block (SubjectPublicKeyInfo).

        Raises:
            InvalidPackageError: for anything else, and for an unsupported kind of key.
        """
        if b"PRIVATE KEY-----" in data:
            hint = "a key of your own is taken in with `expertctl keys import NAME FILE`"
            raise InvalidPackageError(what, ["this is a private key"], hint=hint)
        return cls._from_key(_load_pem(data, serialization.load_pem_public_key, what), what)

    @classmethod
    def _from_key(cls, key: PublicKeyTypes, what: str) -> Self:
        known, algorithm = _check_algorithm(key, what)
        return cls(compute_key_id(_public_pem(known)), algorithm, known)

    def pem(self) -> bytes:
        """Return the PEM text; deterministic."""
        return _public_pem(self._key)

    def verify(self, signature: bytes, data: bytes) -> None:
        """Verify a signature of ``data``.

        Raises:
            SignatureError: when it is not this key's, or not in its one accepted encoding.
        """
        try:
            if isinstance(self._key, _EdPublicKey):
                self._key.verify(signature, data)
            else:
                _check_encoding(signature)
                self._key.verify(signature, data, ec.ECDSA(_HASH))
        except InvalidSignature as error:
            raise SignatureError(f"the signature is not one by key {self.key_id}") from error


@dataclass(frozen=True, slots=True)
class PrivateKey:
    """A key that makes signatures."""

    public: PublicKey
    _key: _EcPrivateKey | _EdPrivateKey = field(repr=False, compare=False)

    @classmethod
    def generate(cls, algorithm: Algorithm = "ecdsa-p256") -> Self:
        """Make a new key from the system's randomness."""
        match algorithm:
            case "ecdsa-p256":
                return cls._from_key(ec.generate_private_key(ec.SECP256R1()), "new key")
            case "ed25519":
                return cls._from_key(_EdPrivateKey.generate(), "new key")

    @classmethod
    def from_pem(cls, data: bytes, *, what: str = "private key") -> Self:
        """Parse one unencrypted private key: PKCS#8, or SEC 1 as openssl writes it for curves.

        Raises:
            InvalidPackageError: for anything else, and for an unsupported kind of key.
        """
        if b"-----BEGIN PUBLIC KEY-----" in data:
            hint = "a publisher's key is trusted with `expertctl trust add FILE --namespace NS`"
            raise InvalidPackageError(what, ["this is a public key"], hint=hint)
        return cls._from_key(_load_pem(data, _load_private, what), what)

    @classmethod
    def _from_key(cls, key: PrivateKeyTypes, what: str) -> Self:
        public = PublicKey._from_key(key.public_key(), what)
        assert isinstance(key, _EcPrivateKey | _EdPrivateKey)
        return cls(public, key)

    def pem(self) -> bytes:
        """Return the secret as unencrypted PKCS#8 PEM."""
        return self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )

    def sign(self, data: bytes) -> bytes:
        """Return the signature of ``data``; deterministic."""
        if isinstance(self._key, _EdPrivateKey):
            return self._key.sign(data)
        raw = self._key.sign(data, ec.ECDSA(_HASH, deterministic_signing=True))
        r, s = decode_dss_signature(raw)
        return encode_dss_signature(r, min(s, P256_ORDER - s))


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The user's own private keys, by name: files below one folder."""

    folder: Path

    def list_names(self) -> list[str]:
        """Return the names of all keys, sorted."""
        if not self.folder.is_dir():
            return []
        stems = (p.stem for p in self.folder.iterdir() if p.suffix == ".pem")
        return sorted(stem for stem in stems if _NAME.fullmatch(stem))

    def create(self, name: str, algorithm: Algorithm = "ecdsa-p256") -> PrivateKey:
        """Generate a key and store it, as `add`."""
        return self.add(name, PrivateKey.generate(algorithm))

    def add(self, name: str, key: PrivateKey) -> PrivateKey:
        """Store a key under a new name.

        Raises:
            UsageError: when the name is not a valid name, or taken.
        """
        path = self.path(name)
        self._make_folder()
        write_new_file(path, key.pem(), mode=0o600)
        return key

    def read_private(self, name: str) -> PrivateKey:
        """Return a private key.

        Raises:
            NotFoundError: when there is none of that name.
            TrustError: when others could read the file, or it is not a plain file.
        """
        path = self.path(name)
        try:
            data = _read_secret(path)
        except FileNotFoundError as error:
            hint = f"`expertctl keys list` shows yours; make it with `expertctl keys new {name}`"
            raise NotFoundError(f"there is no key {name!r} in {self.folder}", hint=hint) from error
        return PrivateKey.from_pem(data, what=str(path))

    def read_public(self, name: str) -> PublicKey:
        """Return the public half of a key."""
        return self.read_private(name).public

    def path(self, name: str) -> Path:
        """Return the file of a key.

        Raises:
            UsageError: when the name is not a name.
        """
        return self.folder / f"{check_key_name(name)}.pem"

    def check_integrity(self) -> None:
        """Read every key; raise the fault of the first bad one."""
        for name in self.list_names():
            self.read_private(name)

    def _make_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        mode = stat.S_IMODE(self.folder.stat().st_mode)
        if os.name == "posix" and mode & 0o077:
            message = f"{self.folder}: others may enter this folder of private keys"
            raise TrustError(message, hint=f"chmod 700 {self.folder}")


def check_key_name(text: str) -> str:
    """Return the text when it is a valid name of a key.

    Raises:
        UsageError: when it cannot.
    """
    if len(text) <= MAX_NAME and _NAME.fullmatch(text):
        return text
    hint = "lower-case letters, digits and single dashes, at most 64"
    raise UsageError(f"{text[:80]!r} cannot name a key", hint=hint)


def write_new_file(path: Path, data: bytes, *, mode: int) -> None:
    """Write a file that must not exist yet; a link in its place is not followed.

    Raises:
        UsageError: when something is there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW | _BINARY
    try:
        handle = os.open(path, flags, mode)
    except FileExistsError as error:
        hint = "nothing was overwritten; take another name"
        raise UsageError(f"{path} exists already", hint=hint) from error
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def read_pem(path: Path) -> bytes:
    """Return the bytes of a public key file, up to one more than is allowed.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it is no regular file; a pipe is not waited for.
    """
    with open_regular_file(path) as stream:
        return stream.read(MAX_PEM + 1)


def _read_secret(path: Path) -> bytes:
    """Read a private key; the open file is checked, so it cannot be swapped between."""
    if path.is_symlink():
        raise TrustError(f"{path} is a link; a private key must be a file of its own")
    with os.fdopen(os.open(path, os.O_RDONLY | _NO_FOLLOW | _BINARY), "rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode
        if not stat.S_ISREG(mode):
            raise TrustError(f"{path} is not a plain file")
        if os.name == "posix" and mode & 0o077:
            hint = f"chmod 600 {path}; if others had access, `expertctl keys revoke {path.stem}`"
            raise TrustError(f"{path}: others may read this private key", hint=hint)
        return stream.read(MAX_PEM + 1)


def compute_key_id(pem: bytes) -> str:
    """Return the id of a public key, from its PEM text."""
    return f"sha256:{hashlib.sha256(pem).hexdigest()}"


def _public_pem(key: _EcPublicKey | _EdPublicKey) -> bytes:
    return key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )


def _load_private(data: bytes) -> PrivateKeyTypes:
    return serialization.load_pem_private_key(data, password=None)


def _load_pem(data: bytes, load: Callable[[bytes], _Key], what: str) -> _Key:
    hint = "`openssl pkey -in FILE -out NEW` writes one key, plain, in PEM form"
    if len(data) > MAX_PEM:
        raise InvalidPackageError(what, [f"more than {MAX_PEM} bytes are too many for one key"])
    blocks = data.count(b"-----BEGIN ")
    if blocks != 1:
        problem = f"{blocks} PEM blocks where one key is expected"
        raise InvalidPackageError(what, [problem], hint=hint)
    try:
        return load(data)
    except TypeError as error:
        raise InvalidPackageError(what, ["the key is encrypted"], hint=hint) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise InvalidPackageError(what, ["not a key in PEM form"]) from error


def _check_algorithm(
    key: PublicKeyTypes, what: str
) -> tuple[_EcPublicKey | _EdPublicKey, Algorithm]:
    match key:
        case _EcPublicKey() if isinstance(key.curve, ec.SECP256R1):
            return key, "ecdsa-p256"
        case _EcPublicKey():
            found = f"an elliptic curve key on {key.curve.name}"
        case _EdPublicKey():
            return key, "ed25519"
        case _:
            found = f"a key of the kind {type(key).__name__.removesuffix('PublicKey')}"
    hint = "make one with `expertctl keys new NAME`"
    problem = f"{found} is not used here, only ECDSA on P-256 and Ed25519"
    raise InvalidPackageError(what, [problem], hint=hint)


def _check_encoding(signature: bytes) -> None:
    """Refuse all encodings but the DER form of the lower ``s``: nobody can make a second one."""
    try:
        r, s = decode_dss_signature(signature)  # strict DER: no BER lengths, no trailing bytes
    except ValueError as error:
        raise SignatureError("the ECDSA signature is not in DER") from error
    if not (0 < r < P256_ORDER and 0 < s < P256_ORDER):
        raise SignatureError("the ECDSA signature has a number outside 1 … n-1")
    if s > P256_ORDER // 2:
        hint = "sign again with `expertctl sign`, or with another tool until s is the lower one"
        raise SignatureError("the ECDSA signature uses the higher s", hint=hint)
