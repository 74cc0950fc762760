"""Rotations of a run, against the table that torch makes."""

import numpy as np
import pytest

from expertctl.engine.kernels.layer_operations import rope_table_arguments, rope_table_kernel
from expertctl.engine.torch.functional import compute_inverse_frequencies, compute_rope_table
from expertctl.package.attention_config import (
    LinearScaling,
    Llama3Scaling,
    RopeConfig,
    RopeScaling,
    YarnScaling,
)

SCALINGS: tuple[RopeScaling | None, ...] = (
    None,
    LinearScaling(4.0),
    Llama3Scaling(factor=8.0, low=1.0, high=4.0, original=64),
    YarnScaling(
        factor=4.0,
        attention_factor=None,
        mscale=0.0,
        mscale_all_dim=0.0,
        beta_fast=32.0,
        beta_slow=1.0,
        original=64,
        truncate=True,
    ),
)


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dims", [16, 64, 128, 256])
def test_rotations_are_those_of_the_table(scaling: RopeScaling | None, dims: int) -> None:
    config = RopeConfig(10_000.0, dims, scaling)
    positions = np.array([0, 1, 5, 63, 64, 1000, 40_000])
    out = np.full((len(positions), 2, dims), np.nan, np.float32)
    frequencies = compute_inverse_frequencies(config).numpy()
    factor = np.array([config.attention], np.float32)
    arguments = rope_table_arguments(
        positions=positions, frequencies=frequencies, factor=factor, out=out
    )
    rope_table_kernel()(0, len(positions), arguments.ctypes.data)
    table = compute_rope_table(config, 40_001, device="cpu").numpy()[:, positions]
    assert np.abs(out - table.transpose(1, 0, 2)).max() < 3e-7
