"""DoRA's gains: the same row by row as with the whole matrix, in bounded memory, never NaN."""

import pytest
import torch

from expertctl.engine.model import functional as module
from expertctl.engine.model.functional import (
    DoraTensors,
    compute_dora_scales,
    dora_scale_scratch_bytes,
    reference_dora_scales,
)
from expertctl.errors import IncompatibleError


def a_dora(out: int = 50, inputs: int = 30, *, dtype: torch.dtype = torch.float32) -> DoraTensors:
    return DoraTensors(
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
    monkeypatch.setattr(module, "SCRATCH", rows * 30 * 4)
    weight, dora = torch.randn(50, 30).to(base), a_dora(dtype=dtype)
    found = compute_dora_scales(weight, dora, what="x")
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, reference_dora_scales(weight.float(), dora))


def test_gains_follow_their_formula() -> None:
    weight = torch.tensor([[3.0, 0.0], [0.0, 0.0]])
    dora = DoraTensors(
        torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0], [1.0]]), torch.tensor([10.0, 3.0]), 2.0
    )
    assert compute_dora_scales(weight, dora, what="x").tolist() == [10.0 / 5.0, 3.0 / 4.0]


def test_the_scratch_is_bounded_whatever_the_layer() -> None:
    for out, inputs in ((151_936, 1024), (1024, 3072), (14_336, 4096), (1, 1)):
        dora = DoraTensors(torch.empty(16, inputs), torch.empty(out, 16), torch.empty(out), 1.0)
        assert dora_scale_scratch_bytes(dora) < 4 << 20


def test_a_row_without_direction_is_refused_by_the_name_of_its_layer() -> None:
    weight, dora = torch.randn(50, 30), a_dora()
    weight[17] = 0
    dora.b[17] = 0
    with pytest.raises(
        IncompatibleError, match=r"acme/x@1: q_proj: row 17 .* cannot be scaled"
    ) as e:
        compute_dora_scales(weight, dora, what="acme/x@1: q_proj")
    assert e.value.hint


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_numbers_that_are_none_are_refused(bad: float) -> None:
    weight, dora = torch.randn(50, 30), a_dora()
    dora.magnitude[3] = bad
    with pytest.raises(IncompatibleError, match="row 3"):
        compute_dora_scales(weight, dora, what="x")
    dora = a_dora()
    weight[20, 1] = float("nan")
    with pytest.raises(IncompatibleError, match="row 20"):
        compute_dora_scales(weight, dora, what="x")
