"""Building a package: from an adapter directory to a ``.expert`` file, signed or not.

Everything is checked before anything is written, and all problems are reported at once. Only known
files are packed: the manifest, the files it names, the model card and licences.

`add_evaluation` adds a measured result to a planned build: only the manifest changes, before
anything is signed.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, FileDigest, Progress, ignore_progress
from expertctl.errors import InvalidPackageError, UsageError
from expertctl.package.adapter_files import (
    AdapterFiles,
    ProblemCollector,
    read_adapter,
    require_adapter,
    require_directory,
)
from expertctl.package.adapter_weights import (
    describe_no_effect,
    find_extremes,
    find_not_finite,
    find_peaks,
)
from expertctl.package.base_model import BaseFacts
from expertctl.package.compatibility import check_expert_base, check_tensors
from expertctl.package.directory import (
    SourceFile,
    compare_companions,
    find_adapter_file,
    find_document_problem,
    find_source_file,
    is_empty_card,
    list_source_names,
)
from expertctl.package.draft import (
    ManifestOverrides,
    complete_manifest,
    encode_manifest,
    find_base_label,
    find_base_problems,
    list_named_adapters,
    read_draft,
)
from expertctl.package.frame import FASTEST_LEVEL
from expertctl.package.layout import (
    Blobs,
    compute_content_digest,
    describe_name_problem,
    is_document,
)
from expertctl.package.read import find_entry_problems, find_file_set_problems, list_named_files
from expertctl.package.write import add_document, build_signed_layout, require_folder, write_package
from expertctl.schema.manifest import (
    MANIFEST_PATH,
    MAX_MANIFEST_BYTES,
    SIGNATURE_PATH,
    Evaluation,
    Manifest,
    build_manifest,
)
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey

_PLACEHOLDER_BASE: JsonObject = {
    "kind": "lora",
    "path": "adapter_model.safetensors",
    "config": "adapter_config.json",
    "rank": 1,
    "dtype": "float32",
    "tensors": 1,
}
"""Stands for an adapter that could not be read, to find other problems of a manifest."""


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A package that may be written: its manifest and all other files, checked."""

    directory: Path
    manifest: Manifest
    document: bytes
    """The bytes of ``expert.json`` as packed."""
    files: tuple[SourceFile, ...]
    """The other files, sorted by name."""
    adapters: tuple[AdapterFiles, ...]
    """The adapters among the files, which may be packed in another form."""
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """How the packed files differ from those in the directory."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the other files, sorted."""
        return tuple(file.name for file in self.files)

    @property
    def size(self) -> int:
        """The size of all files except the manifest, in bytes."""
        sizes = {file.name: file.size for file in self.files}
        for adapter in self.adapters:
            sizes |= adapter.packed_sizes
        return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class BuildResult:
    """A written package."""

    path: Path
    manifest: Manifest
    content_digest: Digest
    package_digest: Digest
    files: tuple[FileDigest, ...]
    signer: str | None
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def draft_manifest(
    directory: Path,
    overrides: ManifestOverrides,
    *,
    base: BaseFacts | None,
    examples: Sequence[str] = (),
    converted: Path | None = None,
) -> JsonObject:
    """Return a draft of ``expert.json`` for a directory, as complete as possible.

    ``examples`` are prompts that the router should send to the expert. Raises as `read_adapter`.
    """
    existing = read_draft(directory)
    adapters = [
        read_adapter(directory, weights=weights, config=config, base=base, converted=converted)
        for weights, config in list_named_adapters(existing.get("adapters"))
    ]
    document = complete_manifest(
        existing, overrides, directory=directory, adapters=adapters, base=base
    )
    to_fill_in: Mapping[str, JsonObject] = {
        "routing": {"task": "default", "languages": [], "examples": list(examples), "keywords": []},
        "composition": {"requires": [], "conflicts": []},
    }
    for name, value in to_fill_in.items():
        document.setdefault(name, value)
    return document


def plan_build(
    directory: Path,
    overrides: ManifestOverrides,
    *,
    base: BaseFacts | None,
    converted: Path | None = None,
    progress: Progress = ignore_progress,
) -> BuildPlan:
    """Check a directory and decide what to pack; ``converted`` as in `read_adapter`.

    Raises:
        NotFoundError: when the directory or its adapter is missing.
        UsageError: when it is a file.
        InvalidPackageError: with every problem.
    """
    require_directory(directory)
    existing = read_draft(directory)
    if "adapters" not in existing:
        require_adapter(directory)
    findings = ProblemCollector(str(directory))
    adapters, whole = _read_adapters(directory, existing, base, findings, converted)
    document = complete_manifest(
        existing, overrides, directory=directory, adapters=adapters, base=base
    )
    manifest = _read_manifest(directory, document, base, findings, whole=whole)
    warnings = []
    for adapter in adapters:
        warnings += _check_numbers(adapter, base, findings, progress=progress)
    if manifest is None:
        findings.raise_problems()
    assert manifest is not None, "problems were raised"
    warnings += _check_against(manifest, adapters, base, findings)
    files, left_out = _choose_files(directory, manifest, findings, converted)
    findings.problems += _find_document_problems(directory, manifest, files)
    findings.raise_problems()
    warnings += compare_companions(
        directory, base, template=manifest.decoding.chat_template is not None
    )
    text = _encode_document(directory, existing, document)
    notes = tuple(note for adapter in adapters for note in adapter.notes)
    return BuildPlan(
        directory, manifest, text, files, tuple(adapters), left_out, tuple(warnings), notes
    )


def build_package(
    plan: BuildPlan,
    output: Path,
    *,
    key: PrivateKey | None = None,
    level: int = FASTEST_LEVEL,
    progress: Progress = ignore_progress,
) -> BuildResult:
    """Write a planned package, signed if there is a key.

    ``level`` is zstd's; it changes the size of the file and no digest.

    Raises:
        DigestError: when a file changes while it is packed.
        NotFoundError: when the output's directory does not exist.
    """
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=require_folder(output)) as folder:
        files, sources = _hash_files(plan, Path(folder), progress)
        signature = sign_files(files, name=plan.manifest.ref, key=key) if key is not None else None
        layout = build_signed_layout(files, signature)
        blobs = add_document(add_document(_open_sources(sources), plan.document), signature)
        write_package(output, layout, blobs, level=level, progress=progress)
    return BuildResult(
        path=output,
        manifest=plan.manifest,
        content_digest=compute_content_digest(layout.files),
        package_digest=layout.package_digest,
        files=layout.files,
        signer=key.public.key_id if key is not None else None,
        left_out=plan.left_out,
        warnings=plan.warnings,
        notes=plan.notes,
    )


def _read_adapters(
    directory: Path,
    existing: JsonObject,
    base: BaseFacts | None,
    findings: ProblemCollector,
    converted: Path | None,
) -> tuple[list[AdapterFiles], bool]:
    """Read all adapters in the manifest, or the one saved by PEFT; tell if all could be read."""
    names = list_named_adapters(existing.get("adapters"))
    read = [
        findings.run_step(
            partial(
                read_adapter,
                directory,
                weights=weights,
                config=config,
                base=base,
                converted=converted,
            )
        )
        for weights, config in names
    ]
    adapters = [adapter for adapter in read if adapter is not None]
    return adapters, len(adapters) == len(names)


def _read_manifest(
    directory: Path,
    document: JsonObject,
    base: BaseFacts | None,
    findings: ProblemCollector,
    *,
    whole: bool,
) -> Manifest | None:
    """Read the manifest; if an adapter is missing, check only what its author wrote."""
    if not whole:
        label = find_base_label(directory)
        if label is not None and base is None:
            findings.problems += find_base_problems({"base": {"name": label}})
        if read_draft(directory):
            findings.problems += _find_schema_problems(
                {"adapters": [_PLACEHOLDER_BASE], **document}
            )
        return None
    unknown = find_base_problems(document)
    findings.problems += unknown
    if unknown:
        findings.problems += _find_schema_problems(document)
        return None
    return findings.run_step(lambda: build_manifest(document))


def _check_numbers(
    adapter: AdapterFiles, base: BaseFacts | None, findings: ProblemCollector, *, progress: Progress
) -> list[str]:
    """Check every number of an adapter, and its shapes against the base; return warnings."""
    path = adapter.weights_path
    with adapter.weights.source.open() as stream:
        found = find_peaks(stream, adapter.weights.kept_table, progress=progress)
    problems = find_not_finite(found)
    if base is not None:
        problems += check_tensors(adapter.spec, base.shapes, base=base.identity.name)
    findings.problems += [f"{path}: {problem}" for problem in problems]
    doubts = [*find_extremes(adapter.spec, found), *describe_no_effect(adapter.spec, found)]
    return [f"{path}: {doubt}" for doubt in doubts]


def _find_schema_problems(document: JsonObject) -> list[str]:
    """Return the other problems of a manifest whose base is unknown."""
    stand_in = f"sha256:{'0' * 64}"
    base = document.get("base")
    known = base if isinstance(base, dict) else {}
    filled = {"name": "unknown", "arch": stand_in, "tokenizer": stand_in}
    try:
        build_manifest({**document, "base": {**filled, **{k: v for k, v in known.items() if v}}})
    except InvalidPackageError as error:
        return [f"{error.what}: {problem}" for problem in error.problems]
    return []


def _check_against(
    manifest: Manifest,
    adapters: list[AdapterFiles],
    base: BaseFacts | None,
    findings: ProblemCollector,
) -> list[str]:
    by_path = {adapter.weights_path: adapter for adapter in adapters}
    for entry in manifest.adapters:
        if entry.path in by_path:
            spec = by_path[entry.path].spec
            findings.problems += [f"{entry.path}: {p}" for p in find_entry_problems(entry, spec)]
    if base is None:
        return [f"{manifest.base.name} is not known here: tensors were not checked against it"]
    return findings.run_step(lambda: check_expert_base(manifest, base.identity)) or []


def _choose_files(
    directory: Path, manifest: Manifest, findings: ProblemCollector, converted: Path | None
) -> tuple[tuple[SourceFile, ...], tuple[str, ...]]:
    """Return the files to pack besides the manifest, and the names left out."""
    wanted = list_named_files(manifest) - {MANIFEST_PATH}
    packed: list[SourceFile] = []
    left_out = []
    names = {*list_source_names(directory), *(list_source_names(converted) if converted else ())}
    for name in sorted(names):
        if name in (MANIFEST_PATH, SIGNATURE_PATH):
            continue
        found = None
        if name in wanted or (is_document(name) and not (directory / name).is_dir()):
            found = findings.run_step(partial(find_adapter_file, directory, name, converted))
        if found is not None and (name in wanted or not is_empty_card(found)):
            packed.append(found)
        else:
            left_out.append(name)
    return tuple(packed), tuple(left_out)


def _find_document_problems(
    directory: Path, manifest: Manifest, files: Sequence[SourceFile]
) -> list[str]:
    names = [file.name for file in files]
    problems = find_file_set_problems(manifest, dict.fromkeys((*names, MANIFEST_PATH)))
    problems += [problem for name in names if (problem := describe_name_problem(name))]
    manifest_file = find_source_file(directory, MANIFEST_PATH)
    for file in (*files, *([manifest_file] if manifest_file is not None else [])):
        if not file.name.endswith(".safetensors"):
            with file.open() as stream:
                problems += filter(None, [find_document_problem(stream, name=file.name)])
    return problems


def _encode_document(directory: Path, existing: JsonObject, document: JsonObject) -> bytes:
    """Return the publisher's own bytes if nothing had to be added to them."""
    found = (
        find_source_file(directory, MANIFEST_PATH) if existing and document == existing else None
    )
    return encode_manifest(document) if found is None else found.read(max_bytes=MAX_MANIFEST_BYTES)


def _hash_files(
    plan: BuildPlan, folder: Path, progress: Progress
) -> tuple[tuple[FileDigest, ...], dict[Digest, SourceFile]]:
    """Hash what is packed; rewritten files are written to ``folder`` first."""
    files = [FileDigest(MANIFEST_PATH, len(plan.document), Digest.compute(plan.document))]
    sources: dict[Digest, SourceFile] = {}
    rewritten = _rewrite_files(plan, folder)
    for file in plan.files:
        source = rewritten.get(file.name, file)
        size, digest = source.hash(progress=progress)
        files.append(FileDigest(file.name, size, digest))
        sources[digest] = source
    return tuple(sorted(files)), sources


def _rewrite_files(plan: BuildPlan, folder: Path) -> dict[str, SourceFile]:
    rewritten: set[str] = set()
    for adapter in plan.adapters:
        if adapter.packed_config is not None:
            (folder / adapter.config_path).write_bytes(adapter.packed_config)
            rewritten.add(adapter.config_path)
        if adapter.weights.is_rewritten:
            with (folder / adapter.weights_path).open("xb") as output:
                adapter.weights.write(output)
            rewritten.add(adapter.weights_path)
    return {
        name: file for name in rewritten if (file := find_source_file(folder, name)) is not None
    }


def _open_sources(sources: Mapping[Digest, SourceFile]) -> Blobs:
    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        with sources[digest].open() as stream:
            yield stream

    return blob


def add_evaluation(plan: BuildPlan, entry: Evaluation) -> BuildPlan:
    """Return the plan with one more entry, which replaces one with the same data and metric.

    Raises:
        InvalidPackageError: when the manifest would not be valid with it.
    """
    document = load_object(plan.document, what=MANIFEST_PATH, max_bytes=MAX_MANIFEST_BYTES)
    document["evaluation"] = _merge_entries(document.get("evaluation"), asdict(entry))
    return replace(plan, manifest=build_manifest(document), document=encode_manifest(document))


def choose_build_date(environment: Mapping[str, str] = os.environ) -> str:
    """Return today's date in UTC, or that of ``SOURCE_DATE_EPOCH``, for reproducible builds.

    See https://reproducible-builds.org/specs/source-date-epoch/.

    Raises:
        UsageError: when the variable is not a number of seconds with a date.
    """
    text = environment.get("SOURCE_DATE_EPOCH")
    if text is None:
        return datetime.now(UTC).date().isoformat()
    try:
        return _format_day(text)
    except (ValueError, OverflowError, OSError) as error:
        raise UsageError(
            f"SOURCE_DATE_EPOCH is {text[:40]!r}, not a number of seconds since 1970",
            hint="SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)",
        ) from error


def _format_day(seconds: str) -> str:
    if not (seconds.isascii() and seconds.isdecimal()):
        raise ValueError(seconds)
    return datetime.fromtimestamp(int(seconds), UTC).date().isoformat()


def _merge_entries(entries: JsonValue, new: JsonObject) -> list[JsonValue]:
    known = entries if isinstance(entries, list) else []
    kept = [entry for entry in known if not _is_same_measurement(entry, new)]
    place = next(
        (i for i, entry in enumerate(known) if _is_same_measurement(entry, new)), len(kept)
    )
    return [*kept[:place], new, *kept[place:]]


def _is_same_measurement(entry: JsonValue, new: JsonObject) -> bool:
    keys = ("dataset_sha256", "metric")
    return isinstance(entry, dict) and all(entry.get(key) == new[key] for key in keys)
