"""Plans of a batch in slots: each row as the plain formula of its own plan, and the bytes."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.torch.functional import (
    Linear,
    PlanDeltas,
    TorchDelta,
    TorchDeltas,
    apply_linear,
)
from expertctl.engine.torch.lora_slots import (
    NO_SLOT,
    LoRASlots,
    LoRASpec,
    StackedLoRA,
    apply_stacked_lora,
    estimate_slots_bytes,
    find_shape,
    get_module_kind,
    merge_shapes,
    round_up_rank,
)
from expertctl.package.model_config import ModelConfig
from tests.engine.torch.test_kv_cache import config as tiny

CPU = torch.device("cpu")
UP, DOWN = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.down_proj"


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lora(rank: int, out: int = 8, width: int = 8, seed: int = 0) -> TorchDelta:
    return LinearDelta(a=draw(rank, width, seed=seed), b=draw(out, rank, seed=seed + 1))


def slots_of(
    plans: Sequence[TorchDeltas], *, slots: int, config: ModelConfig | None = None
) -> LoRASlots:
    return LoRASlots(config or tiny(), find_shape(plans), slots=slots, device=CPU)


DELTAS = {
    "low rank": lora(3),
    "wider than its neighbours": lora(11, seed=4),
    "factors": LinearDelta(
        input_scale=draw(8, seed=7), output_scale=draw(8, seed=8), bias_scale=draw(8, seed=9)
    ),
    "input alone": LinearDelta(input_scale=draw(8, seed=10)),
    "output alone": LinearDelta(output_scale=draw(8, seed=11)),
    "all": LinearDelta(
        a=draw(2, 8, seed=12),
        b=draw(8, 2, seed=13),
        input_scale=draw(8, seed=14),
        output_scale=draw(8, seed=15),
        bias_scale=draw(8, seed=16),
    ),
}


@pytest.mark.parametrize("with_bias", [False, True])
def test_each_row_gets_the_formula_of_its_own_plan(with_bias: bool) -> None:
    plans: list[TorchDeltas] = [{}, *({UP: delta} for delta in DELTAS.values())]
    weight, bias = draw(8, 8, seed=20), draw(8, seed=21) if with_bias else None
    rows = [plans[n] for n in (3, 0, 1, 1, 6, 5, 2, 0, 4)]
    room = slots_of(plans, slots=8)
    slots = torch.tensor(room.assign_slots(rows))
    x = draw(len(rows), 8, seed=22)
    layer = Linear(UP, weight, bias)
    given = apply_stacked_lora(x, layer, room.stacks[UP], slots, room.mask_foreign_columns(slots))
    for row, plan in enumerate(rows):
        wanted = apply_linear(x[row : row + 1], weight, bias, plan.get(UP))
        assert torch.allclose(given[row : row + 1], wanted, atol=1e-5)


def test_a_layer_that_no_plan_changes_has_no_stack() -> None:
    room = slots_of([{UP: lora(3)}, {DOWN: lora(3)}], slots=2)
    kinds = {get_module_kind(module) for module in room.stacks}
    assert kinds == {"mlp.up_proj", "mlp.down_proj"}
    assert room.stacks.keys() == {
        f"model.layers.{n}.{kind}" for n in range(2) for kind in ("mlp.up_proj", "mlp.down_proj")
    }
    layer, x = Linear("lm_head", draw(11, 8), None), draw(2, 8)
    none = torch.tensor([NO_SLOT, NO_SLOT])
    assert torch.equal(apply_stacked_lora(x, layer, None, none, {}), x @ layer.weight.T)


def test_the_plan_used_longest_ago_gives_up_its_slot_and_leaves_nothing_there() -> None:
    plans: list[TorchDeltas] = [{UP: lora(rank, seed=rank)} for rank in (7, 2, 5)]
    room = slots_of(plans, slots=2)
    assert room.assign_slots([plans[0], plans[1], {}]) == [1, 2, NO_SLOT]
    assert room.contains(plans[:2])
    assert not room.contains(plans)
    assert room.assign_slots([plans[0]]) == [1]
    assert room.assign_slots([plans[2]]) == [2]
    assert room.assign_slots([plans[1]]) == [1]  # where the one of rank 7 was
    stack = room.stacks[UP]
    assert stack.a is not None
    assert stack.b is not None
    wanted, place = plans[1][UP], stack.a[: stack.rank]
    assert torch.equal(place[:2], wanted.a if wanted.a is not None else draw(0))
    assert not place[2:].any()
    assert not stack.b[2 : stack.rank].any()


def test_a_plan_that_was_not_written_to_its_end_takes_no_slot_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[TorchDeltas] = [{UP: lora(3, seed=seed)} for seed in range(5)]
    room = slots_of(plans, slots=4)
    room.assign_slots(plans[:4])

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(StackedLoRA, "write_slot", interrupted)
        with pytest.raises(KeyboardInterrupt):
            room.assign_slots([plans[4]])
    rows = [plans[4], plans[3], plans[2], plans[1]]
    slots = torch.tensor(room.assign_slots(rows))
    x, layer = draw(4, 8, seed=22), Linear(UP, draw(8, 8, seed=20), None)
    given = apply_stacked_lora(x, layer, room.stacks[UP], slots, room.mask_foreign_columns(slots))
    for row, plan in enumerate(rows):
        wanted = apply_linear(x[row : row + 1], layer.weight, None, plan[UP])
        assert torch.allclose(given[row : row + 1], wanted, atol=1e-5)


def test_the_slot_of_a_plan_that_was_evicted_is_the_next_one_that_is_filled() -> None:
    first, second, third = (PlanDeltas({UP: lora(3, seed=seed)}) for seed in range(3))
    room = slots_of([first], slots=2)
    assert room.assign_slots([first, second]) == [1, 2]
    del second
    assert list(room.list_plans()) == [1]
    assert room.assign_slots([third]) == [2], "not that of the least recently used"
    assert room.assign_slots([first]) == [1]


def test_factors_of_a_slot_are_neutral_again_after_another_plan() -> None:
    plans: list[TorchDeltas] = [{UP: DELTAS["all"]}, {UP: DELTAS["low rank"]}]
    room = slots_of(plans, slots=1)
    for plan in plans:
        room.assign_slots([plan])
    stack = room.stacks[UP]
    for table in (stack.inputs, stack.outputs, stack.bias):
        assert table is not None
        assert torch.equal(table, torch.ones_like(table))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_plan_that_is_refused_leaves_the_slots_as_they_were(bad: float) -> None:
    good: TorchDeltas = {UP: lora(3)}
    other: TorchDeltas = {UP: lora(2, seed=9)}
    room = slots_of([good, other], slots=2)
    room.assign_slots([good, other])
    before = [part.clone() for part in room.stacks[UP].tensors]
    with pytest.raises(Exception, match="not a number"):
        room.assign_slots([{UP: LinearDelta(output_scale=torch.full((8,), bad))}])
    after = room.stacks[UP].tensors
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert room.assign_slots([good, other]) == [1, 2]


def test_what_plans_need_together_serves_each() -> None:
    shapes = [find_shape([{UP: DELTAS["all"]}]), find_shape([{UP: lora(20), DOWN: lora(1)}])]
    both = merge_shapes(*shapes)
    assert both == {"mlp.up_proj": LoRASpec(32, True, True, True), "mlp.down_proj": LoRASpec(8)}
    assert merge_shapes(both, shapes[0]) == both


@pytest.mark.parametrize(("rank", "bucket"), [(0, 8), (1, 8), (8, 8), (9, 16), (64, 64), (65, 128)])
def test_ranks_are_rounded_up_to_powers_of_two(rank: int, bucket: int) -> None:
    assert round_up_rank(rank) == bucket


@pytest.mark.parametrize("slots", [1, 4])
def test_plans_that_change_everything_take_what_was_announced(slots: int) -> None:
    config = tiny()
    plan = {
        module: LinearDelta(
            a=draw(5, width),
            b=draw(out, 5),
            input_scale=draw(width),
            output_scale=draw(out),
            bias_scale=draw(out),
        )
        for module, (out, width) in config.linear_shapes().items()
    }
    room = slots_of([plan], slots=slots, config=config)
    kinds = 8  # one list of columns is shared by kinds of one rank, which is not counted on
    shared = (2 * kinds - 2) * 4 * slots * round_up_rank(5)
    assert room.nbytes == estimate_slots_bytes(config, slots=slots, rank=5) - shared
    small = slots_of([{UP: lora(1)}], slots=slots, config=config)
    assert 0 < small.nbytes < room.nbytes
