"""The bytes of tokens, of which some are only a part of a letter: no text can tell them.

Byte-level tokenizers spell each byte as a letter of an alphabet of their own, the one of GPT-2.
Others spell single bytes as ``<0xE2>``, where their file says that it does.
"""

import json
import re
from functools import cache
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
"""Bytes that are spelt as the letter of that number; all others come behind."""


def spelt_bytes(piece: str, decoder: str | None) -> bytes | None:
    """Return the bytes that a token of the file spells; None where it spells letters.

    ``decoder`` is how the file has tokens read, as JSON.
    """
    kinds = _kinds(decoder)
    if "ByteLevel" in kinds:
        return _by_alphabet(piece)
    byte = _BYTE.fullmatch(piece) if "ByteFallback" in kinds else None
    return bytes.fromhex(byte[1]) if byte else None


def _by_alphabet(piece: str) -> bytes | None:
    known = _alphabet()
    return bytes(known[letter] for letter in piece) if known.keys() >= set(piece) else None


@cache
def _alphabet() -> dict[str, int]:
    """Return the bytes by their letters."""
    rest = (byte for byte in range(256) if byte not in _PRINTABLE)
    own = {chr(byte): byte for byte in _PRINTABLE}
    return {**own, **{chr(256 + number): byte for number, byte in enumerate(rest)}}


@cache
def _kinds(decoder: str | None) -> frozenset[str]:
    document: dict[str, Any] = json.loads(decoder) if decoder else {}
    each = [document, *document.get("decoders", ())]
    return frozenset(str(one.get("type")) for one in each)
