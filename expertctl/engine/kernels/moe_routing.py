"""Routing for mixture-of-experts layers: top-k selection, dropping, permutation and combination.

The selection rule is that of `engine.torch.routed_mlp.route`. Among equal values, the lower id
comes first. NaN ranks before all numbers, so tokens whose logits are NaN get experts that exist,
with weights that may be NaN.

The j-th choice of a token has the index ``src = token * top_k + j``. The permutation assigns it a
position so that the rows of an expert are consecutive; a choice without an expert has no position.
Choices of resident experts may be permuted first and the others appended once those experts are
loaded: both write positions of one list, so the combined result is the same.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.arrays import AnyArray, aligned_zeros
from expertctl.engine.kernels.jit import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.llvm_math import exponential
from expertctl.engine.kernels.memory import (
    allocate_stack_floats,
    array_address,
    encode_operands,
    float32_view,
    int64_view,
    load_int64s,
    row_address,
    uint32_view,
)
from expertctl.engine.kernels.quantisation import PreparedActivations

Scoring = Literal["softmax", "sigmoid"]

MIN_WEIGHT_SUM = 2.0**-14
"""Lower bound of the sum that weights are divided by."""
NO_EXPERT = -1
"""The id of a choice without an expert."""


@cache
def topk_routing_kernel(scoring: Scoring) -> Kernel:
    """Return the kernel that selects experts by their scores; one item is one token.

    A bias affects the selection but not the weights. Without a bias the logits themselves are
    compared: scores have the same order, and rounding adds no ties.
    """
    return compile_kernel(f"route by {scoring}", _topk_function(scoring))


def topk_routing_arguments(
    *,
    logits: AnyArray,
    bias: AnyArray | None,
    scale: AnyArray,
    normalised: bool,
    experts: int,
    selected: AnyArray,
    weights: AnyArray,
) -> AnyArray:
    """Return its arguments; ``logits`` is float32 [tokens, at least experts] and not changed.

    ``bias`` is float32 [experts], ``scale`` float32 [1]; ``selected`` int64 and ``weights``
    float32, both [tokens, top_k], are outputs: best choice first.
    """
    used = selected.shape[1]
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    assert used <= experts <= logits.shape[1], f"{used} of {experts} experts"
    return encode_operands(
        *row_address(logits),
        array_address(bias),
        array_address(scale),
        normalised,
        experts,
        used,
        array_address(selected, np.int64),
        array_address(weights),
    )


def _topk_function(scoring: Scoring) -> KernelFunction:
    is_softmax = scoring == "softmax"
    begin = _softmax_terms if is_softmax else _no_normaliser
    score = _softmax_score if is_softmax else _sigmoid_score

    def route(first: int, last: int, arguments: int) -> None:
        (
            rows, stride, biases, scale, normalised, experts, used, ids, shares,
        ) = load_int64s(arguments, 9)  # fmt: skip
        factor, bias = float32_view(scale, 1)[0], float32_view(biases, experts)
        for token in range(first, last):
            logits = float32_view(rows + token * stride, experts)
            selected = int64_view(ids + token * used * 8, used)
            weights = float32_view(shares + token * used * 4, used)
            largest, total = begin(logits)
            for expert in range(experts):
                order = logits[expert]
                if biases != 0:
                    order = score(order, largest, total) + bias[expert]
                _insert_ranked(selected, weights, min(expert, used), expert, order)
            for place in range(used):
                weights[place] = score(logits[selected[place]], largest, total)
            _scale_weights(weights, normalised, factor)

    return route


@register_jitable
def _softmax_terms(logits: Any) -> Any:
    """Return the maximum and the sum that softmax subtracts and divides by."""
    largest, total = logits[0], np.float32(0)
    for k in range(len(logits)):
        largest = logits[k] if _ranks_before(logits[k], largest) else largest
    for k in range(len(logits)):
        total += exponential(logits[k] - largest)
    return largest, total


@register_jitable
def _softmax_score(logit: Any, largest: Any, total: Any) -> Any:
    return exponential(logit - largest) / total


@register_jitable
def _no_normaliser(_logits: Any) -> Any:
    return np.float32(0), np.float32(0)


@register_jitable
def _sigmoid_score(logit: Any, _largest: Any, _total: Any) -> Any:
    return np.float32(1) / (np.float32(1) + exponential(-logit))


@register_jitable
def _ranks_before(a: Any, b: Any) -> Any:
    """Return whether a number ranks before another: it is larger, or only it is NaN."""
    return a > b or (a != a and b == b)


@register_jitable
def _insert_ranked(selected: Any, orders: Any, found: Any, expert: Any, order: Any) -> None:
    """Insert an expert among the best ``found``, after equally good ones."""
    place = found
    if found == len(selected):
        if not _ranks_before(order, orders[found - 1]):
            return
        place = found - 1
    while place > 0 and _ranks_before(order, orders[place - 1]):
        selected[place], orders[place] = selected[place - 1], orders[place - 1]
        place -= 1
    selected[place], orders[place] = expert, order


@register_jitable
def _scale_weights(weights: Any, normalised: Any, factor: Any) -> None:
    """Normalise weights if requested, and multiply them by a factor."""
    total = np.float32(1)
    if normalised != 0:
        total = np.float32(0)
        for weight in weights:
            total += weight
        if total < MIN_WEIGHT_SUM:
            total = np.float32(MIN_WEIGHT_SUM)
    for place in range(len(weights)):
        weights[place] = weights[place] / total * factor


@cache
def drop_experts_kernel() -> Kernel:
    """Return the kernel that drops experts that are not resident; one item is one token.

    The remaining weights are scaled so that their sum is that of all weights. If none remains, all
    are zero.
    """
    return compile_kernel("skip", _drop_experts)


def drop_experts_arguments(
    *, hits: AnyArray, selected: AnyArray, weights: AnyArray, dropped: AnyArray
) -> AnyArray:
    """Return its arguments; ``hits`` is float32 [experts], 1 for resident experts, else 0.

    ``selected`` and ``weights`` are as `topk_routing_kernel` wrote them and are changed;
    ``dropped``, float32 [tokens], receives the sum of the dropped weights.
    """
    assert weights.shape == selected.shape
    assert selected.flags.c_contiguous
    assert weights.flags.c_contiguous
    return encode_operands(
        array_address(hits),
        selected.shape[1],
        array_address(selected, np.int64),
        array_address(weights),
        array_address(dropped),
    )


def _drop_experts(first: int, last: int, arguments: int) -> None:
    mask, used, ids, shares, skipped = load_int64s(arguments, 5)
    for token in range(first, last):
        selected = int64_view(ids + token * used * 8, used)
        weights = float32_view(shares + token * used * 4, used)
        total, kept, missed, left_out = np.float32(0), np.float32(0), np.float32(0), 0
        for place in range(used):
            expert = selected[place]
            total += weights[place]
            if expert >= 0 and float32_view(mask, expert + 1)[expert] != 0:
                kept += weights[place]
            else:
                missed += weights[place]
                selected[place] = NO_EXPERT
                left_out += 1
        if left_out > 0:
            _rescale_weights(selected, weights, kept, total)
        float32_view(skipped, token + 1)[token] = missed


@register_jitable
def _rescale_weights(selected: Any, weights: Any, kept: Any, total: Any) -> None:
    """Scale the remaining weights, in sum ``kept``, to the sum of all; it may be tiny."""
    for place in range(len(weights)):
        if selected[place] == NO_EXPERT or kept == 0:
            weights[place] = 0
        else:
            weights[place] = weights[place] / kept * total


NO_POSITION = -1
"""The position of a choice without an expert."""


@dataclass(frozen=True, slots=True, eq=False)
class MoePermutation:
    """The output of `permute_kernel`; all arrays are int64."""

    counts: AnyArray
    """[experts]: rows per expert."""
    offsets: AnyArray
    """[experts + 1]: first position of each expert, and at the end the number of positions."""
    active: AnyArray
    """[experts]: the experts that have rows, in ascending order."""
    active_count: AnyArray
    """[1]: the number of those."""
    sources: AnyArray
    """[tokens * top_k]: the ``src`` at each position, ascending within an expert."""
    inverse: AnyArray
    """[tokens * top_k]: the position of each ``src``."""

    @property
    def expert_count(self) -> int:
        """Number of experts."""
        return len(self.counts)

    @property
    def arrays(self) -> list[AnyArray]:
        """All arrays, in this order."""
        return [getattr(self, each.name) for each in fields(self)]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(each.nbytes for each in self.arrays)


def allocate_permutation(experts: int, positions: int) -> MoePermutation:
    """Return arrays for at most ``positions`` positions, ``tokens * top_k``."""
    sizes = (experts, experts + 1, experts, 1, positions, positions)
    return MoePermutation(*(aligned_zeros(size, np.int64) for size in sizes))


@cache
def permute_kernel() -> Kernel:
    """Return the kernel that writes the permutation; there is one item.

    A choice whose id is negative or not that of an expert counts as without an expert.
    """
    return compile_kernel("sort", _permute)


def permute_arguments(
    *,
    selected: AnyArray,
    tokens: AnyArray,
    order: MoePermutation,
    block_addresses: AnyArray | None = None,
    append: bool = False,
) -> AnyArray:
    """Return its arguments; ``selected`` is int64 [tokens, top_k].

    ``tokens``, int64 [1], is read at each run. With ``block_addresses``, int64 [experts], only
    choices of experts whose address is not 0 are permuted. With ``append``, the choices that an
    earlier permutation left out are appended; the permutation then describes those alone, and
    earlier positions stay unchanged.
    """
    assert selected.flags.c_contiguous
    assert selected.size <= min(len(order.sources), len(order.inverse))
    return encode_operands(
        array_address(selected, np.int64),
        selected.shape[1],
        array_address(tokens, np.int64),
        order.expert_count,
        *(array_address(each, np.int64) for each in order.arrays),
        0 if block_addresses is None else array_address(block_addresses, np.int64),
        array_address(order.offsets, np.int64) + order.expert_count * 8 if append else 0,
    )


def _permute(_first: int, _last: int, arguments: int) -> None:
    (
        ids, used, tokens, experts, numbers, starts, present, presents, places, inverses,
        there, before,
    ) = load_int64s(arguments, 12)  # fmt: skip
    total = load_int64s(tokens, 1)[0] * used
    selected, counts = int64_view(ids, total), int64_view(numbers, experts)
    begins, active = int64_view(starts, experts + 1), int64_view(present, experts)
    sources, inverse = int64_view(places, total), int64_view(inverses, total)
    for expert in range(experts):
        counts[expert] = 0
    if before == 0:
        inverse[:] = NO_POSITION
    for src in range(total):
        if inverse[src] == NO_POSITION and _is_selected(selected[src], experts, there):
            counts[selected[src]] += 1
    position, actives = 0, 0
    if before != 0:
        position = load_int64s(before, 1)[0]
    for expert in range(experts):
        begins[expert] = position
        position += counts[expert]
        if counts[expert] > 0:
            active[actives] = expert
            actives += 1
            counts[expert] = 0
    begins[experts] = position
    int64_view(presents, 1)[0] = actives
    for src in range(total):
        expert = selected[src]
        if inverse[src] == NO_POSITION and _is_selected(expert, experts, there):
            position = begins[expert] + counts[expert]
            counts[expert] += 1
            sources[position], inverse[src] = src, position


@register_jitable
def _is_selected(expert: Any, experts: Any, there: Any) -> Any:
    """Return whether an expert exists and, if only resident ones are requested, is resident."""
    if not 0 <= expert < experts:
        return False
    return there == 0 or int64_view(there, experts)[expert] != 0


@cache
def gather_rows_kernel() -> Kernel:
    """Return the kernel that copies to each position the row of its token; items are positions.

    There may be more items than positions: the number of positions is read at each run.
    """
    return compile_kernel("gather", _gather_rows)


def gather_rows_arguments(
    *, order: MoePermutation, top_k: int, rows: PreparedActivations, gathered: PreparedActivations
) -> AnyArray:
    """Return its arguments; ``gathered`` has the shape of ``rows``, but one row per position."""
    assert gathered.data.dtype == rows.data.dtype
    assert gathered.data.shape[1] == rows.data.shape[1]
    assert gathered.scales.shape[1] == rows.scales.shape[1]
    words_a_row = rows.data.shape[1] * rows.data.itemsize // 4
    kind = rows.data.dtype
    return encode_operands(
        array_address(order.sources, np.int64),
        array_address(order.offsets, np.int64) + order.expert_count * 8,
        top_k,
        words_a_row,
        array_address(rows.data, kind),
        rows.data.strides[0],
        array_address(gathered.data, kind),
        gathered.data.strides[0],
        rows.scales.shape[1],
        array_address(rows.scales),
        array_address(gathered.scales),
        array_address(rows.sums, np.int32),
        array_address(gathered.sums, np.int32),
    )


def _gather_rows(first: int, last: int, arguments: int) -> None:
    (
        places, positions, used, wide, rows, stride, outs, out_stride,
        groups, scales, out_scales, sums, out_sums,
    ) = load_int64s(arguments, 13)  # fmt: skip
    last = min(last, load_int64s(positions, 1)[0])
    for position in range(first, last):
        token = int64_view(places, last)[position] // used
        _copy_words(rows + token * stride, outs + position * out_stride, wide)
        _copy_words(scales + token * groups * 4, out_scales + position * groups * 4, groups)
        _copy_words(sums + token * groups * 4, out_sums + position * groups * 4, groups)


@register_jitable
def _copy_words(source: Any, target: Any, count: Any) -> None:
    found, out = uint32_view(source, count), uint32_view(target, count)
    for k in range(count):
        out[k] = found[k]


_COLUMNS_PER_PASS = 512
"""Columns whose sums are buffered on the stack."""


@cache
def combine_kernel() -> Kernel:
    """Return the kernel of ``out += sum_j weight_j * row_j``; one item is one token.

    The sum starts at 0 and runs over a token's choices from first to last, each product rounded
    before it is added, so where experts were computed does not change the result. A choice without
    an expert adds nothing.
    """
    return compile_kernel("merge", _combine_rows)


def combine_arguments(
    *, order: MoePermutation, weights: AnyArray, rows: AnyArray, out: AnyArray, width: int
) -> AnyArray:
    """Return its arguments; ``weights`` is float32 [tokens, top_k].

    ``rows``, one per position, and ``out``, one row per token, are float32 with at least ``width``
    columns.
    """
    assert weights.flags.c_contiguous
    assert weights.size <= len(order.inverse)
    return encode_operands(
        array_address(order.inverse, np.int64),
        weights.shape[1],
        array_address(weights),
        *row_address(rows),
        *row_address(out),
        width,
    )


def _combine_rows(first: int, last: int, arguments: int) -> None:
    inverses, used, shares, rows, stride, outs, out_stride, width = load_int64s(arguments, 8)
    sums = float32_view(allocate_stack_floats(_COLUMNS_PER_PASS), _COLUMNS_PER_PASS)
    for token in range(first, last):
        places = int64_view(inverses + token * used * 8, used)
        weights = float32_view(shares + token * used * 4, used)
        for begin in range(0, width, _COLUMNS_PER_PASS):
            count = min(_COLUMNS_PER_PASS, width - begin)
            for k in range(count):
                sums[k] = 0
            for place in range(used):
                if places[place] >= 0:
                    row = float32_view(rows + places[place] * stride + begin * 4, count)
                    for k in range(count):
                        sums[k] += weights[place] * row[k]
            out = float32_view(outs + token * out_stride + begin * 4, count)
            for k in range(count):
                out[k] += sums[k]
