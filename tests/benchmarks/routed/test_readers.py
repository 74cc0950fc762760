"""Readers of experts that are not on the device."""

import ctypes
from pathlib import Path

import numpy as np

from benchmarks.routed.expert_sources import MemoryExperts, UncachedExperts
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.package.base_tensors import read_base_tensors
from tests.benchmarks.routed.conftest import SHAPE


def test_both_read_the_blocks_of_the_base(directory: Path) -> None:
    config = SHAPE.make_config()
    base = load_packed_base(directory, config, Scheme.BFLOAT16)
    files = UncachedExperts(read_base_tensors(directory, config), config, Scheme.BFLOAT16)
    for reader in (files, MemoryExperts(base.experts)):
        for key, expected in base.experts.items():
            block = np.zeros_like(expected)
            assert reader.read(*key, block) == 3 * 32 * 128 * 2
            assert np.array_equal(block, expected)


def test_an_expert_in_memory_lies_at_its_address(directory: Path) -> None:
    base = load_packed_base(directory, SHAPE.make_config(), Scheme.BFLOAT16)
    reader = MemoryExperts(base.experts)
    for key, expected in base.experts.items():
        found = (ctypes.c_uint8 * len(expected)).from_address(reader.find_cached_address(*key))
        assert np.array_equal(np.frombuffer(found, np.uint8), expected)
