"""Attention over pages, against the textbook formula in float64."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.layer_operations import (
    PROMPT_HEADS_PER_ITEM,
    PROMPT_TOKENS_PER_ITEM,
    AttentionShape,
    prefill_attention_items,
)
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, Scheme
from tests.engine.kernels.reference_attention import (
    Numbers,
    PagedText,
    attend_batch,
    compute_attention,
    make_random_rows,
)

TOLERANCE = 2e-6
SMALL = AttentionShape(4, 2, 32)
HALVES = AttentionShape(4, 2, 32, Scheme.FLOAT16)


def prompt(
    shape: AttentionShape, tokens: int, window: int | None = None
) -> tuple[PagedText, Numbers]:
    text, rows = PagedText(shape, tokens, window), make_random_rows(tokens, shape)
    text.write(rows)
    return text, rows


@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 96, 128, 256])
def test_heads_of_every_width_attend_as_the_formula_says(dim: int, numbers: Scheme) -> None:
    shape = AttentionShape(2, 1, dim, numbers)
    text, rows = prompt(shape, 70)
    expected = compute_attention(rows, shape, None)
    assert np.abs(text.attend(rows) - expected).max() < TOLERANCE
    assert np.abs(text.decode_step(rows[-1:], 69) - expected[-1]).max() < TOLERANCE


@pytest.mark.parametrize("dim", [16, 64, 128])
def test_float16_pages_cost_half_a_thousandth(dim: int) -> None:
    """Against keys and values as they came, not as they were rounded."""
    text, rows = prompt(AttentionShape(4, 2, dim, Scheme.FLOAT16), 300)
    exact = compute_attention(rows, AttentionShape(4, 2, dim), None)
    error = text.attend(rows) - exact
    assert np.linalg.norm(error) < 5e-4 * np.linalg.norm(exact)
    assert np.abs(error).max() < 5e-4 * np.abs(rows).max()


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 11, 12, 16, 17, 32])
def test_groups_of_query_heads_share_a_key_head(group: int) -> None:
    shape = AttentionShape(2 * group, 2, 16)
    text, rows = prompt(shape, 37)
    expected = compute_attention(rows, shape, None)
    assert np.abs(text.decode_step(rows[-1:], 36) - expected[-1]).max() < TOLERANCE
    assert np.abs(text.attend(rows) - expected).max() < TOLERANCE


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 63, 64, 65, 100, 199, 200, 1000])
def test_a_window_lets_a_token_see_so_many_tokens(window: int) -> None:
    text, rows = prompt(SMALL, 200, window)
    expected = compute_attention(rows, SMALL, window)
    assert np.abs(text.attend(rows) - expected).max() < TOLERANCE
    for position in (0, 15, 16, 63, 64, 150, 199):
        step = text.decode_step(rows[position : position + 1], position)
        assert np.abs(step - expected[position]).max() < TOLERANCE


@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize("window", [None, 40])
def test_capped_scores_are_those_of_the_formula(window: int | None, numbers: Scheme) -> None:
    shape = AttentionShape(4, 2, 32, numbers)
    text, rows = PagedText(shape, 150, window, cap=0.7), make_random_rows(150, shape)
    text.write(rows)
    expected = compute_attention(rows, shape, window, cap=0.7)
    assert np.abs(expected - compute_attention(rows, shape, window)).max() > 0.05
    assert np.abs(text.attend(rows) - expected).max() < TOLERANCE
    for position in (0, 17, 149):
        step = text.decode_step(rows[position : position + 1], position)
        assert np.abs(step - expected[position]).max() < TOLERANCE


@pytest.mark.parametrize("more", [-1, 0, 1, PROMPT_TOKENS_PER_ITEM, PROMPT_TOKENS_PER_ITEM + 1])
def test_there_is_room_for_as_many_queries_as_read_a_page_together(more: int) -> None:
    count = PROMPT_TOKENS_PER_ITEM + more
    text, rows = prompt(SMALL, count)
    assert np.abs(text.attend(rows) - compute_attention(rows, SMALL, None)).max() < TOLERANCE
    heads = AttentionShape(count, 1, 16)
    text, rows = prompt(heads, 5)
    expected = compute_attention(rows, heads, None)
    assert np.abs(text.decode_step(rows[-1:], 4) - expected[-1]).max() < TOLERANCE


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1, 150),
    window=st.none() | st.integers(1, 160),
    numbers=st.sampled_from([Scheme.FLOAT32, Scheme.FLOAT16]),
    data=st.data(),
)
def test_chunks_and_steps_have_the_bits_of_the_whole(
    tokens: int, window: int | None, numbers: Scheme, data: st.DataObject
) -> None:
    shape = AttentionShape(4, 2, 32, numbers)
    text, rows = prompt(shape, tokens, window)
    whole = text.attend(rows)
    assert np.abs(whole - compute_attention(rows, shape, window)).max() < TOLERANCE
    later, start = PagedText(shape, tokens, window), 0
    while start < tokens:
        part = rows[start : start + data.draw(st.integers(1, 40))].copy()
        later.write(part, start)
        read = later.decode_step(part, start) if len(part) == 1 else later.attend(part, start)
        np.testing.assert_array_equal(read, whole[start : start + len(part)])
        start += len(part)


@pytest.mark.parametrize("numbers", [Scheme.FLOAT32, Scheme.FLOAT16])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("group", "dim"), [(1, 144), (PROMPT_HEADS_PER_ITEM + 3, 80), (3, 272)])
def test_what_is_gathered_for_a_prompt_has_the_bits_of_what_is_read_in_place(
    group: int, dim: int, window: int | None, numbers: Scheme
) -> None:
    """Groups of heads that fill no item, and heads wider than what is gathered at once."""
    shape = AttentionShape(2 * group, 2, dim, numbers)
    text, rows = prompt(shape, 2 * PROMPT_TOKENS_PER_ITEM + 7, window)
    read = text.attend(rows)
    assert np.abs(read - compute_attention(rows, shape, window)).max() < 2 * TOLERANCE
    for position in range(0, len(rows), 5):
        step = text.decode_step(rows[position : position + 1], position)
        np.testing.assert_array_equal(step[0], read[position])


def test_an_item_of_a_prompt_does_its_own_tokens_and_heads_only() -> None:
    shape, tokens = AttentionShape(2 * PROMPT_HEADS_PER_ITEM + 2, 2, 16), PROMPT_TOKENS_PER_ITEM + 2
    text, rows = prompt(shape, tokens)
    whole, parts = text.attend(rows), np.zeros((tokens, shape.query_heads), int)
    assert prefill_attention_items(tokens, shape) == 8
    for item in range(8):
        read = text.attend(rows, items=(item, item + 1)).reshape(
            tokens, shape.query_heads, shape.head_dim
        )
        done = ~np.isnan(read).any(axis=-1)
        np.testing.assert_array_equal(read[done], whole.reshape(read.shape)[done])
        parts += done
    assert (parts == 1).all()


def test_texts_of_a_batch_do_not_touch_each_other() -> None:
    lengths = [1, 16, 17, 64, 100]
    prompts = [prompt(SMALL, length) for length in lengths]
    rows = np.concatenate([rows[-1:] for _, rows in prompts])
    together = attend_batch([text for text, _ in prompts], rows, [length - 1 for length in lengths])
    for (text, own), length, read in zip(prompts, lengths, together, strict=True):
        np.testing.assert_array_equal(read, text.decode_step(own[-1:], length - 1)[0])


def test_texts_may_share_pages() -> None:
    text, rows = prompt(SMALL, 3 * KV_PAGE_TOKENS + 5)
    other = PagedText(SMALL, 4 * KV_PAGE_TOKENS)
    other.table[:2] = text.table[:2]
    changed = np.concatenate([rows[: 2 * KV_PAGE_TOKENS], make_random_rows(9, SMALL, seed=1)])
    other.write(changed[2 * KV_PAGE_TOKENS :].copy(), 2 * KV_PAGE_TOKENS)
    expected = compute_attention(changed, SMALL, None)
    assert np.abs(other.attend(changed) - expected).max() < TOLERANCE
    assert np.abs(text.attend(rows) - compute_attention(rows, SMALL, None)).max() < TOLERANCE


def test_pages_before_the_window_are_not_read() -> None:
    text, rows = prompt(SMALL, 200, 20)
    expected = text.decode_step(rows[-1:], 199)
    text.table[: (200 - 20) // KV_PAGE_TOKENS] = 0
    np.testing.assert_array_equal(text.decode_step(rows[-1:], 199), expected)


@pytest.mark.parametrize("shape", [SMALL, HALVES])
def test_a_nan_that_an_earlier_owner_left_is_never_read(shape: AttentionShape) -> None:
    for tokens in (1, 5, 16, 17, 33, 65):
        text, rows = prompt(shape, tokens)
        assert np.isfinite(text.attend(rows)).all()


def test_a_nan_reaches_those_who_see_it_only() -> None:
    rows = make_random_rows(40, SMALL)
    rows[17, -1] = np.nan
    text = PagedText(SMALL, 40)
    text.write(rows)
    read = text.attend(rows).reshape(40, SMALL.query_heads, SMALL.head_dim)
    assert np.isfinite(read[:17]).all()
    assert np.isnan(read[17:, -1, -1]).all()
    assert np.isfinite(read[:, 0]).all()


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.integers(1, 150),
    window=st.none() | st.integers(1, 160),
    shape=st.sampled_from([SMALL, HALVES, AttentionShape(3, 1, 80), AttentionShape(7, 1, 16)]),
    number=st.sampled_from([np.nan, np.inf, -np.inf, 3e38, -0.0]),
    data=st.data(),
)
def test_what_a_token_does_not_see_changes_none_of_its_bits(
    tokens: int, window: int | None, shape: AttentionShape, number: float, data: st.DataObject
) -> None:
    text, rows = prompt(shape, tokens, window)
    expected = text.attend(rows)
    at = data.draw(st.integers(0, tokens - 1))
    begin = shape.query_heads * shape.head_dim
    middle, end = begin + shape.kv_heads * shape.head_dim, rows.shape[1]
    part = data.draw(st.sampled_from([(begin, middle), (middle, end), (begin, end)]))
    rows[at, slice(*part)] = number
    text.write(rows[at : at + 1].copy(), at)
    behind = tokens if window is None else min(at + window, tokens)
    unseen = [*range(at), *range(behind, tokens)]
    np.testing.assert_array_equal(bits(text.attend(rows)[unseen]), bits(expected[unseen]))
    for token in unseen[:: max(len(unseen) // 5, 1)]:
        step = text.decode_step(rows[token : token + 1], token)
        np.testing.assert_array_equal(bits(step[0]), bits(expected[token]))
    if np.isnan(number):
        assert np.isnan(text.attend(rows)[at:behind]).any(axis=1).all()


def bits(floats: Numbers) -> Numbers:
    return np.ascontiguousarray(floats).view(np.uint32)


def test_a_key_of_nan_makes_the_whole_head_nan() -> None:
    rows = make_random_rows(3, SMALL)
    rows[1, SMALL.query_heads * SMALL.head_dim] = np.nan
    text = PagedText(SMALL, 3)
    text.write(rows)
    read = text.decode_step(rows[2:], 2).reshape(SMALL.query_heads, SMALL.head_dim)
    assert np.isnan(read[:2]).all()
    assert np.isfinite(read[2:]).all()


@pytest.mark.parametrize(
    "shape", [AttentionShape(4, 2, 64), AttentionShape(4, 2, 64, Scheme.FLOAT16)]
)
def test_a_long_text_keeps_its_precision(shape: AttentionShape) -> None:
    tokens, last = 8192, 8192 - 24
    text, rows = prompt(shape, tokens)
    kept = rows[last:].copy()
    expected = compute_attention(rows, shape, None, last)
    assert np.abs(text.attend(kept, last) - expected).max() < TOLERANCE
    assert np.abs(text.decode_step(kept[-1:], tokens - 1) - expected[-1]).max() < TOLERANCE


def test_large_scores_do_not_overflow() -> None:
    rows = make_random_rows(80, SMALL) * np.float32(100)
    text = PagedText(SMALL, 80)
    text.write(rows)
    expected = compute_attention(rows, SMALL, None)
    assert np.abs(text.attend(rows) - expected).max() < 1e-3


def test_heads_that_are_no_whole_vectors_are_refused() -> None:
    with pytest.raises(AssertionError):
        AttentionShape(4, 2, 24)
