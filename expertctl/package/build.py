"""BUILD: from an adapter directory to a ``.expert`` file, signed or not.

Everything is checked before anything is written, and all problems are reported at once. Only known
files are packed: the manifest, what it names, the model card and licences.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar

from expertctl.digest import Digest, FileDigest, Progress, hash_file, no_progress
from expertctl.errors import ExpertError, InvalidPackageError, NotFoundError
from expertctl.package.base_model import BaseFacts
from expertctl.package.compatibility import check_base, check_tensors
from expertctl.package.content import entry_problems, file_set_problems, named_files
from expertctl.package.draft import (
    AdapterFiles,
    Overrides,
    base_problems,
    complete,
    demand_adapter,
    encode,
    named_adapters,
    read_adapter,
    read_draft,
)
from expertctl.package.frame import FAST
from expertctl.package.layout import Blobs, Layout, content_digest, is_document, name_problem
from expertctl.package.numbers import extremes, not_finite, peaks
from expertctl.package.secrets_scan import secret_in_file
from expertctl.package.spool import signed_layout, with_document
from expertctl.package.write import write_package
from expertctl.schema.manifest import MANIFEST_PATH, SIGNATURE_PATH, Manifest, manifest_of
from expertctl.schema.strict_json import JsonObject
from expertctl.trust.bundle import sign_files
from expertctl.trust.keys import PrivateKey

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Plan:
    """A package that may be written: its manifest, and the files beside it, all checked."""

    directory: Path
    manifest: Manifest
    document: bytes
    """The bytes of ``expert.json`` in the package."""
    paths: tuple[str, ...]
    """The other files, sorted."""
    left_out: tuple[str, ...]
    warnings: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many bytes there are beside the manifest."""
        return sum((self.directory / path).stat().st_size for path in self.paths)


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


class _Findings:
    """All problems so far, by what they are about."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.hints: list[str] = []

    def of(self, step: Callable[[], _Value]) -> _Value | None:
        """Run a step and keep its problems."""
        try:
            return step()
        except InvalidPackageError as error:
            self.problems += [f"{error.what}: {problem}" for problem in error.problems]
            self.hints.append(error.hint)
        except ExpertError as error:
            self.problems.append(error.message)
            self.hints.append(error.hint)
        return None

    def raise_if_any(self, what: str) -> None:
        """Report everything at once."""
        if self.problems:
            hint = next((hint for hint in self.hints if hint), "")
            raise InvalidPackageError(what, dict.fromkeys(self.problems), hint=hint)


def draft(directory: Path, overrides: Overrides, *, base: BaseFacts | None) -> JsonObject:
    """Return a draft of ``expert.json`` for a directory, complete as far as can be known.

    Raises:
        NotFoundError: when there is no adapter in the directory.
        InvalidPackageError: when the adapter cannot be packed at all.
    """
    existing = read_draft(directory)
    adapters = [
        read_adapter(directory, weights=weights, config=config)
        for weights, config in named_adapters(existing.get("adapters"))
    ]
    document = complete(existing, overrides, directory=directory, adapters=adapters, base=base)
    for name, value in _TO_FILL_IN.items():
        document.setdefault(name, value)
    return document


_TO_FILL_IN: Mapping[str, JsonObject] = {
    "routing": {"task": "default", "languages": [], "examples": [], "keywords": []},
    "composition": {"requires": [], "conflicts": []},
}


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
        InvalidPackageError: with every problem.
    """
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: no such directory", hint="name the one that PEFT saved the adapter to"
        )
    existing = read_draft(directory)
    demand_adapter(directory, existing)
    findings = _Findings()
    adapters = _read_adapters(directory, existing, findings)
    document = complete(existing, overrides, directory=directory, adapters=adapters, base=base)
    unknown = base_problems(document)
    findings.problems += unknown
    manifest = None if unknown else findings.of(lambda: manifest_of(document))
    warnings = []
    for adapter in adapters:
        warnings += _look_into(directory, adapter, base, findings, progress=progress)
    if manifest is None:
        findings.problems += _schema_problems(document) if unknown else []
        findings.raise_if_any(str(directory))
    assert manifest is not None, "problems were raised"
    warnings += _against(manifest, adapters, base, findings)
    paths, left_out = _choose(directory, manifest)
    findings.problems += _file_problems(directory, manifest, paths)
    findings.raise_if_any(str(directory))
    text = _text(directory, existing, document)
    return Plan(directory, manifest, text, paths, left_out, tuple(warnings))


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
    files, sources = _hash_files(plan, progress)
    name = plan.manifest.ref
    signature = sign_files(files, name=name, key=key) if key is not None else None
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
    )


def _read_adapters(
    directory: Path, existing: JsonObject, findings: _Findings
) -> list[AdapterFiles]:
    """Read every adapter that the manifest names, or the one that PEFT saved."""
    read = [
        findings.of(lambda w=weights, c=config: read_adapter(directory, weights=w, config=c))  # type: ignore[misc]  # defaults bind the loop's values
        for weights, config in named_adapters(existing.get("adapters"))
    ]
    return [adapter for adapter in read if adapter is not None]


def _look_into(
    directory: Path,
    adapter: AdapterFiles,
    base: BaseFacts | None,
    findings: _Findings,
    *,
    progress: Progress,
) -> list[str]:
    """Check every number of an adapter, and its shapes against the base; return warnings."""
    path = adapter.weights_path
    with (directory / path).open("rb") as stream:
        found = peaks(stream, adapter.table, progress=progress)
    problems = not_finite(found)
    if base is not None:
        problems += check_tensors(adapter.spec, base.shapes)
    findings.problems += [f"{path}: {problem}" for problem in problems]
    return [f"{path}: {warning}" for warning in extremes(adapter.spec, found)]


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
    findings: _Findings,
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


def _choose(directory: Path, manifest: Manifest) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which files are packed beside the manifest, and which are left out."""
    there = sorted(path.name for path in directory.iterdir())
    wanted = named_files(manifest) - {MANIFEST_PATH}
    packed = {n for n in there if n in wanted or (is_document(n) and (directory / n).is_file())}
    silent = {MANIFEST_PATH, SIGNATURE_PATH}
    left_out = [name for name in there if name not in packed | silent]
    return tuple(sorted(packed)), tuple(left_out)


def _file_problems(directory: Path, manifest: Manifest, paths: tuple[str, ...]) -> list[str]:
    problems = file_set_problems(manifest, dict.fromkeys((*paths, MANIFEST_PATH)))
    problems += [problem for path in paths if (problem := name_problem(path))]
    for name in (*paths, *([MANIFEST_PATH] if (directory / MANIFEST_PATH).exists() else [])):
        path = directory / name
        if path.is_symlink() or not path.is_file():
            problems.append(f"{name}: not a regular file; links are not packed")
        elif not name.endswith(".safetensors") and (secret := secret_in_file(path)):
            problems.append(f"{name}: holds {secret}, which must never be published")
    return problems


def _text(directory: Path, existing: JsonObject, document: JsonObject) -> bytes:
    """Keep the publisher's own bytes when nothing had to be added to them."""
    unchanged = existing and document == existing
    return (directory / MANIFEST_PATH).read_bytes() if unchanged else encode(document)


def _hash_files(
    plan: Plan, progress: Progress
) -> tuple[tuple[FileDigest, ...], dict[Digest, Path]]:
    files = [FileDigest(MANIFEST_PATH, len(plan.document), Digest.of(plan.document))]
    sources: dict[Digest, Path] = {}
    for path in plan.paths:
        size, digest = hash_file(plan.directory / path, progress=progress)
        files.append(FileDigest(path, size, digest))
        sources[digest] = plan.directory / path
    return tuple(sorted(files)), sources


def _blobs(sources: Mapping[Digest, Path]) -> Blobs:
    @contextmanager
    def blob(digest: Digest) -> Iterator[BinaryIO]:
        with sources[digest].open("rb") as stream:
            yield stream

    return blob
