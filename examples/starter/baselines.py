"""What an expert is compared with: copying from training, and the split it must respect."""

from collections import Counter
from collections.abc import Sequence

from examples.starter.samples import Sample


def share_right(said: Sequence[str], wanted: Sequence[str]) -> float:
    """The share of answers that are exactly right."""
    return sum(map(str.__eq__, said, wanted)) / len(wanted)


def argument_parts(samples: Sequence[Sample]) -> set[str]:
    """Every part of every argument of these samples."""
    return {part for sample in samples for part in sample.argument.split("|")}


def nearest_copies(samples: Sequence[Sample], seen: Sequence[Sample]) -> list[str]:
    """For each sample the answer of the training prompt that shares most three-letter pieces."""
    pieces = [_pieces(sample.prompt) for sample in seen]
    index: dict[str, list[int]] = {}
    for row, found in enumerate(pieces):
        for piece in found:
            index.setdefault(piece, []).append(row)
    return [seen[_nearest(_pieces(each.prompt), pieces, index)].answer for each in samples]


def _pieces(text: str) -> frozenset[str]:
    return frozenset(text[start : start + 3] for start in range(len(text) - 2))


def _nearest(
    wanted: frozenset[str], pieces: list[frozenset[str]], index: dict[str, list[int]]
) -> int:
    """The row whose pieces are most like the wanted ones (Jaccard)."""
    shared = Counter(row for piece in wanted for row in index.get(piece, ()))
    return max(
        shared,
        key=lambda row: shared[row] / (len(wanted) + len(pieces[row]) - shared[row]),
        default=0,
    )
