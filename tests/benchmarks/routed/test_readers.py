"""Readers of experts that are not on the device."""

import ctypes
from pathlib import Path

import numpy as np

from benchmarks.routed.readers import LentExperts, UncachedExperts
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_load import load_packed_base
from expertctl.package.base_tensors import base_tensors
from tests.benchmarks.routed.conftest import SHAPE


def test_both_read_the_blocks_of_the_base(directory: Path) -> None:
    config = SHAPE.config()
    base = load_packed_base(directory, config, Scheme.BFLOAT16)
    files = UncachedExperts(base_tensors(directory, config), config, Scheme.BFLOAT16)
    for reader in (files, LentExperts(base.experts)):
        for key, expected in base.experts.items():
            block = np.zeros_like(expected)
            assert reader.read(*key, block) == 3 * 32 * 128 * 2
            assert np.array_equal(block, expected)


def test_what_is_lent_lies_where_it_is_said_to_lie(directory: Path) -> None:
    base = load_packed_base(directory, SHAPE.config(), Scheme.BFLOAT16)
    reader = LentExperts(base.experts)
    for key, expected in base.experts.items():
        found = (ctypes.c_uint8 * len(expected)).from_address(reader.lend(*key))
        assert np.array_equal(np.frombuffer(found, np.uint8), expected)
