"""Loading adapter weights: files are read once, hashed in memory and used from the same bytes.

Decision 14: files are neither mapped nor read twice, so the verified bytes are the used bytes even
if a file is overwritten meanwhile. A thread reads ahead of hashing. The tensors are views into the
buffer; nothing is converted here.
"""

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.engine.adapters.steps import (
    AdapterStep,
    DoraTensors,
    Ia3Tensors,
    LoraTensors,
    StackedFactors,
)
from expertctl.engine.arrays import STORED_DTYPES, FloatArray
from expertctl.engine.memory.host import allocate
from expertctl.errors import DigestError, InvalidPackageError, NotFoundError, StoreError
from expertctl.package.adapter import (
    AdapterSpec,
    Dora,
    Ia3,
    Lora,
    Part,
    SoftPrompt,
    parse_adapter_config,
)
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.peft_config import STACKED_MODULES
from expertctl.package.tensor_file import (
    ADAPTER_LIMITS,
    LENGTH_BYTES,
    TensorTable,
    parse_header,
    parse_header_length,
)
from expertctl.schema.manifest import AdapterEntry, Manifest

READ_CHUNK_BYTES = 4 << 20
READ_SLACK_BYTES = 8
"""Spare bytes of a buffer, so that tensors can be moved to an aligned address."""


class PackageFiles(Protocol):
    """The verified bytes of one package, from the store or from memory."""

    def read_file(self, path: str) -> memoryview:
        """Return one file's bytes, digest checked, followed by `READ_SLACK_BYTES` spare bytes."""


@dataclass(frozen=True, slots=True)
class LoadedAdapter:
    """The weights of one expert in memory: the steps for each module, and its soft prompts.

    Steps are in the order of the manifest's adapters; tensors are views into the file buffers.
    """

    ref: str
    modules: Mapping[str, tuple[AdapterStep, ...]]
    soft_prompts: tuple[FloatArray, ...]
    tensors: int
    nbytes: int
    past_end_modules: frozenset[str] = frozenset()
    """The module after the last expert of each stack: a base that it fits has none of them."""


@dataclass(frozen=True, slots=True)
class StoredFiles:
    """The files of one installed expert; every read checks the digest."""

    ref: str
    paths: Mapping[str, tuple[Path, FileDigest]]
    progress: Progress = ignore_progress

    def read_file(self, path: str) -> memoryview:
        """Read one file of the package.

        Raises:
            DigestError: if its bytes are not those that were installed.
            NotFoundError: if it is missing.
        """
        blob, expected = self.paths[path]
        return read_verified(blob, expected, owner=self.ref, progress=self.progress)


def estimate_adapter_bytes(manifest: Manifest, sizes: Mapping[str, int]) -> int:
    """Return the bytes of an expert in memory, including the files that describe its weights."""
    files = [path for entry in manifest.adapters for path in (entry.path, entry.config)]
    return sum(sizes[path] + READ_SLACK_BYTES for path in files)


def load_adapter(manifest: Manifest, package_files: PackageFiles) -> LoadedAdapter:
    """Load the weights of one expert into memory, its adapters in the manifest's order.

    Raises:
        DigestError: if bytes are not those that were verified at installation.
        InvalidPackageError: if a file is malformed.
    """
    loaded = [_load_entry(manifest, entry, package_files) for entry in manifest.adapters]
    modules: dict[str, tuple[AdapterStep, ...]] = {}
    for one in loaded:
        for module, steps in one.modules.items():
            modules[module] = (*modules.get(module, ()), *steps)
    return LoadedAdapter(
        ref=manifest.ref,
        modules=modules,
        soft_prompts=tuple(prompt for one in loaded for prompt in one.soft_prompts),
        tensors=sum(one.tensors for one in loaded),
        nbytes=sum(one.nbytes for one in loaded),
        past_end_modules=frozenset().union(*(one.past_end_modules for one in loaded)),
    )


def read_verified(
    path: Path, expected: FileDigest, *, owner: str, progress: Progress = ignore_progress
) -> memoryview:
    """Read a file into a new buffer with `READ_SLACK_BYTES` spare bytes, hashing it meanwhile.

    Raises:
        DigestError: if size or digest differ.
        NotFoundError: if the file is missing.
        StoreError: if it cannot be read.
    """
    try:
        with path.open("rb", buffering=0) as stream:
            size = os.fstat(stream.fileno()).st_size
            if size != expected.size:
                raise _make_changed_error(owner, expected, size)
            buffer = allocate(size + READ_SLACK_BYTES)
            digest = _read_and_hash(stream, buffer[:size], progress)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"{owner}: {expected.path} is missing from the store", hint="see `expertctl doctor`"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{owner}: {expected.path} cannot be read in the store: {error.strerror}",
            hint="see `expertctl doctor`",
        ) from error
    if digest != expected.digest:
        raise _make_changed_error(owner, expected, size)
    return buffer


def _make_changed_error(owner: str, expected: FileDigest, size: int) -> DigestError:
    detail = "" if size == expected.size else f" ({size} bytes instead of {expected.size})"
    return DigestError(
        f"{owner}: {expected.path} differs from the installed file{detail}",
        hint="run `expertctl doctor`, then reinstall the expert",
    )


def _read_and_hash(stream: BinaryIO, target: memoryview, progress: Progress) -> Digest:
    """Read ahead of hashing, in a thread unless there is only one chunk."""
    if len(target) <= READ_CHUNK_BYTES:
        _read_into(stream, target)
        progress(len(target))
        return Digest.compute(target)
    hasher = hashlib.sha256()
    begins = range(0, len(target), READ_CHUNK_BYTES)
    chunks = [target[begin : begin + READ_CHUNK_BYTES] for begin in begins]
    with ThreadPoolExecutor(1, thread_name_prefix="read-ahead") as reader:
        ahead: list[Future[None]] = [reader.submit(_read_into, stream, chunk) for chunk in chunks]
        for chunk, done in zip(chunks, ahead, strict=True):
            done.result()
            hasher.update(chunk)
            progress(len(chunk))
    return Digest(hasher.hexdigest())


def _read_into(stream: BinaryIO, target: memoryview) -> None:
    """Fill ``target``; if the file shrinks, zeros remain and the digest check fails."""
    filled = 0
    while filled < len(target):
        count = stream.readinto(target[filled:])  # type: ignore[attr-defined]  # a raw file has it
        if not count:
            return
        filled += count


def _load_entry(manifest: Manifest, entry: AdapterEntry, files: PackageFiles) -> LoadedAdapter:
    what = f"{manifest.ref}: {entry.path}"
    config_bytes = files.read_file(entry.config)
    config = parse_adapter_config(
        bytes(config_bytes[:-READ_SLACK_BYTES]), what=f"{manifest.ref}: {entry.config}"
    )
    buffer = files.read_file(entry.path)
    size = len(buffer) - READ_SLACK_BYTES
    table = _read_tensor_table(buffer, size, what)
    spec = build_adapter_spec(config, table, what=what)
    _check_manifest_entry(spec, entry, what)
    tensors = _view_tensors(buffer, size, table)
    prompts = [tensors[part.embeddings] for part in spec.parts if isinstance(part, SoftPrompt)]
    parts = (part for part in spec.parts if not isinstance(part, SoftPrompt))
    modules = {part.module: (_make_step(part, tensors),) for part in parts}
    ends = (part.module_after_stack for part in spec.parts if isinstance(part, Lora))
    beyond = frozenset(end for end in ends if end is not None)
    return LoadedAdapter(manifest.ref, modules, tuple(prompts), spec.tensors, len(buffer), beyond)


def _check_manifest_entry(spec: AdapterSpec, entry: AdapterEntry, what: str) -> None:
    """Check that every tensor is used, and that the manifest matches the file."""
    used = len({name for part in spec.parts for name in _tensor_names(part)})
    problems = []
    if spec.kind != entry.kind:
        problems.append(f"it is of kind {spec.kind}, the manifest says {entry.kind}")
    if not used == spec.tensors == entry.tensors:
        problems.append(f"{used} of the {entry.tensors} declared tensors are used")
    if problems:
        raise InvalidPackageError(what, problems)


def _tensor_names(part: Part) -> tuple[str, ...]:
    """Return the names of a part's tensors; the stack of several experts belongs to many parts."""
    match part:
        case Lora():
            return part.a, part.b
        case Dora():
            return part.a, part.b, part.magnitude
        case Ia3():
            return (part.vector,)
        case SoftPrompt():
            return (part.embeddings,)


def _make_step(part: Lora | Dora | Ia3, tensors: Mapping[str, FloatArray]) -> AdapterStep:
    match part:
        case Lora(stacked=None):
            return LoraTensors(tensors[part.a], tensors[part.b], part.scale)
        case Lora():
            return _slice_stacked(part, tensors[part.a], tensors[part.b])
        case Dora():
            magnitude = tensors[part.magnitude].reshape(-1)
            return DoraTensors(tensors[part.a], tensors[part.b], magnitude, part.scale)
        case Ia3():
            return Ia3Tensors(tensors[part.vector].reshape(-1), part.on_input)


def _slice_stacked(part: Lora, stacked_a: FloatArray, stacked_b: FloatArray) -> LoraTensors:
    """Return A and B of one expert as views: rows of the stacked A, every n-th column of B."""
    place = part.stacked
    assert place is not None
    rows = stacked_a[place.expert * part.rank :][: part.rank]  # [rank, in]
    columns = stacked_b[:, place.expert :: place.experts]  # [outputs of the stack, rank]
    a, b = (columns.T, rows.T) if place.transposed else (rows, columns)
    module = part.module.rpartition(".")[2]
    matrices = next(names for names in STACKED_MODULES.values() if module in names)
    whole = StackedFactors(rows, columns, matrices.index(module), len(matrices))
    own = b[place.first : place.first + part.outputs]
    return LoraTensors(a, own, part.scale, stacked=whole)


def _read_tensor_table(buffer: memoryview, size: int, what: str) -> TensorTable:
    first = bytes(buffer[: min(size, LENGTH_BYTES)])
    length = parse_header_length(first, file_size=size, what=what, limits=ADAPTER_LIMITS)
    start = bytes(buffer[: LENGTH_BYTES + length])
    return parse_header(start, file_size=size, what=what)


def _view_tensors(buffer: memoryview, size: int, table: TensorTable) -> dict[str, FloatArray]:
    """Return every tensor as a view; all have one dtype, as `build_adapter_spec` checked."""
    shift = -table.data_offset % READ_SLACK_BYTES
    if shift:  # an odd header length: move everything to multiples of 8
        buffer[shift : shift + size] = buffer[:size]
    dtype = STORED_DTYPES[next(iter(table.tensors.values())).dtype]
    begin, width = shift + table.data_offset, dtype.itemsize
    data = np.frombuffer(buffer[begin : begin + size - table.data_offset], dtype)
    return {
        name: data[t.begin // width : t.end // width].reshape(t.shape)
        for name, t in table.tensors.items()
    }
