"""Several packages in one OCI image layout: pure functions of the packages in it.

``index.json`` names every manifest as ``namespace/name:version``, sorted by that name; a blob that
several packages share is there once. Reading rebuilds the index, as it does each manifest, and
demands the same bytes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from expertctl.digest import Digest, FileDigest
from expertctl.errors import InvalidPackageError, UsageError
from expertctl.package.layout import (
    ARTIFACT_TYPE,
    INDEX_TYPE,
    MANIFEST_TYPE,
    Descriptor,
    Layout,
    blobs_of,
    read_descriptor,
    two_sizes,
)
from expertctl.reference import PackageName, Version
from expertctl.schema.strict_json import JsonValue, canonical, load_object

REF_NAME = "org.opencontainers.image.ref.name"
MAX_PACKAGES = 256
MAX_SET_BYTES = 64 << 30
MAX_INDEX_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class SetLayout:
    """Everything in a set but the files' bytes."""

    packages: Mapping[str, Layout]
    """By the name in the index, sorted."""
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
        """Digest and size of every layer's blob, once each, weights last."""
        return blobs_of(self.layers)


def set_layout_of(packages: Mapping[str, Layout]) -> SetLayout:
    """Return the layout of packages, given by their names in the index.

    Raises:
        InvalidPackageError: when they cannot be in one set.
    """
    ordered = dict(sorted(packages.items()))
    problems = _set_problems(ordered)
    if problems:
        raise InvalidPackageError("set", problems)
    named = {
        name: Descriptor(MANIFEST_TYPE, len(layout.manifest), layout.package_digest)
        for name, layout in ordered.items()
    }
    return SetLayout(ordered, _index_of(named))


def index_name(package: PackageName, version: Version) -> str:
    """Return what a package is called in the index of a set: how OCI tools name an image."""
    return f"{package}:{version}"


def read_set_index(data: bytes, *, what: str) -> dict[str, Descriptor]:
    """Read the ``index.json`` of a set: exactly what `set_layout_of` writes.

    Raises:
        InvalidPackageError: for anything else.
    """
    document = load_object(data, what=f"{what} index.json", max_bytes=MAX_INDEX_BYTES)
    entries = document.get("manifests")
    if not isinstance(entries, list) or not 0 < len(entries) <= MAX_PACKAGES:
        raise InvalidPackageError(what, [f"index.json does not name 1 to {MAX_PACKAGES} packages"])
    named: dict[str, Descriptor] = {}
    for entry in entries:
        name, descriptor = _entry(entry, what)
        if name in named:
            raise InvalidPackageError(what, [f"{name} is there twice"])
        named[name] = descriptor
    if _index_of(named) != data:
        raise InvalidPackageError(what, ["index.json is not the one that a set has"])
    return named


def _entry(entry: JsonValue, what: str) -> tuple[str, Descriptor]:
    descriptor, fields = read_descriptor(entry, what)
    annotations = fields.get("annotations")
    name = annotations.get(REF_NAME) if isinstance(annotations, dict) else None
    if not isinstance(name, str) or not _is_name(name):
        raise InvalidPackageError(
            what,
            [f"a package in index.json is not called namespace/name:version in {REF_NAME}"],
            hint="a set is what `expertctl export` makes of several experts; one .expert file is "
            "installed with `expertctl install FILE`",
        )
    return name, replace(descriptor, media_type=MANIFEST_TYPE)


def _is_name(text: str) -> bool:
    package, _, version = text.partition(":")
    try:
        return index_name(PackageName.parse(package), Version.parse(version)) == text
    except UsageError:
        return False


def _index_of(named: Mapping[str, Descriptor]) -> bytes:
    entries = [
        {**descriptor.document(), "annotations": {REF_NAME: name}, "artifactType": ARTIFACT_TYPE}
        for name, descriptor in sorted(named.items())
    ]
    return canonical({"manifests": entries, "mediaType": INDEX_TYPE, "schemaVersion": 2})


def _set_problems(packages: Mapping[str, Layout]) -> list[str]:
    layers = [file for layout in packages.values() for file in layout.layers]
    manifests = [layout.package_digest for layout in packages.values()]
    problems = two_sizes(layers)
    if not 0 < len(packages) <= MAX_PACKAGES:
        problems.append(f"{len(packages)} packages, 1 to {MAX_PACKAGES} allowed")
    if sum(size for _, size in blobs_of(layers)) > MAX_SET_BYTES:
        problems.append(f"more than {MAX_SET_BYTES} bytes in all")
    if len(set(manifests)) < len(manifests):
        problems.append("two packages have one manifest")
    return problems + _posing(layers, manifests)


def _posing(layers: Sequence[FileDigest], manifests: Sequence[Digest]) -> list[str]:
    """A file that is a manifest of the set too would be one blob with two places."""
    return sorted(
        {f"{f.path}: it is a manifest of the set" for f in layers if f.digest in manifests}
    )
