"""``expertctl diff``: what changed between two packages."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict

from expertctl.cli.output import JsonFlag, emit, human_size, note, progress, table
from expertctl.cli.package_view import contents_document, signed_by
from expertctl.cli.target import Target, the_store
from expertctl.package.diff import (
    AdapterDiff,
    FieldChange,
    FileChange,
    PackageDiff,
    Side,
    diff_packages,
)
from expertctl.package.read import read_blobs
from expertctl.package.tensor_diff import Change, Distance, KindSummary, TensorChange, summarise
from expertctl.schema.strict_json import JsonValue
from expertctl.store.contents import Opened, opened

_SIGNS = {"added": "+", "removed": "-", "changed": "~"}
_COUNTED: tuple[Change, ...] = ("equal", "changed", "added", "removed")
_MAX_VALUE = 60
_SHORT = 12


def diff(old: Target, new: Target, as_json: JsonFlag = False) -> None:
    """Show what changed between two packages. Tensors are compared one by one.

    Example: expertctl diff acme/sql@1.0.0 sql-1.1.0.expert
    """
    store = the_store()
    with (
        progress("comparing", None, as_json=as_json) as report,
        opened(old, store, progress=report) as first,
        opened(new, store, progress=report) as second,
    ):
        sides = [
            Side(read_blobs(package.layout, package.blobs, what=package.ref), package.blobs)
            for package in (first, second)
        ]
        found = diff_packages(sides[0], sides[1], progress=report)
    if not (first.signer and second.signer):
        note("not verified: files say about themselves what they like; see `expertctl verify`")
    named = [
        _side_document(target, package, side)
        for target, package, side in zip((old, new), (first, second), sides, strict=True)
    ]
    emit(_document(named, found), _text(named, found), as_json=as_json)


def _side_document(target: str, package: Opened, side: Side) -> dict[str, object]:
    told = contents_document(side.contents, target)
    return {
        "target": target,
        "ref": told["ref"],
        "content_digest": told["content_digest"],
        "package_digest": told["package_digest"],
        "signed_by": signed_by(side.contents),
        "verified": package.signer is not None,
    }


def _document(named: Sequence[Mapping[str, object]], found: PackageDiff) -> dict[str, object]:
    return {
        "old": named[0],
        "new": named[1],
        "equal": found.equal,
        "manifest": [asdict(change) for change in found.fields],
        "files": [asdict(change) for change in found.files],
        "adapters": [_adapter_document(adapter) for adapter in found.adapters],
    }


def _adapter_document(adapter: AdapterDiff) -> dict[str, object]:
    return {
        "old": asdict(adapter.old) if adapter.old else None,
        "new": asdict(adapter.new) if adapter.new else None,
        "summary": [_summary_document(kind) for kind in summarise(adapter.tensors)],
        "tensors": [_tensor_document(change) for change in adapter.tensors],
    }


def _tensor_document(change: TensorChange) -> dict[str, object]:
    return {
        "name": change.name,
        "change": change.change,
        "old": asdict(change.old) if change.old else None,
        "new": asdict(change.new) if change.new else None,
        **_distance_document(change.distance),
    }


def _summary_document(kind: KindSummary) -> dict[str, object]:
    counts: dict[str, int] = {name: kind.counts.get(name, 0) for name in _COUNTED}
    return {"kind": kind.kind, **counts, **_distance_document(kind.distance)}


def _distance_document(distance: Distance | None) -> dict[str, object]:
    return {
        "max_abs": distance.max_abs if distance else None,
        "relative": distance.relative if distance else None,
    }


def _text(named: Sequence[Mapping[str, object]], found: PackageDiff) -> str:
    parts = [table(["", "PACKAGE", "CONTENT", "SIGNED BY"], [_side_row(side) for side in named])]
    if found.equal:
        parts.append("the same content")
    if found.fields:
        parts.append("\n".join(["expert.json", *(_field_line(change) for change in found.fields)]))
    if found.files:
        parts.append("\n".join(["files", *(_file_line(change) for change in found.files)]))
    parts += [_adapter_text(adapter) for adapter in found.adapters if not found.equal]
    return "\n\n".join(parts)


def _side_row(side: Mapping[str, object]) -> list[str]:
    """Return a row with digests and keys cut short; ``--json`` has them whole."""
    signer = str(side["signed_by"] or "").removeprefix("sha256:")[:_SHORT] or "nobody"
    claimed = "" if side["verified"] or signer == "nobody" else " (not verified)"
    content = str(side["content_digest"])[: len("sha256:") + _SHORT]
    return [str(side["target"]), str(side["ref"]), content, f"{signer}{claimed}"]


def _field_line(change: FieldChange) -> str:
    values = {
        "added": _value(change.new),
        "removed": _value(change.old),
        "changed": f"{_value(change.old)} → {_value(change.new)}",
    }
    return f"  {_SIGNS[change.change]} {_short(change.path)}: {values[change.change]}"


def _value(value: JsonValue) -> str:
    return _short(json.dumps(value, ensure_ascii=False))


def _short(text: str) -> str:
    """Put a package's text on one line, cut if it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _MAX_VALUE else f"{line[: _MAX_VALUE - 1]}…"


def _file_line(change: FileChange) -> str:
    sizes = [human_size(s) for s in (change.old_size, change.new_size) if s is not None]
    return f"  {_SIGNS[change.change]} {change.path}  {' → '.join(sizes)}"


def _adapter_text(adapter: AdapterDiff) -> str:
    sides = [f"{entry.path} ({entry.kind})" for entry in (adapter.old, adapter.new) if entry]
    rows = [
        [
            kind.kind,
            *(str(kind.counts.get(name, 0)) for name in _COUNTED),
            _number(kind.distance.max_abs if kind.distance else None),
            _number(kind.distance.relative if kind.distance else None),
        ]
        for kind in summarise(adapter.tensors)
    ]
    header = ["MODULES", *(name.upper() for name in _COUNTED), "MAX |Δ|", "‖Δ‖/‖OLD‖"]
    return f"{' → '.join(dict.fromkeys(sides))}\n{table(header, rows)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
