"""Which experts a set of prompts uses, as JSON: which to pin and which to bring first.

The document is that of flash-moe. A profile counts in how many prompts each expert of a layer was
activated. An expert is *universal* if at least a share of all prompts, the threshold, activate it.
Profiles of one base can be merged and compared.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from expertctl.engine.moe.large_document import checked, load_document
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.schema.strict_json import JsonObject

THRESHOLD = 0.5
Counts = Mapping[int, int]
"""In how many prompts each expert was activated; never 0."""


@dataclass(frozen=True, slots=True)
class UsageProfile:
    """In how many prompts each expert of each layer was activated."""

    model: str
    prompts: int
    experts: int
    """Of each layer."""
    layers: Mapping[int, Counts]
    threshold: float = THRESHOLD
    capacity: int = 0
    """How many slots a layer had when this was recorded; 0 where unknown."""
    preset: str = ""
    """Which prompts these were."""
    asking: Mapping[int, int] = field(default_factory=dict)
    """How many of them asked a layer, where not all did."""

    def universal(self, layer: int) -> list[int]:
        """Return the experts of a layer that the threshold's share of prompts activate."""
        counts, asking = self.layers.get(layer, {}), self.asking.get(layer, self.prompts)
        return sorted(e for e, count in counts.items() if count >= self.threshold * asking)

    def ranked(self, layer: int) -> list[int]:
        """Return the experts of a layer that were activated, the most universal first."""
        counts = self.layers.get(layer, {})
        return sorted(counts, key=lambda expert: (-counts[expert], expert))

    def top(self, layer: int, count: int) -> list[int]:
        """Return so many experts of a layer to pin, the most universal.

        Raises:
            UsageError: when that number is negative.
        """
        if count < 0:
            raise UsageError(f"{count} experts cannot be pinned", hint="pin 0 or more")
        return self.ranked(layer)[:count]


def profile_of(
    selected: Mapping[int, Iterable[int]], *, model: str, experts: int, preset: str = ""
) -> UsageProfile:
    """Return the profile of one prompt: which experts each layer activated."""
    layers = {layer: _counts(Counter(set(asked))) for layer, asked in selected.items()}
    return UsageProfile(model, 1, experts, _sorted(layers), preset=preset)


def merged(profiles: Sequence[UsageProfile]) -> UsageProfile:
    """Return the profile of all prompts of several profiles; names and threshold of the first.

    Raises:
        IncompatibleError: when they are of different models.
        UsageError: when there are none.
    """
    if not profiles:
        raise UsageError("no profile to merge", hint="give at least one")
    first = profiles[0]
    layers: dict[int, Counter[int]] = {}
    for profile in profiles:
        if (profile.model, profile.experts) != (first.model, first.experts):
            raise IncompatibleError(
                f"profiles of {first.model} with {first.experts} experts and of {profile.model} "
                f"with {profile.experts} cannot be merged",
                hint="merge profiles of one model",
            )
        for layer, counts in profile.layers.items():
            layers.setdefault(layer, Counter()).update(counts)
    return UsageProfile(
        first.model,
        sum(profile.prompts for profile in profiles),
        first.experts,
        _sorted({layer: _counts(counts) for layer, counts in layers.items()}),
        threshold=first.threshold,
        capacity=first.capacity,
        preset=first.preset,
    )


def overlap(one: UsageProfile, other: UsageProfile) -> float:
    """Return how alike two profiles are: the mean Jaccard index of their universal experts.

    It is 1 for the same in every layer, 0 for none in common; a layer that has none in both does
    not count.
    """
    shares = []
    for layer in sorted({*one.layers, *other.layers}):
        here, there = set(one.universal(layer)), set(other.universal(layer))
        if here or there:
            shares.append(len(here & there) / len(here | there))
    return sum(shares) / len(shares) if shares else 1.0


def read_profile(data: bytes, *, what: str) -> UsageProfile:
    """Read a profile.

    Raises:
        InvalidPackageError: when it is malformed or too large.
    """
    return profile_in(load_document(data, what=what), what=what)


def profile_in(document: JsonObject, *, what: str) -> UsageProfile:
    """Return the profile that an object is.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    told = checked(document, _Document, what=what, schema="moe-profile")
    layers = {
        int(layer): _counts({int(e): count for e, count in record.activation_counts.items()})
        for layer, record in told.layers.items()
    }
    profile = UsageProfile(
        told.model,
        told.num_prompts,
        told.num_experts,
        _sorted(layers),
        threshold=told.threshold,
        capacity=told.capacity,
        preset=told.prompt_preset,
    )
    if problems := list(_wrong_numbers(profile)):
        raise InvalidPackageError(what, problems)
    return profile


def write_profile(profile: UsageProfile) -> bytes:
    """Return a profile as JSON."""
    document = {
        "model": profile.model,
        "num_prompts": profile.prompts,
        "threshold": profile.threshold,
        "capacity": profile.capacity,
        "num_experts": profile.experts,
        "moe_layers": len(profile.layers),
        "prompt_preset": profile.preset,
        "layers": {
            str(layer): {
                "universal": profile.universal(layer),
                "activation_counts": {str(expert): count for expert, count in counts.items()},
                "total_unique": len(counts),
            }
            for layer, counts in profile.layers.items()
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class _Layer(msgspec.Struct):
    activation_counts: dict[str, int]


class _Document(msgspec.Struct):
    num_prompts: int
    num_experts: int
    layers: dict[str, _Layer]
    model: str = ""
    threshold: float = THRESHOLD
    capacity: int = 0
    prompt_preset: str = ""


def _wrong_numbers(profile: UsageProfile) -> Iterable[str]:
    """Yield what a schema cannot say: experts that do not exist, counts beyond all prompts."""
    for layer, counts in profile.layers.items():
        if (highest := max(counts, default=0)) >= profile.experts:
            yield f"layers/{layer}: expert {highest} of only {profile.experts}"
        if (most := max(counts.values(), default=0)) > profile.prompts:
            yield f"layers/{layer}: activated by {most} of {profile.prompts} prompts"


def _counts(counts: Counts) -> Counts:
    return {expert: count for expert, count in sorted(counts.items()) if count}


def _sorted(layers: Mapping[int, Counts]) -> Mapping[int, Counts]:
    return dict(sorted(layers.items()))
