"""The signed envelope around an index document, and who must have signed it."""

from expertctl.errors import TrustError
from expertctl.reference import PackageName
from expertctl.registry.index_document import MAX_BYTES, IndexDocument
from expertctl.trust.dsse import Envelope
from expertctl.trust.keys import PrivateKey, PublicKey

PAYLOAD_TYPE = "application/vnd.expertctl.index.v1+json"
MAX_ENVELOPE = MAX_BYTES * 4 // 3 + 4096
"""A document of the largest size in base64, and what is around it."""


def sign_index(document: IndexDocument, key: PrivateKey) -> bytes:
    """Return the envelope of a document, the same for the same arguments.

    Raises:
        InvalidPackageError: when the document is too large for any client to read.
    """
    return Envelope.seal(document.encode(), payload_type=PAYLOAD_TYPE, key=key).encode()


def open_index(envelope: bytes, *, key: PublicKey, package: PackageName) -> IndexDocument:
    """Return the document of a package, which the registry's index key must have signed.

    Raises:
        SignatureError: when the envelope is malformed or its signature is wrong.
        TrustError: when another key signed it, or it is about another package.
        InvalidPackageError: when what was signed is no index document.
    """
    what = f"the index of {package}"
    opened = Envelope.parse(envelope, payload_type=PAYLOAD_TYPE, max_bytes=MAX_ENVELOPE, what=what)
    if opened.key_id != key.key_id:
        raise TrustError(
            f"{what} is signed by {opened.key_id[:80]!r}, the registry's index key is {key.key_id}",
            hint="if the registry has a new index key, ask whoever runs it for the fingerprint; "
            "see `expertctl trust registry --help`",
        )
    opened.verify(key, what=what)
    document = IndexDocument.parse_canonical(opened.payload, what=what)
    if document.package != package:
        raise TrustError(f"asked for {what}, but got that of {document.package}")
    return document
