"""What changed between two tensor files, tensor by tensor, a piece of one pair in memory at a time.

Tensors are equal when type, shape and bytes are. Numbers are widened to float64, so differences of
16-bit tensors are exact; where one is NaN or infinite there is no difference to tell.
"""

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal

import numpy as np

from expertctl.digest import Progress, no_progress
from expertctl.package.tensor_file import DTYPE_BYTES, TensorTable

Change = Literal["equal", "changed", "added", "removed"]
Numbers = np.ndarray[Any, np.dtype[np.float64]]

_PIECE = 1 << 16
"""Numbers that are compared at once."""
_WIDTHS = {"F32": "<f4", "F16": "<f2"}
_TENSOR = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)"
    r"\.(?:lora_[AB]\.weight|lora_magnitude_vector(?:\.weight)?|ia3_l)"
)


@dataclass(frozen=True, slots=True)
class TensorForm:
    """The type and shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two tensors are from each other."""

    max_abs: float
    squares: float
    """The sum of the squared differences."""
    old_squares: float
    """The sum of the squares of the first."""

    @property
    def relative(self) -> float | None:
        """The norm of the difference over that of the first; None when only the first is zero."""
        if not self.squares:
            return 0.0
        return math.sqrt(self.squares / self.old_squares) if self.old_squares else None

    def __add__(self, other: "Distance") -> "Distance":
        """Combine two pairs as if they were one."""
        return Distance(
            max(self.max_abs, other.max_abs),
            self.squares + other.squares,
            self.old_squares + other.old_squares,
        )


NO_DISTANCE = Distance(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class TensorChange:
    """One tensor by name, in the first file, the second, or both."""

    name: str
    change: Change
    old: TensorForm | None
    new: TensorForm | None
    distance: Distance | None = None
    """Only where both have the same shape and finite numbers."""


@dataclass(frozen=True, slots=True)
class TensorSource:
    """An open tensor file and its table."""

    table: TensorTable
    stream: BinaryIO

    def form(self, name: str) -> TensorForm:
        """Return type and shape of a tensor."""
        tensor = self.table.tensors[name]
        return TensorForm(tensor.dtype, tensor.shape)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the bytes of a tensor, `_PIECE` numbers at a time."""
        tensor = self.table.tensors[name]
        step = _PIECE * DTYPE_BYTES[tensor.dtype]
        for begin in range(tensor.begin, tensor.end, step):
            self.stream.seek(self.table.data_offset + begin)
            yield self.stream.read(min(step, tensor.end - begin))


def tensor_changes(
    old: TensorSource, new: TensorSource, *, progress: Progress = no_progress
) -> list[TensorChange]:
    """Compare every tensor of two files, sorted by name."""
    names = sorted({*old.table.tensors, *new.table.tensors})
    return [_change(name, old, new, progress) for name in names]


def all_equal(table: TensorTable) -> list[TensorChange]:
    """Return what `tensor_changes` does for a file and itself, without reading it."""
    return [TensorChange(name, "equal", form, form, NO_DISTANCE) for name, form in _forms(table)]


def all_added(table: TensorTable) -> list[TensorChange]:
    """Return the tensors of a file that only the second package has."""
    return [TensorChange(name, "added", None, form) for name, form in _forms(table)]


def all_removed(table: TensorTable) -> list[TensorChange]:
    """Return the tensors of a file that only the first package has."""
    return [TensorChange(name, "removed", form, None) for name, form in _forms(table)]


def _forms(table: TensorTable) -> list[tuple[str, TensorForm]]:
    return [(n, TensorForm(t.dtype, t.shape)) for n, t in sorted(table.tensors.items())]


def _change(name: str, old: TensorSource, new: TensorSource, progress: Progress) -> TensorChange:
    if name not in old.table.tensors:
        return TensorChange(name, "added", None, new.form(name))
    if name not in new.table.tensors:
        return TensorChange(name, "removed", old.form(name), None)
    before, after = old.form(name), new.form(name)
    if before.shape != after.shape:
        return TensorChange(name, "changed", before, after)
    same, distance = _compare(name, old, new, progress)
    equal = same and before == after
    return TensorChange(name, "equal" if equal else "changed", before, after, distance)


def _compare(
    name: str, old: TensorSource, new: TensorSource, progress: Progress
) -> tuple[bool, Distance | None]:
    kinds = old.form(name).dtype, new.form(name).dtype
    same, total = True, NO_DISTANCE
    for before, after in zip(old.pieces(name), new.pieces(name), strict=True):
        same = same and before == after
        total += _distance(_widened(before, kinds[0]), _widened(after, kinds[1]))
        progress(len(before) + len(after))
    known = math.isfinite(total.squares) and math.isfinite(total.old_squares)
    return same, total if known else None


def _distance(before: Numbers, after: Numbers) -> Distance:
    with np.errstate(invalid="ignore", over="ignore"):
        delta = after - before
        squares, old_squares = float(delta @ delta), float(before @ before)
        return Distance(float(np.abs(delta).max()), squares, old_squares)


def _widened(data: bytes, dtype: str) -> Numbers:
    if dtype == "BF16":
        bits = np.frombuffer(data, "<u2").astype("<u4") << 16
        return bits.view("<f4").astype(np.float64)
    return np.frombuffer(data, _WIDTHS[dtype]).astype(np.float64)


@dataclass(frozen=True, slots=True)
class KindSummary:
    """What happened to the tensors of one kind of module, such as every ``q_proj``."""

    kind: str
    counts: Mapping[Change, int]
    distance: Distance | None
    """The distance over all pairs together, where there are any."""


def summarise(changes: Iterable[TensorChange]) -> list[KindSummary]:
    """Sum up changes by kind of module, sorted by it."""
    kinds: dict[str, list[TensorChange]] = {}
    for change in changes:
        kinds.setdefault(module_kind(change.name), []).append(change)
    return [_summary(kind, kinds[kind]) for kind in sorted(kinds)]


def _summary(kind: str, changes: Sequence[TensorChange]) -> KindSummary:
    distances = [change.distance for change in changes if change.distance is not None]
    total = sum(distances, start=NO_DISTANCE) if distances else None
    return KindSummary(kind, Counter(change.change for change in changes), total)


def module_kind(name: str) -> str:
    """Return the last part of the module that a tensor changes, else the tensor's own name."""
    match = _TENSOR.fullmatch(name)
    return match["module"].rpartition(".")[2] if match else name
