"""The weights of an adapter as they are packed: the file's own bytes, or some of its tensors anew.

A file is written anew where tensors are left out, or where its tensors are of several types: then
all become float32, which holds every bfloat16 and float16 exactly. PEFT loads such a file into
float32 too. Names and order stay, so the same file always gives the same bytes.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from expertctl.digest import CHUNK
from expertctl.errors import DigestError
from expertctl.package.source_files import SourceFile
from expertctl.package.tensor_file import DTYPE_BYTES, LENGTH_BYTES, TensorInfo, TensorTable
from expertctl.schema.strict_json import JsonObject

WIDE = "F32"
FLOATS = frozenset({"F32", "F16", "BF16"})
_ALIGNED = 8


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """What is packed of a file of weights."""

    source: SourceFile
    kept: TensorTable
    """The tensors that are packed, where they lie in ``source``."""
    table: TensorTable
    """The same tensors as the package will hold them."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the package holds other bytes than the file."""
        return self.table is not self.kept

    @property
    def is_widened(self) -> bool:
        """Whether tensors of several types become float32."""
        return any(
            tensor.dtype != self.table.tensors[name].dtype
            for name, tensor in self.kept.tensors.items()
        )

    def write(self, output: BinaryIO) -> None:
        """Write the file that is packed.

        Raises:
            DigestError: when the source was replaced or cut short meanwhile.
        """
        output.write(_header(self.table))
        with self.source.open() as stream:
            for name, tensor in self.kept.tensors.items():
                widened = tensor.dtype != self.table.tensors[name].dtype
                for chunk in _chunks(stream, self.kept.data_offset, tensor, self.source.name):
                    output.write(widen(chunk, tensor.dtype).tobytes() if widened else chunk)


def packed_weights(
    source: SourceFile, table: TensorTable, left_out: frozenset[str]
) -> PackedWeights:
    """Decide what is packed of a file, without some of its tensors."""
    kept = {name: tensor for name, tensor in table.tensors.items() if name not in left_out}
    types = {tensor.dtype for tensor in kept.values()}
    mixed = len(types) > 1 and types <= FLOATS
    if not kept or not (left_out or mixed):
        return PackedWeights(source, table, table)
    part = TensorTable(kept, table.data_offset, table.file_size)
    return PackedWeights(source, part, _laid_out(part, WIDE if mixed else None))


def widen(data: bytes, dtype: str) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return the numbers of a float tensor's bytes in float32, each with its exact value."""
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, dtype="<f2" if dtype == "F16" else "<f4").astype("<f4")


def _laid_out(part: TensorTable, dtype: str | None) -> TensorTable:
    """Put tensors one behind the other, in one type where it is given."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, tensor in part.tensors.items():
        kind = dtype or tensor.dtype
        begin, end = end, end + math.prod(tensor.shape) * DTYPE_BYTES[kind]
        tensors[name] = TensorInfo(kind, tensor.shape, begin, end)
    offset = len(_header(TensorTable(tensors, 0, 0)))
    return TensorTable(tensors, offset, offset + end)


def _header(table: TensorTable) -> bytes:
    document: JsonObject = {"__metadata__": {"format": "pt"}}
    for name, tensor in table.tensors.items():
        document[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _chunks(stream: BinaryIO, offset: int, tensor: TensorInfo, name: str) -> Iterator[bytes]:
    stream.seek(offset + tensor.begin)
    left = tensor.end - tensor.begin
    while left:
        wanted = min(CHUNK, left)
        data = stream.read(wanted)
        if len(data) < wanted:  # a part of a number must not reach `widen`
            raise DigestError(
                f"{name}: the file was cut short while it was being packed",
                hint="build again when nothing writes to the directory",
            )
        left -= len(data)
        yield data
