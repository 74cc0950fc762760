"""Streams that torch hands out in turn, each lent to one owner at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from expertctl.engine.torch.devices import StreamPool
from expertctl.errors import BudgetError

CPU = torch.device("cpu")
TakeTurns = Callable[[int], list[int]]


@pytest.fixture
def in_turn(monkeypatch: pytest.MonkeyPatch) -> TakeTurns:
    """Have torch hand out so many streams in turn; return which were asked for."""

    def play(count: int) -> list[int]:
        streams = [SimpleNamespace(number=number) for number in range(count)]
        following, asked = cycle(streams), list[int]()

        def new(_: object) -> Any:
            stream = next(following)
            asked.append(stream.number)
            return stream

        monkeypatch.setattr(torch.cuda, "Stream", new)
        return asked

    return play


def test_owners_have_different_streams_though_torch_hands_out_the_same(in_turn: TakeTurns) -> None:
    asked, streams = in_turn(3), StreamPool()
    first = streams.acquire(CPU, computes=True)
    others: Any = torch.cuda.Stream  # who are not ours take some, too
    others(CPU)
    others(CPU)
    second, third = streams.acquire(CPU, computes=True), streams.acquire(CPU, computes=True)
    assert asked == [0, 1, 2, 0, 1, 2]
    assert len({id(each.stream) for each in (first, second, third)}) == 3


def test_a_returned_stream_is_reused_before_another_is_taken(in_turn: TakeTurns) -> None:
    asked, streams = in_turn(4), StreamPool()
    kept, gone = streams.acquire(CPU, computes=True), streams.acquire(CPU, computes=True)
    before = gone.stream
    del gone
    again = streams.acquire(CPU, computes=True)
    assert again.stream is before is not kept.stream
    assert asked == [0, 1]


def test_streams_that_products_were_computed_on_are_not_for_copies(in_turn: TakeTurns) -> None:
    """Else graphs get one that libraries have no workspace for yet, and there is one more."""
    asked, streams = in_turn(8), StreamPool()
    measured = streams.acquire(CPU, computes=True).stream
    copies = [streams.acquire(CPU, computes=False) for _ in range(3)]
    graphs = streams.acquire(CPU, computes=True)
    assert graphs.stream is measured
    copying = {id(each.stream) for each in copies}
    del copies, graphs
    again = [streams.acquire(CPU, computes=False) for _ in range(3)]
    assert {id(each.stream) for each in again} == copying
    assert streams.acquire(CPU, computes=True).stream is measured
    assert asked == [0, 1, 2, 3]


def test_where_all_are_in_use_the_next_owner_is_refused(in_turn: TakeTurns) -> None:
    in_turn(2)
    streams = StreamPool()
    lent = [streams.acquire(CPU, computes=True), streams.acquire(CPU, computes=True)]
    with pytest.raises(BudgetError, match="all 2 streams") as refused:
        streams.acquire(CPU, computes=True)
    assert "close" in refused.value.hint
    lent.pop()
    streams.acquire(CPU, computes=False)


def test_threads_that_ask_at_once_have_different_streams(in_turn: TakeTurns) -> None:
    in_turn(32)
    streams = StreamPool()
    with ThreadPoolExecutor(8) as pool:
        lent = list(pool.map(lambda _: streams.acquire(CPU, computes=True), range(32)))
    assert len({id(each.stream) for each in lent}) == 32
