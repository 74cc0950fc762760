"""The closed form equals the plain formula for any chain, and copies only what it must."""

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec, WeightedAdapter, fold_plan
from expertctl.engine.adapters.fuse import ChainStep
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import AdapterStep, DoraTensors, Ia3Tensors, LoraTensors
from expertctl.engine.torch.functional import apply_linear
from expertctl.engine.torch.plan import to_array
from expertctl.errors import IncompatibleError
from tests.engine.memory_measurement import find_owner
from tests.engine.package_fixtures import load_adapters, read_linear_shapes
from tests.engine.random_experts import (
    MODULE,
    ON_HOST,
    LinearLayer,
    draw_chain_case,
    make_chain_step,
    make_dora,
    make_ia3,
    make_lora,
)
from tests.factories import write_base, write_lora

VECTORS = json.loads((Path(__file__).parents[2] / "vectors" / "runtime.json").read_text())
CASES: dict[str, Any] = VECTORS["plan_closed_form"]


def t(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def a_form(shape: tuple[int, int], width: int = 4) -> CompileSpec:
    return CompileSpec({MODULE: shape}, width)


def compiled(chain: Sequence[WeightedAdapter], shape: tuple[int, int]) -> CompiledPlan:
    return fold_plan(chain, a_form(shape)).compile()


def compile_for_torch(chain: Sequence[WeightedAdapter], form: CompileSpec) -> CompiledPlan:
    return fold_plan(chain, replace(form, target=ON_HOST)).compile()


def applied(layer: LinearLayer, links: Sequence[ChainStep]) -> Tensor:
    plan = compile_for_torch([layer.make_weighted(link) for link in links], layer.plan_form)
    return apply_linear(layer.x, layer.weight, layer.bias, plan.torch_deltas.get(MODULE))


def lora_of(case: dict[str, Any], key: str = "lora") -> LoraTensors:
    return make_lora(t(case[key]["A"]), t(case[key]["B"]), case[key]["scale"])


def layer_of(case: dict[str, Any]) -> LinearLayer:
    return LinearLayer(t(case["W"]), None, t([case["x"]]))


def a_lora(rank: int = 2) -> LoraTensors:
    return make_lora(torch.randn(rank, 3), torch.randn(4, rank), 1.0)


def a_dora() -> DoraTensors:
    return make_dora(torch.randn(2, 3), torch.randn(4, 2), torch.rand(4), 1.0)


@given(draw_chain_case())
@settings(max_examples=500, deadline=None)
def test_any_chain_equals_the_plain_formulas_expert_by_expert(
    case: tuple[LinearLayer, list[ChainStep]],
) -> None:
    layer, links = case
    exact = layer.compute_exact(links)
    on_the_way = [layer.compute_exact(links[:n]) for n in range(len(links))]
    size = max(1.0, *(float(y.abs().max()) for y in [exact, *on_the_way]))
    assert float((applied(layer, links).double() - exact).abs().max()) <= 1e-5 * size


@given(draw_chain_case())
@settings(max_examples=200, deadline=None)
def test_a_plan_costs_exactly_what_was_announced(case: tuple[LinearLayer, list[ChainStep]]) -> None:
    layer, links = case
    chain = [layer.make_weighted(link) for link in links]
    composition = fold_plan(chain, layer.plan_form)
    announced, plan = composition.nbytes, composition.compile()
    published = {
        id(find_owner(part))
        for link in links
        if not isinstance(link.step, Ia3Tensors)
        for part in (link.step.a, link.step.b)
    }
    parts = [part for delta in plan.deltas.values() for part in delta.tensors]
    owners = {id(owner): owner for owner in map(find_owner, parts)}
    made = [owner for key, owner in owners.items() if key not in published]
    assert sum(owner.nbytes for owner in made) == plan.nbytes == announced
    assert composition.shares_adapter_memory == (len(made) < len(owners))


OBJECTS = 64 << 10
"""What Python objects take that only refer to numbers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", ["lora", "lora lora", "lora ia3 dora", "ia3 ia3"])
def test_compiling_takes_no_more_than_was_announced(kinds: str, dtype: torch.dtype) -> None:
    steps: dict[str, AdapterStep] = {
        "lora": make_lora(torch.randn(9, 7000).to(dtype), torch.randn(9000, 9).to(dtype), 0.5),
        "ia3": make_ia3(torch.randn(9000).to(dtype), on_input=False),
        "dora": make_dora(
            *(torch.randn(shape).to(dtype) for shape in ((8, 7000), (9000, 8), (9000,))), 2.0
        ),
    }
    modules = [f"model.layers.{n}.mlp.up_proj" for n in range(20)]
    scales = {module: (to_array(torch.rand(9000)),) for module in modules}
    chain = [
        WeightedAdapter(
            LoadedAdapter("acme/x@1", dict.fromkeys(modules, (steps[kind],)), (), 1, 0),
            0.7,
            scales if kind == "dora" else {},
        )
        for kind in kinds.split()
    ]
    composition = fold_plan(chain, CompileSpec(dict.fromkeys(modules, (9000, 7000)), 4))
    composition.compile()  # imports
    tracemalloc.start()
    plan = composition.compile()
    most = tracemalloc.get_traced_memory()[1]  # the plan itself is not among it
    tracemalloc.stop()
    assert most <= composition.scratch_bytes + OBJECTS
    assert len(plan.deltas) == len(modules)


@given(draw_chain_case())
@settings(max_examples=100, deadline=None)
def test_weight_zero_equals_leaving_out_bit_by_bit(
    case: tuple[LinearLayer, list[ChainStep]],
) -> None:
    layer, links = case
    without = [link for link in links if link.weight != 0.0]
    assert torch.equal(applied(layer, links), applied(layer, without))


def test_the_order_of_lora_and_ia3_matters_as_published() -> None:
    case = CASES["order_matters_case"]
    lora, ia3 = ChainStep(lora_of(case)), ChainStep(make_ia3(t(case["ia3"]), on_input=False))
    layer = layer_of(case)
    assert applied(layer, [lora, ia3]).tolist() == [case["lora_then_ia3"]] == [[8, 6]]
    assert applied(layer, [ia3, lora]).tolist() == [case["ia3_then_lora"]] == [[5, 6]]
    assert layer.compute_exact([lora, ia3]).tolist() == [case["lora_then_ia3"]]
    assert layer.compute_exact([ia3, lora]).tolist() == [case["ia3_then_lora"]]


def test_ia3_at_half_weight_is_the_published_case() -> None:
    case = CASES["ia3_half_case"]
    links = [ChainStep(make_ia3(t(case["ia3"]), on_input=False), case["w"])]
    assert applied(layer_of(case), links).tolist() == [case["y"]]
    assert layer_of(case).compute_exact(links).tolist() == [case["y"]]


def test_an_input_factor_reaches_only_what_stands_before_it_as_published() -> None:
    case = CASES["lora_ia3in_lora_case"]
    ia3 = make_ia3(t(case["ia3_input"]), on_input=True)
    links = [ChainStep(lora_of(case, "lora1")), ChainStep(ia3), ChainStep(lora_of(case, "lora2"))]
    assert applied(layer_of(case), links).tolist() == [case["y"]]
    assert layer_of(case).compute_exact(links).tolist() == [case["y"]]


def test_one_lora_with_nothing_to_fold_is_used_in_place() -> None:
    tensors = a_lora()
    plan = compiled([WeightedAdapter(make_chain_step(tensors))], (4, 3))
    assert plan.nbytes == 0
    assert plan.deltas[MODULE].a is tensors.a
    assert plan.deltas[MODULE].b is tensors.b


def test_a_factor_is_folded_into_b_and_a_stays_in_place() -> None:
    tensors = make_lora(torch.randn(2, 3), torch.randn(4, 2), 0.5)
    before = tensors.b.copy()
    plan = compiled([WeightedAdapter(make_chain_step(tensors), 3.0)], (4, 3))
    delta = plan.deltas[MODULE]
    assert delta.a is tensors.a
    assert delta.b is not None
    np.testing.assert_array_equal(delta.b, before * 1.5)
    np.testing.assert_array_equal(tensors.b, before)
    assert plan.nbytes == 4 * 2 * 4


def test_an_input_factor_is_folded_into_a_and_b_stays_in_place() -> None:
    tensors, ia3 = a_lora(), make_ia3(torch.randn(3), on_input=True)
    plan = compiled(
        [WeightedAdapter(make_chain_step(tensors)), WeightedAdapter(make_chain_step(ia3))], (4, 3)
    )
    delta = plan.deltas[MODULE]
    assert delta.b is tensors.b
    assert delta.a is not None
    np.testing.assert_array_equal(delta.a, tensors.a * ia3.vector)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_a_narrow_factor_is_folded_in_float32(narrow: torch.dtype) -> None:
    a, b, vector = (torch.randn(shape).to(narrow) for shape in ((2, 3), (4, 2), (4,)))
    tensors, ia3 = make_lora(a, b, 1 / 3), make_ia3(vector, on_input=False)
    for steps, scale in (([tensors], torch.ones(4)), ([tensors, ia3], vector.float())):
        delta = compiled([WeightedAdapter(make_chain_step(*steps))], (4, 3)).deltas[MODULE]
        assert delta.a is not None
        assert delta.b is not None
        assert torch.equal(torch.from_numpy(delta.a), a.float())
        assert torch.equal(torch.from_numpy(delta.b), b.float() * (scale * (1 / 3))[:, None])


def test_ranks_are_concatenated_in_plan_order() -> None:
    one = make_lora(torch.ones(1, 3), torch.ones(2, 1), 1.0)
    two = make_lora(torch.full((2, 3), 2.0), torch.full((2, 2), 2.0), 0.5)
    delta = compiled(
        [WeightedAdapter(make_chain_step(two)), WeightedAdapter(make_chain_step(one), 3.0)], (2, 3)
    ).deltas[MODULE]
    assert delta.a is not None
    assert delta.b is not None
    assert delta.a.tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 1]]
    assert delta.b.tolist() == [[1, 1, 3], [1, 1, 3]]


def test_the_adapters_of_one_package_are_steps_in_their_order() -> None:
    case = CASES["order_matters_case"]
    lora, ia3 = lora_of(case), make_ia3(t(case["ia3"]), on_input=False)
    both: dict[str, tuple[AdapterStep, ...]] = {
        "lora_then_ia3": (lora, ia3),
        "ia3_then_lora": (ia3, lora),
    }
    for name, steps in both.items():
        plan = compile_for_torch([WeightedAdapter(make_chain_step(*steps))], a_form((2, 2)))
        delta = plan.torch_deltas[MODULE]
        assert apply_linear(t([case["x"]]), t(case["W"]), None, delta).tolist() == [case[name]]


def test_several_dora_steps_of_one_package_have_each_its_own_gains() -> None:
    layer = LinearLayer(torch.randn(4, 3), torch.randn(4), torch.randn(2, 3))
    one, two = a_dora(), a_dora()
    found = [layer.make_weighted(ChainStep(step)).dora_scales[MODULE][0] for step in (one, two)]
    chain = [WeightedAdapter(make_chain_step(one, two), 0.7, {MODULE: tuple(found)})]
    delta = compile_for_torch(chain, layer.plan_form).torch_deltas[MODULE]
    exact = layer.compute_exact([ChainStep(one, 0.7), ChainStep(two, 0.7)])
    got = apply_linear(layer.x, layer.weight, layer.bias, delta)
    torch.testing.assert_close(got.double(), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "step",
    [
        make_lora(torch.full((2, 3), float("nan")), torch.randn(4, 2), 1.0),
        make_dora(torch.full((2, 3), float("inf")), torch.randn(4, 2), torch.ones(4), 1.0),
        make_ia3(torch.full((3,), float("nan")), on_input=True),
        make_ia3(torch.full((4,), float("inf")), on_input=False),
    ],
    ids=["lora", "dora", "ia3 on the input", "ia3 on the output"],
)
def test_a_layer_that_nothing_changes_needs_no_delta(step: AdapterStep) -> None:
    plan = compiled([WeightedAdapter(make_chain_step(step), 0.0)], (4, 3))
    assert (plan.deltas, plan.soft_prompt, plan.nbytes) == ({}, None, 0)


def test_a_large_plan_is_the_same_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [(f"model.layers.{n}.mlp.up_proj", a_lora(n % 5 + 1)) for n in range(50)]
    ia3 = make_ia3(torch.randn(4), on_input=False)
    chain = [
        WeightedAdapter(
            LoadedAdapter("acme/x@1", {m: (step,) for m, step in layers}, (), 100, 0), 0.5
        ),
        WeightedAdapter(
            LoadedAdapter("acme/y@1", {m: (ia3, a_lora()) for m, _ in layers}, (), 150, 0)
        ),
    ]
    form = CompileSpec({m: (4, 3) for m, _ in layers}, 4)
    alone = fold_plan(chain, form).compile()
    monkeypatch.setattr("expertctl.engine.adapters.compile._MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr("expertctl.engine.adapters.compile.count_usable_cores", lambda: 3)
    together = fold_plan(chain, form).compile()
    assert list(together.deltas) == list(alone.deltas) == [m for m, _ in layers]
    for module, delta in alone.deltas.items():
        other = together.deltas[module].tensors
        assert all(np.array_equal(*pair) for pair in zip(delta.tensors, other, strict=True))


def prompt_of(tensor: Tensor, ref: str = "acme/style@1.0.0") -> LoadedAdapter:
    return LoadedAdapter(ref, {}, (to_array(tensor),), 1, 0)


def test_soft_prompts_stand_in_plan_order_in_float32() -> None:
    one, two = torch.randn(2, 4).bfloat16(), torch.randn(3, 4)
    chain = [WeightedAdapter(prompt_of(one)), WeightedAdapter(prompt_of(torch.randn(9, 4)), 0.0)]
    composition = fold_plan([*chain, WeightedAdapter(prompt_of(two))], a_form((1, 1)))
    plan = composition.compile()
    assert plan.soft_prompt is not None
    assert plan.soft_prompt.dtype == np.float32
    assert torch.equal(torch.from_numpy(plan.soft_prompt), torch.cat((one.float(), two)))
    assert plan.nbytes == composition.nbytes == find_owner(plan.soft_prompt).nbytes
    assert plan.deltas == {}


@pytest.mark.parametrize("weight", [0.5, -1.0, 2.0])
def test_a_soft_prompt_has_no_weight(weight: float) -> None:
    chain = [WeightedAdapter(prompt_of(torch.randn(2, 4)), weight)]
    with pytest.raises(IncompatibleError, match="no weight but 1") as caught:
        fold_plan(chain, a_form((1, 1)))
    assert "acme/style@1.0.0" in caught.value.message
    assert "leave it out" in caught.value.hint


def test_an_expert_that_fits_a_real_base_changes_every_module_it_has(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    lora = load_adapters(write_lora(tmp_path / "lora", base))
    form = CompileSpec(read_linear_shapes(base), 32)
    plan = fold_plan([WeightedAdapter(lora)], form).compile()
    assert set(plan.deltas) == set(lora.modules)
    assert len(plan.deltas) == 14
