"""Packages that our writer would never write, made from ones that it did.

Adapters of any kind by the shapes of their tensors, right or wrong.

Bytes that may be JSON lines: some that are, and whatever could be taken for the end of one.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import strategies as st

from expertctl.digest import Digest, FileDigest
from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import AdapterConfig, AdapterSpec, parse_adapter_config
from expertctl.package.adapter_spec import build_adapter_spec
from expertctl.package.archive import (
    END_OF_ARCHIVE,
    AnyLayout,
    build_blob_name,
    build_header,
    list_members,
)
from expertctl.package.layout import (
    CONFIG,
    OCI_LAYOUT,
    PackageLayout,
    SetLayout,
    build_layout,
    build_set_layout,
)
from expertctl.package.tensor_file import DTYPE_BYTES, TensorTable, parse_header
from expertctl.schema.manifest import SIGNATURE_PATH
from expertctl.schema.strict_json import encode_canonical

Files = dict[str, bytes]
Entry = tuple[str, bytes]


def read_archive(package: Path) -> bytes:
    """The archive inside a package."""
    return zstandard.ZstdDecompressor().decompress(package.read_bytes())


def write_frame(tar: bytes, path: Path, *, level: int = 1) -> Path:
    """Compress an archive into one frame."""
    path.write_bytes(zstandard.ZstdCompressor(level=level).compress(tar))
    return path


def read_members(tar: bytes) -> list[Entry]:
    """Name and content of every member."""
    found, at = [], 0
    while tar[at] != 0:
        name = tar[at : at + 100].rstrip(b"\0").decode()
        size = int(tar[at + 124 : at + 135], 8)
        found.append((name, tar[at + 512 : at + 512 + size]))
        at += 512 + size + -size % 512
    return found


def make_member(name: str, data: bytes) -> bytes:
    """One member as our writer makes it."""
    return build_header(name, len(data)) + data + bytes(-len(data) % 512)


def make_archive(entries: list[Entry], end: bytes = END_OF_ARCHIVE) -> bytes:
    """A tar of these members."""
    return b"".join(make_member(name, data) for name, data in entries) + end


def read_packed_files(tar: bytes) -> Files:
    """The packed files by path."""
    blobs = dict(read_members(tar))
    manifest = json.loads(read_members(tar)[2][1])
    return {
        layer["annotations"]["org.cncf.model.filepath"]: blobs[
            build_blob_name(Digest.parse(layer["digest"]))
        ]
        for layer in manifest["layers"]
    }


def make_package_archive(files: Files) -> bytes:
    """A well-formed archive of other files, whatever they hold."""
    return make_archive(list_layout_members(make_layout(files), files))


def make_layout(files: Files) -> PackageLayout:
    """The layout of files, signed when a signature is among them."""
    digests = [FileDigest(p, len(d), Digest.compute(d)) for p, d in files.items()]
    signed = [f for f in digests if f.path == SIGNATURE_PATH]
    return build_layout([f for f in digests if f not in signed], signed[0] if signed else None)


def list_layout_members(layout: AnyLayout, *files: Files) -> list[Entry]:
    """The members of a layout, of one package or of several."""
    contents = [data for package in files for data in package.values()]
    blobs = {build_blob_name(Digest.compute(d)): d for d in (*contents, CONFIG, *layout.manifests)}
    made = {"oci-layout": OCI_LAYOUT, "index.json": layout.index, **blobs}
    return [(m.name, made[m.name]) for m in list_members(layout)]


def make_set_layout(packages: Mapping[str, Files]) -> SetLayout:
    """The layout of a set, by the names in its index."""
    return build_set_layout({name: make_layout(files) for name, files in packages.items()})


def list_set_members(packages: Mapping[str, Files]) -> list[Entry]:
    """The members of a set."""
    return list_layout_members(make_set_layout(packages), *packages.values())


def edit_manifest(tar: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Change the OCI manifest and make index and names agree with it."""
    entries = read_members(tar)
    manifest = json.loads(entries[2][1])
    change(manifest)
    return replace_manifest(entries, encode_canonical(manifest))


def replace_manifest(entries: list[Entry], data: bytes) -> bytes:
    """Put other bytes in the manifest's place, and name them in the index."""
    index = json.loads(entries[1][1])
    digest = Digest.compute(data)
    index["manifests"][0] |= {"digest": str(digest), "size": len(data)}
    head = [entries[0], ("index.json", encode_canonical(index)), (build_blob_name(digest), data)]
    return make_archive([*head, *entries[3:]])


def edit_json_file(files: Files, path: str, change: Callable[[dict[str, Any]], object]) -> Files:
    """Change one JSON file among the files."""
    document = json.loads(files[path])
    change(document)
    return {**files, path: json.dumps(document).encode()}


def make_safetensors(header_text: bytes, data: bytes = b"") -> bytes:
    """A safetensors file with exactly this header."""
    return len(header_text).to_bytes(8, "little") + header_text + data


def make_tensor_file(entries: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A safetensors file with this table."""
    return make_safetensors(json.dumps(entries, separators=(",", ":")).encode(), data)


Shapes = Mapping[str, Sequence[int]]


def parse_config_document(document: Mapping[str, Any]) -> AdapterConfig:
    return parse_adapter_config(json.dumps(document).encode(), what="adapter_config.json")


def catch_config_error(document: Mapping[str, Any]) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        parse_config_document(document)
    return caught.value.message


def parse_tensor_table(
    shapes: Shapes, *, dtype: str = "F32", dtypes: Mapping[str, str] | None = None
) -> TensorTable:
    """The table of a file with these tensors; ``dtypes`` names those of another type."""
    entries, at = {}, 0
    for name, shape in shapes.items():
        kind = (dtypes or {}).get(name, dtype)
        size = math.prod(shape) * DTYPE_BYTES[kind]
        entries[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    data = make_tensor_file(entries, bytes(at))
    return parse_header(data, file_size=len(data), what="w")


def parse_adapter_spec(document: Mapping[str, Any], shapes: Shapes, **types: Any) -> AdapterSpec:
    return build_adapter_spec(
        parse_config_document(document), parse_tensor_table(shapes, **types), what="w"
    )


def catch_spec_error(document: Mapping[str, Any], shapes: Shapes, **types: Any) -> str:
    with pytest.raises(InvalidPackageError) as caught:
        parse_adapter_spec(document, shapes, **types)
    return caught.value.message


_SEPARATORS = (
    b"\n", b"\r", b"\r\n", b"\x0b", b"\x1c", b"\xc2\x85", b"\xe2\x80\xa8", b" ", b'"', b"\xff",
)  # fmt: skip


def draw_line_bytes(*lines: bytes) -> st.SearchStrategy[bytes]:
    """Any bytes at all, or these lines with anything between them."""
    pieces = st.sampled_from((*lines, *_SEPARATORS))
    return st.binary(max_size=200) | st.lists(pieces).map(b"".join)
