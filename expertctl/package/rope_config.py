"""Rotary positions: their settings in both spellings of ``config.json``.

Scaling types that change with the length of the text (``dynamic``, ``longrope``) are refused: keys
that were cached at one length would be wrong at another. Only what the file says is kept, nothing
that is computed with logarithms: the settings are digested, and must be equal on every platform.
"""

import math
from dataclasses import asdict, dataclass
from typing import ClassVar

from expertctl.errors import IncompatibleError
from expertctl.package.config_fields import Fields
from expertctl.schema.strict_json import JsonObject

USUAL_THETA = 10_000.0
_MAX_FACTOR = 1e4
_MAX_POSITIONS = 1 << 24
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies divided by a factor, high ones kept, a ramp between."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: interpolated and extrapolated frequencies mixed by a ramp, attention rescaled."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    attention_factor: float | None  # None: from the factor and, unless they are 0, the mscales
    mscale: float
    mscale_all_dim: float
    beta_fast: float
    beta_slow: float
    original: int
    truncate: bool

    @property
    def attention(self) -> float:
        """What cosines and sines are multiplied with."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)


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

    def to_json(self) -> JsonObject:
        """Return the settings as the digest of a base and the identity of a plan hold them."""
        scaling: JsonObject | None = None
        if self.scaling is not None:
            scaling = {"rope_type": self.scaling.rope_type, **asdict(self.scaling)}
        return {"theta": self.theta, "dims": self.dims, "scaling": scaling}


def parse_rope(
    config: Fields, *, dims: int, max_positions: int, theta: float = USUAL_THETA
) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    Where both are there, ``rope_scaling`` wins unless it is empty, as in transformers. ``theta`` is
    what the architecture takes where the file has none.

    Raises:
        IncompatibleError: for a scaling type that is not supported.
    """
    fields = config.nested("rope_scaling")
    fields = fields if fields.values else config.nested("rope_parameters")
    theta = config.number("rope_theta", low=2.0, high=1e12, default=theta)
    theta = fields.number("rope_theta", low=2.0, high=1e12, default=theta)
    for place in (config, fields):
        if place.number("partial_rotary_factor", low=0.0, high=1.0, default=1.0) != 1.0:
            place.refuse("partial_rotary_factor", "below 1 is not supported")
    original = _original_positions(config, fields, max_positions)
    return RopeConfig(theta, dims, _scaling(fields, original, max_positions))


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
    attention, mscale, mscale_all_dim = _yarn_attention(fields)
    return YarnScaling(
        factor=factor,
        attention_factor=attention,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        beta_fast=fields.number("beta_fast", low=0.0, high=1e4, default=32.0) or 32.0,
        beta_slow=fields.number("beta_slow", low=0.0, high=1e4, default=1.0) or 1.0,
        original=original,
        truncate=fields.boolean("truncate", default=True),
    )


def _yarn_attention(fields: Fields) -> tuple[float | None, float, float]:
    """The factor, if it is given, and both mscales, which count only together and without it."""
    mscale = fields.number("mscale", low=0.0, high=1e3, default=0.0)
    all_dim = fields.number("mscale_all_dim", low=0.0, high=1e3, default=0.0)
    if fields.get("attention_factor") is not None:
        return fields.number("attention_factor", low=1e-3, high=1e3), 0.0, 0.0
    return (None, mscale, all_dim) if mscale and all_dim else (None, 0.0, 0.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _only(fields: Fields, known: set[str]) -> None:
    for name in sorted(set(fields.values) - known - _COMMON_KEYS):
        if fields.get(name) is not None:
            fields.refuse(name[:60], "is not a known setting of this RoPE type")
