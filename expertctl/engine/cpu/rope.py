"""Rotary positions in numpy: frequencies of every scaling, tables of angles, and the rotation.

Frequencies are computed in float64 where they are powers, and rounded to float32 as the reference
implementations hold them. A vector is rotated in pairs of a dimension of its first half and the
same one of its second half, or in pairs of neighbours, which are *interleaved*. The table may be
for the first dimensions of a vector only.
"""

import math
from dataclasses import dataclass

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.package.attention_config import (
    AlphaScaling,
    LinearScaling,
    Llama3Scaling,
    LongropeScaling,
    RopeConfig,
    YarnScaling,
)
from expertctl.package.varied_layers import ProportionalScaling

_FLOAT_BYTES = 4


def compute_inverse_frequencies(config: RopeConfig) -> AnyArray:
    """Return the angle per position of each pair of dimensions: float32, [dims / 2]."""
    exponents = np.arange(0, config.dims, 2, dtype=np.float32) / np.float32(config.dims)
    powers = np.float64(config.theta) ** exponents.astype(np.float64)
    plain = np.float32(1) / powers.astype(np.float32)
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / np.float32(factor)
        case Llama3Scaling() as scaling:
            return _scale_llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _scale_yarn(plain, scaling, config)
        case AlphaScaling(alpha):
            stretched = config.theta * alpha ** (config.dims / (config.dims - 2))
            powers = np.float64(stretched) ** exponents.astype(np.float64)
            return np.float32(1) / powers.astype(np.float32)
        case LongropeScaling() as scaling:
            return plain / np.array(scaling.short, np.float32)
        case ProportionalScaling(pairs, factor):
            plain[pairs:] = 0
            return plain / np.float32(factor)


def _scale_llama3(plain: AnyArray, scaling: Llama3Scaling) -> AnyArray:
    """Scale as Llama 3.1's reference code does."""
    wavelength = 2 * math.pi / plain
    scaled = np.where(wavelength > scaling.original / scaling.low, plain / scaling.factor, plain)
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    medium = (wavelength >= scaling.original / scaling.high) & (
        wavelength <= scaling.original / scaling.low
    )
    found: AnyArray = np.where(
        medium, (1 - smooth) * scaled / scaling.factor + smooth * scaled, scaled
    ).astype(np.float32)
    return found


def _scale_yarn(plain: AnyArray, scaling: YarnScaling, config: RopeConfig) -> AnyArray:
    """Scale as in the YaRN paper (arXiv:2309.00071), section 3."""
    low, high = (
        config.dims
        * math.log(scaling.original / (rotations * 2 * math.pi))
        / (2 * math.log(config.theta))
        for rotations in (scaling.beta_fast, scaling.beta_slow)
    )
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.dims - 1)
    if low == high:
        high += 0.001
    steps = np.arange(config.dims // 2, dtype=np.float32)
    ramp = np.clip((steps - low) / (high - low), 0, 1)
    found: AnyArray = (plain / scaling.factor * ramp + plain * (1 - ramp)).astype(np.float32)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class RotationTable:
    """Cosines [positions, dims] and signed sines [positions, 2, dims / 2] of rotary positions.

    Interleaved sines are [positions, dims / 2, 2].
    """

    cos: AnyArray
    sin: AnyArray
    interleaved: bool = False

    @property
    def positions(self) -> int:
        """Number of positions."""
        return len(self.cos)

    def slice(self, begin: int, end: int) -> "RotationTable":
        """Return the table of some positions, as views."""
        return RotationTable(self.cos[begin:end], self.sin[begin:end], self.interleaved)


def compute_rotation_table(
    config: RopeConfig, positions: int, *, interleaved: bool = False
) -> RotationTable:
    """Return the table of the first positions; halves of the dims have the same angles."""
    angles = np.outer(np.arange(positions, dtype=np.float32), compute_inverse_frequencies(config))
    half = config.dims // 2
    cos = np.empty((positions, config.dims), np.float32)
    sin = np.empty((positions, 2, half), np.float32)
    np.cos(angles, out=cos[:, :half])
    np.sin(angles, out=sin[:, 1])
    cos[:, :half] *= np.float32(config.attention)
    sin[:, 1] *= np.float32(config.attention)
    cos[:, half:] = cos[:, :half]
    np.negative(sin[:, 1], out=sin[:, 0])
    if interleaved:
        order = np.arange(config.dims).reshape(2, half).T.ravel()
        return RotationTable(cos[:, order], sin.swapaxes(1, 2).copy(), interleaved=True)
    return RotationTable(cos, sin)


def rotation_table_bytes(dims: int, positions: int) -> int:
    """Return the maximum bytes while a table is computed."""
    return _FLOAT_BYTES * positions * (2 * dims + dims)


def rotate(x: AnyArray, table: RotationTable) -> AnyArray:
    """Rotate vectors by their positions: [tokens, heads, dims] -> the same shape."""
    tokens, heads, dims = x.shape
    if table.interleaved:
        swapped = x.reshape(tokens, heads, dims // 2, 2)[..., ::-1]
        found = x * table.cos[:, None]
        found += (swapped * table.sin[:, None]).reshape(tokens, heads, dims)
        return found
    swapped = x.reshape(tokens, heads, 2, dims // 2)[:, :, ::-1]
    found = x * table.cos[:, None]
    found += (swapped * table.sin[:, None]).reshape(tokens, heads, dims)
    return found


def rotate_first(x: AnyArray, table: RotationTable | None) -> AnyArray:
    """Rotate the first dimensions of vectors [tokens, heads, dims], those of the table, or none."""
    found = x.copy()
    if table is not None:
        dims = table.cos.shape[1]
        found[..., :dims] = rotate(x[..., :dims], table)
    return found
