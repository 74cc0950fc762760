"""Statistics of routed experts during a request: the ``moe`` object of a result."""

from dataclasses import dataclass

from expertctl.engine_config import MoeCold, MoeMiss
from expertctl.package.model_config import ModelConfig
from expertctl.schema.strict_json import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertResidency:
    """How many routed experts a base has, and how many can be in memory."""

    miss: MoeMiss = "exact"
    layers: int
    experts: int
    """Of each layer."""
    slots: int
    """Of each layer: how many are kept; the mean if layers differ."""
    blocks: int
    """How many experts can be in memory, in all layers."""
    cold: MoeCold = "read"
    """How the other experts are read from disk."""

    @classmethod
    def whole(cls, layers: int, experts: int) -> "ExpertResidency":
        """Return the residency of a base whose routed experts are all in memory."""
        return cls(layers=layers, experts=experts, slots=experts, blocks=layers * experts)

    @property
    def total(self) -> int:
        """The number of experts in all layers."""
        return self.layers * self.experts

    @property
    def is_whole(self) -> bool:
        """Whether each expert has a slot; if not, one may be missing even if all fit."""
        return self.slots >= self.experts

    def to_json(self) -> JsonObject:
        """Return the fields of the ``moe`` object."""
        return {
            "miss": self.miss,
            "layers": self.layers,
            "experts": self.experts,
            "slots": self.slots,
            "in_memory": self.blocks,
            "cold": self.cold,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertActivity:
    """Requests and reads since a model was loaded; all values only grow."""

    requests: int = 0
    """Experts that passes chose, each once per pass and layer."""
    misses: int = 0
    """Requests whose expert was not in memory."""
    loads: int = 0
    """Experts that were read from files."""
    read_ahead: int = 0
    """Loads that started before the expert was chosen."""
    read_bytes: int = 0
    waited_ms: float = 0.0
    """How long passes waited for experts."""
    mapped: int = 0
    """Experts that were chosen and computed in the page cache of their copy."""
    swaps: int = 0
    """Slots that were given to another expert."""
    router_weight: float = 0.0
    """Sum of the weights that routers gave."""
    skipped_weight: float = 0.0
    """The part of it that was skipped."""

    def __add__(self, other: "ExpertActivity") -> "ExpertActivity":
        """Return the sums."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def since(self, before: "ExpertActivity") -> "ExpertActivity":
        """Return the difference to an earlier state."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) - getattr(before, name) for name in names}
        )


@dataclass(frozen=True, slots=True)
class RoutedExpertStats:
    """Residency and activity for one request."""

    residence: ExpertResidency
    activity: ExpertActivity

    @property
    def fallback_rate(self) -> float:
        """Misses by requests; 0 without requests."""
        return _ratio(self.activity.misses, self.activity.requests)

    @property
    def skipped_share(self) -> float:
        """The share of router weight that was skipped, 0 to 1."""
        return _ratio(self.activity.skipped_weight, self.activity.router_weight)

    def combine(self, later: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return the activity of both, with the later residency."""
        return RoutedExpertStats(later.residence, self.activity + later.activity)

    def since(self, before: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return the activity since an earlier report."""
        return RoutedExpertStats(self.residence, self.activity.since(before.activity))

    def to_json(self) -> JsonObject:
        """Return the ``moe`` object; shares are 0 without requests."""
        activity = self.activity
        return {
            **self.residence.to_json(),
            "requests": activity.requests,
            "misses": activity.misses,
            "fallback_rate": round(self.fallback_rate, 6),
            "skipped_mass": round(self.skipped_share, 6),
            "loads": activity.loads,
            "read_ahead": activity.read_ahead,
            "bytes_read": activity.read_bytes,
            "waited_ms": round(activity.waited_ms, 3),
            "swaps": activity.swaps,
            "lent": activity.mapped,
        }


NO_ACTIVITY = ExpertActivity()


def make_resident_stats(config: ModelConfig) -> RoutedExpertStats | None:
    """Return the statistics of a base in memory as a whole; None without routed experts."""
    routed = config.experts
    if routed is None:
        return None
    residency = ExpertResidency.whole(len(routed.layers), routed.count)
    return RoutedExpertStats(residency, NO_ACTIVITY)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
