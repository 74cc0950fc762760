"""The closed form equals the plain formula for any chain, and copies only what it must."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.compose import (
    CompiledPlan,
    Weighted,
    check_fit,
    compile_plan,
    compiled_bytes,
)
from expertctl.engine.linear import linear
from expertctl.engine.lora import LoraTensors, apply_loras
from expertctl.errors import IncompatibleError
from tests.engine.adapter_files import linear_shapes, load
from tests.factories import write_base, write_lora

VECTORS = json.loads((Path(__file__).parent.parent / "vectors" / "runtime.json").read_text())
CPU, MODULE = torch.device("cpu"), "model.layers.0.self_attn.q_proj"


def adapter(tensors: LoraTensors, *, ref: str = "acme/x@1.0.0") -> LoadedAdapter:
    return LoadedAdapter(ref, {MODULE: tensors}, 2, 0)


def compiled(chain: list[Weighted], shape: tuple[int, int]) -> CompiledPlan:
    return compile_plan(chain, {MODULE: shape}, dtype=torch.float32, device=CPU)


def applied(chain: list[Weighted], x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    out, inputs = weight.shape
    return linear(x, weight, bias, compiled(chain, (out, inputs)).deltas.get(MODULE))


@st.composite
def chains(draw: st.DrawFn) -> tuple[list[Weighted], Tensor, Tensor, Tensor | None]:
    """A random layer, its input, and up to five LoRAs of any rank, dtype and weight on it."""
    out, inputs, seed = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    chain = []
    for _ in range(draw(st.integers(0, 5))):
        rank, dtype = draw(st.integers(1, 6)), draw(st.sampled_from(["32", "b16", "16"]))
        kind = {"32": torch.float32, "b16": torch.bfloat16, "16": torch.float16}[dtype]
        scale = draw(st.floats(0.125, 8))
        any_weight = st.floats(-2, 2, allow_subnormal=False)
        weight = draw(st.one_of(st.sampled_from([0.0, 1.0, -1.0]), any_weight))
        tensors = LoraTensors(rand(rank, inputs).to(kind), rand(out, rank).to(kind), scale)
        chain.append(Weighted(adapter(tensors), weight))
    bias = rand(out) if draw(st.booleans()) else None
    return chain, rand(3, inputs), rand(out, inputs), bias


@given(chains())
@settings(max_examples=300, deadline=None)
def test_any_weighted_chain_equals_the_plain_formula(
    case: tuple[list[Weighted], Tensor, Tensor, Tensor | None],
) -> None:
    chain, x, weight, bias = case
    loras = [(link.adapter.modules[MODULE], link.weight) for link in chain]
    exact = apply_loras(x.double(), weight.double(), None if bias is None else bias.double(), loras)
    size = max(1.0, float(exact.abs().max()))
    assert torch.allclose(applied(chain, x, weight, bias).double(), exact, atol=1e-5 * size)


@given(chains())
@settings(max_examples=100, deadline=None)
def test_a_plan_costs_exactly_what_was_announced(
    case: tuple[list[Weighted], Tensor, Tensor, Tensor | None],
) -> None:
    chain, _, weight, _ = case
    plan = compiled(chain, (weight.shape[0], weight.shape[1]))
    published = {
        t.data_ptr() for c in chain for m in c.adapter.modules.values() for t in (m.a, m.b)
    }
    tensors = [t for delta in plan.deltas.values() for t in delta.tensors]
    made = {t.untyped_storage().data_ptr(): t for t in tensors if t.data_ptr() not in published}
    assert sum(t.untyped_storage().nbytes() for t in made.values()) == plan.nbytes
    assert plan.nbytes == compiled_bytes(chain, dtype=torch.float32, device=CPU)


def test_the_lora_of_the_published_case() -> None:
    case: dict[str, Any] = VECTORS["plan_closed_form"]["order_matters_case"]
    lora = case["lora"]
    tensors = LoraTensors(torch.tensor(lora["A"]).float(), torch.tensor(lora["B"]).float(), 1.0)
    weight, x = torch.tensor(case["W"]).float(), torch.tensor([case["x"]]).float()
    y = applied([Weighted(adapter(tensors))], x, weight, None)
    ia3 = torch.tensor(case["ia3"])
    assert (y[0] * ia3).tolist() == case["lora_then_ia3"] == [8, 6]


def test_the_two_loras_of_the_published_case_add_up() -> None:
    case: dict[str, Any] = VECTORS["plan_closed_form"]["lora_ia3in_lora_case"]
    weight, x = torch.tensor(case["W"]).float(), torch.tensor([case["x"]]).float()
    chain = [
        Weighted(
            adapter(LoraTensors(torch.tensor(c["A"]).float(), torch.tensor(c["B"]).float(), 1))
        )
        for c in (case["lora1"], case["lora2"])
    ]
    assert applied(chain, x, weight, None).tolist() == [[1 + 3, 2 + 3]]


def test_one_expert_with_nothing_to_fold_is_used_in_place() -> None:
    tensors = LoraTensors(torch.randn(2, 3), torch.randn(4, 2), 1.0)
    plan = compiled([Weighted(adapter(tensors))], (4, 3))
    assert plan.nbytes == 0
    assert plan.deltas[MODULE].a is tensors.a
    assert plan.deltas[MODULE].b is tensors.b


def test_a_factor_is_folded_into_b_and_a_stays_in_place() -> None:
    tensors = LoraTensors(torch.randn(2, 3), torch.randn(4, 2), 0.5)
    before = tensors.b.clone()
    plan = compiled([Weighted(adapter(tensors), 3.0)], (4, 3))
    delta = plan.deltas[MODULE]
    assert delta.a is tensors.a
    assert delta.b is not None
    assert torch.equal(delta.b, before * 1.5)
    assert torch.equal(tensors.b, before)
    assert plan.nbytes == 4 * 2 * 4


def test_a_bfloat16_factor_is_folded_in_float32() -> None:
    tensors = LoraTensors(torch.randn(2, 3).bfloat16(), torch.randn(4, 2).bfloat16(), 1 / 3)
    delta = compiled([Weighted(adapter(tensors))], (4, 3)).deltas[MODULE]
    assert delta.a is not None
    assert delta.b is not None
    assert torch.equal(delta.a, tensors.a.float())
    assert torch.equal(delta.b, tensors.b.float() * (1 / 3))


def test_ranks_are_concatenated_in_plan_order() -> None:
    one = LoraTensors(torch.ones(1, 3), torch.ones(2, 1), 1.0)
    two = LoraTensors(torch.full((2, 3), 2.0), torch.full((2, 2), 2.0), 0.5)
    delta = compiled([Weighted(adapter(two)), Weighted(adapter(one), 3.0)], (2, 3)).deltas[MODULE]
    assert delta.a is not None
    assert delta.b is not None
    assert delta.a.tolist() == [[2, 2, 2], [2, 2, 2], [1, 1, 1]]
    assert delta.b.tolist() == [[1, 1, 3], [1, 1, 3]]


def test_weight_zero_equals_leaving_the_expert_out() -> None:
    tensors = LoraTensors(torch.full((2, 3), float("nan")), torch.randn(4, 2), 1.0)
    plan = compiled([Weighted(adapter(tensors), 0.0)], (4, 3))
    assert (plan.deltas, plan.nbytes) == ({}, 0)


def test_an_expert_that_fits_a_real_base_changes_every_module_it_has(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    lora = load(write_lora(tmp_path / "lora", base))
    plan = compile_plan([Weighted(lora)], linear_shapes(base), dtype=torch.float32, device=CPU)
    assert set(plan.deltas) == set(lora.modules)
    assert len(plan.deltas) == 14


def test_a_tensor_without_a_module_is_an_error_never_the_base_in_disguise(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    deeper = write_base(tmp_path / "deeper", layers=3)
    lora = load(write_lora(tmp_path / "lora", deeper))
    with pytest.raises(IncompatibleError, match=r"layers\.2\..*the base has no such") as caught:
        compile_plan([Weighted(lora)], linear_shapes(base), dtype=torch.float32, device=CPU)
    assert "acme/lora@1.0.0 does not fit the base" in caught.value.message


def test_a_tensor_of_another_shape_is_an_error_that_gives_both(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base")
    wider = write_base(tmp_path / "wider", intermediate=64)
    lora = load(write_lora(tmp_path / "lora", wider))
    with pytest.raises(IncompatibleError, match="made for 64 x 32, the base has 48 x 32"):
        check_fit(lora, linear_shapes(base))


def test_an_expert_that_changes_nothing_is_an_error() -> None:
    with pytest.raises(IncompatibleError, match="changes no module at all"):
        check_fit(LoadedAdapter("acme/none@1.0.0", {}, 0, 0), {MODULE: (1, 1)})
