"""Reading a package strictly, in one pass, and verifying it without the network.

Nothing is trusted: the expected archive is derived from the OCI manifest, which is itself derived
from the files it names, and every byte is compared or hashed. The files must be what the manifest
says, and nothing more. Decompression overlaps with hashing. The contents of a package may be used
only after verification.

Only this module creates a `VerifiedPackage`. A version of a package never changes its content: if a
lock file, an earlier registry answer or an installed version disagrees with the registry, one of
them is wrong or lies, and `changed_version_error` reports both.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertctl.digest import Digest, FileDigest, Progress, hash_stream, ignore_progress
from expertctl.errors import (
    ChangedVersionError,
    DigestError,
    InvalidPackageError,
    SignatureError,
    TrustError,
    UnsignedError,
    UsageError,
)
from expertctl.files import open_regular_file
from expertctl.package.adapter import AdapterSpec, parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.archive import (
    BLOCK_SIZE,
    DAMAGED_HINT,
    DISCARD,
    ArchiveContent,
    ArchiveReader,
    BlobSink,
    PlainArchiveContent,
    count_kept_bytes,
)
from expertctl.package.frame import FRAME_MAGIC, check_frame, open_decompressor
from expertctl.package.layout import (
    MAX_FILES,
    MAX_PACKAGES,
    MAX_SET_BYTES,
    MAX_TOTAL_BYTES,
    WEIGHT_TYPE,
    Blobs,
    PackageLayout,
    build_index_name,
    choose_media_type,
    compute_content_digest,
    is_document,
)
from expertctl.package.tensor_file import parse_header
from expertctl.reference import FROM_FILE, PackageName, Reference, Version
from expertctl.schema.manifest import (
    MANIFEST_PATH,
    SIGNATURE_PATH,
    AdapterEntry,
    Manifest,
    parse_manifest,
)
from expertctl.trust.bundle import SignatureBundle, read_bundle, verify_bundle
from expertctl.trust.keys import PublicKey
from expertctl.trust.trust_record import TrustRecord
from expertctl.trust.trust_store import TrustStore


def list_named_files(manifest: Manifest) -> set[str]:
    """Return the files that a manifest names, including itself."""
    named = {path for entry in manifest.adapters for path in (entry.path, entry.config)}
    extras = (manifest.decoding.grammar, manifest.decoding.chat_template)
    return {MANIFEST_PATH, *named, *(path for path in extras if path)}


def find_file_set_problems(manifest: Manifest, paths: Mapping[str, object]) -> list[str]:
    """Return which files are missing, and which are not named in the manifest."""
    named = list_named_files(manifest)
    missing = [
        f"{path} is named in {MANIFEST_PATH} but missing" for path in sorted(named - set(paths))
    ]
    extra = sorted(path for path in set(paths) - named if not is_document(path))
    odd = [f"{SIGNATURE_PATH} is the signature and cannot be named"] * (SIGNATURE_PATH in named)
    return odd + missing + [f"{path} is not named in {MANIFEST_PATH}" for path in extra]


def _read_entry_spec(
    entry: AdapterEntry,
    small: Mapping[str, bytes],
    headers: Mapping[str, bytes],
    sizes: Mapping[str, int],
) -> AdapterSpec:
    """Read the configuration and header of one adapter, and check its manifest entry."""
    if entry.config not in small or entry.path not in headers:
        raise InvalidPackageError(
            entry.path, ["the adapter needs its .safetensors file and a configuration below 1 MiB"]
        )
    config = parse_adapter_config(small[entry.config], what=entry.config)
    table = parse_header(headers[entry.path], file_size=sizes[entry.path], what=entry.path)
    spec = build_adapter_spec(config, table, what=entry.path)
    problems = find_entry_problems(entry, spec)
    if problems:
        raise InvalidPackageError(entry.path, problems)
    return spec


def find_entry_problems(entry: AdapterEntry, spec: AdapterSpec) -> list[str]:
    """Return where a manifest entry differs from the tensors."""
    pairs = (
        ("kind", entry.kind, spec.kind),
        ("rank", entry.rank, spec.rank),
        ("tokens", entry.tokens, spec.tokens),
        ("dtype", entry.dtype, spec.dtype),
        ("tensors", entry.tensors, spec.tensors),
    )
    return [
        f"{MANIFEST_PATH} says {name} {stated}, the files say {found}"
        for name, stated, found in pairs
        if stated != found
    ]


_MEMBER_BYTES = 2 * BLOCK_SIZE
_MAX_ARCHIVE = MAX_TOTAL_BYTES + (MAX_FILES + 8) * _MEMBER_BYTES
_MAX_SET_ARCHIVE = MAX_SET_BYTES + (MAX_FILES + 8) * MAX_PACKAGES * _MEMBER_BYTES


@dataclass(frozen=True, slots=True)
class PackageContents:
    """The contents of a package: its digests match, but its signature is not yet verified."""

    manifest: Manifest
    adapters: tuple[AdapterSpec, ...]
    """The specs of the adapters, in the order of ``manifest.adapters``."""
    layout: PackageLayout
    signature: bytes | None
    small: Mapping[str, bytes]
    """The bytes of non-weights files up to 1 MiB, by path."""
    content_digest: Digest

    @property
    def files(self) -> tuple[FileDigest, ...]:
        """All files except the signature, sorted by path."""
        return self.layout.files

    @property
    def package_digest(self) -> Digest:
        """The digest of the OCI manifest."""
        return self.layout.package_digest

    @property
    def size(self) -> int:
        """The size of all files in bytes."""
        return sum(file.size for file in self.files)


def read_package(
    path: Path, *, sink: BlobSink = DISCARD, progress: Progress = ignore_progress
) -> PackageContents:
    """Read a whole ``.expert`` file.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when it is malformed in any way.
        DigestError: when bytes do not match the digest that names them.
    """
    with open_regular_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        content = check_frame(stream, file_size=size, max_content=_MAX_ARCHIVE, what=path.name)
        with open_decompressor(stream, what=path.name) as frame:
            reader = ArchiveReader(
                frame, size=content, what=path.name, sink=sink, progress=progress
            )
            layout = reader.read_package()
    return _build_contents(layout, reader.starts, path.name)


def read_set(
    path: Path, *, sink: BlobSink = DISCARD, progress: Progress = ignore_progress
) -> Iterator[PackageContents]:
    """Read a set of packages, in a frame or as a plain tar.

    All bytes are read and hashed at once. A package's content is parsed only when it is taken from
    the iterator, so that after an untrusted one, the others cost nothing more.

    Raises:
        NotFoundError: when there is no such file.
        InvalidPackageError: when the set, or a package taken from it, is malformed in any way.
        DigestError: when bytes do not match the digest that names them.
    """
    with _open_archive(path, _MAX_SET_ARCHIVE) as (content, size):
        reader = ArchiveReader(content, size=size, what=path.name, sink=sink, progress=progress)
        layout = reader.read_set()
    return (_read_member(name, of, reader, path.name) for name, of in layout.packages.items())


@contextmanager
def _open_archive(path: Path, limit: int) -> Iterator[tuple[ArchiveContent, int]]:
    """Open a tar, in a frame or plain; give its content and its size in bytes."""
    with open_regular_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        framed = stream.read(len(FRAME_MAGIC)) == FRAME_MAGIC
        stream.seek(0)
        if framed:
            size = check_frame(stream, file_size=size, max_content=limit, what=path.name)
            with open_decompressor(stream, what=path.name) as frame:
                yield frame, size
        else:
            yield PlainArchiveContent(stream, path.name), size


def _read_member(
    name: str, layout: PackageLayout, reader: ArchiveReader, what: str
) -> PackageContents:
    contents = _build_contents(layout, reader.starts, f"{what} {name}")
    manifest = contents.manifest
    if build_index_name(manifest.package, manifest.semver) != name:
        raise InvalidPackageError(what, [f"what index.json calls {name} is {manifest.ref}"])
    return contents


def is_file_name(text: str) -> bool:
    """Tell whether an argument is a file rather than a reference: by its form, or as it exists.

    A folder may have the name of a reference, ``acme/sql``; then the reference is meant.
    """
    if text.endswith(".expert") or text.startswith((".", "/")):
        return True
    try:
        mode = os.stat(text).st_mode  # noqa: PTH116  # an empty Path is this folder
    except (OSError, ValueError):  # it does not exist, or cannot be a path
        return False
    return not (stat.S_ISDIR(mode) and _is_reference(text))


def _is_reference(text: str) -> bool:
    try:
        Reference.parse(text)
    except UsageError:
        return False
    return True


def read_blobs(
    layout: PackageLayout, blobs: Blobs, *, what: str, progress: Progress = ignore_progress
) -> PackageContents:
    """Read a package from separate blobs, as strictly as a ``.expert`` file.

    Raises:
        InvalidPackageError: when the files are not a package.
        DigestError: when bytes do not match their digest.
    """
    starts: dict[Digest, bytes] = {}
    for file in layout.layers:
        with blobs(file.digest) as stream:
            start = stream.read(count_kept_bytes(file))
            stream.seek(0)
            size, digest = hash_stream(stream, progress=progress)
        if (size, digest) != (file.size, file.digest):
            raise DigestError(f"{what}: {file.path} does not have its digest", hint=DAMAGED_HINT)
        starts[digest] = max(start, starts.get(digest, b""), key=len)
    return _build_contents(layout, starts, what)


def _build_contents(
    layout: PackageLayout, starts: Mapping[Digest, bytes], what: str
) -> PackageContents:
    """Parse the contents from the beginning of each file, and check them against the manifest."""
    small, headers = {}, {}
    for file in layout.files:
        start = starts[file.digest]
        if choose_media_type(file.path) == WEIGHT_TYPE:
            headers[file.path] = start
        elif len(start) == file.size:
            small[file.path] = start
    if MANIFEST_PATH not in small:
        raise InvalidPackageError(what, [f"{MANIFEST_PATH} is missing or too large"])
    manifest = parse_manifest(small[MANIFEST_PATH], what=f"{what} {MANIFEST_PATH}")
    sizes = {file.path: file.size for file in layout.files}
    problems = find_file_set_problems(manifest, sizes)
    specs = []
    for entry in manifest.adapters:
        try:
            specs.append(_read_entry_spec(entry, small, headers, sizes))
        except InvalidPackageError as error:
            problems += [f"{error.what}: {problem}" for problem in error.problems]
    if problems:
        raise InvalidPackageError(what, problems)
    signature = starts[layout.signature.digest] if layout.signature else None
    digest = compute_content_digest(layout.files)
    return PackageContents(manifest, tuple(specs), layout, signature, small, digest)


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
            hint="ask its publisher for a signed one, or `expertctl sign FILE --key NAME`",
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
