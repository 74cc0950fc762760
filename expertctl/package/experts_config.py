"""What the routed experts of a base are: how many, where, how large, and how tokens are routed.

A layer has either one dense feed-forward network, or a router, its experts, and with some
architectures a shared expert that reads every token.
"""

from dataclasses import asdict, dataclass

from expertctl.errors import IncompatibleError
from expertctl.package.architectures import ExpertsRow, RoutedLayers, Scoring
from expertctl.package.config_fields import Fields
from expertctl.schema.strict_json import JsonObject

MAX_COUNT = 1024
"""The most experts of one layer."""
MAX_ALL = 1 << 16
"""The most experts of all layers together; each has three matrices with names of their own."""
_MAX_SIZE = 1 << 19
_SIZE = "moe_intermediate_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The routed experts of a base: the same number and size in every layer that has any."""

    count: int
    used: int
    """How many experts a token is routed to (top-k)."""
    intermediate_size: int
    layers: tuple[int, ...]
    """The numbers of the layers that have routed experts; the others are dense."""
    scoring: Scoring
    normalised: bool
    """Whether the weights of a token are divided by their sum."""
    choice_bias: bool
    """Whether a bias takes part in the choice of experts, but not in their weights."""
    scale: float
    """The factor that the weights are multiplied with in the end."""
    shared_size: int
    """The intermediate size of the expert that reads every token; 0: there is none."""
    shared_gate: bool
    """Whether the shared expert has a gate of its own that scales its output."""

    def to_json(self) -> JsonObject:
        """Return every field as the digest of a base holds it."""
        return {**asdict(self), "layers": list(self.layers)}


def parse_experts(
    fields: Fields, row: ExpertsRow, *, layers: int, intermediate_size: int, what: str
) -> ExpertsConfig:
    """Read the keys that a row names; what is wrong is noted in ``fields``.

    Raises:
        IncompatibleError: for experts that are chosen by groups.
    """
    if row.scoring == "sigmoid":
        _refuse_groups(fields, what)
    before = len(fields.problems)
    count = _count(fields, row)
    used = fields.integer("num_experts_per_tok", low=1, high=MAX_COUNT, default=row.used)
    if used > count and len(fields.problems) == before:
        fields.refuse("num_experts_per_tok", f"is {used}, more than the {count} that there are")
    size = intermediate_size
    if row.size is not None:
        size = fields.integer(_SIZE, low=1, high=_MAX_SIZE, default=row.size)
    return ExpertsConfig(
        count=count,
        used=used,
        intermediate_size=size,
        layers=_layers(fields, row.layers, layers=layers, count=count),
        scoring=row.scoring,
        normalised=_normalised(fields, row),
        choice_bias=row.scoring == "sigmoid",
        scale=_scale(fields, row),
        shared_size=_shared_size(fields, row, size),
        shared_gate=row.shared == "gated",
    )


def _count(fields: Fields, row: ExpertsRow) -> int:
    """Read the number of experts from its one key, or from several that agree."""
    before = len(fields.problems)
    there = [name for name in row.count_names if fields.get(name) is not None]
    names = there or row.count_names[:1]
    counts = [fields.integer(n, low=1, high=MAX_COUNT, default=row.count) for n in names]
    if len(set(counts)) > 1 and len(fields.problems) == before:
        fields.refuse(names[0], f"and {names[1]} are not the same number")
    return counts[0]


def _normalised(fields: Fields, row: ExpertsRow) -> bool:
    if row.normalised is not None:
        return row.normalised
    return fields.boolean("norm_topk_prob", default=False)


def _scale(fields: Fields, row: ExpertsRow) -> float:
    if row.scoring != "sigmoid":
        return 1.0
    return fields.number("routed_scaling_factor", low=1e-3, high=1e3, default=1.0)


def _shared_size(fields: Fields, row: ExpertsRow, size: int) -> int:
    match row.shared:
        case "none":
            return 0
        case "gated":
            name = "shared_expert_intermediate_size"
            return fields.integer(name, low=1, high=_MAX_SIZE, default=5632)
        case "several":
            return size * fields.integer("n_shared_experts", low=1, high=MAX_COUNT)


def _layers(fields: Fields, rule: RoutedLayers, *, layers: int, count: int) -> tuple[int, ...]:
    match rule:
        case "all":
            routed = list(range(layers))
        case "by_step":
            step = fields.integer("decoder_sparse_step", low=1, high=1 << 20, default=1)
            dense = _dense_layers(fields)
            routed = [n for n in range(layers) if (n + 1) % step == 0 and n not in dense]
        case "after_first":
            first = fields.integer("first_k_dense_replace", low=0, high=1 << 20, default=0)
            routed = list(range(first, layers))
    if not routed:
        fields.refuse("num_hidden_layers", f"is {layers}, and no layer has routed experts")
    if len(routed) * count > MAX_ALL:
        fields.refuse(
            "num_hidden_layers", f"is {layers}: with {count} experts in each, that is too many"
        )
    return tuple(routed)


def _dense_layers(fields: Fields) -> set[int]:
    """Which layers ``mlp_only_layers`` names; numbers of layers that do not exist mean nothing."""
    name = "mlp_only_layers"
    value = fields.get(name)
    if value is None:
        return set()
    if not isinstance(value, list) or not all(type(number) is int for number in value):
        fields.refuse(name, "must be a list of numbers of layers")
        return set()
    return {number for number in value if isinstance(number, int)}


def _refuse_groups(fields: Fields, what: str) -> None:
    groups = fields.integer("n_group", low=1, high=1 << 10, default=1)
    if groups > 1:
        raise IncompatibleError(
            f"{what}: experts that are chosen by groups (n_group {groups}) are not supported",
            hint="supported is n_group 1",
        )
