"""The saturation of a server: open-loop load at increasing rates, until it is no longer served.

Requests come at random times (`serving_load.draw_arrival_times`), whether or not answers have come.
The rate is doubled until less than `SUSTAINED_SHARE` of it is answered, then the interval below is
halved, and points around the rate that was found are measured as well. If more is served there, the
search continues: the result is the highest rate that was served. A point is measured from `LEAD`
seconds on, when the number of running sequences is stable, for `WINDOW` seconds; then all clients
disconnect, so that the next point begins with an idle server. A request without a first token by
then counts with the time waited so far, a lower bound.

The results can be plotted (extra ``plot``).
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.harness import Row, Seconds
from benchmarks.served.server import GenerationServer
from benchmarks.serving_load import (
    CompletionTask,
    ConversationTurn,
    StreamRecord,
    draw_arrival_times,
    percentile,
    run_open_loop,
)

SUSTAINED_SHARE = 0.9
LEAD, WINDOW = 8.0, 22.0
MAX_SECONDS = 240.0
"""No point begins later, so the whole ends within another half minute."""
FIRST_SHARE = 0.5
"""Start of the search, as a share of the rate of clients that wait for their answers."""
MAX_POINTS = 14
FINE = 1.2
"""The highest ratio of the rates above and below that ends the search."""
AROUND = (1.75, 0.75, 1.25, 0.25)
"""Shares of the rate that was found; if time is short, the last ones are skipped."""
NEAR = 0.08
"""Rates that differ by less are one point."""


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """The result of one rate, in requests per second."""

    offered: float
    served: float
    tokens: float
    """Generated tokens per second."""
    p50: Seconds
    p99: Seconds
    """Times to the first token."""
    requests: int
    refused: int

    @property
    def is_sustained(self) -> bool:
        """Whether the offered requests were answered, within chance."""
        return self.served >= SUSTAINED_SHARE * self.offered


@dataclass(frozen=True, slots=True)
class Saturation:
    """The rate at which load is no longer served, and the measurements around it."""

    rate: float
    points: tuple[LoadPoint, ...]
    """Results by rate."""


Measure = Callable[[float], LoadPoint]
MayBegin = Callable[[], bool]
"""Whether there is time for another point."""


def find_saturation(measure: Measure, *, first: float, may_begin: MayBegin) -> Saturation:
    """Search between a rate that is served and one that is not, from ``first`` on.

    Raises:
        SystemExit: when all rates are served, or none, or the time was too short.
    """
    points = [measure(first)]
    while (rate := _next_rate(points)) and len(points) < MAX_POINTS and may_begin():
        points.append(measure(rate))
    points.sort(key=lambda point: point.offered)
    low, high = _find_bracket(points)
    if low is None or high is None:
        rates = ", ".join(f"{point.offered:.2f} ({point.served:.2f} served)" for point in points)
        raise SystemExit(f"serving: no saturation was found; requests a second: {rates}")
    return Saturation(math.sqrt(low * high), tuple(points))


def _next_rate(points: Sequence[LoadPoint]) -> float | None:
    """Return the next rate to measure; None when the search is complete."""
    low, high = _find_bracket(points)
    if low is None:
        return min(point.offered for point in points) / 2
    if high is None:
        return low * 2
    rate = math.sqrt(low * high)
    if high / low > FINE:
        return rate
    around = (share * rate for share in AROUND)
    return next((one for one in around if not _is_measured(one, points)), None)


def _find_bracket(points: Sequence[LoadPoint]) -> tuple[float | None, float | None]:
    """Return the highest rate that is served, and the next one that is not."""
    low = max((point.offered for point in points if point.is_sustained), default=None)
    above = (p.offered for p in points if not p.is_sustained and p.offered > (low or 0.0))
    return low, min(above, default=None)


def _is_measured(rate: float, points: Sequence[LoadPoint]) -> bool:
    return any(abs(point.offered / rate - 1) < NEAR for point in points)


def measure_saturation(
    server: GenerationServer,
    ask: Callable[[int], CompletionTask | ConversationTurn],
    *,
    tokens: int,
    capacity: float,
) -> Saturation:
    """Load a server whose rate for clients that wait is ``capacity``; an answer has ``tokens``.

    Raises:
        SystemExit: as `find_saturation` does.
    """
    end, seeds = time.monotonic() + MAX_SECONDS, count()

    def measure(rate: float) -> LoadPoint:
        server.wait_until_idle()
        arrivals = draw_arrival_times(rate, seconds=LEAD + WINDOW, seed=next(seeds))
        begun, told = run_open_loop(server.url, ask, arrival_times=arrivals, seconds=LEAD + WINDOW)
        return make_point(told, rate=rate, started=begun, tokens=tokens)

    return find_saturation(
        measure, first=FIRST_SHARE * capacity, may_begin=lambda: time.monotonic() < end
    )


def make_point(
    told: Sequence[StreamRecord], *, rate: float, started: float, tokens: int
) -> LoadPoint:
    """Compute the result of a rate; answers count by their tokens, ``tokens`` to an answer.

    Answers that begin before the window or end after it count with their part in it.
    """
    opens, closes = started + LEAD, started + LEAD + WINDOW
    written = sum(_count_tokens(one, opens, closes) for one in told)
    came = [one for one in told if opens <= one.started < closes]
    taken = [one for one in came if one.status in {0, 200}]
    firsts = [one.first if one.times else closes - one.started for one in taken]
    return LoadPoint(
        offered=rate,
        served=written / tokens / WINDOW,
        tokens=written / WINDOW,
        p50=percentile(firsts, 0.5) if firsts else math.nan,
        p99=percentile(firsts, 0.99) if firsts else math.nan,
        requests=len(came),
        refused=len(came) - len(taken),
    )


def _count_tokens(told: StreamRecord, opens: float, closes: float) -> float:
    """Return the number of tokens in an interval; a text delta may contain several."""
    pieces = sum(opens <= told.started + at < closes for at in told.times)
    return pieces * told.tokens / len(told.times) if told.tokens and told.times else pieces


def make_saturation_row(found: Saturation, *, capacity: float, clients: int) -> Row:
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


def draw_saturation(found: Saturation, path: Path, *, tokens: int, what: str) -> None:
    """Plot throughput and times to the first token against the offered rate.

    ``tokens`` are those of an answer, ``what`` is the title: the server and its clients.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(8, 7))
    rates = [point.offered for point in found.points]
    written = [point.tokens for point in found.points]
    above.plot([0, *rates], [0, *(tokens * rate for rate in rates)], ":", c="grey", label="offered")
    above.plot(rates, written, "o-", label="written")
    above.set_ylabel("throughput (tokens/s)")
    above.set_ylim(0, 1.5 * max(written))
    below.plot(rates, [point.p50 for point in found.points], "o-", label="p50")
    below.plot(rates, [point.p99 for point in found.points], "s-", label="p99")
    below.set_ylabel("time to first token (s)")
    below.set_yscale("log")
    below.yaxis.set_major_formatter("{x:g}")
    below.yaxis.set_minor_formatter("{x:g}")
    below.set_xlabel("offered load (requests/s)")
    below.set_xlim(left=0)
    for axes in (above, below):
        axes.axvline(found.rate, ls="--", c="tab:red", label=f"saturation, {found.rate:.2f}/s")
        axes.grid(visible=True, which="both", alpha=0.3)
        axes.legend(loc="upper left")
    figure.suptitle(what)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
