"""Steps in stages: what captures them may do each twice, and what stands beside changes nothing."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from expertctl.engine import static_decoder
from expertctl.engine.base_weights import is_routed_expert
from expertctl.engine.layer_times import LayerTimes
from expertctl.engine.linear import Deltas
from expertctl.engine.static_decoder import StaticDecoder, StaticRow
from expertctl.engine.static_stages import StagedStep, staying_bytes
from expertctl.errors import InvalidPackageError
from tests.engine.conftest import Oracle, assert_same_logits, build_oracle, run_decoder
from tests.engine.moe.stacked_bases import arena_of, scores, stacked
from tests.engine.plans import random_expert, torch_plan
from tests.engine.test_static_graphs import Device, device

__all__ = ["device"]

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


def texts_beside(model: Oracle, number: int, plan: Deltas) -> torch.Tensor:
    """What torch gives for a text of such a batch."""
    ids = [*IDS[: 2 + number], *((7 * number + turn) % 61 for turn in range(6))]
    return alone(model, ids, plan, prefill=2 + number)[1:]


def staged_of(decoder: StaticDecoder) -> StagedStep:
    assert decoder._staged is not None
    return decoder._staged


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
            assert_same_logits(together[:, number], texts_beside(qwen2, number, plan))


def test_no_text_is_ahead_of_another_after_a_step_that_failed(
    qwen2: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose plan changes routed experts is read first, and alone."""
    plans: list[Deltas] = [{}, plan_of(qwen2, "lora", routed=True)]
    with stacked(qwen2, slots=1) as (decoder, experts):
        row = arena_of(decoder, 2).row
        rows = [StaticRow(7, row(number), plan) for number, plan in enumerate(plans)]
        for text in rows:
            decoder.prefill(IDS[:5], text.cache, text.deltas)

        def fail(*_: object, **__: object) -> None:
            assert rows[1].cache.length == 6, "one of them was read"
            raise InvalidPackageError("model.safetensors", ["it is cut short"])

        with monkeypatch.context() as broken:
            broken.setattr(StagedStep, "__call__", fail)
            with pytest.raises(InvalidPackageError, match="cut short"):
                decoder.step(rows)
        assert [text.cache.length for text in rows] == [5, 5]
        found = decoder.step(rows)
        experts.check_integrity()
    for number, plan in enumerate(plans):
        assert_same_logits(found[[number]], alone(qwen2, [*IDS[:5], 7], plan, prefill=5)[1:])


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
        for graphs in (decoder.graphs, staged_of(decoder).graphs):
            monkeypatch.setattr(graphs, "run", twice)
        assert torch.equal(scores(decoder, IDS, prefill=5), once)
        experts.check_integrity()
    room, rows, steps, lengths = 1, 1, len(IDS) - 5, (8, 16)
    text = {
        (room, rows, length, False, *stage)
        for length in lengths
        for stage in ((1, "choose"), (3, "choose"), ("score",))
    }
    beside = {(room, rows, layer, "beside") for layer in (1, 3)}
    assert done.keys() == text | beside | {(rows, "there"), (rows, "rest")}
    assert sum(n for key, n in done.items() if key in text) == 3 * steps
    assert done[rows, "there"] == 2 * steps


def test_graphs_of_experts_serve_all_layers_and_texts_until_the_base_goes(
    device: Device, qwen2: Oracle
) -> None:
    """Texts in arenas of their own, short and long, with a plan and without, alone and beside."""
    plan = plan_of(qwen2, "lora", routed=False)
    texts: list[tuple[list[int], Deltas]] = [(IDS, {}), (IDS[::-1], plan), (IDS * 2, {}), (IDS, {})]
    wanted = [alone(qwen2, ids, deltas, prefill=5) for ids, deltas in texts]
    with stacked(qwen2, slots=1) as (decoder, experts):
        staged, captured = staged_of(decoder), []
        decoder.graphs._captures = staged.graphs._captures = True
        for (ids, deltas), theirs in zip(texts, wanted, strict=True):
            assert_same_logits(scores(decoder, ids, prefill=5, deltas=deltas), theirs)
            captured.append(staged.graphs.captured)
            decoder.rest()
            assert len(decoder.graphs) == 0
            assert decoder.is_at_rest
        beside = 2  # layers with an expert that reads every token, and no plan
        assert captured == [2 + beside] * len(texts)
        together = batch(decoder, [{}, plan])
        assert_same_logits(together[:, 0], texts_beside(qwen2, 0, {}))
        assert_same_logits(together[:, 1], texts_beside(qwen2, 1, plan))
        assert len(staged.room) == 2
        decoder.rest()
        assert len(staged.room) == 1, "what is more than was announced goes with the texts"
        assert_same_logits(scores(decoder, IDS, prefill=5), wanted[0])
        experts.check_integrity()
        decoder.close()
        assert len(staged.graphs) == len(decoder.graphs) == 0


def test_of_graphs_that_read_a_text_there_are_never_too_many(
    device: Device, qwen2: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(static_decoder, "KINDS", 1)
    with stacked(qwen2, slots=1) as (decoder, _):
        once = scores(decoder, IDS * 4, prefill=3)
    with stacked(qwen2, slots=1) as (decoder, _):
        decoder.graphs._captures = True
        assert torch.equal(scores(decoder, IDS * 4, prefill=3), once)
        most, stages, lengths = 2 * 4 + 1, 3, 5
        assert decoder.graphs.captured == stages * lengths
        assert len(decoder.graphs) == stages * lengths - most, "all went once"


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


def test_what_stays_between_texts_takes_what_was_announced(qwen2: Oracle) -> None:
    with stacked(qwen2, slots=1) as (decoder, _):
        used, wide = 3, 4 * 32 + 3 * 32 + 3
        announced = staying_bytes(decoder.config)
        assert announced == 4 * wide + 3 * 8 * used + 8, "numbers, ids, and which layer it is"
        for _ in range(2):
            decoder.decode(3, arena_of(decoder).row(0))
            assert decoder.staying_bytes == staged_of(decoder).nbytes == announced
            decoder.rest()


def test_the_times_of_routed_layers_are_told(qwen2: Oracle) -> None:
    for slots in (None, 1):
        times = LayerTimes()
        with stacked(qwen2, slots=slots) as (decoder, _), decoder.timed(times):
            scores(decoder, IDS, prefill=5)
        own = {f"layers.{n}.{part}" for n in range(4) for part in ("attention", "mlp")}
        assert set(times.places) == {*own, "head"}
