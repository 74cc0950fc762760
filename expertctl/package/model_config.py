"""What kind of decoder a base is: the one reading of ``config.json``, by a table of architectures.

A row holds all that an architecture does differently; the decoder knows no names. Defaults for
absent keys are those of transformers. Whatever the decoder would compute differently is refused.
The decoder runs on what is read here and the digest ``arch`` names it, so files that mean the same
decoder, however they spell it, are equal.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from expertctl.errors import IncompatibleError, NotFoundError
from expertctl.package.config_fields import Fields
from expertctl.package.rope_config import RopeConfig, parse_rope
from expertctl.schema.strict_json import JsonObject, load_object

CONFIG_FILE = "config.json"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"
_MAX_CONFIG_BYTES = 1 << 20

Bias = Literal["never", "always", "configured"]
Window = Literal["none", "every_layer", "late_layers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row: how this architecture differs from the others."""

    class_name: str
    max_positions: int
    qkv_bias: Bias = "never"
    output_bias: Bias = "never"
    mlp_bias: Bias = "never"
    qk_norm: bool = False
    kv_heads: int | None = None  # None: as many as heads
    head_dim: int | None = None  # None: hidden size / heads
    window: Window = "none"


ARCHITECTURES = {
    "llama": Architecture(
        class_name="LlamaForCausalLM",
        max_positions=2048,
        qkv_bias="configured",
        output_bias="configured",
        mlp_bias="configured",
    ),
    "mistral": Architecture(
        class_name="MistralForCausalLM", max_positions=131072, kv_heads=8, window="every_layer"
    ),
    "qwen2": Architecture(
        class_name="Qwen2ForCausalLM",
        max_positions=32768,
        qkv_bias="always",
        kv_heads=32,
        window="late_layers",
    ),
    "qwen3": Architecture(
        class_name="Qwen3ForCausalLM",
        max_positions=32768,
        qkv_bias="configured",
        output_bias="configured",
        qk_norm=True,
        kv_heads=32,
        head_dim=128,
        window="late_layers",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """All that the decoder reads; sizes are checked and fit together."""

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
    windows: tuple[int | None, ...]  # one per layer, None: every earlier token is seen
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool

    def to_json(self) -> JsonObject:
        """Return every field as the digest of a base holds it."""
        return {**asdict(self), "rope": self.rope.to_json(), "windows": list(self.windows)}

    def kv_bytes(self, tokens: int, *, itemsize: int) -> int:
        """Return the bytes of keys and values of that many tokens."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize * tokens

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of every linear layer, by module name, ``lm_head`` included."""
        shapes = {
            f"model.layers.{layer}.{name}": shape
            for layer in range(self.layers)
            for name, shape in self._layer_shapes().items()
        }
        return {**shapes, "lm_head": (self.vocab_size, self.hidden_size)}

    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every tensor that the weights must hold, and no other."""
        return dict(self._tensors())

    def _layer_shapes(self) -> dict[str, tuple[int, int]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (queries, self.hidden_size),
            "self_attn.k_proj": (keys, self.hidden_size),
            "self_attn.v_proj": (keys, self.hidden_size),
            "self_attn.o_proj": (self.hidden_size, queries),
            "mlp.gate_proj": (self.intermediate_size, self.hidden_size),
            "mlp.up_proj": (self.intermediate_size, self.hidden_size),
            "mlp.down_proj": (self.hidden_size, self.intermediate_size),
        }

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield EMBEDDING, (self.vocab_size, self.hidden_size)
        yield "model.norm.weight", (self.hidden_size,)
        if not self.tied:
            yield HEAD, (self.vocab_size, self.hidden_size)
        for layer in range(self.layers):
            yield from self._layer_tensors(f"model.layers.{layer}")

    def _layer_tensors(self, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}.{norm}.weight", (self.hidden_size,)
        for name, shape in self._layer_shapes().items():
            yield f"{prefix}.{name}.weight", shape
            if self._has_bias(name):
                yield f"{prefix}.{name}.bias", shape[:1]
        for norm in ("q_norm", "k_norm") if self.qk_norm else ():
            yield f"{prefix}.self_attn.{norm}.weight", (self.head_dim,)

    def _has_bias(self, name: str) -> bool:
        if name.startswith("mlp."):
            return self.mlp_bias
        return self.output_bias if name == "self_attn.o_proj" else self.qkv_bias


def read_config(directory: Path) -> ModelConfig:
    """Read the configuration of a base.

    Raises:
        NotFoundError: when there is none.
        IncompatibleError: when the decoder does not support such a model.
        InvalidPackageError: when it is malformed.
    """
    return parse_config(read_document(directory), what=str(directory / CONFIG_FILE))


def read_document(directory: Path) -> JsonObject:
    """Read ``config.json`` of a base, uninterpreted.

    Raises:
        NotFoundError: when there is none.
        InvalidPackageError: when it is malformed.
    """
    path = directory / CONFIG_FILE
    if not directory.is_dir():
        raise NotFoundError(
            f"{directory}: no such directory", hint="name the one that config.json is in"
        )
    try:
        data = path.read_bytes()
    except OSError as error:
        raise NotFoundError(
            f"{directory}: {CONFIG_FILE} is missing or cannot be read",
            hint="a base is a Hugging Face directory with config.json and safetensors",
        ) from error
    return load_object(data, what=str(path), max_bytes=_MAX_CONFIG_BYTES)


def parse_config(document: JsonObject, *, what: str = CONFIG_FILE) -> ModelConfig:
    """Check a configuration and return what the decoder needs of it.

    Raises:
        IncompatibleError: when the decoder does not support such a model.
        InvalidPackageError: with all problems, when values are malformed or absurd.
    """
    fields = Fields(document)
    row = _row(fields, what)
    _refuse_unsupported(fields, what)
    config = _build(fields, row)
    if config.heads % config.kv_heads:
        fields.refuse("num_attention_heads", "is not a multiple of num_key_value_heads")
    if config.head_dim % 2:
        fields.refuse("head_dim", "is odd, rotary positions need pairs")
    fields.raise_problems(what)
    return config


def _row(fields: Fields, what: str) -> Architecture:
    kind = fields.text("model_type")
    fields.raise_problems(what)
    row = ARCHITECTURES.get(kind)
    classes = fields.get("architectures")
    if row is None or (classes is not None and classes != [row.class_name]):
        named = kind if row is None else f"{kind} as {classes}"
        raise IncompatibleError(
            f"{what}: architecture {named[:100]!r} is not supported",
            hint=f"supported are {', '.join(sorted(ARCHITECTURES))}, each as a causal language "
            "model",
        )
    return row


def _refuse_unsupported(fields: Fields, what: str) -> None:
    activation = fields.text("hidden_act", default="silu")
    if activation != "silu":
        raise IncompatibleError(
            f"{what}: activation {activation[:40]!r} is not supported", hint="supported is silu"
        )
    if fields.get("quantization_config") is not None:
        raise IncompatibleError(
            f"{what}: weights quantised by quantization_config are not supported",
            hint="use the base in float32, float16 or bfloat16",
        )


def _build(fields: Fields, row: Architecture) -> ModelConfig:
    hidden = fields.integer("hidden_size", low=1, high=1 << 16)
    layers = fields.integer("num_hidden_layers", low=1, high=1 << 10)
    heads = fields.integer("num_attention_heads", low=1, high=1 << 10)
    head_dim = fields.integer(
        "head_dim", low=2, high=1 << 10, default=row.head_dim or max(hidden // heads, 2)
    )
    positions = fields.integer(
        "max_position_embeddings", low=1, high=1 << 24, default=row.max_positions
    )
    return ModelConfig(
        architecture=fields.text("model_type"),
        vocab_size=fields.integer("vocab_size", low=1, high=1 << 21),
        hidden_size=hidden,
        intermediate_size=fields.integer("intermediate_size", low=1, high=1 << 19),
        layers=layers,
        heads=heads,
        kv_heads=_kv_heads(fields, row, heads),
        head_dim=head_dim,
        max_positions=positions,
        norm_eps=fields.number("rms_norm_eps", low=1e-20, high=1.0, default=1e-6),
        rope=parse_rope(fields, dims=head_dim, max_positions=positions),
        windows=_windows(fields, row, layers),
        qkv_bias=_bias(fields, row.qkv_bias, "attention_bias"),
        output_bias=_bias(fields, row.output_bias, "attention_bias"),
        mlp_bias=_bias(fields, row.mlp_bias, "mlp_bias"),
        qk_norm=row.qk_norm,
        tied=fields.boolean("tie_word_embeddings", default=False),
    )


def _kv_heads(fields: Fields, row: Architecture, heads: int) -> int:
    """An absent key means what the row says, null means as many as heads, as in transformers."""
    name = "num_key_value_heads"
    default = heads if row.kv_heads is None or fields.is_null(name) else row.kv_heads
    return fields.integer(name, low=1, high=1 << 10, default=default)


def _bias(fields: Fields, rule: Bias, name: str) -> bool:
    return rule == "always" or (rule == "configured" and fields.boolean(name, default=False))


def _windows(fields: Fields, row: Architecture, layers: int) -> tuple[int | None, ...]:
    match row.window:
        case "none":
            return (None,) * layers
        case "every_layer":
            return _windows_of_mistral(fields, layers)
        case "late_layers":
            return _windows_of_qwen(fields, layers)


def _windows_of_mistral(fields: Fields, layers: int) -> tuple[int | None, ...]:
    if fields.get("layer_types") is not None:
        fields.refuse("layer_types", "is not supported for mistral")
    return (_window(fields),) * layers


def _windows_of_qwen(fields: Fields, layers: int) -> tuple[int | None, ...]:
    window = _window(fields) if fields.boolean("use_sliding_window", default=False) else None
    if fields.get("layer_types") is None:
        first = fields.integer("max_window_layers", low=0, high=1 << 20, default=28)
        return tuple(window if layer >= first else None for layer in range(layers))
    kinds = fields.get("layer_types")
    known = {"full_attention": None, "sliding_attention": window}
    names = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    if len(names) != layers or not known.keys() >= set(names):
        fields.refuse("layer_types", f"must be {layers} times full_attention or sliding_attention")
        return (None,) * layers
    if window is None and "sliding_attention" in names:
        fields.refuse("layer_types", "has sliding_attention, but use_sliding_window is not set")
    return tuple(known[name] for name in names)


def _window(fields: Fields) -> int | None:
    """An absent key means 4096 and null means none, as in transformers."""
    if fields.is_null("sliding_window"):
        return None
    return fields.integer("sliding_window", low=1, high=1 << 24, default=4096)
