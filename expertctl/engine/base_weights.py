"""The tensors of a base model: read from safetensors, exactly the ones its configuration names.

Files may be mapped into memory, they are never written to, and nothing here or in the decoder
changes a tensor. Matrices get the dtype of the run; norms and biases are always float32.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from expertctl.digest import Progress, no_progress
from expertctl.engine.architecture import ModelConfig
from expertctl.errors import IncompatibleError, InvalidPackageError, NotFoundError
from expertctl.schema.strict_json import load_object

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
_MAX_INDEX_BYTES = 32 << 20
_SHOWN = 20
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_DERIVED = ".rotary_emb.inv_freq"  # old files hold it, it follows from the configuration


@dataclass(frozen=True, slots=True, eq=False)
class BaseWeights:
    """Every tensor of a base by name; a tied head is not there, the embedding serves."""

    tensors: dict[str, Tensor]
    dtype: torch.dtype
    device: torch.device
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def head(self) -> Tensor:
        """Return the output matrix, tied or not."""
        return self.tensors.get(HEAD, self.tensors[EMBEDDING])


def load_base(
    directory: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress = no_progress,
) -> BaseWeights:
    """Read a base; ``progress`` counts the bytes of tensors.

    Raises:
        NotFoundError: when a file is missing.
        InvalidPackageError: when tensors are missing, unexpected or of another shape.
        IncompatibleError: for a dtype that is not a float, or a tied head that is another matrix.
    """
    wanted = config.tensor_shapes()
    found: dict[str, Tensor] = {}
    with torch.inference_mode():
        for name, tensor in _read(directory):
            found[name] = tensor
        _check_tensors(directory, found, wanted)
        if config.tied:
            _drop_tied_head(directory, found)
        warnings = _warnings(found, dtype)
        for name in wanted:
            found[name] = _converted(found[name], dtype, torch.device(device))
            progress(found[name].nbytes)
    return BaseWeights({n: found[n] for n in wanted}, dtype, torch.device(device), warnings)


def _read(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of every file; with an index, hold the files to it."""
    index = directory / INDEX_FILE
    placed = _weight_map(index) if index.is_file() else None
    files = [WEIGHTS_FILE] if placed is None else sorted(set(placed.values()))
    seen: dict[str, str] = {}
    for file in files:
        for name, tensor in _read_file(directory / file):
            if placed is not None and placed.get(name) != file:
                raise InvalidPackageError(str(index), [f"tensor {name!r} is in {file} unlisted"])
            seen[name] = file
            yield name, tensor
    if placed is not None and (absent := sorted(placed.keys() - seen.keys())):
        raise InvalidPackageError(str(index), _listed("lists, but no file holds", absent))


def _read_file(path: Path) -> Iterator[tuple[str, Tensor]]:
    if not path.is_file():
        raise NotFoundError(
            f"{path} is missing", hint="a base is a Hugging Face directory with safetensors"
        )
    try:
        with _open(path) as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise InvalidPackageError(
            str(path), [f"not a readable safetensors file: {error}"]
        ) from error


def _open(path: Path) -> Any:
    return safe_open(path, framework="pt", device="cpu")


def _weight_map(index: Path) -> dict[str, str]:
    document = load_object(index.read_bytes(), what=str(index), max_bytes=_MAX_INDEX_BYTES)
    weight_map = document.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InvalidPackageError(str(index), ["weight_map is missing or empty"])
    placed = {name: str(file) for name, file in weight_map.items()}
    outside = sorted(
        {f for f in placed.values() if f != Path(f).name or not f.endswith(".safetensors")}
    )
    if outside:
        raise InvalidPackageError(
            str(index), _listed("names a file outside the directory", outside)
        )
    return placed


def _check_tensors(
    directory: Path, found: dict[str, Tensor], wanted: dict[str, tuple[int, ...]]
) -> None:
    derived = {name for name in found if name.endswith(_DERIVED)}
    unexpected = found.keys() - wanted.keys() - derived
    if EMBEDDING in found and HEAD not in wanted:
        unexpected -= {HEAD}
    problems = _listed("missing tensor", sorted(wanted.keys() - found.keys()))
    problems += _listed("unexpected tensor", sorted(unexpected))
    problems += [
        f"tensor {name} is {list(found[name].shape)}, {list(shape)} by config.json"
        for name, shape in wanted.items()
        if name in found and tuple(found[name].shape) != shape
    ][:_SHOWN]
    if problems:
        raise InvalidPackageError(str(directory), problems)
    for name in wanted:
        if found[name].dtype not in _DTYPES:
            raise IncompatibleError(
                f"{directory}: tensor {name} is {_name_of(found[name].dtype)}",
                hint="a base must be in float32, float16 or bfloat16",
            )


def _drop_tied_head(directory: Path, found: dict[str, Tensor]) -> None:
    """Some files hold a tied head as well; it counts once and must be the same matrix."""
    head = found.pop(HEAD, None)
    if head is not None and not torch.equal(head, found[EMBEDDING]):
        raise IncompatibleError(
            f"{directory}: config.json ties the head to the embedding, but {HEAD} differs from it",
            hint="set tie_word_embeddings to false if the head is meant to be its own matrix",
        )


def _warnings(found: dict[str, Tensor], dtype: torch.dtype) -> tuple[str, ...]:
    rounded = {_name_of(t.dtype) for t in found.values() if t.ndim == 2 and _loses(t.dtype, dtype)}
    return tuple(
        f"base weights stored as {name} are rounded to {_name_of(dtype)}"
        for name in sorted(rounded)
    )


def _loses(stored: torch.dtype, wanted: torch.dtype) -> bool:
    return wanted not in (stored, torch.float32)


def _converted(tensor: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    return tensor.to(device, dtype if tensor.ndim == 2 else torch.float32)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _listed(what: str, names: list[str]) -> list[str]:
    lines = [f"{what} {name[:200]}" for name in names[:_SHOWN]]
    return [*lines, f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else lines
