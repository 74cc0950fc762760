"""What a generation asks of the keeper of keys and values, and what it is lent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from expertctl.digest import Digest
from expertctl.engine.kv_room import KVRoom
from expertctl.package.model_config import ModelConfig

_FLOAT_BYTES = 4
Room = TypeVar("Room", bound=KVRoom, covariant=True)


@dataclass(frozen=True, slots=True)
class Origin:
    """The owner of a text, and the plan that its rows were computed with."""

    owner: str
    identity: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class KVWanted:
    """What a generation needs: the prompt's tokens, virtual ones before them, room for more."""

    cache_key: str | None
    identity: Digest
    config: ModelConfig
    ids: Sequence[int]
    virtual: int
    capacity: int
    reuse: bool = True
    """Whether rows of earlier texts may begin it; not where the logits of all rows are wanted."""
    at_once: int | None = None
    """For how many tokens memory is taken at the start; None: for all.

    Where keys and values lie in pages, that for the rest is taken as it is needed.
    """

    @property
    def origin(self) -> Origin | None:
        """The origin of earlier texts that may begin it; without a key there is none."""
        return None if self.cache_key is None else Origin(self.cache_key, self.identity)

    @property
    def nbytes(self) -> int:
        """The bytes of keys and values."""
        return self.config.kv_bytes(self.capacity, itemsize=_FLOAT_BYTES)

    @property
    def what(self) -> str:
        """How an error calls it."""
        return f"the KV cache of {self.capacity} tokens"


class KVLoan(Generic[Room]):
    """Room for one generation; the first ``reused`` tokens of its prompt are read already."""

    def __init__(self, cache: Room, *, reused: int = 0) -> None:
        """Begin a generation that has not completed."""
        self.cache, self.reused = cache, reused
        self.completed: tuple[int, ...] | None = None

    def complete(self, ids: Sequence[int]) -> None:
        """Say that the generation came to its end; ``ids`` are prompt and answer."""
        self.completed = tuple(ids)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens at the beginning are the same."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
