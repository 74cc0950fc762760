import tracemalloc
from typing import Any

import numba
import numpy as np
import pytest
import torch

from expertctl.engine.allocations import allocations, heap_bytes
from expertctl.engine.base_weights import load_base
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.packed_base import pack_base
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.package.model_config import read_config
from tests.engine.conftest import MakeOracle
from tests.engine.kernels.programs import count_kernel, on_one_array
from tests.engine.measured import fewest_allocations

MEBIBYTE = 1 << 20
SMALL = 12 << 10
"""Numbers and tuples of a call; the rows of the model below have 16 KiB, its scores too."""


def test_nothing_is_found_where_nothing_is_done() -> None:
    with allocations():  # what measuring itself needs the first time
        pass
    with allocations() as found:
        pass
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert not tracemalloc.is_tracing()


def test_arrays_of_numpy_are_found_even_if_they_are_gone() -> None:
    with allocations() as found:
        np.zeros(MEBIBYTE, np.uint8)
    assert MEBIBYTE <= found.python_bytes < 1.25 * MEBIBYTE


def test_arrays_of_compiled_code_are_found_even_if_they_are_gone() -> None:
    @numba.njit
    def make(count: Any) -> Any:  # pragma: no cover (compiled)
        return np.ones(count).sum()

    make(9)
    with allocations() as found:
        assert make(9) == 9.0
    assert found.compiled_arrays == 1


@pytest.mark.skipif(heap_bytes() == 0, reason="the C library does not say what it gave out")
def test_tensors_that_stay_are_found() -> None:
    with allocations() as found:
        tensor = torch.ones(4 * MEBIBYTE, dtype=torch.uint8)
    assert found.native_bytes >= tensor.nbytes


def test_tracing_that_was_on_stays_on() -> None:
    tracemalloc.start()
    try:
        kept = bytes(MEBIBYTE)
        with allocations() as found:
            assert np.zeros(SMALL, np.uint8).sum() == 0
        assert tracemalloc.is_tracing()
        assert SMALL <= found.python_bytes < MEBIBYTE == len(kept)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("workers", [1, 3])
def test_a_run_allocates_nothing(workers: int) -> None:
    crew = Crew(3)
    program = on_one_array(count_kernel(), np.zeros(5000, np.int64), operations=50)
    with allocations():
        crew.run(program, workers=workers)
    with allocations() as found:
        for _ in range(200):
            crew.run(program, workers=workers)
    crew.close()
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert found.native_bytes < MEBIBYTE // 8


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.INT8])
def test_a_decode_step_allocates_no_row_of_the_model(scheme: Scheme, oracle: MakeOracle) -> None:
    model = oracle("qwen3", vocab_size=4096, head_dim=16, hidden_size=4096)
    config = read_config(model.directory)
    crew, cache = Crew(2), KVPages(config, 500)
    decoder = PackedDecoder(pack_base(config, load_base(model.directory, config), scheme), crew)
    scores = torch.empty(config.vocab_size)
    decoder.prefill([1, 2, 3], cache)
    decoder.decode(4, cache, out=scores)

    def decode() -> None:
        for token in range(100):
            decoder.decode(token, cache, out=scores)

    found = fewest_allocations(decode)
    crew.close()
    assert found.python_bytes < SMALL
    assert found.compiled_arrays == 0
    assert found.native_bytes < MEBIBYTE // 8  # a row a step would be more than one
