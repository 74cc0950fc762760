"""Verification: from contents whose digests match to a `VerifiedPackage`, without the network.

Only this module creates a `VerifiedPackage`. A version of a package never changes its content: if a
lock file, an earlier registry answer or an installed version disagrees with the registry, one of
them is wrong or lies, and `changed_version_error` reports both.
"""

from dataclasses import dataclass

from expertctl.errors import (
    ChangedVersionError,
    DigestError,
    SignatureError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.package.read import PackageContents
from expertctl.reference import FROM_FILE, Digest, PackageName, Reference, Version
from expertctl.trust.bundle import SignatureBundle, read_bundle, verify_bundle
from expertctl.trust.keys import PublicKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore

ACCEPT_OPTION = "--accept-changed"


@dataclass(frozen=True, slots=True)
class VersionContent:
    """The content digest of a version according to one source, and the keys that signed it."""

    source: str
    digest: Digest
    signers: tuple[str, ...] = ()
    """Key ids; empty if the source does not record them, or nobody signed."""

    def __str__(self) -> str:
        """Return a clause for a message."""
        signed = f"signed by {' and '.join(self.signers)}" if self.signers else "signer unknown"
        return f"{self.source} has {self.digest} ({signed})"


def changed_version_error(
    ref: str, previous: VersionContent, current: VersionContent, *, hint: str = ""
) -> ChangedVersionError:
    """Return the error for a version whose content differs from before."""
    override = f"`{ACCEPT_OPTION} {ref}` accepts the new content, if the publisher confirms it"
    return ChangedVersionError(
        f"{ref} has another content than before: {previous}, but {current}",
        hint=f"a version never changes its content, so ask its publisher; {hint or override}",
    )


REPLACED_HINT = "another package was put under this name: report it to whoever you got it from"


@dataclass(frozen=True, slots=True)
class VerifiedPackage:
    """A package whose digests and signature were checked; only this module creates one."""

    contents: PackageContents
    signer: str | None
    """The key id; ``None`` means unsigned or chosen by digest, which the user accepted."""


def verify_contents(
    contents: PackageContents,
    trust: TrustStore | TrustRecord,
    *,
    expected: Reference | None = None,
    registry: str = FROM_FILE,
) -> VerifiedPackage:
    """Require the expected package, signed by a key that may sign it.

    Keys that are trusted only for ``registry``, where the package came from, are accepted, too. A
    caller that verifies many packages reads the trust record once and passes it.

    Raises:
        UnsignedError: when there is no signature.
        TrustError: when it is another package, or the signature or its key is wrong.
    """
    if expected is not None:
        require_expected(contents, expected)
    manifest = contents.manifest
    if contents.signature is None:
        raise UnsignedError(
            f"{manifest.ref} is not signed",
            hint="ask its publisher for a signed one, or sign it with `expertctl sign FILE`",
        )
    try:
        key = _verify_signature(contents, contents.signature, trust, registry)
    except SignatureError as error:  # name the package, as there may be several
        raise SignatureError(f"{manifest.ref}: {error.message}", hint=error.hint) from error
    return VerifiedPackage(contents, key.key_id)


def _verify_signature(
    contents: PackageContents, signature: bytes, trust: TrustStore | TrustRecord, registry: str
) -> PublicKey:
    bundle = read_bundle(signature)
    package, digest = contents.manifest.package, contents.content_digest
    key = trust.authorise(bundle.key_id, package=package, content_digest=digest, registry=registry)
    verify_bundle(bundle, contents.files, key)
    require_signed_name(bundle, contents.manifest.package, contents.manifest.semver)
    return key


def require_signed_name(bundle: SignatureBundle, package: PackageName, version: Version) -> None:
    """Require that a signature that names a package or a version names this one.

    The public tool signs the name of a folder, which names no package.

    Raises:
        SignatureError: when it names another one.
    """
    try:
        named = Reference.parse(bundle.name)
    except UsageError:
        return
    pinned = named.constraint.pinned
    if named.package != package or (pinned is not None and pinned != version):
        raise SignatureError(
            f"model.sig was made for {bundle.name}, and this is {package}@{version}",
            hint=REPLACED_HINT,
        )


def accept_unsigned(contents: PackageContents) -> VerifiedPackage:
    """Accept an unsigned package, as the user requested.

    Raises:
        TrustError: when it is signed; then it must be verified.
    """
    if contents.signature is not None:
        raise TrustError(
            f"{contents.manifest.ref} is signed, so its signature must be verified",
            hint="see `expertctl verify` and `expertctl trust`",
        )
    return VerifiedPackage(contents, None)


def accept_by_digest(contents: PackageContents, digest: Digest) -> VerifiedPackage:
    """Accept a package that the user chose by its exact digest, whoever signed it.

    Raises:
        DigestError: when its digest is another one.
    """
    if digest not in {contents.package_digest, contents.content_digest}:
        raise DigestError(f"{contents.manifest.ref} is not {digest}")
    return VerifiedPackage(contents, None)


def require_expected(contents: PackageContents, expected: Reference) -> None:
    """Require the requested name and version.

    Raises:
        TrustError: when the package is another one.
    """
    manifest = contents.manifest
    same = manifest.package == expected.package
    digests = contents.package_digest, contents.content_digest
    if not (same and expected.allows(manifest.semver, *digests)):
        message = f"asked for {expected}, but the package is {manifest.ref}"
        raise TrustError(message, hint=REPLACED_HINT)
