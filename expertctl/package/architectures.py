"""What may differ between architectures, and typed reading of a base's configuration.

An `Architecture` holds everything that is special to one architecture; the decoder knows none by
name. All of them are in `expertctl.package.architecture_rows`. The values of a row are what
transformers assumes for absent keys of ``config.json``.

`ConfigFields` reads values within bounds and collects all problems: after a problem it returns a
harmless value of the right type, so that the rest of the file is checked, too. ``null`` counts as
absent, except where a caller asks (`ConfigFields.is_null`).

`ExpertsConfig` describes routed experts. A layer has either a dense feed-forward network, or a
router with its experts and, in some architectures, a shared expert that reads every token.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Literal, TypeVar

from expertctl.errors import IncompatibleError, InvalidPackageError
from expertctl.package.stored_layout import StoredNames
from expertctl.schema.strict_json import JsonObject, JsonValue

_T = TypeVar("_T")


class ConfigFields:
    """One JSON object of a configuration, and the problems found so far."""

    def __init__(
        self,
        values: JsonObject,
        *,
        prefix: str = "",
        problems: list[str] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        """Wrap ``values``; nested objects share the list of ``problems``.

        ``keys`` are the names that this file has for some of the usual ones.
        """
        self.values = values
        self.problems = [] if problems is None else problems
        self._prefix = prefix
        self._keys = keys or {}

    def get(self, name: str) -> JsonValue:
        """Return the raw value, None if absent."""
        return self.values.get(self._keys.get(name, name))

    def is_null(self, name: str) -> bool:
        """Tell whether a key is present and null, for the few keys where that is not absence."""
        stored = self._keys.get(name, name)
        return stored in self.values and self.values[stored] is None

    def read_integer(
        self, name: str, *, minimum: int, maximum: int, default: int | None = None
    ) -> int:
        """Return a whole number within the bounds; without a default the key is required."""
        value = self._read_value(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        return self._add_wrong_type(
            name, value, f"a whole number from {minimum} to {maximum}", minimum
        )

    def read_number(
        self, name: str, *, minimum: float, maximum: float, default: float | None = None
    ) -> float:
        """Return a number within the bounds; without a default the key is required."""
        value = self._read_value(name, default)
        if (
            isinstance(value, int | float)
            and not isinstance(value, bool)
            and minimum <= value <= maximum
        ):
            return float(value)
        return self._add_wrong_type(
            name, value, f"a number from {minimum:g} to {maximum:g}", minimum
        )

    def read_boolean(self, name: str, *, default: bool) -> bool:
        """Return a boolean."""
        value = self._read_value(name, default)
        return (
            value
            if isinstance(value, bool)
            else self._add_wrong_type(name, value, "a boolean", default)
        )

    def read_text(self, name: str, *, default: str | None = None) -> str:
        """Return a string; without a default the key is required."""
        value = self._read_value(name, default)
        return (
            value if isinstance(value, str) else self._add_wrong_type(name, value, "a string", "")
        )

    def read_nested(self, name: str) -> "ConfigFields":
        """Return a nested object, empty if absent."""
        value = self._read_value(name, None)
        if value is None or isinstance(value, dict):
            return ConfigFields(
                value or {}, prefix=f"{self._prefix}{name}.", problems=self.problems
            )
        return self._add_wrong_type(
            name, value, "an object", ConfigFields({}, problems=self.problems)
        )

    def add_problem(self, name: str, why: str) -> None:
        """Record a problem with a field."""
        self.problems.append(f"{self._prefix}{self._keys.get(name, name)} {why}")

    def raise_problems(self, what: str) -> None:
        """Report all problems.

        Raises:
            InvalidPackageError: when there is any problem.
        """
        if self.problems:
            raise InvalidPackageError(what, self.problems)

    def _read_value(self, name: str, default: JsonValue) -> JsonValue:
        value = self.get(name)
        return default if value is None else value

    def _add_wrong_type(self, name: str, value: JsonValue, expected: str, instead: _T) -> _T:
        self.add_problem(name, f"is {_format_value(value)}, it must be {expected}")
        return instead


def _format_value(value: JsonValue) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return repr(value)[:40]


BiasRule = Literal["never", "always", "configured", "configured_apart"]
"""``configured_apart``: queries, keys and values have their own key, ``qkv_bias``."""
WindowRule = Literal[
    "none",
    "every_layer",
    "every_layer_or_none",
    "every_layer_if_used",
    "late_layers",
    "late_layers_always",
    "even_layers",
    "pattern",
    "pattern_if_sized",
    "layer_types",
    "layers_without_rope",
]
"""Which layers use a sliding window; see `expertctl.package.attention_config`."""
NormRule = Literal["none", "head", "projection", "each_head"]
"""What the norm of queries and keys covers: one head, or all heads together.

``each_head``: one head, and every head has its own weights.
"""
NormKind = Literal["rms", "rms_plus_one", "layer", "layer_with_bias"]
"""``rms_plus_one`` multiplies by one plus the weight."""
NormPlaces = Literal["before", "after", "around", "parallel", "parallel_apart"]
"""Where a block has norms.

``before`` attention and MLP, as Llama; ``after`` them, or ``around`` them. In a parallel block both
read the same hidden state, through one norm or, if ``apart``, through one norm each.
"""
PlacesRule = Literal["fixed", "parallel_residual", "falcon"]
"""What else decides the places: a key, or the three keys of Falcon's blocks."""
Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
EmbeddingRule = Literal["plain", "root_of_width", "multiplier"]
AttentionScaleRule = Literal["head_dim", "query_pre_attn_scalar", "multiplier", "switch", "one"]
LogitsRule = Literal["plain", "divided", "multiplied"]
RopeLayersRule = Literal["every", "local_theta", "listed", "windowed", "all_or_none"]
"""Which layers rotate: all; those with a window by their own frequencies; some; all or none."""
Scoring = Literal["softmax", "sigmoid"]
RoutedLayersRule = Literal["all", "by_step", "after_first"]
SharedExpertRule = Literal["none", "gated", "several"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsRules:
    """How an architecture routes tokens to experts; a key without a default here is required."""

    count_names: tuple[str, ...]
    """The keys that may hold the number of experts."""
    count: int | None = None
    used: int | None = None
    size: int | None = None
    """The default for ``moe_intermediate_size``; None: the intermediate size of the base."""
    layers: RoutedLayersRule = "all"
    scoring: Scoring = "softmax"
    normalised: bool | None = None
    """None: ``norm_topk_prob`` decides."""
    normalised_default: bool = False
    """What an absent ``norm_topk_prob`` means."""
    shared: SharedExpertRule = "none"
    router_bias: bool = False
    shared_size: int = 5632
    """The default for ``shared_expert_intermediate_size``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row: how this architecture differs from the others."""

    class_name: str
    max_positions: int
    norm_eps: float = 1e-6
    theta: float = 10_000.0
    qkv_bias: BiasRule = "never"
    output_bias: BiasRule | None = None  # None: as ``qkv_bias``
    mlp_bias: BiasRule = "never"
    norms: NormRule = "none"
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    window: WindowRule = "none"
    experts: ExpertsRules | None = None
    refused: tuple[str, ...] = ()
    """Keys whose values, unless null or false, mean something that is not computed."""
    dense_attention_only: bool = False
    """Whether files may also describe other kinds of layers, or routed experts; neither is run."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """The names of some usual keys in this architecture's files."""
    intermediate: int | None = None
    """The intermediate size, in hidden sizes, if it is absent; None: it is required."""
    tied: bool = False
    biased: bool = False
    """What absent keys of configured biases mean."""
    activation: str = "silu"
    gelu_is_tanh: bool = False
    """Whether ``gelu`` means its approximation by tanh."""
    gated: bool = True
    norm: NormKind = "rms"
    places: NormPlaces = "before"
    places_rule: PlacesRule = "fixed"
    parallel: bool = False
    """What an absent key for a parallel block means."""
    norms_key: str | None = None
    """The key that turns the norms of queries and keys on; None: they are always there."""
    head_norm: NormKind = "rms"
    norms_after_rope: bool = False
    embedding: EmbeddingRule = "plain"
    residual_multiplier: bool = False
    attention_scale: AttentionScaleRule = "head_dim"
    logits: LogitsRule = "plain"
    logit_scale: float = 1.0
    caps: tuple[float | None, float | None] | None = None
    """What absent keys for the soft caps of attention and logits mean; None: there are none."""
    partial_rotary: float | None = None
    """The part of a head that is rotated if it is not stated; None: all of it, always."""
    interleaved: bool = False
    """Whether neighbours are rotated together, not a dimension of each half."""
    rope_layers: RopeLayersRule = "every"
    local_theta: float = 10_000.0
    window_pattern: int = 0
    """Every such layer has no window, if nothing else is stated."""
    window_size: int = 4096
    """The window if it is not stated, for the rules about patterns."""
    absent_rope: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the settings of RoPE are if there are none."""
    sinks: bool = False
    """Whether every head has a learnt logit that takes part in the softmax of its scores."""
    varied_layers: bool = False
    """Whether layers without a window, and the last ones, differ from the others, as in Gemma 4."""
    clamped_gate: bool = False
    """Whether MLPs have the clamped SwiGLU of gpt-oss."""
    learned_positions: bool = False
    head_bias: bool = False
    query_growth: bool = False
    """Whether queries grow with the position (``llama_4_scaling_beta``)."""
    alpha_rope: bool = False
    """Whether the scaling ``dynamic`` with an ``alpha`` is a fixed stretch of the frequencies."""
    long_yarn: bool = False
    """Whether ``su`` and ``yarn`` are older names of ``longrope``."""
    delta_net: bool = False
    """Whether some layers have a gated DeltaNet, and the attention of all others has a gate."""
    stored: StoredNames = StoredNames()  # noqa: RUF009  # frozen


MAX_EXPERTS_PER_LAYER = 1024
"""The largest number of experts in a layer."""
MAX_EXPERTS_TOTAL = 1 << 16
"""The largest number of experts in all layers; each has three matrices with their own names."""
_MAX_SIZE = 1 << 19
_SIZE = "moe_intermediate_size"


ROUTER_MODULE = "mlp.gate"
"""The router of a layer; module names within a layer omit the layer's prefix."""
CHOICE_BIAS = "e_score_correction_bias"
SHARED_EXPERT_MODULE = "mlp.shared_expert"
SHARED_GATE_MODULE = "mlp.shared_expert_gate"


def list_gated_shapes(name: str, inner: int, hidden: int) -> dict[str, tuple[int, int]]:
    """Return ``(out, in)`` of the three matrices of a feed-forward network."""
    return {
        f"{name}.gate_proj": (inner, hidden),
        f"{name}.up_proj": (inner, hidden),
        f"{name}.down_proj": (hidden, inner),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The routed experts of a base: the same number and size in every layer that has any."""

    count: int
    used: int
    """The number of experts per token (top-k)."""
    intermediate_size: int
    layers: tuple[int, ...]
    """The indices of the layers with routed experts; the others are dense."""
    scoring: Scoring
    normalised: bool
    """Whether the weights of a token are divided by their sum."""
    choice_bias: bool
    """Whether a bias affects the choice of experts, but not their weights."""
    scale: float
    """The factor on the final weights."""
    shared_size: int
    """The intermediate size of the shared expert; 0: there is none."""
    shared_gate: bool
    """Whether the shared expert has a gate that scales its output."""
    router_bias: bool = False

    def list_linear_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of the linear layers of a routed layer, without its router."""
        shapes: dict[str, tuple[int, int]] = {}
        for number in range(self.count):
            shapes |= list_gated_shapes(f"mlp.experts.{number}", self.intermediate_size, hidden)
        if self.shared_size:
            shapes |= list_gated_shapes(SHARED_EXPERT_MODULE, self.shared_size, hidden)
        if self.shared_gate:
            shapes[SHARED_GATE_MODULE] = (1, hidden)
        return shapes

    def list_router_shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors of a router."""
        shapes: dict[str, tuple[int, ...]] = {f"{ROUTER_MODULE}.weight": (self.count, hidden)}
        if self.router_bias:
            shapes[f"{ROUTER_MODULE}.bias"] = (self.count,)
        if self.choice_bias:
            shapes[f"{ROUTER_MODULE}.{CHOICE_BIAS}"] = (self.count,)
        return shapes

    def to_json(self) -> JsonObject:
        """Return every field as in the digest of a base; those added later only if they are set."""
        values = {**asdict(self), "layers": list(self.layers)}
        if not self.router_bias:
            del values["router_bias"]
        return values


def parse_experts_config(
    fields: ConfigFields, row: ExpertsRules, *, layers: int, intermediate_size: int, what: str
) -> ExpertsConfig:
    """Read the keys that a row names; problems are recorded in ``fields``.

    Raises:
        IncompatibleError: when experts are chosen by groups.
    """
    if row.scoring == "sigmoid":
        _reject_groups(fields, what)
    before = len(fields.problems)
    count = _read_count(fields, row)
    used = fields.read_integer(
        "num_experts_per_tok", minimum=1, maximum=MAX_EXPERTS_PER_LAYER, default=row.used
    )
    if used > count and len(fields.problems) == before:
        fields.add_problem(
            "num_experts_per_tok", f"is {used}, more than the {count} that there are"
        )
    size = intermediate_size
    if row.size is not None:
        size = fields.read_integer(_SIZE, minimum=1, maximum=_MAX_SIZE, default=row.size)
    return ExpertsConfig(
        count=count,
        used=used,
        intermediate_size=size,
        layers=_read_layers(fields, row.layers, layers=layers, count=count),
        scoring=row.scoring,
        normalised=_read_normalised(fields, row),
        choice_bias=row.scoring == "sigmoid",
        scale=_read_scale(fields, row),
        shared_size=_read_shared_size(fields, row, size),
        shared_gate=row.shared == "gated",
        router_bias=row.router_bias,
    )


def _read_count(fields: ConfigFields, row: ExpertsRules) -> int:
    """Read the number of experts from its one key, or from several that must agree."""
    before = len(fields.problems)
    there = [name for name in row.count_names if fields.get(name) is not None]
    names = there or row.count_names[:1]
    counts = [
        fields.read_integer(n, minimum=1, maximum=MAX_EXPERTS_PER_LAYER, default=row.count)
        for n in names
    ]
    if len(set(counts)) > 1 and len(fields.problems) == before:
        fields.add_problem(names[0], f"and {names[1]} are not the same number")
    return counts[0]


def _read_normalised(fields: ConfigFields, row: ExpertsRules) -> bool:
    if row.normalised is not None:
        return row.normalised
    return fields.read_boolean("norm_topk_prob", default=row.normalised_default)


def _read_scale(fields: ConfigFields, row: ExpertsRules) -> float:
    if row.scoring != "sigmoid":
        return 1.0
    return fields.read_number("routed_scaling_factor", minimum=1e-3, maximum=1e3, default=1.0)


def _read_shared_size(fields: ConfigFields, row: ExpertsRules, size: int) -> int:
    match row.shared:
        case "none":
            return 0
        case "gated":
            name = "shared_expert_intermediate_size"
            return fields.read_integer(name, minimum=1, maximum=_MAX_SIZE, default=row.shared_size)
        case "several":
            return size * fields.read_integer(
                "n_shared_experts", minimum=1, maximum=MAX_EXPERTS_PER_LAYER
            )


def _read_layers(
    fields: ConfigFields, rule: RoutedLayersRule, *, layers: int, count: int
) -> tuple[int, ...]:
    match rule:
        case "all":
            routed = list(range(layers))
        case "by_step":
            step = fields.read_integer("decoder_sparse_step", minimum=1, maximum=1 << 20, default=1)
            dense = _read_dense_layers(fields)
            routed = [n for n in range(layers) if (n + 1) % step == 0 and n not in dense]
        case "after_first":
            first = fields.read_integer(
                "first_k_dense_replace", minimum=0, maximum=1 << 20, default=0
            )
            routed = list(range(first, layers))
    if not routed:
        fields.add_problem("num_hidden_layers", f"is {layers}, and no layer has routed experts")
    if len(routed) * count > MAX_EXPERTS_TOTAL:
        fields.add_problem(
            "num_hidden_layers", f"is {layers}: with {count} experts in each, that is too many"
        )
    return tuple(routed)


def _read_dense_layers(fields: ConfigFields) -> set[int]:
    """Return the layers in ``mlp_only_layers``; numbers of nonexistent layers are ignored."""
    name = "mlp_only_layers"
    value = fields.get(name)
    if value is None:
        return set()
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        fields.add_problem(name, "must be a list of numbers of layers")
        return set()
    return {number for number in value if isinstance(number, int)}


def _reject_groups(fields: ConfigFields, what: str) -> None:
    groups = fields.read_integer("n_group", minimum=1, maximum=1 << 10, default=1)
    if groups > 1:
        raise IncompatibleError(
            f"{what}: experts that are chosen by groups (n_group {groups}) are not supported",
            hint="supported is n_group 1",
        )
