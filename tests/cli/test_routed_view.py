"""What a person reads of routed experts: nothing where none could be missing."""

import io
import re
import sys

import pytest

from expertctl.cli.run_view import format_routed_report, format_skipped_weight, read_routed_use
from expertctl.client.result import MoeUse
from expertctl.engine.moe.counters import ExpertActivity, ExpertResidency, RoutedExpertStats
from tests.cli.command_runner import CommandRunner, expertctl
from tests.cli.test_cold import ASKED, base

__all__ = ["base", "expertctl"]

pytestmark = pytest.mark.all
WHOLE = ExpertResidency(layers=2, experts=8, slots=8, blocks=16)
PART = ExpertResidency(layers=2, experts=8, slots=3, blocks=8, miss="skip")
ROOMY = ExpertResidency(layers=2, experts=8, slots=5, blocks=16)
"""Compact experts leave room for all, but some have no slot and were not read yet."""


def report(residence: ExpertResidency, **did: float) -> MoeUse | None:
    activity = ExpertActivity(**did)  # type: ignore[arg-type]  # counts by name
    return read_routed_use(RoutedExpertStats(residence, activity))


@pytest.mark.parametrize("moe", [None, report(WHOLE, requests=4)])
def test_nothing_is_told_where_none_could_be_missing(moe: MoeUse | None) -> None:
    assert [*format_routed_report(moe), *format_skipped_weight(moe)] == []


def test_shares_are_of_what_was_asked_for_and_of_what_routers_gave() -> None:
    moe = report(PART, requests=8, misses=2, router_weight=40.0, skipped_weight=0.1, waited_ms=7.6)
    assert list(format_routed_report(moe)) == [
        "routed experts: 8 of 16 fit in memory, 25.0 % of requests missed, 8 ms waited, "
        "0.2 % of router weight skipped"
    ]
    assert list(format_routed_report(report(ROOMY, requests=8, misses=4, mapped=3))) == [
        "routed experts: 16 of 16 fit in memory, 50.0 % of requests missed, "
        "3 of 4 computed from the page cache, 0 ms waited"
    ], "nothing is left out unless that was asked for"
    assert list(format_skipped_weight(moe)) == [
        "0.25 % of the weight of routed experts was skipped"
    ]
    assert list(format_skipped_weight(report(PART, requests=8, router_weight=40.0))) == []


def test_a_run_tells_what_was_left_out_and_its_statistics_what_was_missed(
    base: tuple[str, ...], expertctl: CommandRunner
) -> None:
    asked = (*ASKED[:-1], *base, "--no-moe-learn")
    assert "routed experts" not in expertctl(*asked).err
    assert re.search(r"routed experts: \d+ of \d+ fit in memory,", expertctl(*asked, "--stats").err)
    told = expertctl(*asked, "--moe-miss", "skip", "--moe-skip-cap", "1").err
    assert "% of the weight of routed experts was skipped" in told


def test_a_chat_tells_below_each_answer_what_was_left_out(
    base: tuple[str, ...], expertctl: CommandRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = ("chat", *ASKED[2:-1], *base, "--no-moe-learn")
    for words, told in ((), 0), (("--moe-miss", "skip", "--moe-skip-cap", "1"), 2):
        said = io.TextIOWrapper(io.BytesIO(b"Sort: 3, 1, 2\n/reset\nSort: 2, 1\n"))
        monkeypatch.setattr(sys, "stdin", said)
        lines = expertctl(*chat, *words).err.splitlines()
        turns = [line for line in lines if line.startswith("  [")]
        assert len(turns) == 2
        left_out = "% of the weight of routed experts was skipped]"
        assert sum(turn.endswith(left_out) for turn in turns) == told


@pytest.mark.parametrize("base_options", [(), ("--memory-budget", "1GB")])
def test_a_profile_that_is_not_there_is_told_whether_or_not_it_would_be_read(
    base: tuple[str, ...], expertctl: CommandRunner, base_options: tuple[str, ...]
) -> None:
    said = expertctl(
        *ASKED[:-1], *base[:2], *base_options, "--moe-profile", "gone.json", exit_code=3
    )
    assert "gone.json: no such file" in said.err
