"""Reading memory reads all of it, whoever reads."""

import numpy as np
import pytest

from expertctl.engine.kernels.microbenchmarks import ITEM_BYTES, MemoryReadBenchmark
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import PackedMatrix, pack_matrix
from expertctl.engine.kernels.thread_pool import ThreadPool


def matrix(rows: int, *, seed: int) -> PackedMatrix:
    rng = np.random.default_rng(seed)
    return pack_matrix(rng.standard_normal((rows, 512), np.float32), Scheme.FLOAT32)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_read_is_every_word_of_every_matrix(workers: int) -> None:
    matrices = [matrix(640, seed=0), matrix(64, seed=1)]
    assert all(each.data.nbytes % ITEM_BYTES == 0 for each in matrices)
    expected = np.bitwise_xor.reduce(np.concatenate([each.data for each in matrices]).view("<i8"))
    crew = ThreadPool(workers)
    try:
        assert MemoryReadBenchmark(matrices).run(crew) == expected
    finally:
        crew.close()


def test_scales_are_read_too() -> None:
    rng = np.random.default_rng(2)
    numbers = pack_matrix(rng.standard_normal((2048, 512), np.float32), Scheme.INT4)
    assert numbers.scales.nbytes == ITEM_BYTES
    both = np.concatenate([each.reshape(-1).view("<i8") for each in (numbers.data, numbers.scales)])
    crew, reading = ThreadPool(1), MemoryReadBenchmark([numbers])
    assert reading.run(crew) == np.bitwise_xor.reduce(both)
    assert reading.nbytes == numbers.nbytes
