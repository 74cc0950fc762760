"""The tensors of a base as its safetensors files hold them, without torch.

What a base must hold follows from its configuration (`ModelConfig.tensor_shapes`). It is checked
here, from the headers alone, both for naming a base and for loading it.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.package.expert_layouts import Source, canonical_sources
from expertctl.package.experts_config import ExpertsConfig
from expertctl.package.model_config import EMBEDDING, HEAD, ModelConfig
from expertctl.package.tensor_file import BASE_LIMITS, TensorInfo, read_table
from expertctl.schema.strict_json import load_object

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_MAX_INDEX_BYTES = 64 << 20
_SHOWN = 20
_DTYPES = ("F32", "F16", "BF16")
_MASKS = ("BOOL", "U8")
"""What older files hold besides weights: attention masks as buffers."""
_DERIVED = ".rotary_emb.inv_freq"  # old files hold it, it follows from the configuration
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


@dataclass(frozen=True, slots=True)
class FileState:
    """What identifies an unchanged file, without reading a byte of it."""

    inode: int
    size: int
    modified_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> "FileState":
        """Return the state that a stat tells."""
        return cls(found.st_ino, found.st_size, found.st_mtime_ns)


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a base: its file, its type and shape, and the byte where it begins.

    In the file it is the tensor ``stored``, or some rows of that one, from ``row`` on.
    """

    path: Path
    info: TensorInfo
    offset: int
    stored: str
    row: int = 0
    file: FileState | None = None
    """What the file was like when its table was read."""

    @property
    def size(self) -> int:
        """How many bytes the tensor has."""
        return self.info.end - self.info.begin

    def open(self) -> FileIO:
        """Open its file; where a base does not fit into memory, it is read long after its table.

        Raises:
            InvalidPackageError: when the file was replaced or written since.
            OSError: when it cannot be opened.
        """
        stream = FileIO(self.path)
        if self.file is not None and FileState.of(os.fstat(stream.fileno())) != self.file:
            stream.close()
            changed = "it was changed while the base is in memory; load the base again"
            raise InvalidPackageError(str(self.path), [changed])
        return stream


def base_tensors(directory: Path, config: ModelConfig) -> dict[str, StoredTensor]:
    """Return every tensor that a configuration names, and a tied head where it is stored too.

    Names are those of the configuration, whatever the files call a tensor or keep it in.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when a file or the index is malformed, or when tensors are missing,
            unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float.
    """
    found = _read_tables(directory)
    tensors = {name: found[name] for name in found if not name.endswith(_DERIVED)}
    problems: list[str] = []
    if config.experts is not None:
        tensors = _canonical(tensors, config, config.experts, problems)
    problems = problems[:_SHOWN] or _problems(tensors, config)
    if problems:
        raise InvalidPackageError(str(directory), problems)
    _require_floats(directory, tensors)
    return tensors


def foreign_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a base whose configuration names none, sorted by name.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when a file or the index is malformed.
        IncompatibleError: for weights that are not floats.
    """
    found = _read_tables(directory)
    tensors = {name: found[name] for name in sorted(found) if not name.endswith(_DERIVED)}
    weights = {n: t for n, t in tensors.items() if not _is_mask(n, t)}
    _require_floats(directory, weights)
    return tensors


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors files of a base, as its index names them.

    Raises:
        NotFoundError: when there is none, or one of them is missing.
        InvalidPackageError: when the index is malformed.
    """
    if not (directory / INDEX_FILE).is_file():
        return [find_file(directory, WEIGHTS_FILE)]
    names = sorted(set(_weight_map(directory).values()))
    odd = [name for name in names if Path(name).name != name or not name.endswith(".safetensors")]
    if odd:
        problems = [f"{name[:80]!r} is not the name of a safetensors file" for name in odd]
        raise InvalidPackageError(str(directory / INDEX_FILE), problems)
    return [find_file(directory, name) for name in names]


def find_file(directory: Path, name: str) -> Path:
    """Return the path of a file that a base must have.

    Raises:
        NotFoundError: when it is missing; the hint says so where pickles lie instead.
    """
    path = directory / name
    if path.is_file():
        return path
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: no such directory", hint="name the one that config.json is in"
        )
    pickled = any(True for pattern in _PICKLES for _ in directory.glob(pattern))
    hint = "weights must be safetensors: pickles are never opened" if pickled else ""
    raise NotFoundError(f"{directory}: {name} is missing", hint=hint)


def _require_floats(directory: Path, tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.info.dtype not in _DTYPES:
            raise IncompatibleError(
                f"{directory}: tensor {name} is {tensor.info.dtype}",
                hint="a base must be in float32, float16 or bfloat16",
            )


def _is_mask(name: str, tensor: StoredTensor) -> bool:
    return tensor.info.dtype in _MASKS and not name.endswith(".weight")


def _read_tables(directory: Path) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    problems: list[str] = []
    for path in weight_files(directory):
        state = FileState.of(path.stat())
        table = read_table(path, limits=BASE_LIMITS)
        for name, info in table.tensors.items():
            if name in tensors:
                problems.append(f"{name}: in {tensors[name].path.name} and in {path.name}")
            offset = table.data_offset + info.begin
            tensors[name] = StoredTensor(path, info, offset, name, file=state)
    problems += _index_problems(directory, tensors)
    if problems:
        raise InvalidPackageError(str(directory), problems[:_SHOWN])
    return tensors


def _canonical(
    found: Mapping[str, StoredTensor],
    config: ModelConfig,
    experts: ExpertsConfig,
    problems: list[str],
) -> dict[str, StoredTensor]:
    infos = {name: tensor.info for name, tensor in found.items()}
    sources = canonical_sources(infos, experts, hidden=config.hidden_size, problems=problems)
    return {name: _part(found[source.stored], source) for name, source in sources.items()}


def _part(whole: StoredTensor, source: Source) -> StoredTensor:
    offset = whole.offset + source.info.begin - whole.info.begin
    return StoredTensor(whole.path, source.info, offset, source.stored, source.row, whole.file)


def _problems(found: Mapping[str, StoredTensor], config: ModelConfig) -> list[str]:
    needed = config.tensor_shapes()
    wanted = {**needed, HEAD: needed[EMBEDDING]}  # a tied head may be stored as well
    problems = _listed("missing tensor", sorted(needed.keys() - found.keys()))
    problems += _listed("unexpected tensor", sorted(found.keys() - wanted.keys()))
    wrong = [
        f"{name} is {list(found[name].info.shape)}, {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in found and found[name].info.shape != shape
    ]
    return problems + _listed("tensor", wrong)


def _listed(what: str, names: list[str]) -> list[str]:
    lines = [f"{what} {name[:200]}" for name in names[:_SHOWN]]
    return [*lines, f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else lines


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
