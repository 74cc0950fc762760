"""Queries, keys and values on their way into pages, against torch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from expertctl.engine.kernels.layer_operations import (
    AttentionShape,
    rope_kv_write_arguments,
    rope_kv_write_kernel,
)
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, Scheme
from expertctl.engine.torch.functional import apply_rope, compute_rope_table
from expertctl.package.attention_config import RopeConfig
from tests.engine.kernels.reference_attention import EPS, PagedText, make_random_rows

Numbers = np.ndarray[Any, Any]


def stored(text: PagedText, position: int) -> tuple[Numbers, Numbers]:
    """Return the key and the value of a token as they stand in its page, [heads, dim]."""
    shape = text.shape
    start = int(text.table[position // KV_PAGE_TOKENS] - text.slab.ctypes.data)
    dtype = np.float16 if shape.kv_scheme is Scheme.FLOAT16 else np.float32
    keys, values = (
        text.slab[start + offset : start + offset + shape.page_bytes].view(dtype)
        for offset in text.offsets
    )
    blocks = values.reshape(shape.kv_heads, -1, KV_PAGE_TOKENS, KV_PAGE_TOKENS)[
        :, :, position % KV_PAGE_TOKENS
    ]
    key = keys.reshape(shape.kv_heads, shape.head_dim, KV_PAGE_TOKENS)[
        :, :, position % KV_PAGE_TOKENS
    ]
    return key, blocks.reshape(shape.kv_heads, shape.head_dim)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_heads_are_normed_rotated_and_written(dim: int, numbers: Scheme, has_norms: bool) -> None:
    shape, start, tokens = AttentionShape(4, 2, dim, numbers), 13, 25
    rows, text = make_random_rows(tokens, shape), PagedText(shape, start + tokens)
    norms = tuple(make_random_rows(1, shape, seed=seed)[0, :dim].copy() for seed in (1, 2))
    table = compute_rope_table(RopeConfig(10_000.0, dim, None), start + tokens, device="cpu")
    rotations = table[:, start:].transpose(0, 1).contiguous().numpy()
    expected = torch.from_numpy(rows.copy()).view(tokens, -1, dim).transpose(0, 1).clone()
    for part, norm in ((expected[:4], norms[0]), (expected[4:6], norms[1])):
        if has_norms:
            part[...] = F.rms_norm(part, (dim,), torch.from_numpy(norm), float(EPS[0]))
        part[...] = apply_rope(part, *table[:, start:])
    positions, tables = text.find_pages(start, tokens)
    given = (norms[0], norms[1]) if has_norms else (None, None)
    count = np.array([tokens], np.int64)
    arguments = rope_kv_write_arguments(
        rows=rows,
        shape=shape,
        norms=given,
        eps=EPS,
        rotations=rotations,
        positions=positions,
        tables=tables,
        offsets=text.offsets,
        count=count,
    )
    rope_kv_write_kernel(numbers)(0, tokens * 8, arguments.ctypes.data)
    queries = rows.reshape(tokens, -1, dim)[:, :4].transpose(1, 0, 2)
    assert np.abs(queries - expected[:4].numpy()).max() < 3e-6
    close = 3e-6 if numbers is Scheme.FLOAT32 else 4e-3
    for token in range(tokens):
        key, value = stored(text, start + token)
        assert np.abs(key - expected[4:6, token].numpy()).max() < close
        np.testing.assert_array_equal(value, expected[6:, token].numpy().astype(value.dtype))


def test_float16_pages_round_to_the_nearest_and_overflow_to_infinity() -> None:
    shape = AttentionShape(1, 1, 16, Scheme.FLOAT16)
    rows, text = np.zeros((1, 48), np.float32), PagedText(shape, 1)
    rows[0, 32:39] = [1 / 3, 2049, 2051, 65519, 65520, -1e9, np.nan]
    text.write(rows)
    value = stored(text, 0)[1][0, :7]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(value, rows[0, 32:39].astype(np.float16))


def test_tokens_may_be_written_in_any_order() -> None:
    shape = AttentionShape(2, 1, 32)
    rows, text, other = make_random_rows(40, shape), PagedText(shape, 40), PagedText(shape, 40)
    text.write(rows)
    for token in np.random.default_rng(0).permutation(40):
        other.write(rows[token : token + 1].copy(), int(token))
    for token in range(40):
        for one, two in zip(stored(text, token), stored(other, token), strict=True):
            np.testing.assert_array_equal(one, two)
