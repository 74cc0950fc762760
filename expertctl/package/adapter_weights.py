"""The weights of an adapter: their packed form, saved embeddings, and the range of their numbers.

A file is packed as it is, unless tensors are dropped or have different dtypes: then all become
float32, which holds every bfloat16 and float16 exactly, and into which PEFT loads such a file too.
Names and order are kept, so the same file always gives the same bytes.

PEFT saves whole embeddings and heads with an adapter that targets them, or after the vocabulary was
resized. They are dropped if every number equals that of the base; everything else changed the base
and is not supported yet.

The largest number of each tensor is found from the bits, read in chunks: without the sign bit they
order like the numbers, in all three dtypes, with infinity and NaN above all others.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BufferedReader
from typing import BinaryIO

import numpy as np

from expertctl.digest import READ_CHUNK, Progress, ignore_progress
from expertctl.errors import DigestError
from expertctl.package.adapter import (
    EMBEDDING_NAMES,
    PEFT_PREFIX,
    AdapterSpec,
    Dora,
    Ia3,
    Lora,
    Part,
    SoftPrompt,
    truncate_problems,
)
from expertctl.package.directory import SourceFile
from expertctl.package.layout import Blobs
from expertctl.package.read import PackageContents
from expertctl.package.stored_tensor import StoredTensor
from expertctl.package.tensor_file import (
    DTYPE_BYTES,
    LENGTH_BYTES,
    TensorInfo,
    TensorTable,
    read_header,
)
from expertctl.schema.strict_json import JsonObject

WIDE_DTYPE = "F32"
FLOAT_DTYPES = frozenset({"F32", "F16", "BF16"})
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """The weights file of an adapter and its packed form."""

    source: SourceFile
    kept_table: TensorTable
    """The packed tensors, at their offsets in ``source``."""
    table: TensorTable
    """The same tensors, at their offsets in the package."""

    @property
    def is_rewritten(self) -> bool:
        """Whether the packed bytes differ from the file."""
        return self.table is not self.kept_table

    @property
    def is_widened(self) -> bool:
        """Whether tensors of several dtypes become float32."""
        return any(
            tensor.dtype != self.table.tensors[name].dtype
            for name, tensor in self.kept_table.tensors.items()
        )

    def write(self, output: BinaryIO) -> None:
        """Write the packed file.

        Raises:
            DigestError: when the source was replaced or truncated meanwhile.
        """
        output.write(encode_header(self.table))
        with self.source.open() as stream:
            for name, tensor in self.kept_table.tensors.items():
                widened = tensor.dtype != self.table.tensors[name].dtype
                for chunk in _iter_chunks(
                    stream, self.kept_table.data_offset, tensor, self.source.name
                ):
                    output.write(
                        widen_to_float32(chunk, tensor.dtype).tobytes() if widened else chunk
                    )


def choose_packed_weights(
    source: SourceFile, table: TensorTable, excluded: frozenset[str]
) -> PackedWeights:
    """Decide how a file is packed without the tensors in ``excluded``."""
    kept = {name: tensor for name, tensor in table.tensors.items() if name not in excluded}
    types = {tensor.dtype for tensor in kept.values()}
    mixed = len(types) > 1 and types <= FLOAT_DTYPES
    if not kept or not (excluded or mixed):
        return PackedWeights(source, table, table)
    part = TensorTable(kept, table.data_offset, table.file_size)
    return PackedWeights(source, part, lay_out_tensors(part, WIDE_DTYPE if mixed else None))


def widen_to_float32(data: bytes, dtype: str) -> "np.ndarray[tuple[int], np.dtype[np.float32]]":
    """Return the numbers of a float tensor's bytes as float32, exactly."""
    if dtype == "BF16":
        return (np.frombuffer(data, dtype="<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(data, dtype="<f2" if dtype == "F16" else "<f4").astype("<f4")


def lay_out_tensors(part: TensorTable, dtype: str | None) -> TensorTable:
    """Lay out tensors one after the other, all in one dtype if it is given."""
    tensors: dict[str, TensorInfo] = {}
    end = 0
    for name, tensor in part.tensors.items():
        kind = dtype or tensor.dtype
        begin, end = end, end + math.prod(tensor.shape) * DTYPE_BYTES[kind]
        tensors[name] = TensorInfo(kind, tensor.shape, begin, end)
    offset = len(encode_header(TensorTable(tensors, 0, 0)))
    return TensorTable(tensors, offset, offset + end)


def encode_header(table: TensorTable) -> bytes:
    """Return the header of a safetensors file, with the length before it."""
    document: JsonObject = {"__metadata__": {"format": "pt"}}
    for name, tensor in table.tensors.items():
        document[name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [tensor.begin, tensor.end],
        }
    text = json.dumps(document, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _iter_chunks(stream: BinaryIO, offset: int, tensor: TensorInfo, name: str) -> Iterator[bytes]:
    stream.seek(offset + tensor.begin)
    left = tensor.end - tensor.begin
    while left:
        wanted = min(READ_CHUNK, left)
        data = stream.read(wanted)
        if len(data) < wanted:  # `widen_to_float32` needs whole numbers
            raise DigestError(
                f"{name}: the file was cut short while it was being packed",
                hint="build again when nothing writes to the directory",
            )
        left -= len(data)
        yield data


_SAVED_MODULE = re.compile(
    rf"{re.escape(PEFT_PREFIX)}(?P<module>(?:.+\.)?(?:{'|'.join(sorted(EMBEDDING_NAMES))}))"
    r"(?:\.base_layer)?\.weight"
)
_HEAD_MODULES = frozenset({"lm_head", "embed_out", "output_layer"})
_NUMBERS_PER_READ = 1 << 18
CHANGED_REASON = "the embeddings were trained or the vocabulary was resized: not supported yet"
UNKNOWN_REASON = (
    "saved with the adapter, but the base is not here to compare it with: run "
    "`expertctl base add DIR`, or pass `--base DIR`"
)

BaseTensors = Mapping[str, StoredTensor]


def find_saved_embeddings(table: TensorTable) -> dict[str, str]:
    """Return the tensors of whole embeddings and heads: tensor name → module."""
    matches = {name: _SAVED_MODULE.fullmatch(name) for name in table.tensors}
    return {name: match["module"] for name, match in matches.items() if match is not None}


def find_changed_embeddings(
    source: SourceFile, table: TensorTable, saved: Mapping[str, str], base: BaseTensors | None
) -> list[str]:
    """Return why saved embeddings and heads cannot be dropped; empty if all equal the base's."""
    if not saved:
        return []
    if base is None:
        return [f"{name}: {UNKNOWN_REASON}" for name in saved]
    with source.open() as stream:
        return [
            f"{name}: {CHANGED_REASON}"
            for name, module in saved.items()
            if not _equals_base_tensor(
                stream, table, table.tensors[name], _find_base_tensor(module, base)
            )
        ]


def _find_base_tensor(module: str, base: BaseTensors) -> StoredTensor | None:
    """Find the matrix of a module; a tied head has that of the embedding."""
    named = {**{tensor.stored: tensor for tensor in base.values() if not tensor.row}, **base}
    for name in (f"{module}.weight", f"{module.partition('.')[2]}.weight"):
        if name in named:
            return named[name]
    if module.rpartition(".")[2] not in _HEAD_MODULES:
        return None
    embeddings = [
        tensor
        for name, tensor in base.items()
        if name.removesuffix(".weight").rpartition(".")[2] in EMBEDDING_NAMES - _HEAD_MODULES
    ]
    return embeddings[0] if len(embeddings) == 1 else None


def _equals_base_tensor(
    stream: BinaryIO, table: TensorTable, saved: TensorInfo, stored: StoredTensor | None
) -> bool:
    if stored is None or stored.codec is not None or stored.info.shape != saved.shape:
        return False
    if not {saved.dtype, stored.info.dtype} <= FLOAT_DTYPES:
        return False
    with BufferedReader(stored.open()) as base:
        ours = _iter_numbers(stream, table.data_offset + saved.begin, saved)
        theirs = _iter_numbers(base, stored.offset, stored.info)
        return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _iter_numbers(
    stream: BinaryIO, offset: int, tensor: TensorInfo
) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    """Yield the numbers of a tensor in chunks of equal length for every dtype."""
    width = DTYPE_BYTES[tensor.dtype]
    left, at = tensor.end - tensor.begin, offset
    while left:
        stream.seek(at)
        data = stream.read(min(_NUMBERS_PER_READ * width, left))
        if not data:
            yield np.zeros(0, dtype="<f4")
            return
        at, left = at + len(data), left - len(data)
        yield widen_to_float32(data[: len(data) // width * width], tensor.dtype)


EXTREME_VALUE = 1000.0
"""Larger values are worth a warning: the weights of trained bases are below 10, and so are LoRA's
changes to them and the factors of IA³; soft prompts and DoRA's magnitudes, which are norms of rows,
stay below 100. It is far from 65504, the largest float16."""

_DTYPE_MASKS: Mapping[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
}
"""Dtype → integer type, mask without the sign bit, bits of infinity."""


def find_peaks(
    stream: BinaryIO, table: TensorTable, *, progress: Progress = ignore_progress
) -> dict[str, float]:
    """Return the largest absolute value in each tensor; infinity if any value is not finite."""
    return {
        name: _find_peak(stream, table.data_offset, tensor, progress)
        for name, tensor in table.tensors.items()
    }


def find_not_finite(found: Mapping[str, float]) -> list[str]:
    """Return the tensors that contain NaN or infinity."""
    return [f"{name} holds NaN or infinity" for name, peak in found.items() if math.isinf(peak)]


def find_extremes(spec: AdapterSpec, found: Mapping[str, float]) -> list[str]:
    """Return the parts of an adapter whose finite values exceed `EXTREME_VALUE`."""
    reaches = ((part, _bound_part(part, found)) for part in spec.parts)
    return truncate_problems(
        [
            f"{_format_part(part)}: numbers up to {reach:.2g}; "
            f"trained adapters stay below {EXTREME_VALUE:g}"
            for part, reach in reaches
            if reach > EXTREME_VALUE
        ]
    )


def describe_no_effect(spec: AdapterSpec, found: Mapping[str, float]) -> list[str]:
    """Return a warning if every ``lora_B`` is zero, as before the first training step."""
    halves = {part.b for part in spec.parts if isinstance(part, Lora)}
    if not halves or any(found[name] for name in halves):
        return []
    return ["every lora_B is zero, so this adapter changes nothing: it was saved untrained"]


def find_numeric_anomalies(contents: PackageContents, blobs: Blobs) -> list[str]:
    """Return warnings about the numbers in a package, whoever built it; raises as `read_header`."""
    files = {file.path: file for file in contents.files}
    warnings = []
    for entry, spec in zip(contents.manifest.adapters, contents.adapters, strict=True):
        file = files[entry.path]
        with blobs(file.digest) as stream:
            found = find_peaks(stream, read_header(stream, file_size=file.size, what=file.path))
        warnings += [
            f"{file.path}: {doubt}"
            for doubt in find_not_finite(found) or find_extremes(spec, found)
        ]
    return warnings


def _bound_part(part: Part, found: Mapping[str, float]) -> float:
    """Return a bound on the numbers that a part adds to weights, multiplies by, or inserts."""
    match part:
        case Lora():
            return _bound_product(part, found)
        case Dora():
            return max(_bound_product(part, found), found[part.magnitude])
        case Ia3():
            return found[part.vector]
        case SoftPrompt():
            return found[part.embeddings]


def _bound_product(part: Lora | Dora, found: Mapping[str, float]) -> float:
    """Return a bound on the numbers in ``scale B A``."""
    return part.scale * part.rank * found[part.a] * found[part.b]


def _format_part(part: Part) -> str:
    return part.embeddings if isinstance(part, SoftPrompt) else part.module


def _find_peak(stream: BinaryIO, offset: int, tensor: TensorInfo, progress: Progress) -> float:
    kind, magnitude, infinity = _DTYPE_MASKS[tensor.dtype]
    mask = np.dtype(kind).type(magnitude)
    left, largest = tensor.end - tensor.begin, 0
    stream.seek(offset + tensor.begin)
    while left:
        data = stream.read(min(READ_CHUNK, left))
        if not data:  # the file was truncated meanwhile
            return math.inf
        largest = max(largest, int((np.frombuffer(data, dtype=kind) & mask).max()))
        left -= len(data)
        progress(len(data))
    return math.inf if largest >= infinity else _decode_value(largest, tensor.dtype)


def _decode_value(bits: int, dtype: str) -> float:
    """Return the number with these bits and a positive sign."""
    if dtype == "F16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16 if dtype == "BF16" else bits).view(np.float32))
