"""Reading a package strictly, in one pass: structure, every digest, the manifest, the tensors.

Nothing is trusted: the expected archive is derived from the OCI manifest, which is itself derived
from the files it names, and every byte is compared or hashed. The files must be what the manifest
says, and nothing more. Decompression overlaps with hashing. The contents of a package may be used
only after `expertctl.package.verify`.
"""

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from expertctl.errors import DigestError, InvalidPackageError, UsageError
from expertctl.files import open_regular_file
from expertctl.package.adapter import AdapterSpec
from expertctl.package.adapter_config import parse_adapter_config
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
from expertctl.reference import (
    Digest,
    FileDigest,
    Progress,
    Reference,
    hash_stream,
    ignore_progress,
)
from expertctl.schema.manifest import (
    MANIFEST_PATH,
    SIGNATURE_PATH,
    AdapterEntry,
    Manifest,
    parse_manifest,
)


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
