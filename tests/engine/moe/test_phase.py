"""What a call is for, by the published cases and at every boundary."""

import json
from pathlib import Path

import pytest

from expertctl.engine.moe.phase import (
    ForwardCall,
    Phase,
    PhaseBatch,
    is_cache_active,
    resolve_phase,
    split_call,
)

VECTORS = json.loads(
    (Path(__file__).parents[2] / "vectors" / "moe_cache.json").read_text(encoding="utf-8")
)["phase"]
CASES = {case["case"]: case for case in VECTORS}


def test_the_last_token_of_a_long_prompt_is_still_part_of_a_prompt() -> None:
    case = CASES["a 513-token prompt split 512+1"]
    tail = Phase(case["tail_phase"])
    assert list(split_call(ForwardCall(tokens=513, batch=512, scored=1))) == [
        PhaseBatch(512, Phase.PROMPT),
        PhaseBatch(1, tail),
    ]
    assert resolve_phase(tail, 1) is Phase.PROMPT


def test_four_tokens_that_are_verified_at_once_are_generating() -> None:
    case = CASES["4 tokens verified in one step while generating"]
    assert ForwardCall(tokens=4, batch=512, scored=4).phase == case["phase"]
    assert resolve_phase(Phase.DECODE, 4) is Phase.DECODE


def test_five_tokens_at_once_are_generating_but_worked_on_like_a_prompt() -> None:
    case = CASES["5 tokens in one step while generating"]
    call = ForwardCall(tokens=5, batch=512, scored=5)
    assert call.phase == case["phase"]
    assert resolve_phase(call.phase, call.tokens) == case["cache_policy"]


@pytest.mark.parametrize(
    ("tokens", "batch", "scored", "phase"),
    [
        (0, 512, 0, Phase.DECODE),
        (1, 512, 1, Phase.DECODE),
        (1, 512, 0, Phase.DECODE),
        (4, 512, 1, Phase.DECODE),  # nobody can tell it from a step of generating
        (5, 512, 1, Phase.PROMPT),
        (5, 512, 4, Phase.PROMPT),
        (512, 512, 512, Phase.DECODE),
        (513, 512, 513, Phase.PROMPT),
        (4, 4, 4, Phase.DECODE),
        (4, 3, 4, Phase.PROMPT),
        (3, 2, 1, Phase.PROMPT),
        (2, 1, 2, Phase.PROMPT),
    ],
)
def test_the_phase_follows_tokens_batch_and_what_is_scored(
    tokens: int, batch: int, scored: int, phase: Phase
) -> None:
    assert ForwardCall(tokens=tokens, batch=batch, scored=scored).phase is phase


@pytest.mark.parametrize("tokens", [1, 4, 5, 600])
def test_warming_up_is_warming_up_however_much_is_read(tokens: int) -> None:
    call = ForwardCall(tokens=tokens, batch=512, scored=1, warmup=True)
    assert {batch.phase for batch in split_call(call)} == {Phase.WARMUP}
    assert resolve_phase(Phase.WARMUP, tokens) is Phase.WARMUP
    assert not any(is_cache_active(Phase.WARMUP, tokens=tokens, lanes=lanes) for lanes in (1, 2, 3))


def test_batches_hold_every_token_once() -> None:
    for tokens in (0, 1, 7, 8, 9, 24):
        sizes = [
            batch.tokens for batch in split_call(ForwardCall(tokens=tokens, batch=8, scored=1))
        ]
        assert sum(sizes) == tokens
        assert all(size == 8 for size in sizes[:-1])


def test_of_a_phase_that_nobody_said_one_token_is_generating() -> None:
    assert [resolve_phase(None, tokens) for tokens in (1, 2)] == [Phase.DECODE, Phase.PROMPT]


@pytest.mark.parametrize(
    ("phase", "tokens", "single", "several"),
    [
        (Phase.PROMPT, 1, True, False),
        (Phase.PROMPT, 2, True, True),
        (Phase.DECODE, 1, True, True),
        (Phase.DECODE, 2, True, False),
        (Phase.DECODE, 4, True, False),
        (Phase.DECODE, 5, True, True),  # worked on like a prompt
        (None, 1, True, True),
        (None, 2, True, True),
        (Phase.WARMUP, 2, False, False),
    ],
)
def test_several_lanes_are_active_for_prompts_and_for_single_tokens(
    phase: Phase | None, tokens: int, single: bool, several: bool
) -> None:
    assert is_cache_active(phase, tokens=tokens, lanes=1) is single
    assert is_cache_active(phase, tokens=tokens, lanes=2) is several
    assert is_cache_active(phase, tokens=tokens, lanes=3) is several


def test_without_lanes_there_is_no_cache() -> None:
    assert not is_cache_active(Phase.DECODE, tokens=1, lanes=0)
