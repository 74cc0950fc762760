"""Sampling: filters against transformers, the order against the vectors, draws by counting."""

import json
import math
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from expertctl.engine import sampling
from expertctl.engine.sampling import (
    Scores,
    UniformGenerator,
    apply_top_p,
    compute_probabilities,
    estimate_sample_bytes,
    sample_token,
    softmax,
)
from expertctl.errors import IncompatibleError, UsageError
from expertctl.routing.plan import SamplingParams

VECTORS = json.loads(
    Path(__file__).parent.parent.joinpath("vectors", "runtime.json").read_text(encoding="utf-8")
)
NEUTRAL = SamplingParams(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
VOCAB = 97


def random_scores(seed: int, size: int = VOCAB) -> Any:
    return np.random.default_rng(seed).normal(0, 3, size).astype(np.float32)


def theirs(warper: Any, scores: Any, ids: list[int] | None = None) -> Any:
    """What a warper of transformers makes of one row, as probabilities."""
    out = warper(torch.tensor([ids or []], dtype=torch.long), torch.tensor(scores)[None])
    return out[0].softmax(-1).numpy()


def ours(scores: Any, **params: Any) -> Any:
    return compute_probabilities(scores, replace(NEUTRAL, **params))


def assert_same(got: Any, wanted: Any) -> None:
    assert (got > 0).tolist() == (wanted > 0).tolist()
    np.testing.assert_allclose(got, wanted, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.1, 0.6, 1.0, 2.0])
def test_temperature_is_that_of_transformers(temperature: float) -> None:
    for seed in range(5):
        scores = random_scores(seed)
        wanted = theirs(TemperatureLogitsWarper(temperature), scores)
        np.testing.assert_allclose(ours(scores, temperature=temperature), wanted, atol=1e-6)


@pytest.mark.parametrize("top_k", [1, 2, 10, VOCAB, VOCAB + 5])
def test_top_k_is_that_of_transformers(top_k: int) -> None:
    for seed in range(5):
        scores = random_scores(seed)
        assert_same(ours(scores, top_k=top_k), theirs(TopKLogitsWarper(top_k), scores))


def test_top_k_keeps_what_equals_the_kth_as_transformers_does() -> None:
    scores = np.array([1, 3, 2, 2, 2, 0], dtype=np.float32)
    assert_same(ours(scores, top_k=2), theirs(TopKLogitsWarper(2), scores))
    assert np.count_nonzero(ours(scores, top_k=2)) == 4


@pytest.mark.parametrize("top_p", [0.0, 0.1, 0.5, 0.9, 0.95, 0.999])
def test_top_p_is_that_of_transformers(top_p: float) -> None:
    for seed in range(10):
        scores = random_scores(seed)
        assert_same(ours(scores, top_p=top_p), theirs(TopPLogitsWarper(top_p), scores))


@pytest.mark.parametrize("min_p", [0.01, 0.1, 0.5, 1.0])
def test_min_p_is_that_of_transformers(min_p: float) -> None:
    for seed in range(10):
        scores = random_scores(seed)
        assert_same(ours(scores, min_p=min_p), theirs(MinPLogitsWarper(min_p), scores))


@pytest.mark.parametrize("penalty", [1.0, 1.1, 1.5, 2.0])
def test_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    for seed in range(5):
        scores = random_scores(seed)
        ids = np.random.default_rng(seed).integers(0, VOCAB, 20).tolist()
        got = sampling.apply_repetition_penalty(scores, ids, penalty)
        warped = RepetitionPenaltyLogitsProcessor(penalty)(
            torch.tensor([ids]), torch.tensor(scores)[None]
        )
        np.testing.assert_allclose(got, warped[0].numpy(), rtol=1e-6)


def test_presence_counts_once_and_frequency_every_time() -> None:
    scores = np.zeros(4, dtype=np.float32)
    params = replace(NEUTRAL, presence_penalty=0.5, frequency_penalty=0.25)
    assert sampling.apply_penalties(scores, {1: 1, 2: 3}, params).tolist() == [0, -0.75, -1.25, 0]
    assert scores.tolist() == [0, 0, 0, 0]


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    temperature=st.floats(0.2, 2.0),
    top_k=st.integers(1, 30),
    top_p=st.floats(0.05, 0.99),
    min_p=st.floats(0.01, 0.5),
    penalty=st.floats(1.0, 2.0),
)
def test_all_filters_in_the_published_order_equal_transformers_in_that_order(
    seed: int, temperature: float, top_k: int, top_p: float, min_p: float, penalty: float
) -> None:
    scores, ids = random_scores(seed), [3, 5, 3, 96]
    rows = torch.tensor([ids])
    row = torch.tensor(scores)[None]
    for warper in (
        RepetitionPenaltyLogitsProcessor(penalty),
        TemperatureLogitsWarper(temperature),
        TopKLogitsWarper(top_k),
        TopPLogitsWarper(top_p),
        MinPLogitsWarper(min_p),
    ):
        row = warper(rows, row)
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=penalty,
    )
    got = compute_probabilities(sampling.apply_repetition_penalty(scores, ids, penalty), params)
    differ = np.flatnonzero((got > 0) != (row[0].softmax(-1).numpy() > 0))
    if len(differ) == 0:
        np.testing.assert_allclose(got, row[0].softmax(-1).numpy(), atol=2e-6)
    else:  # a sum of float32 may fall on either side of the threshold
        assert len(differ) == 1


def test_the_steps_have_the_published_order() -> None:
    assert VECTORS["sampling_order"] == [
        "constraint mask",
        "repetition penalty",
        "presence penalty",
        "frequency penalty",
        "temperature",
        "top_k",
        "softmax",
        "top_p",
        "min_p",
        "draw",
    ]
    # halved by repetition, then 0.5 less: the other way round it would be 0.75 and come second
    scores = np.array([2, 0.6], dtype=np.float32)
    params = replace(NEUTRAL, repetition_penalty=2.0, presence_penalty=0.5, top_k=1)
    assert sample_token(scores, {0: 1}, params, UniformGenerator(0), recent=[0]) == 1
    # top-k looks at the mask first: the best allowed ones are kept
    row = np.array([9, 8, 1, 0], dtype=np.float32)
    allowed = np.array([False, False, True, True])
    tokens = {
        sample_token(row, {}, replace(NEUTRAL, top_k=1), UniformGenerator(seed), allowed=allowed)
        for seed in range(20)
    }
    assert tokens == {2}


def test_greedy_takes_the_likeliest() -> None:
    scores = np.array([1, 5, 4], dtype=np.float32)
    greedy = NEUTRAL.to_greedy()
    assert sample_token(scores, {1: 100}, greedy, UniformGenerator(0), recent=[1]) == 1
    assert (
        sample_token(
            scores, {1: 100}, greedy, UniformGenerator(0), allowed=np.array([True, False, True])
        )
        == 2
    )


@pytest.mark.parametrize("seed", range(20))
def test_greedy_with_penalties_takes_the_best_of_openais_formula(seed: int) -> None:
    """mu[j] - c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence."""
    random = np.random.default_rng(seed)
    mu = random.normal(size=50).astype(np.float32)
    counts = {
        int(j): int(n) for j, n in zip(mu.argsort()[-9:], random.integers(1, 9, 9), strict=True)
    }
    presence, frequency = random.uniform(-2, 2, 2).astype(np.float32)
    params = replace(
        NEUTRAL.to_greedy(), presence_penalty=float(presence), frequency_penalty=float(frequency)
    )
    c = np.array([counts.get(j, 0) for j in range(50)], dtype=np.float32)
    best = (mu - c * frequency - (c > 0).astype(np.float32) * presence).argmax()
    assert sample_token(mu, counts, params, UniformGenerator(0)) == best


def test_of_equal_scores_greedy_takes_the_lowest_id() -> None:
    scores = np.array([0.0, 3.0, 3.0, 3.0], np.float32)
    assert sample_token(scores, {}, NEUTRAL.to_greedy(), UniformGenerator(1)) == 1


def kept_by_sorting_all(chances: Scores, top_p: float) -> Scores:
    """The plain formula."""
    order = np.argsort(-chances, kind="stable")
    before = np.cumsum(chances[order], dtype=np.float64) - chances[order]
    kept = np.zeros_like(chances)
    first = order[: max(int((before < top_p).sum()), 1)]
    kept[first] = chances[first]
    return kept


@given(
    seed=st.integers(0, 2**16),
    size=st.sampled_from([1, 2, 3, 17, 400, 5000]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 3.0, 30.0]),
    digits=st.sampled_from([1, 2, 7]),
    top_p=st.floats(0, 1, exclude_max=True),
)
def test_top_p_keeps_what_sorting_all_would(
    seed: int, size: int, spread: float, digits: int, top_p: float
) -> None:
    drawn = np.random.default_rng(seed).standard_normal(size) * spread
    chances = softmax(drawn.round(digits).astype(np.float32))  # rounded: some are equal
    assert (apply_top_p(chances, top_p) == kept_by_sorting_all(chances, top_p)).all()


def test_top_p_above_the_sum_of_rounded_chances_keeps_all() -> None:
    """Chances in float32 may sum to less than 1; a top-p of 0.99999999 lies between."""
    chances = softmax(np.random.default_rng(0).standard_normal(5000).astype(np.float32))
    total = float(chances.sum(dtype=np.float64))
    short = chances * np.float32(0.999999 / total)
    assert (apply_top_p(short, 0.99999999) == short).all()
    assert (kept_by_sorting_all(short, 0.99999999) == short).all()


def test_top_p_keeps_the_lowest_of_equals() -> None:
    got = ours(np.zeros(8, dtype=np.float32), top_p=0.5)
    assert np.flatnonzero(got).tolist() == [0, 1, 2, 3]


def test_draws_follow_the_distribution() -> None:
    scores = np.log(np.array([0.5, 0.0001, 0.3, 0.1999], dtype=np.float32))
    draws = UniformGenerator(7)
    tokens = [sample_token(scores, {}, NEUTRAL, draws) for _ in range(4000)]
    shares = np.bincount(tokens, minlength=4) / 4000
    np.testing.assert_allclose(shares, np.exp(scores), atol=0.03)


@settings(deadline=None, max_examples=100)
@given(uniform=st.floats(0, 1, exclude_max=True), seed=st.integers(0, 99))
def test_a_draw_inverts_the_cumulative_distribution(uniform: float, seed: int) -> None:
    chances = ours(random_scores(seed, 12), top_k=5)
    token = sampling.draw_token(chances, uniform)
    below = math.fsum(chances[:token].tolist()) / math.fsum(chances.tolist())
    assert chances[token] > 0
    assert below - 1e-6 <= uniform <= below + chances[token] + 1e-6


def test_the_ends_of_the_distribution_are_tokens_that_may_come() -> None:
    chances = np.array([0, 0.5, 0, 0.5, 0], dtype=np.float32)
    assert sampling.draw_token(chances, 0.0) == 1
    assert sampling.draw_token(chances, 0.5) == 3
    assert sampling.draw_token(chances, 1 - 2.0**-53) == 3
    assert sampling.draw_token(chances, 1.0) == 3


def test_a_seed_gives_the_same_numbers_on_every_platform() -> None:
    # Philox 4x64-10 behind numpy's SeedSequence: both are frozen by NumPy's stream policy
    reference = np.random.Generator(np.random.Philox(42)).random(4).tolist()
    draws = UniformGenerator(42)
    assert [draws.draw_uniform() for _ in range(4)] == reference
    assert reference[0] == pytest.approx(FIRST_OF_42, abs=1e-15)


FIRST_OF_42 = 0.08607763073528474


def test_different_seeds_give_different_numbers() -> None:
    assert len({UniformGenerator(seed).draw_uniform() for seed in range(100)}) == 100
    assert 0 <= UniformGenerator(2**64 - 1).draw_uniform() < 1


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(UsageError, match="out of range"):
        UniformGenerator(seed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [NEUTRAL, NEUTRAL.to_greedy()], ids=["sampled", "greedy"])
def test_scores_that_are_not_numbers_are_an_error(bad: float, params: SamplingParams) -> None:
    scores = np.array([0.0, bad, 1.0], np.float32)
    with pytest.raises(IncompatibleError, match="not numbers"):
        sample_token(scores, {}, params, UniformGenerator(0))


def test_nothing_allowed_is_an_error() -> None:
    for params in (NEUTRAL, NEUTRAL.to_greedy()):
        with pytest.raises(IncompatibleError, match="no token is allowed"):
            sample_token(
                random_scores(0),
                {},
                params,
                UniformGenerator(0),
                allowed=np.zeros(VOCAB, dtype=bool),
            )


def test_forbidden_tokens_never_come_back_through_a_penalty() -> None:
    scores = np.array([-np.inf, 1, 2], dtype=np.float32)
    params = replace(NEUTRAL, repetition_penalty=2.0, frequency_penalty=-2.0)
    drawn = {
        sample_token(scores, {0: 3}, params, UniformGenerator(seed), recent=[0])
        for seed in range(50)
    }
    assert drawn == {1, 2}


@settings(deadline=None, max_examples=150)
@given(
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=1, max_size=20),
    temperature=st.floats(0, 2),
    top_p=st.floats(0, 1),
    top_k=st.integers(0, 30),
    min_p=st.floats(0, 1),
    seed=st.integers(0, 2**64 - 1),
)
def test_any_scores_and_settings_give_a_token_that_may_come(
    values: list[float], temperature: float, top_p: float, top_k: int, min_p: float, seed: int
) -> None:
    params = SamplingParams(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    scores = np.array(values, dtype=np.float32)
    token = sample_token(scores, {0: 1}, params, UniformGenerator(seed))
    assert 0 <= token < len(values)
    assert token == sample_token(scores, {0: 1}, params, UniformGenerator(seed))


KINDS_OF_PARAMS = [
    NEUTRAL,
    SamplingParams(),
    SamplingParams(repetition_penalty=1.1),
    SamplingParams(top_k=40, min_p=0.05, presence_penalty=0.5),
    SamplingParams(temperature=2.0, top_p=0.999, top_k=50_000),
    SamplingParams(temperature=2.0, top_p=0.999),
]


def needed_by(scores: Scores, params: SamplingParams) -> int:
    tracemalloc.start()
    sample_token(scores, {1: 2, 5: 1}, params, UniformGenerator(1), recent=[1, 5, 1])
    needed = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return needed


def test_a_draw_needs_no_more_memory_than_it_says() -> None:
    for scores in (random_scores(0, 100_000), np.zeros(100_000, np.float32)):
        needed = [needed_by(scores, params) for params in KINDS_OF_PARAMS]
        assert max(needed) <= estimate_sample_bytes(len(scores)) <= 1.5 * max(needed)
