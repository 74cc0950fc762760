"""The two files of an adapter in a directory: what they mean, and what will be packed of them.

A package holds only what the strict readers take. So fields without an effect are left out of the
configuration, and embeddings that are the base's own out of the weights; what is left is read as a
package is. The configuration and the weights are checked together.
"""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError, UsageError
from expertctl.package.adapter import AdapterSpec, SoftPrompt, shortened, wrapped
from expertctl.package.adapter_config import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    FoundConfig,
    find_config,
)
from expertctl.package.adapter_spec import adapter_spec
from expertctl.package.adapter_weights import PackedWeights, packed_weights
from expertctl.package.base_model import BaseFacts, read_headers
from expertctl.package.base_tensors import StoredTensor
from expertctl.package.file_kinds import HEAD_BYTES, OtherKind, mlx_folder, other_kind, pickled
from expertctl.package.findings import Findings
from expertctl.package.saved_embeddings import changed_embeddings, saved_embeddings
from expertctl.package.source_files import SourceFile, source_file, source_names
from expertctl.package.tensor_file import TensorTable, read_header
from expertctl.schema.strict_json import JsonObject, load_object

WEIGHTS_PATH = "adapter_model.safetensors"
CONFIG_PATH = "adapter_config.json"
SAVED_HINT = "name the directory that PEFT saved the adapter to"
_PICKLES = ("adapter_model.bin", "adapter_model.pt")
_ENCODER = "encoder"
_PLAIN = re.compile(r"\w[\w.-]*", re.ASCII)
_MAX_LISTED = 10
_MAX_LOOKED_AT = 2000
_LEVELS = 4
"""How many folders below a directory, and how deep, are searched for adapters."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """One adapter's two files, read."""

    config_path: str
    weights_path: str
    config: AdapterConfig
    packed_config: bytes | None
    """What is packed of the configuration; ``None``: the file itself."""
    weights: PackedWeights
    spec: AdapterSpec
    """What the packed files mean."""
    notes: tuple[str, ...]
    """What is left out of them."""

    @property
    def packed_sizes(self) -> dict[str, int]:
        """The bytes of both files in the package, by their names."""
        config = {} if self.packed_config is None else {self.config_path: len(self.packed_config)}
        return {**config, self.weights_path: self.weights.table.file_size}


def read_adapter(
    directory: Path, *, weights: str, config: str, base: BaseFacts | None = None
) -> AdapterFiles:
    """Read an adapter's configuration and table of tensors.

    Embeddings that were saved beside it are compared with those of ``base``.

    Raises:
        NotFoundError: when the directory or a file is missing.
        InvalidPackageError: with every problem of both files; each line begins with its file.
    """
    config_file, weights_file = _find_files(directory, config=config, weights=weights)
    findings = Findings(str(directory))
    settings = findings.of(lambda: _read_config(config_file))
    table = findings.of(lambda: _read_table(weights_file))
    packed = None
    if table is not None:
        saved = saved_embeddings(table)
        problems = _compare_embeddings(weights_file, table, saved, base)
        findings.problems += [f"{weights}: {problem}" for problem in problems]
        packed = packed_weights(weights_file, table, frozenset(saved))
    if settings is None and packed is not None:
        findings.problems += [f"{weights}: {problem}" for problem in _wrappers(packed.table)]
    if settings is None or packed is None:
        findings.raise_if_any()
    assert settings is not None, "problems were raised"
    assert packed is not None, "problems were raised"
    spec = findings.of(lambda: adapter_spec(settings.config, packed.table, what=weights))
    if spec is not None:
        findings.problems += [f"{weights}: {problem}" for problem in _encoders(spec)]
    findings.raise_if_any()
    assert spec is not None, "problems were raised"
    notes = [f"{config}: {note}" for note in settings.notes]
    notes += [f"{weights}: {note}" for note in _weights_notes(packed, saved)]
    return AdapterFiles(
        config, weights, settings.config, settings.packed, packed, spec, tuple(notes)
    )


def read_label(directory: Path, config: str) -> str | None:
    """Return what a configuration calls its base; ``None`` where that cannot be read."""
    try:
        found = source_file(directory, config) if directory.is_dir() else None
        name = _object_in(found).get("base_model_name_or_path") if found is not None else None
    except InvalidPackageError:
        return None  # reading the adapter says what is wrong with it
    return name if isinstance(name, str) else None


def demand_directory(directory: Path) -> None:
    """Refuse what is no directory.

    Raises:
        UsageError: when it is a file.
        NotFoundError: when nothing is there.
    """
    if directory.is_dir():
        return
    if not directory.exists():
        raise NotFoundError(f"{directory}: no such directory", hint=SAVED_HINT)
    hint = SAVED_HINT
    if directory.name.endswith(".expert"):
        hint = f"that is a package: `expertctl install {shlex.quote(str(directory))}`"
    elif directory.name in {CONFIG_PATH, WEIGHTS_PATH}:
        hint = f"`expertctl build {shlex.quote(str(directory.parent))}`"
    raise UsageError(f"{directory} is a file, and a directory is wanted", hint=hint)


def demand_adapter(directory: Path) -> None:
    """Refuse a directory in which nothing looks like an adapter of any kind.

    Raises:
        NotFoundError: naming the adapters below it, or the base model that it holds instead.
    """
    names = source_names(directory)
    if mlx_folder(names, None) or {CONFIG_PATH, WEIGHTS_PATH, *_PICKLES}.intersection(names):
        return
    if find_adapters_below(directory):
        raise _missing(directory, CONFIG_PATH)
    hint = SAVED_HINT
    if (directory / "config.json").is_file():
        hint = f"that looks like a base model: `expertctl base add {directory}`"
    raise NotFoundError(f"{directory}: there is no adapter here, no {CONFIG_PATH}", hint=hint)


def find_adapters_below(directory: Path) -> list[str]:
    """Return the folders below that hold an adapter, in the order of their numbers and names.

    A few levels of a bounded number of folders are looked at, and links to folders are not
    followed. Names that mean something to a shell are passed over, because hints show them in
    commands.
    """
    found: list[str] = []
    level = [directory]
    left = _MAX_LOOKED_AT
    for _ in range(_LEVELS):
        below = list(islice((path for each in level for path in _plain_folders(each)), left))
        left -= len(below)
        adapters = {path for path in below if (path / CONFIG_PATH).is_file()}
        found += [str(path.relative_to(directory)) for path in adapters]
        level = [path for path in below if path not in adapters]
    return sorted(found, key=_natural)


def _plain_folders(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [p for p in entries if _PLAIN.fullmatch(p.name) and p.is_dir() and not p.is_symlink()]


def _natural(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key in which numbers count as such: checkpoint-90 is before checkpoint-500."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _find_files(directory: Path, *, config: str, weights: str) -> tuple[SourceFile, SourceFile]:
    """Find both files, or say what lies there instead."""
    demand_directory(directory)
    findings = Findings(str(directory))
    found = [findings.of(lambda n=name: source_file(directory, n)) for name in (config, weights)]  # type: ignore[misc]  # defaults bind the loop's values
    findings.raise_if_any()
    config_file, weights_file = found
    if config_file is not None and weights_file is not None:
        _refuse_mlx(directory, config_file)
        return config_file, weights_file
    names = source_names(directory)
    if config_file is not None:
        _refuse_mlx(directory, config_file)
    elif found_kind := mlx_folder(names, None):
        raise _refusal(str(directory), found_kind)
    if weights_file is None and (pickles := [name for name in _PICKLES if name in names]):
        raise _refusal(str(directory), pickled(pickles[0]))
    raise _missing(directory, config if config_file is None else weights)


def _missing(directory: Path, name: str) -> NotFoundError:
    below = find_adapters_below(directory)
    if not below:
        return NotFoundError(f"{directory}: {name} is missing", hint=SAVED_HINT)
    shown = ", ".join(below[-_MAX_LISTED:])
    all_of_them = "adapters below it"
    if len(below) > _MAX_LISTED:
        all_of_them = f"{len(below)} adapters below it, the last"
    return NotFoundError(
        f"{directory}: {name} is missing, but there are {all_of_them}: {shown}",
        hint=f"build one of them: expertctl build {directory / below[-1]}",
    )


def _refuse_mlx(directory: Path, config: SourceFile) -> None:
    try:
        document = _object_in(config)
    except InvalidPackageError:
        return  # reading the configuration says what is wrong with it
    found = mlx_folder(source_names(directory), document)
    if found is not None:
        raise _refusal(str(directory), found)


def _object_in(config: SourceFile) -> JsonObject:
    data = config.read(max_bytes=MAX_CONFIG_BYTES)
    return load_object(data, what=config.name, max_bytes=MAX_CONFIG_BYTES)


def _read_config(source: SourceFile) -> FoundConfig:
    data = source.read(max_bytes=MAX_CONFIG_BYTES)
    found = other_kind(data[:HEAD_BYTES], size=len(data))
    if found is not None:
        raise _refusal(source.name, found)
    return find_config(data, what=source.name)


def _read_table(source: SourceFile) -> TensorTable:
    with source.open() as stream:
        found = other_kind(stream.read(HEAD_BYTES), size=source.size)
        if found is not None:
            raise _refusal(source.name, found)
        stream.seek(0)
        return read_header(stream, file_size=source.size, what=source.name)


def _refusal(what: str, found: OtherKind) -> InvalidPackageError:
    return InvalidPackageError(what, [found.problem], hint=found.hint)


def _wrappers(table: TensorTable) -> list[str]:
    """Return what is wrong with names of tensors whatever the configuration says."""
    found = {name: why for name in table.tensors if (why := wrapped(name)) is not None}
    return shortened(f"{name}: {why}" for name, why in found.items())


def _encoders(spec: AdapterSpec) -> list[str]:
    """Say it where an adapter changes an encoder, which no causal language model has."""
    modules = [part.module for part in spec.parts if not isinstance(part, SoftPrompt)]
    found = [module for module in modules if _ENCODER in module.split(".")]
    return shortened(f"{m}: part of an encoder; only causal models are supported" for m in found)


def _compare_embeddings(
    source: SourceFile, table: TensorTable, saved: dict[str, str], base: BaseFacts | None
) -> list[str]:
    if not saved:
        return []
    return shortened(changed_embeddings(source, table, saved, _tensors_of(base)))


def _tensors_of(base: BaseFacts | None) -> Mapping[str, StoredTensor] | None:
    """Return the tensors of a base that is here and can be read."""
    if base is None or base.directory is None:
        return None
    try:
        return read_headers(base.directory).tensors
    except ExpertError:
        return None


def _weights_notes(packed: PackedWeights, saved: dict[str, str]) -> list[str]:
    notes = []
    if saved:
        names = ", ".join(sorted(set(saved.values())))
        notes.append(f"left out of the package, because they are those of the base: {names}")
    if packed.is_widened:
        notes.append("tensors of several types are packed as float32, which holds each exactly")
    return notes
