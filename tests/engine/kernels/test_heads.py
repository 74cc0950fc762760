"""Queries, keys and values on their way into pages, against torch."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name

from expertctl.engine.kernels.heads import PAGE, HeadsShape, heads_arguments, heads_kernel
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.rope import rotate, rotation_table
from expertctl.package.rope_config import RopeConfig
from tests.engine.kernels.paged import EPS, Text, random_rows

Numbers = np.ndarray[Any, Any]


def stored(text: Text, position: int) -> tuple[Numbers, Numbers]:
    """Return the key and the value of a token as they stand in its page, [heads, dim]."""
    shape = text.shape
    start = int(text.table[position // PAGE] - text.slab.ctypes.data)
    dtype = np.float16 if shape.numbers is Scheme.FLOAT16 else np.float32
    keys, values = (
        text.slab[start + offset : start + offset + shape.page_bytes].view(dtype)
        for offset in text.offsets
    )
    blocks = values.reshape(shape.keys, -1, PAGE, PAGE)[:, :, position % PAGE]
    key = keys.reshape(shape.keys, shape.dim, PAGE)[:, :, position % PAGE]
    return key, blocks.reshape(shape.keys, shape.dim)


@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize("dim", [16, 64, 80, 128, 256])
def test_heads_are_normed_rotated_and_written(dim: int, numbers: Scheme, has_norms: bool) -> None:
    shape, start, tokens = HeadsShape(4, 2, dim, numbers), 13, 25
    rows, text = random_rows(tokens, shape), Text(shape, start + tokens)
    norms = tuple(random_rows(1, shape, seed=seed)[0, :dim].copy() for seed in (1, 2))
    table = rotation_table(RopeConfig(10_000.0, dim, None), start + tokens, device="cpu")
    rotations = table[:, start:].transpose(0, 1).contiguous().numpy()
    expected = torch.from_numpy(rows.copy()).view(tokens, -1, dim).transpose(0, 1).clone()
    for part, norm in ((expected[:4], norms[0]), (expected[4:6], norms[1])):
        if has_norms:
            part[...] = F.rms_norm(part, (dim,), torch.from_numpy(norm), float(EPS[0]))
        part[...] = rotate(part, *table[:, start:])
    positions, tables = text.where(start, tokens)
    given = (norms[0], norms[1]) if has_norms else (None, None)
    count = np.array([tokens], np.int64)
    arguments = heads_arguments(
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
    heads_kernel(numbers)(0, tokens * 8, arguments.ctypes.data)
    queries = rows.reshape(tokens, -1, dim)[:, :4].transpose(1, 0, 2)
    assert np.abs(queries - expected[:4].numpy()).max() < 3e-6
    close = 3e-6 if numbers is Scheme.FLOAT32 else 4e-3
    for token in range(tokens):
        key, value = stored(text, start + token)
        assert np.abs(key - expected[4:6, token].numpy()).max() < close
        np.testing.assert_array_equal(value, expected[6:, token].numpy().astype(value.dtype))


def test_float16_pages_round_to_the_nearest_and_overflow_to_infinity() -> None:
    shape = HeadsShape(1, 1, 16, Scheme.FLOAT16)
    rows, text = np.zeros((1, 48), np.float32), Text(shape, 1)
    rows[0, 32:39] = [1 / 3, 2049, 2051, 65519, 65520, -1e9, np.nan]
    text.write(rows)
    value = stored(text, 0)[1][0, :7]
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(value, rows[0, 32:39].astype(np.float16))


def test_tokens_may_be_written_in_any_order() -> None:
    shape = HeadsShape(2, 1, 32)
    rows, text, other = random_rows(40, shape), Text(shape, 40), Text(shape, 40)
    text.write(rows)
    for token in np.random.default_rng(0).permutation(40):
        other.write(rows[token : token + 1].copy(), int(token))
    for token in range(40):
        for one, two in zip(stored(text, token), stored(other, token), strict=True):
            np.testing.assert_array_equal(one, two)
