"""Pages of keys and values: room, rewinding, sharing, and what the check of integrity sees."""

import ctypes
from typing import Any

import numpy as np
import pytest

from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, Scheme
from expertctl.engine.kv.block_pool import (
    FLOAT32_PAGES,
    ROW_PAGES,
    InterleavedPages,
    PagedKVCache,
    PageLayout,
    estimate_pages_bytes,
)
from expertctl.errors import BudgetError
from expertctl.package.attention_config import RopeConfig
from expertctl.package.model_config import ModelConfig

CONFIG = ModelConfig(
    architecture="qwen3",
    vocab_size=61,
    hidden_size=48,
    intermediate_size=80,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=32,
    max_positions=256,
    norm_eps=1e-6,
    rope=RopeConfig(theta=1e4, dims=32),
    windows=(None, None, None),
    qkv_bias=False,
    output_bias=False,
    mlp_bias=False,
    qk_norm=True,
    tied=True,
)
PAGE_BYTES = 2 * 3 * 2 * 32 * 16 * 4  # keys and values, layers, KV heads, dim, tokens, float32
LAYOUTS = [FLOAT32_PAGES, InterleavedPages(Scheme.FLOAT16), ROW_PAGES]
EVERY_LAYOUT = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


def rows_of(cache: PagedKVCache, place: int) -> "tuple[np.ndarray[Any, Any], ...]":
    """The keys [layers, KV heads, dims, tokens] and values [layers, KV heads, 2, tokens, 16]."""
    page = cache.pages[place]
    if isinstance(cache.layout, InterleavedPages):
        half = cache.layout.numbers is Scheme.FLOAT16
        numbers = page.view(np.float16 if half else np.float32).reshape(3, 2, 2, -1)
        keys = numbers[:, 0].reshape(3, 2, 32, KV_PAGE_TOKENS)
        return keys, numbers[:, 1].reshape(3, 2, 2, KV_PAGE_TOKENS, KV_PAGE_TOKENS)
    values = page[:, 1].reshape(3, 2, KV_PAGE_TOKENS, 2, 16).swapaxes(2, 3)
    return page[:, 0].swapaxes(2, 3), values


def filled(
    capacity: int, length: int, *, number: float = 1.0, layout: PageLayout = FLOAT32_PAGES
) -> PagedKVCache:
    """Pages of which every row up to ``length`` is a number, and every other is not one."""
    cache = PagedKVCache(CONFIG, capacity, layout=layout)
    for place in range(len(cache._pages)):
        keys, values = rows_of(cache, place)
        keys[...] = values[...] = np.nan
        there = max(min(length - place * KV_PAGE_TOKENS, KV_PAGE_TOKENS), 0)
        keys[..., :there] = number
        values[..., :there, :] = number
    cache.advance(length)
    return cache


@pytest.mark.parametrize(("capacity", "pages"), [(1, 1), (16, 1), (17, 2), (40, 3)])
@EVERY_LAYOUT
def test_memory_is_that_of_whole_pages(capacity: int, pages: int, layout: PageLayout) -> None:
    cache = PagedKVCache(CONFIG, capacity, layout=layout)
    size = pages * PAGE_BYTES // (2 if layout == InterleavedPages(Scheme.FLOAT16) else 1)
    assert cache.nbytes == estimate_pages_bytes(CONFIG, capacity, layout) == size
    assert all(page.ctypes.data % 64 == 0 for page in cache._pages)
    cache.check_integrity()


def test_no_more_tokens_than_were_asked_for_fit() -> None:
    cache = filled(20, 15)
    cache.ensure_capacity(5)
    with pytest.raises(BudgetError, match="15 of 20 are used"):
        cache.ensure_capacity(6)


def test_rewinding_keeps_the_beginning() -> None:
    cache = filled(40, 30)
    cache.rewind(17)
    assert cache.length == 17
    cache.check_integrity()
    cache.reset()
    assert cache.length == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
@EVERY_LAYOUT
def test_integrity_is_lost_with_one_number_of_a_filled_row(length: int, layout: PageLayout) -> None:
    cache = filled(40, length, layout=layout)
    cache.check_integrity()
    keys, values = rows_of(cache, (length - 1) // KV_PAGE_TOKENS)
    slot = (length - 1) % KV_PAGE_TOKENS
    keys[2, 1, 31, slot] = np.inf
    with pytest.raises(AssertionError):
        cache.check_integrity()
    keys[2, 1, 31, slot] = 0
    values[0, 0, 1, slot, 5] = np.nan
    with pytest.raises(AssertionError):
        cache.check_integrity()


@EVERY_LAYOUT
def test_pages_that_are_shared_come_first_and_cost_nothing(layout: PageLayout) -> None:
    first = filled(40, 33, number=3.0, layout=layout)
    second = PagedKVCache(CONFIG, 50, layout=layout, shared=first._pages[:2])
    assert (second.length, second.capacity) == (32, 50)
    assert second.nbytes == 2 * first.nbytes // 3
    second.check_integrity()
    addresses = (ctypes.c_int64 * 4).from_address(second.table)
    assert list(addresses[:2]) == [page.ctypes.data for page in first._pages[:2]]
    assert addresses[2] != first._pages[2].ctypes.data


def test_a_text_does_not_go_back_into_what_it_shares() -> None:
    first = filled(40, 33)
    second = PagedKVCache(CONFIG, 50, shared=first._pages[:2])
    second.advance(5)
    for length in (36, 32, 31, 0):
        second.rewind(length)
        assert second.length == max(length, 32)


def test_a_text_may_begin_to_share_what_it_has_written_and_reads_it_elsewhere() -> None:
    first, second = filled(40, 33), filled(50, 40, number=3.0)
    table, before = second.table, second.nbytes
    second.use_shared_pages(first.list_full_pages())
    assert (second.table, second.length) == (table, 40)
    assert second.nbytes == before - 2 * first.nbytes // 3
    addresses = (ctypes.c_int64 * 4).from_address(table)
    assert list(addresses[:2]) == [page.ctypes.data for page in first.list_full_pages()]
    second.check_integrity()
    with pytest.raises(AssertionError, match="only what is written"):
        second.use_shared_pages(filled(60, 50).list_full_pages())


@EVERY_LAYOUT
def test_rows_of_a_page_are_copied_behind_those_that_are_shared(layout: PageLayout) -> None:
    first = filled(40, 33, number=3.0, layout=layout)
    second = PagedKVCache(CONFIG, 50, layout=layout, shared=first._pages[:1])
    second.copy_rows(first._pages[1], 9)
    assert second.length == 25
    second.check_integrity()
    first._pages[1][...] = 0
    keys, values = rows_of(second, 1)
    assert (keys == 3).all()
    assert (values == 3).all()
    with pytest.raises(BudgetError):
        PagedKVCache(CONFIG, 20, shared=first._pages[:1]).copy_rows(first._pages[1], 5)


def test_who_has_handed_over_its_pages_writes_no_more() -> None:
    cache = filled(40, 18)
    pages = cache.take_pages()
    assert [page.nbytes for page in pages] == [PAGE_BYTES] * 3
    assert (cache.nbytes, cache.length, cache.capacity) == (0, 0, 0)
    cache.check_integrity()
    with pytest.raises(BudgetError):
        cache.ensure_capacity(1)


def test_a_page_is_found_by_its_address() -> None:
    cache = filled(40, 33, number=7.0)
    addresses = (ctypes.c_int64 * 3).from_address(cache.table)
    last = (ctypes.c_float * 16).from_address(addresses[2])
    assert last[0] == 7.0  # key dimension 0 of token 32 in the first layer and head
    assert np.isnan(last[1])


def test_a_text_gets_pages_as_it_grows_and_its_list_of_addresses_stays_where_it_is() -> None:
    asked = list[int]()
    cache = PagedKVCache(CONFIG, 60, initial_tokens=17, on_growth=asked.append)
    address = cache.table
    assert (len(cache._pages), cache.nbytes) == (2, 2 * PAGE_BYTES)
    cache.ensure_capacity(32)
    assert asked == []
    cache.advance(32)
    cache.ensure_capacity(1)
    assert (asked, cache.nbytes) == ([PAGE_BYTES], 3 * PAGE_BYTES)
    cache.ensure_capacity(28)
    assert (asked, len(cache._pages)) == ([PAGE_BYTES, PAGE_BYTES], 4)
    assert cache.table == address
    addresses = (ctypes.c_int64 * 4).from_address(address)
    assert list(addresses) == [page.ctypes.data for page in cache._pages]
    with pytest.raises(BudgetError, match="32 of 60"):
        cache.ensure_capacity(29)


def test_where_no_page_is_to_be_had_nothing_changes() -> None:
    def more(_: int) -> None:
        raise BudgetError("none")

    cache = PagedKVCache(CONFIG, 60, initial_tokens=16, on_growth=more)
    cache.advance(16)
    with pytest.raises(BudgetError, match="none"):
        cache.ensure_capacity(1)
    assert (len(cache._pages), cache.length, cache.capacity) == (1, 16, 60)
