"""Packages that our writer would never write, made from ones that it did."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zstandard

from expertctl.digest import Digest, FileDigest
from expertctl.package.archive import END, AnyLayout, blob_name, header, members
from expertctl.package.layout import CONFIG, OCI_LAYOUT, Layout, layout_of
from expertctl.package.set_layout import SetLayout, set_layout_of
from expertctl.schema.manifest import SIGNATURE_PATH
from expertctl.schema.strict_json import canonical

Files = dict[str, bytes]
Entry = tuple[str, bytes]


def tar_of(package: Path) -> bytes:
    """The archive inside a package."""
    return zstandard.ZstdDecompressor().decompress(package.read_bytes())


def framed(tar: bytes, path: Path, *, level: int = 1) -> Path:
    """Compress an archive into one frame."""
    path.write_bytes(zstandard.ZstdCompressor(level=level).compress(tar))
    return path


def entries_of(tar: bytes) -> list[Entry]:
    """Name and content of every member."""
    found, at = [], 0
    while tar[at] != 0:
        name = tar[at : at + 100].rstrip(b"\0").decode()
        size = int(tar[at + 124 : at + 135], 8)
        found.append((name, tar[at + 512 : at + 512 + size]))
        at += 512 + size + -size % 512
    return found


def member(name: str, data: bytes) -> bytes:
    """One member as our writer makes it."""
    return header(name, len(data)) + data + bytes(-len(data) % 512)


def archive(entries: list[Entry], end: bytes = END) -> bytes:
    """A tar of these members."""
    return b"".join(member(name, data) for name, data in entries) + end


def files_of(tar: bytes) -> Files:
    """The packed files by path."""
    blobs = dict(entries_of(tar))
    manifest = json.loads(entries_of(tar)[2][1])
    return {
        layer["annotations"]["org.cncf.model.filepath"]: blobs[
            blob_name(Digest.parse(layer["digest"]))
        ]
        for layer in manifest["layers"]
    }


def repack(files: Files) -> bytes:
    """A well-formed archive of other files, whatever they hold."""
    return archive(layout_entries(layout_for(files), files))


def layout_for(files: Files) -> Layout:
    """The layout of files, signed when a signature is among them."""
    digests = [FileDigest(p, len(d), Digest.of(d)) for p, d in files.items()]
    signed = [f for f in digests if f.path == SIGNATURE_PATH]
    return layout_of([f for f in digests if f not in signed], signed[0] if signed else None)


def layout_entries(layout: AnyLayout, *files: Files) -> list[Entry]:
    """The members of a layout, of one package or of several."""
    contents = [data for package in files for data in package.values()]
    blobs = {blob_name(Digest.of(d)): d for d in (*contents, CONFIG, *layout.manifests)}
    made = {"oci-layout": OCI_LAYOUT, "index.json": layout.index, **blobs}
    return [(m.name, made[m.name]) for m in members(layout)]


def set_layout(packages: Mapping[str, Files]) -> SetLayout:
    """The layout of a set, by the names in its index."""
    return set_layout_of({name: layout_for(files) for name, files in packages.items()})


def set_entries(packages: Mapping[str, Files]) -> list[Entry]:
    """The members of a set."""
    return layout_entries(set_layout(packages), *packages.values())


def with_manifest(tar: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change the OCI manifest and make index and names agree with it."""
    entries = entries_of(tar)
    manifest = json.loads(entries[2][1])
    change(manifest)
    return replace_manifest(entries, canonical(manifest))


def replace_manifest(entries: list[Entry], data: bytes) -> bytes:
    """Put other bytes in the manifest's place, and name them in the index."""
    index = json.loads(entries[1][1])
    digest = Digest.of(data)
    index["manifests"][0] |= {"digest": str(digest), "size": len(data)}
    head = [entries[0], ("index.json", canonical(index)), (blob_name(digest), data)]
    return archive([*head, *entries[3:]])


def edited(files: Files, path: str, change: Callable[[dict[str, Any]], object]) -> Files:
    """Change one JSON file among the files."""
    document = json.loads(files[path])
    change(document)
    return {**files, path: json.dumps(document).encode()}


def safetensors(header_text: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with exactly this header."""
    return len(header_text).to_bytes(8, "little") + header_text + data


def table(entries: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file with this table."""
    return safetensors(json.dumps(entries, separators=(",", ":")).encode(), data)
