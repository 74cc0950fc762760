import tracemalloc
from typing import Any

import numba
import numpy as np
import pytest
import torch

from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.result import count_allocations, get_heap_bytes
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import MakeReferenceModel
from tests.engine.kernels.sample_programs import make_array_program, make_count_kernel
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.packing import pack_base

MEBIBYTE = 1 << 20
SMALL = 12 << 10
"""Numbers and tuples of a call; the rows of the model below have 16 KiB, its scores too."""


def test_nothing_is_found_where_nothing_is_done() -> None:
    with count_allocations():  # what measuring itself needs the first time
        pass
    with count_allocations() as found:
        pass
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert not tracemalloc.is_tracing()


def test_arrays_of_numpy_are_found_even_if_they_are_gone() -> None:
    with count_allocations() as found:
        np.zeros(MEBIBYTE, np.uint8)
    assert MEBIBYTE <= found.python_bytes < 1.25 * MEBIBYTE


def test_arrays_of_compiled_code_are_found_even_if_they_are_gone() -> None:
    @numba.njit
    def make(count: Any) -> Any:  # pragma: no cover (compiled)
        return np.ones(count).sum()

    make(9)
    with count_allocations() as found:
        assert make(9) == 9.0
    assert found.compiled_arrays == 1


@pytest.mark.skipif(get_heap_bytes() == 0, reason="the C library does not say what it gave out")
def test_tensors_that_stay_are_found() -> None:
    with count_allocations() as found:
        tensor = torch.ones(4 * MEBIBYTE, dtype=torch.uint8)
    assert found.native_bytes >= tensor.nbytes


def test_tracing_that_was_on_stays_on() -> None:
    tracemalloc.start()
    try:
        kept = bytes(MEBIBYTE)
        with count_allocations() as found:
            assert np.zeros(SMALL, np.uint8).sum() == 0
        assert tracemalloc.is_tracing()
        assert SMALL <= found.python_bytes < MEBIBYTE == len(kept)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_allocates_nothing(workers: int) -> None:
    crew = ThreadPool(3)
    program = make_array_program(make_count_kernel(), np.zeros(5000, np.int64), operations=50)

    def run() -> None:
        for _ in range(200):
            crew.run(program, workers=workers)

    found = count_fewest_allocations(run, before=lambda: crew.run(program, workers=workers))
    crew.close()
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert found.native_bytes < MEBIBYTE // 8


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT8])
def test_a_decode_step_allocates_no_row_of_the_model(
    scheme: Scheme, oracle: MakeReferenceModel
) -> None:
    model = oracle("qwen3", vocab_size=4096, head_dim=16, hidden_size=4096)
    config = read_model_config(model.directory)
    crew, cache = ThreadPool(2), PagedKVCache(config, 500)
    decoder = PackedDecoder(
        pack_base(config, load_base_weights(model.directory, config), scheme), crew
    )
    scores = np.empty(config.vocab_size, np.float32)
    decoder.prefill([1, 2, 3], cache)
    decoder.decode(4, cache, out=scores)

    def decode() -> None:
        for token in range(100):
            decoder.decode(token, cache, out=scores)

    found = count_fewest_allocations(decode)
    crew.close()
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert found.native_bytes < MEBIBYTE // 8  # a row a step would be more than one
