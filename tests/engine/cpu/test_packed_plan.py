"""A packed plan holds what the compiled one does, in the memory that was announced."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.compile import WeightedAdapter, fold_plan
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.kernels.lora import RECORD_WORDS
from expertctl.engine.kernels.packed_format import (
    AdapterDtype,
    PackedDeltas,
    PlanPacking,
    Scheme,
    find_fused_projections,
)
from expertctl.engine.kernels.packed_matrix import PackedMatrix, unpack_matrix
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, parse_model_config
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.random_experts import (
    make_lora,
    make_packed_plan,
    make_plan_form,
    make_random_expert,
)

CONFIG: ModelConfig = parse_model_config(
    {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 61,
        "max_position_embeddings": 64,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
)
CHAIN = [make_random_expert(CONFIG, kind, seed=n) for n, kind in enumerate(("lora", "ia3", "dora"))]


def numbers_at(address: int, count: int) -> np.ndarray[Any, Any]:
    """Read float32 where a record says they are."""
    data = (np.ctypeslib.ctypes.c_float * count).from_address(address)
    return np.ctypeslib.as_array(data).copy()


def matrix_at(scheme: Scheme, rows: int, columns: int, data: int, scales: int) -> PackedMatrix:
    """Read a matrix where a record says it is."""
    layout, blocks = scheme.layout, -(-rows // 16)
    size = blocks * layout.count_vectors(columns) * layout.vector_bytes
    raw = (np.ctypeslib.ctypes.c_uint8 * size).from_address(data)
    shape = (blocks, layout.count_groups(columns), 16)
    kept = (np.ctypeslib.ctypes.c_uint16 * int(np.prod(shape))).from_address(scales)
    found = np.ctypeslib.as_array(kept).copy() if scales else np.zeros(0, np.uint16)
    return PackedMatrix(
        scheme, rows, columns, np.ctypeslib.as_array(raw).copy(), found.reshape(shape)
    )


@pytest.mark.parametrize(
    ("adapters", "most"), [("published", 0.0), ("fp16", 2**-11), ("int8", 2 / 127)]
)
def test_a_table_leads_to_what_a_plain_plan_has(adapters: AdapterDtype, most: float) -> None:
    deltas = fold_plan(CHAIN, make_plan_form(CONFIG)).compile().deltas
    plan = make_packed_plan(CONFIG, CHAIN, adapters=adapters)
    names = [
        name for site in find_fused_projections(CONFIG.linear_shapes()) for name in site.modules
    ]
    assert plan.modules == set(deltas)
    for name, record in zip(names, plan.table.tolist(), strict=True):
        if name not in deltas:
            assert record == [0] * RECORD_WORDS
            continue
        delta, (out, into) = deltas[name], CONFIG.linear_shapes()[name]
        rank = 0 if delta.a is None else len(delta.a)
        for block, shape, place in ((delta.a, (rank, into), 0), (delta.b, (out, rank), 4)):
            if block is None:
                assert record[place] == 0
                continue
            found = unpack_matrix(matrix_at(plan.scheme, *shape, *record[place : place + 2]))
            assert np.abs(found - block).max() <= most * np.abs(block).max()
        for scale, place in zip(
            (delta.input_scale, delta.output_scale, delta.bias_scale), record[8:], strict=True
        ):
            assert (scale is None) == (place == 0)
            if scale is not None:
                assert numbers_at(place, len(scale)).tolist() == scale.tolist()


def scheme_of(base: Scheme, *dtypes: torch.dtype, adapters: AdapterDtype = "published") -> Scheme:
    chain = [make_random_expert(CONFIG, seed=n, dtype=dtype) for n, dtype in enumerate(dtypes)]
    return make_packed_plan(CONFIG, chain, base=base, adapters=adapters).scheme


def test_a_plan_is_stored_as_its_experts_were_published_unless_the_base_is_exact() -> None:
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    for base in (Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4):
        assert scheme_of(base, bf16, bf16) is Scheme.BFLOAT16
        assert scheme_of(base, half) is Scheme.FLOAT16
        assert scheme_of(base, single) is scheme_of(base, bf16, half) is Scheme.FLOAT32
        assert scheme_of(base, bf16, adapters="fp16") is Scheme.FLOAT16
        assert scheme_of(base, single, adapters="int8") is Scheme.INT8
    assert scheme_of(Scheme.FLOAT32, bf16) is scheme_of(Scheme.FLOAT32, half) is Scheme.FLOAT32
    assert scheme_of(Scheme.FLOAT32, bf16, adapters="int8") is Scheme.INT8


@pytest.mark.parametrize("adapters", ["published", "fp16", "int8"])
def test_a_plan_takes_what_was_announced(adapters: AdapterDtype) -> None:
    larger = replace(CONFIG, hidden_size=256, intermediate_size=320)
    chain = [
        make_random_expert(larger, kind, seed=n) for n, kind in enumerate(("lora", "ia3", "lora"))
    ]
    composition = fold_plan(chain, make_plan_form(larger, PlanPacking(Scheme.BFLOAT16, adapters)))
    plan = composition.compile()
    found = count_fewest_allocations(composition.compile)
    assert plan.packed is not None
    assert plan.nbytes == composition.nbytes == plan.packed.nbytes
    assert plan.packed.width == composition.width > 0
    assert not composition.shares_adapter_memory
    assert found.python_bytes <= composition.nbytes + composition.scratch_bytes
    addresses = sorted(a for row in plan.packed.table.tolist() for a in row if a > 1 << 20)
    assert addresses[-1] - addresses[0] < composition.nbytes, "it all lies in one block"


def test_a_large_plan_is_the_same_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def steps(plan: PackedDeltas) -> list[float]:
        b = plan.table[plan.table[:, 6] > 0]
        return [float(numbers_at(row[4], 64).sum()) for row in b.tolist()]

    alone = make_packed_plan(CONFIG, CHAIN)
    monkeypatch.setattr("expertctl.engine.adapters.compile._MIN_PARALLEL_BYTES", 1)
    monkeypatch.setattr("expertctl.engine.adapters.compile.count_usable_cores", lambda: 3)
    assert steps(make_packed_plan(CONFIG, CHAIN)) == steps(alone)


def test_numbers_that_float16_does_not_reach_are_refused() -> None:
    module = "model.layers.0.mlp.up_proj"
    step = make_lora(torch.ones(1, 48), torch.full((80, 1), 7e4), 1.0)
    chain = [WeightedAdapter(LoadedAdapter("acme/x@1.0.0", {module: (step,)}, (), 1, 0))]
    with pytest.raises(IncompatibleError, match=f"{module}.*7e\\+04.*65504"):
        make_packed_plan(CONFIG, chain, adapters="fp16")
    make_packed_plan(CONFIG, chain)


def test_a_plan_without_experts_that_change_layers_is_empty() -> None:
    plan = make_packed_plan(CONFIG, [make_random_expert(CONFIG, weight=0.0)])
    assert (len(plan), plan.width, plan.has_scales) == (0, 0, False)
    assert not plan.table.any()
