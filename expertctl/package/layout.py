"""The OCI image layout of a package and of a set of packages: pure functions of their files.

A package has one raw layer per file, named by sha256, with ``model.sig`` last. The manifest has the
form of CNCF ModelPack, and contains no time and nothing else that could vary. In a set,
``index.json`` names every manifest as ``namespace/name:version``, sorted by that name, and a blob
shared by several packages is there once.

A reader rebuilds index and manifests from the layers they name and requires the same bytes, so
nothing in them has to be trusted.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import BinaryIO

from expertctl.errors import ExpertError, InvalidPackageError, UsageError
from expertctl.reference import Digest, FileDigest, PackageName, Version
from expertctl.schema.manifest import MANIFEST_PATH, SIGNATURE_PATH
from expertctl.schema.strict_json import JsonValue, encode_canonical, load_object

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
INDEX_TYPE = "application/vnd.oci.image.index.v1+json"
ARTIFACT_TYPE = "application/vnd.cncf.model.manifest.v1+json"
CONFIG_TYPE = "application/vnd.cncf.model.config.v1+json"
FILEPATH = "org.cncf.model.filepath"
WEIGHT_TYPE = "application/vnd.cncf.model.weight.v1.raw"
SETTINGS_TYPE = "application/vnd.cncf.model.weight.config.v1.raw"
DOC_TYPE = "application/vnd.cncf.model.doc.v1.raw"

CONFIG = encode_canonical(
    {"config": {}, "descriptor": {}, "modelfs": {"diffIds": [], "type": "layers"}}
)
"""The configuration shared by all packages."""

_CONFIG_DIGEST = Digest.compute(CONFIG)
OCI_LAYOUT = encode_canonical({"imageLayoutVersion": "1.0.0"})
MAX_FILES = 64
MAX_FILE_BYTES = 8**11 - 1
"""The largest number in the eleven octal digits of a USTAR header."""
MAX_TOTAL_BYTES = 16 << 30
MAX_MANIFEST_BYTES = 64 << 10

_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
_DOCUMENT_NAME = re.compile(r"README\.md|(LICENSE|NOTICE)[A-Za-z0-9_.-]*")
_RESERVED_NAMES = {
    "con",
    "prn",
    "aux",
    "nul",
    *(f"{d}{n}" for d in ("com", "lpt") for n in range(10)),
}
_SET_HINT = "a set of experts is installed with `expertctl import FILE`"

Blobs = Callable[[Digest], AbstractContextManager[BinaryIO]]
"""Opens the bytes of a layer, wherever they are stored."""


@dataclass(frozen=True, slots=True)
class Descriptor:
    """A blob: its media type, size in bytes and digest."""

    media_type: str
    size: int
    digest: Digest

    def to_json(self) -> dict[str, JsonValue]:
        """Return the OCI descriptor."""
        return {"digest": str(self.digest), "mediaType": self.media_type, "size": self.size}


@dataclass(frozen=True, slots=True)
class PackageLayout:
    """A package except the bytes of its files."""

    files: tuple[FileDigest, ...]
    """All files except the signature, sorted by path."""
    signature: FileDigest | None
    manifest: bytes
    index: bytes

    @property
    def layers(self) -> tuple[FileDigest, ...]:
        """All files in the order of the manifest: the signature last."""
        return (*self.files, *([self.signature] if self.signature else []))

    @property
    def package_digest(self) -> Digest:
        """The digest of the OCI manifest."""
        return Digest.compute(self.manifest)

    @property
    def manifests(self) -> tuple[bytes, ...]:
        """The OCI manifests in the archive: only this one."""
        return (self.manifest,)

    @property
    def blobs(self) -> tuple[tuple[Digest, int], ...]:
        """Digest and size of the blob of every layer, without duplicates, weights last."""
        return list_blobs(self.layers)


def build_layout(files: Iterable[FileDigest], signature: FileDigest | None) -> PackageLayout:
    """Return the layout of a set of files.

    Raises:
        InvalidPackageError: when the names, sizes or number of files are not acceptable.
    """
    ordered = tuple(sorted(files, key=lambda file: file.path))
    problems = find_file_problems([*ordered, *([signature] if signature else [])])
    if problems:
        raise InvalidPackageError("package", problems)
    manifest = _build_manifest(ordered, signature)
    index = build_index(Digest.compute(manifest), len(manifest))
    return PackageLayout(ordered, signature, manifest, index)


def list_blobs(layers: Iterable[FileDigest]) -> tuple[tuple[Digest, int], ...]:
    """Return digest and size of the blobs of layers, without duplicates, weights last."""
    ordered = sorted(layers, key=lambda file: choose_media_type(file.path) == WEIGHT_TYPE)
    return tuple({file.digest: (file.digest, file.size) for file in ordered}.values())


def compute_content_digest(files: Iterable[FileDigest]) -> Digest:
    """Return the digest of all files except the signature, which identifies the content."""
    rows = [[f.path, f.size, f.digest.hex] for f in sorted(files, key=lambda f: f.path)]
    return Digest.compute(encode_canonical(rows))


def choose_media_type(path: str) -> str:
    """Return the ModelPack media type of a file, which follows from its name."""
    if path.endswith(".safetensors"):
        return WEIGHT_TYPE
    return DOC_TYPE if _DOCUMENT_NAME.fullmatch(path) or path == SIGNATURE_PATH else SETTINGS_TYPE


def is_document(path: str) -> bool:
    """Tell whether a file is a model card or a licence, which any package may contain."""
    return _DOCUMENT_NAME.fullmatch(path) is not None


def describe_name_problem(path: str) -> str | None:
    """Return why a file name is refused: it must be plain and safe on every system."""
    if not _FILE_NAME.fullmatch(path):
        return f"{path[:120]!r} is not a plain file name"
    if path.endswith(".") or path.split(".")[0].lower() in _RESERVED_NAMES:
        return f"{path!r} is not a file name on every system"
    return None


def find_file_problems(files: Sequence[FileDigest]) -> list[str]:
    """Return the problems of a set of files, from names, sizes and digests."""
    problems = [problem for file in files if (problem := describe_name_problem(file.path))]
    folded = [file.path.casefold() for file in files]
    problems += sorted({f"{f!r} is there twice" for f in folded if folded.count(f) > 1})
    problems += [f"{f.path}: {f.size} bytes" for f in files if not 0 <= f.size <= MAX_FILE_BYTES]
    if len(files) > MAX_FILES:
        problems.append(f"{len(files)} files, at most {MAX_FILES} allowed")
    if sum(file.size for file in files) > MAX_TOTAL_BYTES:
        problems.append(f"more than {MAX_TOTAL_BYTES} bytes in all")
    problems += find_conflicting_sizes(files)
    problems += [f"{f.path}: this content is reserved" for f in files if f.digest == _CONFIG_DIGEST]
    if MANIFEST_PATH not in {file.path for file in files}:
        problems.append(f"{MANIFEST_PATH} is missing")
    return problems


def find_conflicting_sizes(files: Iterable[FileDigest]) -> list[str]:
    """Return the digests that are given with two sizes, of which at most one is true."""
    sizes: dict[Digest, set[int]] = {}
    for file in files:
        sizes.setdefault(file.digest, set()).add(file.size)
    return [f"{digest} has two sizes" for digest, found in sizes.items() if len(found) > 1]


def build_index(digest: Digest, size: int) -> bytes:
    """Return the ``index.json`` of a manifest."""
    entry = {**Descriptor(MANIFEST_TYPE, size, digest).to_json(), "artifactType": ARTIFACT_TYPE}
    return encode_canonical({"manifests": [entry], "mediaType": INDEX_TYPE, "schemaVersion": 2})


def parse_oci_index(data: bytes, *, what: str) -> Descriptor:
    """Parse ``index.json``: exactly what `build_index` writes.

    Raises:
        InvalidPackageError: for anything else.
    """
    document = load_object(data, what=f"{what} index.json", max_bytes=MAX_MANIFEST_BYTES)
    manifests = document.get("manifests")
    if not isinstance(manifests, list) or len(manifests) != 1:
        raise InvalidPackageError(
            what, ["index.json does not name exactly one manifest"], hint=_SET_HINT
        )
    descriptor, _ = parse_descriptor(manifests[0], what)
    if build_index(descriptor.digest, descriptor.size) != data:
        raise InvalidPackageError(
            what, ["index.json is not the one that a package has"], hint=_SET_HINT
        )
    return descriptor


def parse_oci_manifest(data: bytes, *, what: str) -> PackageLayout:
    """Parse an OCI manifest: exactly what `build_layout` writes for the files it names.

    Raises:
        InvalidPackageError: for anything else.
    """
    document = load_object(data, what=f"{what} manifest", max_bytes=MAX_MANIFEST_BYTES)
    layers = document.get("layers")
    if not isinstance(layers, list) or not 0 < len(layers) <= MAX_FILES:
        raise InvalidPackageError(what, [f"the manifest does not name 1 to {MAX_FILES} layers"])
    files = [_parse_layer(layer, what) for layer in layers]
    signed = files[-1].path == SIGNATURE_PATH
    problems = find_file_problems(files)
    if problems:
        raise InvalidPackageError(what, problems)
    layout = build_layout(files[:-1] if signed else files, files[-1] if signed else None)
    if layout.manifest != data:
        raise InvalidPackageError(what, ["the manifest is not the one that its files have"])
    return layout


def _build_manifest(files: Sequence[FileDigest], signature: FileDigest | None) -> bytes:
    layers = [*files, *([signature] if signature else [])]
    config = Descriptor(CONFIG_TYPE, len(CONFIG), _CONFIG_DIGEST)
    return encode_canonical(
        {
            "artifactType": ARTIFACT_TYPE,
            "config": config.to_json(),
            "layers": [_build_layer(file) for file in layers],
            "mediaType": MANIFEST_TYPE,
            "schemaVersion": 2,
        }
    )


def _build_layer(file: FileDigest) -> dict[str, JsonValue]:
    descriptor = Descriptor(choose_media_type(file.path), file.size, file.digest)
    return {**descriptor.to_json(), "annotations": {FILEPATH: file.path}}


def _parse_layer(layer: JsonValue, what: str) -> FileDigest:
    descriptor, fields = parse_descriptor(layer, what)
    annotations = fields.get("annotations")
    path = annotations.get(FILEPATH) if isinstance(annotations, dict) else None
    if not isinstance(path, str):
        raise InvalidPackageError(what, [f"a layer has no annotation {FILEPATH}"])
    return FileDigest(path, descriptor.size, descriptor.digest)


def parse_descriptor(value: JsonValue, what: str) -> tuple[Descriptor, dict[str, JsonValue]]:
    """Parse an OCI descriptor; return it with the whole object.

    Raises:
        InvalidPackageError: when it is not one.
    """
    if not isinstance(value, dict):
        raise InvalidPackageError(what, ["a descriptor is not an object"])
    kind, digest, size = value.get("mediaType"), value.get("digest"), value.get("size")
    if not (isinstance(kind, str) and isinstance(digest, str) and type(size) is int):
        raise InvalidPackageError(what, ["a descriptor lacks mediaType, digest or size"])
    try:
        return Descriptor(kind, size, Digest.parse(digest)), value
    except ExpertError as error:
        raise InvalidPackageError(what, [f"a descriptor's digest: {error.message}"]) from error


REF_NAME = "org.opencontainers.image.ref.name"
MAX_PACKAGES = 256
MAX_SET_BYTES = 64 << 30
MAX_INDEX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class SetLayout:
    """A set of packages except the bytes of their files."""

    packages: Mapping[str, PackageLayout]
    """Layouts by their name in the index, sorted."""
    index: bytes

    @property
    def manifests(self) -> tuple[bytes, ...]:
        """The OCI manifests in the order of the index."""
        return tuple(layout.manifest for layout in self.packages.values())

    @property
    def layers(self) -> tuple[FileDigest, ...]:
        """Every file of every package."""
        return tuple(file for layout in self.packages.values() for file in layout.layers)

    @property
    def blobs(self) -> tuple[tuple[Digest, int], ...]:
        """Digest and size of the blob of every layer, without duplicates, weights last."""
        return list_blobs(self.layers)


def build_set_layout(packages: Mapping[str, PackageLayout]) -> SetLayout:
    """Return the layout of packages, given by their names in the index.

    Raises:
        InvalidPackageError: when they cannot be in one set.
    """
    ordered = dict(sorted(packages.items()))
    problems = _find_set_problems(ordered)
    if problems:
        raise InvalidPackageError("set", problems)
    named = {
        name: Descriptor(MANIFEST_TYPE, len(layout.manifest), layout.package_digest)
        for name, layout in ordered.items()
    }
    return SetLayout(ordered, _build_set_index(named))


def build_index_name(package: PackageName, version: Version) -> str:
    """Return the name of a package in the index of a set, in the form of OCI image names."""
    return f"{package}:{version}"


def parse_set_index(data: bytes, *, what: str) -> dict[str, Descriptor]:
    """Parse the ``index.json`` of a set: exactly what `build_set_layout` writes.

    Raises:
        InvalidPackageError: for anything else.
    """
    document = load_object(data, what=f"{what} index.json", max_bytes=MAX_INDEX_BYTES)
    entries = document.get("manifests")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_PACKAGES:
        raise InvalidPackageError(what, [f"index.json does not name 1 to {MAX_PACKAGES} packages"])
    named: dict[str, Descriptor] = {}
    for entry in entries:
        name, descriptor = _parse_entry(entry, what)
        if name in named:
            raise InvalidPackageError(what, [f"{name} is there twice"])
        named[name] = descriptor
    if _build_set_index(named) != data:
        raise InvalidPackageError(what, ["index.json is not the one that a set has"])
    return named


def _parse_entry(entry: JsonValue, what: str) -> tuple[str, Descriptor]:
    descriptor, fields = parse_descriptor(entry, what)
    annotations = fields.get("annotations")
    name = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    if not isinstance(name, str) or not _is_index_name(name):
        raise InvalidPackageError(
            what,
            [f"a package in index.json is not called namespace/name:version in {REF_NAME}"],
            hint="a set is what `expertctl export` makes of several experts; one .expert file is "
            "installed with `expertctl install FILE`",
        )
    return name, replace(descriptor, media_type=MANIFEST_TYPE)


def _is_index_name(text: str) -> bool:
    package, _, version = text.partition(":")
    try:
        return build_index_name(PackageName.parse(package), Version.parse(version)) == text
    except UsageError:
        return False


def _build_set_index(descriptors: Mapping[str, Descriptor]) -> bytes:
    entries = [
        {**descriptor.to_json(), "annotations": {REF_NAME: name}, "artifactType": ARTIFACT_TYPE}
        for name, descriptor in sorted(descriptors.items())
    ]
    return encode_canonical({"manifests": entries, "mediaType": INDEX_TYPE, "schemaVersion": 2})


def _find_set_problems(packages: Mapping[str, PackageLayout]) -> list[str]:
    layers = [file for layout in packages.values() for file in layout.layers]
    manifests = [layout.package_digest for layout in packages.values()]
    problems = find_conflicting_sizes(layers)
    if not 0 < len(packages) <= MAX_PACKAGES:
        problems.append(f"{len(packages)} packages, 1 to {MAX_PACKAGES} allowed")
    if sum(size for _, size in list_blobs(layers)) > MAX_SET_BYTES:
        problems.append(f"more than {MAX_SET_BYTES} bytes in all")
    if len(set(manifests)) < len(manifests):
        problems.append("two packages have one manifest")
    return problems + _find_posing_files(layers, manifests)


def _find_posing_files(layers: Sequence[FileDigest], manifests: Sequence[Digest]) -> list[str]:
    """Report files that equal a manifest of the set, as one blob would have two places."""
    return sorted(
        {f"{f.path}: it is a manifest of the set" for f in layers if f.digest in manifests}
    )
