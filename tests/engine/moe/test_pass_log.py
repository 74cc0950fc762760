"""What is counted later is what would have been counted at once."""

import numpy as np
import pytest

from expertctl.engine.kernels.moe_layer import NO_EXPERT
from expertctl.engine.moe.counters import Counters, ExpertActivity, count_requests_by_layer
from expertctl.engine.moe.routed_experts import PassLog, RoutingChoices, sum_skips
from expertctl.package.model_config import ModelConfig, parse_model_config

LAYERS, EXPERTS, USED, MOST = 3, 8, 2, 300
NUMBERS = (0, 1, 2)


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "moe_intermediate_size": 16,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": USED,
        }
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_counts_are_those_of_each_pass_by_itself(
    config: ModelConfig, skips: bool, narrow: bool
) -> None:
    """Of a prompt the last layer may be asked for one token alone."""
    drawn, room = np.random.default_rng(0), RoutingChoices(config.experts, tokens=MOST)
    log = PassLog(NUMBERS, experts=EXPERTS, skips=skips)
    expected, totals = Counters(NUMBERS, experts=EXPERTS), ExpertActivity()
    for tokens in [1] * 21 + [3, 1, 300, 300, 2, 1]:
        hits = drawn.integers(0, 2, (LAYERS, EXPERTS)).astype(np.float32)
        room.selected[:, :tokens] = drawn.integers(0, EXPERTS, (LAYERS, tokens, USED))
        room.weights[:, :tokens] = drawn.random((LAYERS, tokens, USED))
        room.skipped[:, :tokens] = drawn.random((LAYERS, tokens))
        last = 1 if narrow else tokens
        room.mask_last_layer(last, tokens)
        for layer in range(LAYERS):
            mine = last if layer == LAYERS - 1 else tokens
            log.record_request(layer, room.selected[layer, :mine], hits[layer])
            log.finish_load()
        asked = log.end_pass(room, tokens)
        assert asked is not None
        assert [len(ids) for ids in asked] == [tokens, tokens, last]
        requests = count_requests_by_layer(room.selected[:, :tokens], EXPERTS)
        expected.count_passes(requests[None], hits.astype(np.int64)[None] - 1)
        mass = room.weights[:, :tokens].sum(-1)
        skipped = room.skipped[:, :tokens] if skips else np.zeros_like(mass)
        totals += sum_skips(requests, hits, router_weight=mass, skipped_weight=skipped)
    seen, wanted = log.counters.observed_snapshot(), expected.observed_snapshot()
    assert np.array_equal(seen.expert_counts, wanted.expert_counts)
    for number in NUMBERS:
        ours, theirs = seen.layers[number], wanted.layers[number]
        for name in ("calls", "hits", "misses", "requests", "missed_requests"):
            assert getattr(ours, name) == getattr(theirs, name)
    assert (log.totals.requests, log.totals.misses) == (totals.requests, totals.misses)
    assert log.totals.router_weight == pytest.approx(totals.router_weight, rel=1e-6)
    assert log.totals.skipped_weight == pytest.approx(totals.skipped_weight, rel=1e-6)


def test_whoever_ends_asking_asks_for_nobody(config: ModelConfig) -> None:
    room = RoutingChoices(config.experts, tokens=4)
    for each in (room.selected, room.weights, room.skipped):
        each[...] = 3
    room.mask_last_layer(1, 3)
    assert room.selected[-1].tolist() == [[3, 3], [NO_EXPERT] * 2, [NO_EXPERT] * 2, [3, 3]]
    assert room.weights[-1].tolist() == [[3, 3], [0, 0], [0, 0], [3, 3]]
    assert room.skipped[-1].tolist() == [3, 0, 0, 3]
    assert (room.selected[:-1] == 3).all()


def test_a_pass_that_failed_is_not_counted(config: ModelConfig) -> None:
    room, none = RoutingChoices(config.experts, tokens=1), np.zeros(EXPERTS, np.float32)
    log = PassLog(NUMBERS, experts=EXPERTS, skips=False)
    log.record_request(0, room.selected[0, :1], none)
    log.finish_load()
    log.record_request(1, room.selected[1, :1], none)  # and nobody came
    for layer in range(LAYERS):
        log.record_request(layer, room.selected[layer, :1], none)
        log.finish_load()
    assert log.end_pass(room, 1) is not None
    log.record_request(0, room.selected[0, :1], none)
    log.finish_load()
    assert log.end_pass(room, 1) is None
    assert log.counters.observed_snapshot().layers[1].calls == 1


def test_times_of_a_layer_are_waiting_and_then_computing(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, none = RoutingChoices(config.experts, tokens=1), np.zeros(EXPERTS, np.float32)
    log = PassLog(NUMBERS, experts=EXPERTS, skips=False)
    moments = iter([100, 130, 200, 201, 300, 350, 390])
    monkeypatch.setattr("time.perf_counter_ns", lambda: next(moments))
    for layer in range(LAYERS):
        log.record_request(layer, room.selected[layer, :1], none)
        log.finish_load()
    log.end_pass(room, 1)
    found = list(log.counters.observed_snapshot().layers.values())
    assert [each.cold_ns for each in found] == [30, 1, 50]
    assert [each.hot_ns for each in found] == [70, 99, 40]


def test_no_more_is_kept_than_is_said(config: ModelConfig) -> None:
    room, none = RoutingChoices(config.experts, tokens=MOST), np.zeros(EXPERTS, np.float32)
    log = PassLog(NUMBERS, experts=EXPERTS, skips=False)
    for expected in (1, 0, 1, 0):
        for layer in range(LAYERS):
            log.record_request(layer, room.selected[layer, :MOST], none)
            log.finish_load()
        log.end_pass(room, MOST)
        assert len(log._finished) == expected
