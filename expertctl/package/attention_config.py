"""Attention settings in ``config.json``: rotary positions in both notations, and sliding windows.

RoPE scaling types that depend on the length of the text (``dynamic``, ``longrope``) are refused:
keys cached at one length would be wrong at another. Only what the file says is stored, nothing
computed with logarithms: the settings are hashed, and must be equal on every platform.

Absent keys mean what they mean to transformers; what it would fail on is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import ConfigFields, WindowRule
from expertctl.schema.strict_json import JsonObject

DEFAULT_THETA = 10_000.0
_MAX_FACTOR = 1e4
_MAX_POSITIONS = 1 << 24
_COMMON_KEYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Positions are divided by a factor."""

    rope_type: ClassVar[str] = "linear"
    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Low frequencies are divided by a factor, high ones kept, with a ramp between."""

    rope_type: ClassVar[str] = "llama3"
    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN: a ramp between interpolated and extrapolated frequencies, and rescaled attention."""

    rope_type: ClassVar[str] = "yarn"
    factor: float
    attention_factor: float | None  # None: from the factor and the mscales, unless those are 0
    mscale: float
    mscale_all_dim: float
    beta_fast: float
    beta_slow: float
    original: int
    truncate: bool

    @property
    def attention(self) -> float:
        """The factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale:
            return _compute_mscale(self.factor, self.mscale) / _compute_mscale(
                self.factor, self.mscale_all_dim
            )
        return _compute_mscale(self.factor, 1.0)


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base frequency, the size of a head, and the scaling of frequencies, if any."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None

    @property
    def attention(self) -> float:
        """The factor on cosines and sines."""
        return self.scaling.attention if isinstance(self.scaling, YarnScaling) else 1.0

    def to_json(self) -> JsonObject:
        """Return the settings as in the digest of a base and the identity of a plan."""
        scaling: JsonObject | None = None
        if self.scaling is not None:
            scaling = {"rope_type": self.scaling.rope_type, **asdict(self.scaling)}
        return {"theta": self.theta, "dims": self.dims, "scaling": scaling}


def parse_rope_config(
    config: ConfigFields, *, dims: int, max_positions: int, theta: float = DEFAULT_THETA
) -> RopeConfig:
    """Parse ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    If both are present, ``rope_scaling`` wins unless it is empty, as in transformers. ``theta`` is
    the default of the architecture.

    Raises:
        IncompatibleError: for an unsupported scaling type.
    """
    fields = config.read_nested("rope_scaling")
    fields = fields if fields.values else config.read_nested("rope_parameters")
    theta = config.read_number("rope_theta", minimum=2.0, maximum=1e12, default=theta)
    theta = fields.read_number("rope_theta", minimum=2.0, maximum=1e12, default=theta)
    for place in (config, fields):
        if place.read_number("partial_rotary_factor", minimum=0.0, maximum=1.0, default=1.0) != 1.0:
            place.add_problem("partial_rotary_factor", "below 1 is not supported")
    original = _read_original_positions(config, fields, max_positions)
    return RopeConfig(theta, dims, _parse_scaling(fields, original, max_positions))


def _read_original_positions(config: ConfigFields, fields: ConfigFields, max_positions: int) -> int:
    """Return the original context length; a key at the top level wins, as in transformers."""
    name, limits = "original_max_position_embeddings", {"minimum": 1, "maximum": _MAX_POSITIONS}
    inner = fields.read_integer(name, default=max_positions, **limits)
    return config.read_integer(name, default=inner, **limits)


def _parse_scaling(fields: ConfigFields, original: int, max_positions: int) -> RopeScaling | None:
    kind = fields.read_text("rope_type", default=fields.read_text("type", default="default"))
    match kind:
        case "default":
            _check_known_keys(fields, {"original_max_position_embeddings"})
            return None
        case "linear":
            _check_known_keys(fields, {"factor"})
            return LinearScaling(fields.read_number("factor", minimum=1.0, maximum=_MAX_FACTOR))
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


def _parse_llama3(fields: ConfigFields, original: int) -> Llama3Scaling:
    _check_known_keys(
        fields,
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    )
    scaling = Llama3Scaling(
        factor=fields.read_number("factor", minimum=1.0, maximum=_MAX_FACTOR),
        low=fields.read_number("low_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR),
        high=fields.read_number("high_freq_factor", minimum=1e-3, maximum=_MAX_FACTOR),
        original=original,
    )
    if scaling.high <= scaling.low:
        fields.add_problem("high_freq_factor", "must be greater than low_freq_factor")
    return scaling


def _parse_yarn(fields: ConfigFields, original: int, max_positions: int) -> YarnScaling:
    names = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    _check_known_keys(fields, names | {"truncate", "original_max_position_embeddings"})
    stretch = min(max(max_positions / original, 1.0), _MAX_FACTOR)
    factor = fields.read_number("factor", minimum=1.0, maximum=_MAX_FACTOR, default=stretch)
    attention, mscale, mscale_all_dim = _read_yarn_attention(fields)
    return YarnScaling(
        factor=factor,
        attention_factor=attention,
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
        beta_fast=fields.read_number("beta_fast", minimum=0.0, maximum=1e4, default=32.0) or 32.0,
        beta_slow=fields.read_number("beta_slow", minimum=0.0, maximum=1e4, default=1.0) or 1.0,
        original=original,
        truncate=fields.read_boolean("truncate", default=True),
    )


def _read_yarn_attention(fields: ConfigFields) -> tuple[float | None, float, float]:
    """Return the attention factor, if given, or both mscales, which count only as a pair."""
    mscale = fields.read_number("mscale", minimum=0.0, maximum=1e3, default=0.0)
    all_dim = fields.read_number("mscale_all_dim", minimum=0.0, maximum=1e3, default=0.0)
    if fields.get("attention_factor") is not None:
        return fields.read_number("attention_factor", minimum=1e-3, maximum=1e3), 0.0, 0.0
    return (None, mscale, all_dim) if mscale and all_dim else (None, 0.0, 0.0)


def _compute_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _check_known_keys(fields: ConfigFields, known: set[str]) -> None:
    for name in sorted(set(fields.values) - known - _COMMON_KEYS):
        if fields.get(name) is not None:
            fields.add_problem(name[:60], "is not a known setting of this RoPE type")


Windows = tuple[int | None, ...]
"""One window size per layer, in tokens; None: every earlier token is visible."""

_MAX_WINDOW = 1 << 24
_MAX_LAYER = 1 << 20
_DEFAULT_WINDOW = 4096


def parse_layer_windows(fields: ConfigFields, rule: WindowRule, layers: int) -> Windows:
    """Return the window of each layer; problems are recorded in ``fields``."""
    match rule:
        case "none":
            return (None,) * layers
        case "every_layer":
            return _apply_to_every_layer(
                fields, _read_window(fields, default=_DEFAULT_WINDOW), layers
            )
        case "every_layer_or_none":
            return _apply_to_every_layer(fields, _read_window(fields, default=None), layers)
        case "every_layer_if_used":
            return _apply_to_every_layer(fields, _read_window_if_used(fields), layers)
        case "late_layers":
            return _read_layer_types(
                fields, _read_window_if_used(fields), _find_late_layers(fields, layers, first=28)
            )
        case "late_layers_always":
            window = _read_window(fields, default=_DEFAULT_WINDOW)
            return _read_layer_types(fields, window, _find_late_layers(fields, layers, first=62))
        case "even_layers":
            window = _read_window_if_used(fields)
            if window is None and fields.read_boolean("use_sliding_window", default=False):
                fields.add_problem("sliding_window", "is null, but use_sliding_window is set")
            return _read_layer_types(fields, window, _find_even_layers(fields, layers))


def _apply_to_every_layer(fields: ConfigFields, window: int | None, layers: int) -> Windows:
    if fields.get("layer_types") is not None:
        fields.add_problem("layer_types", "is not supported for this architecture")
    return (window,) * layers


def _find_late_layers(fields: ConfigFields, layers: int, *, first: int) -> list[bool]:
    """Return which layers have a window if the file lists none: those from some layer on."""
    begin = fields.read_integer("max_window_layers", minimum=0, maximum=_MAX_LAYER, default=first)
    return [layer >= begin for layer in range(layers)]


def _find_even_layers(fields: ConfigFields, layers: int) -> list[bool]:
    end = fields.read_integer("max_window_layers", minimum=0, maximum=_MAX_LAYER, default=28)
    return [layer % 2 == 0 and layer < end for layer in range(layers)]


def _read_layer_types(fields: ConfigFields, window: int | None, defaults: list[bool]) -> Windows:
    layers = len(defaults)
    if fields.get("layer_types") is None:
        return tuple(window if here else None for here in defaults)
    kinds = fields.get("layer_types")
    known: Mapping[str, int | None] = {"full_attention": None, "sliding_attention": window}
    names = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    if len(names) != layers or not known.keys() >= set(names):
        fields.add_problem(
            "layer_types", f"must be {layers} times full_attention or sliding_attention"
        )
        return (None,) * layers
    if window is None and "sliding_attention" in names:
        fields.add_problem(
            "layer_types",
            "has sliding_attention, but use_sliding_window is not set, or sliding_window is null",
        )
    return tuple(known[name] for name in names)


def _read_window_if_used(fields: ConfigFields) -> int | None:
    if not fields.read_boolean("use_sliding_window", default=False):
        return None
    return _read_window(fields, default=_DEFAULT_WINDOW)


def _read_window(fields: ConfigFields, *, default: int | None) -> int | None:
    """Return the window; an absent key means the default, null means none, as in transformers."""
    name = "sliding_window"
    if fields.is_null(name) or (default is None and fields.get(name) is None):
        return None
    return fields.read_integer(name, minimum=1, maximum=_MAX_WINDOW, default=default)
