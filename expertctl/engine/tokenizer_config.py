"""The small files beside ``tokenizer.json``: special tokens, end tokens, the chat template's text.

They are read leniently where the world is lenient (``model_max_length`` of 10³⁰), but bounded.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from expertctl.errors import InvalidPackageError

_MAX_BYTES = 32 << 20
_SPECIAL_NAMES = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template and the file it stands in."""

    text: str
    file: Path


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """What a base says about its tokens."""

    special_tokens: Mapping[str, str]  # "bos_token" -> "<s>"
    end_ids: tuple[int, ...]  # of generation_config.json, else config.json
    template: TemplateSource | None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Read what there is; every file but ``tokenizer.json`` may be missing.

    Raises:
        InvalidPackageError: when a file is malformed.
    """
    config = _read(directory / _CONFIG_FILE)
    legacy = _read(directory / "special_tokens_map.json")
    return TokenizerConfig(
        special_tokens=_special_tokens({**legacy, **config}, directory / _CONFIG_FILE),
        end_ids=_end_ids(directory),
        template=_template(directory, config),
    )


def _read(path: Path) -> Document:
    if not path.is_file():
        return {}
    data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"{len(data)} bytes, at most {_MAX_BYTES} allowed"])
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise InvalidPackageError(str(path), ["the document is not a JSON object"])
    return document


def _special_tokens(document: Document, file: Path) -> dict[str, str]:
    tokens: dict[str, str] = {}
    for name in _SPECIAL_NAMES:
        value = document.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            tokens[name] = value
        elif value is not None:
            raise InvalidPackageError(str(file), [f"{name} is neither a token nor null"])
    return tokens


def _end_ids(directory: Path) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        value = _read(directory / file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InvalidPackageError(str(directory / file), ["eos_token_id is not a token id"])
        return tuple(ids)
    return ()


def _template(directory: Path, config: Document) -> TemplateSource | None:
    """The file of its own wins over the key, a list of named ones has a default."""
    file = directory / _TEMPLATE_FILE
    if file.is_file():
        return TemplateSource(_template_text(file), file)
    file, value = directory / _CONFIG_FILE, config.get("chat_template")
    if isinstance(value, list):
        named = [t for t in value if isinstance(t, dict) and t.get("name") == "default"]
        value = named[0].get("template") if len(named) == 1 else value
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidPackageError(str(file), ["chat_template is not a text"])
    return TemplateSource(value, file)


def _template_text(file: Path) -> str:
    data = file.read_bytes()
    if len(data) > _MAX_BYTES:
        raise InvalidPackageError(str(file), [f"{len(data)} bytes, at most {_MAX_BYTES} allowed"])
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPackageError(str(file), [f"not UTF-8 at byte {error.start}"]) from error
