"""A stack of experts: each in its row, the dummy that makes nothing, many who fill it at a time."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.steps import EMPTY_DELTAS
from expertctl.engine.torch.expert_stack import (
    DUMMY_ROW,
    STAGING_BUFFERS,
    ExpertStack,
    StackShape,
    estimate_stack_bytes,
    estimate_staging_bytes,
)

SHAPE = StackShape(hidden=16, intermediate=24, dtype=torch.float32)
BLOCKS = 9


def drawn(number: int) -> np.ndarray[Any, Any]:
    numbers = np.random.default_rng(number).standard_normal(3 * 16 * 24, np.float32)
    return numbers.view(np.uint8)


@pytest.fixture
def stack() -> ExpertStack:
    """All of its blocks are filled, by more threads than there are buffers."""
    stack = ExpertStack(SHAPE, blocks=BLOCKS, device=torch.device("cpu"))

    def fill(number: int) -> int:
        def read(block: np.ndarray[Any, Any]) -> int:
            block[...] = drawn(number)
            return number

        return stack.fill(number, read)

    with ThreadPoolExecutor(2 * STAGING_BUFFERS) as pool:
        assert list(pool.map(fill, range(BLOCKS))) == list(range(BLOCKS))
    return stack


def test_each_expert_is_in_its_row_and_no_other_in_that_of_the_dummy(stack: ExpertStack) -> None:
    for number in range(BLOCKS):
        gate_up, down = SHAPE.split(torch.from_numpy(drawn(number)))
        row = stack.locate(number)
        assert row != DUMMY_ROW
        assert torch.equal(stack.gate_up[row], gate_up)
        assert torch.equal(stack.down[row], down)
    assert not stack.gate_up[DUMMY_ROW].any()
    assert not stack.down[DUMMY_ROW].any()


def test_what_tokens_chose_is_what_their_experts_make_and_of_the_dummy_zero(
    stack: ExpertStack,
) -> None:
    x, rows = torch.randn(5, 16), torch.randint(1 + BLOCKS, (5, 3))
    rows[0, 1] = rows[4] = DUMMY_ROW
    made = stack.apply(x, rows)
    for token, chosen in enumerate(rows.tolist()):
        for place, row in enumerate(chosen):
            theirs = stack.expert(row, "m")(x[token][None], EMPTY_DELTAS)[0]
            assert float((made[token, place] - theirs).abs().max()) <= 1e-4
    assert not made[rows == DUMMY_ROW].any()


def test_a_buffer_comes_back_where_reading_failed(stack: ExpertStack) -> None:
    def failing(_: np.ndarray[Any, Any]) -> int:
        raise OSError("gone")

    for _ in range(2 * STAGING_BUFFERS):
        with pytest.raises(OSError, match="gone"):
            stack.fill(0, failing)
    assert stack.fill(0, lambda block: block.nbytes) == SHAPE.nbytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_its_bytes_are_known_before(dtype: torch.dtype) -> None:
    shape = StackShape(hidden=16, intermediate=24, dtype=dtype)
    stack = ExpertStack(shape, blocks=4, device=torch.device("cpu"))
    assert stack.nbytes == estimate_stack_bytes(shape, blocks=4) == 5 * 3 * 16 * 24 * dtype.itemsize
    assert estimate_staging_bytes(shape) >= STAGING_BUFFERS * shape.nbytes
    mixtral = StackShape(hidden=4096, intermediate=14336, dtype=torch.bfloat16)
    assert estimate_staging_bytes(mixtral) == STAGING_BUFFERS * (512 << 20), (
        "336 MiB, by powers of two"
    )
