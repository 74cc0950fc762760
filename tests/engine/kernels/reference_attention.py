"""A text whose keys and values stand in scrambled pages, and the plain formula of attention."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expertctl.engine.arrays import aligned_zeros
from expertctl.engine.kernels.layer_operations import (
    AttentionShape,
    attention_arguments,
    decode_attention_kernel,
    prefill_attention_items,
    prefill_attention_kernel,
    rope_kv_write_arguments,
    rope_kv_write_kernel,
)
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, Scheme

Numbers = np.ndarray[Any, Any]
EPS = np.array([1e-6], np.float32)
OFFSET = 64
"""Bytes of a page in front of the layer that is tested."""


def make_random_rows(tokens: int, shape: AttentionShape, *, seed: int = 0) -> Numbers:
    """Return what the products before attention give: [tokens, heads * dim]."""
    heads = shape.query_heads + 2 * shape.kv_heads
    numbers = np.random.default_rng(seed).standard_normal((tokens, heads * shape.head_dim))
    return numbers.astype(np.float32)


def make_identity_rotation(tokens: int, dim: int) -> Numbers:
    """Return rotations by nothing."""
    rotations = np.zeros((tokens, 2, dim), np.float32)
    rotations[:, 0] = 1
    return rotations


@dataclass(eq=False)
class PagedText:
    """Pages in an order of their own, full of NaN until something is written."""

    shape: AttentionShape
    tokens: int
    window: int | None = None
    cap: float | None = None
    slab: Numbers = field(init=False)
    table: Numbers = field(init=False)

    def __post_init__(self) -> None:
        pages = -(-self.tokens // KV_PAGE_TOKENS)
        page_bytes = OFFSET + 2 * self.shape.page_bytes
        self.slab = aligned_zeros(pages * page_bytes, np.uint8)
        self.slab[:] = 0xFF
        order = np.random.default_rng(pages).permutation(pages)
        self.table = self.slab.ctypes.data + order * page_bytes

    @property
    def offsets(self) -> tuple[int, int]:
        return OFFSET, OFFSET + self.shape.page_bytes

    def find_pages(self, start: int, tokens: int) -> tuple[Numbers, Numbers]:
        positions = np.arange(start, start + tokens)
        return positions, np.full(tokens, self.table.ctypes.data)

    def write(self, rows: Numbers, start: int = 0) -> None:
        """Write the keys and values of some tokens, not rotated."""
        rotations = make_identity_rotation(len(rows), self.shape.head_dim)
        positions, tables = self.find_pages(start, len(rows))
        count = np.array([len(rows)], np.int64)
        arguments = rope_kv_write_arguments(
            rows=rows,
            shape=self.shape,
            norms=(None, None),
            eps=EPS,
            rotations=rotations,
            positions=positions,
            tables=tables,
            offsets=self.offsets,
            count=count,
        )
        items = len(rows) * (self.shape.query_heads + 2 * self.shape.kv_heads)
        rope_kv_write_kernel(self.shape.kv_scheme)(0, items, arguments.ctypes.data)

    def attend(
        self, rows: Numbers, start: int = 0, *, items: tuple[int, int] | None = None
    ) -> Numbers:
        """Attend with tokens that stand behind each other; maybe with some items only."""
        items = items or (0, prefill_attention_items(len(rows), self.shape))
        kernel = prefill_attention_kernel(self.shape.kv_scheme, capped=self.cap is not None)
        return run_attention([self], rows, self.find_pages(start, len(rows)), kernel, items)

    def decode_step(self, rows: Numbers, position: int) -> Numbers:
        """Attend with one token."""
        return attend_batch([self], rows, [position])


def attend_batch(texts: list[PagedText], rows: Numbers, positions: list[int]) -> Numbers:
    """Attend with one token of each text."""
    tables = np.array([text.table.ctypes.data for text in texts])
    is_capped = texts[0].cap is not None
    kernel = decode_attention_kernel(texts[0].shape.kv_scheme, capped=is_capped)
    items = (0, len(rows) * texts[0].shape.kv_heads)
    return run_attention(texts, rows, (np.array(positions), tables), kernel, items)


def run_attention(
    texts: list[PagedText],
    rows: Numbers,
    where: tuple[Numbers, Numbers],
    kernel: Any,
    items: tuple[int, int],
) -> Numbers:
    shape, (positions, tables) = texts[0].shape, where
    out = np.full((len(rows), shape.query_heads * shape.head_dim), np.nan, np.float32)
    caps = () if texts[0].cap is None else (texts[0].cap,)
    scale = np.array([shape.head_dim**-0.5, *caps], np.float32)
    count = np.array([len(rows)], np.int64)
    arguments = attention_arguments(
        rows=rows,
        shape=shape,
        positions=positions,
        tables=tables,
        offsets=texts[0].offsets,
        out=out,
        window=texts[0].window,
        scale=scale,
        count=count,
    )
    kernel(*items, arguments.ctypes.data)
    return out


def compute_attention(
    rows: Numbers,
    shape: AttentionShape,
    window: int | None,
    first: int = 0,
    *,
    cap: float | None = None,
) -> Numbers:
    """Return what the tokens from ``first`` on attend to, by the formula in float64."""
    heads = rows.astype(np.float64).reshape(len(rows), -1, shape.head_dim)
    queries = heads[first:, : shape.query_heads]
    group = shape.query_heads // shape.kv_heads
    keys, values = (
        _round_to_scheme(heads[:, begin : begin + shape.kv_heads], shape.kv_scheme).repeat(
            group, axis=1
        )
        for begin in (shape.query_heads, shape.query_heads + shape.kv_heads)
    )
    scores = np.einsum("thd,shd->hts", queries, keys) / np.sqrt(shape.head_dim)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    at = np.arange(len(rows))
    hidden = at > at[first:, None]
    if window is not None:
        hidden |= at <= at[first:, None] - window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, values).reshape(len(queries), -1)


def _round_to_scheme(numbers: Numbers, scheme: Scheme) -> Numbers:
    return numbers.astype(np.float16).astype(np.float64) if scheme is Scheme.FLOAT16 else numbers
