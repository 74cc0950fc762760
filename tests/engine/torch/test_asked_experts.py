"""Who is asked for of a base that is whole on a device: added up there, fetched at the end."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.routed.traced_base import RoutedShape
from expertctl.engine.torch.stacked_experts import DeviceExpertCounts, estimate_counter_bytes
from expertctl.package.architectures import ExpertsConfig

EXPERTS, USED = 7, 3


def routed(layers: int) -> ExpertsConfig:
    found = (
        RoutedShape(layers, hidden=64, heads=2, experts=EXPERTS, used=USED).make_config().experts
    )
    assert found is not None
    return found


def drawn(seed: int, layers: int, tokens: int) -> np.ndarray:
    """Different experts for each token and layer, [layers, tokens, used]."""
    draw = np.random.default_rng(seed)
    return draw.random((layers, tokens, EXPERTS)).argsort(-1)[..., :USED]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), max_size=6), st.integers(1, 4))
def test_what_is_counted_is_what_a_plain_loop_counts(
    steps: list[tuple[int, int]], layers: int
) -> None:
    asked = DeviceExpertCounts(routed(layers), torch.device("cpu"))
    chosen, requests = np.zeros((layers, EXPERTS), int), np.zeros(layers, int)
    for number, (seed, tokens) in enumerate(steps):
        selected = drawn(seed, layers, tokens)
        if number % 3 == 2:
            asked.count_pass(selected)
        else:
            asked.count_step(torch.from_numpy(selected))
        for layer, each in enumerate(selected):
            requests[layer] += len(set(each.flatten().tolist()))
            for expert in each.flatten():
                chosen[layer, expert] += 1
    for _ in range(2):
        asked.fetch_counts()
    seen = asked.counters.cumulative_snapshot()
    assert seen.expert_counts[:, 0].tolist() == chosen.tolist()
    assert [layer.requests for layer in seen.layers.values()] == requests.tolist()
    assert {layer.calls for layer in seen.layers.values()} == {len(steps)}
    assert asked.report().activity.requests == requests.sum()


def test_nothing_is_fetched_before_an_answer_is_over() -> None:
    asked = DeviceExpertCounts(routed(2), torch.device("cpu"))
    asked.count_step(torch.from_numpy(drawn(0, 2, 1)))
    assert asked.report().activity.requests == 0
    asked.fetch_counts()
    assert asked.report().activity.requests == 2 * USED


def test_its_bytes_are_known_before() -> None:
    config = routed(3)
    assert DeviceExpertCounts(config, torch.device("cpu")).nbytes == estimate_counter_bytes(config)
