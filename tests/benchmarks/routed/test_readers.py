"""Readers of experts that are not on the device."""

from pathlib import Path

import numpy as np

from benchmarks.routed.readers import CopiedExperts, UncachedExperts
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.packed_load import load_packed_base
from expertctl.package.base_tensors import base_tensors
from tests.benchmarks.routed.conftest import SHAPE


def test_both_read_the_blocks_of_the_base(directory: Path) -> None:
    config = SHAPE.config()
    base = load_packed_base(directory, config, Scheme.BFLOAT16)
    files = UncachedExperts(base_tensors(directory, config), config, Scheme.BFLOAT16)
    for reader in (files, CopiedExperts(base.experts)):
        for key, expected in base.experts.items():
            block = np.zeros_like(expected)
            assert reader.read(*key, block) == 3 * 32 * 128 * 2
            assert np.array_equal(block, expected)
