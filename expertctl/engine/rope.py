"""Rotary positions: their settings in both spellings of ``config.json``, and their tables.

Scaling types that change with the length of the text (``dynamic``, ``longrope``) are refused: keys
that were cached at one length would be wrong at another.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from expertctl.engine.config_fields import Fields
from expertctl.errors import IncompatibleError

_DEFAULT_THETA = 10_000.0
_MAX_FACTOR = 1e4
_MAX_POSITIONS = 1 << 24
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a ramp between."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: interpolated and extrapolated frequencies mixed by a ramp, attention rescaled."""

    factor: float
    attention: float
    beta_fast: float
    beta_slow: float
    original: int
    truncate: bool


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base frequency, the dimension of a head, and how frequencies are scaled, if at all."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None

    @property
    def attention(self) -> float:
        """What cosines and sines are multiplied with."""
        return self.scaling.attention if isinstance(self.scaling, YarnScaling) else 1.0


def parse_rope(config: Fields, *, dims: int, max_positions: int) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Raises:
        IncompatibleError: for a scaling type that is not supported.
    """
    name = "rope_parameters" if config.get("rope_scaling") is None else "rope_scaling"
    fields = config.nested(name)
    theta = config.number("rope_theta", low=2.0, high=1e12, default=_DEFAULT_THETA)
    theta = fields.number("rope_theta", low=2.0, high=1e12, default=theta)
    for place in (config, fields):
        if place.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
            place.refuse("partial_rotary_factor", "below 1 is not supported")
    original = _original_positions(config, fields, max_positions)
    return RopeConfig(theta, dims, _scaling(fields, original, max_positions))


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
    """Return for how many positions a table is made that must reach ``length``."""
    return 1 << (length - 1).bit_length()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn vectors by their positions: [heads, tokens, dims] with tables of [tokens, dims]."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def _original_positions(config: Fields, fields: Fields, max_positions: int) -> int:
    """Where it stands at the top level, that wins, as in transformers."""
    name, limits = "original_max_position_embeddings", {"low": 1, "high": _MAX_POSITIONS}
    inner = fields.integer(name, default=max_positions, **limits)
    return config.integer(name, default=inner, **limits)


def _scaling(fields: Fields, original: int, max_positions: int) -> RopeScaling | None:
    kind = fields.text("rope_type", default=fields.text("type", default="default"))
    match kind:
        case "default":
            _only(fields, {"original_max_position_embeddings"})
            return None
        case "linear":
            _only(fields, {"factor"})
            return LinearScaling(fields.number("factor", low=1.0, high=_MAX_FACTOR))
        case "llama3":
            return _parse_llama3(fields, original)
        case "yarn":
            return _parse_yarn(fields, original, max_positions)
        case _ if fields.problems:
            return None
        case _:
            raise IncompatibleError(
                f"RoPE scaling {kind[:40]!r} is not supported",
                hint="supported are default, linear, llama3 and yarn",
            )


def _parse_llama3(fields: Fields, original: int) -> Llama3Scaling:
    _only(
        fields,
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    )
    scaling = Llama3Scaling(
        factor=fields.number("factor", low=1.0, high=_MAX_FACTOR),
        low=fields.number("low_freq_factor", low=1e-3, high=_MAX_FACTOR),
        high=fields.number("high_freq_factor", low=1e-3, high=_MAX_FACTOR),
        original=original,
    )
    if scaling.high <= scaling.low:
        fields.refuse("high_freq_factor", "must be greater than low_freq_factor")
    return scaling


def _parse_yarn(fields: Fields, original: int, max_positions: int) -> YarnScaling:
    names = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    _only(fields, names | {"truncate", "original_max_position_embeddings"})
    stretch = min(max(max_positions / original, 1.0), _MAX_FACTOR)
    factor = fields.number("factor", low=1.0, high=_MAX_FACTOR, default=stretch)
    return YarnScaling(
        factor=factor,
        attention=_yarn_attention(fields, factor),
        beta_fast=fields.number("beta_fast", low=0.0, high=1e4, default=32.0) or 32.0,
        beta_slow=fields.number("beta_slow", low=0.0, high=1e4, default=1.0) or 1.0,
        original=original,
        truncate=fields.boolean("truncate", default=True),
    )


def _yarn_attention(fields: Fields, factor: float) -> float:
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor", low=1e-3, high=1e3)
    mscale = fields.number("mscale", low=0.0, high=1e3, default=0.0)
    all_dim = fields.number("mscale_all_dim", low=0.0, high=1e3, default=0.0)
    if mscale and all_dim:
        return _mscale(factor, mscale) / _mscale(factor, all_dim)
    return _mscale(factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _only(fields: Fields, known: set[str]) -> None:
    for name in sorted(set(fields.values) - known - _COMMON_KEYS):
        if fields.get(name) is not None:
            fields.refuse(name[:60], "is not a known setting of this RoPE type")


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
