"""What counts as arithmetic is arithmetic that was done: its sums say how much."""

import pytest

from expertctl.engine.kernels.microbenchmarks import PeakArithmetic
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool


@pytest.mark.parametrize("scheme", Scheme, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_sums_hold_a_product_for_every_two_operations(scheme: Scheme, workers: int) -> None:
    arithmetic = PeakArithmetic(scheme, workers=workers)
    assert arithmetic.products_added == 0
    crew = ThreadPool(workers)
    try:
        crew.run(arithmetic.program)
    finally:
        crew.close()
    assert 2 * arithmetic.products_added == arithmetic.operations
