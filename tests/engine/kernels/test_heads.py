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
    turned_kv_write_arguments,
    turned_kv_write_kernel,
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


@pytest.mark.parametrize("norms_last", [False, True])
@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize(("dim", "turned"), [(80, 20), (64, 32), (96, 96), (16, 0)])
def test_part_of_a_head_or_its_neighbours_are_rotated(
    dim: int, turned: int, is_interleaved: bool, norms_last: bool
) -> None:
    shape, start, tokens = AttentionShape(4, 2, dim, Scheme.FLOAT32), 13, 20
    rows, text = make_random_rows(tokens, shape), PagedText(shape, start + tokens)
    norm = make_random_rows(1, shape, seed=1)[0, :dim].copy()
    angles = np.random.default_rng(3).uniform(0, 6, (tokens, turned // 2)).astype(np.float32)
    rotations = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    rotations = np.concatenate([rotations, rotations], axis=2)
    heads = rows.astype(np.float64).reshape(tokens, 8, dim)
    turning, weight = heads[:, :6], norm.astype(np.float64)

    def normalise() -> None:
        scale = np.sqrt((turning**2).mean(-1, keepdims=True) + EPS)
        turning[...] = turning / scale * weight

    if not norms_last:
        normalise()
    pairs = turning[..., :turned].copy()
    order = np.arange(turned).reshape(-1, 2).T if is_interleaved else np.arange(turned)
    first, second = order.reshape(2, -1)
    cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
    turning[..., first] = pairs[..., first] * cosine - pairs[..., second] * sine
    turning[..., second] = pairs[..., second] * cosine + pairs[..., first] * sine
    if norms_last:
        normalise()
    positions, tables = text.find_pages(start, tokens)
    count = np.array([tokens], np.int64)
    arguments = rope_kv_write_arguments(
        rows=rows,
        shape=shape,
        norms=(norm, norm),
        eps=EPS,
        rotations=rotations,
        positions=positions,
        tables=tables,
        offsets=text.offsets,
        count=count,
    )
    arguments = turned_kv_write_arguments(
        arguments=arguments, turned=turned, interleaved=is_interleaved, norms_last=norms_last
    )
    turned_kv_write_kernel()(0, tokens * 8, arguments.ctypes.data)
    found = rows.reshape(tokens, 8, dim)
    assert np.abs(found[:, :4] - heads[:, :4]).max() < 5e-6
    for token in range(tokens):
        key, value = stored(text, start + token)
        assert np.abs(key - heads[token, 4:6]).max() < 5e-6
        np.testing.assert_array_equal(value, found[token, 6:])
