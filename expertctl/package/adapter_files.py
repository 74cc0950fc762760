"""Reading the two files of an adapter in a directory, and deciding what is packed of them.

A package holds only what the strict readers accept. So fields without effect are dropped from the
configuration, and embeddings equal to the base's from the weights; the rest is read as it is in a
package. Configuration and weights are checked together, and all problems are reported at once.

Files that are not what their names say (Git LFS pointers, web pages, pickles, empty files), mostly
because a download or a clone is incomplete, are recognised by their first bytes and never opened.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError, UsageError
from expertctl.package.adapter import (
    MAX_CONFIG_BYTES,
    AdapterConfig,
    AdapterSpec,
    SoftPrompt,
    SourceConfig,
    describe_wrapper,
    read_source_config,
    truncate_problems,
)
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.adapter_weights import (
    PackedWeights,
    choose_packed_weights,
    find_changed_embeddings,
    find_saved_embeddings,
)
from expertctl.package.base_model import BaseFacts, read_base_headers
from expertctl.package.directory import (
    CONFIG_PATH,
    PICKLES,
    WEIGHTS_PATH,
    SourceFile,
    find_adapter_file,
    list_source_names,
)
from expertctl.package.stored_tensor import StoredTensor
from expertctl.package.tensor_file import TensorTable, read_header
from expertctl.schema.strict_json import JsonObject, load_object

_Value = TypeVar("_Value")


class ProblemCollector:
    """The problems of one thing so far, and the first hint."""

    def __init__(self, what: str) -> None:
        """Start without problems."""
        self._what = what
        self.problems: list[str] = []
        self._hints: list[str] = []

    def run_step(self, step: Callable[[], _Value]) -> _Value | None:
        """Run a step and collect its problems; those of another thing get its name as a prefix."""
        try:
            return step()
        except InvalidPackageError as error:
            prefix = "" if error.what == self._what else f"{error.what}: "
            self.problems += [f"{prefix}{problem}" for problem in error.problems]
            self._hints.append(error.hint)
        except ExpertError as error:
            self.problems.append(error.message.removeprefix(f"{self._what}: "))
            self._hints.append(error.hint)
        return None

    def raise_problems(self) -> None:
        """Report all problems at once.

        Raises:
            InvalidPackageError: when there is any problem.
        """
        if self.problems:
            hint = next((hint for hint in self._hints if hint), "")
            raise InvalidPackageError(self._what, dict.fromkeys(self.problems), hint=hint)


HEAD_BYTES = 512
_LFS = b"version https://git-lfs.github.com/spec/"
_HTML = (b"<!doctype html", b"<html")
_PICKLE_HINT = (
    "convert it on the machine that trained it: load it with PEFT, then\n"
    "model.save_pretrained(DIR, safe_serialization=True)"
)
_SANDBOX_HINT = (
    "or let `expertctl build --allow-pickle-in-sandbox DIR` read nothing but its tensors"
)


@dataclass(frozen=True, slots=True)
class DetectedKind:
    """What a file is instead of what its name says, and a hint."""

    problem: str
    hint: str


def detect_other_kind(head: bytes, *, size: int) -> DetectedKind | None:
    """Return what a weights or JSON file really is, if its first bytes show something else."""
    if size == 0:
        return DetectedKind("the file is empty", "download or copy it again")
    if head.startswith(_LFS):
        return DetectedKind(
            "a Git LFS pointer, not the file itself",
            "run `git lfs pull` in its repository, or download the file again",
        )
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if start.startswith(_HTML):
        return DetectedKind(
            "an HTML page, not the file itself",
            "the download brought a web page: log in, or use the file's raw address",
        )
    if _is_pickle(head):
        return DetectedKind("a pickle, and pickles are never opened", _PICKLE_HINT)
    if head.startswith(b"GGUF"):
        return DetectedKind(
            "a GGUF file", "build from the directory that PEFT saved the adapter to"
        )
    return None


def _is_pickle(head: bytes) -> bool:
    """Recognise a pickle of protocol 2 to 5, and the zip archive that torch.save writes."""
    if head.startswith(b"PK\x03\x04"):
        return True
    return len(head) > 1 and head[0] == 0x80 and 2 <= head[1] <= 5 and not _is_tensor_table(head)


def _is_tensor_table(head: bytes) -> bool:
    """Recognise a safetensors header: a length below 4 GiB in eight bytes, then a JSON object.

    The length may begin with the two bytes of a pickle, as that of 66,176 bytes does.
    """
    return head[4:9] == bytes(4) + b"{"


DIRECTORY_HINT = "name the directory that PEFT saved the adapter to"
_ENCODER = "encoder"
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)
_MAX_LISTED = 10
_MAX_VISITED = 2000
_MAX_LEVELS = 4
"""How many folders below a directory are searched for adapters, and how deep."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The two files of one adapter, parsed."""

    config_path: str
    weights_path: str
    config: AdapterConfig
    packed_config: bytes | None
    """The configuration as packed; ``None``: the file as it is."""
    weights: PackedWeights
    spec: AdapterSpec
    """The spec of the packed files."""
    notes: tuple[str, ...]
    """What was dropped from the files."""

    @property
    def packed_sizes(self) -> dict[str, int]:
        """File name → size in bytes of both files as packed."""
        config = {} if self.packed_config is None else {self.config_path: len(self.packed_config)}
        return {**config, self.weights_path: self.weights.table.file_size}


def read_adapter(
    directory: Path,
    *,
    weights: str,
    config: str,
    base: BaseFacts | None = None,
    converted: Path | None = None,
) -> AdapterFiles:
    """Read the configuration and the tensor table of an adapter.

    Embeddings saved with the adapter are compared with those of ``base``. Files in ``converted``
    take the place of those in the directory.

    Raises:
        NotFoundError: when the directory or a file is missing.
        InvalidPackageError: with every problem of both files; each line begins with the file name.
    """
    config_file, weights_file = _find_files(
        directory, config=config, weights=weights, converted=converted
    )
    findings = ProblemCollector(str(directory))
    settings = findings.run_step(lambda: _read_config(config_file))
    table = findings.run_step(lambda: _read_table(weights_file))
    packed = None
    if table is not None:
        saved = find_saved_embeddings(table)
        problems = _check_embeddings(weights_file, table, saved, base)
        findings.problems += [f"{weights}: {problem}" for problem in problems]
        packed = choose_packed_weights(weights_file, table, frozenset(saved))
    if settings is None and packed is not None:
        findings.problems += [
            f"{weights}: {problem}" for problem in _find_wrapped_names(packed.table)
        ]
    if settings is None or packed is None:
        findings.raise_problems()
    assert settings is not None, "problems were raised"
    assert packed is not None, "problems were raised"
    spec = findings.run_step(
        lambda: build_adapter_spec(settings.config, packed.table, what=weights)
    )
    if spec is not None:
        findings.problems += [f"{weights}: {problem}" for problem in _find_encoder_modules(spec)]
    findings.raise_problems()
    assert spec is not None, "problems were raised"
    notes = [f"{config}: {note}" for note in settings.notes]
    notes += [f"{weights}: {note}" for note in _describe_weights(packed, saved)]
    return AdapterFiles(
        config, weights, settings.config, settings.packed_bytes, packed, spec, tuple(notes)
    )


def read_base_label(directory: Path, config: str, converted: Path | None = None) -> str | None:
    """Return the base name in a configuration; ``None`` if it cannot be read."""
    try:
        exists = directory.is_dir()
        found = find_adapter_file(directory, config, converted) if exists else None
        name = _load_object(found).get("base_model_name_or_path") if found is not None else None
    except InvalidPackageError:
        return None  # `read_adapter` reports the problem
    return name if isinstance(name, str) else None


def require_directory(directory: Path) -> None:
    """Require a directory.

    Raises:
        UsageError: when it is a file.
        NotFoundError: when it does not exist.
    """
    if directory.is_dir():
        return
    if not directory.exists():
        raise NotFoundError(f"{directory}: no such directory", hint=DIRECTORY_HINT)
    hint = DIRECTORY_HINT
    if directory.name.endswith(".expert"):
        hint = f"that is a package: `expertctl install {shlex.quote(str(directory))}`"
    elif directory.name in {CONFIG_PATH, WEIGHTS_PATH}:
        hint = f"`expertctl build {shlex.quote(str(directory.parent))}`"
    raise UsageError(f"{directory} is a file, not a directory", hint=hint)


def require_adapter(directory: Path) -> None:
    """Require that a directory contains something like an adapter of any kind.

    Raises:
        NotFoundError: naming the adapters in folders below, or the base model found instead.
    """
    names = list_source_names(directory)
    if {CONFIG_PATH, WEIGHTS_PATH, *PICKLES}.intersection(names):
        return
    if find_adapters_below(directory):
        raise _missing_file_error(directory, CONFIG_PATH)
    hint = DIRECTORY_HINT
    if (directory / "config.json").is_file():
        hint = f"that looks like a base model: `expertctl base add {directory}`"
    raise NotFoundError(
        f"{directory}: there is no adapter here: {CONFIG_PATH} is missing", hint=hint
    )


def find_adapters_below(directory: Path) -> list[str]:
    """Return the folders below that contain an adapter, in natural order.

    The search is bounded in depth and number of folders, and does not follow links to folders.
    Names with characters special to a shell are skipped, because hints show them in commands.
    """
    found: list[str] = []
    level = [directory]
    left = _MAX_VISITED
    for _ in range(_MAX_LEVELS):
        below = list(islice((path for each in level for path in _list_plain_folders(each)), left))
        left -= len(below)
        adapters = {path for path in below if (path / CONFIG_PATH).is_file()}
        found += [str(path.relative_to(directory)) for path in adapters]
        level = [path for path in below if path not in adapters]
    return sorted(found, key=_natural_sort_key)


def _list_plain_folders(directory: Path) -> list[Path]:
    try:
        entries = sorted(directory.iterdir())
    except OSError:
        return []
    return [
        p for p in entries if _PLAIN_NAME.fullmatch(p.name) and p.is_dir() and not p.is_symlink()
    ]


def _natural_sort_key(name: str) -> list[tuple[int, int, str]]:
    """Return a sort key with numeric order: checkpoint-90 before checkpoint-500."""
    parts = re.findall(r"[0-9]+|[^0-9]+", name)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def _find_files(
    directory: Path, *, config: str, weights: str, converted: Path | None
) -> tuple[SourceFile, SourceFile]:
    """Find both files, or raise an error that says what is there instead."""
    require_directory(directory)
    findings = ProblemCollector(str(directory))
    found = [
        findings.run_step(partial(find_adapter_file, directory, name, converted))
        for name in (config, weights)
    ]
    findings.raise_problems()
    config_file, weights_file = found
    if config_file is not None and weights_file is not None:
        return config_file, weights_file
    names = list_source_names(directory)
    if weights_file is None and (pickles := [name for name in PICKLES if name in names]):
        problem = f"{pickles[0]} is a pickle, and pickles are never opened"
        hint = f"{_PICKLE_HINT}\n{_SANDBOX_HINT}"
        raise InvalidPackageError(str(directory), [problem], hint=hint)
    raise _missing_file_error(directory, config if config_file is None else weights)


def _missing_file_error(directory: Path, name: str) -> NotFoundError:
    below = find_adapters_below(directory)
    if not below:
        return NotFoundError(f"{directory}: {name} is missing", hint=DIRECTORY_HINT)
    shown = ", ".join(below[-_MAX_LISTED:])
    adapters = "adapters below it"
    if len(below) > _MAX_LISTED:
        adapters = f"{len(below)} adapters below it, the last"
    return NotFoundError(
        f"{directory}: {name} is missing, but there are {adapters}: {shown}",
        hint=f"build one of them: expertctl build {directory / below[-1]}",
    )


def _load_object(config: SourceFile) -> JsonObject:
    data = config.read(max_bytes=MAX_CONFIG_BYTES)
    return load_object(data, what=config.name, max_bytes=MAX_CONFIG_BYTES)


def _read_config(source: SourceFile) -> SourceConfig:
    data = source.read(max_bytes=MAX_CONFIG_BYTES)
    found = detect_other_kind(data[:HEAD_BYTES], size=len(data))
    if found is not None:
        raise _other_kind_error(source.name, found)
    return read_source_config(data, what=source.name)


def _read_table(source: SourceFile) -> TensorTable:
    with source.open() as stream:
        found = detect_other_kind(stream.read(HEAD_BYTES), size=source.size)
        if found is not None:
            raise _other_kind_error(source.name, found)
        stream.seek(0)
        return read_header(stream, file_size=source.size, what=source.name)


def _other_kind_error(what: str, found: DetectedKind) -> InvalidPackageError:
    return InvalidPackageError(what, [found.problem], hint=found.hint)


def _find_wrapped_names(table: TensorTable) -> list[str]:
    """Return problems of tensor names that do not depend on the configuration."""
    found = {name: why for name in table.tensors if (why := describe_wrapper(name)) is not None}
    return truncate_problems(f"{name}: {why}" for name, why in found.items())


def _find_encoder_modules(spec: AdapterSpec) -> list[str]:
    """Return modules that belong to an encoder, which no causal language model has."""
    modules = [part.module for part in spec.parts if not isinstance(part, SoftPrompt)]
    found = [module for module in modules if _ENCODER in module.split(".")]
    return truncate_problems(
        f"{m}: part of an encoder; only causal models are supported" for m in found
    )


def _check_embeddings(
    source: SourceFile, table: TensorTable, saved: dict[str, str], base: BaseFacts | None
) -> list[str]:
    if not saved:
        return []
    return truncate_problems(
        find_changed_embeddings(source, table, saved, _read_tensors_if_present(base))
    )


def _read_tensors_if_present(base: BaseFacts | None) -> Mapping[str, StoredTensor] | None:
    """Return the tensors of a base that is present and readable."""
    if base is None or base.directory is None:
        return None
    try:
        return read_base_headers(base.directory).tensors
    except ExpertError:
        return None


def _describe_weights(packed: PackedWeights, saved: dict[str, str]) -> list[str]:
    notes = []
    if saved:
        names = ", ".join(sorted(set(saved.values())))
        notes.append(f"left out of the package, because they are those of the base: {names}")
    if packed.is_widened:
        notes.append("tensors of several types are packed as float32, which holds each exactly")
    return notes
