"""BUILD: from an adapter directory to a ``.expert`` file, signed or not.

Everything is checked before anything is written, and all problems are reported at once. Only known
files are packed: the manifest, what it names, the model card and licences.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, FileDigest, Progress, no_progress
from expertctl.errors import InvalidPackageError
from expertctl.package.adapter_files import (
    AdapterFiles,
    demand_adapter,
    demand_directory,
    read_adapter,
)
from expertctl.package.base_model import BaseFacts
from expertctl.package.companions import differences, is_empty_card
from expertctl.package.compatibility import check_base, check_tensors
from expertctl.package.content import entry_problems, file_set_problems, named_files
from expertctl.package.draft import (
    Overrides,
    base_label,
    base_problems,
    complete,
    encode,
    named_adapters,
    read_draft,
)
from expertctl.package.findings import Findings
from expertctl.package.frame import FAST
from expertctl.package.layout import Blobs, Layout, content_digest, is_document, name_problem
from expertctl.package.numbers import extremes, not_finite, peaks, without_effect
from expertctl.package.secrets_scan import document_problem
from expertctl.package.source_files import SourceFile, source_file, source_names
from expertctl.package.spool import signed_layout, with_document
from expertctl.package.write import demand_folder, write_package
from expertctl.schema.manifest import (
    MANIFEST_PATH,
    MAX_MANIFEST_BYTES,
    SIGNATURE_PATH,
    Manifest,
    manifest_of,
)
from expertctl.schema.strict_json import JsonObject
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey

_STAND_IN: JsonObject = {
    "kind": "lora",
    "path": "adapter_model.safetensors",
    "config": "adapter_config.json",
    "rank": 1,
    "dtype": "float32",
    "tensors": 1,
}
"""An adapter where none could be read, to find what else is wrong with a manifest."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A package that may be written: its manifest, and the files beside it, all checked."""

    directory: Path
    manifest: Manifest
    document: bytes
    """The bytes of ``expert.json`` in the package."""
    files: tuple[SourceFile, ...]
    """The other files, sorted by name."""
    adapters: tuple[AdapterFiles, ...]
    """What is packed of those that belong to adapters, where it is not the file itself."""
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    """What is packed otherwise than it lies in the directory."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The names of the other files, sorted."""
        return tuple(file.name for file in self.files)

    @property
    def size(self) -> int:
        """How many bytes there are beside the manifest."""
        sizes = {file.name: file.size for file in self.files}
        for adapter in self.adapters:
            sizes |= adapter.packed_sizes
        return sum(sizes.values())


@dataclass(frozen=True, slots=True)
class Built:
    """A package that was written."""

    path: Path
    manifest: Manifest
    content_digest: Digest
    package_digest: Digest
    files: tuple[FileDigest, ...]
    signer: str | None
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]


def draft(
    directory: Path,
    overrides: Overrides,
    *,
    base: BaseFacts | None,
    examples: Sequence[str] = (),
) -> JsonObject:
    """Return a draft of ``expert.json`` for a directory, complete as far as can be known.

    ``examples`` are prompts that the router should send to the expert.

    Raises:
        NotFoundError: when there is no adapter in the directory.
        InvalidPackageError: when the adapter cannot be packed at all.
    """
    existing = read_draft(directory)
    adapters = [
        read_adapter(directory, weights=weights, config=config, base=base)
        for weights, config in named_adapters(existing.get("adapters"))
    ]
    document = complete(existing, overrides, directory=directory, adapters=adapters, base=base)
    to_fill_in: Mapping[str, JsonObject] = {
        "routing": {
            "task": "default",
            "languages": [],
            "examples": list(examples),
            "keywords": [],
        },
        "composition": {"requires": [], "conflicts": []},
    }
    for name, value in to_fill_in.items():
        document.setdefault(name, value)
    return document


def plan_build(
    directory: Path,
    overrides: Overrides,
    *,
    base: BaseFacts | None,
    progress: Progress = no_progress,
) -> Plan:
    """Check a directory and decide what will be packed.

    Raises:
        NotFoundError: when the directory or its adapter is missing.
        UsageError: when it is a file.
        InvalidPackageError: with every problem.
    """
    demand_directory(directory)
    existing = read_draft(directory)
    if "adapters" not in existing:
        demand_adapter(directory)
    findings = Findings(str(directory))
    adapters, whole = _read_adapters(directory, existing, base, findings)
    document = complete(existing, overrides, directory=directory, adapters=adapters, base=base)
    manifest = _manifest(directory, document, base, findings, whole=whole)
    warnings = []
    for adapter in adapters:
        warnings += _look_into(adapter, base, findings, progress=progress)
    if manifest is None:
        findings.raise_if_any()
    assert manifest is not None, "problems were raised"
    warnings += _against(manifest, adapters, base, findings)
    files, left_out = _choose(directory, manifest, findings)
    findings.problems += _file_problems(directory, manifest, files)
    findings.raise_if_any()
    warnings += differences(directory, base, template=manifest.decoding.chat_template is not None)
    text = _text(directory, existing, document)
    notes = tuple(note for adapter in adapters for note in adapter.notes)
    return Plan(directory, manifest, text, files, tuple(adapters), left_out, tuple(warnings), notes)


def build(
    plan: Plan,
    output: Path,
    *,
    key: PrivateKey | None = None,
    level: int = FAST,
    progress: Progress = no_progress,
) -> Built:
    """Write the package that was planned, signed when there is a key.

    ``level`` is zstd's; it changes the size of the file and no digest.

    Raises:
        DigestError: when a file changes while it is packed.
        NotFoundError: when the output's directory does not exist.
    """
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=demand_folder(output)) as folder:
        files, sources = _hash_files(plan, Path(folder), progress)
        signature = sign_files(files, name=plan.manifest.ref, key=key) if key is not None else None
        layout = signed_layout(files, signature)
        blobs = with_document(with_document(_blobs(sources), plan.document), signature)
        write_package(output, layout, blobs, level=level, progress=progress)
    return _built(plan, output, layout, key)


def _built(plan: Plan, output: Path, layout: Layout, key: PrivateKey | None) -> Built:
    return Built(
        path=output,
        manifest=plan.manifest,
        content_digest=content_digest(layout.files),
        package_digest=layout.package_digest,
        files=layout.files,
        signer=key.public.key_id if key is not None else None,
        left_out=plan.left_out,
        warnings=plan.warnings,
        notes=plan.notes,
    )


def _read_adapters(
    directory: Path, existing: JsonObject, base: BaseFacts | None, findings: Findings
) -> tuple[list[AdapterFiles], bool]:
    """Read every adapter that the manifest names, or the one that PEFT saved; tell if all were."""
    names = named_adapters(existing.get("adapters"))
    read = [
        findings.of(
            lambda w=weights, c=config: read_adapter(directory, weights=w, config=c, base=base)  # type: ignore[misc]  # defaults bind the loop's values
        )
        for weights, config in names
    ]
    adapters = [adapter for adapter in read if adapter is not None]
    return adapters, len(adapters) == len(names)


def _manifest(
    directory: Path,
    document: JsonObject,
    base: BaseFacts | None,
    findings: Findings,
    *,
    whole: bool,
) -> Manifest | None:
    """Read the manifest; without a whole adapter, only what its author wrote can be wrong."""
    if not whole:
        label = base_label(directory)
        if label is not None and base is None:
            findings.problems += base_problems({"base": {"name": label}})
        if read_draft(directory):
            findings.problems += _schema_problems({"adapters": [_STAND_IN], **document})
        return None
    unknown = base_problems(document)
    findings.problems += unknown
    if unknown:
        findings.problems += _schema_problems(document)
        return None
    return findings.of(lambda: manifest_of(document))


def _look_into(
    adapter: AdapterFiles, base: BaseFacts | None, findings: Findings, *, progress: Progress
) -> list[str]:
    """Check every number of an adapter, and its shapes against the base; return warnings."""
    path = adapter.weights_path
    with adapter.weights.source.open() as stream:
        found = peaks(stream, adapter.weights.kept, progress=progress)
    problems = not_finite(found)
    if base is not None:
        problems += check_tensors(adapter.spec, base.shapes, base=base.identity.name)
    findings.problems += [f"{path}: {problem}" for problem in problems]
    doubts = [*extremes(adapter.spec, found), *without_effect(adapter.spec, found)]
    return [f"{path}: {doubt}" for doubt in doubts]


def _schema_problems(document: JsonObject) -> list[str]:
    """What else is wrong with a manifest whose base is not known."""
    stand_in = f"sha256:{'0' * 64}"
    base = document.get("base")
    known = base if isinstance(base, dict) else {}
    filled = {"name": "unknown", "arch": stand_in, "tokenizer": stand_in}
    try:
        manifest_of({**document, "base": {**filled, **{k: v for k, v in known.items() if v}}})
    except InvalidPackageError as error:
        return [f"{error.what}: {problem}" for problem in error.problems]
    return []


def _against(
    manifest: Manifest,
    adapters: list[AdapterFiles],
    base: BaseFacts | None,
    findings: Findings,
) -> list[str]:
    """Check the manifest against the files and against the given base."""
    by_path = {adapter.weights_path: adapter for adapter in adapters}
    for entry in manifest.adapters:
        if entry.path in by_path:
            spec = by_path[entry.path].spec
            findings.problems += [f"{entry.path}: {p}" for p in entry_problems(entry, spec)]
    if base is None:
        return [f"{manifest.base.name} is not known here: tensors were not checked against it"]
    return findings.of(lambda: check_base(manifest, base.identity)) or []


def _choose(
    directory: Path, manifest: Manifest, findings: Findings
) -> tuple[tuple[SourceFile, ...], tuple[str, ...]]:
    """Return which files are packed beside the manifest, and the names that are left out."""
    wanted = named_files(manifest) - {MANIFEST_PATH}
    packed: list[SourceFile] = []
    left_out = []
    for name in source_names(directory):
        if name in (MANIFEST_PATH, SIGNATURE_PATH):
            continue
        found = None
        if name in wanted or (is_document(name) and not (directory / name).is_dir()):
            found = findings.of(lambda n=name: source_file(directory, n))  # type: ignore[misc]  # the default binds the loop's value
        if found is not None and (name in wanted or not is_empty_card(found)):
            packed.append(found)
        else:
            left_out.append(name)
    return tuple(packed), tuple(left_out)


def _file_problems(directory: Path, manifest: Manifest, files: Sequence[SourceFile]) -> list[str]:
    names = [file.name for file in files]
    problems = file_set_problems(manifest, dict.fromkeys((*names, MANIFEST_PATH)))
    problems += [problem for name in names if (problem := name_problem(name))]
    manifest_file = source_file(directory, MANIFEST_PATH)
    for file in (*files, *([manifest_file] if manifest_file is not None else [])):
        if not file.name.endswith(".safetensors") and (found := _document_problem(file)):
            problems.append(found)
    return problems


def _document_problem(file: SourceFile) -> str | None:
    with file.open() as stream:
        return document_problem(stream, name=file.name)


def _text(directory: Path, existing: JsonObject, document: JsonObject) -> bytes:
    """Keep the publisher's own bytes when nothing had to be added to them."""
    found = source_file(directory, MANIFEST_PATH) if existing and document == existing else None
    return encode(document) if found is None else found.read(max_bytes=MAX_MANIFEST_BYTES)


def _hash_files(
    plan: Plan, folder: Path, progress: Progress
) -> tuple[tuple[FileDigest, ...], dict[Digest, SourceFile]]:
    """Hash what is packed; files that are not packed as they are are written to ``folder``."""
    files = [FileDigest(MANIFEST_PATH, len(plan.document), Digest.of(plan.document))]
    sources: dict[Digest, SourceFile] = {}
    made = _rewritten(plan, folder)
    for file in plan.files:
        source = made.get(file.name, file)
        size, digest = source.hash(progress=progress)
        files.append(FileDigest(file.name, size, digest))
        sources[digest] = source
    return tuple(sorted(files)), sources


def _rewritten(plan: Plan, folder: Path) -> dict[str, SourceFile]:
    """Write the files of adapters that are not packed as they are."""
    made: set[str] = set()
    for adapter in plan.adapters:
        if adapter.packed_config is not None:
            (folder / adapter.config_path).write_bytes(adapter.packed_config)
            made.add(adapter.config_path)
        if adapter.weights.is_rewritten:
            with (folder / adapter.weights_path).open("xb") as output:
                adapter.weights.write(output)
            made.add(adapter.weights_path)
    return {name: file for name in made if (file := source_file(folder, name)) is not None}


def _blobs(sources: Mapping[Digest, SourceFile]) -> Blobs:
    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        with sources[digest].open() as stream:
            yield stream

    return blob
