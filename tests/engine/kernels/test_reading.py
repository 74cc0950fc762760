"""Reading memory reads all of it, whoever reads."""

import numpy as np
import pytest

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.packed import PackedMatrix, pack
from expertctl.engine.kernels.reading import ITEM_BYTES, Reading
from expertctl.engine.kernels.scheme import Scheme


def matrix(rows: int, *, seed: int) -> PackedMatrix:
    rng = np.random.default_rng(seed)
    return pack(rng.standard_normal((rows, 512), np.float32), Scheme.FLOAT32)


@pytest.mark.parametrize("workers", [1, 2])
def test_what_is_read_is_every_word_of_every_matrix(workers: int) -> None:
    matrices = [matrix(640, seed=0), matrix(64, seed=1)]
    assert all(each.data.nbytes % ITEM_BYTES == 0 for each in matrices)
    expected = np.bitwise_xor.reduce(np.concatenate([each.data for each in matrices]).view("<i8"))
    crew = Crew(workers)
    try:
        assert Reading(matrices).run(crew) == expected
    finally:
        crew.close()


def test_scales_are_read_too() -> None:
    rng = np.random.default_rng(2)
    numbers = pack(rng.standard_normal((2048, 1024), np.float32), Scheme.INT4)
    assert numbers.scales.nbytes == ITEM_BYTES
    both = np.concatenate([each.reshape(-1).view("<i8") for each in (numbers.data, numbers.scales)])
    crew, reading = Crew(1), Reading([numbers])
    assert reading.run(crew) == np.bitwise_xor.reduce(both)
    assert reading.nbytes == numbers.nbytes
