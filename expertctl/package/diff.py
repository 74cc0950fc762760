"""The difference of two packages: manifests, files and tensors.

Signatures are ignored: they say who signed, not what. Two packages are equal if their content
digests are. All bytes were hashed when the packages were opened.

Tensors are equal if dtype, shape and bytes are. Numbers are widened to float64, so differences of
16-bit tensors are exact; for NaN and infinity there is no distance. Only a chunk of one pair of
tensors is in memory at a time.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np

from expertctl.package.adapter_weights import widen_to_float32
from expertctl.package.layout import Blobs
from expertctl.package.read import PackageContents
from expertctl.package.tensor_file import DTYPE_BYTES, TensorTable, read_header
from expertctl.reference import FileDigest, Progress, ignore_progress
from expertctl.schema.manifest import MANIFEST_PATH, MAX_MANIFEST_BYTES, AdapterEntry
from expertctl.schema.strict_json import JsonValue, encode_canonical, load_object

TensorChangeKind = Literal["equal", "changed", "added", "removed"]
Float64Values = np.ndarray[Any, np.dtype[np.float64]]

_PIECE_NUMBERS = 1 << 16
"""How many numbers are compared at a time."""
_TENSOR_NAME = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)"
    r"\.(?:lora_[AB]\.weight|lora_magnitude_vector(?:\.weight)?|ia3_l)"
)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The dtype and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorDistance:
    """The distance of two tensors."""

    max_abs: float
    squares: float
    """The sum of squared differences."""
    old_squares: float
    """The sum of squares of the first tensor."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference over that of the first tensor; None if only that is zero."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.old_squares) if self.old_squares else None

    def __add__(self, other: "TensorDistance") -> "TensorDistance":
        """Combine two pairs as if they were one."""
        return TensorDistance(
            max(self.max_abs, other.max_abs),
            self.squares + other.squares,
            self.old_squares + other.old_squares,
        )


NO_DISTANCE = TensorDistance(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor by name, in the first file, the second, or both."""

    name: str
    change: TensorChangeKind
    old: TensorForm | None
    new: TensorForm | None
    distance: TensorDistance | None = None
    """Only if both have the same shape and finite numbers."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """An open tensor file and its header."""

    table: TensorTable
    stream: BinaryIO

    def find_form(self, name: str) -> TensorForm:
        """Return the dtype and shape of a tensor."""
        tensor = self.table.tensors[name]
        return TensorForm(tensor.dtype, tensor.shape)

    def iter_pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, `_PIECE_NUMBERS` numbers at a time."""
        tensor = self.table.tensors[name]
        step = _PIECE_NUMBERS * DTYPE_BYTES[tensor.dtype]
        for begin in range(tensor.begin, tensor.end, step):
            self.stream.seek(self.table.data_offset + begin)
            yield self.stream.read(min(step, tensor.end - begin))


def diff_tensors(
    old: TensorSource, new: TensorSource, *, progress: Progress = ignore_progress
) -> list[TensorChange]:
    """Compare every tensor of two files, sorted by name."""
    names = sorted({*old.table.tensors, *new.table.tensors})
    return [_diff_tensor(name, old, new, progress) for name in names]


def list_tensors(table: TensorTable, change: TensorChangeKind) -> list[TensorChange]:
    """Return all tensors of a file as ``equal``, ``added`` or ``removed``, without reading them."""
    forms = ((n, TensorForm(t.dtype, t.shape)) for n, t in sorted(table.tensors.items()))
    return [
        TensorChange(
            name,
            change,
            old=None if change == "added" else form,
            new=None if change == "removed" else form,
            distance=NO_DISTANCE if change == "equal" else None,
        )
        for name, form in forms
    ]


def _diff_tensor(
    name: str, old: TensorSource, new: TensorSource, progress: Progress
) -> TensorChange:
    if name not in old.table.tensors:
        return TensorChange(name, "added", None, new.find_form(name))
    if name not in new.table.tensors:
        return TensorChange(name, "removed", old.find_form(name), None)
    before, after = old.find_form(name), new.find_form(name)
    if before.shape != after.shape:
        return TensorChange(name, "changed", before, after)
    same, distance = _compare_values(name, old, new, progress)
    equal = same and before == after
    return TensorChange(name, "equal" if equal else "changed", before, after, distance)


def _compare_values(
    name: str, old: TensorSource, new: TensorSource, progress: Progress
) -> tuple[bool, TensorDistance | None]:
    kinds = old.find_form(name).dtype, new.find_form(name).dtype
    same, total = True, NO_DISTANCE
    for before, after in zip(old.iter_pieces(name), new.iter_pieces(name), strict=True):
        same = same and before == after
        with np.errstate(invalid="ignore"):  # signalling NaNs
            values = [
                widen_to_float32(piece, kind).astype(np.float64)
                for piece, kind in zip((before, after), kinds, strict=True)
            ]
        total += _measure_distance(*values)
        progress(len(before) + len(after))
    known = math.isfinite(total.squares) and math.isfinite(total.old_squares)
    return same, total if known else None


def _measure_distance(old_values: Float64Values, new_values: Float64Values) -> TensorDistance:
    with np.errstate(invalid="ignore", over="ignore"):
        delta = new_values - old_values
        squares, old_squares = float(delta @ delta), float(old_values @ old_values)
        return TensorDistance(float(np.abs(delta).max()), squares, old_squares)


@dataclass(frozen=True, slots=True)
class KindSummary:
    """The changes of all tensors of one kind of module, such as every ``q_proj``."""

    kind: str
    counts: Mapping[TensorChangeKind, int]
    distance: TensorDistance | None
    """The distance over all pairs together, if there are any."""


def summarise_changes(changes: Iterable[TensorChange]) -> list[KindSummary]:
    """Summarise changes by kind of module, sorted by kind."""
    kinds: dict[str, list[TensorChange]] = {}
    for change in changes:
        kinds.setdefault(find_module_kind(change.name), []).append(change)
    return [_summarise_kind(kind, kinds[kind]) for kind in sorted(kinds)]


def _summarise_kind(kind: str, changes: Sequence[TensorChange]) -> KindSummary:
    distances = [change.distance for change in changes if change.distance is not None]
    total = sum(distances, start=NO_DISTANCE) if distances else None
    return KindSummary(kind, Counter(change.change for change in changes), total)


def find_module_kind(name: str) -> str:
    """Return the last part of the module that a tensor changes, else the tensor's name."""
    match = _TENSOR_NAME.fullmatch(name)
    return match["module"].rpartition(".")[2] if match else name


ChangeKind = Literal["added", "removed", "changed"]


@dataclass(frozen=True, slots=True)
class DiffSide:
    """One of the two packages, and the source of its bytes."""

    contents: PackageContents
    blobs: Blobs

    def find_file(self, path: str) -> FileDigest:
        """Return the file at a path."""
        return next(file for file in self.contents.files if file.path == path)

    def read_tensor_table(self, path: str) -> TensorTable:
        """Read the header of a tensor file."""
        file = self.find_file(path)
        with self.blobs(file.digest) as stream:
            return read_header(stream, file_size=file.size, what=path)


@dataclass(frozen=True, slots=True)
class FieldChange:
    """One changed value in ``expert.json``; ``path`` is its keys joined by slashes."""

    path: str
    change: ChangeKind
    old: JsonValue = None
    new: JsonValue = None


@dataclass(frozen=True, slots=True)
class FileChange:
    """One changed file; a size is None if the file is missing on that side."""

    path: str
    change: ChangeKind
    old_size: int | None
    new_size: int | None


@dataclass(frozen=True, slots=True)
class AdapterDiff:
    """Two compared adapters, or one without a counterpart in the other package."""

    old: AdapterEntry | None
    new: AdapterEntry | None
    tensors: tuple[TensorChange, ...]


@dataclass(frozen=True, slots=True)
class PackageDiff:
    """All changes between two packages."""

    equal: bool
    fields: tuple[FieldChange, ...]
    files: tuple[FileChange, ...]
    adapters: tuple[AdapterDiff, ...]


def diff_packages(
    old: DiffSide, new: DiffSide, *, progress: Progress = ignore_progress
) -> PackageDiff:
    """Compare two packages."""
    pairs = _pair_adapters(old.contents.manifest.adapters, new.contents.manifest.adapters)
    return PackageDiff(
        old.contents.content_digest == new.contents.content_digest,
        tuple(_diff_fields(_load_manifest(old.contents), _load_manifest(new.contents), ())),
        tuple(_diff_files(old.contents.files, new.contents.files)),
        tuple(
            AdapterDiff(a, b, tuple(_diff_adapter_tensors(old, new, a, b, progress)))
            for a, b in pairs
        ),
    )


def _load_manifest(contents: PackageContents) -> JsonValue:
    """Return the manifest as written, free-form parts included."""
    data = contents.small[MANIFEST_PATH]
    return load_object(data, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)


def _diff_fields(old: JsonValue, new: JsonValue, at: tuple[str, ...]) -> Iterator[FieldChange]:
    if encode_canonical(old) == encode_canonical(new):
        return
    before, after = _list_children(old), _list_children(new)
    if before is None or after is None or not _are_comparable(old, new):
        yield FieldChange("/".join(at), "changed", old, new)
        return
    for key in sorted({*before, *after}):
        path = (*at, key)
        if key not in before:
            yield FieldChange("/".join(path), "added", new=after[key])
        elif key not in after:
            yield FieldChange("/".join(path), "removed", old=before[key])
        else:
            yield from _diff_fields(before[key], after[key], path)


def _are_comparable(old: JsonValue, new: JsonValue) -> bool:
    """Tell whether two values, objects or lists of one length, can be compared child by child."""
    if isinstance(old, list) and isinstance(new, list):
        return len(old) == len(new)
    return isinstance(old, dict) and isinstance(new, dict)


def _list_children(value: JsonValue) -> Mapping[str, JsonValue] | None:
    """Return the children of an object or a list of objects; None for any other value."""
    if isinstance(value, dict):
        return value
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return {str(number): item for number, item in enumerate(value)}
    return None


def _diff_files(old: Sequence[FileDigest], new: Sequence[FileDigest]) -> Iterator[FileChange]:
    before, after = {f.path: f for f in old}, {f.path: f for f in new}
    for path in sorted({*before, *after}):
        if path not in before:
            yield FileChange(path, "added", None, after[path].size)
        elif path not in after:
            yield FileChange(path, "removed", before[path].size, None)
        elif before[path] != after[path]:
            yield FileChange(path, "changed", before[path].size, after[path].size)


_AdapterPair = tuple[AdapterEntry | None, AdapterEntry | None]


def _pair_adapters(old: Sequence[AdapterEntry], new: Sequence[AdapterEntry]) -> list[_AdapterPair]:
    """Pair adapters by file name; if each package has only one, pair those."""
    if len(old) == len(new) == 1:
        return [(old[0], new[0])]
    before, after = {entry.path: entry for entry in old}, {entry.path: entry for entry in new}
    return [(before.get(path), after.get(path)) for path in dict.fromkeys([*before, *after])]


def _diff_adapter_tensors(
    old: DiffSide,
    new: DiffSide,
    old_entry: AdapterEntry | None,
    new_entry: AdapterEntry | None,
    progress: Progress,
) -> list[TensorChange]:
    if old_entry is None:
        return list_tensors(new.read_tensor_table(new_entry.path), "added") if new_entry else []
    if new_entry is None:
        return list_tensors(old.read_tensor_table(old_entry.path), "removed")
    digests = old.find_file(old_entry.path).digest, new.find_file(new_entry.path).digest
    if digests[0] == digests[1]:
        return list_tensors(old.read_tensor_table(old_entry.path), "equal")
    tables = old.read_tensor_table(old_entry.path), new.read_tensor_table(new_entry.path)
    with old.blobs(digests[0]) as first, new.blobs(digests[1]) as second:
        return diff_tensors(
            TensorSource(tables[0], first), TensorSource(tables[1], second), progress=progress
        )
