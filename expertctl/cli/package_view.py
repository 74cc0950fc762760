"""How packages are shown: the JSON documents of the package commands, and the same for people."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from expertctl.cli.output import human_size, table
from expertctl.digest import FileDigest
from expertctl.package.adapter import KIND_NAMES, AdapterSpec, Dora, Ia3, Lora, SoftPrompt
from expertctl.package.build import Built
from expertctl.package.evaluation_summary import evaluation_text
from expertctl.package.read import PackageContents
from expertctl.plain_text import one_line
from expertctl.schema.manifest import Manifest
from expertctl.trust.bundle import read_bundle


def contents_document(contents: PackageContents, target: str | Path) -> dict[str, object]:
    """Return what identifies a package."""
    return {
        "path": str(target),
        "ref": contents.manifest.ref,
        "content_digest": str(contents.content_digest),
        "package_digest": str(contents.package_digest),
        "files": files_document(contents.files),
    }


def built_document(built: Built) -> dict[str, object]:
    """Return what was built."""
    return {
        "path": str(built.path),
        "ref": built.manifest.ref,
        "content_digest": str(built.content_digest),
        "package_digest": str(built.package_digest),
        "files": files_document(built.files),
        "signer": built.signer,
        "left_out": list(built.left_out),
        "warnings": list(built.warnings),
        "notes": list(built.notes),
    }


def inspect_document(contents: PackageContents, target: str | Path) -> dict[str, object]:
    """Return everything that a package says about itself."""
    return {
        **contents_document(contents, target),
        "verified": False,
        "signed_by": signed_by(contents),
        "manifest": asdict(contents.manifest),
        "adapters": [_adapter_document(spec) for spec in contents.adapters],
    }


def files_document(files: Sequence[FileDigest]) -> list[Mapping[str, object]]:
    """Return files as rows."""
    return [{"path": f.path, "size": f.size, "digest": str(f.digest)} for f in files]


def signed_by(contents: PackageContents) -> str | None:
    """Return the key that a signature names, without verifying it.

    Raises:
        SignatureError: when there is a signature that cannot be read.
    """
    return read_bundle(contents.signature).key_id if contents.signature is not None else None


def built_text(built: Built) -> str:
    """Return what was built, for people."""
    size = human_size(built.path.stat().st_size)
    lines = [
        f"{built.path}  {built.manifest.ref}  {size}",
        f"content  {built.content_digest}",
        f"package  {built.package_digest}",
    ]
    return "\n".join([*lines, *([f"signer   {built.signer}"] if built.signer else [])])


def inspect_text(contents: PackageContents) -> str:
    """Return what a package says about itself, for people."""
    rows = [["name", contents.manifest.ref], *manifest_rows(contents.manifest)]
    rows += [["adapter", _adapter_text(spec)] for spec in contents.adapters]
    rows += [
        ["content", str(contents.content_digest)],
        ["package", str(contents.package_digest)],
        ["signed by", signed_by(contents) or "nobody"],
    ]
    files = [[f.path, human_size(f.size), str(f.digest)] for f in contents.files]
    width = max(len(row[0]) for row in rows)
    head = "\n".join(f"{name.ljust(width)}  {one_line(value)}" for name, value in rows)
    return f"{head}\n\n{table(['file', 'size', 'digest'], files)}"


def manifest_rows(manifest: Manifest) -> list[list[str]]:
    """Return the fields of a manifest as rows, without those that it leaves out."""
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
    rows += [["evaluation", f"{e.task}: {evaluation_text(e)}"] for e in manifest.evaluation]
    rows += [["limitation", f"{item.pattern}: {item.description}"] for item in manifest.limitations]
    return [row for row in rows if row[1]]


def _adapter_document(spec: AdapterSpec) -> dict[str, object]:
    return {
        "kind": spec.kind,
        "rank": spec.rank,
        "tokens": spec.tokens,
        "dtype": spec.dtype,
        "tensors": spec.tensors,
        "modules": [_module(p) for p in spec.parts if not isinstance(p, SoftPrompt)],
    }


def _module(part: Lora | Dora | Ia3) -> dict[str, object]:
    if isinstance(part, Ia3):
        return {"name": part.module, "on_input": part.on_input, "size": part.size}
    return {"name": part.module, "rank": part.rank, "scale": part.scale}


def _adapter_text(spec: AdapterSpec) -> str:
    name = KIND_NAMES[spec.kind]
    if spec.tokens is not None:
        return f"{name} of {spec.tokens} virtual tokens, {spec.dtype}"
    rank = f" of rank {spec.rank}" if spec.rank is not None else ""
    return f"{name}{rank} on {len(spec.parts)} layers, {spec.dtype}"
