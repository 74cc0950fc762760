"""Whether an offer may be published, from what the database and the storage know right now.

`admit` is asked twice: before the bytes of the package are read, so that nobody makes the server
work in vain, and again inside the write transaction, where what it finds cannot change any more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import Connection, func, select

from expertctl.digest import Digest
from expertctl.errors import (
    ConflictError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    StoreError,
    TrustError,
)
from expertctl.trust.bundle import Bundle, read_bundle, verify_bundle
from registry_server.access import rights
from registry_server.access.confusable import skeleton
from registry_server.access.identity import Action, Identity
from registry_server.access.namespaces import NamespaceRow
from registry_server.database.tables import (
    BLOBS,
    PACKAGES,
    RELEASES,
    REPOSITORY_BLOBS,
    SIGNED_FORMS,
)
from registry_server.oci import repositories
from registry_server.oci.errors import OciCode, OciError
from registry_server.publishing.decision import Form, Released, Step, decide
from registry_server.publishing.index import package_id
from registry_server.publishing.namespace_key import NamespaceKey, key_of, namespace_keys
from registry_server.publishing.offer import Offer
from registry_server.storage.blobs import BlobStorage

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Admission:
    """An offer that may be published, and where it belongs; rows that are missing are None."""

    namespace: NamespaceRow
    repository: int
    package: int | None
    step: Step
    signer: str


def admit(
    connection: Connection, storage: BlobStorage, identity: Identity, offer: Offer
) -> Admission:
    """Check everything about an offer but the contents of its files.

    Raises:
        UnauthenticatedError: when nobody is named.
        ForbiddenError: when the user may not push there.
        OciError: when it is no namespace for packages, or blobs were not uploaded.
        TrustError: when no valid key of the namespace signed it.
        ConflictError: when the version is there with other content, or a name looks like another.
    """
    name = offer.name
    namespace = rights.authorise(connection, identity, Action.PUSH, name.namespace, name.name)
    if namespace.kind != "expert":
        raise OciError(OciCode.UNSUPPORTED, f"{namespace.name} is not a namespace for packages")
    repository = _demand_blobs(connection, offer)
    keys = namespace_keys(connection, namespace.id)
    signer = _demand_signer(storage, offer, keys)
    package = package_id(connection, namespace, name.name)
    if package is None:
        _demand_distinct_name(connection, namespace, offer)
    step = decide(
        name,
        Released(offer.version, offer.content_digest, (Form(offer.package_digest, signer),)),
        _known(connection, package, offer.version),
        revoked={key.key_id for key in keys if key.revoked is not None},
    )
    return Admission(namespace, repository, package, step, signer)


def _demand_blobs(connection: Connection, offer: Offer) -> int:
    """Demand that every blob lies in the repository, in the size that the manifest says."""
    repository = repositories.find(connection, str(offer.name))
    there = {} if repository is None else _sizes(connection, repository.id, list(offer.blobs))
    missing = [digest for digest in offer.blobs if digest not in there]
    if missing or repository is None:
        shown = ", ".join(missing[:_SHOWN]) + (" …" if len(missing) > _SHOWN else "")
        raise OciError(
            OciCode.MANIFEST_BLOB_UNKNOWN,
            f"{offer.ref}: {len(missing)} of its blobs are not in {offer.name}: {shown}",
            hint="upload them first; `expertctl publish` does, and can be run again",
        )
    wrong = [f"{d} has {there[d]} bytes" for d, size in offer.blobs.items() if there[d] != size]
    if wrong:
        raise InvalidPackageError(f"{offer.ref} manifest", wrong)
    return repository.id


def _sizes(connection: Connection, repository: int, digests: Sequence[str]) -> dict[str, int]:
    query = (
        select(BLOBS.c.digest, BLOBS.c.size)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.digest == BLOBS.c.digest)
        .where(REPOSITORY_BLOBS.c.repository_id == repository, BLOBS.c.digest.in_(digests))
    )
    return {digest: size for digest, size in connection.execute(query)}


def _demand_signer(storage: BlobStorage, offer: Offer, keys: Sequence[NamespaceKey]) -> str:
    """Demand that a key of the namespace signed exactly the files of the manifest."""
    bundle = read_bundle(_signature(storage, offer))
    key = _demand_key(bundle, offer, keys)
    verify_bundle(bundle, offer.layout.files, key.key)
    return key.key_id


def _signature(storage: BlobStorage, offer: Offer) -> bytes:
    """Return the bytes of the signature file, which is small."""
    try:
        with storage.open(offer.signature.digest) as stream:
            data = stream.read(offer.signature.size)
    except NotFoundError as error:
        raise damaged(error.message) from error
    if Digest.of(data) != offer.signature.digest:
        raise damaged(f"blob {offer.signature.digest} is not what was uploaded")
    return data


def damaged(fact: str) -> StoreError:
    """Return the error for a blob that was lost, or is no longer what was stored."""
    hint = "whoever runs the registry should look at its disk"
    return StoreError(f"the storage is damaged: {fact}", hint=hint)


def _demand_key(bundle: Bundle, offer: Offer, keys: Sequence[NamespaceKey]) -> NamespaceKey:
    namespace = offer.name.namespace
    known = key_of(keys, bundle.key_id)
    if known is None:
        raise TrustError(
            f"{offer.ref} is signed by {bundle.key_id}, which is not a key of {namespace}",
            hint=f"an owner adds it with `expertctl registry keys add KEY --namespace {namespace}`",
        )
    if known.revoked is not None:
        raise RevokedError(
            f"{offer.ref} is signed by {bundle.key_id}, which was revoked: {known.reason}",
            hint=f"sign it with another key of {namespace}, then publish it again",
        )
    return known


def _demand_distinct_name(connection: Connection, namespace: NamespaceRow, offer: Offer) -> None:
    """Refuse a new package that people would take for another of the namespace.

    Names of other namespaces need no such check: namespaces themselves never look alike.
    """
    query = select(PACKAGES.c.name).where(
        PACKAGES.c.namespace_id == namespace.id, PACKAGES.c.skeleton == skeleton(offer.name.name)
    )
    taken = connection.execute(query.limit(1)).scalar_one_or_none()
    if taken is not None:
        raise ConflictError(
            f"{offer.name} looks like {namespace.name}/{taken}, which is there",
            hint="choose a name that nobody takes for another",
        )


def _known(connection: Connection, package: int | None, version: str) -> list[Released]:
    """Return what is published under a version, whatever the case of its letters."""
    folded = func.lower(RELEASES.c.version) == version.lower()
    query = select(RELEASES.c.id, RELEASES.c.version, RELEASES.c.content_digest).where(
        RELEASES.c.package_id == package, folded
    )
    return [
        Released(found, Digest.parse(content), _forms(connection, release))
        for release, found, content in connection.execute(query).all()
    ]


def _forms(connection: Connection, release: int) -> tuple[Form, ...]:
    query = (
        select(SIGNED_FORMS.c.package_digest, SIGNED_FORMS.c.signer)
        .where(SIGNED_FORMS.c.release_id == release)
        .order_by(SIGNED_FORMS.c.position)
    )
    rows = connection.execute(query)
    return tuple(Form(Digest.parse(digest), signer) for digest, signer in rows)
