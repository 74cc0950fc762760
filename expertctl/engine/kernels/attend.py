"""Attention over pages of keys and values, with a softmax that is corrected chunk by chunk.

A chunk is four pages whose place in the text is fixed, so a token's bits do not depend on the
tokens it was read with. (The running softmax is that of FlashAttention, Dao et al. 2022.) For the
tokens of a prompt a chunk is gathered first, for many queries; a token on its own reads pages.
"""

from functools import cache
from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.kernels.arguments import address, rows_at, words_of
from expertctl.engine.kernels.heads import PAGE, HeadsShape
from expertctl.engine.kernels.kernel import Kernel, KernelFunction, compile_kernel
from expertctl.engine.kernels.lanes import LANES, VECTOR_BYTES
from expertctl.engine.kernels.memory import floats_at, longs_at, stack_floats, words
from expertctl.engine.kernels.page_tiles import (
    CHUNK,
    CHUNK_BYTES,
    GATHERED,
    GATHERED_BYTES,
    NOTHING,
    TOGETHER,
    add_pages,
    gather_pages,
    score_pages,
    total_at,
    weigh_scores,
)
from expertctl.engine.kernels.scheme import Scheme

TOKENS_AN_ITEM, HEADS_AN_ITEM = 36, 4
"""Tokens of a prompt, and query heads of one KV head, that read a page together."""

Numbers = np.ndarray[Any, Any]

_MOST = 24
"""Query heads of one KV head that read a page together for a token on its own."""
_QUERIES = TOKENS_AN_ITEM * HEADS_AN_ITEM
_GATHERED = TOGETHER * GATHERED * LANES
_ALL_SCORES, _ALL_TOTALS = _QUERIES * CHUNK, _QUERIES * LANES
_HEAD_SCORES, _HEAD_TOTALS = TOKENS_AN_ITEM * CHUNK_BYTES, TOKENS_AN_ITEM * VECTOR_BYTES
"""Bytes of what all tokens of an item have for one head."""
_SCORES, _TOTALS, _PAGES = _MOST * CHUNK, _MOST * LANES, 2 * 2 * TOGETHER
_BLOCKS = 4
"""Blocks of values that are gathered at once."""
_NO_WINDOW = -(1 << 30)
"""Before every token of a text."""
_NOTHING, _NONE, _ONE = np.float32(NOTHING), np.float32(0), np.float32(1)


@cache
def attend_prompt_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for consecutive tokens of one text; see `prompt_items`."""
    function = _prompt_function(int(numbers is Scheme.FLOAT16))
    return compile_kernel(f"attend prompt {numbers.value}", function)


@cache
def attend_step_kernel(numbers: Scheme = Scheme.FLOAT32) -> Kernel:
    """Return the kernel for one token each of several texts; one item is a token and a KV head."""
    function = _step_function(int(numbers is Scheme.FLOAT16))
    return compile_kernel(f"attend step {numbers.value}", function)


def prompt_items(tokens: int, shape: HeadsShape) -> int:
    """Return how many items a prompt has: some tokens and some query heads of one KV head each.

    All heads of the first tokens come first.
    """
    heads = -(-(shape.queries // shape.keys) // HEADS_AN_ITEM)
    return -(-tokens // TOKENS_AN_ITEM) * shape.keys * heads


def attend_arguments(
    *,
    rows: Numbers,
    shape: HeadsShape,
    positions: Numbers,
    tables: Numbers,
    offsets: tuple[int, int],
    out: Numbers,
    window: int | None,
    scale: Numbers,
    count: Numbers,
) -> Numbers:
    """Return the arguments of either kernel; most are those of `heads_arguments`.

    ``out`` is float32 [tokens, query heads * dim], ``scale`` float32 [1], ``count`` int64 [1] the
    tokens of the run; without a window all earlier tokens are seen.
    """
    return words_of(
        *rows_at(rows),
        shape.queries,
        shape.keys,
        shape.dim,
        address(positions, np.int64),
        address(tables, np.int64),
        *offsets,
        *rows_at(out),
        window or 0,
        address(scale),
        address(count, np.int64),
        shape.head_bytes,
    )


def _prompt_function(half: int) -> KernelFunction:
    def prompt(first: int, last: int, arguments: int) -> None:  # pragma: no cover - compiled
        (
            rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
            out, out_stride, window, scale, count, head_bytes,
        ) = words(arguments, 15)  # fmt: skip
        tokens, group = words(count, 1)[0], queries // keys
        sets = (group + HEADS_AN_ITEM - 1) // HEADS_AN_ITEM
        for item in range(first, last):
            token, place = item // (keys * sets) * TOKENS_AN_ITEM, item % (keys * sets)
            begin = place % sets * HEADS_AN_ITEM
            head, page = place // sets * group + begin, place // sets * head_bytes
            _attend_together(
                half, rows + token * stride + head * dim * 4, stride,
                min(tokens - token, TOKENS_AN_ITEM), min(group - begin, HEADS_AN_ITEM),
                longs_at(positions, tokens)[token], longs_at(tables, tokens)[token],
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
                    half, rows + token * stride + begin * dim * 4,
                    min((head + 1) * group - begin, _MOST),
                    longs_at(positions, tokens)[token], longs_at(tables, tokens)[token],
                    key_offset + page, value_offset + page,
                    out + token * out_stride + begin * dim * 4, dim, window,
                    floats_at(scale, 1)[0],
                )  # fmt: skip

    return step


@register_jitable
def _attend_together(
    half: Any, rows: Any, stride: Any, count: Any, heads: Any, position: Any, table: Any,
    keys: Any, values: Any, out: Any, out_stride: Any, dim: Any, window: Any, scale: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Attend with some heads of ``count`` tokens at consecutive positions."""
    pages, near = stack_floats(_PAGES), stack_floats(_PAGES)
    gathered, scores, totals = (
        stack_floats(_GATHERED), stack_floats(_ALL_SCORES), stack_floats(_ALL_TOTALS),
    )  # fmt: skip
    largest, corrections = stack_floats(_QUERIES), stack_floats(_QUERIES)
    _begin(floats_at(largest, _QUERIES), floats_at(totals, _ALL_TOTALS))
    for page in range(2 * TOGETHER):
        longs_at(near, 2 * TOGETHER)[page] = gathered + page % TOGETHER * GATHERED_BYTES
    for query in range(count):
        _fill(floats_at(out + query * out_stride, heads * dim))
    first = max(position - window + 1, 0) // PAGE if window > 0 else 0
    end = position + count
    last = (end - 1) // PAGE
    for chunk in range(first // TOGETHER, last // TOGETHER + 1):
        _find(longs_at(pages, 2 * TOGETHER), longs_at(table, last + 1), chunk, first, last)
        _score(half, pages, near, keys, values, rows, stride, scores, dim, count, heads)
        high = position - chunk * CHUNK
        low = high - window + 1 if window > 0 else _NO_WINDOW
        for head in range(heads):
            _weigh(
                scores + head * _HEAD_SCORES, low, high, 1, scale,
                largest + head * TOKENS_AN_ITEM * 4, totals + head * _HEAD_TOTALS,
                corrections + head * TOKENS_AN_ITEM * 4, count,
            )  # fmt: skip
        skipped = max(first - chunk * TOGETHER, 0)
        _add(
            half, pages, near, skipped, min(end - chunk * CHUNK, CHUNK) - skipped * PAGE,
            low - skipped * PAGE, high - skipped * PAGE, keys, values, scores, corrections,
            out, out_stride, dim, count, heads,
        )  # fmt: skip
    for head in range(heads):
        _divide(out + head * dim * 4, out_stride, dim, totals + head * _HEAD_TOTALS, count)


@register_jitable
def _score(
    half: Any, pages: Any, near: Any, keys: Any, values: Any, rows: Any, stride: Any, scores: Any,
    dim: Any, count: Any, heads: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Write the scores of a chunk for some heads; the keys are gathered once."""
    for begin in range(0, dim, GATHERED):
        numbers = min(dim - begin, GATHERED)
        gather_pages(half, pages, keys, pages, values, longs_at(near, 1)[0], begin, numbers)
        for head in range(heads):
            score_pages(
                0, near, 0, 0, rows + (head * dim + begin) * 4, stride,
                scores + head * _HEAD_SCORES, numbers, count, begin,
            )  # fmt: skip


@register_jitable
def _add(
    half: Any, pages: Any, near: Any, skipped: Any, tokens: Any, low: Any, high: Any, keys: Any,
    values: Any, scores: Any, corrections: Any, out: Any, out_stride: Any, dim: Any, count: Any,
    heads: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Add the weighted values of a chunk for some heads; they are gathered once."""
    for begin in range(0, dim // LANES, _BLOCKS):
        blocks = min(dim // LANES - begin, _BLOCKS)
        gather_pages(
            half, pages, values, pages + TOGETHER * 8, keys, longs_at(near, 1)[0],
            begin * PAGE, blocks * PAGE,
        )  # fmt: skip
        for head in range(heads):
            add_pages(
                0, near + skipped * 8, tokens, low, high, 1, 0, 0,
                scores + head * _HEAD_SCORES + skipped * VECTOR_BYTES,
                corrections + head * TOKENS_AN_ITEM * 4,
                out + head * dim * 4 + begin * VECTOR_BYTES, out_stride, blocks, count,
            )  # fmt: skip


@register_jitable
def _attend(
    half: Any, rows: Any, count: Any, position: Any, table: Any,
    keys: Any, values: Any, out: Any, dim: Any, window: Any, scale: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Attend with ``count`` heads of one token."""
    scores, pages = stack_floats(_SCORES), stack_floats(_PAGES)
    largest, totals, corrections = stack_floats(_MOST), stack_floats(_TOTALS), stack_floats(_MOST)
    _begin(floats_at(largest, count), floats_at(totals, count * LANES))
    _fill(floats_at(out, count * dim))
    first = max(position - window + 1, 0) // PAGE if window > 0 else 0
    last = position // PAGE
    for chunk in range(first // TOGETHER, last // TOGETHER + 1):
        skipped = max(first - chunk * TOGETHER, 0)
        _find(longs_at(pages, 2 * TOGETHER), longs_at(table, last + 1), chunk, first, last)
        score_pages(half, pages, keys, values - keys, rows, dim * 4, scores, dim, count, 0)
        high = position - chunk * CHUNK
        low = high - window + 1 if window > 0 else _NO_WINDOW
        _weigh(scores, low, high, 0, scale, largest, totals, corrections, count)
        add_pages(
            half, pages + skipped * 8, min(high + 1, CHUNK) - skipped * PAGE,
            low - skipped * PAGE, high - skipped * PAGE, 0, values, keys - values,
            scores + skipped * VECTOR_BYTES, corrections, out, dim * 4, dim // LANES, count,
        )  # fmt: skip
    _divide(out, dim * 4, dim, totals, count)


@register_jitable
def _weigh(
    scores: Any, low: Any, high: Any, ahead: Any, scale: Any, largest: Any, totals: Any,
    corrections: Any, count: Any,
) -> None:  # fmt: skip # pragma: no cover - compiled
    """Weigh the scores of queries, each ``ahead`` positions after the one before."""
    for query in range(count):
        floats_at(corrections, count)[query] = weigh_scores(
            scores + query * CHUNK_BYTES, low + ahead * query, high + ahead * query, scale,
            largest + query * 4, totals + query * VECTOR_BYTES,
        )  # fmt: skip


@register_jitable
def _divide(
    out: Any, stride: Any, dim: Any, totals: Any, count: Any
) -> None:  # pragma: no cover - compiled
    """Divide what queries have summed by the sums of their weights."""
    for query in range(count):
        factor = _ONE / total_at(totals + query * VECTOR_BYTES)
        row = floats_at(out + query * stride, dim)
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
    """Find the pages of a chunk and the next; for one that is unread, the nearest that is read."""
    for number in range(2 * TOGETHER):
        pages[number] = table[min(max(chunk * TOGETHER + number, first), last)]
