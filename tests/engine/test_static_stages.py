"""Steps in stages: what captures them may do each twice, and what stands beside changes nothing."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from expertctl.engine.base_weights import is_routed_expert
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.linear import Deltas
from expertctl.engine.static_decoder import StaticDecoder, StaticRow
from tests.engine.conftest import Oracle, assert_same_logits, build_oracle, run_decoder
from tests.engine.moe.stacked_bases import arena_of, scores, stacked
from tests.engine.plans import random_expert, torch_plan

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
TEXTS = 5


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Dense and routed layers in turn, with a shared expert and its gate."""
    directory = tmp_path_factory.mktemp("qwen2") / "model"
    return build_oracle(directory, "qwen2_moe", num_hidden_layers=4, mlp_only_layers=[0, 2])


def plan_of(model: Oracle, kind: str, *, routed: bool, seed: int = 3) -> Deltas:
    """What an expert changes, with routed experts or without."""
    config = model.decoder().config
    plan = torch_plan(config, [random_expert(config, kind, seed=seed)]).deltas
    found = {n: delta for n, delta in plan.items() if routed or not is_routed_expert(n)}
    assert any(is_routed_expert(name) for name in found) == routed
    assert any("shared_expert" in name for name in found)
    return found


def alone(model: Oracle, ids: list[int], plan: Deltas, *, prefill: int) -> torch.Tensor:
    """What torch gives with all experts as tensors of their own."""
    decoder = model.decoder()

    class With:
        config = decoder.config

        def prefill(self, tokens: list[int], cache: Any) -> Any:
            return decoder.prefill(tokens, cache, plan)

        def decode(self, token: int, cache: Any) -> Any:
            return decoder.decode(token, cache, plan)

    found: torch.Tensor = run_decoder(With(), ids, prefill=prefill)  # type: ignore[arg-type]  # as far as it is used
    return found


@pytest.mark.parametrize("slots", [None, 1])
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_plan_changes_attention_what_is_shared_and_routed_experts(
    kind: str, routed: bool, slots: int | None, qwen2: Oracle
) -> None:
    plan = plan_of(qwen2, kind, routed=routed)
    with stacked(qwen2, slots=slots) as (decoder, experts):
        found = scores(decoder, IDS, prefill=5, deltas=plan)
        experts.check_integrity()
    assert_same_logits(found, alone(qwen2, IDS, plan, prefill=5))


def batch(decoder: StaticDecoder, plans: list[Deltas]) -> torch.Tensor:
    """Scores of texts side by side, [tokens, texts, vocab]."""
    arena = arena_of(decoder, len(plans))
    rows = [arena.row(number) for number in range(len(plans))]
    for number, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        decoder.prefill(IDS[: 2 + number], row, plan)
    found = []
    for turn in range(6):
        texts = enumerate(zip(rows, plans, strict=True))
        found.append(decoder.step([StaticRow((7 * n + turn) % 61, r, p) for n, (r, p) in texts]))
    return torch.stack(found)


def test_texts_side_by_side_are_as_if_they_were_alone(qwen2: Oracle) -> None:
    """One has no plan, two have one without routed experts, one changes them."""
    plans: list[Deltas] = [
        {},
        plan_of(qwen2, "lora", routed=False),
        plan_of(qwen2, "lora", routed=True),
        plan_of(qwen2, "ia3", routed=False, seed=8),
        {},
    ]
    for slots in (None, 1):
        with stacked(qwen2, slots=slots) as (decoder, experts):
            together = batch(decoder, plans)
            experts.check_integrity()
        for number, plan in enumerate(plans):
            ids = [*IDS[: 2 + number], *((7 * number + turn) % 61 for turn in range(6))]
            theirs = alone(qwen2, ids, plan, prefill=2 + number)[1:]
            assert_same_logits(together[:, number], theirs)


def test_each_stage_may_be_done_twice_and_is_known_by_one_key(
    qwen2: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a graph is captured: called once before, then recorded, then replayed."""
    with stacked(qwen2, slots=1) as (decoder, _):
        once = scores(decoder, IDS, prefill=5)
    done: dict[Hashable, int] = {}

    def twice(key: Hashable, function: Callable[[], None]) -> None:
        done[key] = done.get(key, 0) + 1
        function()
        function()

    with stacked(qwen2, slots=1) as (decoder, experts):
        monkeypatch.setattr(decoder.graphs, "run", twice)
        assert torch.equal(scores(decoder, IDS, prefill=5), once)
        experts.check_integrity()
    lengths, steps = {8, 16}, len(IDS) - 5
    names = {(1, "choose"), (1, "there"), (1, "rest"), (3, "choose"), (3, "there"), (3, "rest")}
    ends = {key[3:] for key in done if isinstance(key, tuple)}
    assert ends == names | {("score",)}
    assert {key[1] for key in done if isinstance(key, tuple)} == lengths
    assert (
        sum(n for key, n in done.items() if isinstance(key, tuple) and key[-1] == "score") == steps
    )


def test_what_a_padded_bucket_holds_besides_asks_for_nobody(
    qwen2: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stacked(qwen2, slots=1) as (decoder, experts):
        arena, asked = arena_of(decoder, 4), []
        ask = experts.ask

        def seen(place: int, selected: Any, *others: Any) -> bool:
            asked.append(len(selected))
            return ask(place, selected, *others)

        first, third = arena.row(0), arena.row(2)
        monkeypatch.setattr(experts, "ask", seen)
        decoder.step([StaticRow(3, first), StaticRow(9, third)])
    assert asked == [2, 2]


def test_no_step_takes_more_memory_than_was_announced_to_stay(qwen2: Oracle) -> None:
    with stacked(qwen2, slots=1) as (decoder, _):
        row = arena_of(decoder).row(0)
        decoder.decode(3, row)
        room = decoder._room
        assert room is not None
        assert room.stacked is not None
        used = 3
        wide = 4 * 32 + used * 32 + used
        assert room.stacked.nbytes == 4 * wide + 3 * 8 * used
        decoder.rest()
        assert decoder.is_at_rest


def test_the_times_of_routed_layers_are_told(qwen2: Oracle) -> None:
    for slots in (None, 1):
        times = LayerTimes()
        with stacked(qwen2, slots=slots) as (decoder, _), decoder.timed(times):
            scores(decoder, IDS, prefill=5)
        own = {f"layers.{n}.{part}" for n in range(4) for part in ("attention", "mlp")}
        assert set(times.places) == {*own, "head"}
