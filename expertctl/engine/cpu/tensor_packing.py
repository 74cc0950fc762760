"""Experts in bfloat16 made shorter without loss: every number stays as it was.

Tensors of a base from their files into packed matrices: some rows at a time, in threads.

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
from expertctl.engine.cpu.packed_base import TensorPlace, write_tensor
from expertctl.engine.devices import count_usable_cores
from expertctl.engine.kernels.exponent_packing import (
    align_to_vector_bytes,
    exponent_check_kernel,
    exponent_pack_kernel,
    max_packed_bytes,
)
from expertctl.engine.kernels.memory import array_address, encode_operands
from expertctl.engine.kernels.moe_gemm import compact_chunk_sizes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape, PackedMatrix, rows_per_portion
from expertctl.engine.kernels.simd import VECTOR_BYTES
from expertctl.engine.model.weights import make_unreadable_error
from expertctl.package.base_tensors import StoredTensor
from expertctl.store.quantised_file import ALIGNED

AnyArray = np.ndarray[Any, Any]


def compact_expert(block: AnyArray, shape: ExpertShape) -> AnyArray:
    """Return the compact bytes of an expert that lies in a block, uint8 [a multiple of 4096]."""
    sizes = compact_chunk_sizes(shape)
    assert VECTOR_BYTES * sizes.prod(axis=1).sum() == block.nbytes
    offsets = 4 * (len(sizes) + 1)
    room = align_to_vector_bytes(offsets) + sum(max_packed_bytes(*size) for size in sizes.tolist())
    packed = np.zeros(room + ALIGNED, np.uint8)
    arguments = encode_operands(
        array_address(block, np.uint8),
        array_address(sizes, np.int64),
        len(sizes),
        array_address(packed, np.uint8),
    )
    exponent_pack_kernel()(0, 1, array_address(arguments, np.int64))
    end = int(packed[:offsets].view(np.uint32)[-1])
    return packed[: -(-end // ALIGNED) * ALIGNED]


def min_compact_bytes(shape: ExpertShape) -> int:
    """Return the bytes that any compact expert has: they say where its stretches begin."""
    return 4 * (len(compact_chunk_sizes(shape)) + 1)


def supports_compact(scheme: Scheme) -> bool:
    """Tell whether experts in a scheme are compact in the copy of a base."""
    return scheme is Scheme.BFLOAT16


def is_compact(block: AnyArray, shape: ExpertShape) -> bool:
    """Tell whether an expert can be unpacked from a block; not whether it is the right one."""
    if block.nbytes < min_compact_bytes(shape):
        return False
    sizes, found = compact_chunk_sizes(shape), np.zeros(1, np.int64)
    arguments = encode_operands(
        array_address(block, np.uint8),
        block.nbytes,
        array_address(sizes, np.int64),
        len(sizes),
        array_address(found, np.int64),
    )
    exponent_check_kernel()(0, 1, array_address(arguments, np.int64))
    return bool(found[0])


_DTYPES: dict[str, "np.dtype[Any]"] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_SLICE_NUMBERS = 1 << 22
"""Numbers that a thread packs before it says so and takes the next."""
_MAX_THREADS = 4
"""More would wait for the memory."""
_NUMBER_BYTES, _THREAD_BYTES = 16, 4 << 20
"""Of each number of a portion: stored, widened, filled up, as steps; and what a thread costs."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a stored tensor, and their place."""

    tensor: StoredTensor
    first: int
    rows: int
    place: TensorPlace
    hasher: "hashlib._Hash | None"
    """Gets its bytes, if there is one; then stretches of a tensor are packed one after another."""


def packing_thread_count() -> int:
    """Return how many threads pack."""
    return min(count_usable_cores(), _MAX_THREADS)


def packing_thread_bytes(columns: int) -> int:
    """Return what a thread that packs rows of so many columns takes, at most."""
    return rows_per_portion(columns) * columns * _NUMBER_BYTES + _THREAD_BYTES


def pack_tensor(
    tensor: StoredTensor, place: TensorPlace, *, hasher: "hashlib._Hash | None" = None
) -> None:
    """Read a tensor from its file and pack it into its place, some rows at a time.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    _pack_slice(TensorRows(tensor, 0, tensor.info.shape[0], place, hasher))


def pack_slices(queues: Iterable[Iterable[TensorRows]], progress: Progress) -> None:
    """Pack queues side by side, in threads; of each queue one stretch after another.

    Raises:
        InvalidPackageError: when a file cannot be read to its end.
    """
    left = deque(map(iter, queues))
    running: dict[Future[None], tuple[TensorRows, Iterator[TensorRows]]] = {}
    pool = ThreadPoolExecutor(packing_thread_count())
    try:
        while left or running:
            while left and len(running) < 2 * packing_thread_count():  # none waits for this thread
                queue = left.popleft()
                for stretch in islice(queue, 1):
                    running[pool.submit(_pack_slice, stretch)] = stretch, queue
            for task in wait(running, return_when=FIRST_COMPLETED).done:
                stretch, queue = running.pop(task)
                task.result()
                progress(stretch.place.nbytes)
                left.appendleft(queue)
    finally:
        pool.shutdown(cancel_futures=True)


def slice_tensor(
    tensor: StoredTensor, place: TensorPlace, hasher: "hashlib._Hash | None" = None
) -> Iterator[TensorRows]:
    """Cut a tensor into stretches, so that a large one keeps no thread long."""
    if not isinstance(place, PackedMatrix):
        yield TensorRows(tensor, 0, len(place), place, hasher)
        return
    height = rows_per_portion(place.columns)
    height *= max(1, _SLICE_NUMBERS // (height * place.columns))
    for first in range(0, place.rows, height):
        rows = min(height, place.rows - first)
        yield TensorRows(tensor, first, rows, place.row_slice(first, rows), hasher)


def iter_row_portions(
    tensor: StoredTensor, first: int = 0, rows: int | None = None
) -> Iterator[AnyArray]:
    """Yield rows of a stored tensor, some at a time, in memory that is used again.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    shape, dtype = tensor.info.shape, _DTYPES[tensor.info.dtype]
    columns = shape[1] if len(shape) > 1 else 1
    rows, height = shape[0] if rows is None else rows, rows_per_portion(columns)
    buffer = np.empty(min(rows, height) * columns, dtype)
    try:
        with tensor.open() as stream:
            stream.seek(tensor.offset + first * columns * dtype.itemsize)
            for begin in range(0, rows, height):
                part = buffer[: min(height, rows - begin) * columns]
                _read_into(part, stream)
                yield part.reshape(-1, *shape[1:])
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error


def read_tensor(tensor: StoredTensor, numbers: AnyArray) -> None:
    """Read all of a stored tensor as it is into an array of as many bytes.

    Raises:
        InvalidPackageError: when the file cannot be read to its end.
    """
    try:
        with tensor.open() as stream:
            stream.seek(tensor.offset)
            _read_into(numbers, stream)
    except OSError as error:
        raise make_unreadable_error(tensor.path, error) from error


def _pack_slice(stretch: TensorRows) -> None:
    place, done = stretch.place, 0
    for numbers in iter_row_portions(stretch.tensor, stretch.first, stretch.rows):
        count = len(numbers)
        if stretch.hasher is not None:
            stretch.hasher.update(numbers.data)
        if isinstance(place, PackedMatrix):
            write_tensor(place.row_slice(done, count), numbers)
        else:
            write_tensor(place[done : done + count], numbers)
        done += count


def _read_into(numbers: AnyArray, stream: BinaryIO) -> None:
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
