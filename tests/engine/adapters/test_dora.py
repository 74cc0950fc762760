"""DoRA's gains: the same row by row as with the whole matrix, in bounded memory, never NaN."""

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from expertctl.engine.adapters import steps as module
from expertctl.engine.adapters.steps import (
    DoraTensors,
    Ia3Tensors,
    compute_dora_scales,
    dora_scale_scratch_bytes,
    weighted_ia3_vector,
)
from expertctl.engine.torch.plan import to_array, to_tensor
from expertctl.engine.torch.reference import reference_dora_scales
from expertctl.errors import IncompatibleError
from tests.engine.random_experts import make_dora

OBJECTS = 8 << 10
"""What Python objects take that only refer to numbers."""


def a_dora(out: int = 50, inputs: int = 30, *, dtype: torch.dtype = torch.float32) -> DoraTensors:
    return make_dora(
        torch.randn(4, inputs).to(dtype),
        torch.randn(out, 4).to(dtype),
        torch.rand(out).to(dtype),
        0.6,
    )


@pytest.mark.parametrize("rows", [1, 7, 49, 50, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16, torch.float16])
def test_gains_by_rows_are_those_of_the_whole_matrix(
    rows: int, dtype: torch.dtype, base: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SCRATCH", rows * 30 * 8)
    weight, dora = torch.randn(50, 30).to(base), a_dora(dtype=dtype)
    found = compute_dora_scales(to_array(weight), dora, what="x")
    assert found.dtype == np.float32
    torch.testing.assert_close(to_tensor(found), reference_dora_scales(weight.float(), dora))


def test_gains_follow_their_formula() -> None:
    weight = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    dora = make_dora(
        torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([10.0, 3.0]), 2.0
    )
    found = compute_dora_scales(to_array(weight), dora, what="x")
    assert found.tolist() == [10.0 / 5.0, 3.0 / 4.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_scratch_is_what_was_announced(dtype: torch.dtype) -> None:
    weight, dora = to_array(torch.randn(900, 1300).to(dtype)), a_dora(900, 1300, dtype=dtype)
    compute_dora_scales(weight, dora, what="x")  # imports
    tracemalloc.start()
    found = compute_dora_scales(weight, dora, what="x")
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert most <= dora_scale_scratch_bytes(dora) + found.nbytes + OBJECTS
    assert dora_scale_scratch_bytes(dora) <= 3 * most


def test_the_scratch_is_bounded_whatever_the_layer() -> None:
    for out, inputs in ((151_936, 1024), (1024, 3072), (14_336, 4096), (1, 1)):
        dora = make_dora(torch.empty(16, inputs), torch.empty(out, 16), torch.empty(out), 1.0)
        assert dora_scale_scratch_bytes(dora) < 4 << 20


def test_a_row_without_direction_is_refused_by_the_name_of_its_layer() -> None:
    weight, dora = to_array(torch.randn(50, 30)), a_dora()
    weight[17] = 0
    dora.b[17] = 0
    with pytest.raises(
        IncompatibleError, match=r"acme/x@1: q_proj: row 17 .* cannot be scaled"
    ) as e:
        compute_dora_scales(weight, dora, what="acme/x@1: q_proj")
    assert e.value.hint


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    weight, dora = to_array(torch.randn(50, 30)), a_dora()
    dora.magnitude[3] = bad
    with pytest.raises(IncompatibleError, match="row 3"):
        compute_dora_scales(weight, dora, what="x")
    dora = a_dora()
    weight[20, 1] = bad
    with pytest.raises(IncompatibleError, match="row 20"):
        compute_dora_scales(weight, dora, what="x")


@pytest.mark.parametrize("large", [1e20, 3e38])
def test_a_norm_that_overflows_is_refused(large: float) -> None:
    weight = to_array(torch.randn(50, 30))
    weight[20, 1] = large
    with pytest.raises(IncompatibleError, match="row 20"):
        compute_dora_scales(weight, a_dora(), what="x")


@pytest.mark.parametrize("scale", [1e300, float("inf"), float("nan")])
def test_a_scale_that_no_float32_holds_is_refused(scale: float) -> None:
    dora = replace(a_dora(), scale=scale)
    with pytest.raises(IncompatibleError, match="row 0"):
        compute_dora_scales(to_array(torch.randn(50, 30)), dora, what="x")


@pytest.mark.parametrize("weight", [1e300, 3e38, float("inf")])
def test_an_ia3_vector_that_overflows_gives_no_warning(weight: float) -> None:
    vector = np.array([1, 3, np.inf, -np.inf, np.nan], np.float32)
    found = weighted_ia3_vector(Ia3Tensors(vector, on_input=True), weight)
    assert not np.isfinite(found[1:]).any()
