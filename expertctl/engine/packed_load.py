"""A base from its files into packed matrices: some rows at a time, in threads.

What was read is packed into its place and let go of, so the base is in memory once. Files are read,
not mapped: mapped pages would count as memory of this process. What a copy is made of is hashed in
the same memory from which it is packed.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from expertctl.digest import Progress, no_progress
from expertctl.engine.base_weights import other_head, rounding_warnings, unreadable
from expertctl.engine.kernels.packed import PackedMatrix, portion_rows, widened
from expertctl.engine.kernels.scheme import GROUP, Scheme
from expertctl.engine.memory import allocate
from expertctl.engine.packed_base import PackedBase, empty_base, fill, packed_bytes
from expertctl.engine.packed_layer import Place
from expertctl.engine.threads import usable_cores
from expertctl.package.base_model import weights_digest
from expertctl.package.base_tensors import StoredTensor, base_tensors
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig
from expertctl.store.quantised_copies import QuantisedCopies

Numbers = np.ndarray[Any, Any]
_DTYPES: dict[str, "np.dtype[Any]"] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_AT_ONCE = 1 << 22
"""Numbers that a thread packs before it says so and takes the next."""
_MOST_THREADS = 4
"""More would wait for the memory."""
_NUMBER_BYTES, _THREAD_BYTES = 16, 4 << 20
"""Of each number of a portion: stored, widened, filled up, as steps; and what a thread costs."""


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Some rows of a stored tensor, and their place."""

    tensor: StoredTensor
    first: int
    rows: int
    place: Place
    hasher: "hashlib._Hash | None"
    """What is given its bytes; then stretches of a tensor are packed one after another."""


def load_packed_base(
    directory: Path,
    config: ModelConfig,
    scheme: Scheme,
    *,
    experts: bool = True,
    copies: QuantisedCopies | None = None,
    progress: Progress = no_progress,
) -> PackedBase:
    """Read a base, or its quantised copy; ``progress`` counts the bytes of the packed base.

    Without ``experts`` those that are routed are left to somebody else.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float, a tied head that is another matrix, or
            sizes that fill no blocks.
        BaseMismatchError: when what a copy would be made of is not what was added.
    """
    stored = base_tensors(directory, config)
    memory = allocate(packed_bytes(config, scheme, experts=experts))
    base = empty_base(config, scheme, memory, experts=experts)
    wanted = [stored[name] for name in base.places()]
    if config.tied and HEAD in stored:
        _check_tied_head(directory, stored)
    kept = copies if scheme.layout.is_grouped else None
    told = _Told(progress)
    read = len(memory)
    if kept is None or not kept.read(scheme.value, memory, progress=told.count):
        digests = _pack(base, stored, told.again().count, hashed=kept is not None)
        read = sum(tensor.size for tensor in wanted)
        if kept is not None:
            kept.write(scheme.value, memory, weights=weights_digest(stored, digests))
    return replace(base, warnings=_warnings(wanted, scheme), read_bytes=read)


def pack_tensor(tensor: StoredTensor, place: Place) -> None:
    """Read a tensor from its file and pack it into its place, some rows at a time.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    _pack_stretch(_Stretch(tensor, 0, tensor.info.shape[0], place, None))


def packing_scratch(config: ModelConfig) -> int:
    """Return what `load_packed_base` takes besides the base, at most."""
    widths = {shape[1] for shape in config.linear_shapes().values()}
    numbers = max(portion_rows(width) * width for width in widths)
    return _threads() * (numbers * _NUMBER_BYTES + _THREAD_BYTES)


class _Told:
    """Counts bytes for a reader who must not hear of any of them twice."""

    def __init__(self, progress: Progress, already: int = 0) -> None:
        self._progress, self._already, self._counted = progress, already, 0

    def count(self, size: int) -> None:
        before, self._counted = max(self._counted, self._already), self._counted + size
        if self._counted > before:
            self._progress(self._counted - before)

    def again(self) -> "_Told":
        """Begin again."""
        return _Told(self._progress, max(self._counted, self._already))


def _threads() -> int:
    return min(usable_cores(), _MOST_THREADS)


def _warnings(stored: Sequence[StoredTensor], scheme: Scheme) -> tuple[str, ...]:
    if scheme.layout.is_grouped:
        return (f"base weights are held as {scheme.value}, in groups of {GROUP}",)
    return rounding_warnings(stored, scheme.value)


def _check_tied_head(directory: Path, stored: Mapping[str, StoredTensor]) -> None:
    """Some files hold a tied head as well; it must be the same matrix."""
    pairs = zip(_portions(stored[EMBEDDING]), _portions(stored[HEAD]), strict=True)
    if not all(np.array_equal(widened(ours), widened(other)) for ours, other in pairs):
        raise other_head(directory)


def _pack(
    base: PackedBase, stored: Mapping[str, StoredTensor], progress: Progress, *, hashed: bool
) -> dict[str, str]:
    """Pack every tensor; return the sha256 of their bytes as they were packed, if asked for."""
    places = base.places()
    if not hashed:
        parts = (part for n, p in places.items() for part in _parted(stored[n], p, None))
        _pack_all(([part] for part in parts), progress)
        return {}
    hashers = {name: hashlib.sha256() for name in places}
    _pack_all((_parted(stored[n], p, hashers[n]) for n, p in places.items()), progress)
    return {name: hasher.hexdigest() for name, hasher in hashers.items()}


def _pack_all(queues: Iterable[Iterable[_Stretch]], progress: Progress) -> None:
    """Pack queues side by side, in threads; of each queue one stretch after another."""
    left = deque(map(iter, queues))
    running: dict[Future[None], tuple[_Stretch, Iterator[_Stretch]]] = {}
    pool = ThreadPoolExecutor(_threads())
    try:
        while left or running:
            while left and len(running) < 2 * _threads():  # so that none waits for this thread
                queue = left.popleft()
                for stretch in islice(queue, 1):
                    running[pool.submit(_pack_stretch, stretch)] = stretch, queue
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                stretch, queue = running.pop(task)
                task.result()
                progress(stretch.place.nbytes)
                left.appendleft(queue)
    finally:
        pool.shutdown(cancel_futures=True)


def _parted(
    tensor: StoredTensor, place: Place, hasher: "hashlib._Hash | None"
) -> Iterator[_Stretch]:
    """Cut a tensor into stretches, so that a large one keeps no thread long."""
    if not isinstance(place, PackedMatrix):
        yield _Stretch(tensor, 0, len(place), place, hasher)
        return
    height = portion_rows(place.columns)
    height *= max(1, _AT_ONCE // (height * place.columns))
    for first in range(0, place.rows, height):
        rows = min(height, place.rows - first)
        yield _Stretch(tensor, first, rows, place.part(first, rows), hasher)


def _pack_stretch(stretch: _Stretch) -> None:
    place, done = stretch.place, 0
    for numbers in _portions(stretch.tensor, stretch.first, stretch.rows):
        count = len(numbers)
        if stretch.hasher is not None:
            stretch.hasher.update(numbers.data)
        if isinstance(place, PackedMatrix):
            fill(place.part(done, count), numbers)
        else:
            fill(place[done : done + count], numbers)
        done += count


def _portions(tensor: StoredTensor, first: int = 0, rows: int | None = None) -> Iterator[Numbers]:
    """Yield rows of a stored tensor, some at a time, in memory that is used again."""
    shape, dtype = tensor.info.shape, _DTYPES[tensor.info.dtype]
    columns = shape[1] if len(shape) > 1 else 1
    rows, height = shape[0] if rows is None else rows, portion_rows(columns)
    buffer = np.empty(min(rows, height) * columns, dtype)
    try:
        with tensor.path.open("rb", buffering=0) as stream:
            stream.seek(tensor.offset + first * columns * dtype.itemsize)
            for begin in range(0, rows, height):
                part = buffer[: min(height, rows - begin) * columns]
                _read_into(part, stream)
                yield part.reshape(-1, *shape[1:])
    except OSError as error:
        raise unreadable(tensor.path, error) from error


def _read_into(numbers: Numbers, stream: BinaryIO) -> None:
    """Fill an array.

    Raises:
        OSError: when the file ends before that.
    """
    left = numbers.data.cast("B")
    while left:
        count = cast(int, stream.readinto(left))  # type: ignore[attr-defined]  # of raw files
        if not count:
            raise OSError("it is cut short")
        left = left[count:]
