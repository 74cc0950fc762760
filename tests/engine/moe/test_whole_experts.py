"""What passes ask for is counted where all experts are there, too, and nothing else is done."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.counters import Counters, Phase, count_requests_by_layer
from expertctl.engine.moe.routed_experts import (
    PASSES_PER_COUNT,
    TOKENS_PER_COUNT,
    ResidentExperts,
    RoutingChoices,
)

NUMBERS, EXPERTS, USED = (1, 4, 5), 8, 2


@pytest.fixture
def whole() -> ResidentExperts:
    blocks = {(n, e): np.zeros(4, np.float32) for n in NUMBERS for e in range(EXPERTS)}
    return ResidentExperts(cast("ExpertShape", None), blocks, NUMBERS)


def room(tokens: int, drawn: np.random.Generator) -> RoutingChoices:
    """Choices of so many tokens, with more behind them that no pass of theirs has."""
    shape = (len(NUMBERS), tokens + 3, EXPERTS)
    selected = drawn.permuted(np.broadcast_to(np.arange(EXPERTS), shape), axis=-1)[..., :USED]
    return cast("RoutingChoices", SimpleNamespace(selected=selected))


def test_counts_are_those_of_each_pass_by_itself_and_all_are_hits(whole: ResidentExperts) -> None:
    drawn, expected = np.random.default_rng(0), Counters(NUMBERS, experts=EXPERTS)
    for tokens in [1] * (PASSES_PER_COUNT + 5) + [3, 1, 300, 300, 2, 1]:
        choices = room(tokens, drawn)
        whole.end_pass(choices, tokens, phase=Phase.DECODE)
        requests = count_requests_by_layer(choices.selected[:, :tokens], EXPERTS)
        expected.count_passes(requests[None], np.zeros_like(requests)[None])
        choices.selected[...] = 0  # the next pass writes over it
    seen, wanted = whole.counters.observed_snapshot(), expected.observed_snapshot()
    assert (seen.passes, seen.layers) == (wanted.passes, wanted.layers)
    np.testing.assert_equal(seen.expert_counts, wanted.expert_counts)
    assert seen.summary.misses == 0
    report = whole.report()
    assert report.activity.requests == seen.summary.requests
    assert (report.fallback_rate, report.skipped_share) == (0, 0)
    assert (report.residence.slots, report.residence.blocks) == (EXPERTS, 3 * EXPERTS)


def test_no_more_is_kept_than_is_said(whole: ResidentExperts) -> None:
    drawn = np.random.default_rng(0)
    for tokens, passes in (
        (1, PASSES_PER_COUNT),
        (TOKENS_PER_COUNT // 2, 2),
        (TOKENS_PER_COUNT, 1),
    ):
        for done in range(1, passes + 1):
            whole.end_pass(room(tokens, drawn), tokens, phase=Phase.PROMPT)
            assert len(whole._uncounted) == done % passes


def test_what_a_report_counts_no_reset_takes_away(whole: ResidentExperts) -> None:
    choices = room(1, np.random.default_rng(0))
    whole.end_pass(choices, 1, phase=Phase.DECODE)
    before = whole.report().activity.requests
    whole.counters.configure(reset=True, mode="off")
    whole.end_pass(choices, 1, phase=Phase.DECODE)
    assert whole.report().activity.requests == 2 * before > 0
