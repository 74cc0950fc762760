"""Who is computed where he lies, and who has to be read."""

import numpy as np
import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_loader import PageCacheExperts
from expertctl.engine.moe.expert_memory import ExpertMemory, Numbers
from expertctl.store.quantised_file import always_wanted

NUMBERS = (1, 4)
"""Of routed layers in the base."""


class Half:
    """Lends experts with even numbers; the address says who it is."""

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        return 100 * layer + expert + 1 if expert % 2 == 0 else None


@pytest.fixture
def memory() -> ExpertMemory:
    return ExpertMemory(ExpertShape(Scheme.FLOAT32, 16, 16), layers=2, experts=8, blocks=3)


def put(memory: ExpertMemory, expert: tuple[int, int]) -> None:
    block = memory.take_block(())
    assert block is not None
    memory.add(expert, block)


def test_who_is_in_the_page_cache_is_mapped_and_the_others_have_to_be_read(
    memory: ExpertMemory,
) -> None:
    lending = PageCacheExperts(memory, Half(), NUMBERS)
    put(memory, (1, 6))
    put(memory, (1, 7))
    assert lending.map_cached([(1, 2), (1, 3), (1, 6), (1, 7), (0, 5)]) == [(1, 3), (0, 5)]
    assert memory.places[1, 2] == 403
    assert memory.hits[1].tolist() == [0, 0, 1, 0, 0, 0, 1, 1]
    assert memory.resident_mask(1).tolist() == [0, 0, 0, 0, 0, 0, 1, 1], "who is lent has no block"
    assert (lending.is_cached((0, 2)), lending.is_cached((0, 3))) == (True, False)


def test_of_those_who_are_requested_the_mapped_are_counted(memory: ExpertMemory) -> None:
    lending = PageCacheExperts(memory, Half(), NUMBERS)
    put(memory, (0, 6))
    assert lending.map_cached([(0, 4)]) == []
    assert lending.mapped_requests == 0, "he was foreseen"
    assert lending.map_requested([(0, 2), (0, 3), (0, 4), (0, 6)]) == [(0, 3)]
    assert lending.mapped_requests == 2
    memory.unmap_all()
    assert not memory.places[0, [2, 4]].any()
    assert np.array_equal(memory.resident_mask(0), memory.hits[0])


def test_who_gets_a_block_is_mapped_no_more(memory: ExpertMemory) -> None:
    lending = PageCacheExperts(memory, Half(), NUMBERS)
    assert lending.map_cached([(0, 2)]) == []
    put(memory, (0, 2))
    assert memory.resident_mask(0)[2] == 1
    memory.unmap_all()
    assert memory.resident_mask(0)[2] == 1
