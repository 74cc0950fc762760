"""Whether the numbers in a tensor file are finite, read in pieces and by their bits.

NaN and infinity are all ones in the exponent, in each of the three types; the bits are looked at,
so that bfloat16 needs no arithmetic.
"""

from pathlib import Path
from typing import BinaryIO

import numpy as np

from expertctl.digest import CHUNK, Progress, no_progress
from expertctl.package.tensor_file import TensorInfo, TensorTable

_EXPONENTS: dict[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


def not_finite(path: Path, table: TensorTable, *, progress: Progress = no_progress) -> list[str]:
    """Return the names of tensors that hold a NaN or an infinity."""
    with path.open("rb") as stream:
        return [
            name
            for name, tensor in table.tensors.items()
            if not _is_finite(stream, table.data_offset, tensor, progress)
        ]


def _is_finite(stream: BinaryIO, offset: int, tensor: TensorInfo, progress: Progress) -> bool:
    kind, exponent = _EXPONENTS[tensor.dtype]
    mask = np.dtype(kind).type(exponent)
    left, finite = tensor.end - tensor.begin, True
    stream.seek(offset + tensor.begin)
    while left and (data := stream.read(min(CHUNK, left))):
        bits = np.frombuffer(data, dtype=kind)
        finite = finite and not bool(np.any((bits & mask) == mask))
        left -= len(data)
        progress(len(data))
    return finite and left == 0
