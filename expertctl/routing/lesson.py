"""What a head learns from an expert, and what an index asks of whoever learns.

Texts are encoded once: the index keeps their rows and hands on the deep rows of the same pass.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from expertctl.digest import Digest
from expertctl.routing.vector_table import Vectors
from expertctl.schema.manifest import Manifest


@dataclass(frozen=True, slots=True, eq=False)
class Lesson:
    """An expert and the deep rows of its texts: its description, then its examples."""

    digest: Digest
    manifest: Manifest
    deep: Vectors  # [1 + examples, deep dimensions]


class Learner(Protocol):
    """Keeps something of its own about every expert of an index."""

    def lacking(self, digests: Sequence[Digest]) -> Collection[Digest]:
        """Return which of these experts it knows nothing of."""

    def learn(self, lessons: Sequence[Lesson]) -> None:
        """Take in experts; those that it knows are replaced."""

    def forget(self, digests: Iterable[Digest]) -> None:
        """Forget experts."""

    def restart(self) -> None:
        """Forget everything: all experts are about to be taught again."""
