"""Where a server is saturated: open-loop load, more and more of it, until it is no longer served.

Requests come at random times (`serving_load.arrivals_at`), whether or not answers have come. The
rate is doubled until less than `SERVED` of it is answered, then the gap below is halved, and what
is around the rate that was found is measured as well. Should more be served there after all, the
search goes on: what counts is the highest rate that was served. A point is measured from `LEAD`
seconds on, when as many texts run as will, for `WINDOW` seconds; then all hang up, so that the next
point begins with a server at rest. A request without a first token by then counts with the time
that it has waited, a lower bound.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from benchmarks.harness import Row, Seconds
from benchmarks.served.server import Server
from benchmarks.serving_load import Ask, Told, Turn, arrivals_at, open_loop, percentile

SERVED = 0.9
LEAD, WINDOW = 8.0, 22.0
MOST_SECONDS = 240.0
"""No point is begun later, so the whole ends within another half minute."""
FIRST_SHARE = 0.5
"""Where the search begins, as a share of the rate of clients that wait for their answers."""
MOST_POINTS = 14
FINE = 1.2
"""How close, as a ratio, the rates below and above must be."""
AROUND = (1.75, 0.75, 1.25, 0.25)
"""Shares of the rate that is found; where time is short, the last ones are left out."""
NEAR = 0.08
"""Rates that differ by less are one point."""


@dataclass(frozen=True, slots=True)
class Point:
    """What came of one rate, in requests a second."""

    offered: float
    served: float
    tokens: float
    """Tokens written in a second."""
    p50: Seconds
    p99: Seconds
    """To the first token."""
    requests: int
    refused: int

    @property
    def is_served(self) -> bool:
        """Whether what was offered was answered, but for chance."""
        return self.served >= SERVED * self.offered


@dataclass(frozen=True, slots=True)
class Saturation:
    """The rate that is just no longer served, and what was measured around it."""

    rate: float
    points: tuple[Point, ...]
    """By rate."""


Measure = Callable[[float], Point]
MayBegin = Callable[[], bool]
"""Whether there is time for another point."""


def find_saturation(measure: Measure, *, first: float, may_begin: MayBegin) -> Saturation:
    """Search between a rate that is served and one that is not, from ``first`` on.

    Raises:
        SystemExit: when all rates are served, or none, or time was too short to say.
    """
    points = [measure(first)]
    while (rate := _next_rate(points)) and len(points) < MOST_POINTS and may_begin():
        points.append(measure(rate))
    points.sort(key=lambda point: point.offered)
    low, high = _edges(points)
    if low is None or high is None:
        rates = ", ".join(f"{point.offered:.2f} ({point.served:.2f} served)" for point in points)
        raise SystemExit(f"serving: no saturation was found; requests a second: {rates}")
    return Saturation(math.sqrt(low * high), tuple(points))


def _next_rate(points: Sequence[Point]) -> float | None:
    """Return what is worth measuring next; None when all is known."""
    low, high = _edges(points)
    if low is None:
        return min(point.offered for point in points) / 2
    if high is None:
        return low * 2
    rate = math.sqrt(low * high)
    if high / low > FINE:
        return rate
    around = (share * rate for share in AROUND)
    return next((one for one in around if not _is_near(one, points)), None)


def _edges(points: Sequence[Point]) -> tuple[float | None, float | None]:
    """Return the highest rate that is served, and the next one that is not."""
    low = max((point.offered for point in points if point.is_served), default=None)
    above = (p.offered for p in points if not p.is_served and p.offered > (low or 0.0))
    return low, min(above, default=None)


def _is_near(rate: float, points: Sequence[Point]) -> bool:
    return any(abs(point.offered / rate - 1) < NEAR for point in points)


def saturation_of(
    server: Server, ask: Callable[[int], Ask | Turn], *, tokens: int, capacity: float
) -> Saturation:
    """Load a server whose rate for clients that wait is ``capacity``; an answer has ``tokens``.

    Raises:
        SystemExit: as `find_saturation` does.
    """
    end, seeds = time.monotonic() + MOST_SECONDS, count()

    def measure(rate: float) -> Point:
        server.rest()
        arrivals = arrivals_at(rate, seconds=LEAD + WINDOW, seed=next(seeds))
        begun, told = open_loop(server.url, ask, arrivals=arrivals, seconds=LEAD + WINDOW)
        return point_of(told, rate=rate, begun=begun, tokens=tokens)

    return find_saturation(
        measure, first=FIRST_SHARE * capacity, may_begin=lambda: time.monotonic() < end
    )


def point_of(told: Sequence[Told], *, rate: float, begun: float, tokens: int) -> Point:
    """Say what came of a rate; answers are counted by their tokens, ``tokens`` to an answer.

    Answers that were begun before the window or end after it count with their part in it.
    """
    opens, closes = begun + LEAD, begun + LEAD + WINDOW
    written = sum(_written(one, opens, closes) for one in told)
    came = [one for one in told if opens <= one.begun < closes]
    taken = [one for one in came if one.status in {0, 200}]
    firsts = [one.first if one.times else closes - one.begun for one in taken]
    return Point(
        offered=rate,
        served=written / tokens / WINDOW,
        tokens=written / WINDOW,
        p50=percentile(firsts, 0.5) if firsts else math.nan,
        p99=percentile(firsts, 0.99) if firsts else math.nan,
        requests=len(came),
        refused=len(came) - len(taken),
    )


def _written(told: Told, opens: float, closes: float) -> float:
    """Return how many tokens came in between; a piece of text may be more than one."""
    pieces = sum(opens <= told.begun + at < closes for at in told.times)
    return pieces * told.tokens / len(told.times) if told.tokens and told.times else pieces


def saturation_row(found: Saturation, *, capacity: float, clients: int) -> Row:
    """Compare the rate of saturation with that of clients that wait for their answers."""
    told = "; ".join(
        f"{p.offered:.2f} req/s: {p.tokens:.0f} tok/s, first token {p.p50:.2f} s, p99 {p.p99:.2f} s"
        for p in found.points
    )
    return Row(
        case="open loop: requests a second at saturation",
        ours=round(found.rate, 2),
        rival=f"{clients} clients that wait",
        theirs=round(capacity, 2),
        unit="req/s",
        better="higher",
        ratio=round(found.rate / capacity, 3),
        spread=None,
        note=told,
    )
