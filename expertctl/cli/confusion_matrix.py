"""The confusion matrix of a routing evaluation, as it is drawn: wanted and answering experts.

Experts that are confused stand beside each other. If there are more than fit, those with the most
wrong decisions have rows of their own, and one row and one column hold the others.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from expertctl.cli.routing_evaluation_view import NONE

if TYPE_CHECKING:
    from expertctl.reference import PackageName
    from expertctl.routing.evaluation import RoutingEvaluation

MOST_ROWS = 36
"""Most experts that have a row of their own."""

Cells = Mapping[tuple[str, str], int]


@dataclass(frozen=True, slots=True)
class Matrix:
    """Counts of decisions: row, the wanted expert; column, the one that answered."""

    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]
    experts: int  # number of all experts
    hidden: int  # wrong decisions among the others, left out of their cell

    @property
    def row_sums(self) -> list[int]:
        """How many prompts each row shows."""
        return [sum(row) for row in self.counts]


def matrix_of(found: "RoutingEvaluation") -> Matrix:
    """Return the matrix: confused experts side by side, then all others as one, then ``none``."""
    cells = {(_name(w), _name(g)): n for (w, g), n in found.confusion.items()}
    experts = sorted({name for pair in cells for name in pair} - {NONE})
    kept = side_by_side(_worst(experts, cells), cells)
    others = sorted(set(experts) - set(kept))
    names = [*kept, *([f"{len(others)} others"] if others else [])]
    names += [NONE] if any(NONE in pair for pair in cells) else []
    place = {name: i for i, name in enumerate(names)} | dict.fromkeys(others, len(kept))
    counts, hidden = [[0] * len(names) for _ in names], 0
    for (wanted, got), n in cells.items():
        if wanted != got and place[wanted] == place[got]:
            hidden += n
        else:
            counts[place[wanted]][place[got]] += n
    return Matrix(tuple(names), tuple(map(tuple, counts)), len(experts), hidden)


def side_by_side(names: Sequence[str], cells: Cells) -> list[str]:
    """Order names so that each stands beside the one that it is confused with most.

    Next comes the expert that is confused most with the last one, else with any before, else the
    first one in ``names``.
    """
    links = _links(cells)
    rest, placed = dict.fromkeys(names), list[str]()
    while rest:
        last, ranks = placed[-1:], {name: i for i, name in enumerate(names)}
        following = min(
            rest,
            key=lambda name: (
                -_linked(name, last, links), -_linked(name, placed, links), ranks[name]
            ),
        )  # fmt: skip
        del rest[following]
        placed.append(following)
    return placed


def _worst(experts: Sequence[str], cells: Cells) -> list[str]:
    """Return the experts with the most wrong decisions, counted as wanted and as answering."""
    errors = Counter[str]()
    for (wanted, got), n in cells.items():
        if wanted != got:
            errors.update({wanted: n, got: n})
    return sorted(experts, key=lambda name: (-errors[name], name))[:MOST_ROWS]


def _links(cells: Cells) -> Counter[frozenset[str]]:
    links = Counter[frozenset[str]]()
    for (wanted, got), n in cells.items():
        if wanted != got:
            links[frozenset((wanted, got))] += n
    return links


def _linked(name: str, others: Iterable[str], links: Mapping[frozenset[str], int]) -> int:
    return max((links.get(frozenset((name, other)), 0) for other in others), default=0)


def _name(expert: "PackageName | None") -> str:
    return NONE if expert is None else str(expert)
