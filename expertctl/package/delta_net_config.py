"""`DeltaNetConfig`: layers with a gated DeltaNet in place of attention, from ``config.json``.

Their sizes, the names and shapes of their tensors, and how files hold several of them in one.
"""

from dataclasses import asdict, dataclass

from expertctl.package.architectures import ConfigFields
from expertctl.package.stored_layout import HeadSizes, ModulePart
from expertctl.schema.strict_json import JsonObject

_FULL_ATTENTION, _LINEAR_ATTENTION = "full_attention", "linear_attention"
_MAX_HEADS, _MAX_DIMS, _MAX_KERNEL = 1 << 10, 1 << 10, 64
OUTPUT_GATE_MODULE = "self_attn.output_gate"
_GATED_QUERIES = "self_attn.gated_q_proj"
_INPUTS = tuple(f"linear_attn.in_proj_{name}" for name in "qkvzba")


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaNetConfig:
    """The layers with a gated DeltaNet (arXiv:2412.06464); the attention of others has a gate.

    Such a layer has no keys and values of earlier tokens, but a state of one size: the last inputs
    of its convolution, and a matrix for each head of values.
    """

    layers: tuple[int, ...]
    """Their indices."""
    key_heads: int
    value_heads: int
    """A multiple of ``key_heads``."""
    key_dim: int
    value_dim: int
    kernel: int
    """The number of tokens that the convolution reads at once."""

    @property
    def keys(self) -> int:
        """Outputs of all heads of keys, and of queries."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Outputs of all heads of values."""
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def conv_numbers(self) -> int:
        """Numbers of the inputs of the convolution that the state of a layer has first."""
        return (self.kernel - 1) * self.channels

    @property
    def state_shape(self) -> tuple[int, int]:
        """The layers with a state, and the numbers of the state of each."""
        return len(self.layers), self.conv_numbers + self.values * self.key_dim

    def list_linear_shapes(self, hidden: int) -> dict[str, tuple[int, int]]:
        """Return ``(out, in)`` of the linear layers of such a layer; those of its input first."""
        outputs = (self.keys, self.keys, self.values, self.values)
        sizes = zip(_INPUTS, (*outputs, self.value_heads, self.value_heads), strict=True)
        return {**{n: (s, hidden) for n, s in sizes}, "linear_attn.out_proj": (hidden, self.values)}

    def list_vector_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the other tensors of such a layer."""
        return {
            "linear_attn.conv1d.weight": (self.channels, 1, self.kernel),
            "linear_attn.dt_bias": (self.value_heads,),
            "linear_attn.A_log": (self.value_heads,),
            "linear_attn.norm.weight": (self.value_dim,),
        }

    def list_fused(self, sizes: HeadSizes, *, grouped: bool) -> dict[str, tuple[ModulePart, ...]]:
        """Return the modules of files that are several of ours; attention has these ``sizes``."""
        shares = self.value_heads // self.key_heads
        keys, values = self.key_dim, shares * self.value_dim
        fused = {
            _GATED_QUERIES: _divide_groups(
                ("self_attn.q_proj", OUTPUT_GATE_MODULE), (sizes.dims, sizes.dims), sizes.heads
            )
        }
        if grouped:
            for name, inputs, rows in (
                ("qkvz", _INPUTS[:4], (keys, keys, values, values)),
                ("ba", _INPUTS[4:], (shares, shares)),
            ):
                parts = _divide_groups(inputs, rows, self.key_heads)
                fused[f"linear_attn.in_proj_{name}"] = parts
        else:
            numbers = (self.keys, self.keys, self.values)
            fused["linear_attn.in_proj_qkv"] = tuple(
                ModulePart(name, number, place * self.keys)
                for place, (name, number) in enumerate(zip(_INPUTS, numbers, strict=False))
            )
        return fused

    def to_json(self) -> JsonObject:
        """Return every field as in the digest of a base."""
        return {**asdict(self), "layers": list(self.layers)}


DELTA_NET_NAMES = {_GATED_QUERIES: "self_attn.q_proj"}
"""The names of modules of `DeltaNetConfig.list_fused` in files, if they differ."""


def _divide_groups(
    names: tuple[str, ...], sizes: tuple[int, ...], groups: int
) -> tuple[ModulePart, ...]:
    """Return modules whose rows alternate: so many of each, group by group."""
    begins = [sum(sizes[:place]) for place in range(len(sizes))]
    return tuple(
        ModulePart(name, size * groups, begin, size, sum(sizes))
        for name, size, begin in zip(names, sizes, begins, strict=True)
    )


def parse_delta_net(fields: ConfigFields, layers: int) -> DeltaNetConfig:
    """Read which layers have a gated DeltaNet, and its sizes; problems go to ``fields``."""

    def read(name: str, maximum: int, default: int, minimum: int = 1) -> int:
        return fields.read_integer(name, minimum=minimum, maximum=maximum, default=default)

    heads = (
        read("linear_num_key_heads", _MAX_HEADS, 16),
        read("linear_num_value_heads", _MAX_HEADS, 32),
    )
    if heads[1] % heads[0]:
        fields.add_problem("linear_num_value_heads", "is not a multiple of linear_num_key_heads")
    return DeltaNetConfig(
        layers=_read_delta_layers(fields, layers),
        key_heads=heads[0],
        value_heads=heads[1],
        key_dim=read("linear_key_head_dim", _MAX_DIMS, 128),
        value_dim=read("linear_value_head_dim", _MAX_DIMS, 128),
        kernel=read("linear_conv_kernel_dim", _MAX_KERNEL, 4, minimum=2),
    )


def _read_delta_layers(fields: ConfigFields, layers: int) -> tuple[int, ...]:
    name = "layer_types"
    kinds = fields.get(name)
    if kinds is None:
        step = fields.read_integer("full_attention_interval", minimum=1, maximum=1 << 20, default=4)
        kinds = [
            _LINEAR_ATTENTION if (layer + 1) % step else _FULL_ATTENTION for layer in range(layers)
        ]
    names = [str(kind) for kind in kinds] if isinstance(kinds, list) else []
    if len(names) != layers or set(names) != {_FULL_ATTENTION, _LINEAR_ATTENTION}:
        fields.add_problem(
            name, f"must be {layers} times {_LINEAR_ATTENTION} or {_FULL_ATTENTION}, and have both"
        )
    return tuple(n for n, kind in enumerate(names[:layers]) if kind == _LINEAR_ATTENTION)
