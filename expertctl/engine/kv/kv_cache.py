"""The interface of KV caches and of their owners, whatever the memory they are in.

The owner of KV caches gets a `KVRequest` and lends a `KVAllocation`. A sequence that does not fit
is an error, old rows are never dropped. Rows at and beyond ``length`` are never read.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from expertctl.digest import Digest
from expertctl.engine.kv.recurrent_state import SequenceStates, State
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig


@dataclass(frozen=True, slots=True, eq=False)
class CacheMark:
    """A length to which a cache can return, and what it needs for it besides rows."""

    length: int
    state: State | None = None


VIRTUAL = -1
"""Stands for a row of a soft prompt; no token of a vocabulary is negative."""


class KVCacheBase:
    """Capacity in tokens and filled `length` of the keys and values of one sequence."""

    states: SequenceStates | None = None
    """Its states in layers without keys and values, which are as long as the others."""

    def __init__(self, capacity: int) -> None:
        """Start without tokens."""
        self.capacity = capacity
        self.length = 0

    def ensure_capacity(self, tokens: int) -> None:
        """Check that so many more tokens fit.

        Raises:
            BudgetError: when they do not.
        """
        if self.length + tokens > self.capacity:
            raise BudgetError(
                f"{tokens} more tokens do not fit into the KV cache: "
                f"{self.length} of {self.capacity} are used",
                hint="shorten the prompt or ask for fewer tokens",
            )

    def advance(self, tokens: int) -> None:
        """Count tokens whose rows every layer has written."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Keep only the first ``length`` tokens, after which a state must be kept if there are."""
        assert 0 <= length <= self.length, f"cannot rewind from {self.length} to {length}"
        if self.states is not None and length < self.length:
            self.states.rewind(length)
        self.length = length

    def mark(self) -> CacheMark:
        """Return a mark to which `restore` returns."""
        return CacheMark(self.length, None if self.states is None else self.states.current)

    def restore(self, mark: CacheMark) -> None:
        """Keep only the tokens that there were at a mark."""
        self.length = mark.length
        if self.states is not None:
            self.states.restore(mark.length, mark.state)

    def reset(self) -> None:
        """Empty the cache for another generation."""
        self.rewind(0)


@contextmanager
def rewind_on_error(caches: Sequence[KVCacheBase]) -> Iterator[None]:
    """Rewind all caches if the block fails, so that no sequence is ahead of another."""
    marks = [cache.mark() for cache in caches]
    try:
        yield
    except BaseException:
        for cache, mark in zip(caches, marks, strict=True):
            cache.restore(mark)
        raise


KVCacheT = TypeVar("KVCacheT", bound=KVCacheBase, covariant=True)


@dataclass(frozen=True, slots=True)
class PrefixKey:
    """The owner of a sequence, and the plan that its rows were computed with."""

    owner: str
    identity: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class KVRequest:
    """What a generation needs: prompt tokens, virtual tokens before them, and a capacity."""

    cache_key: str | None
    identity: Digest
    config: ModelConfig
    ids: Sequence[int]
    virtual_tokens: int
    capacity: int
    reuse: bool = True
    """Whether kept rows may be reused; False where the logits of all rows are needed."""
    initial_tokens: int | None = None
    """Number of tokens whose memory is allocated at the start; None: all.

    Paged stores allocate the rest on demand."""

    @property
    def prefix_key(self) -> PrefixKey | None:
        """The origin of sequences whose rows may be reused; None without a cache key."""
        return None if self.cache_key is None else PrefixKey(self.cache_key, self.identity)

    def list_row_tokens(self, ids: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of the rows of a sequence."""
        return (VIRTUAL,) * self.virtual_tokens + tuple(ids)

    @property
    def description(self) -> str:
        """Name in error messages."""
        return f"the KV cache of {self.capacity} tokens"


class KVAllocation(Generic[KVCacheT]):
    """The cache of one generation; the first ``reused`` tokens of its prompt are already read."""

    def __init__(self, cache: KVCacheT, *, reused: int = 0) -> None:
        """Start a generation that has not completed."""
        self.cache, self.reused = cache, reused
        self.completed: tuple[int, ...] | None = None

    def complete(self, ids: Sequence[int]) -> None:
        """Mark the generation as completed; ``ids`` are prompt and answer."""
        self.completed = tuple(ids)

    def list_completed_tokens(self, request: KVRequest) -> tuple[int, ...]:
        """Return the tokens of the filled rows, if the sequence completed."""
        if self.completed is None:
            return ()
        assert self.completed[: len(request.ids)] == tuple(request.ids), (
            "a text begins with its prompt"
        )
        return request.list_row_tokens(self.completed)[: self.cache.length]


def count_common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(one), len(other)))
