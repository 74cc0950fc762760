"""`ModelConfig`: the configuration of our decoder, parsed from ``config.json``.

Defaults for absent keys are those of transformers (`expertctl.package.architecture_rows`). Anything
that the decoder would compute differently is refused. The decoder runs on the parsed values, and
the digest ``arch`` covers them, so files that describe the same decoder in different notations are
equal. Names of tensors and modules are the same for every architecture and file layout.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from expertctl.errors import IncompatibleError
from expertctl.package.architecture_rows import ARCHITECTURES
from expertctl.package.architectures import (
    Architecture,
    BiasRule,
    ConfigFields,
    ExpertsConfig,
    list_gated_shapes,
    parse_experts_config,
)
from expertctl.package.attention_config import (
    AlphaScaling,
    LongropeScaling,
    RopeConfig,
    parse_layer_windows,
    parse_rope_config,
)
from expertctl.package.block_config import (
    LLAMA_BLOCK,
    BlockConfig,
    has_norms_of_heads,
    parse_block_config,
    read_falcon_kv_heads,
)
from expertctl.package.config_document import (
    CONFIG_FILE,
    TEXT_PARTS,
    read_config_document,
    select_text_part,
)
from expertctl.package.delta_net_config import (
    OUTPUT_GATE_MODULE,
    DeltaNetConfig,
    parse_delta_net,
)
from expertctl.package.stored_layout import HeadSizes, StoredPlaces
from expertctl.package.varied_layers import LayerSizes, parse_varied_layers
from expertctl.schema.strict_json import JsonObject

EMBEDDING_TENSOR = "model.embed_tokens.weight"
POSITIONS_TENSOR = "model.embed_positions.weight"
HEAD_TENSOR = "lm_head.weight"
HEAD_BIAS_TENSOR = "lm_head.bias"
SINKS = "self_attn.sinks"
"""The logits of a layer's heads that belong to no key."""
_FLOAT_BYTES = 4
_MAX_HEAD_NORMS = 1 << 16

_OMITTED_DEFAULTS: Mapping[str, object] = {
    "projection_norm": False,
    "experts": None,
    "block": LLAMA_BLOCK.to_json(),
    "delta_net": None,
}
"""Fields added later: a base's digest omits them at these values, so that old digests stay."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Everything that the decoder needs; sizes are checked and consistent."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]  # in tokens, one per layer; None: no window
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool
    projection_norm: bool = False
    """Whether queries and keys are normed over all heads together, not per head."""
    experts: ExpertsConfig | None = None
    block: BlockConfig = LLAMA_BLOCK
    delta_net: DeltaNetConfig | None = None
    """The layers without attention; None: all layers attend."""

    @property
    def has_llama_blocks(self) -> bool:
        """Whether its blocks, without their rotation, are Llama's."""
        return self.block == LLAMA_BLOCK and self.delta_net is None

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The indices of the layers with keys and values."""
        if self.delta_net is None:
            return tuple(range(self.layers))
        return tuple(sorted({*range(self.layers)}.difference(self.delta_net.layers)))

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of a sequence, float32; 0 where all layers have keys and values."""
        return 0 if self.delta_net is None else math.prod(self.delta_net.state_shape) * _FLOAT_BYTES

    @property
    def unlike_llama(self) -> bool:
        """Whether its blocks or its rotation are not Llama's."""
        return (
            not self.has_llama_blocks
            or self.rope.dims != self.head_dim
            or isinstance(self.rope.scaling, AlphaScaling | LongropeScaling)
        )

    @property
    def has_kernels(self) -> bool:
        """Whether compiled kernels compute what its blocks do; its sizes are not looked at."""
        if self.delta_net is not None:
            return False
        return self.block.has_kernels and (self.experts is None or self.has_llama_blocks)

    def require_kernels(self) -> None:
        """Check that compiled kernels compute what its blocks do.

        Raises:
            IncompatibleError: if not.
        """
        if not self.has_kernels:
            raise IncompatibleError(
                f"the kernels cannot run the architecture {self.architecture}: they do not "
                "compute all that its layers do",
                hint="use --dtype float32 or bf16: numpy runs it on a processor",
            )

    @property
    def stored_places(self) -> StoredPlaces:
        """The names and places of its tensors in the files of its architecture."""
        names, net = ARCHITECTURES[self.architecture].stored, self.delta_net
        sizes = HeadSizes(self.heads, self.kv_heads, self.head_dim)
        return StoredPlaces(
            names=names,
            sizes=sizes,
            inner=self.intermediate_size,
            apart=self.block.places == "parallel_apart",
            fused={} if net is None else net.list_fused(sizes, grouped=names.grouped_delta),
            unused=self.block.list_unused_modules(),
        )

    def get_layer_sizes(self, layer: int) -> LayerSizes:
        """Return the sizes of a layer; ``head_dim`` and ``kv_heads`` are the largest of all."""
        if self.block.varied is not None:
            return self.block.varied.sizes[layer]
        return LayerSizes(self.head_dim, self.kv_heads, self.intermediate_size)

    def to_json(self) -> JsonObject:
        """Return every field as in the digest of a base."""
        values = {**asdict(self), "rope": self.rope.to_json(), "windows": list(self.windows)}
        values["block"] = self.block.to_json()
        if self.delta_net is not None:
            values["delta_net"] = self.delta_net.to_json()
        if self.experts is not None:
            values["experts"] = self.experts.to_json()
        return {
            n: v
            for n, v in values.items()
            if n not in _OMITTED_DEFAULTS or v != _OMITTED_DEFAULTS[n]
        }

    def list_uneven_sizes(self, unit: int) -> list[str]:
        """Return the sizes of heads and MLPs that are no multiple of ``unit``, as text."""
        sizes = {"head_dim": self.head_dim}
        if self.experts is None or len(self.experts.layers) < self.layers:
            sizes["intermediate_size"] = self.intermediate_size
        if self.experts is not None:
            sizes["moe_intermediate_size"] = self.experts.intermediate_size
            sizes["shared_expert_intermediate_size"] = self.experts.shared_size
        return [f"{name} is {size}" for name, size in sizes.items() if size % unit]

    def count_kv_bytes(self, tokens: int, *, itemsize: int) -> int:
        """Return the size of the keys and values of ``tokens`` tokens, in bytes."""
        layers = len(self.attention_layers)
        return 2 * layers * self.kv_heads * self.head_dim * itemsize * tokens

    def count_weight_bytes(self, *, itemsize: int) -> int:
        """Return the size of all weights in bytes; norms and biases have four bytes a number."""
        return sum(
            math.prod(shape) * (itemsize if len(shape) == 2 else _FLOAT_BYTES)
            for shape in self.tensor_shapes().values()
        )

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of every linear layer, by module name, including ``lm_head``.

        Routers are not included: no adapter may change them.
        """
        shapes = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(self.layers)
            for name, shape in self._list_layer_shapes(layer).items()
        }
        if self.block.varied is not None:
            shapes |= self.block.varied.list_outer_shapes(self.hidden_size)
        return {**shapes, "lm_head": (self.vocab_size, self.hidden_size)}

    def adapted_shapes(self) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of every linear layer by the names that adapters use.

        Those are the names in the files of the base, where several layers may be one module.
        """
        places, ours = self.stored_places, self.linear_shapes()
        if places.are_usual:
            return ours
        shapes: dict[str, tuple[int, int]] = {}
        for module, (out, into) in ours.items():
            stored, part = places.find_stored_module(module)
            shapes[stored] = (out if part is None else places.count_rows(part), into)
        return {**shapes, "lm_head": ours["lm_head"]}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the weights must contain, and no other."""
        return dict(self._iter_tensor_shapes())

    def is_routed(self, layer: int) -> bool:
        """Tell whether a layer has routed experts."""
        return self.experts is not None and layer in self.experts.layers

    def has_attention(self, layer: int) -> bool:
        """Tell whether a layer attends; others have a gated DeltaNet."""
        return self.delta_net is None or layer not in self.delta_net.layers

    def _list_layer_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        if self.delta_net is None or self.has_attention(layer):
            shapes = self._list_attention_shapes(layer)
        else:
            shapes = self.delta_net.list_linear_shapes(self.hidden_size)
        if self.experts is not None and self.is_routed(layer):
            return {**shapes, **self.experts.list_linear_shapes(self.hidden_size)}
        return {**shapes, **self._list_mlp_shapes(self.get_layer_sizes(layer).intermediate_size)}

    def _list_attention_shapes(self, layer: int) -> dict[str, tuple[int, int]]:
        sizes, hidden = self.get_layer_sizes(layer), self.hidden_size
        queries, keys = self.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        shapes = {"self_attn.q_proj": (queries, hidden)}
        if sizes.source is None:
            shapes["self_attn.k_proj"] = (keys, hidden)
        if sizes.source is None and sizes.has_values:
            shapes["self_attn.v_proj"] = (keys, hidden)
        if self.delta_net is not None:
            shapes[OUTPUT_GATE_MODULE] = (queries, hidden)
        shapes["self_attn.o_proj"] = (hidden, queries)
        varied = self.block.varied
        return shapes if varied is None else shapes | varied.list_layer_shapes(hidden)

    def _list_mlp_shapes(self, inner: int) -> dict[str, tuple[int, int]]:
        shapes = list_gated_shapes("mlp", inner, self.hidden_size)
        if not self.block.gated:
            del shapes["mlp.gate_proj"]
        return shapes

    def _iter_tensor_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield EMBEDDING_TENSOR, (self.vocab_size, self.hidden_size)
        if self.block.learned_positions:
            yield POSITIONS_TENSOR, (self.max_positions, self.hidden_size)
        yield from self._iter_norm_shapes("model.norm", self.hidden_size)
        if self.block.varied is not None:
            yield from self.block.varied.iter_outer_tensors(self.hidden_size)
        if not self.tied:
            yield HEAD_TENSOR, (self.vocab_size, self.hidden_size)
        if self.block.head_bias:
            yield HEAD_BIAS_TENSOR, (self.vocab_size,)
        for layer in range(self.layers):
            yield from self._iter_layer_tensor_shapes(layer)

    def _iter_layer_tensor_shapes(self, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        prefix = f"model.layers.{layer}"
        for norm in self.block.list_norms():
            yield from self._iter_norm_shapes(f"{prefix}.{norm}", self.hidden_size)
        for name, shape in self._list_layer_shapes(layer).items():
            yield f"{prefix}.{name}.weight", shape
            if self._has_bias(name):
                yield f"{prefix}.{name}.bias", shape[:1]
        if self.delta_net is None or self.has_attention(layer):
            vectors = self._list_attention_vectors(layer)
        else:
            vectors = self.delta_net.list_vector_shapes()
        if self.experts is not None and self.is_routed(layer):
            vectors |= self.experts.list_router_shapes(self.hidden_size)
        yield from ((f"{prefix}.{name}", shape) for name, shape in vectors.items())

    def _list_attention_vectors(self, layer: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {SINKS: (self.heads,)} if self.block.sinks else {}
        shapes |= self.block.list_layer_vectors(self.hidden_size)
        ends = ("weight", "bias") if self.block.head_norm == "layer_with_bias" else ("weight",)
        for norm, size in self._list_norm_sizes(layer).items():
            shapes |= {f"self_attn.{norm}.{end}": (size,) for end in ends}
        return shapes

    def _iter_norm_shapes(self, norm: str, size: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{norm}.weight", (size,)
        if self.block.norm == "layer_with_bias":
            yield f"{norm}.bias", (size,)

    def _list_norm_sizes(self, layer: int) -> dict[str, int]:
        heads, dims = {"q_norm": self.heads, "k_norm": self.kv_heads}, self.head_dim
        if not self.qk_norm:
            return {}
        if self.block.own_head_norms:
            return {f"{name}.norms.{n}": dims for name in heads for n in range(heads[name])}
        if self.block.varied is not None:
            return self.block.varied.list_norm_sizes(layer)
        return {name: dims * (heads[name] if self.projection_norm else 1) for name in heads}

    def _has_bias(self, name: str) -> bool:
        if name.startswith("mlp."):
            return self.mlp_bias
        if name.startswith("self_attn."):
            return self.output_bias if name == "self_attn.o_proj" else self.qkv_bias
        return False


def read_model_config(directory: Path) -> ModelConfig:
    """Read ``config.json`` of a base; raises as `read_config_document` and `parse_model_config`."""
    return parse_model_config(read_config_document(directory), what=str(directory / CONFIG_FILE))


def parse_model_config(document: JsonObject, *, what: str = CONFIG_FILE) -> ModelConfig:
    """Parse a configuration.

    Raises:
        IncompatibleError: when the decoder does not support such a model.
        InvalidPackageError: with all problems, when values are malformed or absurd.
    """
    document = select_text_part(document, what)
    row = _find_architecture(ConfigFields(document), what)
    fields = ConfigFields(document, keys=row.keys)
    _reject_unsupported(fields, row, what)
    config = _build_config(fields, row, what)
    sizes = [config.get_layer_sizes(layer) for layer in range(config.layers)]
    if any(config.heads % each.kv_heads for each in sizes):
        fields.add_problem("num_attention_heads", "is not a multiple of num_key_value_heads")
    if any(each.head_dim % 2 for each in sizes):
        fields.add_problem("head_dim", "is odd, rotary positions need pairs")
    if config.block.own_head_norms and config.heads * config.layers > _MAX_HEAD_NORMS:
        fields.add_problem("num_attention_heads", "has too many norms of single heads")
    if config.projection_norm and config.heads * config.head_dim != config.hidden_size:
        fields.add_problem(
            "head_dim", "is not hidden_size / num_attention_heads, as its norms need"
        )
    fields.raise_problems(what)
    return config


def _find_architecture(fields: ConfigFields, what: str) -> Architecture:
    kind = fields.read_text("model_type")
    fields.raise_problems(what)
    row = ARCHITECTURES.get(kind)
    classes = fields.get("architectures")
    if row is None or (classes is not None and classes != [row.class_name]):
        named = kind if row is None else f"{kind} as {classes}"
        raise IncompatibleError(
            f"{what}: architecture {named[:100]!r} is not supported",
            hint=f"supported are {', '.join(sorted({*ARCHITECTURES, *TEXT_PARTS}))}, each as a "
            "causal language model",
        )
    return row


def _reject_unsupported(fields: ConfigFields, row: Architecture, what: str) -> None:
    if fields.get("per_layer_config") and not row.varied_layers:
        raise IncompatibleError(
            f"{what}: layers that differ by per_layer_config are not supported",
            hint="supported is a base whose layers are alike",
        )
    if row.dense_attention_only:
        _reject_other_layers(fields, what)
    set_names = (n for n in row.refused if fields.get(n) is not None and fields.get(n) is not False)
    refused = next(set_names, None)
    if refused is not None:
        raise IncompatibleError(
            f"{what}: {refused} is not supported", hint="supported is a base without it"
        )


def _reject_other_layers(fields: ConfigFields, what: str) -> None:
    kinds = fields.get("layer_types")
    known = isinstance(kinds, list) and set(map(str, kinds)) <= {"attention", "full_attention"}
    if not known or fields.get("num_local_experts") != 0:
        raise IncompatibleError(
            f"{what}: routed experts, and layers without attention, are not supported here",
            hint="supported are dense bases of this architecture with attention in every layer",
        )


def _build_config(fields: ConfigFields, row: Architecture, what: str) -> ModelConfig:
    hidden = fields.read_integer("hidden_size", minimum=1, maximum=1 << 16)
    layers = fields.read_integer("num_hidden_layers", minimum=1, maximum=1 << 10)
    heads = fields.read_integer("num_attention_heads", minimum=1, maximum=1 << 10)
    head_dim = fields.read_integer(
        "head_dim", minimum=2, maximum=1 << 10, default=row.head_dim or max(hidden // heads, 2)
    )
    positions = fields.read_integer(
        "max_position_embeddings", minimum=1, maximum=1 << 24, default=row.max_positions
    )
    inner = fields.read_integer(
        "intermediate_size",
        minimum=1,
        maximum=1 << 19,
        default=None if row.intermediate is None else row.intermediate * hidden,
    )
    windows = parse_layer_windows(fields, row, layers)
    vocab = fields.read_integer("vocab_size", minimum=1, maximum=1 << 21)
    kv_heads, narrow = _read_kv_heads(fields, row, heads), head_dim
    varied = None
    if row.varied_layers:
        windows, usual = (*windows[:-1], None), LayerSizes(narrow, kv_heads, inner)
        varied = parse_varied_layers(fields, windows, usual, vocab_size=vocab, what=what)
        head_dim, kv_heads = varied.head_dim, varied.kv_heads
    wide = head_dim if varied is None else varied.sizes[-1].head_dim
    rope = parse_rope_config(fields, dims=wide, max_positions=positions, theta=row.theta, row=row)
    return ModelConfig(
        architecture=fields.read_text("model_type"),
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inner,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=min(positions, rope.max_positions),
        norm_eps=fields.read_number(
            "rms_norm_eps", minimum=1e-20, maximum=1.0, default=row.norm_eps
        ),
        rope=rope,
        windows=windows,
        qkv_bias=_read_bias(fields, row.qkv_bias, "attention_bias", default=row.biased),
        output_bias=_read_bias(
            fields, row.output_bias or row.qkv_bias, "attention_bias", default=row.biased
        ),
        mlp_bias=_read_bias(fields, row.mlp_bias, "mlp_bias", default=row.biased),
        qk_norm=has_norms_of_heads(fields, row),
        tied=fields.read_boolean("tie_word_embeddings", default=row.tied),
        projection_norm=row.norms == "projection",
        experts=None
        if row.experts is None
        else parse_experts_config(
            fields, row.experts, layers=layers, intermediate_size=inner, what=what
        ),
        block=parse_block_config(
            fields,
            row,
            what=what,
            hidden_size=hidden,
            head_dim=narrow,
            windows=windows,
            varied=varied,
        ),
        delta_net=parse_delta_net(fields, layers) if row.delta_net else None,
    )


def _read_kv_heads(fields: ConfigFields, row: Architecture, heads: int) -> int:
    """Return the KV heads; an absent key means the row's default, null means ``heads``."""
    if row.places_rule == "falcon":
        return read_falcon_kv_heads(fields, heads)
    name = "num_key_value_heads"
    default = heads if row.kv_heads is None or fields.is_null(name) else row.kv_heads
    return fields.read_integer(name, minimum=1, maximum=1 << 10, default=default)


def _read_bias(fields: ConfigFields, rule: BiasRule, name: str, *, default: bool) -> bool:
    match rule:
        case "never":
            return False
        case "always":
            return True
        case "configured":
            return fields.read_boolean(name, default=default)
        case "configured_apart":
            return fields.read_boolean("qkv_bias", default=True)
