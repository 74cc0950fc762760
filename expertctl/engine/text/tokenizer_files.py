"""The small files next to ``tokenizer.json``, and the bytes of tokens.

Special tokens, end tokens and the chat template are read leniently where published files are
irregular (``model_max_length`` of 10³⁰), but bounded.

Some tokens are only part of a character, so their bytes cannot be seen from text. Byte-level
tokenizers spell each byte as a letter of GPT-2's alphabet; others spell single bytes as ``<0xE2>``,
if their file says so.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from expertctl.errors import InvalidPackageError

_MAX_BYTES = 32 << 20
_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_TEMPLATE_FILE = "chat_template.jinja"
_CONFIG_FILE = "tokenizer_config.json"

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TemplateSource:
    """The text of a chat template and its file."""

    text: str
    file: Path


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """The tokenizer settings of a base."""

    special_tokens: Mapping[str, str]  # "bos_token" -> "<s>"
    end_ids: tuple[int, ...]  # of generation_config.json, else config.json
    template: TemplateSource | None


def read_tokenizer_config(directory: Path) -> TokenizerConfig:
    """Read the existing files; each except ``tokenizer.json`` may be missing.

    Raises:
        InvalidPackageError: if a file is malformed.
    """
    config = _read_document(directory / _CONFIG_FILE)
    legacy = _read_document(directory / "special_tokens_map.json")
    return TokenizerConfig(
        special_tokens=_read_special_tokens({**legacy, **config}, directory / _CONFIG_FILE),
        end_ids=_read_end_ids(directory),
        template=_read_template(directory, config),
    )


def _read_document(path: Path) -> Document:
    if not path.is_file():
        return {}
    try:
        document = json.loads(_read_bounded(path))
    except (ValueError, RecursionError) as error:
        raise InvalidPackageError(str(path), [f"not JSON: {error}"]) from error
    if not isinstance(document, dict):
        raise InvalidPackageError(str(path), ["the document is not a JSON object"])
    return document


def _read_bounded(path: Path) -> bytes:
    data = path.read_bytes()
    if len(data) > _MAX_BYTES:
        raise InvalidPackageError(str(path), [f"{len(data)} bytes, at most {_MAX_BYTES} allowed"])
    return data


def _read_special_tokens(document: Document, file: Path) -> dict[str, str]:
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


def _read_end_ids(directory: Path) -> tuple[int, ...]:
    for file in ("generation_config.json", "config.json"):
        value = _read_document(directory / file).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            raise InvalidPackageError(str(directory / file), ["eos_token_id is not a token id"])
        return tuple(ids)
    return ()


def _read_template(directory: Path, config: Document) -> TemplateSource | None:
    """Prefer the separate file to the key; of a list of named templates, take the default."""
    file = directory / _TEMPLATE_FILE
    if file.is_file():
        return TemplateSource(_read_template_text(file), file)
    file, value = directory / _CONFIG_FILE, config.get("chat_template")
    if isinstance(value, list):
        named = [t for t in value if isinstance(t, dict) and t.get("name") == "default"]
        value = named[0].get("template") if len(named) == 1 else value
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidPackageError(str(file), ["chat_template is not a string"])
    return TemplateSource(value, file)


def _read_template_text(file: Path) -> str:
    try:
        return _read_bounded(file).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidPackageError(str(file), [f"not UTF-8 at byte {error.start}"]) from error


_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes spelled as the letter of the same number; all others follow them."""


def decode_token_bytes(piece: str, decoder: str | None) -> bytes | None:
    """Return the bytes that a token of the file spells; None if it spells letters.

    ``decoder`` is the decoder of the file, as JSON.
    """
    kinds = _decoder_types(decoder)
    if "ByteLevel" in kinds:
        return _decode_byte_level(piece)
    byte = _BYTE.fullmatch(piece) if "ByteFallback" in kinds else None
    return bytes.fromhex(byte[1]) if byte else None


def _decode_byte_level(piece: str) -> bytes | None:
    known = _byte_level_alphabet()
    return bytes(known[letter] for letter in piece) if known.keys() >= set(piece) else None


@cache
def _byte_level_alphabet() -> dict[str, int]:
    rest = (byte for byte in range(256) if byte not in _PRINTABLE)
    own = {chr(byte): byte for byte in _PRINTABLE}
    return {**own, **{chr(256 + number): byte for number, byte in enumerate(rest)}}


@cache
def _decoder_types(decoder: str | None) -> frozenset[str]:
    document: dict[str, Any] = json.loads(decoder) if decoder else {}
    each = [document, *document.get("decoders", ())]
    return frozenset(str(one.get("type")) for one in each)
