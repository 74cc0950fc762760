"""Formats packages for the package commands, reads their FILE|REF argument; ``expertctl diff``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from expertctl.cli.completion import complete_experts
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_fields,
    format_table,
    print_message,
    truncate,
)
from expertctl.cli.progress import show_progress
from expertctl.digest import FileDigest, Progress
from expertctl.errors import to_single_line
from expertctl.package.adapter import KIND_NAMES, AdapterSpec, Dora, Ia3, Lora, SoftPrompt
from expertctl.package.build import BuildResult
from expertctl.package.diff import (
    AdapterDiff,
    DiffSide,
    FieldChange,
    FileChange,
    KindSummary,
    PackageDiff,
    TensorChange,
    TensorChangeKind,
    TensorDistance,
    diff_packages,
    summarise_changes,
)
from expertctl.package.evaluation import describe_evaluation
from expertctl.package.read import PackageContents, is_file_name, read_blobs, read_package
from expertctl.reference import parse_target
from expertctl.schema.manifest import Manifest
from expertctl.schema.strict_json import JsonValue
from expertctl.settings import format_size, load_settings
from expertctl.store.package_reader import OpenPackage, open_package, read_stored_expert
from expertctl.store.preference import find_working_folder, read_preference
from expertctl.store.store import Store
from expertctl.trust.bundle import read_bundle

PackageTarget = Annotated[
    str,
    typer.Argument(
        metavar="FILE|REF",
        autocompletion=complete_experts,
        help="A .expert file, or an installed expert.",
    ),
]


def open_store() -> Store:
    """Return the store of this home; it prefers the versions that the working folder pins."""
    home = load_settings().home
    return Store(home.store, read_preference(home, find_working_folder()))


def read_target(target: str, *, label: str, as_json: bool) -> PackageContents:
    """Read a file or an installed expert completely, with a progress bar."""
    if is_file_name(target):
        with show_reading_progress(label, Path(target), as_json=as_json) as report:
            return read_package(Path(target), progress=report)
    store = open_store()
    expert = store.find(parse_target(target))
    with show_progress(label, expert.size, as_json=as_json) as report:
        return read_stored_expert(store, expert, progress=report)


@contextmanager
def show_reading_progress(label: str, file: Path, *, as_json: bool) -> Iterator[Progress]:
    """Show the progress of reading a file."""
    total = file.stat().st_size if file.is_file() else None
    with show_progress(label, total, as_json=as_json) as report:
        yield report


def build_contents_document(contents: PackageContents, target: str | Path) -> dict[str, object]:
    """Return what identifies a package."""
    return {
        "path": str(target),
        "ref": contents.manifest.ref,
        "content_digest": str(contents.content_digest),
        "package_digest": str(contents.package_digest),
        "files": build_files_document(contents.files),
    }


def build_built_document(built: BuildResult) -> dict[str, object]:
    """Return the document of ``build --json``, without its further warnings."""
    return {
        "path": str(built.path),
        "ref": built.manifest.ref,
        "content_digest": str(built.content_digest),
        "package_digest": str(built.package_digest),
        "files": build_files_document(built.files),
        "signer": built.signer,
        "left_out": list(built.left_out),
        "warnings": list(built.warnings),
        "notes": list(built.notes),
    }


def build_inspect_document(contents: PackageContents, target: str | Path) -> dict[str, object]:
    """Return the document of ``inspect --json``."""
    return {
        **build_contents_document(contents, target),
        "verified": False,
        "signed_by": read_signer(contents),
        "manifest": asdict(contents.manifest),
        "adapters": [_build_adapter_document(spec) for spec in contents.adapters],
    }


def build_files_document(files: Sequence[FileDigest]) -> list[Mapping[str, object]]:
    """Return files as rows."""
    return [{"path": f.path, "size": f.size, "digest": str(f.digest)} for f in files]


def read_signer(contents: PackageContents) -> str | None:
    """Return the key that a signature names, without verifying it.

    Raises:
        SignatureError: when there is a signature that cannot be read.
    """
    return read_bundle(contents.signature).key_id if contents.signature is not None else None


def format_built(built: BuildResult) -> str:
    """Return a built package as text."""
    size = format_size(built.path.stat().st_size)
    lines = [
        f"{built.path}  {built.manifest.ref}  {size}",
        f"content  {built.content_digest}",
        f"package  {built.package_digest}",
    ]
    return "\n".join([*lines, *([f"signer   {built.signer}"] if built.signer else [])])


def format_contents(contents: PackageContents) -> str:
    """Return the manifest, the adapters and the files of a package as text."""
    rows = [["name", contents.manifest.ref], *build_manifest_rows(contents.manifest)]
    rows += [["adapter", _format_adapter(spec)] for spec in contents.adapters]
    rows += [
        ["content", str(contents.content_digest)],
        ["package", str(contents.package_digest)],
        ["signed by", read_signer(contents) or "nobody"],
    ]
    files = [[f.path, format_size(f.size), str(f.digest)] for f in contents.files]
    head = format_fields([(name, to_single_line(value)) for name, value in rows])
    return f"{head}\n\n{format_table(['file', 'size', 'digest'], files)}"


def build_manifest_rows(manifest: Manifest) -> list[list[str]]:
    """Return the fields of a manifest as rows, without empty ones."""
    base, routing = manifest.base, manifest.routing
    rows = [
        ["description", manifest.description],
        ["license", manifest.license],
        ["authors", ", ".join(manifest.authors)],
        ["base", base.name + (f"@{base.revision}" if base.revision else "")],
        ["task", routing.task],
        ["languages", ", ".join(routing.languages)],
        ["keywords", ", ".join(routing.keywords)],
        ["requires", ", ".join(manifest.composition.requires)],
        ["conflicts", ", ".join(manifest.composition.conflicts)],
    ]
    rows += [["evaluation", f"{e.task}: {describe_evaluation(e)}"] for e in manifest.evaluation]
    rows += [["limitation", f"{item.pattern}: {item.description}"] for item in manifest.limitations]
    return [row for row in rows if row[1]]


def _build_adapter_document(spec: AdapterSpec) -> dict[str, object]:
    return {
        "kind": spec.kind,
        "rank": spec.rank,
        "tokens": spec.tokens,
        "dtype": spec.dtype,
        "tensors": spec.tensors,
        "modules": [_build_module_document(p) for p in spec.parts if not isinstance(p, SoftPrompt)],
    }


def _build_module_document(part: Lora | Dora | Ia3) -> dict[str, object]:
    if isinstance(part, Ia3):
        return {"name": part.module, "on_input": part.on_input, "size": part.size}
    return {"name": part.module, "rank": part.rank, "scale": part.scale}


def _format_adapter(spec: AdapterSpec) -> str:
    name = KIND_NAMES[spec.kind]
    if spec.tokens is not None:
        return f"{name} of {spec.tokens} virtual tokens, {spec.dtype}"
    rank = f" of rank {spec.rank}" if spec.rank is not None else ""
    return f"{name}{rank} on {len(spec.parts)} layers, {spec.dtype}"


_CHANGE_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_SUMMARY_CHANGES: tuple[TensorChangeKind, ...] = ("equal", "changed", "added", "removed")
_MAX_VALUE = 60
_SHORT_DIGEST = 12


def diff(old: PackageTarget, new: PackageTarget, as_json: JsonFlag = False) -> None:
    """Show what changed between two packages. Tensors are compared one by one.

    Example: expertctl diff acme/sql@1.0.0 sql-1.1.0.expert
    """
    store = open_store()
    with (
        show_progress("comparing", None, as_json=as_json) as report,
        open_package(old, store, progress=report) as first,
        open_package(new, store, progress=report) as second,
    ):
        sides = [
            DiffSide(read_blobs(package.layout, package.blobs, what=package.ref), package.blobs)
            for package in (first, second)
        ]
        found = diff_packages(sides[0], sides[1], progress=report)
    if not (first.signer and second.signer):
        print_message(
            "not verified: files can claim anything about themselves; see `expertctl verify`"
        )
    named = [
        _build_side_document(target, package, side)
        for target, package, side in zip((old, new), (first, second), sides, strict=True)
    ]
    emit(_build_diff_document(named, found), _format_diff(named, found), as_json=as_json)


def _build_side_document(target: str, package: OpenPackage, side: DiffSide) -> dict[str, object]:
    contents = build_contents_document(side.contents, target)
    return {
        "target": target,
        "ref": contents["ref"],
        "content_digest": contents["content_digest"],
        "package_digest": contents["package_digest"],
        "signed_by": read_signer(side.contents),
        "verified": package.signer is not None,
    }


def _build_diff_document(
    named: Sequence[Mapping[str, object]], difference: PackageDiff
) -> dict[str, object]:
    return {
        "old": named[0],
        "new": named[1],
        "equal": difference.equal,
        "manifest": [asdict(change) for change in difference.fields],
        "files": [asdict(change) for change in difference.files],
        "adapters": [_build_adapter_diff_document(adapter) for adapter in difference.adapters],
    }


def _build_adapter_diff_document(adapter: AdapterDiff) -> dict[str, object]:
    return {
        "old": asdict(adapter.old) if adapter.old else None,
        "new": asdict(adapter.new) if adapter.new else None,
        "summary": [_build_summary_document(kind) for kind in summarise_changes(adapter.tensors)],
        "tensors": [_build_tensor_document(change) for change in adapter.tensors],
    }


def _build_tensor_document(change: TensorChange) -> dict[str, object]:
    return {
        "name": change.name,
        "change": change.change,
        "old": asdict(change.old) if change.old else None,
        "new": asdict(change.new) if change.new else None,
        **_build_distance_document(change.distance),
    }


def _build_summary_document(kind: KindSummary) -> dict[str, object]:
    counts: dict[str, int] = {name: kind.counts.get(name, 0) for name in _SUMMARY_CHANGES}
    return {"kind": kind.kind, **counts, **_build_distance_document(kind.distance)}


def _build_distance_document(distance: TensorDistance | None) -> dict[str, object]:
    return {
        "max_abs": distance.max_abs if distance else None,
        "relative": distance.relative if distance else None,
    }


def _format_diff(named: Sequence[Mapping[str, object]], difference: PackageDiff) -> str:
    parts = [
        format_table(
            ["", "PACKAGE", "CONTENT", "SIGNED BY"], [_format_side(side) for side in named]
        )
    ]
    if difference.equal:
        parts.append("the same content")
    if difference.fields:
        parts.append(
            "\n".join(
                ["expert.json", *(_format_field_change(change) for change in difference.fields)]
            )
        )
    if difference.files:
        parts.append(
            "\n".join(["files", *(_format_file_change(change) for change in difference.files)])
        )
    parts += [
        _format_adapter_diff(adapter) for adapter in difference.adapters if not difference.equal
    ]
    return "\n\n".join(parts)


def _format_side(side: Mapping[str, object]) -> list[str]:
    """Return a row with digests and keys cut short; ``--json`` has them whole."""
    signer = str(side["signed_by"] or "").removeprefix("sha256:")[:_SHORT_DIGEST] or "nobody"
    claimed = "" if side["verified"] or signer == "nobody" else " (not verified)"
    content = str(side["content_digest"])[: len("sha256:") + _SHORT_DIGEST]
    return [str(side["target"]), str(side["ref"]), content, f"{signer}{claimed}"]


def _format_field_change(change: FieldChange) -> str:
    values = {
        "added": _format_value(change.new),
        "removed": _format_value(change.old),
        "changed": f"{_format_value(change.old)} → {_format_value(change.new)}",
    }
    return f"  {_CHANGE_SIGNS[change.change]} {_shorten(change.path)}: {values[change.change]}"


def _format_value(value: JsonValue) -> str:
    return _shorten(json.dumps(value, ensure_ascii=False))


def _shorten(text: str) -> str:
    """Return a package's text on one line, cut if it is long."""
    return truncate(" ".join(text.split()), _MAX_VALUE)


def _format_file_change(change: FileChange) -> str:
    sizes = [format_size(s) for s in (change.old_size, change.new_size) if s is not None]
    return f"  {_CHANGE_SIGNS[change.change]} {change.path}  {' → '.join(sizes)}"


def _format_adapter_diff(adapter: AdapterDiff) -> str:
    sides = [f"{entry.path} ({entry.kind})" for entry in (adapter.old, adapter.new) if entry]
    rows = [
        [
            kind.kind,
            *(str(kind.counts.get(name, 0)) for name in _SUMMARY_CHANGES),
            _format_number(kind.distance.max_abs if kind.distance else None),
            _format_number(kind.distance.relative if kind.distance else None),
        ]
        for kind in summarise_changes(adapter.tensors)
    ]
    header = ["MODULES", *(name.upper() for name in _SUMMARY_CHANGES), "MAX |Δ|", "‖Δ‖/‖OLD‖"]
    return f"{' → '.join(dict.fromkeys(sides))}\n{format_table(header, rows)}"


def _format_number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
