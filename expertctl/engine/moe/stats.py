"""What became of routed experts while an answer was made: the ``moe`` object of a result."""

from dataclasses import dataclass

from expertctl.package.architectures import ExpertsConfig
from expertctl.package.model_config import ModelConfig
from expertctl.routing.request import MoeCold, MoeMiss
from expertctl.schema.strict_json import JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertResidency:
    """How many routed experts a base has, and how many of them are in memory at most."""

    miss: MoeMiss = "exact"
    layers: int
    experts: int
    """Of each layer."""
    slots: int
    """Of each layer: how many are kept; the mean, where layers differ."""
    blocks: int
    """How many are in memory at most, of all layers."""
    cold: MoeCold = "read"
    """How the others come from the disk."""

    @classmethod
    def whole(cls, config: ExpertsConfig) -> "ExpertResidency":
        """Return the residency of a base whose routed experts are all in memory."""
        layers, count = len(config.layers), config.count
        return cls(layers=layers, experts=count, slots=count, blocks=layers * count)

    @property
    def total(self) -> int:
        """How many there are in all layers."""
        return self.layers * self.experts

    @property
    def is_whole(self) -> bool:
        """Whether each expert has a slot; else one may be missing though there is room for all."""
        return self.slots >= self.experts

    def to_json(self) -> JsonObject:
        """Return it as it stands in the ``moe`` object."""
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
    """What was asked for and brought since a model was loaded; everything only grows."""

    requests: int = 0
    """Experts that passes asked for, each once for a pass and layer."""
    misses: int = 0
    """Those of them that were not in memory then."""
    loads: int = 0
    """Experts that were read from files."""
    read_ahead: int = 0
    """Those of them that had not been asked for yet."""
    read_bytes: int = 0
    waited_ms: float = 0.0
    """How long passes waited for them."""
    mapped: int = 0
    """Experts that were asked for and computed where the system caches their copy."""
    swaps: int = 0
    """Slots that got another expert."""
    router_weight: float = 0.0
    """The weights that routers gave."""
    skipped_weight: float = 0.0
    """What of them was left out."""

    def __add__(self, other: "ExpertActivity") -> "ExpertActivity":
        """Return what both did."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def since(self, before: "ExpertActivity") -> "ExpertActivity":
        """Return what was added to what was known before."""
        names = self.__dataclass_fields__
        return ExpertActivity(
            **{name: getattr(self, name) - getattr(before, name) for name in names}
        )


@dataclass(frozen=True, slots=True)
class RoutedExpertStats:
    """Residence and activity, for one answer."""

    residence: ExpertResidency
    activity: ExpertActivity

    @property
    def fallback_rate(self) -> float:
        """Misses by requests, 0 where nothing was asked for."""
        return _ratio(self.activity.misses, self.activity.requests)

    @property
    def skipped_share(self) -> float:
        """How much of all weights was left out, 0 to 1."""
        return _ratio(self.activity.skipped_weight, self.activity.router_weight)

    def combine(self, later: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return the activity of both, with the later residence."""
        return RoutedExpertStats(later.residence, self.activity + later.activity)

    def since(self, before: "RoutedExpertStats") -> "RoutedExpertStats":
        """Return what happened after another report."""
        return RoutedExpertStats(self.residence, self.activity.since(before.activity))

    def to_json(self) -> JsonObject:
        """Return the ``moe`` object; shares are 0 where nothing was asked for."""
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
    """Return the report of a base whose routed experts are all in memory, if it has any."""
    routed = config.experts
    if routed is None:
        return None
    return RoutedExpertStats(ExpertResidency.whole(routed), NO_ACTIVITY)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
