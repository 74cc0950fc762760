"""A ref: the small file that makes an expert installed, as a value and as bytes.

It is written last, so all that a readable ref names is there. Reading needs only the standard
library: `list` must start fast.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from expertctl.digest import Digest, FileDigest
from expertctl.errors import ExpertError, InvalidPackageError
from expertctl.reference import FROM_FILE, PackageName, Version
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object

SCHEMA = 1
MAX_BYTES = 1 << 20
LOCAL = FROM_FILE
"""The registry of what was installed from a file."""
MISMATCH = "base mismatch allowed"
"""What a warning about a base that does not fit contains."""

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
    """As in the manifest; a ref does not hold the default."""


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
    """The id of the key that signed it; ``None`` means unsigned."""
    base: RequiredBase
    requires: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def again(self) -> str:
        """How the user repairs damage to it."""
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
        """The bytes of all files, the signature included."""
        return sum(file.size for file in self.layers)

    @property
    def mismatched(self) -> bool:
        """Tell whether the user accepted a base that it was not made for."""
        return any(MISMATCH in warning for warning in self.warnings)

    def file(self, path: str) -> FileDigest:
        """Return one of its files; an unknown path is our own bug."""
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
        "files": [_file_document(file) for file in expert.files],
        "signature": _file_document(expert.signature) if expert.signature else None,
        "signer": expert.signer,
        "base": {
            "name": base.name,
            "revision": base.revision,
            "arch": str(base.arch),
            "weights": str(base.weights) if base.weights else None,
            "tokenizer": str(base.tokenizer),
            "accepts": [str(digest) for digest in base.accepts],
            **_tokenizer_version(base),
        },
        "requires": list(expert.requires),
        "conflicts": list(expert.conflicts),
        "size": expert.size,
        "warnings": list(expert.warnings),
    }
    return json.dumps(document, indent=1).encode() + b"\n"


def parse_ref(data: bytes, *, what: str) -> StoredExpert:
    """Read the bytes of a ref.

    Raises:
        InvalidPackageError: when it is not exactly such a document.
    """
    document = load_object(data, what=what, max_bytes=MAX_BYTES)
    try:
        expert = _expert_of(_Fields(document, _KEYS))
    except (ExpertError, _RefusedError) as error:
        raise InvalidPackageError(what, [str(error)]) from error
    if encode_ref(expert) != data:
        raise InvalidPackageError(what, ["it is not as expertctl wrote it"])
    return expert


class _RefusedError(ValueError):
    """What is wrong with a ref."""


class _Fields:
    """Typed access to the keys of one object, all of which must be there, and no others."""

    def __init__(self, document: JsonValue, keys: set[str]) -> None:
        if not isinstance(document, dict) or set(document) != keys:
            raise _RefusedError(f"not exactly the keys {', '.join(sorted(keys))}")
        self._document: JsonObject = document

    def text(self, key: str) -> str:
        return _text(self._document[key], key)

    def maybe(self, key: str, read: Callable[[str], T]) -> T | None:
        return None if self._document[key] is None else read(self.text(key))

    def texts(self, key: str) -> tuple[str, ...]:
        return tuple(_text(item, key) for item in self.items(key))

    def items(self, key: str) -> list[JsonValue]:
        value = self._document[key]
        if not isinstance(value, list):
            raise _RefusedError(f"{key} is not a list")
        return value

    def number(self, key: str) -> int:
        value = self._document[key]
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise _RefusedError(f"{key} is not a number of bytes")
        return value

    def raw(self, key: str) -> JsonValue:
        return self._document[key]


def _expert_of(fields: _Fields) -> StoredExpert:
    if fields.number("schema") != SCHEMA:
        raise _RefusedError("it was written by another version of expertctl")
    signature = fields.raw("signature")
    files = tuple(_file_of(item) for item in fields.items("files"))
    if not any(file.path == _MANIFEST for file in files):
        raise _RefusedError(f"{_MANIFEST} is not among its files")
    return StoredExpert(
        registry=fields.text("registry"),
        package=PackageName.parse(fields.text("name")),
        version=Version.parse(fields.text("version")),
        content_digest=Digest.parse(fields.text("content_digest")),
        package_digest=Digest.parse(fields.text("package_digest")),
        files=files,
        signature=None if signature is None else _file_of(signature),
        signer=fields.maybe("signer", lambda text: str(Digest.parse(text))),
        base=_base_of(fields.raw("base")),
        requires=fields.texts("requires"),
        conflicts=fields.texts("conflicts"),
        warnings=fields.texts("warnings"),
    )


def _base_of(value: JsonValue) -> RequiredBase:
    versioned = isinstance(value, dict) and _TOKENIZER_VERSION in value
    fields = _Fields(value, _BASE_KEYS | ({_TOKENIZER_VERSION} if versioned else set()))
    return RequiredBase(
        name=fields.text("name"),
        revision=fields.maybe("revision", str),
        arch=Digest.parse(fields.text("arch")),
        weights=fields.maybe("weights", Digest.parse),
        tokenizer=Digest.parse(fields.text("tokenizer")),
        accepts=tuple(Digest.parse(text) for text in fields.texts("accepts")),
        tokenizer_version=fields.number(_TOKENIZER_VERSION) if versioned else 1,
    )


def _tokenizer_version(base: RequiredBase) -> Mapping[str, JsonValue]:
    version = base.tokenizer_version
    return {} if version == 1 else {_TOKENIZER_VERSION: version}


def _file_of(value: JsonValue) -> FileDigest:
    fields = _Fields(value, _FILE_KEYS)
    path = fields.text("path")
    return FileDigest(path, fields.number("size"), Digest.parse(fields.text("digest")))


def _file_document(file: FileDigest) -> Mapping[str, JsonValue]:
    return {"path": file.path, "size": file.size, "digest": str(file.digest)}


def _text(value: JsonValue, key: str) -> str:
    if not isinstance(value, str):
        raise _RefusedError(f"{key} is not text")
    return value
