"""Embeddings and heads that PEFT saved whole beside an adapter, compared with those of the base.

PEFT writes them where an adapter targets them, or where the vocabulary was resized. They are left
out of a package where every number is that of the base; everything else changed the base, and is
not supported yet.
"""

import re
from collections.abc import Iterator, Mapping
from io import BufferedReader
from typing import BinaryIO

import numpy as np

from expertctl.package.adapter import PREFIX
from expertctl.package.adapter_weights import FLOATS, widen
from expertctl.package.base_tensors import StoredTensor
from expertctl.package.config_cleaning import EMBEDDING_NAMES
from expertctl.package.source_files import SourceFile
from expertctl.package.tensor_file import DTYPE_BYTES, TensorInfo, TensorTable

_SAVED = re.compile(
    rf"{re.escape(PREFIX)}(?P<module>(?:.+\.)?(?:{'|'.join(sorted(EMBEDDING_NAMES))}))"
    r"(?:\.base_layer)?\.weight"
)
_HEADS = frozenset({"lm_head", "embed_out", "output_layer"})
_NUMBERS = 1 << 18
CHANGED = "the embeddings were trained or the vocabulary was resized: not supported yet"
UNKNOWN = (
    "saved beside the adapter, and the base is not here to compare it with: run "
    "`expertctl base add DIR`, or pass `--base DIR`"
)

BaseTensors = Mapping[str, StoredTensor]


def saved_embeddings(table: TensorTable) -> dict[str, str]:
    """Return the tensors of whole embeddings and heads, with the module that each belongs to."""
    matches = {name: _SAVED.fullmatch(name) for name in table.tensors}
    return {name: match["module"] for name, match in matches.items() if match is not None}


def changed_embeddings(
    source: SourceFile,
    table: TensorTable,
    saved: Mapping[str, str],
    base: BaseTensors | None,
) -> list[str]:
    """Return why saved embeddings and heads cannot be left out; empty when all are the base's."""
    if not saved:
        return []
    if base is None:
        return [f"{name}: {UNKNOWN}" for name in saved]
    with source.open() as stream:
        return [
            f"{name}: {CHANGED}"
            for name, module in saved.items()
            if not _is_base(stream, table, table.tensors[name], _base_tensor(module, base))
        ]


def _base_tensor(module: str, base: BaseTensors) -> StoredTensor | None:
    """Find the matrix of a module: its own, or for a tied head that of the embedding."""
    for name in (f"{module}.weight", f"{module.partition('.')[2]}.weight"):
        if name in base:
            return base[name]
    if module.rpartition(".")[2] not in _HEADS:
        return None
    embeddings = [
        tensor
        for name, tensor in base.items()
        if name.removesuffix(".weight").rpartition(".")[2] in EMBEDDING_NAMES - _HEADS
    ]
    return embeddings[0] if len(embeddings) == 1 else None


def _is_base(
    stream: BinaryIO, table: TensorTable, saved: TensorInfo, stored: StoredTensor | None
) -> bool:
    if stored is None or stored.info.shape != saved.shape:
        return False
    if not {saved.dtype, stored.info.dtype} <= FLOATS:
        return False
    with BufferedReader(stored.open()) as base:
        ours = _numbers(stream, table.data_offset + saved.begin, saved)
        theirs = _numbers(base, stored.offset, stored.info)
        return all(np.array_equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _numbers(
    stream: BinaryIO, offset: int, tensor: TensorInfo
) -> Iterator["np.ndarray[tuple[int], np.dtype[np.float32]]"]:
    """Yield the numbers of a tensor in pieces of the same length for every type."""
    width = DTYPE_BYTES[tensor.dtype]
    left, at = tensor.end - tensor.begin, offset
    while left:
        stream.seek(at)
        data = stream.read(min(_NUMBERS * width, left))
        if not data:
            yield np.zeros(0, dtype="<f4")
            return
        at, left = at + len(data), left - len(data)
        yield widen(data[: len(data) // width * width], tensor.dtype)
