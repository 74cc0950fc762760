"""How large the numbers in a tensor file are, and whether they are numbers at all.

Read in pieces and by their bits: without the sign they order as the numbers do, in each of the
three types, with infinity and NaN above all others. So bfloat16 needs no arithmetic.
"""

import math
from collections.abc import Mapping
from typing import BinaryIO

import numpy as np

from expertctl.digest import CHUNK, Progress, no_progress
from expertctl.package.adapter import AdapterSpec, Dora, Ia3, Lora, Part, SoftPrompt, shortened
from expertctl.package.layout import Blobs
from expertctl.package.read import PackageContents
from expertctl.package.tensor_file import TensorInfo, TensorTable, read_header

EXTREME = 1000.0
"""A change beyond it is worth a warning: the weights of trained bases are below 10, and so are
LoRA's changes to them and the factors of IA³; soft prompts and DoRA's magnitudes, which are norms
of rows, stay below 100. It is far enough from 65504, where float16 ends."""

_MAGNITUDE: Mapping[str, tuple[str, int, int]] = {
    "F32": ("<u4", 0x7FFFFFFF, 0x7F800000),
    "F16": ("<u2", 0x7FFF, 0x7C00),
    "BF16": ("<u2", 0x7FFF, 0x7F80),
}
"""The bits of a type, which of them are not the sign, and those of infinity."""


def peaks(
    stream: BinaryIO, table: TensorTable, *, progress: Progress = no_progress
) -> dict[str, float]:
    """Return the largest absolute value in each tensor; infinity where one is not finite."""
    return {
        name: _peak(stream, table.data_offset, tensor, progress)
        for name, tensor in table.tensors.items()
    }


def not_finite(found: Mapping[str, float]) -> list[str]:
    """Return which tensors hold NaN or infinity."""
    return [f"{name} holds NaN or infinity" for name, peak in found.items() if math.isinf(peak)]


def extremes(spec: AdapterSpec, found: Mapping[str, float]) -> list[str]:
    """Return where the numbers of an adapter are finite but larger than training gives."""
    reaches = ((part, _reach(part, found)) for part in spec.parts)
    return shortened(
        [
            f"{_label(part)}: numbers up to {reach:.2g}; trained adapters stay below {EXTREME:g}"
            for part, reach in reaches
            if reach > EXTREME
        ]
    )


def without_effect(spec: AdapterSpec, found: Mapping[str, float]) -> list[str]:
    """Say it where every ``lora_B`` of an adapter is zero, as before its first training step."""
    halves = {part.b for part in spec.parts if isinstance(part, Lora)}
    if not halves or any(found[name] for name in halves):
        return []
    return ["every lora_B is zero, so this adapter changes nothing: it was saved untrained"]


def doubts(contents: PackageContents, blobs: Blobs) -> list[str]:
    """Return what is odd about the numbers in a package, whoever built it.

    Raises:
        InvalidPackageError: when the bytes are not those that ``contents`` came from.
    """
    files = {file.path: file for file in contents.files}
    said = []
    for entry, spec in zip(contents.manifest.adapters, contents.adapters, strict=True):
        file = files[entry.path]
        with blobs(file.digest) as stream:
            found = peaks(stream, read_header(stream, file_size=file.size, what=file.path))
        said += [f"{file.path}: {doubt}" for doubt in not_finite(found) or extremes(spec, found)]
    return said


def _reach(part: Part, found: Mapping[str, float]) -> float:
    """Return a bound on the numbers that a part adds to weights, multiplies by, or inserts."""
    match part:
        case Lora():
            return _product(part, found)
        case Dora():
            return max(_product(part, found), found[part.magnitude])
        case Ia3():
            return found[part.vector]
        case SoftPrompt():
            return found[part.embeddings]


def _product(part: Lora | Dora, found: Mapping[str, float]) -> float:
    """No number in scale B A is larger."""
    return part.scale * part.rank * found[part.a] * found[part.b]


def _label(part: Part) -> str:
    return part.embeddings if isinstance(part, SoftPrompt) else part.module


def _peak(stream: BinaryIO, offset: int, tensor: TensorInfo, progress: Progress) -> float:
    kind, magnitude, infinity = _MAGNITUDE[tensor.dtype]
    mask = np.dtype(kind).type(magnitude)
    left, largest = tensor.end - tensor.begin, 0
    stream.seek(offset + tensor.begin)
    while left:
        data = stream.read(min(CHUNK, left))
        if not data:  # the file was cut short meanwhile
            return math.inf
        largest = max(largest, int((np.frombuffer(data, dtype=kind) & mask).max()))
        left -= len(data)
        progress(len(data))
    return math.inf if largest >= infinity else _value(largest, tensor.dtype)


def _value(bits: int, dtype: str) -> float:
    """Return the number that these bits, without a sign, stand for."""
    if dtype == "F16":
        return float(np.uint16(bits).view(np.float16))
    return float(np.uint32(bits << 16 if dtype == "BF16" else bits).view(np.float32))
