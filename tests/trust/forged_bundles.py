"""Bundles made by hand, good and bad: written from the format's description, not with our code."""

import base64
import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from expertctl.reference import Digest, FileDigest
from expertctl.trust.keys import PrivateKey

Document = dict[str, Any]
Edit = Callable[[Document], object]

# RFC 6979, appendix A.2.5.
RFC_SECRET = 0xC9AFA9D845BA75166B5C215767B1D6934E50C3DB36E89B127B8A622B120F6721
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
CONTENT = {
    "README.md": b"# sql\n",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"w" * 40,
    "expert.json": b'{"name":"acme/sql"}',
}


def make_ec_key(secret: int, curve: ec.EllipticCurve | None = None) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(secret, curve or ec.SECP256R1())


def encode_pkcs8(key: Any) -> bytes:
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return pem


def encode_spki(key: Any) -> bytes:
    pem: bytes = key.public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    return pem


def make_rfc_key() -> PrivateKey:
    return PrivateKey.from_pem(encode_pkcs8(make_ec_key(RFC_SECRET)))


def hash_content(content: Mapping[str, bytes] = CONTENT) -> list[FileDigest]:
    return [FileDigest(path, len(data), Digest.compute(data)) for path, data in content.items()]


def make_resource(name: str, data: bytes = b"") -> Document:
    return {"name": name, "algorithm": "sha256", "digest": hashlib.sha256(data).hexdigest()}


def compute_root_digest(resources: list[Document]) -> str:
    return hashlib.sha256(b"".join(bytes.fromhex(r["digest"]) for r in resources)).hexdigest()


def make_statement(resources: list[Document] | None = None) -> Document:
    listed = resources
    if listed is None:
        listed = [make_resource(name, CONTENT[name]) for name in sorted(CONTENT)]
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [{"name": "acme/sql@1.0.0", "digest": {"sha256": compute_root_digest(listed)}}],
        "predicateType": "https://model_signing/signature/v1.0",
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": ["model.sig"],
            },
            "resources": listed,
        },
    }


def make_envelope(payload: bytes, key: PrivateKey, *, signed: bytes | None = None) -> Document:
    kind = "application/vnd.in-toto+json"
    pae = f"DSSEv1 {len(kind)} {kind} {len(payload)} ".encode() + payload
    signature = key.sign(pae if signed is None else signed)
    return {
        "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
        "verificationMaterial": {
            "publicKey": {"hint": hashlib.sha256(key.public.pem()).hexdigest()},
            "tlogEntries": [],
        },
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": kind,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }


def encode_canonical(document: Document) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()


def forge_statement(edit: Edit, key: PrivateKey | None = None) -> bytes:
    """A bundle whose signature is good but whose statement was edited before signing."""
    document = copy.deepcopy(make_statement())
    edit(document)
    return encode_canonical(make_envelope(json.dumps(document).encode(), key or make_rfc_key()))


def forge_bundle(edit: Edit) -> bytes:
    """A bundle that was edited after signing."""
    document = make_envelope(json.dumps(make_statement()).encode(), make_rfc_key())
    edit(document)
    return encode_canonical(document)


def forge_signature(change: Callable[[bytes], bytes]) -> bytes:
    """A good bundle whose raw signature bytes were changed."""

    def edit(document: Document) -> None:
        entry = document["dsseEnvelope"]["signatures"][0]
        entry["sig"] = base64.b64encode(change(base64.b64decode(entry["sig"]))).decode()

    return forge_bundle(edit)


def setting(*path: str | int, value: Any) -> Edit:
    """An edit that sets one value deep inside a document."""

    def edit(document: Document) -> None:
        target: Any = document
        for step in path[:-1]:
            target = target[step]
        target[path[-1]] = value

    return edit


def removing(*path: str | int) -> Edit:
    """An edit that removes one value deep inside a document."""

    def edit(document: Document) -> None:
        target: Any = document
        for step in path[:-1]:
            target = target[step]
        del target[path[-1]]

    return edit
