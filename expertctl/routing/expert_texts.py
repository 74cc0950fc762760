"""The texts of an expert that are compared with a prompt, and the row of each.

These are the description, every example, the keywords as one text, the name as words and, where
there are several examples, their mean, in which what they ask for outweighs what each is about
(ADR 4).
"""

import re
from dataclasses import dataclass

import numpy as np

from expertctl.routing.vector_table import Vectors
from expertctl.schema.manifest import Manifest

MEAN_FROM = 4
"""How many descriptions and examples an expert must have for their mean to count."""

_SHOWN_CHARACTERS = 60
_BETWEEN_WORDS = re.compile(r"[^a-z0-9]+")


@dataclass(frozen=True, slots=True)
class ExpertTexts:
    """The texts of one expert, in the order of its rows."""

    description: str
    examples: tuple[str, ...]
    keywords: str  # empty when there are none
    name: str  # as words

    @classmethod
    def of(cls, manifest: Manifest) -> "ExpertTexts":
        """Return the texts that a manifest says."""
        return cls(
            description=manifest.description,
            examples=manifest.routing.examples,
            keywords=", ".join(manifest.routing.keywords),
            name=_words(manifest.name),
        )

    @property
    def all(self) -> list[str]:
        """The texts to encode."""
        keywords = [self.keywords] if self.keywords else []
        return [self.description, *self.examples, *keywords, self.name]

    def rows(self, encoded: Vectors) -> Vectors:
        """Return the rows of the expert: one per text and, with several examples, a mean."""
        mean = encoded[: 1 + len(self.examples)].mean(0, keepdims=True)
        norm = np.linalg.norm(mean)
        if 1 + len(self.examples) < MEAN_FROM or norm == 0:
            return encoded
        both: Vectors = np.concatenate([encoded, mean / norm])
        return both


def described(manifest: Manifest, text: int) -> str:
    """Say which text of an expert a row is, by its number among the expert's rows."""
    texts = ExpertTexts.of(manifest)
    names = [
        "its description",
        *(f"its example {_short(example)!r}" for example in texts.examples),
        *(["its keywords"] if texts.keywords else []),
        "its name",
        "the mean of its examples",
    ]
    return names[text]


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…"


def _words(name: str) -> str:
    """Return the last part of ``namespace/name`` as words: ``sql-writer`` is ``sql writer``."""
    return " ".join(_BETWEEN_WORDS.split(name.rpartition("/")[2])).strip()
