"""`BlockConfig`: in what a decoder differs from Llama's, parsed from ``config.json``.

The defaults are Llama's, so a base whose `BlockConfig` is the default one runs on every backend.
`BlockConfig.has_kernels` tells whether compiled kernels of the CPU run others.
Numbers that follow from others are computed only with operations that round the same everywhere:
they are hashed.
"""

import math
from dataclasses import asdict, dataclass
from typing import Literal

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import (
    Activation,
    Architecture,
    ConfigFields,
    NormKind,
    NormPlaces,
)
from expertctl.package.attention_config import (
    RopeConfig,
    Windows,
    choose_rope_fields,
    parse_local_rope,
    read_rotating_layers,
)
from expertctl.package.varied_layers import VariedLayers
from expertctl.schema.strict_json import JsonObject

_MAX_SCALE, _MIN_SCALE = 1e6, 1e-9
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
}

RopeKind = Literal["global", "local", "none"]
"""By which frequencies a layer rotates queries and keys."""
_LOCAL: RopeKind = "local"
_GLOBAL: RopeKind = "global"
_NONE: RopeKind = "none"


@dataclass(frozen=True, slots=True)
class ClampedGate:
    """The gate of gpt-oss: ``gate * sigmoid(alpha * gate) * (up + 1)``.

    Before that ``gate`` is limited above, and ``up`` on both sides.
    """

    limit: float
    alpha: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockConfig:
    """What a block computes, and what precedes and follows the blocks."""

    norm: NormKind = "rms"
    places: NormPlaces = "before"
    activation: Activation = "silu"
    gated: bool = True
    head_norm: NormKind = "rms"
    """The kind of the norms of queries and keys."""
    own_head_norms: bool = False
    """Whether every head has its own weights of these norms."""
    norms_after_rope: bool = False
    embedding_scale: float = 1.0
    scales_virtual_tokens: bool = False
    """Whether the rows of a soft prompt are scaled as well."""
    residual_scale: float = 1.0
    """The factor on what attention and MLP add."""
    attention_scale: float | None = None
    """The factor on queries; None: one over the root of the size of a head."""
    attention_cap: float | None = None
    """The limit ``c`` of scores, which become ``c * tanh(score / c)``."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    interleaved: bool = False
    """Whether neighbouring dimensions are rotated together."""
    rope_kinds: tuple[RopeKind, ...] = ()
    """One a layer; none at all: every layer rotates by the global frequencies."""
    local_rope: RopeConfig | None = None
    learned_positions: bool = False
    """Whether positions have embeddings, and nothing is rotated."""
    head_bias: bool = False
    query_growth: float = 0.0
    """``b``: queries at position p are multiplied by ``1 + b * ln(1 + floor(p / original))``."""
    query_growth_positions: int = 0
    """``original`` in that formula."""
    sinks: bool = False
    """Whether every head has a logit without a key, which takes part in the softmax."""
    clamped_gate: ClampedGate | None = None
    """What MLPs compute in place of an activation; None: the activation."""
    varied: VariedLayers | None = None
    """What differs between layers; None: all layers have the same sizes."""

    @property
    def is_sequential(self) -> bool:
        """Whether attention and MLP add to the hidden states as in Llama's blocks."""
        return self.places == "before" and self.residual_scale == 1.0

    @property
    def changes_scores(self) -> bool:
        """Whether attention is not that of fused kernels."""
        return self.sinks or self.attention_cap is not None

    @property
    def has_kernels(self) -> bool:
        """Whether the compiled decoder of the CPU has an operation for everything in it."""
        computed = {name: getattr(self, name) for name in _COMPILED_FIELDS}
        has_own_rms_norms = self.own_head_norms and self.head_norm in ("rms", "rms_plus_one")
        return self == BlockConfig(**computed) and not has_own_rms_norms

    def get_rope_kind(self, layer: int) -> RopeKind:
        """Return by which frequencies a layer rotates."""
        if self.learned_positions:
            return "none"
        return self.rope_kinds[layer] if self.rope_kinds else "global"

    def list_unused_modules(self) -> frozenset[str]:
        """Return the modules of which files may have tensors that are not used."""
        return frozenset() if self.varied is None else self.varied.list_unused_modules()

    def list_layer_vectors(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of what layers of different sizes have, by name in the layer."""
        return {} if self.varied is None else dict(self.varied.iter_layer_vectors(hidden))

    def list_norms(self) -> tuple[str, ...]:
        """Return the names of the norms of a layer that have as many numbers as hidden states."""
        before = ("input_layernorm", "post_attention_layernorm")
        after = ("attention_output_layernorm", "mlp_output_layernorm")
        match self.places:
            case "before" | "parallel_apart":
                return before
            case "after":
                return after
            case "around":
                return before + after
            case "parallel":
                return before[:1]

    def to_json(self) -> JsonObject:
        """Return every field as in the digest of a base; those added later only if they are set."""
        values = {
            **asdict(self),
            "rope_kinds": list(self.rope_kinds),
            "local_rope": None if self.local_rope is None else self.local_rope.to_json(),
            "varied": None if self.varied is None else self.varied.to_json(),
        }
        return {n: v for n, v in values.items() if n not in _ADDED_FIELDS or v}


_ADDED_FIELDS = frozenset({"sinks", "clamped_gate", "varied"})
"""Fields that bases got after digests of other bases had been published; unset they are false."""


LLAMA_BLOCK = BlockConfig()
"""The block that every backend runs."""
_COMPILED_FIELDS = (
    *("norm", "places", "activation", "gated", "head_norm", "own_head_norms", "norms_after_rope"),
    *("embedding_scale", "scales_virtual_tokens", "residual_scale", "attention_scale"),
    *("attention_cap", "logit_scale", "logit_cap", "interleaved", "rope_kinds", "local_rope"),
    *("learned_positions", "head_bias", "query_growth", "query_growth_positions"),
)
"""The fields whose values, all of them, compiled kernels compute; a field added later is none."""


def parse_block_config(
    fields: ConfigFields,
    row: Architecture,
    *,
    what: str,
    hidden_size: int,
    head_dim: int,
    windows: Windows,
    varied: VariedLayers | None = None,
) -> BlockConfig:
    """Read what an architecture leaves to ``config.json``; problems are recorded in ``fields``.

    Raises:
        IncompatibleError: for an unsupported activation.
    """
    attention_cap, logit_cap = _read_caps(fields, row)
    growth, positions = _read_query_growth(fields, row)
    has_head_norms = has_norms_of_heads(fields, row)
    return BlockConfig(
        norm=row.norm,
        places=_read_places(fields, row),
        activation=_read_activation(fields, row, what),
        gated=row.gated,
        head_norm=row.head_norm if has_head_norms else "rms",
        own_head_norms=has_head_norms and row.norms == "each_head",
        norms_after_rope=row.norms_after_rope,
        embedding_scale=_read_embedding_scale(fields, row, hidden_size),
        scales_virtual_tokens=row.embedding == "multiplier",
        residual_scale=_read_scale(fields, "residual_multiplier")
        if row.residual_multiplier
        else 1.0,
        attention_scale=_read_attention_scale(fields, row, head_dim),
        attention_cap=attention_cap,
        logit_scale=_read_logit_scale(fields, row),
        logit_cap=logit_cap,
        interleaved=row.interleaved,
        rope_kinds=_read_rope_kinds(fields, row, windows),
        local_rope=parse_local_rope(fields, dims=head_dim, theta=row.local_theta)
        if row.rope_layers == "local_theta"
        else None,
        learned_positions=row.learned_positions,
        head_bias=row.head_bias,
        query_growth=growth,
        query_growth_positions=positions,
        sinks=row.sinks,
        clamped_gate=_read_clamped_gate(fields) if row.clamped_gate else None,
        varied=varied,
    )


def has_norms_of_heads(fields: ConfigFields, row: Architecture) -> bool:
    """Tell whether queries and keys are normed."""
    if row.norms_key is not None:
        return fields.read_boolean(row.norms_key, default=False)
    return row.norms != "none"


def read_falcon_kv_heads(fields: ConfigFields, heads: int) -> int:
    """Return the KV heads of Falcon: one, unless the architecture is the new or an old one."""
    if fields.read_boolean("new_decoder_architecture", default=False):
        name = "num_key_value_heads"
        return fields.read_integer(name, minimum=1, maximum=1 << 10, default=heads)
    return 1 if fields.read_boolean("multi_query", default=True) else heads


def _read_activation(fields: ConfigFields, row: Architecture, what: str) -> Activation:
    name = fields.read_text("hidden_act", default=row.activation)
    if row.gelu_is_tanh and name == "gelu":
        return "gelu_tanh"
    is_silu = row.experts is not None or row.delta_net
    known = {"silu": _ACTIVATIONS["silu"]} if is_silu else _ACTIVATIONS
    if name not in known:
        raise IncompatibleError(
            f"{what}: activation {name[:40]!r} is not supported",
            hint=f"supported are {', '.join(known)}",
        )
    return known[name]


def _read_places(fields: ConfigFields, row: Architecture) -> NormPlaces:
    match row.places_rule:
        case "fixed":
            return row.places
        case "parallel_residual":
            if not fields.read_boolean("use_parallel_residual", default=row.parallel):
                return "before"
            return row.places if row.places != "before" else "parallel"
        case "falcon":
            return _read_falcon_places(fields)


def _read_falcon_places(fields: ConfigFields) -> NormPlaces:
    is_new = fields.read_boolean("new_decoder_architecture", default=False)
    if not is_new:
        return "parallel" if fields.read_boolean("parallel_attn", default=True) else "before"
    if not fields.read_boolean("parallel_attn", default=True):
        fields.add_problem("parallel_attn", "is false, but new_decoder_architecture is set")
    norms = fields.read_integer("num_ln_in_parallel_attn", minimum=1, maximum=2, default=2)
    return "parallel_apart" if norms == 2 else "parallel"


def _read_embedding_scale(fields: ConfigFields, row: Architecture, hidden_size: int) -> float:
    match row.embedding:
        case "plain":
            return 1.0
        case "root_of_width":
            return math.sqrt(hidden_size)
        case "multiplier":
            return _read_scale(fields, "embedding_multiplier")


def _read_attention_scale(fields: ConfigFields, row: Architecture, head_dim: int) -> float | None:
    match row.attention_scale:
        case "head_dim":
            return None
        case "query_pre_attn_scalar":
            name = row.attention_scale
            return 1 / math.sqrt(fields.read_number(name, minimum=1e-3, maximum=1e6, default=256))
        case "multiplier":
            return _read_scale(fields, "attention_multiplier")
        case "one":
            return 1.0
        case "switch":
            return None if fields.read_boolean("scale_attn_weights", default=True) else 1.0


def _read_logit_scale(fields: ConfigFields, row: Architecture) -> float:
    match row.logits:
        case "plain":
            return 1.0
        case "divided":
            return 1 / _read_scale(fields, "logits_scaling")
        case "multiplied":
            return _read_scale(fields, "logit_scale", default=row.logit_scale)


def _read_scale(fields: ConfigFields, name: str, default: float = 1.0) -> float:
    return fields.read_number(name, minimum=_MIN_SCALE, maximum=_MAX_SCALE, default=default)


def _read_caps(fields: ConfigFields, row: Architecture) -> tuple[float | None, float | None]:
    if row.caps is None:
        return None, None
    attention, logits = row.caps
    return (
        _read_cap(fields, "attn_logit_softcapping", attention),
        _read_cap(fields, "final_logit_softcapping", logits),
    )


def _read_cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    if fields.is_null(name) or (default is None and fields.get(name) is None):
        return None
    return fields.read_number(name, minimum=1e-3, maximum=_MAX_SCALE, default=default)


def _read_query_growth(fields: ConfigFields, row: Architecture) -> tuple[float, int]:
    if not row.query_growth:
        return 0.0, 0
    rope = choose_rope_fields(fields, row)
    if not rope.values:
        return 0.1, 16384
    growth = rope.read_number("llama_4_scaling_beta", minimum=0.0, maximum=1e3)
    name = "original_max_position_embeddings"
    return growth, rope.read_integer(name, minimum=1, maximum=1 << 24)


def _read_clamped_gate(fields: ConfigFields) -> ClampedGate:
    limit = fields.read_number("swiglu_limit", minimum=1e-3, maximum=1e6, default=7.0)
    alpha = fields.read_number("swiglu_alpha", minimum=1e-3, maximum=1e3, default=1.702)
    return ClampedGate(limit, alpha)


def _read_rope_kinds(
    fields: ConfigFields, row: Architecture, windows: Windows
) -> tuple[RopeKind, ...]:
    match row.rope_layers:
        case "every":
            return ()
        case "local_theta":
            kinds = tuple(_GLOBAL if window is None else _LOCAL for window in windows)
        case "windowed":
            if fields.is_null("sliding_window"):
                return ()
            kinds = tuple(_NONE if window is None else _GLOBAL for window in windows)
        case "all_or_none":
            is_rotary = fields.read_text("position_embedding_type", default="none") == "rope"
            kinds = (_GLOBAL if is_rotary else _NONE,) * len(windows)
        case "listed":
            kinds = tuple(
                _GLOBAL if here else _NONE for here in read_rotating_layers(fields, len(windows))
            )
    return () if set(kinds) == {_GLOBAL} else kinds
