"""Attention settings in ``config.json``: rotary positions in both notations, and sliding windows.

RoPE scaling types that depend on the length of the text (``dynamic``, ``longrope``) are computed as
for texts of the original length, and the context ends there (`RopeConfig.max_positions`): keys
cached at one length would be wrong at another. Only what the file says is stored, nothing computed
with logarithms: the settings are hashed, and must be equal on every platform.

Absent keys mean what they mean to transformers; what it would fail on is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import ClassVar

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import Architecture, ConfigFields
from expertctl.package.varied_layers import ProportionalScaling, parse_proportional_scaling
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


def _compute_mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


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


@dataclass(frozen=True, slots=True)
class AlphaScaling:
    """The base frequency is stretched by a fixed factor (NTK)."""

    rope_type: ClassVar[str] = "alpha"
    alpha: float


@dataclass(frozen=True, slots=True)
class LongropeScaling:
    """LongRoPE (arXiv:2402.13753): a divisor of each frequency, and rescaled attention."""

    rope_type: ClassVar[str] = "longrope"
    short: tuple[float, ...]
    long: tuple[float, ...]
    """The divisors of texts longer than ``original``, which are not run."""
    attention_factor: float | None  # None: from the factor
    factor: float
    original: int

    @property
    def attention(self) -> float:
        """The factor on cosines and sines."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.factor <= 1 or self.original <= 1:
            return 1.0
        return math.sqrt(1 + math.log(self.factor) / math.log(self.original))


_StretchedScaling = LinearScaling | Llama3Scaling | YarnScaling | AlphaScaling
RopeScaling = _StretchedScaling | LongropeScaling | ProportionalScaling


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The base frequency, the rotated size of a head, and the scaling of frequencies, if any."""

    theta: float
    dims: int
    scaling: RopeScaling | None = None

    @property
    def attention(self) -> float:
        """The factor on cosines and sines."""
        match self.scaling:
            case YarnScaling() | LongropeScaling() as scaling:
                return scaling.attention
            case _:
                return 1.0

    @property
    def max_positions(self) -> int:
        """The longest text, in tokens, that these frequencies are for."""
        scaling = self.scaling
        return scaling.original if isinstance(scaling, LongropeScaling) else _MAX_POSITIONS

    def to_json(self) -> JsonObject:
        """Return the settings as in the digest of a base and the identity of a plan."""
        scaling: JsonObject | None = None
        if self.scaling is not None:
            scaling = {"rope_type": self.scaling.rope_type, **asdict(self.scaling)}
        return {"theta": self.theta, "dims": self.dims, "scaling": scaling}


_LLAMA_RULES = Architecture(class_name="LlamaForCausalLM", max_positions=2048)


def parse_rope_config(
    config: ConfigFields,
    *,
    dims: int,
    max_positions: int,
    theta: float = DEFAULT_THETA,
    row: Architecture = _LLAMA_RULES,
) -> RopeConfig:
    """Parse ``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling`` (before).

    If both are present, ``rope_scaling`` wins unless it is empty, as in transformers. ``theta`` is
    the default of the architecture.

    Raises:
        IncompatibleError: for an unsupported scaling type.
    """
    fields = choose_rope_fields(config, row)
    theta = config.read_number("rope_theta", minimum=2.0, maximum=1e12, default=theta)
    theta = fields.read_number("rope_theta", minimum=2.0, maximum=1e12, default=theta)
    dims = _read_rotated_dims(config, fields, dims, row.partial_rotary)
    original = _read_original_positions(config, fields, None if row.long_yarn else max_positions)
    if row.query_growth and not fields.values:
        default = YarnScaling(16.0, None, 1.0, 1.0, 32.0, 1.0, 16384, truncate=True)
        return RopeConfig(1_000_000.0, dims, default)
    scaling = _parse_scaling(fields, original, max_positions, row, dims)
    return RopeConfig(theta, dims, scaling)


_FULL, _SLIDING = "full_attention", "sliding_attention"
_PHI_POSITIONS = 4096


def choose_rope_fields(config: ConfigFields, row: Architecture) -> ConfigFields:
    """Return the object with the settings of RoPE, empty if there is none.

    Where layers with a window have frequencies of their own, ``rope_parameters`` has an object for
    each kind of layer, and ``rope_scaling`` replaces keys of the one for full attention.
    """
    scaling, parameters = config.read_nested("rope_scaling"), config.read_nested("rope_parameters")
    if row.rope_layers != "local_theta":
        stated = scaling if scaling.values else parameters
        absent = ConfigFields(dict(row.absent_rope), problems=config.problems)
        return stated if stated.values or not row.absent_rope else absent
    if parameters.values and not {_FULL, _SLIDING} & parameters.values.keys():
        config.add_problem("rope_parameters", f"must have {_FULL} and {_SLIDING}")
    merged = {**parameters.read_nested(_FULL).values, **scaling.values} or dict(row.absent_rope)
    return ConfigFields(merged, prefix="rope_parameters.", problems=config.problems)


def parse_local_rope(config: ConfigFields, *, dims: int, theta: float) -> RopeConfig:
    """Parse the frequencies of the layers with a window, where those have their own.

    Raises:
        IncompatibleError: for an unsupported scaling type.
    """
    fields = config.read_nested("rope_parameters").read_nested(_SLIDING)
    theta = config.read_number("rope_local_base_freq", minimum=2.0, maximum=1e12, default=theta)
    theta = fields.read_number("rope_theta", minimum=2.0, maximum=1e12, default=theta)
    scaling = _parse_scaling(fields, 1, 1, _LLAMA_RULES, dims)
    if isinstance(scaling, YarnScaling | Llama3Scaling | LongropeScaling):
        fields.add_problem("rope_type", f"{scaling.rope_type} is not supported here")
    return RopeConfig(theta, dims, scaling)


def _read_rotated_dims(
    config: ConfigFields, fields: ConfigFields, dims: int, default: float | None
) -> int:
    """Return the dimensions of a head that are rotated; a nested key wins."""
    name, limits = "partial_rotary_factor", {"minimum": 0.0, "maximum": 1.0}
    part = config.read_number(name, default=1.0 if default is None else default, **limits)
    part = fields.read_number(name, default=part, **limits)
    if fields.get("rope_type") == ProportionalScaling.rope_type:
        return dims
    if default is None and part != 1.0:
        fields.add_problem(name, "below 1 is not supported")
        return dims
    rotated = int(dims * part)
    if default is not None and (rotated < 2 or rotated % 2):
        fields.add_problem(
            name, f"rotates {rotated} of {dims} dimensions, it must be a number of pairs"
        )
        return dims
    return rotated


def _read_original_positions(
    config: ConfigFields, fields: ConfigFields, max_positions: int | None
) -> int:
    """Return the original context length; a key at the top level wins, as in transformers.

    Without ``max_positions`` only that key counts, which Phi always has.
    """
    name, limits = "original_max_position_embeddings", {"minimum": 1, "maximum": _MAX_POSITIONS}
    if max_positions is None:
        return config.read_integer(name, default=_PHI_POSITIONS, **limits)
    inner = fields.read_integer(name, default=max_positions, **limits)
    return config.read_integer(name, default=inner, **limits)


def _parse_scaling(
    fields: ConfigFields, original: int, max_positions: int, row: Architecture, dims: int
) -> RopeScaling | None:
    kind = fields.read_text("rope_type", default=fields.read_text("type", default="default"))
    if row.long_yarn and kind in ("su", "yarn"):
        kind = "longrope"
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
            return _parse_yarn(fields, original, max_positions, row)
        case "dynamic":
            return _parse_dynamic(fields, row, dims)
        case "longrope":
            return _parse_longrope(fields, original, max_positions, dims)
        case "proportional" if row.varied_layers:
            _check_known_keys(fields, {"factor"})
            return parse_proportional_scaling(fields, dims)
        case _ if fields.problems:
            return None
        case _:
            raise IncompatibleError(
                f"RoPE scaling {kind[:40]!r} is not supported",
                hint="supported are default, linear, dynamic, longrope, llama3 and yarn",
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


def _parse_dynamic(fields: ConfigFields, row: Architecture, dims: int) -> AlphaScaling | None:
    """Return None for frequencies that are changed only beyond the context."""
    betas = {"beta_fast", "beta_slow", "mscale", "mscale_all_dim"} if row.alpha_rope else set()
    _check_known_keys(
        fields,
        {"factor", "original_max_position_embeddings", *({"alpha"} if betas else ()), *betas},
    )
    fields.read_number("factor", minimum=1.0, maximum=_MAX_FACTOR, default=1.0)
    if row.alpha_rope and fields.get("alpha"):
        if dims <= 2:
            fields.add_problem("alpha", "needs more than one pair of dimensions")
        return AlphaScaling(fields.read_number("alpha", minimum=1e-3, maximum=1e6))
    return None


def _parse_longrope(
    fields: ConfigFields, original: int, max_positions: int, dims: int
) -> LongropeScaling:
    names = {"factor", "short_factor", "long_factor", "attention_factor"}
    _check_known_keys(fields, names | {"original_max_position_embeddings"})
    factor = min(max(max_positions / original, 1e-3), _MAX_FACTOR)
    attention = None
    if fields.get("attention_factor") is not None:
        attention = fields.read_number("attention_factor", minimum=1e-3, maximum=1e3)
    return LongropeScaling(
        short=_read_divisors(fields, "short_factor", dims // 2),
        long=_read_divisors(fields, "long_factor", dims // 2),
        attention_factor=attention,
        factor=fields.read_number("factor", minimum=1e-3, maximum=_MAX_FACTOR, default=factor),
        original=original,
    )


def _read_divisors(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name)
    numbers = values if isinstance(values, list) else []
    found = tuple(
        float(n)
        for n in numbers
        if isinstance(n, int | float) and not isinstance(n, bool) and 1e-3 <= n <= 1e6
    )
    if len(found) != count or len(numbers) != count:
        fields.add_problem(name, f"must be {count} numbers from 0.001 to 1000000")
        return (1.0,) * count
    return found


def _parse_yarn(
    fields: ConfigFields, original: int, max_positions: int, row: Architecture
) -> YarnScaling:
    names = {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
    if row.query_growth:
        names |= {"llama_4_scaling_beta", "max_position_embeddings"}
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


def _check_known_keys(fields: ConfigFields, known: set[str]) -> None:
    for name in sorted(set(fields.values) - known - _COMMON_KEYS):
        if fields.get(name) is not None:
            fields.add_problem(name[:60], "is not a known setting of this RoPE type")


Windows = tuple[int | None, ...]
"""One window size per layer, in tokens; None: every earlier token is visible."""

_MAX_WINDOW = 1 << 24
_MAX_LAYER = 1 << 20
_DEFAULT_WINDOW = 4096


def parse_layer_windows(fields: ConfigFields, row: Architecture, layers: int) -> Windows:
    """Return the window of each layer; problems are recorded in ``fields``."""
    match row.window:
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
        case "pattern" | "pattern_if_sized" | "layer_types" | "layers_without_rope":
            return _parse_window_pattern(fields, row, layers)


def _parse_window_pattern(fields: ConfigFields, row: Architecture, layers: int) -> Windows:
    rule, pattern = row.window, row.window_pattern
    if rule == "layers_without_rope":
        is_used = fields.read_boolean("use_sliding_window", default=False)
        window = _read_window(fields, default=None) if is_used else None
        rotating = read_rotating_layers(fields, layers)
        return _read_layer_types(fields, window, [not here for here in rotating])
    window = _read_window(fields, default=row.window_size)
    if rule == "layer_types":
        return _read_layer_types(fields, window, [window is not None] * layers)
    if rule == "pattern_if_sized":
        pattern = _read_pattern(fields, default=pattern)
    narrow = [window is not None and (layer + 1) % pattern != 0 for layer in range(layers)]
    return _read_layer_types(fields, window, narrow)


def _read_pattern(fields: ConfigFields, *, default: int) -> int:
    """Return the pattern; one in words says nothing that the list of layers does not."""
    name = "sliding_window_pattern"
    if fields.get("layer_types") is not None or fields.is_null(name):
        return default
    return fields.read_integer(name, minimum=1, maximum=_MAX_LAYER, default=default)


def read_rotating_layers(fields: ConfigFields, layers: int) -> list[bool]:
    """Return which layers rotate: those with a one in ``no_rope_layers``, or all but every n-th."""
    name = "no_rope_layers"
    value = fields.get(name)
    if value is None:
        step = fields.read_integer(
            "no_rope_layer_interval", minimum=1, maximum=_MAX_LAYER, default=4
        )
        return [(layer + 1) % step != 0 for layer in range(layers)]
    if not isinstance(value, list) or len(value) < layers or not set(map(str, value)) <= {"0", "1"}:
        fields.add_problem(name, f"must be {layers} times 0 or 1")
        return [True] * layers
    return [str(kind) == "1" for kind in value[:layers]]


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
