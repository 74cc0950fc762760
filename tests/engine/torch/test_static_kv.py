"""Rows of an arena: caches like any other, in memory that is one block."""

import pytest
import torch

from expertctl.engine.torch.cuda_graph_step import StaticKVCache, estimate_static_kv_bytes
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import BudgetError
from tests.engine.torch.test_kv_cache import config, rows


def arena(
    *, count: int = 3, capacity: int = 6, dtype: torch.dtype = torch.float32
) -> StaticKVCache:
    return StaticKVCache(
        config(), rows=count, capacity=capacity, dtype=dtype, device=torch.device("cpu")
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_takes_what_was_announced(dtype: torch.dtype) -> None:
    whole = arena(dtype=dtype)
    assert whole.nbytes == 2 * 2 * 3 * 2 * 7 * 4 * dtype.itemsize
    assert whole.nbytes == estimate_static_kv_bytes(config(), capacity=6, dtype=dtype, rows=3)
    assert sum(whole.get_row(number).nbytes for number in range(3)) == whole.nbytes


def test_keys_and_values_are_one_allocation() -> None:
    whole = arena()
    keys, values = whole.keys.untyped_storage(), whole.values.untyped_storage()
    assert keys.data_ptr() == values.data_ptr()
    assert keys.nbytes() == whole.nbytes
    assert whole.keys.is_contiguous()
    assert whole.values.is_contiguous()


def test_a_row_is_written_where_steps_look_for_it_and_nowhere_else() -> None:
    whole = arena()
    whole.keys.zero_()
    row = whole.get_row(1)
    row.write(0, rows(2, 1.0), rows(2, 50.0))
    row.advance(2)
    keys, _ = row.write(0, rows(1, 7.0), rows(1, 8.0))
    assert torch.equal(whole.keys[0, 1, :, :2], rows(2, 1.0))
    assert torch.equal(whole.values[0, 1, :, :2], rows(2, 50.0))
    assert torch.equal(keys, whole.keys[0, 1, :, :3])
    assert not whole.keys[:, [0, 2]].any()


def test_its_last_place_is_nobodys() -> None:
    row = arena(capacity=3).get_row(0)
    row.ensure_capacity(3)
    with pytest.raises(BudgetError, match="4 more tokens"):
        row.ensure_capacity(4)


def test_what_was_kept_is_copied_between_arenas() -> None:
    row, larger = arena().get_row(0), arena(capacity=9).get_row(2)
    for layer in range(2):
        row.write(layer, rows(4, layer), rows(4, 9.0))
    row.advance(4)
    assert isinstance(larger, KVCache)
    larger.copy_from(row, 4)
    assert larger.length == 4
    assert torch.equal(larger._keys[:, :, :4], row._keys[:, :, :4])
    larger.check_integrity()
