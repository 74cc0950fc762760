"""What changed between two packages: what they say, their files, their tensors.

Signatures are left out: they say who signed, not what. Two packages are equal when their content
digests are. Every byte was hashed when they were opened; a piece of one pair of tensors is read at
a time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from expertctl.digest import FileDigest, Progress, no_progress
from expertctl.package.layout import Blobs
from expertctl.package.read import PackageContents
from expertctl.package.tensor_diff import (
    TensorChange,
    TensorSource,
    all_added,
    all_equal,
    all_removed,
    tensor_changes,
)
from expertctl.package.tensor_file import TensorTable, read_header
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES, AdapterEntry
from expertctl.schema.strict_json import JsonValue, canonical, load_object

Change = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two packages, and where its bytes are."""

    contents: PackageContents
    blobs: Blobs

    def file(self, path: str) -> FileDigest:
        """Return one of its files."""
        return next(file for file in self.contents.files if file.path == path)

    def table(self, path: str) -> TensorTable:
        """Read the table of tensors of a file."""
        file = self.file(path)
        with self.blobs(file.digest) as stream:
            return read_header(stream, file_size=file.size, what=path)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One value in ``expert.json``; ``path`` is its keys with slashes between them."""

    path: str
    change: Change
    old: JsonValue = None
    new: JsonValue = None


@dataclass(frozen=True, slots=True)
class FileChange:
    """One file that is not the same; sizes are None where it is not there."""

    path: str
    change: Change
    old_size: int | None
    new_size: int | None


@dataclass(frozen=True, slots=True)
class AdapterDiff:
    """Two adapters compared, or one without a counterpart in the other package."""

    old: AdapterEntry | None
    new: AdapterEntry | None
    tensors: tuple[TensorChange, ...]


@dataclass(frozen=True, slots=True)
class PackageDiff:
    """All that changed."""

    equal: bool
    fields: tuple[FieldChange, ...]
    files: tuple[FileChange, ...]
    adapters: tuple[AdapterDiff, ...]


def diff_packages(old: Side, new: Side, *, progress: Progress = no_progress) -> PackageDiff:
    """Compare two packages that were read."""
    pairs = _pairs(old.contents.manifest.adapters, new.contents.manifest.adapters)
    return PackageDiff(
        old.contents.content_digest == new.contents.content_digest,
        tuple(_fields(_document(old.contents), _document(new.contents), ())),
        tuple(_files(old.contents.files, new.contents.files)),
        tuple(_adapter(old, new, before, after, progress) for before, after in pairs),
    )


def _document(contents: PackageContents) -> JsonValue:
    """Return the manifest as it was written, free-form parts included."""
    data = contents.small[MANIFEST_PATH]
    return load_object(data, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)


def _fields(old: JsonValue, new: JsonValue, at: tuple[str, ...]) -> Iterator[FieldChange]:
    if canonical(old) == canonical(new):
        return
    before, after = _children(old), _children(new)
    if before is None or after is None or not _are_alike(old, new):
        yield FieldChange("/".join(at), "changed", old, new)
        return
    for key in sorted({*before, *after}):
        path = (*at, key)
        if key not in before:
            yield FieldChange("/".join(path), "added", new=after[key])
        elif key not in after:
            yield FieldChange("/".join(path), "removed", old=before[key])
        else:
            yield from _fields(before[key], after[key], path)


def _are_alike(old: JsonValue, new: JsonValue) -> bool:
    """Tell whether two objects, or two lists of one length, may be compared child by child."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new)
    return isinstance(old, dict) and isinstance(new, dict)


def _children(value: JsonValue) -> Mapping[str, JsonValue] | None:
    """Return the children of objects and of lists of objects; other lists are one value."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _files(old: Sequence[FileDigest], new: Sequence[FileDigest]) -> Iterator[FileChange]:
    before, after = {f.path: f for f in old}, {f.path: f for f in new}
    for path in sorted({*before, *after}):
        if path not in before:
            yield FileChange(path, "added", None, after[path].size)
        elif path not in after:
            yield FileChange(path, "removed", before[path].size, None)
        elif before[path] != after[path]:
            yield FileChange(path, "changed", before[path].size, after[path].size)


_Pair = tuple[AdapterEntry | None, AdapterEntry | None]


def _pairs(old: Sequence[AdapterEntry], new: Sequence[AdapterEntry]) -> list[_Pair]:
    """Pair adapters by the names of their files; where each package has only one, pair those."""
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    before, after = {entry.path: entry for entry in old}, {entry.path: entry for entry in new}
    return [(before.get(path), after.get(path)) for path in dict.fromkeys([*before, *after])]


def _adapter(
    old: Side,
    new: Side,
    before: AdapterEntry | None,
    after: AdapterEntry | None,
    progress: Progress,
) -> AdapterDiff:
    return AdapterDiff(before, after, tuple(_tensors(old, new, before, after, progress)))


def _tensors(
    old: Side,
    new: Side,
    before: AdapterEntry | None,
    after: AdapterEntry | None,
    progress: Progress,
) -> list[TensorChange]:
    if before is None:
        return all_added(new.table(after.path)) if after else []
    if after is None:
        return all_removed(old.table(before.path))
    digests = old.file(before.path).digest, new.file(after.path).digest
    if digests[0] == digests[1]:
        return all_equal(old.table(before.path))
    tables = old.table(before.path), new.table(after.path)
    with old.blobs(digests[0]) as first, new.blobs(digests[1]) as second:
        return tensor_changes(
            TensorSource(tables[0], first), TensorSource(tables[1], second), progress=progress
        )
