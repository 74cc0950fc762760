"""The background of routing: everyday texts that are for no expert, and their vectors.

``background.txt`` has questions, requests and small talk, written for this project, in English. An
encoder that sees meaning encodes them once; the rows are kept beside the index, and made again when
the encoder or the texts change. Without write access they are encoded in every process.
"""

import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np

from expertctl.files import write_atomic
from expertctl.routing.encoder import Encoder
from expertctl.routing.vector_table import EncodedTexts, Vectors

_TEXTS = Path(__file__).with_name("background.txt")
_PREFIX, _SUFFIX = "background-", ".f32"
_TOLERANCE = 1e-3
_ENCODERS = ("minilm",)
"""Encoders that see meaning; others see shared words, of which everyday texts have many."""


@cache
def read_background_texts() -> tuple[str, ...]:
    """Return the texts."""
    return tuple(_TEXTS.read_text(encoding="utf-8").split("\n")[:-1])


@cache
def compute_background_digest() -> str:
    """Return the first digits of the SHA-256 of the texts, which a calibration depends on."""
    return hashlib.sha256(_TEXTS.read_bytes()).hexdigest()[:12]


def load_background(folder: Path, encoder: Encoder) -> EncodedTexts | None:
    """Return the rows of the texts, from a file in a folder if there is one; None: not used."""
    if encoder.name not in _ENCODERS:
        return None
    key = f"{encoder.stamp} {compute_background_digest()}"
    name = f"{_PREFIX}{hashlib.sha256(key.encode()).hexdigest()[:16]}{_SUFFIX}"
    stored = _read_rows(folder / name, encoder)
    if stored is None:
        stored = encoder.encode_for_rerank(read_background_texts())
        _write_rows(folder, name, stored)
    return stored


def _read_rows(path: Path, encoder: Encoder) -> EncodedTexts | None:
    """Return stored rows; None if they are absent, or are not those of unit vectors."""
    count = len(read_background_texts())
    widths = (encoder.dimensions, encoder.rerank_dimensions)
    with suppress(OSError):
        if path.stat().st_size != count * sum(widths) * 4:
            return None
        both: Vectors = np.frombuffer(path.read_bytes(), np.float32).reshape(count, sum(widths))
        parts = [np.ascontiguousarray(part) for part in np.split(both, widths[:1], axis=1)]
        norms = [np.linalg.norm(part, axis=1) for part in parts]
        if all(np.allclose(norm, 1, atol=_TOLERANCE) for norm in norms):
            return EncodedTexts(*parts)
    return None


def _write_rows(folder: Path, name: str, rows: EncodedTexts) -> None:
    """Store rows, and remove those of other encoders and texts; nothing is lost if that fails."""
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        both = np.concatenate([rows.rows, rows.rerank_rows], axis=1).astype(np.float32)
        write_atomic(folder / name, both.tobytes(), mode=0o600)
        for other in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
            if other.name != name:
                other.unlink()
