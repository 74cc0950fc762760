"""A text whose keys and values stand in scrambled pages, and the plain formula of attention."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from expertctl.engine.kernels.attend import (
    attend_arguments,
    attend_prompt_kernel,
    attend_step_kernel,
    prompt_items,
)
from expertctl.engine.kernels.heads import PAGE, HeadsShape, heads_arguments, heads_kernel
from expertctl.engine.kernels.memory import aligned
from expertctl.engine.kernels.scheme import Scheme

Numbers = np.ndarray[Any, Any]
EPS = np.array([1e-6], np.float32)
OFFSET = 64
"""Bytes of a page in front of the layer that is tested."""


def random_rows(tokens: int, shape: HeadsShape, *, seed: int = 0) -> Numbers:
    """Return what the products before attention give: [tokens, heads * dim]."""
    heads = shape.queries + 2 * shape.keys
    numbers = np.random.default_rng(seed).standard_normal((tokens, heads * shape.dim))
    return numbers.astype(np.float32)


def no_rotation(tokens: int, dim: int) -> Numbers:
    """Return rotations by nothing."""
    rotations = np.zeros((tokens, 2, dim), np.float32)
    rotations[:, 0] = 1
    return rotations


@dataclass(eq=False)
class Text:
    """Pages in an order of their own, full of NaN until something is written."""

    shape: HeadsShape
    tokens: int
    window: int | None = None
    slab: Numbers = field(init=False)
    table: Numbers = field(init=False)

    def __post_init__(self) -> None:
        pages = -(-self.tokens // PAGE)
        page_bytes = OFFSET + 2 * self.shape.page_bytes
        self.slab = aligned(pages * page_bytes, np.uint8)
        self.slab[:] = 0xFF
        order = np.random.default_rng(pages).permutation(pages)
        self.table = self.slab.ctypes.data + order * page_bytes

    @property
    def offsets(self) -> tuple[int, int]:
        return OFFSET, OFFSET + self.shape.page_bytes

    def where(self, start: int, tokens: int) -> tuple[Numbers, Numbers]:
        positions = np.arange(start, start + tokens)
        return positions, np.full(tokens, self.table.ctypes.data)

    def write(self, rows: Numbers, start: int = 0) -> None:
        """Write the keys and values of some tokens, not rotated."""
        rotations = no_rotation(len(rows), self.shape.dim)
        positions, tables = self.where(start, len(rows))
        count = np.array([len(rows)], np.int64)
        arguments = heads_arguments(
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
        items = len(rows) * (self.shape.queries + 2 * self.shape.keys)
        heads_kernel(self.shape.numbers)(0, items, arguments.ctypes.data)

    def read(
        self, rows: Numbers, start: int = 0, *, items: tuple[int, int] | None = None
    ) -> Numbers:
        """Attend with tokens that stand behind each other; maybe with some items only."""
        items = items or (0, prompt_items(len(rows), self.shape))
        kernel = attend_prompt_kernel(self.shape.numbers)
        return attended([self], rows, self.where(start, len(rows)), kernel, items)

    def step(self, rows: Numbers, position: int) -> Numbers:
        """Attend with one token."""
        return step_of([self], rows, [position])


def step_of(texts: list[Text], rows: Numbers, positions: list[int]) -> Numbers:
    """Attend with one token of each text."""
    tables = np.array([text.table.ctypes.data for text in texts])
    kernel = attend_step_kernel(texts[0].shape.numbers)
    items = (0, len(rows) * texts[0].shape.keys)
    return attended(texts, rows, (np.array(positions), tables), kernel, items)


def attended(
    texts: list[Text],
    rows: Numbers,
    where: tuple[Numbers, Numbers],
    kernel: Any,
    items: tuple[int, int],
) -> Numbers:
    shape, (positions, tables) = texts[0].shape, where
    out = np.full((len(rows), shape.queries * shape.dim), np.nan, np.float32)
    scale = np.array([shape.dim**-0.5], np.float32)
    count = np.array([len(rows)], np.int64)
    arguments = attend_arguments(
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


def plain_attention(
    rows: Numbers, shape: HeadsShape, window: int | None, first: int = 0
) -> Numbers:
    """Return what the tokens from ``first`` on attend to, by the formula in float64."""
    heads = rows.astype(np.float64).reshape(len(rows), -1, shape.dim)
    queries = heads[first:, : shape.queries]
    group = shape.queries // shape.keys
    keys, values = (
        _stored(heads[:, begin : begin + shape.keys], shape.numbers).repeat(group, axis=1)
        for begin in (shape.queries, shape.queries + shape.keys)
    )
    scores = np.einsum("thd,shd->hts", queries, keys) / np.sqrt(shape.dim)
    at = np.arange(len(rows))
    hidden = at > at[first:, None]
    if window is not None:
        hidden |= at <= at[first:, None] - window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    return np.einsum("hts,shd->thd", weights, values).reshape(len(queries), -1)


def _stored(numbers: Numbers, scheme: Scheme) -> Numbers:
    return numbers.astype(np.float16).astype(np.float64) if scheme is Scheme.FLOAT16 else numbers
