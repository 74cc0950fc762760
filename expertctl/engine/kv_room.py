"""Room for the keys and values of a text: how many tokens fit, and how many are there."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from expertctl.errors import BudgetError


class KVRoom:
    """Room for ``capacity`` tokens; `length` of them are filled."""

    def __init__(self, capacity: int) -> None:
        """Begin without a token."""
        self.capacity = capacity
        self.length = 0

    def require(self, tokens: int) -> None:
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
        """Count what every layer has written."""
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Keep the first ``length`` tokens only."""
        assert 0 <= length <= self.length, f"cannot rewind from {self.length} to {length}"
        self.length = length

    def reset(self) -> None:
        """Make room for another generation."""
        self.rewind(0)


@contextmanager
def all_or_none(rooms: Sequence[KVRoom]) -> Iterator[None]:
    """Rewind all rooms if the block fails, so that no text is ahead of another."""
    lengths = [room.length for room in rooms]
    try:
        yield
    except BaseException:
        for room, length in zip(rooms, lengths, strict=True):
            room.rewind(length)
        raise
