import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.routing.bert import erf, gelu, softmax


def test_erf_is_that_of_the_standard_library() -> None:
    x = np.linspace(-6, 6, 20001, dtype=np.float32)
    expected = np.array([math.erf(value) for value in x.tolist()])
    assert np.abs(erf(x) - expected).max() < 4e-7
    assert np.allclose(erf(np.array([-1e30, 1e30, 0], np.float32)), [-1, 1, 0], atol=4e-7)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=40))
def test_gelu_and_softmax_are_those_of_torch(values: list[float]) -> None:
    x = np.array(values, np.float32)
    expected = torch.nn.functional.gelu(torch.tensor(values)).numpy()
    assert np.allclose(gelu(x), expected, atol=5e-6)
    assert np.allclose(softmax(x), torch.softmax(torch.tensor(values), -1).numpy(), atol=1e-6)
