"""What a base model is, read from its Hugging Face directory without torch.

A base is named by three digests: ``arch`` (what the decoder reads of the configuration, with the
names and shapes of all tensors), ``weights`` (every tensor's bytes; a tied head counts once) and
``tokenizer`` (the bytes of tokenizer.json). Only safetensors are read.
"""

import hashlib
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.digest import CHUNK, Digest, Progress, hash_file, no_progress
from expertctl.errors import InvalidPackageError, NotFoundError
from expertctl.package.decoder_config import DECODER_FIELDS as DECODER_FIELDS
from expertctl.package.decoder_config import decoder_config
from expertctl.package.tensor_file import BASE_LIMITS, TensorInfo, read_table
from expertctl.schema.strict_json import JsonObject, canonical, load_object

CONFIG_FILE = "config.json"
TOKENIZER_FILE = "tokenizer.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_MAX_CONFIG_BYTES = 1 << 20
_MAX_INDEX_BYTES = 64 << 20
_DERIVED = ".rotary_emb.inv_freq"
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_THREADS = 4


@dataclass(frozen=True, slots=True)
class BaseIdentity:
    """A base by name and content; ``weights`` is ``None`` when nobody has read them."""

    name: str
    revision: str | None
    arch: Digest
    weights: Digest | None
    tokenizer: Digest


@dataclass(frozen=True, slots=True)
class BaseFacts:
    """What checking an adapter needs of a base: who it is, and (out, in) of its linear layers."""

    identity: BaseIdentity
    shapes: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a base: its file, what it is, and the byte in the file where it begins."""

    path: Path
    info: TensorInfo
    offset: int

    @property
    def size(self) -> int:
        """How many bytes the tensor has."""
        return self.info.end - self.info.begin


def identify_base(
    directory: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> BaseIdentity:
    """Read a whole base and name it; ``name`` defaults to the directory's.

    Raises:
        NotFoundError: when the directory or one of its files is missing.
        InvalidPackageError: when it is not a base that can be read.
    """
    config = read_config(directory)
    tensors = base_tensors(directory, tied=decoder_config(config)["tie_word_embeddings"])
    _, tokenizer = hash_file(_file(directory, TOKENIZER_FILE), progress=progress)
    return BaseIdentity(
        name=name or directory.resolve().name,
        revision=revision,
        arch=_arch(config, tensors),
        weights=_weights(tensors, progress),
        tokenizer=tokenizer,
    )


def read_base(
    directory: Path,
    *,
    name: str | None = None,
    revision: str | None = None,
    progress: Progress = no_progress,
) -> BaseFacts:
    """Read a base's identity and the shapes of its linear layers; see `identify_base`."""
    identity = identify_base(directory, name=name, revision=revision, progress=progress)
    return BaseFacts(identity, module_shapes(directory))


def read_config(directory: Path) -> JsonObject:
    """Read ``config.json`` of a base.

    Raises:
        NotFoundError: when there is none.
        InvalidPackageError: when it is not a JSON object.
    """
    path = _file(directory, CONFIG_FILE)
    return load_object(path.read_bytes(), what=str(path), max_bytes=_MAX_CONFIG_BYTES)


def module_shapes(directory: Path) -> dict[str, tuple[int, int]]:
    """Return (out, in) of every linear layer, a tied head included, without reading weights.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when it is not a base that can be read.
    """
    tied = decoder_config(read_config(directory))["tie_word_embeddings"]
    tensors = base_tensors(directory, tied=tied)
    shapes: dict[str, tuple[int, int]] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight") and len(tensor.info.shape) == 2 and name != EMBEDDING:
            rows, columns = tensor.info.shape
            shapes[name.removesuffix(".weight")] = (rows, columns)
    if tied and EMBEDDING in tensors:
        rows, columns = tensors[EMBEDDING].info.shape
        shapes["lm_head"] = (rows, columns)
    return shapes


def base_tensors(directory: Path, *, tied: bool) -> dict[str, StoredTensor]:
    """Return every tensor of a base, sorted by name; of a tied head only the embedding.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when a file or the index is malformed.
    """
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for path in weight_files(directory):
        table = read_table(path, limits=BASE_LIMITS)
        for name, info in table.tensors.items():
            if name in tensors:
                problems.append(f"{name}: in {tensors[name].path.name} and in {path.name}")
            tensors[name] = StoredTensor(path, info, table.data_offset + info.begin)
    problems += _index_problems(directory, tensors)
    if problems:
        raise InvalidPackageError(str(directory), problems[:20])
    skipped = {HEAD} if tied and EMBEDDING in tensors else set()
    kept = {n: t for n, t in tensors.items() if n not in skipped and not n.endswith(_DERIVED)}
    return dict(sorted(kept.items()))


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a base, as its index names them.

    Raises:
        NotFoundError: when there is none, or one of them is missing.
        InvalidPackageError: when the index is malformed.
    """
    if not (directory / INDEX_FILE).is_file():
        return [_file(directory, WEIGHTS_FILE)]
    names = sorted(set(_weight_map(directory).values()))
    odd = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if odd:
        problems = [f"{name[:80]!r} is not the name of a safetensors file" for name in odd]
        raise InvalidPackageError(str(directory / INDEX_FILE), problems)
    return [_file(directory, name) for name in names]


def _weight_map(directory: Path) -> dict[str, str]:
    path = directory / INDEX_FILE
    index = load_object(path.read_bytes(), what=str(path), max_bytes=_MAX_INDEX_BYTES)
    table = index.get("weight_map")
    if not isinstance(table, dict) or not table:
        raise InvalidPackageError(str(path), ["there is no weight_map"])
    if not all(isinstance(file, str) for file in table.values()):
        raise InvalidPackageError(str(path), ["weight_map names something that is no file"])
    return {name: str(file) for name, file in table.items()}


def _index_problems(directory: Path, tensors: Mapping[str, StoredTensor]) -> list[str]:
    """The index must name exactly the tensors that the files hold."""
    if not (directory / INDEX_FILE).is_file():
        return []
    expected = _weight_map(directory)
    actual = {name: tensor.path.name for name, tensor in tensors.items()}
    wrong = sorted(n for n in {*expected, *actual} if expected.get(n) != actual.get(n))
    return [
        f"{n}: in {actual.get(n, 'no file')}, the index says {expected.get(n, 'nothing')}"
        for n in wrong
    ]


def _file(directory: Path, name: str) -> Path:
    path = directory / name
    if path.is_file():
        return path
    if not directory.is_dir():
        raise NotFoundError(f"{directory}: no such directory")
    pickled = any(True for pattern in _PICKLES for _ in directory.glob(pattern))
    hint = "weights must be safetensors: pickles are never opened" if pickled else ""
    raise NotFoundError(f"{directory}: {name} is missing", hint=hint)


def _arch(config: JsonObject, tensors: Mapping[str, StoredTensor]) -> Digest:
    shapes = [[name, list(tensor.info.shape)] for name, tensor in tensors.items()]
    return Digest.of(canonical({"config": decoder_config(config), "tensors": shapes}))


def _weights(tensors: Mapping[str, StoredTensor], progress: Progress) -> Digest:
    """Hash every tensor, in threads: hashing and reading both leave the interpreter free."""
    digests: dict[str, str] = {}
    workers = min(_THREADS, os.cpu_count() or 1)
    with ThreadPoolExecutor(max_workers=workers) as pool:
        tasks = {pool.submit(_hash_tensor, tensor): name for name, tensor in tensors.items()}
        for task in as_completed(tasks):
            digests[tasks[task]] = task.result()
            progress(tensors[tasks[task]].size)
    rows: list[list[Any]] = [[n, t.info.dtype, digests[n]] for n, t in tensors.items()]
    return Digest.of(canonical(rows))


def _hash_tensor(tensor: StoredTensor) -> str:
    hasher = hashlib.sha256()
    _read_tensor(tensor, hasher.update)
    return hasher.hexdigest()


def _read_tensor(tensor: StoredTensor, use: Callable[[memoryview], None]) -> None:
    buffer = bytearray(min(CHUNK, tensor.size))
    view, left = memoryview(buffer), tensor.size
    with tensor.path.open("rb", buffering=0) as stream:
        stream.seek(tensor.offset)
        while left:
            count = stream.readinto(view[: min(len(view), left)])
            if not count:
                raise InvalidPackageError(str(tensor.path), ["the file is cut short"])
            use(view[:count])
            left -= count
