"""Whether the files of a package are what its manifest says, and nothing more."""

from collections.abc import Mapping, Sequence

from expertctl.digest import FileDigest
from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterSpec
from expertctl.package.adapter_config import parse_config
from expertctl.package.adapter_spec import adapter_spec
from expertctl.package.layout import is_document
from expertctl.package.tensor_file import parse_header
from expertctl.schema.manifest import (
    MANIFEST_PATH,
    SIGNATURE_PATH,
    AdapterEntry,
    Manifest,
    parse_manifest,
)


def check_content(
    files: Sequence[FileDigest],
    small: Mapping[str, bytes],
    headers: Mapping[str, bytes],
    *,
    what: str,
) -> tuple[Manifest, tuple[AdapterSpec, ...]]:
    """Check files against the manifest among them.

    ``small`` holds the bytes of small files, ``headers`` at least the header of each safetensors.

    Raises:
        InvalidPackageError: with every problem.
    """
    if MANIFEST_PATH not in small:
        raise InvalidPackageError(what, [f"{MANIFEST_PATH} is missing or too large"])
    manifest = parse_manifest(small[MANIFEST_PATH], what=f"{what} {MANIFEST_PATH}")
    sizes = {file.path: file.size for file in files}
    problems = file_set_problems(manifest, sizes)
    specs = []
    for entry in manifest.adapters:
        try:
            specs.append(entry_spec(entry, small, headers, sizes))
        except InvalidPackageError as error:
            problems += [f"{error.what}: {problem}" for problem in error.problems]
    if problems:
        raise InvalidPackageError(what, problems)
    return manifest, tuple(specs)


def named_files(manifest: Manifest) -> set[str]:
    """Return the files that a manifest names, itself included."""
    named = {path for entry in manifest.adapters for path in (entry.path, entry.config)}
    extras = (manifest.decoding.grammar, manifest.decoding.chat_template)
    return {MANIFEST_PATH, *named, *(path for path in extras if path)}


def file_set_problems(manifest: Manifest, paths: Mapping[str, object]) -> list[str]:
    """Return which files are missing, and which are not named in the manifest."""
    named = named_files(manifest)
    missing = [
        f"{path} is named in {MANIFEST_PATH} but missing" for path in sorted(named - set(paths))
    ]
    extra = sorted(path for path in set(paths) - named if not is_document(path))
    odd = [f"{SIGNATURE_PATH} is the signature and cannot be named"] * (SIGNATURE_PATH in named)
    return odd + missing + [f"{path} is not named in {MANIFEST_PATH}" for path in extra]


def entry_spec(
    entry: AdapterEntry,
    small: Mapping[str, bytes],
    headers: Mapping[str, bytes],
    sizes: Mapping[str, int],
) -> AdapterSpec:
    """Read one adapter's configuration and table of tensors, and check the manifest against them.

    Raises:
        InvalidPackageError: with every problem.
    """
    if entry.config not in small or entry.path not in headers:
        raise InvalidPackageError(
            entry.path, ["the adapter needs its .safetensors file and a configuration below 1 MiB"]
        )
    config = parse_config(small[entry.config], what=entry.config)
    table = parse_header(headers[entry.path], file_size=sizes[entry.path], what=entry.path)
    spec = adapter_spec(config, table, what=entry.path)
    problems = entry_problems(entry, spec)
    if problems:
        raise InvalidPackageError(entry.path, problems)
    return spec


def entry_problems(entry: AdapterEntry, spec: AdapterSpec) -> list[str]:
    """Return where the manifest says something else than the tensors."""
    pairs = (
        ("kind", entry.kind, spec.kind),
        ("rank", entry.rank, spec.rank),
        ("tokens", entry.tokens, spec.tokens),
        ("dtype", entry.dtype, spec.dtype),
        ("tensors", entry.tensors, spec.tensors),
    )
    return [
        f"{MANIFEST_PATH} says {name} {stated}, the files say {found}"
        for name, stated, found in pairs
        if stated != found
    ]
