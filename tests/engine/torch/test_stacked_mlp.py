"""A layer whose experts are in a stack: what is left out in numbers, prompts and steps alike."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.routed_experts import (
    compute_skipped_share,
    find_tokens_over_cap,
    redistribute_weights,
)
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder
from expertctl.engine.torch.expert_stack import DUMMY_ROW
from expertctl.engine.torch.functional import FeedForward
from expertctl.engine.torch.routed_mlp import RoutedMlp, RouterOutput, build_routed_mlp
from expertctl.engine.torch.stacked_experts import StackedExperts
from expertctl.engine.torch.stacked_mlp import StackedMlp, build_stacked_layers
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import MakeReferenceModel, ReferenceModel, build_reference_model
from tests.engine.torch.stacked_models import load_stacked_decoder, make_kv_cache

EXPERTS, RESIDENTS = 6, [1, 4]


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """One layer, with a shared expert and its gate; three of six experts are chosen."""
    directory = tmp_path_factory.mktemp("qwen2") / "model"
    return build_reference_model(directory, "qwen2_moe", num_hidden_layers=1)


@pytest.fixture(scope="module")
def plain(qwen2: ReferenceModel) -> RoutedMlp:
    config = read_model_config(qwen2.directory)
    assert config.experts is not None
    tensors = load_base_weights(qwen2.directory, config).tensors
    return build_routed_mlp(tensors, config.experts, layer="model.layers.0")


def mlp_of(model: ReferenceModel, experts: StackedExperts) -> StackedMlp:
    config = read_model_config(model.directory)
    weights = load_base_weights(model.directory, config, experts=False)
    return build_stacked_layers(config, weights.tensors, experts).mlps[0]


def skipping(
    model: ReferenceModel, cap: float
) -> Iterator[tuple[CudaGraphDecoder, StackedExperts]]:
    with load_stacked_decoder(model, slots=len(RESIDENTS), miss="skip", cap=cap) as (
        decoder,
        experts,
    ):
        assert experts.cache is not None
        experts.cache.fill_slots([RESIDENTS])
        yield decoder, experts


def expected(plain: RoutedMlp, x: Tensor, routed: RouterOutput, weights: np.ndarray) -> Tensor:
    """The sum of each token's experts by given weights, in float64, and what reads every token."""
    out = torch.zeros_like(x).double()
    for token, (ids, given) in enumerate(zip(routed.selected.tolist(), weights, strict=True)):
        for expert, weight in zip(ids, given, strict=True):
            made = plain.experts[expert](x[token][None], EMPTY_DELTAS)[0]
            out[token] += float(weight) * made.double()
    assert plain.shared is not None
    return (out + plain.shared(x, EMPTY_DELTAS).double()).float()


@torch.inference_mode()
@pytest.mark.parametrize("cap", [0.0, 0.4, 0.7, 1.0])
def test_what_a_prompt_leaves_out_is_given_to_who_is_there(
    cap: float, qwen2: ReferenceModel, plain: RoutedMlp
) -> None:
    x = torch.randn(40, 32)
    routed = plain.route(x)
    selected, weights = routed.selected.numpy(), routed.weights.numpy()
    there = np.isin(np.arange(EXPERTS), RESIDENTS)
    there[selected[find_tokens_over_cap(weights, there[selected], cap)]] = True
    kept = redistribute_weights(weights, there[selected])
    for _, experts in skipping(qwen2, cap):
        out = mlp_of(qwen2, experts)(x, EMPTY_DELTAS)
        assert np.array_equal(experts.layer_rows(0) != DUMMY_ROW, there)
        assert float((out - expected(plain, x, routed, kept)).abs().max()) <= 1e-5
        experts.end_pass(len(x), phase=Phase.PROMPT)
        assert experts.cache is not None
        activity = experts.cache.activity()
        left_out = np.where(there[selected], 0.0, weights)
        assert activity.skipped_weight == pytest.approx(float(left_out.sum()), rel=1e-6, abs=1e-9)
        assert activity.router_weight == pytest.approx(float(weights.sum()), rel=1e-6)


@pytest.mark.parametrize("cap", [0.4, 1.0])
def test_a_step_leaves_out_by_the_same_numbers(
    cap: float, qwen2: ReferenceModel, plain: RoutedMlp
) -> None:
    lost = []
    for decoder, experts in skipping(qwen2, cap):
        row = make_kv_cache(decoder).get_row(0)
        for token in range(30):
            decoder.decode(token, row)
            assert decoder._staged is not None
            room = decoder._staged.room
            routed = room.read_selection(1)
            selected, weights = routed.selected.numpy(), routed.weights.numpy()
            hits = experts.layer_rows(0)[selected] != DUMMY_ROW
            kept = redistribute_weights(weights, hits)
            wanted = room.hidden[:1] + expected(plain, room.normed[:1], routed, kept)
            assert float((room.after[:1] - wanted).abs().max()) <= 1e-5
            lost.append(float(compute_skipped_share(weights, hits)[0]))
    assert max(lost) <= cap
    assert cap < 1.0 or max(lost) > 0, "at first some are missing"


@torch.inference_mode()
def test_where_all_is_missed_only_what_reads_every_token_is_left(
    qwen2: ReferenceModel, plain: RoutedMlp
) -> None:
    x = torch.randn(5, 32)
    with load_stacked_decoder(qwen2, slots=0, miss="skip", cap=1.0) as (_, experts):
        out = mlp_of(qwen2, experts)(x, EMPTY_DELTAS)
    assert plain.shared is not None
    assert torch.equal(out, plain.shared(x, EMPTY_DELTAS))


@torch.inference_mode()
def test_those_who_are_there_are_computed_while_others_come(
    qwen2: ReferenceModel, plain: RoutedMlp, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(9, 32)
    events: list[str] = []
    with load_stacked_decoder(qwen2, slots=2) as (_, experts):
        assert experts.cache is not None
        experts.cache.fill_slots([RESIDENTS])
        wait, expert = experts.wait, experts.stack.expert

        def waited(*arguments: Any) -> None:
            events.append("waits")
            wait(*arguments)

        def computed(row: int, module: str) -> FeedForward:
            events.append(module[-1])
            return expert(row, module)

        monkeypatch.setattr(experts, "wait", waited)
        monkeypatch.setattr(experts.stack, "expert", computed)
        out = mlp_of(qwen2, experts)(x, EMPTY_DELTAS)
    first = events[: events.index("waits")]
    assert sorted(first) == [str(n) for n in RESIDENTS]
    assert len(events) == 1 + len(set(plain.route(x).selected.flatten().tolist()))
    assert float((out - plain(x, EMPTY_DELTAS)).abs().max()) <= 1e-5


def test_what_comes_next_is_foreseen_by_the_next_router(oracle: MakeReferenceModel) -> None:
    model = oracle("qwen2_moe", num_hidden_layers=2)
    config = read_model_config(model.directory)
    tensors = load_base_weights(model.directory, config, experts=False).tensors
    with load_stacked_decoder(model, slots=0) as (_, experts), torch.inference_mode():
        first, second = build_stacked_layers(config, tensors, experts).mlps.values()
        hidden = torch.randn(30, 32)
        norms = [tensors[f"model.layers.{n}.post_attention_layernorm.weight"] for n in (0, 1)]
        here, there = (torch.nn.functional.rms_norm(hidden, (32,), norm, 1e-6) for norm in norms)
        assert first.predictor is not None
        assert second.predictor is None
        agreed = first.predictor(here) == second.route(there).selected
        assert float(agreed.float().mean()) > 0.99, "rounding may turn a tie"
