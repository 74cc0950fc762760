"""Tensors of a base from their files into packed matrices: some rows at a time, in threads.

Files are read, not mapped: mapped pages would count as memory of this process. What a copy is made
of is hashed in the same memory from which it is packed.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from typing import Any, BinaryIO, cast

import numpy as np

from expertctl.digest import Progress
from expertctl.engine.base_weights import unreadable
from expertctl.engine.kernels.packed import PackedMatrix, portion_rows
from expertctl.engine.packed_base import fill
from expertctl.engine.packed_layer import Place
from expertctl.engine.threads import usable_cores
from expertctl.package.base_tensors import StoredTensor

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
class Stretch:
    """Some rows of a stored tensor, and their place."""

    tensor: StoredTensor
    first: int
    rows: int
    place: Place
    hasher: "hashlib._Hash | None"
    """Gets its bytes, if there is one; then stretches of a tensor are packed one after another."""


def packing_threads() -> int:
    """Return how many threads pack."""
    return min(usable_cores(), _MOST_THREADS)


def thread_bytes(columns: int) -> int:
    """Return what a thread that packs rows of so many columns takes, at most."""
    return portion_rows(columns) * columns * _NUMBER_BYTES + _THREAD_BYTES


def pack_tensor(
    tensor: StoredTensor, place: Place, *, hasher: "hashlib._Hash | None" = None
) -> None:
    """Read a tensor from its file and pack it into its place, some rows at a time.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    _pack_stretch(Stretch(tensor, 0, tensor.info.shape[0], place, hasher))


def pack_all(queues: Iterable[Iterable[Stretch]], progress: Progress) -> None:
    """Pack queues side by side, in threads; of each queue one stretch after another.

    Raises:
        InvalidPackageError: when a file cannot be read to its end.
    """
    left = deque(map(iter, queues))
    running: dict[Future[None], tuple[Stretch, Iterator[Stretch]]] = {}
    pool = ThreadPoolExecutor(packing_threads())
    try:
        while left or running:
            while left and len(running) < 2 * packing_threads():  # none waits for this thread
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


def parted(
    tensor: StoredTensor, place: Place, hasher: "hashlib._Hash | None" = None
) -> Iterator[Stretch]:
    """Cut a tensor into stretches, so that a large one keeps no thread long."""
    if not isinstance(place, PackedMatrix):
        yield Stretch(tensor, 0, len(place), place, hasher)
        return
    height = portion_rows(place.columns)
    height *= max(1, _AT_ONCE // (height * place.columns))
    for first in range(0, place.rows, height):
        rows = min(height, place.rows - first)
        yield Stretch(tensor, first, rows, place.part(first, rows), hasher)


def portions(tensor: StoredTensor, first: int = 0, rows: int | None = None) -> Iterator[Numbers]:
    """Yield rows of a stored tensor, some at a time, in memory that is used again.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    shape, dtype = tensor.info.shape, _DTYPES[tensor.info.dtype]
    columns = shape[1] if len(shape) > 1 else 1
    rows, height = shape[0] if rows is None else rows, portion_rows(columns)
    buffer = np.empty(min(rows, height) * columns, dtype)
    try:
        with tensor.open() as stream:
            stream.seek(tensor.offset + first * columns * dtype.itemsize)
            for begin in range(0, rows, height):
                part = buffer[: min(height, rows - begin) * columns]
                _read_into(part, stream)
                yield part.reshape(-1, *shape[1:])
    except OSError as error:
        raise unreadable(tensor.path, error) from error


def read_numbers(tensor: StoredTensor, numbers: Numbers) -> None:
    """Read all of a stored tensor as it is into an array of as many bytes.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    try:
        with tensor.open() as stream:
            stream.seek(tensor.offset)
            _read_into(numbers, stream)
    except OSError as error:
        raise unreadable(tensor.path, error) from error


def _pack_stretch(stretch: Stretch) -> None:
    place, done = stretch.place, 0
    for numbers in portions(stretch.tensor, stretch.first, stretch.rows):
        count = len(numbers)
        if stretch.hasher is not None:
            stretch.hasher.update(numbers.data)
        if isinstance(place, PackedMatrix):
            fill(place.part(done, count), numbers)
        else:
            fill(place[done : done + count], numbers)
        done += count


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
