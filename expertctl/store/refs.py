"""Refs and paths of the store: which experts are installed, and where their files are.

A ref is the small file that makes an expert installed. It is written last, so all that a readable
ref names exists. Reading needs only the standard library: `list` must start fast.

::

    store/blobs/sha256/<hex>                           one file of a package
    store/refs/<registry>/<namespace>/<name>/<version> the commit of one installed expert; registry
                                                       is a host, ':' as '+', or local: from a file
    store/staging/<token>/                             what one install is writing now
    store/leases/<token>/                              blobs that one process is using now
    store/derived/<content digest>/                    data computed from one package
    store/running/<number>-<token>/                    the memory that one run takes
    store/lock                                         held while refs or blobs are changed
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.reference import FROM_FILE, Digest, FileDigest, PackageName, Version
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

SCHEMA = 1
MAX_BYTES = 1 << 20
LOCAL = FROM_FILE
"""The registry of experts that were installed from a file."""
MISMATCH = "base mismatch allowed"
"""The phrase in a warning about a base that does not fit."""

_KEYS = {
    "schema", "registry", "name", "version", "content_digest", "package_digest", "files",
    "signature", "signer", "base", "requires", "conflicts", "size", "warnings",
}  # fmt: skip
_BASE_KEYS = {"name", "revision", "arch", "weights", "tokenizer", "accepts"}
_TOKENIZER_VERSION = "tokenizer_version"
_MANIFEST = "expert.json"
"""The same as `MANIFEST_PATH`, whose module imports third-party libraries."""
_FILE_KEYS = {"path", "size", "digest"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RequiredBase:
    """The base that an installed expert was made for."""

    name: str
    revision: str | None
    arch: Digest
    weights: Digest | None
    tokenizer: Digest
    accepts: tuple[Digest, ...] = ()
    tokenizer_version: int = 1
    """As in the manifest; a ref does not store the default."""


@dataclass(frozen=True, slots=True)
class StoredExpert:
    """One installed version of one expert."""

    registry: str
    package: PackageName
    version: Version
    content_digest: Digest
    package_digest: Digest
    files: tuple[FileDigest, ...]
    """All files but the signature, sorted by path."""
    signature: FileDigest | None
    signer: str | None
    """The id of the key that signed it; None means unsigned."""
    base: RequiredBase
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def repair_command(self) -> str:
        """How the user repairs a damaged install."""
        if self.registry == LOCAL:
            return "install it again from its file: `expertctl install FILE`"
        exact = self.ref if self.signer is not None else f"{self.package}@{self.package_digest}"
        return f"install it again: `expertctl install {self.registry}/{exact}`"

    @property
    def ref(self) -> str:
        """``namespace/name@version``, as plans and messages show it."""
        return f"{self.package}@{self.version}"

    @property
    def layers(self) -> tuple[FileDigest, ...]:
        """Every file, the signature last."""
        return (*self.files, *([self.signature] if self.signature else []))

    @property
    def size(self) -> int:
        """The total size of all files in bytes, the signature included."""
        return sum(file.size for file in self.layers)

    @property
    def allows_mismatch(self) -> bool:
        """Whether the user accepted a base that it was not made for."""
        return any(MISMATCH in warning for warning in self.warnings)

    def find_file(self, path: str) -> FileDigest:
        """Return one of its files; asking for an unknown path is a bug."""
        return next(file for file in self.files if file.path == path)


def encode_ref(expert: StoredExpert) -> bytes:
    """Return the bytes of a ref."""
    base = expert.base
    document = {
        "schema": SCHEMA,
        "registry": expert.registry,
        "name": str(expert.package),
        "version": str(expert.version),
        "content_digest": str(expert.content_digest),
        "package_digest": str(expert.package_digest),
        "files": [_encode_file(file) for file in expert.files],
        "signature": _encode_file(expert.signature) if expert.signature else None,
        "signer": expert.signer,
        "base": {
            "name": base.name,
            "revision": base.revision,
            "arch": str(base.arch),
            "weights": str(base.weights) if base.weights else None,
            "tokenizer": str(base.tokenizer),
            "accepts": [str(digest) for digest in base.accepts],
            **_encode_tokenizer_version(base),
        },
        "requires": list(expert.requires),
        "conflicts": list(expert.conflicts),
        "size": expert.size,
        "warnings": list(expert.warnings),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_ref(data: bytes, *, what: str) -> StoredExpert:
    """Parse the bytes of a ref.

    Raises:
        InvalidPackageError: when they are not exactly what `encode_ref` writes.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    try:
        expert = _parse_expert(_Fields(document, _KEYS))
    except (ExpertError, _InvalidRefError) as error:
        raise InvalidPackageError(what, [str(error)]) from error
    if encode_ref(expert) != data:
        raise InvalidPackageError(what, ["it is not as expertctl wrote it"])
    return expert


class _InvalidRefError(ValueError):
    """A ref is malformed."""


class _Fields:
    """Typed access to the values of one object, which must have exactly the given keys."""

    def __init__(self, document: JsonValue, keys: set[str]) -> None:
        if not isinstance(document, dict) or set(document) != keys:
            raise _InvalidRefError(f"not exactly the keys {', '.join(sorted(keys))}")
        self._document: JsonObject = document

    def text(self, key: str) -> str:
        return _require_text(self._document[key], key)

    def optional(self, key: str, read: Callable[[str], T]) -> T | None:
        return None if self._document[key] is None else read(self.text(key))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_require_text(item, key) for item in self.items(key))

    def items(self, key: str) -> list[JsonValue]:
        value = self._document[key]
        if not isinstance(value, list):
            raise _InvalidRefError(f"{key} is not a list")
        return value

    def number(self, key: str) -> int:
        value = self._document[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _InvalidRefError(f"{key} is not a number of bytes")
        return value

    def raw(self, key: str) -> JsonValue:
        return self._document[key]


def _parse_expert(fields: _Fields) -> StoredExpert:
    if fields.number("schema") != SCHEMA:
        raise _InvalidRefError("it was written by another version of expertctl")
    signature = fields.raw("signature")
    files = tuple(_parse_file(item) for item in fields.items("files"))
    if not any(file.path == _MANIFEST for file in files):
        raise _InvalidRefError(f"{_MANIFEST} is not among its files")
    return StoredExpert(
        registry=fields.text("registry"),
        package=PackageName.parse(fields.text("name")),
        version=Version.parse(fields.text("version")),
        content_digest=Digest.parse(fields.text("content_digest")),
        package_digest=Digest.parse(fields.text("package_digest")),
        files=files,
        signature=None if signature is None else _parse_file(signature),
        signer=fields.optional("signer", lambda text: str(Digest.parse(text))),
        base=_parse_base(fields.raw("base")),
        requires=fields.texts("requires"),
        conflicts=fields.texts("conflicts"),
        warnings=fields.texts("warnings"),
    )


def _parse_base(value: JsonValue) -> RequiredBase:
    versioned = isinstance(value, dict) and _TOKENIZER_VERSION in value
    fields = _Fields(value, _BASE_KEYS | ({_TOKENIZER_VERSION} if versioned else set()))
    return RequiredBase(
        name=fields.text("name"),
        revision=fields.optional("revision", str),
        arch=Digest.parse(fields.text("arch")),
        weights=fields.optional("weights", Digest.parse),
        tokenizer=Digest.parse(fields.text("tokenizer")),
        accepts=tuple(Digest.parse(text) for text in fields.texts("accepts")),
        tokenizer_version=fields.number(_TOKENIZER_VERSION) if versioned else 1,
    )


def _encode_tokenizer_version(base: RequiredBase) -> Mapping[str, JsonValue]:
    version = base.tokenizer_version
    return {} if version == 1 else {_TOKENIZER_VERSION: version}


def _parse_file(value: JsonValue) -> FileDigest:
    fields = _Fields(value, _FILE_KEYS)
    path = fields.text("path")
    return FileDigest(path, fields.number("size"), Digest.parse(fields.text("digest")))


def _encode_file(file: FileDigest) -> Mapping[str, JsonValue]:
    return {"path": file.path, "size": file.size, "digest": str(file.digest)}


def _require_text(value: JsonValue, key: str) -> str:
    if not isinstance(value, str):
        raise _InvalidRefError(f"{key} is not text")
    return value


@dataclass(frozen=True, slots=True)
class StorePaths:
    """The paths below ``store/``."""

    root: Path

    @property
    def blobs(self) -> Path:
        """One file per blob, named by its digest."""
        return self.root / "blobs" / "sha256"

    @property
    def refs(self) -> Path:
        """One file per installed expert."""
        return self.root / "refs"

    @property
    def staging(self) -> Path:
        """One folder per running install."""
        return self.root / "staging"

    @property
    def leases(self) -> Path:
        """One folder per process that uses blobs."""
        return self.root / "leases"

    @property
    def derived(self) -> Path:
        """One folder per package that data was computed from."""
        return self.root / "derived"

    @property
    def running(self) -> Path:
        """One folder per run that uses a base."""
        return self.root / "running"

    @property
    def lock(self) -> Path:
        """The lock that is held while refs or blobs are changed."""
        return self.root / "lock"

    def blob(self, digest: Digest) -> Path:
        """Return the path of a blob."""
        return self.blobs / digest.hex

    def ref(self, registry: str, package: PackageName, version: Version) -> Path:
        """Return the path of an expert's ref."""
        place = self.refs / _registry_folder(registry)
        return place / package.namespace / package.name / str(version)

    def find_refs(self, package: PackageName, version: Version) -> list[Path]:
        """Return the refs of one version from any registry: more than one after a crash."""
        places = (Path(entry.path) for entry in _list_entries(str(self.refs)))
        paths = (place / package.namespace / package.name / str(version) for place in places)
        return [path for path in paths if path.is_file()]


@dataclass(frozen=True, slots=True)
class DamagedRef:
    """A file among the refs that is not a ref."""

    path: Path
    name: str
    """What it should have been: ``namespace/name@version``."""
    problem: str

    @property
    def warning(self) -> str:
        """The message for the user of a command that is not about the store."""
        return f"the record of {self.name} is damaged; see `expertctl doctor`"


@dataclass(frozen=True, slots=True)
class StoreScan:
    """The result of reading every ref, sorted by name and version."""

    experts: tuple[StoredExpert, ...]
    damaged: tuple[DamagedRef, ...]
    shadowed: tuple[StoredExpert, ...] = ()
    """Refs of an earlier origin of an expert, left by a process that was killed."""


def scan_refs(paths: StorePaths) -> StoreScan:
    """Read every ref; one that is removed meanwhile is left out."""
    experts: list[StoredExpert] = []
    damaged: list[DamagedRef] = []
    for path in _iter_ref_files(paths.refs):
        try:
            experts.append(read_ref(paths, path))
        except FileNotFoundError:
            continue
        except InvalidPackageError as error:
            namespace, name, version = path.parts[-3:]
            damaged.append(DamagedRef(path, f"{namespace}/{name}@{version}", error.problems[0]))
    experts.sort(key=lambda e: (e.package, e.version, e.registry == LOCAL, e.registry))
    shadowed = [b for a, b in pairwise(experts) if _is_shadow(a, b)]
    shown = [e for e in experts if e not in shadowed] if shadowed else experts
    return StoreScan(tuple(shown), tuple(damaged), tuple(shadowed))


def _is_shadow(visible: StoredExpert, other: StoredExpert) -> bool:
    """Tell whether two refs are one expert that a registry took over from another origin."""
    return visible.ref == other.ref and visible.content_digest == other.content_digest


def _registry_folder(registry: str) -> str:
    """Return a host as a folder name valid on any system, as `RegistryAddress.folder` does."""
    return registry.replace(":", "+").replace("[", "").replace("]", "")


def read_ref(paths: StorePaths, path: Path) -> StoredExpert:
    """Read one ref, which must be at the path that its content demands.

    Raises:
        FileNotFoundError: when it is not there.
        InvalidPackageError: when it is damaged.
    """
    expert = parse_ref(path.read_bytes(), what=str(path))
    if paths.ref(expert.registry, expert.package, expert.version) != path:
        raise InvalidPackageError(str(path), [f"it names {expert.ref} of {expert.registry}"])
    return expert


def _iter_ref_files(folder: Path) -> Iterator[Path]:
    """Yield the files four levels below ``refs``, without those being written (``.`` first)."""
    level = [str(folder)]
    for _ in range(3):
        level = [e.path for f in level for e in _list_entries(f) if e.is_dir()]
    for name in level:
        yield from (Path(e.path) for e in _list_entries(name) if e.is_file())


def _list_entries(folder: str) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if e.name[0] != "."), key=lambda e: e.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def find_file_size(path: Path) -> int | None:
    """Return the size of a file; None when it does not exist."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None
