"""Linear layers, norms and activations in numpy against plain formulas in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.arrays import AnyArray, FloatArray, round_to_bfloat16, widen
from expertctl.engine.cpu import plain_functional
from expertctl.engine.cpu.plain_functional import (
    StackedLinear,
    multiply,
    normalise,
    sigmoid,
    silu_gate,
)

Delta = LinearDelta[FloatArray]
MODULES = ("q", "k", "v")
ROWS = (4, 2, 3)
WIDTH = 6


class Noise:
    """Random float32 arrays."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.default_rng(seed)

    def __call__(self, *shape: int) -> AnyArray:
        return self._generator.standard_normal(shape).astype(np.float32)

    def delta(self, rows: int, parts: list[bool], rank: int) -> Delta:
        low_rank, u, d, e = parts
        return LinearDelta(
            a=self(rank, WIDTH) if low_rank else None,
            b=self(rows, rank) if low_rank else None,
            input_scale=self(WIDTH) if u else None,
            output_scale=self(rows) if d else None,
            bias_scale=self(rows) if e else None,
        )


def plain(x: AnyArray, weight: AnyArray, bias: AnyArray | None, delta: Delta) -> AnyArray:
    """``y = d * (W (u * x)) + B (A x) + e * b``, one token and one part at a time, in float64."""
    rows = []
    for token in x.astype(np.float64):
        u = 1 if delta.input_scale is None else delta.input_scale.astype(np.float64)
        y = weight.astype(np.float64) @ (u * token)
        if delta.output_scale is not None:
            y = delta.output_scale.astype(np.float64) * y
        if delta.a is not None and delta.b is not None:
            y = y + delta.b.astype(np.float64) @ (delta.a.astype(np.float64) @ token)
        if bias is not None:
            y = y + bias.astype(np.float64) * (1 if delta.bias_scale is None else delta.bias_scale)
        rows.append(y)
    return np.stack(rows)


def stacked(weight: FloatArray, bias: AnyArray | None) -> StackedLinear:
    return StackedLinear(MODULES, weight, bias, tuple(np.cumsum(ROWS).tolist()))


PARTS = st.lists(st.booleans(), min_size=4, max_size=4)


@settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    seed=st.integers(0, 2**16),
    parts=st.lists(st.none() | PARTS, min_size=3, max_size=3),
    rank=st.integers(1, 4),
    biased=st.booleans(),
    narrow=st.booleans(),
    widened=st.integers(1, 40),
)
def test_every_mix_of_parts_on_every_layer_of_a_stack_follows_the_formula(
    seed: int,
    parts: list[list[bool] | None],
    rank: int,
    biased: bool,
    narrow: bool,
    widened: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_functional, "WIDENED_NUMBERS", widened)
    noise = Noise(seed)
    x, weight, bias = noise(3, WIDTH), noise(sum(ROWS), WIDTH), noise(sum(ROWS)) if biased else None
    held = round_to_bfloat16(weight) if narrow else weight
    deltas = {
        module: noise.delta(rows, chosen, rank)
        for module, rows, chosen in zip(MODULES, ROWS, parts, strict=True)
        if chosen is not None
    }
    before = x.copy()
    found = stacked(held, bias)(x, deltas)
    begin = 0
    for module, rows in zip(MODULES, ROWS, strict=True):
        some = slice(begin, begin + rows)
        wanted = plain(
            x,
            widen(held[some]),
            None if bias is None else bias[some],
            deltas.get(module, LinearDelta()),
        )
        np.testing.assert_allclose(found[:, some], wanted, atol=1e-5, rtol=1e-5)
        begin += rows
    assert found.dtype == np.float32
    assert np.array_equal(x, before)


def test_changes_of_other_layers_do_not_change_a_bit() -> None:
    noise = Noise(1)
    layer, x = stacked(noise(sum(ROWS), WIDTH), noise(sum(ROWS))), noise(5, WIDTH)
    plain_bits = layer(x, {})
    for parts in ([True, True, False, False], [True, False, True, True]):
        changed = layer(x, {"o": noise.delta(4, parts, 2), "k": noise.delta(2, parts, 2)})
        assert np.allclose(changed[:, :4], plain_bits[:, :4], rtol=1e-6)
        assert not np.allclose(changed[:, 4:6], plain_bits[:, 4:6])


@pytest.mark.parametrize("dtype", [np.float16, np.uint16])
def test_adapters_of_a_narrow_dtype_are_widened_exactly(dtype: Any) -> None:
    noise = Noise(2)
    layer, x = stacked(noise(sum(ROWS), WIDTH), None), noise(3, WIDTH)
    a, b = noise(2, WIDTH), noise(4, 2)
    if dtype is np.uint16:
        a, b = round_to_bfloat16(a), round_to_bfloat16(b)
    else:
        a, b = a.astype(dtype), b.astype(dtype)
    narrow, wide = (
        layer(x, {"q": LinearDelta(a=one, b=other)})
        for one, other in ((a, b), (widen(a), widen(b)))
    )
    assert np.array_equal(narrow, wide)


@pytest.mark.parametrize("tokens", [1, 7])
def test_bfloat16_bits_are_multiplied_as_what_they_stand_for(tokens: int) -> None:
    noise = Noise(3)
    weight, x = round_to_bfloat16(noise(700, 300)), noise(tokens, 300)
    found = np.empty((tokens, 700), np.float32)
    multiply(x, weight, found)
    wanted = x.astype(np.float64) @ widen(weight).T.astype(np.float64)
    np.testing.assert_allclose(found, wanted, atol=1e-4)


def test_norms_equal_those_of_torch_in_place_and_elsewhere() -> None:
    x, weight = Noise(4)(5, 3, 16), Noise(5)(16)
    expected = torch.nn.functional.rms_norm(
        torch.from_numpy(x.copy()), (16,), torch.from_numpy(weight), 1e-3
    ).numpy()
    np.testing.assert_allclose(normalise(x, weight, 1e-3), expected, rtol=1e-6, atol=1e-6)
    row = Noise(4)(5, 60)
    inside = row[:, 7:55].reshape(5, 3, 16)
    inside[...] = x
    normalise(inside, weight, 1e-3, out=inside)
    np.testing.assert_allclose(row[:, 7:55].reshape(5, 3, 16), expected, rtol=1e-6, atol=1e-6)


def test_activations_are_right_far_from_zero() -> None:
    x = np.array([[-1e4, -200, -90, -1, 0, 1, 90, 200, 1e4]], np.float32)
    up = np.full_like(x, 2)
    with np.errstate(over="ignore"):
        gated, gate = silu_gate(x, up), sigmoid(x)
    exact = torch.from_numpy(x).double()
    np.testing.assert_allclose(
        gated, 2 * torch.nn.functional.silu(exact).numpy(), rtol=1e-6, atol=1e-30
    )
    np.testing.assert_allclose(gate, torch.sigmoid(exact).numpy(), rtol=1e-6, atol=1e-30)
