"""Attention over pages of keys and values, with a softmax that is corrected chunk by chunk.

A chunk is four pages whose place in the text is fixed, so a token's bits do not depend on the
tokens it was read with. (The running softmax is that of FlashAttention, Dao et al. 2022.)
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.heads import PAGE, HeadsShape
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.memory import floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.page_tiles import (
    CHUNK,
    CHUNK_BYTES,
    NOTHING,
    TOGETHER,
    add_pages,
    score_pages,
    total_at,
    weigh_scores,
)
from expertctl.engine.kernels.scheme import Scheme

TOKENS_AN_ITEM = 24
"""Tokens of a prompt that read a page together."""

Numbers = np.ndarray[Any, Any]

_MOST = TOKENS_AN_ITEM
"""Queries that read a chunk together: tokens of a prompt, or query heads of one KV head."""
_SCORES, _TOTALS, _PAGES = _MOST * CHUNK, _MOST * LANES, 2 * 2 * TOGETHER
_NO_WINDOW = -(1 << 30)
"""Before every token of a text."""
_NOTHING, _NONE, _ONE = np.float32(NOTHING), np.float32(0), np.float32(1)


@cache
def attend_prompt_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for consecutive tokens of one text.

    One item is twenty-four tokens and one query head, all heads of the first tokens first.
    """
    function = _prompt_function(int(numbers is Scheme.FLOAT16))
    return compile_kernel(f"attend prompt {numbers.value}", function)


@cache
def attend_step_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for one token each of several texts; one item is a token and a KV head."""
    function = _step_function(int(numbers is Scheme.FLOAT16))
    return compile_kernel(f"attend step {numbers.value}", function)


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
            shape.head_bytes,
        ],
        np.int64,
    )


def _prompt_function(half: int) -> KernelFunction:
    def prompt(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
            out, out_stride, window, scale, count, head_bytes,
        ) = words(arguments, 15)  # fmt: skip
        tokens = words(count, 1)[0]
        for item in range(first, last):
            token, head = item // queries * TOKENS_AN_ITEM, item % queries
            page = head // (queries // keys) * head_bytes
            _attend(
                half, rows + token * stride + head * dim * 4, stride,
                min(tokens - token, TOKENS_AN_ITEM),
                longs_at(positions, tokens)[token], 1, longs_at(tables, tokens)[token],
                key_offset + page, value_offset + page,
                out + token * out_stride + head * dim * 4, out_stride, dim, window,
                floats_at(scale, 1)[0],
            )  # fmt: skip

    return prompt


def _step_function(half: int) -> KernelFunction:
    def step(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
            out, out_stride, window, scale, count, head_bytes,
        ) = words(arguments, 15)  # fmt: skip
        tokens, group = words(count, 1)[0], queries // keys
        for item in range(first, last):
            token, head = item // keys, item % keys
            page = head * head_bytes
            for begin in range(head * group, (head + 1) * group, _MOST):
                _attend(
                    half, rows + token * stride + begin * dim * 4, dim * 4,
                    min((head + 1) * group - begin, _MOST),
                    longs_at(positions, tokens)[token], 0, longs_at(tables, tokens)[token],
                    key_offset + page, value_offset + page,
                    out + token * out_stride + begin * dim * 4, dim * 4, dim, window,
                    floats_at(scale, 1)[0],
                )  # fmt: skip

    return step


@register_jitable
def _attend(
    half: Any, rows: Any, stride: Any, count: Any, position: Any, ahead: Any, table: Any,
    keys: Any, values: Any, out: Any, out_stride: Any, dim: Any, window: Any, scale: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Attend with ``count`` queries; each stands ``ahead`` positions behind the one before."""
    scores, pages = stack_floats(_SCORES), stack_floats(_PAGES)
    largest, totals, corrections = stack_floats(_MOST), stack_floats(_TOTALS), stack_floats(_MOST)
    _begin(floats_at(largest, count), floats_at(totals, count * LANES))
    for query in range(count):
        _fill(floats_at(out + query * out_stride, dim))
    first = max(position - window + 1, 0) // PAGE if window > 0 else 0
    end = position + ahead * (count - 1) + 1
    last = (end - 1) // PAGE
    for chunk in range(first // TOGETHER, last // TOGETHER + 1):
        skipped = max(first - chunk * TOGETHER, 0)
        _find(longs_at(pages, 2 * TOGETHER), longs_at(table, last + 1), chunk, first, last)
        score_pages(half, pages, keys, values - keys, rows, stride, scores, dim, count)
        high = position - chunk * CHUNK
        low = high - window + 1 if window > 0 else _NO_WINDOW
        for query in range(count):
            floats_at(corrections, count)[query] = weigh_scores(
                scores + query * CHUNK_BYTES, low + ahead * query, high + ahead * query, scale,
                largest + query * 4, totals + query * VECTOR_BYTES,
            )  # fmt: skip
        add_pages(
            half, pages + skipped * 8, min(end - chunk * CHUNK, CHUNK) - skipped * PAGE,
            low - skipped * PAGE, high - skipped * PAGE, ahead, values, keys - values,
            scores + skipped * VECTOR_BYTES, corrections, out, out_stride, dim // LANES, count,
        )  # fmt: skip
    for query in range(count):
        factor = _ONE / total_at(totals + query * VECTOR_BYTES)
        row = floats_at(out + query * out_stride, dim)
        for k in range(dim):
            row[k] *= factor


@register_jitable
def _begin(largest: Any, totals: Any) -> None:  # pragma: no cover - compiled
    for query in range(len(largest)):
        largest[query] = _NOTHING
    _fill(totals)


@register_jitable
def _fill(row: Any) -> None:  # pragma: no cover - compiled
    for k in range(len(row)):
        row[k] = _NONE


@register_jitable
def _find(
    pages: Any, table: Any, chunk: Any, first: Any, last: Any
) -> None:  # pragma: no cover - compiled
    """Find the pages of a chunk and the next; where nobody reads one, the nearest that is read."""
    for number in range(2 * TOGETHER):
        pages[number] = table[min(max(chunk * TOGETHER + number, first), last)]
