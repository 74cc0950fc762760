"""Layers of different sizes, as those of Gemma 4: `VariedLayers`, parsed from ``config.json``.

Layers without a window may have larger heads and fewer of them for keys, whose values may be their
keys before the norm. The last layers may read the keys and values of an earlier one. Every layer
may read an embedding of its own of each token.
"""

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import ClassVar

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import ConfigFields
from expertctl.schema.strict_json import JsonObject

_LAYER_KEY = re.compile(r"[0-9]{1,5}")
"""transformers pads the numbers of layers with zeros."""
_SUPPORTED = {"head_dim", "num_key_value_heads"}
_MAX_HEADS, _MAX_SIZE = 1 << 10, 1 << 16


LAYER_EMBEDDINGS = "model.embed_tokens_per_layer"
LAYER_PROJECTION = "model.per_layer_model_projection"
LAYER_PROJECTION_NORM = "model.per_layer_projection_norm"
LAYER_GATE, LAYER_OUTPUT = "per_layer_input_gate", "per_layer_projection"
LAYER_INPUT_NORM, LAYER_SCALAR = "post_per_layer_input_norm", "layer_scalar"
_OF_KEYS = ("k_proj", "v_proj", "k_norm", "v_norm")


@dataclass(frozen=True, slots=True)
class ProportionalScaling:
    """Only the first pairs of dimensions are rotated, with the frequencies of whole heads."""

    rope_type: ClassVar[str] = "proportional"
    pairs: int
    factor: float


def parse_proportional_scaling(fields: ConfigFields, dims: int) -> ProportionalScaling:
    """Read this scaling of heads with ``dims`` dimensions."""
    part = fields.read_number("partial_rotary_factor", minimum=0.0, maximum=1.0, default=1.0)
    factor = fields.read_number("factor", minimum=1.0, maximum=1e4, default=1.0)
    return ProportionalScaling(int(part * dims // 2), factor)


@dataclass(frozen=True, slots=True)
class LayerSizes:
    """The sizes of one layer."""

    head_dim: int
    kv_heads: int
    intermediate_size: int
    source: int | None = None
    """The layer whose keys and values it reads; None: it has its own."""
    has_values: bool = True
    """Whether values have a projection; if not, they are the keys before their norm."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VariedLayers:
    """The sizes of all layers, and the embeddings of tokens that each layer reads.

    Values are normed, without weights, and a layer multiplies its output by a number of its own.
    """

    sizes: tuple[LayerSizes, ...]
    input_size: int
    """The width of the embedding of one layer; 0: there are none."""
    input_tokens: int

    @property
    def head_dim(self) -> int:
        """The largest head."""
        return max(size.head_dim for size in self.sizes)

    @property
    def kv_heads(self) -> int:
        """The most heads of keys."""
        return max(size.kv_heads for size in self.sizes)

    def list_layer_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of what applies the embedding of a layer, by name in the layer."""
        if not self.input_size:
            return {}
        return {LAYER_GATE: (self.input_size, hidden), LAYER_OUTPUT: (hidden, self.input_size)}

    def list_outer_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of what all layers share, by module name."""
        return (
            {LAYER_PROJECTION: (len(self.sizes) * self.input_size, hidden)}
            if self.input_size
            else {}
        )

    def iter_outer_tensors(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the tensors that all layers share, and their shapes."""
        for name, (width, _) in self.list_outer_shapes(hidden).items():
            yield f"{LAYER_EMBEDDINGS}.weight", (self.input_tokens, width)
            yield f"{name}.weight", (width, hidden)
            yield f"{LAYER_PROJECTION_NORM}.weight", (self.input_size,)

    def iter_layer_vectors(self, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Yield the vectors of a layer by name in the layer, and their shapes."""
        yield LAYER_SCALAR, (1,)
        if self.input_size:
            yield f"{LAYER_INPUT_NORM}.weight", (hidden,)

    def list_norm_sizes(self, layer: int) -> dict[str, int]:
        """Return the norms of queries and keys of a layer."""
        size = self.sizes[layer]
        names = ("q_norm", "k_norm") if size.source is None else ("q_norm",)
        return dict.fromkeys(names, size.head_dim)

    def list_unused_modules(self) -> frozenset[str]:
        """Return what layers would have if they did not read keys and values of others."""
        reading = (n for n, size in enumerate(self.sizes) if size.source is not None)
        return frozenset(f"model.layers.{n}.self_attn.{each}" for n in reading for each in _OF_KEYS)

    def to_json(self) -> JsonObject:
        """Return every field as in the digest of a base."""
        return {
            "sizes": [asdict(size) for size in self.sizes],
            "input_size": self.input_size,
            "input_tokens": self.input_tokens,
        }


def parse_varied_layers(
    fields: ConfigFields,
    windows: tuple[int | None, ...],
    usual: LayerSizes,
    *,
    vocab_size: int,
    what: str,
) -> VariedLayers:
    """Return the sizes of layers; ``usual`` are those of a layer with a window.

    Problems are recorded in ``fields``.

    Raises:
        IncompatibleError: for layers that differ otherwise, or for routed experts.
    """
    if fields.read_boolean("enable_moe_block", default=False):
        raise IncompatibleError(
            f"{what}: layers with a dense and a routed MLP are not supported",
            hint="supported are dense bases of this architecture",
        )
    shares = fields.read_boolean("attention_k_eq_v", default=False)
    head_dim, kv_heads = _read_wide_sizes(fields, windows, usual, shares=shares, what=what)
    sources = _find_sources(fields, windows)
    doubled = fields.read_boolean("use_double_wide_mlp", default=False)
    sizes = tuple(
        LayerSizes(
            head_dim=head_dim if window is None else usual.head_dim,
            kv_heads=kv_heads if window is None else usual.kv_heads,
            intermediate_size=usual.intermediate_size
            * (2 if doubled and source is not None else 1),
            source=source,
            has_values=not (shares and window is None),
        )
        for window, source in zip(windows, sources, strict=True)
    )
    size = fields.read_integer(
        "hidden_size_per_layer_input", minimum=0, maximum=_MAX_SIZE, default=256
    )
    name = "vocab_size_per_layer_input"
    tokens = fields.read_integer(name, minimum=1, maximum=1 << 21, default=262_144)
    if size and tokens < vocab_size:
        fields.add_problem(name, f"is {tokens}, fewer than the {vocab_size} tokens of the base")
    return VariedLayers(sizes=sizes, input_size=size, input_tokens=tokens if size else 0)


def _read_wide_sizes(
    fields: ConfigFields,
    windows: tuple[int | None, ...],
    usual: LayerSizes,
    *,
    shares: bool,
    what: str,
) -> tuple[int, int]:
    """Return size and number of the heads of keys in layers without a window.

    transformers writes them for each layer.
    """
    if fields.get("per_layer_config") is not None:
        wide = {number for number, window in enumerate(windows) if window is None}
        layers = fields.read_nested("per_layer_config")
        values = list(layers.values.values())
        if not values:  # every layer is as usual, or a problem was recorded
            return usual.head_dim, usual.kv_heads
        numbers = [int(key) if _LAYER_KEY.fullmatch(key) else -1 for key in layers.values]
        alike = all(value == values[0] for value in values)
        first = values[0] if isinstance(values[0], dict) else {}
        if sorted(numbers) != sorted(wide) or not alike or not first.keys() <= _SUPPORTED:
            raise IncompatibleError(
                f"{what}: layers that differ by per_layer_config are not supported here",
                hint="supported are other heads in every layer without a window",
            )
        own = layers.read_nested(next(iter(layers.values)))
        dim_name, heads_name, default = "head_dim", "num_key_value_heads", usual.head_dim
    else:
        own, default = fields, 512
        dim_name, heads_name = "global_head_dim", "num_global_key_value_heads"
    dim = own.read_integer(dim_name, minimum=2, maximum=_MAX_HEADS, default=default)
    heads = usual.kv_heads
    if own is not fields or shares:
        heads = own.read_integer(heads_name, minimum=1, maximum=_MAX_HEADS, default=heads)
    if dim % 2:
        fields.add_problem(dim_name, "is odd, rotary positions need pairs")
    return dim, heads


def _find_sources(fields: ConfigFields, windows: tuple[int | None, ...]) -> Iterator[int | None]:
    """Yield the layer that each layer takes keys and values from: the last of its kind before."""
    name, layers = "num_kv_shared_layers", len(windows)
    shared = fields.read_integer(name, minimum=0, maximum=layers, default=0)
    own = layers - shared
    last = {window: number for number, window in enumerate(windows[:own])}
    for number, window in enumerate(windows):
        if number >= own and window not in last:
            fields.add_problem(name, f"is {shared}, and no layer before has the window of {number}")
        yield None if number < own else last.get(window)
