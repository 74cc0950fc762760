"""Pages of keys and values: room, rewinding, copies, and what the check of integrity sees."""

import ctypes

import numpy as np
import pytest

from expertctl.engine.kernels.heads import PAGE
from expertctl.engine.kv_pages import KVPages
from expertctl.errors import BudgetError
from expertctl.package.model_config import ModelConfig
from expertctl.package.rope_config import RopeConfig

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


def filled(capacity: int, length: int, *, number: float = 1.0) -> KVPages:
    """Pages of which every row up to ``length`` is a number, and every other is not one."""
    cache = KVPages(CONFIG, capacity)
    for place, page in enumerate(cache._pages):
        rows = page.view(np.float32).reshape(3, 2, 2, -1)
        rows[...] = np.nan
        there = max(min(length - place * PAGE, PAGE), 0)
        rows[:, 0].reshape(3, 2, 32, PAGE)[..., :there] = number
        rows[:, 1].reshape(3, 2, 2, PAGE, PAGE)[..., :there, :] = number
    cache.advance(length)
    return cache


@pytest.mark.parametrize(("capacity", "pages"), [(1, 1), (16, 1), (17, 2), (40, 3)])
def test_memory_is_that_of_whole_pages(capacity: int, pages: int) -> None:
    cache = KVPages(CONFIG, capacity)
    assert cache.nbytes == pages * PAGE_BYTES
    assert all(page.ctypes.data % 64 == 0 for page in cache._pages)
    cache.check_integrity()


def test_no_more_tokens_than_were_asked_for_fit() -> None:
    cache = filled(20, 15)
    cache.require(5)
    with pytest.raises(BudgetError, match="15 of 20 are used"):
        cache.require(6)


def test_rewinding_keeps_the_beginning() -> None:
    cache = filled(40, 30)
    cache.rewind(17)
    assert cache.length == 17
    cache.check_integrity()
    cache.reset()
    assert cache.length == 0


@pytest.mark.parametrize("length", [1, 15, 16, 17, 33])
def test_integrity_is_lost_with_one_number_of_a_filled_row(length: int) -> None:
    cache = filled(40, length)
    cache.check_integrity()
    page = cache._pages[(length - 1) // PAGE].view(np.float32).reshape(3, 2, 2, -1)
    slot = (length - 1) % PAGE
    page[2, 0].reshape(2, 32, PAGE)[1, 31, slot] = np.inf
    with pytest.raises(AssertionError):
        cache.check_integrity()
    page[2, 0].reshape(2, 32, PAGE)[1, 31, slot] = 0
    page[0, 1].reshape(2, 2, PAGE, PAGE)[0, 1, slot, 5] = np.nan
    with pytest.raises(AssertionError):
        cache.check_integrity()


def test_a_copy_is_its_own_and_may_have_another_size() -> None:
    first = filled(40, 18, number=3.0)
    second = filled(25, 9, number=5.0)
    second.copy_from(first)
    assert second.length == 18
    second.check_integrity()
    for page, other in zip(first._pages[:2], second._pages, strict=True):
        assert page.tobytes() == other.tobytes()
    first._pages[0][...] = 0
    assert second._pages[0].any()


def test_a_copy_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BudgetError):
        KVPages(CONFIG, 17).copy_from(filled(40, 18))


def test_a_page_is_found_by_its_address() -> None:
    cache = filled(40, 33, number=7.0)
    addresses = (ctypes.c_int64 * 3).from_address(cache.table)
    last = (ctypes.c_float * 16).from_address(addresses[2])
    assert last[0] == 7.0  # key dimension 0 of token 32 in the first layer and head
    assert np.isnan(last[1])
