"""Directories of adapters: reading the files to pack, and the export of a package for PEFT.

The Hugging Face cache stores a snapshot as links: ``models--org--name/snapshots/REV/file`` points
to ``../../blobs/DIGEST``. Such a link is followed if every hop stays inside its ``models--…``
folder. Every other link is refused: it could bring any file of this machine into a package.
A file is opened without following links, and only if it is the one that was checked: device and
inode are compared on the open descriptor. Documents are checked for secrets.

Trainers save a model card, a chat template and a tokenizer beside an adapter. Only the template and
tokenizer of the base are used, so differences are worth a warning.

An export gives the bytes of the publisher under the names that PEFT loads. One adapter fills the
directory; several get sub-directories named by their number and kind. The model card and licences
are exported, too. Every byte is hashed while it is copied.
"""

import codecs
import errno
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from expertctl.digest import Digest, FileDigest, Progress, hash_stream, ignore_progress
from expertctl.errors import DigestError, ExpertError, InvalidPackageError
from expertctl.package.base_model import TOKENIZER_FILE, BaseFacts
from expertctl.package.layout import Blobs, PackageLayout, is_document
from expertctl.package.tokenizer import MAX_TOKENIZER_BYTES
from expertctl.package.write import ArchiveOutput, copy_verified, open_atomic_directory
from expertctl.schema.manifest import MANIFEST_PATH, Manifest, parse_manifest
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object, read_bounded

WEIGHTS_PATH = "adapter_model.safetensors"
CONFIG_PATH = "adapter_config.json"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
"""Names of pickled weights, which are opened only if the user allows it."""
_CACHE_PREFIX = "models--"
_SNAPSHOTS_FOLDER = "snapshots"
_MAX_HOPS = 8
_OPEN_FLAGS = (
    os.O_RDONLY
    | getattr(os, "O_NOFOLLOW", 0)
    | getattr(os, "O_CLOEXEC", 0)
    | getattr(os, "O_NONBLOCK", 0)
    | getattr(os, "O_BINARY", 0)
)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """A regular file to pack, after following links; only `find_source_file` makes one."""

    name: str
    """Its name in the directory."""
    path: Path
    """Its real path, not a link."""
    size: int
    device: int
    inode: int

    def open(self) -> BinaryIO:
        """Open the file that was checked.

        Raises:
            DigestError: when another file, a link or nothing is in its place now.
        """
        try:
            descriptor = os.open(self.path, _OPEN_FLAGS)
        except OSError as error:
            raise self._changed_error() from error
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or (found.st_dev, found.st_ino) != (
            self.device,
            self.inode,
        ):
            os.close(descriptor)
            raise self._changed_error()
        return os.fdopen(descriptor, "rb")

    def read(self, *, max_bytes: int) -> bytes:
        """Return at most ``max_bytes`` + 1 bytes, enough for the caller to detect an excess."""
        with self.open() as stream:
            return stream.read(max_bytes + 1)

    def hash(self, *, progress: Progress = ignore_progress) -> tuple[int, Digest]:
        """Return its size in bytes and its digest."""
        with self.open() as stream:
            return hash_stream(stream, progress=progress)

    def _changed_error(self) -> DigestError:
        return DigestError(
            f"{self.name}: the file was replaced while it was being packed",
            hint="build again when nothing writes to the directory",
        )


def find_source_file(directory: Path, name: str) -> SourceFile | None:
    """Find a file of a directory by its plain name; ``None`` when it does not exist.

    Raises:
        InvalidPackageError: for a link that may not be followed, and for a non-regular file.
    """
    path = directory / name
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISLNK(found.st_mode):
        path = _follow_links(directory.resolve() / name, name)
        found = path.lstat()
        if path.resolve() != path:  # a folder on the way was replaced meanwhile
            raise InvalidPackageError(name, ["a symbolic link that changed while it was read"])
    if not stat.S_ISREG(found.st_mode):
        raise InvalidPackageError(name, ["not a regular file"])
    return SourceFile(name, path, found.st_size, found.st_dev, found.st_ino)


def find_adapter_file(directory: Path, name: str, converted: Path | None) -> SourceFile | None:
    """Find a file of a directory, or the one of this name that it was converted to."""
    found = None if converted is None else find_source_file(converted, name)
    return found or find_source_file(directory, name)


def list_source_names(directory: Path) -> list[str]:
    """Return the names of all entries of a directory, sorted."""
    return sorted(path.name for path in directory.iterdir())


def find_cache_folder(directory: Path) -> Path | None:
    """Return the ``models--…`` folder of the hub cache that a snapshot belongs to, if any."""
    real = directory.resolve()
    for folder in real.parents:
        below = real.relative_to(folder).parts
        if (
            folder.name.startswith(_CACHE_PREFIX)
            and len(below) > 1
            and below[0] == _SNAPSHOTS_FOLDER
        ):
            return folder
    return None


def find_cached_name(directory: Path) -> str | None:
    """Return the name of the repository that a snapshot of the hub cache belongs to."""
    folder = find_cache_folder(directory)
    return folder.name.rpartition("--")[2] if folder is not None else None


def _follow_links(path: Path, name: str) -> Path:
    """Follow a link hop by hop; ``path`` is absolute, and its folder contains no links."""
    folder = find_cache_folder(path.parent)
    if folder is None:
        raise InvalidPackageError(name, ["a symbolic link is not packed; put the file itself here"])
    for _ in range(_MAX_HOPS):
        if not path.parent.is_relative_to(folder):
            raise InvalidPackageError(
                name, [f"a symbolic link that leaves {folder.name}; put the file itself here"]
            )
        try:
            target = path.readlink()
        except FileNotFoundError as error:
            raise InvalidPackageError(
                name, ["a symbolic link to a file that is missing; download it again"]
            ) from error
        except OSError as error:
            if error.errno == errno.EINVAL:  # not a link: the end of the chain
                return path
            raise InvalidPackageError(name, [f"cannot be read: {error.strerror}"]) from error
        path = _resolve_next_hop(path, target, name)
    raise InvalidPackageError(name, ["a loop of symbolic links"])


def _resolve_next_hop(path: Path, target: Path, name: str) -> Path:
    """Return the target of a link with the links in its folder, but not itself, resolved."""
    there = path.parent / target
    if there.name in ("", "..", "."):
        raise InvalidPackageError(name, ["a symbolic link to a folder"])
    try:
        return there.parent.resolve(strict=True) / there.name
    except (OSError, RuntimeError) as error:
        raise InvalidPackageError(
            name, ["a symbolic link to a file that is missing; download it again"]
        ) from error


_PRIVATE_KEY = re.compile(rb"-----BEGIN ([A-Z0-9]+ )*PRIVATE KEY( BLOCK)?-----")
_TOKEN = re.compile(rb"(?<![A-Za-z0-9_-])xpt_[A-Za-z0-9_-]{43}(?![A-Za-z0-9_-])")
_MAX_SECRET_BYTES = 64
README = "README.md"
_CHUNK = 1 << 20


def find_document_problem(stream: BinaryIO, *, name: str) -> str | None:
    """Return why a non-weights file of a package is refused, or None.

    The stream is read from its position to its end. Secrets are those of `find_secret`.
    """
    if secret := find_secret_in_stream(stream):
        return f"{name}: holds {secret}, which must never be published"
    stream.seek(0)
    if name == README and (at := _find_invalid_utf8(stream)) is not None:
        return f"{name}: not UTF-8 at byte {at}"
    return None


def find_secret_in_stream(stream: BinaryIO) -> str | None:
    """Return the kind of secret in a stream of any length; see `find_secret`."""
    tail = b""
    while chunk := stream.read(_CHUNK):
        if found := find_secret(tail + chunk):
            return found
        tail = chunk[-_MAX_SECRET_BYTES:]
    return None


def _find_invalid_utf8(stream: BinaryIO) -> int | None:
    """Return the offset of the first invalid UTF-8 in a stream of any length, or None."""
    decoder, read = codecs.getincrementaldecoder("utf-8")(), 0
    while True:
        chunk = stream.read(_CHUNK)
        kept = len(decoder.getstate()[0])
        try:
            decoder.decode(chunk, final=not chunk)
        except UnicodeDecodeError as error:
            return read - kept + error.start
        if not chunk:
            return None
        read += len(chunk)


def find_secret(data: bytes) -> str | None:
    """Return the kind of secret in some bytes: a PEM private key, or a registry access token."""
    if _PRIVATE_KEY.search(data):
        return "a private key"
    return "an access token" if _TOKEN.search(data) else None


_CARD_BYTES = 64 << 10
_MAX_BYTES = MAX_TOKENIZER_BYTES
_UNFILLED_MARK = "[More Information Needed]"
_MAX_UNFILLED = 10
_TEMPLATE_FILE = "chat_template.jinja"
_SETTINGS_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
_MAX_SHOWN = 5
_ReadFile = Callable[[str], bytes | None]


def is_empty_card(file: SourceFile) -> bool:
    """Tell whether a model card is PEFT's template with nothing filled in."""
    if file.name.lower() != "readme.md" or file.size > _CARD_BYTES:
        return False
    text = file.read(max_bytes=_CARD_BYTES).decode("utf-8", errors="replace")
    return text.count(_UNFILLED_MARK) >= _MAX_UNFILLED


def compare_companions(directory: Path, base: BaseFacts | None, *, template: bool) -> list[str]:
    """Warn of a chat template and of added tokens that differ from the base's.

    ``template`` says that the package contains a template of its own.
    """
    if base is None or base.directory is None:
        return []
    own = partial(_read_own, directory)
    theirs = partial(_read_base, base.directory)
    warnings = []
    found = _read_template(own)
    if not template and found is not None and found != _read_template(theirs):
        warnings.append(
            "the adapter's chat template differs from the base's, which will be used: to pack it, "
            "name it as decoding.chat_template in expert.json"
        )
    known = _read_known_tokens(theirs)
    added = sorted(_read_added_tokens(own) - known)
    if known and added:  # nothing can be said without the base's vocabulary
        shown = ", ".join(repr(token[:40]) for token in added[:_MAX_SHOWN])
        more = f" and {len(added) - _MAX_SHOWN} more" if len(added) > _MAX_SHOWN else ""
        warnings.append(f"tokens of the adapter that the base does not know: {shown}{more}")
    return warnings


def _read_template(read: _ReadFile) -> str | None:
    """Return the text of a chat template without surrounding white space."""
    data = read(_TEMPLATE_FILE)
    text: JsonValue = data.decode("utf-8", errors="replace") if data is not None else None
    if text is None:
        text = _read_document(read, _SETTINGS_FILE).get("chat_template")
    return text.strip() if isinstance(text, str) else None


def _read_added_tokens(read: _ReadFile) -> set[str]:
    """Return the tokens that a tokenizer has beyond its vocabulary."""
    listed = _read_document(read, TOKENIZER_FILE).get("added_tokens")
    rows = listed if isinstance(listed, list) else []
    contents = [row.get("content") for row in rows if isinstance(row, dict)]
    added = {text for text in contents if isinstance(text, str)}
    return added | set(_read_document(read, _ADDED_FILE))


def _read_known_tokens(read: _ReadFile) -> set[str]:
    model = _read_document(read, TOKENIZER_FILE).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = set(vocabulary) if isinstance(vocabulary, dict) else set()
    return known | _read_added_tokens(read)


def _read_document(read: _ReadFile, name: str) -> JsonObject:
    """Return an optional JSON file; an empty object if it cannot be read."""
    data = read(name)
    if data is None:
        return {}
    try:
        return load_object(data, what=name, max_bytes=_MAX_BYTES)
    except ExpertError:
        return {}


def _read_own(directory: Path, name: str) -> bytes | None:
    """Return a file of an adapter; no link that leads elsewhere is followed."""
    try:
        found = find_source_file(directory, name)
        return found.read(max_bytes=_MAX_BYTES) if found is not None else None
    except ExpertError:
        return None


def _read_base(directory: Path, name: str) -> bytes | None:
    """Return a file of a base, following any links, as its owner added it."""
    path = directory / name
    try:
        return read_bounded(path, max_bytes=_MAX_BYTES) if path.is_file() else None
    except OSError:
        return None


def export_peft_directories(
    directory: Path, layout: PackageLayout, blobs: Blobs, *, progress: Progress = ignore_progress
) -> list[str]:
    """Write the adapters of a package to a new or empty directory; return their relative paths.

    Raises as `open_atomic_directory`, `parse_manifest` and `copy_verified`.
    """
    source = _PackageFiles(layout, blobs, progress)
    manifest = parse_manifest(source.read(MANIFEST_PATH))
    places = _choose_folders(manifest)
    with open_atomic_directory(directory) as folder:
        for entry, place in zip(manifest.adapters, places, strict=True):
            (folder / place).mkdir(exist_ok=True)
            source.copy(entry.config, folder / place / CONFIG_PATH)
            source.copy(entry.path, folder / place / WEIGHTS_PATH)
        for file in layout.files:
            if is_document(file.path):
                source.copy(file.path, folder / file.path)
    return places


def _choose_folders(manifest: Manifest) -> list[str]:
    if len(manifest.adapters) == 1:
        return ["."]
    return [f"{number}-{entry.kind}" for number, entry in enumerate(manifest.adapters, start=1)]


class _PackageFiles:
    def __init__(self, layout: PackageLayout, blobs: Blobs, progress: Progress) -> None:
        self._files = {file.path: file for file in layout.files}
        self._blobs = blobs
        self._progress = progress

    def read(self, path: str) -> bytes:
        """Return a small file."""
        data = BytesIO()
        self._copy_blob(self._files[path], data)
        return data.getvalue()

    def copy(self, path: str, target: Path) -> None:
        """Write a file."""
        with target.open("xb") as output:
            self._copy_blob(self._files[path], output)
        target.chmod(0o644)

    def _copy_blob(self, file: FileDigest, output: ArchiveOutput) -> None:
        with self._blobs(file.digest) as stream:
            copy_verified(
                stream, output, size=file.size, digest=file.digest, progress=self._progress
            )
