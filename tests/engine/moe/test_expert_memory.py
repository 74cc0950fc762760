"""Whose block is given to the next expert."""

import itertools
from dataclasses import replace

import pytest

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.expert_memory import Expert, ExpertMemory, HostBlockStorage


@pytest.fixture
def memory() -> ExpertMemory:
    """Three blocks, which hold three experts of two layers without a slot."""
    memory = ExpertMemory(ExpertShape(Scheme.FLOAT32, 16, 16), layers=2, experts=4, blocks=3)
    for expert in ((0, 1), (1, 1), (0, 2)):
        put(memory, expert)
    return memory


def put(memory: ExpertMemory, expert: Expert) -> None:
    number = memory.take_block(())
    assert number is not None
    memory.add(expert, number)


def list_mapped(memory: ExpertMemory) -> set[Expert]:
    memory.check_integrity()
    return {(n, e) for n in range(2) for e in range(4) if (n, e) in memory}


def test_of_equals_who_was_used_longest_ago_gives_his_block(memory: ExpertMemory) -> None:
    memory.touch([(0, 1)])
    put(memory, (1, 3))
    assert list_mapped(memory) == {(0, 1), (0, 2), (1, 3)}


def test_who_is_worth_least_in_any_layer_gives_his_block(memory: ExpertMemory) -> None:
    memory.worths[:] = 2
    memory.worths[0, 2] = 1
    put(memory, (1, 3))
    assert list_mapped(memory) == {(0, 1), (1, 1), (1, 3)}


def test_neither_who_is_spared_nor_who_has_a_slot_gives_his_block(memory: ExpertMemory) -> None:
    memory.worths[:] = 2
    memory.worths[0, 1:3] = 1, 0
    memory.assign_slot((0, 2))
    number = memory.take_block({(0, 1)})
    assert number is not None
    memory.release_block(number)
    assert memory.take_block({(0, 1)}) == number
    assert memory.take_block({(0, 1)}) is None


def test_memory_has_room_for_as_many_compact_experts_as_fit() -> None:
    shape = ExpertShape(Scheme.BFLOAT16, 128, 128)
    small = replace(shape, compact_bytes=shape.nbytes * 3 // 4)
    for each, most, count in ((shape, 99, 12), (small, 99, 16), (small, 14, 14)):
        blocks = HostBlockStorage.from_budget(12 * shape.nbytes, each, max_count=most)
        assert len(blocks) == count
        assert blocks.nbytes == 12 * shape.nbytes, "what was announced"
        places = [blocks.locate(number) for number in range(count)]
        steps = {after - before for before, after in itertools.pairwise(places)}
        assert steps == {each.block_bytes}
