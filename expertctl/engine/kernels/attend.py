"""Attention over pages of keys and values, with a softmax that is corrected page by page.

Both products of a page are strips of the product of packed matrices: a page of keys is a matrix of
sixteen rows, a page of values one of ``dim`` rows and sixteen columns. (The running softmax is that
of FlashAttention, Dao et al. 2022.)
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.exponential import exponential
from expertctl.engine.kernels.heads import PAGE, HeadsShape
from expertctl.engine.kernels.kernel import Kernel, compile_kernel
from expertctl.engine.kernels.lanes import VECTOR_BYTES
from expertctl.engine.kernels.memory import floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kernels.tiles import code_of, strip

TOKENS_AN_ITEM = 12
"""Tokens of a prompt that read a page together."""

Numbers = np.ndarray[Any, Any]

_MOST = 16
"""Queries of one item: tokens of a prompt, or the query heads of one KV head."""
_ROOM = _MOST * PAGE
_FLOAT32 = code_of(Scheme.FLOAT32)
_NOTHING = np.float32(-1e30)


@cache
def attend_prompt_kernel() -> Kernel:
    """Return the kernel for consecutive tokens of one text.

    One item is twelve tokens and one query head, all heads of the first tokens first.
    """
    return compile_kernel("attend prompt", _attend_prompt)


@cache
def attend_step_kernel() -> Kernel:
    """Return the kernel for one token each of several texts; one item is a token and a KV head."""
    return compile_kernel("attend step", _attend_step)


def attend_arguments(
    rows: Numbers,
    shape: HeadsShape,
    where: tuple[Numbers, Numbers],
    offsets: tuple[int, int],
    out: Numbers,
    window: int | None,
    scale: Numbers,
    count: Numbers,
) -> Numbers:
    """Return the arguments of either; most are those of `heads_arguments`.

    ``out`` is float32 [tokens, query heads * dim], ``scale`` float32 [1], ``count`` int64 [1] the
    tokens of the run; without a window all tokens before are seen.
    """
    positions, tables = where
    return np.array(
        [
            rows.ctypes.data,
            rows.strides[0],
            shape.queries,
            shape.keys,
            shape.dim,
            positions.ctypes.data,
            tables.ctypes.data,
            *offsets,
            out.ctypes.data,
            out.strides[0],
            window or 0,
            scale.ctypes.data,
            count.ctypes.data,
        ],
        np.int64,
    )


def _attend_prompt(first: int, last: int, arguments: int) -> None:
    (
        rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
        out, out_stride, window, scale, count,
    ) = words(arguments, 14)  # fmt: skip
    tokens = words(count, 1)[0]
    for item in range(first, last):
        token, head = item // queries * TOKENS_AN_ITEM, item % queries
        together = min(tokens - token, TOKENS_AN_ITEM)
        page = head // (queries // keys) * dim * PAGE * 4
        _attend(
            rows + token * stride + head * dim * 4, stride, together,
            longs_at(positions, tokens)[token], 1, longs_at(tables, tokens)[token],
            key_offset + page, value_offset + page,
            out + token * out_stride + head * dim * 4, out_stride, dim, window,
            floats_at(scale, 1)[0],
        )  # fmt: skip


def _attend_step(first: int, last: int, arguments: int) -> None:
    (
        rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
        out, out_stride, window, scale, count,
    ) = words(arguments, 14)  # fmt: skip
    tokens, group = words(count, 1)[0], queries // keys
    for item in range(first, last):
        token, head = item // keys, item % keys
        page = head * dim * PAGE * 4
        _attend(
            rows + token * stride + head * group * dim * 4, dim * 4, group,
            longs_at(positions, tokens)[token], 0, longs_at(tables, tokens)[token],
            key_offset + page, value_offset + page,
            out + token * out_stride + head * group * dim * 4, dim * 4, dim, window,
            floats_at(scale, 1)[0],
        )  # fmt: skip


@register_jitable
def _attend(
    rows: Any, stride: Any, count: Any, position: Any, ahead: Any, table: Any, keys: Any,
    values: Any, out: Any, out_stride: Any, dim: Any, window: Any, scale: Any,
) -> None:  # fmt: skip
    """Attend with ``count`` queries; each stands ``ahead`` positions behind the one before."""
    scores = stack_floats(_ROOM)
    largest, totals = floats_at(stack_floats(_MOST), _MOST), floats_at(stack_floats(_MOST), _MOST)
    for query in range(count):
        largest[query], totals[query] = _NOTHING, np.float32(0)
        row = floats_at(out + query * out_stride, dim)
        for k in range(dim):
            row[k] = np.float32(0)
    last = position + ahead * (count - 1)
    begin = max(position - window + 1, 0) // PAGE if window > 0 else 0
    for number in range(begin, last // PAGE + 1):
        page = longs_at(table, number + 1)[number]
        strip(
            _FLOAT32, 0, 1, page + keys, 0, 0, 0, rows, stride, 0, 0, 0, scores, PAGE * 4, dim,
            count, 0,
        )  # fmt: skip
        for query in range(count):
            at = position + ahead * query
            low = max(at - window + 1, 0) if window > 0 else 0
            correction = _softmax(
                floats_at(scores + query * PAGE * 4, PAGE), low - number * PAGE, at - number * PAGE,
                scale, largest, totals, query,
            )  # fmt: skip
            if correction != np.float32(1):
                row = floats_at(out + query * out_stride, dim)
                for k in range(dim):
                    row[k] *= correction
        _add_values(page + values, dim, scores, count, out, out_stride)
    for query in range(count):
        row = floats_at(out + query * out_stride, dim)
        factor = np.float32(1) / totals[query]
        for k in range(dim):
            row[k] *= factor


@register_jitable
def _softmax(
    scores: Any, low: Any, high: Any, scale: Any, largest: Any, totals: Any, query: Any
) -> Any:
    """Turn the scores of a page into weights; return what the weights before are worth now."""
    top = largest[query]
    for k in range(PAGE):
        score = scores[k] * scale if low <= k <= high else _NOTHING
        scores[k] = score
        top = max(top, score)
    correction = exponential(largest[query] - top) if largest[query] > _NOTHING else np.float32(0)
    total = np.float32(0)
    for k in range(PAGE):
        weight = exponential(scores[k] - top) if low <= k <= high else np.float32(0)
        scores[k] = weight
        total += weight
    largest[query], totals[query] = top, totals[query] * correction + total
    return correction


@register_jitable
def _add_values(values: Any, dim: Any, weights: Any, count: Any, out: Any, out_stride: Any) -> None:
    blocks, high = dim // PAGE, PAGE * VECTOR_BYTES
    block = 0
    while blocks - block >= 4:
        strip(
            _FLOAT32, 0, 4, values + block * high, high, 0, 0, weights, PAGE * 4, 0, 0, 0,
            out + block * VECTOR_BYTES, out_stride, PAGE, count, 1,
        )  # fmt: skip
        block += 4
    while block < blocks:
        strip(
            _FLOAT32, 0, 1, values + block * high, high, 0, 0, weights, PAGE * 4, 0, 0, 0,
            out + block * VECTOR_BYTES, out_stride, PAGE, count, 1,
        )  # fmt: skip
        block += 1
