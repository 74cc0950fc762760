"""Packing stored tensors into matrices in threads, and lossless compaction of bfloat16 experts.

Bytes that a copy is made of are hashed in the same memory from which they are packed, except where
a codec decodes them, or rows are columns of the file: then they are read again, from the same state
of the file.
"""

import hashlib
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice

import numpy as np

from expertctl.digest import Progress
from expertctl.engine.arrays import VECTOR_BYTES, AnyArray, widen
from expertctl.engine.base_files import iter_row_portions, make_unreadable_error
from expertctl.engine.cpu.packed_base import TensorPlace, write_tensor
from expertctl.engine.kernels.gguf_blocks import pack_blocks
from expertctl.engine.kernels.moe_layer import compact_chunk_sizes
from expertctl.engine.kernels.packed_format import BLOCK_SCHEMES, Scheme, rows_per_portion
from expertctl.engine.kernels.packed_matrix import (
    ExpertShape,
    PackedMatrix,
    align_to_vector,
    exponent_check_kernel,
    exponent_pack_kernel,
    max_packed_bytes,
)
from expertctl.engine.kernels.program import array_address, encode_operands
from expertctl.engine.memory.host import count_usable_cores
from expertctl.errors import ExpertError, IncompatibleError, InvalidPackageError
from expertctl.package.stored_tensor import BlockCodec, StoredTensor
from expertctl.store.quantised_file import ALIGNED


def compact_expert(block: AnyArray, shape: ExpertShape) -> AnyArray:
    """Return the compact bytes of the expert in a block, uint8 [a multiple of 4096]."""
    sizes = compact_chunk_sizes(shape)
    assert VECTOR_BYTES * sizes.prod(axis=1).sum() == block.nbytes
    offsets = 4 * (len(sizes) + 1)
    room = align_to_vector(offsets) + sum(max_packed_bytes(*size) for size in sizes.tolist())
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
    """Return the minimum bytes of a compact expert: the table of its panels."""
    return 4 * (len(compact_chunk_sizes(shape)) + 1)


def supports_compact(scheme: Scheme) -> bool:
    """Return whether experts in a scheme are compact in the copy of a base."""
    return scheme is Scheme.BFLOAT16


def is_compact(block: AnyArray, shape: ExpertShape) -> bool:
    """Return whether an expert can be unpacked from a block; it may still be the wrong one."""
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


_SLICE_NUMBERS = 1 << 22
"""Numbers that a thread packs before it reports progress and takes the next slice."""
_MAX_THREADS = 4
"""More threads would be limited by memory bandwidth."""
_NUMBER_BYTES, _THREAD_BYTES = 16, 4 << 20
"""Maximum bytes per number of a portion (as it is stored, widened, padded), and per thread."""


@dataclass(frozen=True, slots=True)
class TensorRows:
    """Some rows of a stored tensor, and their place."""

    tensor: StoredTensor
    first: int
    rows: int
    place: TensorPlace
    hasher: "hashlib._Hash | None"
    """Updated with the bytes, if not None; the slices of a tensor must then be packed in order.

    Not where a codec decodes them, or transposes them: the bytes in the files are others.
    """


def packing_thread_count() -> int:
    """Return the number of threads that pack."""
    return min(count_usable_cores(), _MAX_THREADS)


def packing_thread_bytes(columns: int) -> int:
    """Return the maximum bytes of a thread that packs rows of this many columns."""
    return rows_per_portion(columns) * columns * _NUMBER_BYTES + _THREAD_BYTES


def pack_tensor(
    tensor: StoredTensor, place: TensorPlace, *, hasher: "hashlib._Hash | None" = None
) -> None:
    """Read a tensor from its file and pack it into its place, in portions.

    Raises:
        InvalidPackageError: if the file cannot be read to its end, or has NaN for integers.
        IncompatibleError: if weights are too large for integers.
    """
    _pack_slice(TensorRows(tensor, 0, tensor.info.shape[0], place, hasher))


def pack_slices(queues: Iterable[Iterable[TensorRows]], progress: Progress) -> None:
    """Pack queues in parallel threads; the slices of each queue are packed in order.

    Raises:
        InvalidPackageError: if a file cannot be read to its end, or has NaN for integers.
        IncompatibleError: if weights are too large for integers.
    """
    left = deque(map(iter, queues))
    running: dict[Future[None], tuple[TensorRows, Iterator[TensorRows]]] = {}
    pool = ThreadPoolExecutor(packing_thread_count())
    try:
        while left or running:
            while left and len(running) < 2 * packing_thread_count():  # keeps all threads busy
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
    """Split a tensor into slices, so that a large one does not occupy a thread for long."""
    if not isinstance(place, PackedMatrix):
        yield TensorRows(tensor, 0, len(place), place, hasher)
        return
    height = rows_per_portion(place.columns)
    height *= max(1, _SLICE_NUMBERS // (height * place.columns))
    for first in range(0, place.rows, height):
        rows = min(height, place.rows - first)
        yield TensorRows(tensor, first, rows, place.row_slice(first, rows), hasher)


def _pack_slice(stretch: TensorRows) -> None:
    place, done = stretch.place, 0
    if isinstance(place, PackedMatrix) and place.scheme in BLOCK_SCHEMES:
        _pack_stored_blocks(stretch.tensor, place, stretch.first)
        return
    for numbers in iter_row_portions(stretch.tensor, stretch.first, stretch.rows):
        count = len(numbers)
        if stretch.hasher is not None and stretch.tensor.has_whole_rows:
            stretch.hasher.update(numbers.data)
        if isinstance(place, PackedMatrix):
            fits = write_tensor(place.row_slice(done, count), numbers)
        else:
            fits = write_tensor(place[done : done + count], numbers)
        if not fits:
            raise _make_refusal(stretch.tensor, widen(numbers))
        done += count


def _pack_stored_blocks(tensor: StoredTensor, place: PackedMatrix, first: int) -> None:
    """Pack rows from row ``first`` of a tensor on, in the blocks in which they are stored."""
    codec, height = tensor.codec, rows_per_portion(place.columns)
    assert isinstance(codec, BlockCodec), "blocks are stored as blocks"
    for begin in range(0, place.rows, height):
        count = min(height, place.rows - begin)
        try:
            rows = np.frombuffer(codec.read_row_bytes(first + begin, count), np.uint8)
        except OSError as error:
            raise make_unreadable_error(tensor.path, error) from error
        pack_blocks(place.row_slice(begin, count), rows.reshape(count, -1))


def _make_refusal(tensor: StoredTensor, numbers: AnyArray) -> ExpertError:
    """Return the error for numbers of which integers cannot store some."""
    path, name = str(tensor.path), tensor.stored
    if not np.isfinite(numbers).all():
        return InvalidPackageError(
            path,
            [f"{name} has NaN or infinity"],
            hint="int8 and int4 cannot store them; in other data types, answers are undefined",
        )
    return IncompatibleError(
        f"{path}: {name} has weights up to {np.abs(numbers).max():.3g}, too large for int4",
        hint="use --dtype int8 or bf16",
    )
