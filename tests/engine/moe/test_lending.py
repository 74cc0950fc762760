"""Who is computed where he lies, and who has to be read."""

import numpy as np
import pytest

from expertctl.engine.kernels.expert_block import ExpertShape
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory, Numbers
from expertctl.engine.moe.lending import Lending
from expertctl.store.copy_file import always

NUMBERS = (1, 4)
"""Of routed layers in the base."""


class Half:
    """Lends experts with even numbers; the address says who it is."""

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        return block.nbytes

    def lend(self, layer: int, expert: int) -> int | None:
        return 100 * layer + expert + 1 if expert % 2 == 0 else None


@pytest.fixture
def memory() -> ExpertMemory:
    return ExpertMemory(ExpertShape(Scheme.FLOAT32, 16, 16), layers=2, experts=8, blocks=3)


def put(memory: ExpertMemory, expert: tuple[int, int]) -> None:
    block = memory.take(())
    assert block is not None
    memory.put(expert, block)


def test_who_can_be_lent_is_and_the_others_have_to_be_read(memory: ExpertMemory) -> None:
    lending = Lending(memory, Half(), NUMBERS)
    put(memory, (1, 6))
    put(memory, (1, 7))
    assert lending.rest([(1, 2), (1, 3), (1, 6), (1, 7), (0, 5)]) == [(1, 3), (0, 5)]
    assert memory.places[1, 2] == 403
    assert memory.hits[1].tolist() == [0, 0, 1, 0, 0, 0, 1, 1]
    assert memory.held(1).tolist() == [0, 0, 0, 0, 0, 0, 1, 1], "who is lent has no block"
    assert (lending.can((0, 2)), lending.can((0, 3))) == (True, False)


def test_of_those_who_are_asked_for_the_lent_are_counted(memory: ExpertMemory) -> None:
    lending = Lending(memory, Half(), NUMBERS)
    put(memory, (0, 6))
    assert lending.rest([(0, 4)]) == []
    assert lending.lent == 0, "he was foreseen"
    assert lending.rest_of_asked([(0, 2), (0, 3), (0, 4), (0, 6)]) == [(0, 3)]
    assert lending.lent == 2
    memory.end_lending()
    assert not memory.places[0, [2, 4]].any()
    assert np.array_equal(memory.held(0), memory.hits[0])


def test_who_gets_a_block_is_lent_no_more(memory: ExpertMemory) -> None:
    lending = Lending(memory, Half(), NUMBERS)
    assert lending.rest([(0, 2)]) == []
    put(memory, (0, 2))
    assert memory.held(0)[2] == 1
    memory.end_lending()
    assert memory.held(0)[2] == 1
