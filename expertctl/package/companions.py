"""The files that trainers save beside an adapter: a model card, a chat template, a tokenizer.

Only the base's template and tokenizer are used, so what differs from them is worth a warning.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from expertctl.errors import ExpertError
from expertctl.package.base_model import BaseFacts
from expertctl.package.source_files import SourceFile, source_file
from expertctl.package.tokenizer_form import MAX_TOKENIZER_BYTES
from expertctl.schema.strict_json import JsonObject, JsonValue, load_object, read_bounded

_CARD_BYTES = 64 << 10
_MAX_BYTES = MAX_TOKENIZER_BYTES
_UNFILLED = "[More Information Needed]"
_MOST_UNFILLED = 10
_TEMPLATE_FILE = "chat_template.jinja"
_SETTINGS_FILE = "tokenizer_config.json"
_ADDED_FILE = "added_tokens.json"
_TOKENIZER_FILE = "tokenizer.json"
_MAX_SHOWN = 5
_Read = Callable[[str], bytes | None]


def is_empty_card(file: SourceFile) -> bool:
    """Tell whether a model card is the form that PEFT writes, with nothing filled in."""
    if file.name.lower() != "readme.md" or file.size > _CARD_BYTES:
        return False
    text = file.read(max_bytes=_CARD_BYTES).decode("utf-8", errors="replace")
    return text.count(_UNFILLED) >= _MOST_UNFILLED


def differences(directory: Path, base: BaseFacts | None, *, template: bool) -> list[str]:
    """Warn of a chat template and of added tokens that are not those of the base.

    ``template`` says that the package brings a template of its own.
    """
    if base is None or base.directory is None:
        return []
    own = partial(_read_own, directory)
    theirs = partial(_read_base, base.directory)
    warnings = []
    found = _template(own)
    if not template and found is not None and found != _template(theirs):
        warnings.append(
            "the adapter's chat template differs from the base's, which will be used: to pack it, "
            "name it as decoding.chat_template in expert.json"
        )
    known = _known_tokens(theirs)
    added = sorted(_added_tokens(own) - known)
    if known and added:  # without the base's vocabulary nothing is known of its tokens
        shown = ", ".join(repr(token[:40]) for token in added[:_MAX_SHOWN])
        more = f" and {len(added) - _MAX_SHOWN} more" if len(added) > _MAX_SHOWN else ""
        warnings.append(f"tokens of the adapter that the base does not know: {shown}{more}")
    return warnings


def _template(read: _Read) -> str | None:
    """Return the text of a chat template, without the white space around it."""
    data = read(_TEMPLATE_FILE)
    text: JsonValue = data.decode("utf-8", errors="replace") if data is not None else None
    if text is None:
        text = _document(read, _SETTINGS_FILE).get("chat_template")
    return text.strip() if isinstance(text, str) else None


def _added_tokens(read: _Read) -> set[str]:
    """Return the tokens that a tokenizer has beyond its vocabulary."""
    listed = _document(read, _TOKENIZER_FILE).get("added_tokens")
    rows = listed if isinstance(listed, list) else []
    contents = [row.get("content") for row in rows if isinstance(row, dict)]
    added = {text for text in contents if isinstance(text, str)}
    return added | set(_document(read, _ADDED_FILE))


def _known_tokens(read: _Read) -> set[str]:
    model = _document(read, _TOKENIZER_FILE).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    known = set(vocabulary) if isinstance(vocabulary, dict) else set()
    return known | _added_tokens(read)


def _document(read: _Read, name: str) -> JsonObject:
    """Return a JSON file that nothing depends on; an empty one where it cannot be read."""
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
        found = source_file(directory, name)
        return found.read(max_bytes=_MAX_BYTES) if found is not None else None
    except ExpertError:
        return None


def _read_base(directory: Path, name: str) -> bytes | None:
    """Return a file of a base, which its owner added, whatever links it consists of."""
    path = directory / name
    try:
        return read_bounded(path, max_bytes=_MAX_BYTES) if path.is_file() else None
    except OSError:
        return None
