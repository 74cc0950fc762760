"""Rotary positions: the tables of cosines and sines, and turning vectors by them."""

import math

import torch
from torch import Tensor

from expertctl.package.rope_config import LinearScaling, Llama3Scaling, RopeConfig, YarnScaling


def inverse_frequencies(config: RopeConfig, *, device: torch.device | str = "cpu") -> Tensor:
    """Return the angle per position of each pair of dimensions: float32, [dims / 2]."""
    exponents = torch.arange(0, config.dims, 2, dtype=torch.float32, device=device) / config.dims
    plain = 1.0 / (config.theta**exponents)
    match config.scaling:
        case None:
            return plain
        case LinearScaling(factor):
            return plain / factor
        case Llama3Scaling() as scaling:
            return _llama3(plain, scaling)
        case YarnScaling() as scaling:
            return _yarn(plain, scaling, config)


def rotation_table(config: RopeConfig, positions: int, *, device: torch.device | str) -> Tensor:
    """Return cosines and sines, float32 [2, positions, dims], each half of the dims repeated."""
    angles = torch.outer(
        torch.arange(positions, dtype=torch.float32, device=device),
        inverse_frequencies(config, device=device),
    )
    half = config.dims // 2
    table = torch.empty(2, positions, config.dims, device=device)
    for rows, function in zip(table, (torch.cos, torch.sin), strict=True):
        rows[:, :half] = function(angles)
        rows[:, half:] = rows[:, :half]
    return table.mul_(config.attention)


def table_positions(length: int) -> int:
    """Return how many positions a table has that must reach ``length``."""
    return 1 << (length - 1).bit_length()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn vectors by their positions: [heads, tokens, dims] with tables of [tokens, dims]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _llama3(plain: Tensor, scaling: Llama3Scaling) -> Tensor:
    """As in Llama 3.1's reference code."""
    wavelength = 2 * math.pi / plain
    scaled = torch.where(wavelength > scaling.original / scaling.low, plain / scaling.factor, plain)
    smooth = (scaling.original / wavelength - scaling.low) / (scaling.high - scaling.low)
    medium = (wavelength >= scaling.original / scaling.high) & (
        wavelength <= scaling.original / scaling.low
    )
    return torch.where(medium, (1 - smooth) * scaled / scaling.factor + smooth * scaled, scaled)


def _yarn(plain: Tensor, scaling: YarnScaling, config: RopeConfig) -> Tensor:
    """As in the YaRN paper (arXiv:2309.00071), section 3."""
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
    steps = torch.arange(config.dims // 2, dtype=torch.float32, device=plain.device)
    ramp = ((steps - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)
