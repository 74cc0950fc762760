"""Which experts a token asks for and with which weights, and what is left where some are missed.

The rule is that of `expertctl.engine.moe.routing.route`. Of equal values, the lower id goes first.
NaN goes before all numbers, so tokens whose logits are NaN get experts that exist, with weights
that may be NaN.
"""

from functools import cache
from typing import Any, Literal

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.exponential import exponential
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.memory import floats_at, longs_at, words

Numbers = np.ndarray[Any, Any]
Scoring = Literal["softmax", "sigmoid"]

SMALLEST_SUM = 2.0**-14
"""Weights are not divided by less."""
NO_EXPERT = -1
"""Stands where a token has no expert."""


@cache
def route_kernel(scoring: Scoring) -> Kernel:
    """Return the kernel that chooses experts by their scores; one item is one token.

    A bias takes part in the choice and not in the weights. Without one the logits themselves are
    compared: scores have the same order, and rounding adds no ties.
    """
    return compile_kernel(f"route by {scoring}", _route_function(scoring))


def route_arguments(
    *,
    logits: Numbers,
    bias: Numbers | None,
    scale: Numbers,
    normalised: bool,
    experts: int,
    selected: Numbers,
    weights: Numbers,
) -> Numbers:
    """Return its arguments; ``logits`` is float32 [tokens, at least experts], not changed.

    ``bias`` is float32 [experts], ``scale`` float32 [1]; ``selected`` int64 and ``weights``
    float32, both [tokens, used], are written: first choice first.
    """
    used = selected.shape[1]
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    assert used <= experts <= logits.shape[1], f"{used} of {experts} experts"
    return words_of(
        *rows_at(logits),
        address(bias),
        address(scale),
        normalised,
        experts,
        used,
        address(selected, np.int64),
        address(weights),
    )


def _route_function(scoring: Scoring) -> KernelFunction:
    begin, score = (_largest_and_sum, _share) if scoring == "softmax" else (_nothing, _sigmoid)

    def route(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, biases, scale, normalised, experts, used, ids, shares,
        ) = words(arguments, 9)  # fmt: skip
        factor, bias = floats_at(scale, 1)[0], floats_at(biases, experts)
        for token in range(first, last):
            logits = floats_at(rows + token * stride, experts)
            selected = longs_at(ids + token * used * 8, used)
            weights = floats_at(shares + token * used * 4, used)
            largest, total = begin(logits)
            for expert in range(experts):
                order = logits[expert]
                if biases != 0:
                    order = score(order, largest, total) + bias[expert]
                _insert(selected, weights, min(expert, used), expert, order)
            for place in range(used):
                weights[place] = score(logits[selected[place]], largest, total)
            _scale(weights, normalised, factor)

    return route


@register_jitable
def _largest_and_sum(logits: Any) -> Any:  # pragma: no cover - compiled
    """Return what softmax subtracts and what it divides by."""
    largest, total = logits[0], np.float32(0)
    for k in range(len(logits)):
        largest = logits[k] if _goes_before(logits[k], largest) else largest
    for k in range(len(logits)):
        total += exponential(logits[k] - largest)
    return largest, total


@register_jitable
def _share(logit: Any, largest: Any, total: Any) -> Any:  # pragma: no cover - compiled
    return exponential(logit - largest) / total


@register_jitable
def _nothing(_logits: Any) -> Any:  # pragma: no cover - compiled
    return np.float32(0), np.float32(0)


@register_jitable
def _sigmoid(logit: Any, _largest: Any, _total: Any) -> Any:  # pragma: no cover - compiled
    return np.float32(1) / (np.float32(1) + exponential(-logit))


@register_jitable
def _goes_before(a: Any, b: Any) -> Any:  # pragma: no cover - compiled
    """Tell whether a number goes before another: it is larger, or only it is NaN."""
    return a > b or (a != a and b == b)


@register_jitable
def _insert(
    selected: Any, orders: Any, found: Any, expert: Any, order: Any
) -> None:  # pragma: no cover - compiled
    """Put an expert among the best ``found``, after those that are as good."""
    place = found
    if found == len(selected):
        if not _goes_before(order, orders[found - 1]):
            return
        place = found - 1
    while place > 0 and _goes_before(order, orders[place - 1]):
        selected[place], orders[place] = selected[place - 1], orders[place - 1]
        place -= 1
    selected[place], orders[place] = expert, order


@register_jitable
def _scale(weights: Any, normalised: Any, factor: Any) -> None:  # pragma: no cover - compiled
    """Divide weights by their sum where asked, and multiply them by a factor."""
    total = np.float32(1)
    if normalised != 0:
        total = np.float32(0)
        for weight in weights:
            total += weight
        if total < SMALLEST_SUM:
            total = np.float32(SMALLEST_SUM)
    for place in range(len(weights)):
        weights[place] = weights[place] / total * factor


@cache
def skip_kernel() -> Kernel:
    """Return the kernel that leaves out experts that are missing; one item is one token.

    The weights that are left are multiplied so that their sum is that of all. Where none is left
    all are zero.
    """
    return compile_kernel("skip", _skip)


def skip_arguments(
    *, hits: Numbers, selected: Numbers, weights: Numbers, skipped: Numbers
) -> Numbers:
    """Return its arguments; ``hits`` is float32 [experts], 1 where one is resident, else 0.

    ``selected`` and ``weights`` are as `route_kernel` wrote them and are changed; ``skipped``,
    float32 [tokens], gets the sum of the weights that were left out.
    """
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    return words_of(
        address(hits),
        selected.shape[1],
        address(selected, np.int64),
        address(weights),
        address(skipped),
    )


def _skip(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
    mask, used, ids, shares, skipped = words(arguments, 5)
    for token in range(first, last):
        selected = longs_at(ids + token * used * 8, used)
        weights = floats_at(shares + token * used * 4, used)
        total, kept, missed, left_out = np.float32(0), np.float32(0), np.float32(0), 0
        for place in range(used):
            expert = selected[place]
            total += weights[place]
            if expert >= 0 and floats_at(mask, expert + 1)[expert] != 0:
                kept += weights[place]
            else:
                missed += weights[place]
                selected[place] = NO_EXPERT
                left_out += 1
        if left_out > 0:
            _share_out(selected, weights, kept, total)
        floats_at(skipped, token + 1)[token] = missed


@register_jitable
def _share_out(
    selected: Any, weights: Any, kept: Any, total: Any
) -> None:  # pragma: no cover - compiled
    """Scale the weights that stay, in sum ``kept``, to the sum of all; ``kept`` may be tiny."""
    for place in range(len(weights)):
        if selected[place] == NO_EXPERT or kept == 0:
            weights[place] = 0
        else:
            weights[place] = weights[place] / kept * total
