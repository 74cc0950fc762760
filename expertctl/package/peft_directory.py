"""PEFT directories: files saved beside an adapter, and the export of a package to directories.

Trainers save a model card, a chat template and a tokenizer beside an adapter. Only the base's
template and tokenizer are used, so differences are worth a warning.

An export gives the publisher's bytes under the names that PEFT loads. One adapter fills the
directory; several get sub-directories named by their number and kind. The model card and licences
are exported, too. Every byte is hashed while it is copied.
"""

from collections.abc import Callable
from functools import partial
from io import BytesIO
from pathlib import Path

from expertctl.errors import ExpertError
from expertctl.package.adapter_files import CONFIG_PATH, WEIGHTS_PATH
from expertctl.package.base_model import TOKENIZER_FILE, BaseFacts
from expertctl.package.layout import Blobs, PackageLayout, is_document
from expertctl.package.source_files import SourceFile, find_source_file
from expertctl.package.tokenizer import MAX_TOKENIZER_BYTES
from expertctl.package.write import ArchiveOutput, copy_verified, open_atomic_directory
from expertctl.reference import FileDigest, Progress, ignore_progress
from expertctl.schema.manifest import MANIFEST_PATH, Manifest, parse_manifest
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object, read_bounded

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
