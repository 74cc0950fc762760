"""Where `benchmarks.served.saturation` finds that a server is saturated, and what a point says."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.served.saturation import (
    LEAD,
    SUSTAINED_SHARE,
    WINDOW,
    LoadPoint,
    find_saturation,
    make_point,
    make_saturation_row,
)
from benchmarks.serving_load import StreamRecord

BEGUN = 1000.0


def server(capacity: float) -> Callable[[float], LoadPoint]:
    """A server that answers all that it can, and then always the same."""

    def measure(rate: float) -> LoadPoint:
        served = min(rate, capacity)
        return LoadPoint(rate, served, 48 * served, p50=0.3, p99=0.5, requests=10, refused=0)

    return measure


def budget(points: int) -> Callable[[], bool]:
    left = iter([True] * points)
    return lambda: next(left, False)


@pytest.mark.parametrize("first", [0.1, 0.7, 1.9, 3.0, 11.0])
def test_the_rate_is_found_wherever_the_search_begins(first: float) -> None:
    found = find_saturation(server(2.0), first=first, may_begin=lambda: True)
    edge = (
        2.0 / SUSTAINED_SHARE
    )  # more is offered than that, and less than SERVED of it is answered
    assert edge / 2**0.25 < found.rate < edge * 2**0.25


def test_points_lie_on_both_sides_of_it_and_are_sorted() -> None:
    found = find_saturation(server(2.0), first=1.0, may_begin=lambda: True)
    rates = [point.offered for point in found.points]
    assert rates == sorted(rates)
    assert min(rates) <= 0.3 * found.rate
    assert max(rates) >= 1.6 * found.rate
    assert sum(point.is_sustained for point in found.points) >= 3
    assert sum(not point.is_sustained for point in found.points) >= 2


def test_where_time_is_short_the_search_goes_before_what_is_around() -> None:
    found = find_saturation(server(2.0), first=1.0, may_begin=budget(2))
    assert [point.offered for point in found.points] == [1.0, 2.0, 4.0]
    assert found.rate == pytest.approx(math.sqrt(8.0))


def test_a_point_that_is_lost_by_chance_does_not_end_the_search() -> None:
    honest = server(2.0)

    def unlucky(rate: float) -> LoadPoint:
        return replace(honest(rate), served=0.0) if rate == 1.0 else honest(rate)

    found = find_saturation(unlucky, first=1.0, may_begin=lambda: True)
    edge = 2.0 / SUSTAINED_SHARE
    assert edge / 2**0.25 < found.rate < edge * 2**0.25


@pytest.mark.parametrize("capacity", [1e9, 0.0])
def test_a_server_that_is_never_or_always_saturated_is_an_error(capacity: float) -> None:
    with pytest.raises(SystemExit, match="no saturation was found"):
        find_saturation(server(capacity), first=1.0, may_begin=lambda: True)


def answer(at: float, *times: float, status: int = 200) -> StreamRecord:
    return StreamRecord(BEGUN + at, times=list(times), status=status)


def test_a_point_counts_what_came_and_what_was_written_in_its_window() -> None:
    told = [
        answer(LEAD - 1.0, 0.5, 2.0),  # came before: one of its two tokens is in the window
        answer(LEAD + 1.0, 0.25, 1.0),
        answer(LEAD + 2.0, 0.75, WINDOW),  # its last token is behind the window
        answer(LEAD + 3.0, status=429),
        answer(LEAD + WINDOW - 4.0, status=0),  # no token by the end: it has waited 4 s
    ]
    point = make_point(told, rate=0.5, started=BEGUN, tokens=2)
    assert point.tokens == pytest.approx(4 / WINDOW)
    assert point.served == pytest.approx(2 / WINDOW)
    assert (point.requests, point.refused) == (4, 1)
    assert point.p50 == 0.75
    assert point.p99 == pytest.approx(4.0)


def test_a_piece_of_several_tokens_counts_as_these() -> None:
    told = StreamRecord(BEGUN + LEAD, times=[1.0, 2.0], status=200, tokens=6)
    assert make_point([told], rate=1.0, started=BEGUN, tokens=6).served == pytest.approx(1 / WINDOW)


def test_a_point_without_an_answer_has_no_times() -> None:
    point = make_point([answer(LEAD + 1.0, status=429)], rate=1.0, started=BEGUN, tokens=2)
    assert (point.requests, point.refused, point.served) == (1, 1, 0.0)
    assert math.isnan(point.p50)


def test_the_row_says_every_point() -> None:
    found = find_saturation(server(2.0), first=1.0, may_begin=lambda: True)
    row = make_saturation_row(found, capacity=2.0, clients=16)
    assert row.note is not None
    assert row.note.count("req/s") == len(found.points)
    assert row.ratio == pytest.approx(found.rate / 2.0, abs=1e-3)
