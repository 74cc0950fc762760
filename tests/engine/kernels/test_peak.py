"""What counts as arithmetic is arithmetic that was done: its sums say how much."""

import pytest

from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.peak import Arithmetic
from expertctl.engine.kernels.scheme import Scheme


@pytest.mark.parametrize("scheme", Scheme, ids=lambda scheme: scheme.value)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_sums_hold_a_product_for_every_two_operations(scheme: Scheme, workers: int) -> None:
    arithmetic = Arithmetic(scheme, workers=workers)
    assert arithmetic.added == 0
    crew = Crew(workers)
    try:
        crew.run(arithmetic.program)
    finally:
        crew.close()
    assert 2 * arithmetic.added == arithmetic.operations
