"""Code of mixture-of-experts layers; `kernels.moe_layer` has its rules."""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.exponent_packing import CHUNK_FLOATS, unpack_chunk
from expertctl.engine.kernels.compiled.gemm import gemm_blocks_function, gemm_panel_function
from expertctl.engine.kernels.compiled.llvm_math import exponential
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    atomic_store,
    float32_view,
    int64_view,
    load_int64s,
    uint32_view,
)
from expertctl.engine.kernels.lora import BLOCKS_PER_ITEM
from expertctl.engine.kernels.moe_layer import (
    MIN_WEIGHT_SUM,
    NO_EXPERT,
    NO_POSITION,
    Scoring,
)
from expertctl.engine.kernels.packed_format import LANES, Scheme
from expertctl.engine.kernels.packed_matrix import CHUNK_VECTORS


def make_topk_routing(scoring: Scoring) -> KernelFunction:
    """Return the function that selects experts by their scores."""
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


def drop_experts(first: int, last: int, arguments: int) -> None:
    """Drop choices of experts that are not resident."""
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


def permute_choices(_first: int, _last: int, arguments: int) -> None:
    """Write the permutation of the choices."""
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


def gather_rows(first: int, last: int, arguments: int) -> None:
    """Copy to each position the row of its token."""
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


def combine_rows(first: int, last: int, arguments: int) -> None:
    """Add the weighted rows of each token's choices."""
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


def make_moe_gemm(scheme: Scheme, *, portable: bool) -> KernelFunction:
    """Return the function of ``out = rows W^T`` with the W of the expert of each row."""
    strips = gemm_blocks_function(scheme, portable=portable)

    def routed(first: int, last: int, arguments: int) -> None:
        (
            places, data, scales, blocks, vectors, groups, active, actives, begins,
            rows, stride, row_scales, row_sums, absent, out, out_stride, counted,
        ) = load_int64s(arguments, 17)  # fmt: skip
        items, wide = load_int64s(counted, 1)[0], groups * 4
        each = (blocks + BLOCKS_PER_ITEM - 1) // BLOCKS_PER_ITEM
        units = load_int64s(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = load_int64s(active + unit // each * 8, 1)[0]
            begin, end = load_int64s(begins + expert * 8, 2)
            block = unit % each * BLOCKS_PER_ITEM
            above = min(block + BLOCKS_PER_ITEM, blocks)
            place, to = load_int64s(places + expert * 8, 1)[0], out + begin * out_stride
            if place == 0:
                atomic_store(absent, expert + 1)
                zero_blocks(to + block * VECTOR_BYTES, out_stride, end - begin, above - block)
                continue
            strips(
                place + data, place + scales, block, above, vectors, groups,
                rows + begin * stride, stride, row_scales + begin * wide, row_sums + begin * wide,
                wide, to, out_stride, end - begin, 0,
            )  # fmt: skip

    return routed


@register_jitable
def zero_blocks(out: Any, stride: Any, rows: Any, blocks: Any) -> None:
    """Write zeros into some blocks of rows."""
    for row in range(rows):
        numbers = float32_view(out + row * stride, blocks * LANES)
        for k in range(blocks * LANES):
            numbers[k] = 0


def make_compact_moe_gemm(*, portable: bool) -> KernelFunction:
    """Return the same for compact experts."""
    spans = gemm_panel_function(Scheme.BFLOAT16, portable=portable, accumulates=True)

    def routed(first: int, last: int, arguments: int) -> None:
        (
            places, _, _, blocks, vectors, _, active, actives, begins,
            rows, stride, _, _, absent, out, out_stride, counted, stretch, size,
        ) = load_int64s(arguments, 19)  # fmt: skip
        items, chunk = load_int64s(counted, 1)[0], allocate_stack_floats(CHUNK_FLOATS)
        each = (blocks + BLOCKS_PER_ITEM - 1) // BLOCKS_PER_ITEM
        units = load_int64s(actives, 1)[0] * each
        for unit in range(first * units // items, last * units // items):
            expert = load_int64s(active + unit // each * 8, 1)[0]
            begin, end = load_int64s(begins + expert * 8, 2)
            block = unit % each * BLOCKS_PER_ITEM
            high = min(BLOCKS_PER_ITEM, blocks - block)
            to = out + begin * out_stride + block * VECTOR_BYTES
            zero_blocks(to, out_stride, end - begin, high)
            place = load_int64s(places + expert * 8, 1)[0]
            if place == 0:
                atomic_store(absent, expert + 1)
                continue
            ends = uint32_view(place + (stretch + unit % each) * 4, 2)
            packed, above = place + ends[0], place + min(ends[1], size)
            for column in range(0, vectors, CHUNK_VECTORS):
                wide = min(CHUNK_VECTORS, vectors - column)
                length = unpack_chunk(packed, above, high * wide * (VECTOR_BYTES // 2), chunk)
                if length == 0:
                    atomic_store(absent, expert + 1)
                    zero_blocks(to, out_stride, end - begin, high)
                    break
                packed += length
                spans(
                    chunk, wide * VECTOR_BYTES, 0, 0, high, wide,
                    rows + begin * stride + column * 4, stride, 0, 0, 0,
                    to, out_stride, end - begin, 0,
                )  # fmt: skip

    return routed
