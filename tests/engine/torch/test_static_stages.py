"""Steps in stages: what captures them may do each twice, and what stands beside changes nothing."""

from collections.abc import Callable, Hashable
from typing import Any

import pytest
import torch

from expertctl.engine.base_files import is_routed_expert
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.torch import cuda_graph_decoder
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graphs import PiecewiseStep, estimate_permanent_bytes
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.errors import InvalidPackageError
from tests.engine.conftest import (
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
    run_decoder,
    stack_logits,
)
from tests.engine.random_experts import make_random_expert, make_torch_plan
from tests.engine.torch.stacked_models import compute_scores, load_stacked_decoder, make_kv_cache
from tests.engine.torch.test_static_graphs import Device, device

__all__ = ["device"]

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2]
TEXTS = 5


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """Dense and routed layers in turn, with a shared expert and its gate."""
    directory = tmp_path_factory.mktemp("qwen2") / "model"
    return build_reference_model(
        directory, "qwen2_moe", num_hidden_layers=4, mlp_only_layers=[0, 2]
    )


def plan_of(model: ReferenceModel, kind: str, *, routed: bool, seed: int = 3) -> TorchDeltas:
    """What an expert changes, with routed experts or without."""
    config = model.load_decoder().config
    plan = make_torch_plan(config, [make_random_expert(config, kind, seed=seed)]).torch_deltas
    found = {n: delta for n, delta in plan.items() if routed or not is_routed_expert(n)}
    assert any(is_routed_expert(name) for name in found) == routed
    assert any("shared_expert" in name for name in found)
    return found


def alone(
    model: ReferenceModel, ids: list[int], plan: TorchDeltas, *, prefill: int
) -> torch.Tensor:
    """What torch gives with all experts as tensors of their own."""
    decoder = model.load_decoder()

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
    kind: str, routed: bool, slots: int | None, qwen2: ReferenceModel
) -> None:
    plan = plan_of(qwen2, kind, routed=routed)
    with load_stacked_decoder(qwen2, slots=slots) as (decoder, experts):
        found = compute_scores(decoder, IDS, prefill=5, deltas=plan)
        experts.check_integrity()
    assert_same_logits(found, alone(qwen2, IDS, plan, prefill=5))


def batch(decoder: CudaGraphDecoder, plans: list[TorchDeltas]) -> torch.Tensor:
    """Scores of texts side by side, [tokens, texts, vocab]."""
    arena = make_kv_cache(decoder, len(plans))
    rows = [arena.get_row(number) for number in range(len(plans))]
    for number, (row, plan) in enumerate(zip(rows, plans, strict=True)):
        decoder.prefill(IDS[: 2 + number], row, plan)
    found = []
    for turn in range(6):
        texts = enumerate(zip(rows, plans, strict=True))
        found.append(decoder.step([GraphStepRow((7 * n + turn) % 61, r, p) for n, (r, p) in texts]))
    return stack_logits(found)


def compute_batch_reference(model: ReferenceModel, number: int, plan: TorchDeltas) -> torch.Tensor:
    """What torch gives for a text of such a batch."""
    ids = [*IDS[: 2 + number], *((7 * number + turn) % 61 for turn in range(6))]
    return alone(model, ids, plan, prefill=2 + number)[1:]


def staged_of(decoder: CudaGraphDecoder) -> PiecewiseStep:
    assert decoder._staged is not None
    return decoder._staged


def test_texts_side_by_side_are_as_if_they_were_alone(qwen2: ReferenceModel) -> None:
    """One has no plan, two have one without routed experts, one changes them."""
    plans: list[TorchDeltas] = [
        {},
        plan_of(qwen2, "lora", routed=False),
        plan_of(qwen2, "lora", routed=True),
        plan_of(qwen2, "ia3", routed=False, seed=8),
        {},
    ]
    for slots in (None, 1):
        with load_stacked_decoder(qwen2, slots=slots) as (decoder, experts):
            together = batch(decoder, plans)
            experts.check_integrity()
        for number, plan in enumerate(plans):
            assert_same_logits(together[:, number], compute_batch_reference(qwen2, number, plan))


def test_no_text_is_ahead_of_another_after_a_step_that_failed(
    qwen2: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one whose plan changes routed experts is read first, and alone."""
    plans: list[TorchDeltas] = [{}, plan_of(qwen2, "lora", routed=True)]
    with load_stacked_decoder(qwen2, slots=1) as (decoder, experts):
        row = make_kv_cache(decoder, 2).get_row
        rows = [GraphStepRow(7, row(number), plan) for number, plan in enumerate(plans)]
        for text in rows:
            decoder.prefill(IDS[:5], text.cache, text.deltas)

        def fail(*_: object, **__: object) -> None:
            assert rows[1].cache.length == 6, "one of them was read"
            raise InvalidPackageError("model.safetensors", ["it is cut short"])

        with monkeypatch.context() as broken:
            broken.setattr(PiecewiseStep, "__call__", fail)
            with pytest.raises(InvalidPackageError, match="cut short"):
                decoder.step(rows)
        assert [text.cache.length for text in rows] == [5, 5]
        found = decoder.step(rows)
        experts.check_integrity()
    for number, plan in enumerate(plans):
        assert_same_logits(found[[number]], alone(qwen2, [*IDS[:5], 7], plan, prefill=5)[1:])


def test_each_stage_may_be_done_twice_and_is_known_by_one_key(
    qwen2: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a graph is captured: called once before, then recorded, then replayed."""
    with load_stacked_decoder(qwen2, slots=1) as (decoder, _):
        once = compute_scores(decoder, IDS, prefill=5)
    done: dict[Hashable, int] = {}

    def twice(key: Hashable, function: Callable[[], None]) -> None:
        done[key] = done.get(key, 0) + 1
        function()
        function()

    with load_stacked_decoder(qwen2, slots=1) as (decoder, experts):
        for graphs in (decoder.graphs, staged_of(decoder).graphs):
            monkeypatch.setattr(graphs, "run", twice)
        assert torch.equal(compute_scores(decoder, IDS, prefill=5), once)
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
    device: Device, qwen2: ReferenceModel
) -> None:
    """Texts in arenas of their own, short and long, with a plan and without, alone and beside."""
    plan = plan_of(qwen2, "lora", routed=False)
    texts: list[tuple[list[int], TorchDeltas]] = [
        (IDS, {}),
        (IDS[::-1], plan),
        (IDS * 2, {}),
        (IDS, {}),
    ]
    wanted = [alone(qwen2, ids, deltas, prefill=5) for ids, deltas in texts]
    with load_stacked_decoder(qwen2, slots=1) as (decoder, experts):
        staged, captured = staged_of(decoder), []
        decoder.graphs._captures = staged.graphs._captures = True
        for (ids, deltas), theirs in zip(texts, wanted, strict=True):
            assert_same_logits(compute_scores(decoder, ids, prefill=5, deltas=deltas), theirs)
            captured.append(staged.graphs.captured)
            decoder.free_buffers()
            assert len(decoder.graphs) == 0
            assert decoder.holds_only_weights
        beside = 2  # layers with an expert that reads every token, and no plan
        assert captured == [2 + beside] * len(texts)
        together = batch(decoder, [{}, plan])
        assert_same_logits(together[:, 0], compute_batch_reference(qwen2, 0, {}))
        assert_same_logits(together[:, 1], compute_batch_reference(qwen2, 1, plan))
        assert len(staged.room) == 2
        decoder.free_buffers()
        assert len(staged.room) == 1, "what is more than was announced goes with the texts"
        assert_same_logits(compute_scores(decoder, IDS, prefill=5), wanted[0])
        experts.check_integrity()
        decoder.close()
        assert len(staged.graphs) == len(decoder.graphs) == 0


def test_of_graphs_that_read_a_text_there_are_never_too_many(
    device: Device, qwen2: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_graph_decoder, "MAX_GRAPH_KEYS", 1)
    with load_stacked_decoder(qwen2, slots=1) as (decoder, _):
        once = compute_scores(decoder, IDS * 4, prefill=3)
    with load_stacked_decoder(qwen2, slots=1) as (decoder, _):
        decoder.graphs._captures = True
        assert torch.equal(compute_scores(decoder, IDS * 4, prefill=3), once)
        most, stages, lengths = 2 * 4 + 1, 3, 5
        assert decoder.graphs.captured == stages * lengths
        assert len(decoder.graphs) == stages * lengths - most, "all went once"


def test_what_a_padded_bucket_holds_besides_asks_for_nobody(
    qwen2: ReferenceModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with load_stacked_decoder(qwen2, slots=1) as (decoder, experts):
        arena, asked = make_kv_cache(decoder, 4), []
        ask = experts.request

        def seen(place: int, selected: Any, *others: Any) -> bool:
            asked.append(len(selected))
            return ask(place, selected, *others)

        first, third = arena.get_row(0), arena.get_row(2)
        monkeypatch.setattr(experts, "request", seen)
        decoder.step([GraphStepRow(3, first), GraphStepRow(9, third)])
    assert asked == [2, 2]


def test_what_stays_between_texts_takes_what_was_announced(qwen2: ReferenceModel) -> None:
    with load_stacked_decoder(qwen2, slots=1) as (decoder, _):
        used, wide = 3, 4 * 32 + 3 * 32 + 3
        announced = estimate_permanent_bytes(decoder.config)
        assert announced == 4 * wide + 3 * 8 * used + 8, "numbers, ids, and which layer it is"
        for _ in range(2):
            decoder.decode(3, make_kv_cache(decoder).get_row(0))
            assert decoder.permanent_bytes == staged_of(decoder).nbytes == announced
            decoder.free_buffers()


def test_the_times_of_routed_layers_are_told(qwen2: ReferenceModel) -> None:
    for slots in (None, 1):
        times = LayerTimer()
        with load_stacked_decoder(qwen2, slots=slots) as (decoder, _), decoder.time_layers(times):
            compute_scores(decoder, IDS, prefill=5)
        own = {f"layers.{n}.{part}" for n in range(4) for part in ("attention", "mlp")}
        assert set(times.places) == {*own, "head"}
