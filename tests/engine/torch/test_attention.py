"""Attention against the textbook formula, for every split of a text and every window."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from expertctl.engine.cpu import plain_functional
from expertctl.engine.cpu.plain_functional import attend, split_queries
from expertctl.engine.torch.functional import (
    grouped_query_attention,
    make_attention_mask,
    scaled_dot_product_attention,
)
from expertctl.engine.torch.reference import reference_attention


def attend_in_numpy(queries: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
    """Compute attention of heads [heads, tokens, dims] as the plain decoder does."""
    heads, tokens, dims = queries.shape
    scaled = (queries.transpose(0, 1) * dims**-0.5).contiguous().numpy()
    out = np.empty((tokens, heads, dims), np.float32)
    start = keys.shape[1] - tokens
    for block in split_queries(start, tokens, window, heads=heads):
        seen = slice(block.first, block.last)
        rows = slice(block.begin, block.end)
        attend(scaled[rows], keys[:, seen].numpy(), values[:, seen].numpy(), block, out=out[rows])
    return torch.from_numpy(out.reshape(tokens, -1))


@settings(
    deadline=None,
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    start=st.integers(0, 9),
    tokens=st.integers(1, 9),
    window=st.none() | st.integers(1, 18),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    scores=st.sampled_from([1, 60, 120, 1 << 20]),
)
def test_attention_in_numpy_equals_the_plain_formula_in_blocks_of_any_height(
    start: int,
    tokens: int,
    window: int | None,
    kv_heads: int,
    groups: int,
    scores: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plain_functional, "MAX_SCORES", scores)
    generator = torch.Generator().manual_seed(start * 100 + tokens)
    queries = torch.randn(kv_heads * groups, tokens, 4, generator=generator)
    keys, values = torch.randn(2, kv_heads, start + tokens, 4, generator=generator)
    wanted = reference_attention(queries, keys, values, window=window)
    found = attend_in_numpy(queries, keys, values, window)
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def test_only_the_last_rows_may_attend() -> None:
    queries, (keys, values) = torch.randn(4, 7, 4), torch.randn(2, 2, 7, 4)
    wanted = reference_attention(queries, keys, values, window=3)
    last = (queries[:, 6:].transpose(0, 1) / 2).contiguous().numpy()
    (block,) = split_queries(0, 7, 3, heads=4, begin=6)
    assert (block.begin, block.end, block.first, block.last) == (6, 7, 4, 7)
    out = np.empty((1, 4, 4), np.float32)
    attend(last, keys[:, 4:].numpy(), values[:, 4:].numpy(), block, out)
    torch.testing.assert_close(torch.from_numpy(out).flatten(1), wanted[6:], atol=1e-6, rtol=1e-5)


@settings(deadline=None, max_examples=80)
@given(
    start=st.integers(0, 9),
    tokens=st.integers(1, 7),
    window=st.none() | st.integers(1, 18),
    kv_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
)
def test_attention_equals_the_plain_formula(
    start: int, tokens: int, window: int | None, kv_heads: int, groups: int
) -> None:
    generator = torch.Generator().manual_seed(start * 100 + tokens)
    queries = torch.randn(kv_heads * groups, tokens, 4, generator=generator)
    room = torch.randn(2, kv_heads, start + tokens + 3, 4, generator=generator)
    keys, values = room[:, :, : start + tokens]
    wanted = reference_attention(queries, keys, values, window=window)
    for way in (scaled_dot_product_attention, grouped_query_attention):
        got = way(queries, keys, values, make_attention_mask(start, tokens, window))
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_one_token_needs_no_mask() -> None:
    assert make_attention_mask(9, 1, None).mask is None
    assert (make_attention_mask(9, 1, 4).first, make_attention_mask(9, 1, 4).mask) == (6, None)


def test_a_whole_prompt_needs_no_mask_unless_the_window_is_shorter() -> None:
    assert make_attention_mask(0, 8, None).causal
    assert make_attention_mask(0, 8, 8).causal
    short = make_attention_mask(0, 8, 7)
    assert short.mask is not None
    assert int(short.mask.sum()) == 8 * 9 // 2 - 1


def test_keys_before_every_window_are_not_looked_at() -> None:
    view = make_attention_mask(20, 3, 5)
    assert view.first == 16
    assert view.mask is not None
    assert view.mask.shape == (3, 7)
    assert view.mask.sum(dim=1).tolist() == [5, 5, 5]


def test_a_narrow_cache_answers_in_the_dtype_of_the_queries() -> None:
    queries, keys, values = (torch.randn(2, 3, 4) for _ in range(3))
    got = scaled_dot_product_attention(
        queries, keys.bfloat16(), values.bfloat16(), make_attention_mask(0, 3, None)
    )
    assert got.dtype == torch.float32
    wanted = reference_attention(queries, keys, values, window=None)
    assert float((got - wanted).norm() / wanted.norm()) < 0.03


def test_it_does_not_matter_in_what_order_a_kernel_leaves_heads_and_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's kernel for masks leaves all heads of a token beside each other."""
    plain = F.scaled_dot_product_attention

    def by_tokens(*args: Any, **options: Any) -> Tensor:
        return plain(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", by_tokens)
    generator = torch.Generator().manual_seed(1)
    for start, tokens in ((0, 5), (7, 4), (7, 1)):
        queries = torch.randn(6, tokens, 4, generator=generator)
        keys, values = torch.randn(2, 2, start + tokens, 4, generator=generator)
        got = grouped_query_attention(
            queries, keys, values, make_attention_mask(start, tokens, None)
        )
        wanted = reference_attention(queries, keys, values, window=None)
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)
