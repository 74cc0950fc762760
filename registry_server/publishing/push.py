"""Parses and validates the push of a version.

A version never changes: a later push of it must have the same content. The same content with a new
signature is a new *signed form* of the release and becomes the newest.

`parse_push_request` reads the name, the tag and the manifest; `decide_push` compares them with the
published release; `validate_push` also checks rights, blobs and the signature. It runs before the
package is read, so that invalid pushes cost little, and again inside the write transaction, where
its result cannot change any more.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, func, select

from expertctl.digest import Digest, FileDigest
from expertctl.errors import (
    ConflictError,
    InvalidPackageError,
    NotFoundError,
    RevokedError,
    StoreError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.package.layout import (
    CONFIG,
    PackageLayout,
    compute_content_digest,
    parse_oci_manifest,
)
from expertctl.reference import PackageName, Version
from expertctl.trust.bundle import MAX_BUNDLE, SignatureBundle, read_bundle, verify_bundle
from registry_server.access import rights
from registry_server.access.namespaces import NamespaceRow, fold_name
from registry_server.access.rights import Action, Identity
from registry_server.database.tables import (
    BLOBS,
    PACKAGES,
    RELEASES,
    REPOSITORY_BLOBS,
    SIGNED_FORMS,
)
from registry_server.errors import OciCode, OciError
from registry_server.publishing.index import (
    PublisherKey,
    find_key,
    find_package_id,
    load_publisher_keys,
)
from registry_server.registry import BlobStorage

MAX_VERSION_LENGTH = 128
"""Maximum length of an OCI tag."""


class PushAction(StrEnum):
    """What a push has to write."""

    RELEASE = "release"
    """A new version."""
    SIGNATURE = "signature"
    """An existing release; this signed form becomes its newest."""
    NOTHING = "nothing"
    """Nothing: it was published before."""


@dataclass(frozen=True, slots=True)
class ReleaseForm:
    """A signed form of a release: its package digest, and the id of the signing key."""

    package_digest: Digest
    signer: str


@dataclass(frozen=True, slots=True)
class PublishedRelease:
    """A published version, with its signed forms, newest last."""

    version: str
    content_digest: Digest
    forms: tuple[ReleaseForm, ...]


def parse_exact_version(tag: str) -> Version:
    """Parse a version in its canonical spelling.

    Raises:
        UsageError: for any other text: `v1.0.0`, `1.0`, `01.0.0`, digits of other scripts.
    """
    version = Version.parse(tag)
    if len(tag) > MAX_VERSION_LENGTH or str(version) != tag:
        raise UsageError(
            f"{tag[:80]!r} cannot be published: at most {MAX_VERSION_LENGTH} characters"
        )
    return version


def decide_push(
    name: PackageName,
    requested: PublishedRelease,
    published: Sequence[PublishedRelease],
    *,
    revoked: Collection[str],
) -> PushAction:
    """Return what a push has to write.

    ``wanted`` has one form; ``known`` is the published release whose version differs at most in the
    case of letters; ``revoked`` contains the ids of revoked keys.

    Raises:
        ConflictError: when the version exists with other content, or in another spelling.
    """
    _check_spelling(name, requested.version, published)
    if not published:
        return PushAction.RELEASE
    (existing,) = published
    if existing.content_digest != requested.content_digest:
        raise ConflictError(
            f"{name}@{requested.version} is published with other content, "
            "and versions never change",
            hint="publish your change under a higher version; `yank` hides the old one",
        )
    return _decide_form(requested.forms[-1], existing.forms, revoked)


def _decide_form(
    form: ReleaseForm, forms: Sequence[ReleaseForm], revoked: Collection[str]
) -> PushAction:
    """Choose an older form again only if the key of the newest was revoked."""
    if form not in forms:
        return PushAction.SIGNATURE
    newest = forms[-1]
    again = form != newest and newest.signer in revoked
    return PushAction.SIGNATURE if again else PushAction.NOTHING


def _check_spelling(name: PackageName, version: str, published: Sequence[PublishedRelease]) -> None:
    for other in published:
        if other.version != version:
            raise ConflictError(
                f"{name}@{version} differs from the published {other.version} in case alone",
                hint=f"take another version than {other.version}",
            )


_CONFIG = (Digest.compute(CONFIG), len(CONFIG))


@dataclass(frozen=True, slots=True)
class PushRequest:
    """A well-formed manifest with a well-formed name; its blobs were not read."""

    name: PackageName
    version: str
    layout: PackageLayout
    signature: FileDigest

    @property
    def ref(self) -> str:
        """``namespace/name@version``."""
        return f"{self.name}@{self.version}"

    @property
    def package_digest(self) -> Digest:
        """The digest of the OCI manifest."""
        return self.layout.package_digest

    @property
    def content_digest(self) -> Digest:
        """The digest of all files except the signature, according to the manifest."""
        return compute_content_digest(self.layout.files)

    @property
    def blobs(self) -> dict[str, int]:
        """The size of every required blob by digest, including the configuration."""
        return {str(digest): size for digest, size in (_CONFIG, *self.layout.blobs)}


def parse_push_request(*, name: PackageName, tag: str, manifest: bytes) -> PushRequest:
    """Parse a push.

    Raises:
        UsageError: when the tag is not a version in its canonical spelling.
        InvalidPackageError: when the manifest is not that of a package.
        UnsignedError: when there is no signature.
    """
    version = str(parse_exact_version(tag))
    layout = parse_oci_manifest(manifest, what=f"{name}@{version}")
    if layout.signature is None:
        raise UnsignedError(
            f"{name}@{version} is not signed, and a registry accepts signed packages only",
            hint="sign it with `expertctl sign FILE --key NAME`, then publish it again",
        )
    if layout.signature.size > MAX_BUNDLE:
        raise UsageError(f"{name}@{version}: its signature file is too large")
    return PushRequest(PackageName(name.namespace, name.name), version, layout, layout.signature)


_MAX_LISTED = 3


@dataclass(frozen=True, slots=True)
class ValidatedPush:
    """A push that may be published, and its rows; those that do not exist yet are None."""

    namespace: NamespaceRow
    repository: int
    package: int | None
    action: PushAction
    signer: str


def validate_push(
    connection: Connection, storage: BlobStorage, identity: Identity, offer: PushRequest
) -> ValidatedPush:
    """Check everything about a push except the contents of its files.

    Raises:
        UnauthenticatedError: when the request is anonymous.
        ForbiddenError: when the user may not push there.
        OciError: when the namespace is not for packages, or blobs were not uploaded.
        TrustError: when no valid key of the namespace signed it.
        ConflictError: when the version exists with other content, or a name looks like another.
    """
    name = offer.name
    namespace = rights.authorise(connection, identity, Action.PUSH, name.namespace, name.name)
    if namespace.kind != "expert":
        raise OciError(OciCode.UNSUPPORTED, f"{namespace.name} is not a namespace for packages")
    repository = _require_blobs(connection, offer)
    keys = load_publisher_keys(connection, namespace.id)
    signer = _verify_signature(storage, offer, keys)
    package = find_package_id(connection, namespace, name.name)
    if package is None:
        _check_distinct_name(connection, namespace, offer)
    step = decide_push(
        name,
        PublishedRelease(
            offer.version, offer.content_digest, (ReleaseForm(offer.package_digest, signer),)
        ),
        _load_releases(connection, package, offer.version),
        revoked={key.key_id for key in keys if key.revoked is not None},
    )
    return ValidatedPush(namespace, repository, package, step, signer)


def _require_blobs(connection: Connection, offer: PushRequest) -> int:
    """Check that the repository has every blob, with the size in the manifest."""
    repository = rights.find_repository(connection, str(offer.name))
    there = (
        {} if repository is None else _load_blob_sizes(connection, repository.id, list(offer.blobs))
    )
    missing = [digest for digest in offer.blobs if digest not in there]
    if missing or repository is None:
        shown = ", ".join(missing[:_MAX_LISTED]) + (" …" if len(missing) > _MAX_LISTED else "")
        raise OciError(
            OciCode.MANIFEST_BLOB_UNKNOWN,
            f"{offer.ref}: {len(missing)} of its blobs are not in {offer.name}: {shown}",
            hint="upload them first; `expertctl publish` does, and can be run again",
        )
    wrong = [f"{d} has {there[d]} bytes" for d, size in offer.blobs.items() if there[d] != size]
    if wrong:
        raise InvalidPackageError(f"{offer.ref} manifest", wrong)
    return repository.id


def _load_blob_sizes(
    connection: Connection, repository: int, digests: Sequence[str]
) -> dict[str, int]:
    query = (
        select(BLOBS.c.digest, BLOBS.c.size)
        .join(REPOSITORY_BLOBS, REPOSITORY_BLOBS.c.digest == BLOBS.c.digest)
        .where(REPOSITORY_BLOBS.c.repository_id == repository, BLOBS.c.digest.in_(digests))
    )
    return {digest: size for digest, size in connection.execute(query)}


def _verify_signature(
    storage: BlobStorage, offer: PushRequest, keys: Sequence[PublisherKey]
) -> str:
    """Check that a key of the namespace signed exactly the files of the manifest."""
    bundle = read_bundle(_read_signature(storage, offer))
    key = _require_key(bundle, offer, keys)
    verify_bundle(bundle, offer.layout.files, key.key)
    return key.key_id


def _read_signature(storage: BlobStorage, offer: PushRequest) -> bytes:
    """Return the bytes of the signature file, whose size is bounded."""
    try:
        with storage.open(offer.signature.digest) as stream:
            data = stream.read(offer.signature.size)
    except NotFoundError as error:
        raise storage_damaged(error.message) from error
    if Digest.compute(data) != offer.signature.digest:
        raise storage_damaged(f"blob {offer.signature.digest} is not what was uploaded")
    return data


def storage_damaged(fact: str) -> StoreError:
    """Return the error for a blob that is missing or damaged."""
    hint = "the operator of the registry should check its disk"
    return StoreError(f"the storage is damaged: {fact}", hint=hint)


def _require_key(
    bundle: SignatureBundle, offer: PushRequest, keys: Sequence[PublisherKey]
) -> PublisherKey:
    namespace = offer.name.namespace
    known = find_key(keys, bundle.key_id)
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


def _check_distinct_name(
    connection: Connection, namespace: NamespaceRow, offer: PushRequest
) -> None:
    """Refuse a new package whose name looks like another one of the namespace.

    Other namespaces need no such check, because names of namespaces never look alike.
    """
    query = select(PACKAGES.c.name).where(
        PACKAGES.c.namespace_id == namespace.id, PACKAGES.c.skeleton == fold_name(offer.name.name)
    )
    taken = connection.execute(query.limit(1)).scalar_one_or_none()
    if taken is not None:
        raise ConflictError(
            f"{offer.name} looks like {namespace.name}/{taken}, which exists",
            hint="choose a name that cannot be confused with another",
        )


def _load_releases(
    connection: Connection, package: int | None, version: str
) -> list[PublishedRelease]:
    """Return the release whose version differs at most in the case of letters."""
    folded = func.lower(RELEASES.c.version) == version.lower()
    query = select(RELEASES.c.id, RELEASES.c.version, RELEASES.c.content_digest).where(
        RELEASES.c.package_id == package, folded
    )
    return [
        PublishedRelease(found, Digest.parse(content), _load_forms(connection, release))
        for release, found, content in connection.execute(query).all()
    ]


def _load_forms(connection: Connection, release: int) -> tuple[ReleaseForm, ...]:
    query = (
        select(SIGNED_FORMS.c.package_digest, SIGNED_FORMS.c.signer)
        .where(SIGNED_FORMS.c.release_id == release)
        .order_by(SIGNED_FORMS.c.position)
    )
    rows = connection.execute(query)
    return tuple(ReleaseForm(Digest.parse(digest), signer) for digest, signer in rows)
