"""What happens to tokens between products, against the formulas in float64."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.layer_operations import (
    ACTIVATIONS,
    affine_arguments,
    affine_kernel,
    cap_arguments,
    cap_kernel,
    gate_kernel,
    layer_norm_arguments,
    layer_norm_kernel,
    query_growth_arguments,
    query_growth_kernel,
    rms_norm_arguments,
    rms_norm_kernel,
    scaled_add_arguments,
    scaled_add_kernel,
    swiglu_arguments,
    swiglu_kernel,
)

Numbers = np.ndarray[Any, Any]
EPS = np.array([1e-5], np.float32)
WIDTHS = [1, 2, 15, 16, 17, 48, 100, 1024, 3072]


def rows_of(tokens: int, width: int, *, seed: int = 0, room: int = 3) -> Numbers:
    """Return rows that lie in wider ones, as parts of a buffer do."""
    numbers = np.random.default_rng(seed).standard_normal((tokens, width + room))
    return numbers.astype(np.float32)[:, :width]


def normed(rows: Numbers, weight: Numbers, first: int = 0, last: int | None = None) -> Numbers:
    out = np.full(rows.shape, np.nan, np.float32)
    arguments = rms_norm_arguments(rows=rows, weight=weight, out=out, eps=EPS)
    rms_norm_kernel()(first, len(rows) if last is None else last, arguments.ctypes.data)
    return out


def plain_norm(rows: Numbers, weight: Numbers) -> Numbers:
    wide = rows.astype(np.float64)
    return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPS) * weight


@pytest.mark.parametrize("width", WIDTHS)
def test_norm_is_the_formula(width: int) -> None:
    rows, weight = rows_of(5, width), rows_of(1, width, seed=1)[0].copy()
    np.testing.assert_allclose(normed(rows, weight), plain_norm(rows, weight), rtol=2e-6, atol=1e-7)


def test_norm_of_nothing_is_nothing_and_of_nan_is_nan() -> None:
    rows = np.zeros((3, 64), np.float32)
    rows[1, 5] = np.nan
    rows[2, 5] = np.inf
    out = normed(rows, np.ones(64, np.float32))
    assert not out[0].any()
    assert np.isnan(out[1]).all()
    assert np.isnan(out[2, 5])


@settings(max_examples=30, deadline=None)
@given(tokens=st.integers(1, 9), width=st.integers(1, 300), data=st.data())
def test_norm_of_a_token_does_not_depend_on_the_others(
    tokens: int, width: int, data: st.DataObject
) -> None:
    rows, weight = rows_of(tokens, width), np.ones(width, np.float32)
    first = data.draw(st.integers(0, tokens - 1))
    alone = normed(rows[first : first + 1], weight)
    np.testing.assert_array_equal(normed(rows, weight)[first], alone[0])
    part = normed(rows, weight, first, first + 1)
    np.testing.assert_array_equal(part[first], alone[0])
    assert np.isnan(np.delete(part, first, axis=0)).all()


def gated(gate: Numbers, up: Numbers) -> Numbers:
    out = np.full(gate.shape, np.nan, np.float32)
    arguments = swiglu_arguments(gate=gate, up=up, out=out, width=gate.shape[1])
    swiglu_kernel()(0, len(gate), arguments.ctypes.data)
    return out


@pytest.mark.parametrize("width", WIDTHS)
def test_gate_is_swiglu(width: int) -> None:
    gate, up = rows_of(4, width) * np.float32(8), rows_of(4, width, seed=1)
    wide = gate.astype(np.float64)
    expected = wide / (1 + np.exp(-wide)) * up
    np.testing.assert_allclose(gated(gate, up), expected, rtol=2e-6, atol=1e-7)


def test_gate_may_write_over_its_input() -> None:
    both = rows_of(3, 64)
    gate, up = both[:, :32], both[:, 32:]
    expected = gated(gate, up)
    arguments = swiglu_arguments(gate=gate, up=up, out=gate, width=32)
    swiglu_kernel()(0, 3, arguments.ctypes.data)
    np.testing.assert_array_equal(gate, expected)


def test_gate_of_large_numbers_has_the_limits_of_the_formula() -> None:
    gate = np.array([[-1e30, -200, 200, 1e30, np.nan, np.inf]], np.float32)
    out = gated(gate, np.ones_like(gate))
    np.testing.assert_allclose(out[0, 1:], [0, 200, 1e30, np.nan, np.inf], atol=1e-30)
    assert abs(out[0, 0]) < 1e-7


@pytest.mark.parametrize("scales", [False, True])
@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
def test_affine_scales_and_shifts_what_is_given(scales: bool, shifts: bool, in_place: bool) -> None:
    rows = rows_of(4, 50)
    scale = rows_of(1, 50, seed=1)[0].copy() if scales else None
    shift = rows_of(1, 50, seed=2)[0].copy() if shifts else None
    expected = rows * (1 if scale is None else scale) + (0 if shift is None else shift)
    out = rows if in_place else np.full(rows.shape, np.nan, np.float32)
    arguments = affine_arguments(rows=rows, scale=scale, shift=shift, out=out, width=50)
    affine_kernel()(0, 4, arguments.ctypes.data)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


TORCH_ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("has_gate", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_those_of_torch(activation: Any, has_gate: bool) -> None:
    rows, up = rows_of(5, 96) * np.float32(5), rows_of(5, 96, seed=1)
    rows[4, :4] = -1e30, 1e30, 0, np.nan
    expected = TORCH_ACTIVATIONS[activation](torch.from_numpy(rows.astype(np.float64))).numpy()
    if has_gate:
        expected = expected * up
    arguments = swiglu_arguments(gate=rows, up=up, out=rows, width=96)
    gate_kernel(activation, gated=has_gate)(0, 5, arguments.ctypes.data)
    np.testing.assert_allclose(rows, expected, rtol=2e-6, atol=2e-6)


def test_a_cap_is_a_tangent_of_numbers_of_every_size() -> None:
    sizes = np.logspace(-6, 3, 61, dtype=np.float32)
    rows = np.zeros((2, 128), np.float32)
    rows[0, :61], rows[1, :61] = sizes, -sizes
    rows[0, 100] = np.nan
    expected = 30 * np.tanh(rows.astype(np.float64) / 30)
    cap = np.array([30], np.float32)
    cap_kernel()(0, 2, cap_arguments(rows=rows, cap=cap).ctypes.data)
    np.testing.assert_allclose(rows, expected, rtol=5e-7)


@pytest.mark.parametrize("adds", [False, True])
def test_scaled_rows_are_added_or_stand_alone(adds: bool) -> None:
    rows, out, factor = rows_of(4, 50), rows_of(4, 50, seed=1), np.array([0.3], np.float32)
    expected = rows * factor + (out if adds else 0)
    arguments = scaled_add_arguments(rows=rows, out=out, factor=factor, adds=adds, width=50)
    scaled_add_kernel()(0, 4, arguments.ctypes.data)
    np.testing.assert_allclose(out, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(("vectors", "own"), [(1, False), (5, False), (5, True)])
def test_layer_norm_is_the_formula(vectors: int, own: bool, has_bias: bool) -> None:
    rows = rows_of(3, vectors * 48) * np.float32(3) + np.float32(2)
    weight = rows_of(vectors if own else 1, 48, seed=1).copy().reshape(-1)
    bias = rows_of(1, 48, seed=2)[0].copy() if has_bias else None
    wide = rows.astype(np.float64).reshape(3, vectors, 48)
    wide -= wide.mean(-1, keepdims=True)
    wide /= np.sqrt((wide**2).mean(-1, keepdims=True) + EPS)
    expected = wide * weight.reshape(-1, 48) + (0 if bias is None else bias)
    arguments = layer_norm_arguments(
        rows=rows, weight=weight, bias=bias, out=rows, eps=EPS, width=48
    )
    layer_norm_kernel()(0, 3, arguments.ctypes.data)
    np.testing.assert_allclose(rows, expected.reshape(3, -1), rtol=3e-6, atol=2e-6)


def test_queries_grow_with_their_positions() -> None:
    rows, positions = rows_of(4, 64), np.array([0, 9, 10, 12345])
    expected = rows * (1 + 0.2 * np.log1p(positions // 10))[:, None]
    arguments = query_growth_arguments(
        rows=rows, positions=positions, growth=np.array([0.2], np.float32), period=10
    )
    query_growth_kernel()(0, 4, arguments.ctypes.data)
    np.testing.assert_allclose(rows, expected, rtol=1e-6)
