"""Attention over KV pages, with an online softmax that is corrected chunk by chunk.

A chunk is four pages at a fixed place in the sequence, so the bits of a token do not depend on the
tokens it was processed with. (The online softmax is that of FlashAttention, Dao et al. 2022.) For
the tokens of a prompt, a chunk is gathered once for many queries; a single token reads the pages in
place.
"""

from typing import Any

import numpy as np
from numba.extending import register_jitable

from expertctl.engine.arrays import VECTOR_BYTES
from expertctl.engine.kernels.compiled.attention_tiles import (
    CHUNK_BYTES,
    CHUNK_TOKENS,
    GATHER_PAGE_BYTES,
    GATHER_VECTORS,
    MIN_SCORE,
    PAGES_PER_CHUNK,
    emit_page_gather,
    emit_page_scores,
    emit_page_values,
    softmax_scores,
    vector_sum,
)
from expertctl.engine.kernels.compiled.compiler import KernelFunction
from expertctl.engine.kernels.compiled.memory import (
    allocate_stack_floats,
    float32_view,
    int64_view,
    load_int64s,
)
from expertctl.engine.kernels.layer_operations import PROMPT_HEADS_PER_ITEM, PROMPT_TOKENS_PER_ITEM
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, LANES

_MAX_QUERY_HEADS = 24
"""Query heads of one KV head that read a page together for a single token."""
_QUERIES = PROMPT_TOKENS_PER_ITEM * PROMPT_HEADS_PER_ITEM
_GATHERED = PAGES_PER_CHUNK * GATHER_VECTORS * LANES
_ALL_SCORES, _ALL_TOTALS = _QUERIES * CHUNK_TOKENS, _QUERIES * LANES
_HEAD_SCORES, _HEAD_TOTALS = (
    PROMPT_TOKENS_PER_ITEM * CHUNK_BYTES,
    PROMPT_TOKENS_PER_ITEM * VECTOR_BYTES,
)
"""Bytes per head for all tokens of an item."""
_SCORES, _TOTALS, _PAGES = (
    _MAX_QUERY_HEADS * CHUNK_TOKENS,
    _MAX_QUERY_HEADS * LANES,
    2 * 2 * PAGES_PER_CHUNK,
)
_BLOCKS = 4
"""Blocks of values gathered at once."""
_NO_WINDOW = -(1 << 30)
"""Before every token of a sequence."""
_MIN_SCORE, _ZERO, _ONE = np.float32(MIN_SCORE), np.float32(0), np.float32(1)


def make_prefill_attention(half: int, capped: int = 0) -> KernelFunction:
    """Return the function for consecutive tokens; pages hold float16 if ``half`` is not 0.

    If ``capped`` is not 0, a limit of scores follows their factor.
    """

    def prompt(first: int, last: int, arguments: int) -> None:
        (
            rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
            out, out_stride, window, scale, count, head_bytes,
        ) = load_int64s(arguments, 15)  # fmt: skip
        tokens, group = load_int64s(count, 1)[0], queries // keys
        sets = (group + PROMPT_HEADS_PER_ITEM - 1) // PROMPT_HEADS_PER_ITEM
        for item in range(first, last):
            token, place = item // (keys * sets) * PROMPT_TOKENS_PER_ITEM, item % (keys * sets)
            begin = place % sets * PROMPT_HEADS_PER_ITEM
            head, page = place // sets * group + begin, place // sets * head_bytes
            _attend_tokens(
                half, rows + token * stride + head * dim * 4, stride,
                min(tokens - token, PROMPT_TOKENS_PER_ITEM),
                min(group - begin, PROMPT_HEADS_PER_ITEM),
                int64_view(positions, tokens)[token], int64_view(tables, tokens)[token],
                key_offset + page, value_offset + page,
                out + token * out_stride + head * dim * 4, out_stride, dim, window,
                float32_view(scale, 1)[0], float32_view(scale, 2)[capped], capped,
            )  # fmt: skip

    return prompt


def make_decode_attention(half: int, capped: int = 0) -> KernelFunction:
    """Return the same for one token of each sequence."""

    def step(first: int, last: int, arguments: int) -> None:
        (
            rows, stride, queries, keys, dim, positions, tables, key_offset, value_offset,
            out, out_stride, window, scale, count, head_bytes,
        ) = load_int64s(arguments, 15)  # fmt: skip
        tokens, group = load_int64s(count, 1)[0], queries // keys
        for item in range(first, last):
            token, head = item // keys, item % keys
            page = head * head_bytes
            for begin in range(head * group, (head + 1) * group, _MAX_QUERY_HEADS):
                _attend_token(
                    half, rows + token * stride + begin * dim * 4,
                    min((head + 1) * group - begin, _MAX_QUERY_HEADS),
                    int64_view(positions, tokens)[token], int64_view(tables, tokens)[token],
                    key_offset + page, value_offset + page,
                    out + token * out_stride + begin * dim * 4, dim, window,
                    float32_view(scale, 1)[0], float32_view(scale, 2)[capped], capped,
                )  # fmt: skip

    return step


@register_jitable
def _attend_tokens(
    half: Any, rows: Any, stride: Any, count: Any, heads: Any, position: Any, table: Any,
    keys: Any, values: Any, out: Any, out_stride: Any, dim: Any, window: Any, scale: Any,
    cap: Any, capped: Any,
) -> None:  # fmt: skip
    """Compute attention for some heads of ``count`` tokens at consecutive positions."""
    pages, near = allocate_stack_floats(_PAGES), allocate_stack_floats(_PAGES)
    gathered, scores, totals = (
        allocate_stack_floats(_GATHERED),
        allocate_stack_floats(_ALL_SCORES),
        allocate_stack_floats(_ALL_TOTALS),
    )
    largest, corrections = allocate_stack_floats(_QUERIES), allocate_stack_floats(_QUERIES)
    _reset_softmax(float32_view(largest, _QUERIES), float32_view(totals, _ALL_TOTALS))
    for page in range(2 * PAGES_PER_CHUNK):
        int64_view(near, 2 * PAGES_PER_CHUNK)[page] = (
            gathered + page % PAGES_PER_CHUNK * GATHER_PAGE_BYTES
        )
    for query in range(count):
        _fill_zeros(float32_view(out + query * out_stride, heads * dim))
    first = max(position - window + 1, 0) // KV_PAGE_TOKENS if window > 0 else 0
    end = position + count
    last = (end - 1) // KV_PAGE_TOKENS
    for chunk in range(first // PAGES_PER_CHUNK, last // PAGES_PER_CHUNK + 1):
        _find_pages(
            int64_view(pages, 2 * PAGES_PER_CHUNK), int64_view(table, last + 1), chunk, first, last
        )
        _score_chunk(half, pages, near, keys, values, rows, stride, scores, dim, count, heads)
        high = position - chunk * CHUNK_TOKENS
        low = high - window + 1 if window > 0 else _NO_WINDOW
        for head in range(heads):
            _softmax_chunk(
                capped, scores + head * _HEAD_SCORES, low, high, 1, scale, cap,
                largest + head * PROMPT_TOKENS_PER_ITEM * 4, totals + head * _HEAD_TOTALS,
                corrections + head * PROMPT_TOKENS_PER_ITEM * 4, count,
            )  # fmt: skip
        skipped = max(first - chunk * PAGES_PER_CHUNK, 0)
        _add_chunk(
            half, pages, near, skipped,
            min(end - chunk * CHUNK_TOKENS, CHUNK_TOKENS) - skipped * KV_PAGE_TOKENS,
            low - skipped * KV_PAGE_TOKENS, high - skipped * KV_PAGE_TOKENS,
            keys, values, scores, corrections, out, out_stride, dim, count, heads,
        )  # fmt: skip
    for head in range(heads):
        _divide_by_totals(
            out + head * dim * 4, out_stride, dim, totals + head * _HEAD_TOTALS, count
        )


@register_jitable
def _score_chunk(
    half: Any, pages: Any, near: Any, keys: Any, values: Any, rows: Any, stride: Any, scores: Any,
    dim: Any, count: Any, heads: Any,
) -> None:  # fmt: skip
    """Write the scores of a chunk for some heads; the keys are gathered once."""
    for begin in range(0, dim, GATHER_VECTORS):
        numbers = min(dim - begin, GATHER_VECTORS)
        emit_page_gather(half, pages, keys, pages, values, int64_view(near, 1)[0], begin, numbers)
        for head in range(heads):
            emit_page_scores(
                0, near, 0, 0, rows + (head * dim + begin) * 4, stride,
                scores + head * _HEAD_SCORES, numbers, count, begin,
            )  # fmt: skip


@register_jitable
def _add_chunk(
    half: Any, pages: Any, near: Any, skipped: Any, tokens: Any, low: Any, high: Any, keys: Any,
    values: Any, scores: Any, corrections: Any, out: Any, out_stride: Any, dim: Any, count: Any,
    heads: Any,
) -> None:  # fmt: skip
    """Add the weighted values of a chunk for some heads; they are gathered once."""
    for begin in range(0, dim // LANES, _BLOCKS):
        blocks = min(dim // LANES - begin, _BLOCKS)
        emit_page_gather(
            half, pages, values, pages + PAGES_PER_CHUNK * 8, keys, int64_view(near, 1)[0],
            begin * KV_PAGE_TOKENS, blocks * KV_PAGE_TOKENS,
        )  # fmt: skip
        for head in range(heads):
            emit_page_values(
                0, near + skipped * 8, tokens, low, high, 1, 0, 0,
                scores + head * _HEAD_SCORES + skipped * VECTOR_BYTES,
                corrections + head * PROMPT_TOKENS_PER_ITEM * 4,
                out + head * dim * 4 + begin * VECTOR_BYTES, out_stride, blocks, count,
            )  # fmt: skip


@register_jitable
def _attend_token(
    half: Any, rows: Any, count: Any, position: Any, table: Any,
    keys: Any, values: Any, out: Any, dim: Any, window: Any, scale: Any, cap: Any, capped: Any,
) -> None:  # fmt: skip
    """Compute attention for ``count`` heads of one token."""
    scores, pages = allocate_stack_floats(_SCORES), allocate_stack_floats(_PAGES)
    largest, totals, corrections = (
        allocate_stack_floats(_MAX_QUERY_HEADS),
        allocate_stack_floats(_TOTALS),
        allocate_stack_floats(_MAX_QUERY_HEADS),
    )
    _reset_softmax(float32_view(largest, count), float32_view(totals, count * LANES))
    _fill_zeros(float32_view(out, count * dim))
    first = max(position - window + 1, 0) // KV_PAGE_TOKENS if window > 0 else 0
    last = position // KV_PAGE_TOKENS
    for chunk in range(first // PAGES_PER_CHUNK, last // PAGES_PER_CHUNK + 1):
        skipped = max(first - chunk * PAGES_PER_CHUNK, 0)
        _find_pages(
            int64_view(pages, 2 * PAGES_PER_CHUNK), int64_view(table, last + 1), chunk, first, last
        )
        emit_page_scores(half, pages, keys, values - keys, rows, dim * 4, scores, dim, count, 0)
        high = position - chunk * CHUNK_TOKENS
        low = high - window + 1 if window > 0 else _NO_WINDOW
        _softmax_chunk(
            capped, scores, low, high, 0, scale, cap, largest, totals, corrections, count
        )
        emit_page_values(
            half, pages + skipped * 8, min(high + 1, CHUNK_TOKENS) - skipped * KV_PAGE_TOKENS,
            low - skipped * KV_PAGE_TOKENS, high - skipped * KV_PAGE_TOKENS, 0,
            values, keys - values,
            scores + skipped * VECTOR_BYTES, corrections, out, dim * 4, dim // LANES, count,
        )  # fmt: skip
    _divide_by_totals(out, dim * 4, dim, totals, count)


@register_jitable
def _softmax_chunk(
    capped: Any, scores: Any, low: Any, high: Any, ahead: Any, scale: Any, cap: Any, largest: Any,
    totals: Any, corrections: Any, count: Any,
) -> None:  # fmt: skip
    """Turn the scores of queries into weights; positions increase by ``ahead`` per query."""
    for query in range(count):
        float32_view(corrections, count)[query] = softmax_scores(
            capped, scores + query * CHUNK_BYTES, low + ahead * query, high + ahead * query, scale,
            cap, largest + query * 4, totals + query * VECTOR_BYTES,
        )  # fmt: skip


@register_jitable
def _divide_by_totals(out: Any, stride: Any, dim: Any, totals: Any, count: Any) -> None:
    """Divide the weighted sums of queries by the sums of their weights."""
    for query in range(count):
        factor = _ONE / vector_sum(totals + query * VECTOR_BYTES)
        row = float32_view(out + query * stride, dim)
        for k in range(dim):
            row[k] *= factor


@register_jitable
def _reset_softmax(largest: Any, totals: Any) -> None:
    for query in range(len(largest)):
        largest[query] = _MIN_SCORE
    _fill_zeros(totals)


@register_jitable
def _fill_zeros(row: Any) -> None:
    for k in range(len(row)):
        row[k] = _ZERO


@register_jitable
def _find_pages(pages: Any, table: Any, chunk: Any, first: Any, last: Any) -> None:
    """Find the pages of a chunk and of the next; the nearest read page replaces an unread one."""
    for number in range(2 * PAGES_PER_CHUNK):
        pages[number] = table[min(max(chunk * PAGES_PER_CHUNK + number, first), last)]
