"""Which experts a set of prompts uses, as JSON: which to pin and which to bring first.

The document is that of flash-moe. A profile counts in how many prompts each expert of a layer was
activated. An expert is *universal* if at least a share of all prompts, the threshold, activate it.
Profiles of one base can be merged and compared.

Which experts a profile pins: they come first and keep their slots, whatever is asked for.

What is known of a base's routed experts before a run: from a named file, or from habits.

Both kinds of files are read: activity documents, with counts of tokens, and usage profiles, with
counts of prompts. An activity document is also a usage profile, one whose prompts are tokens.
"""

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import msgspec

from expertctl.engine.moe.activity import (
    MAX_BYTES,
    ActivityDocument,
    LayerActivity,
    load_document,
    parse_activity,
    parse_document,
)
from expertctl.engine.moe.activity_sum import count_tokens
from expertctl.errors import IncompatibleError, InvalidPackageError, StoreError, UsageError
from expertctl.files import open_regular_file
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER, ExpertsConfig
from expertctl.schema.strict_json import JsonObject

DEFAULT_THRESHOLD = 0.5
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
    threshold: float = DEFAULT_THRESHOLD
    capacity: int = 0
    """How many slots a layer had when this was recorded; 0 where unknown."""
    preset: str = ""
    """Which prompts these were."""
    asking: Mapping[int, int] = field(default_factory=dict)
    """How many of them asked a layer, where not all did."""

    def list_universal(self, layer: int) -> list[int]:
        """Return the experts of a layer that the threshold's share of prompts activate."""
        counts, asking = self.layers.get(layer, {}), self.asking.get(layer, self.prompts)
        return sorted(e for e, count in counts.items() if count >= self.threshold * asking)

    def rank_experts(self, layer: int) -> list[int]:
        """Return the experts of a layer that were activated, the most universal first."""
        counts = self.layers.get(layer, {})
        return sorted(counts, key=lambda expert: (-counts[expert], expert))

    def top_experts(self, layer: int, count: int) -> list[int]:
        """Return so many experts of a layer to pin, the most universal.

        Raises:
            UsageError: when that number is negative.
        """
        if count < 0:
            raise UsageError(f"{count} experts cannot be pinned", hint="pin 0 or more")
        return self.rank_experts(layer)[:count]


def profile_from_prompt(
    selected: Mapping[int, Iterable[int]], *, model: str, experts: int, preset: str = ""
) -> UsageProfile:
    """Return the profile of one prompt: which experts each layer activated."""
    layers = {layer: _drop_zeros(Counter(set(asked))) for layer, asked in selected.items()}
    return UsageProfile(model, 1, experts, _sort_layers(layers), preset=preset)


def merge_profiles(profiles: Sequence[UsageProfile]) -> UsageProfile:
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
        _sort_layers({layer: _drop_zeros(counts) for layer, counts in layers.items()}),
        threshold=first.threshold,
        capacity=first.capacity,
        preset=first.preset,
    )


def compute_overlap(one: UsageProfile, other: UsageProfile) -> float:
    """Return how alike two profiles are: the mean Jaccard index of their universal experts.

    It is 1 for the same in every layer, 0 for none in common; a layer that has none in both does
    not count.
    """
    shares = []
    for layer in sorted({*one.layers, *other.layers}):
        here, there = set(one.list_universal(layer)), set(other.list_universal(layer))
        if here or there:
            shares.append(len(here & there) / len(here | there))
    return sum(shares) / len(shares) if shares else 1.0


def read_profile(data: bytes, *, what: str) -> UsageProfile:
    """Read a profile.

    Raises:
        InvalidPackageError: when it is malformed or too large.
    """
    return parse_profile(load_document(data, what=what), what=what)


def parse_profile(document: JsonObject, *, what: str) -> UsageProfile:
    """Return the profile that an object is.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    told = parse_document(document, _ProfileFields, what=what, schema="moe-profile")
    layers = {
        int(layer): _drop_zeros({int(e): count for e, count in record.activation_counts.items()})
        for layer, record in told.layers.items()
    }
    profile = UsageProfile(
        told.model,
        told.num_prompts,
        told.num_experts,
        _sort_layers(layers),
        threshold=told.threshold,
        capacity=told.capacity,
        preset=told.prompt_preset,
    )
    if problems := list(_find_invalid_numbers(profile)):
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
                "universal": profile.list_universal(layer),
                "activation_counts": {str(expert): count for expert, count in counts.items()},
                "total_unique": len(counts),
            }
            for layer, counts in profile.layers.items()
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class _ProfileLayer(msgspec.Struct):
    activation_counts: dict[str, int]


class _ProfileFields(msgspec.Struct):
    num_prompts: int
    num_experts: int
    layers: dict[str, _ProfileLayer]
    model: str = ""
    threshold: float = DEFAULT_THRESHOLD
    capacity: int = 0
    prompt_preset: str = ""


def _find_invalid_numbers(profile: UsageProfile) -> Iterable[str]:
    """Yield what a schema cannot say: experts that do not exist, counts beyond all prompts."""
    for layer, counts in profile.layers.items():
        if (highest := max(counts, default=0)) >= profile.experts:
            yield f"layers/{layer}: expert {highest} of only {profile.experts}"
        if (most := max(counts.values(), default=0)) > profile.prompts:
            yield f"layers/{layer}: activated by {most} of {profile.prompts} prompts"


def _drop_zeros(counts: Counts) -> Counts:
    return {expert: count for expert, count in sorted(counts.items()) if count}


def _sort_layers(layers: Mapping[int, Counts]) -> Mapping[int, Counts]:
    return dict(sorted(layers.items()))


_PINS = re.compile(r"([0-9]{1,4})(%?)")
_PERCENT = 100


@dataclass(frozen=True, slots=True)
class TopPins:
    """So many experts of each layer: those that were asked for most."""

    count: int

    def __str__(self) -> str:
        """Return it as a person writes it."""
        return str(self.count)


@dataclass(frozen=True, slots=True)
class SharePins:
    """Those that at least a share of all prompts, or tokens, of a profile ask for."""

    share: float
    """From 0 to 1."""

    def __str__(self) -> str:
        """Return it as a person writes it."""
        return f"{self.share:.0%}"


Pins = TopPins | SharePins


def parse_pins(text: str) -> Pins:
    """Read a number of experts, such as ``8``, or a share of prompts, such as ``50%``.

    Raises:
        UsageError: for anything else.
    """
    match = _PINS.fullmatch(text.strip())
    number = int(match[1]) if match else -1
    if match and match[2] and number <= _PERCENT:
        return SharePins(number / _PERCENT)
    if match and not match[2] and number <= MAX_EXPERTS_PER_LAYER:
        return TopPins(number)
    raise UsageError(
        f"{text[:40]!r} is neither a number of experts to pin nor a share up to 100%",
        hint="write 8, the first of each layer, or 50%, those that half of all tokens ask for",
    )


def select_pinned(pins: Pins, usage: UsageProfile, layer: int, *, capacity: int) -> frozenset[int]:
    """Return which experts are pinned in a layer with ``capacity`` slots.

    A share pins no more experts than there are slots.

    Raises:
        UsageError: when more experts are to be pinned than there are slots, or there are none.
    """
    match pins:
        case TopPins(count):
            if count > capacity:
                raise UsageError(
                    f"{count} of each layer's routed experts are to be pinned, but layer {layer} "
                    f"has {capacity} slots",
                    hint="pin fewer experts, or give more memory",
                )
            return frozenset(usage.top_experts(layer, count))
        case SharePins(share):
            universal = set(replace(usage, threshold=share).list_universal(layer))
            ranked = [expert for expert in usage.rank_experts(layer) if expert in universal]
            if ranked and not capacity:
                raise UsageError(
                    f"{len(ranked)} of the routed experts of layer {layer} are to be pinned, but "
                    "it has no slots",
                    hint="pin none, or give more memory",
                )
            return frozenset(ranked[:capacity])


TOKENS_PRESET = "tokens"
"""The prompt preset of a profile that counts tokens."""
_PROFILE_FIELDS = {"num_prompts", "num_experts", "layers"}
"""Fields of usage profiles; a document without any of them is no profile."""
_HINT = "name a profile: `expertctl base profile export` writes one"


@dataclass(frozen=True, slots=True)
class ExpertUsage:
    """The counts of each expert, as both kinds of documents give them."""

    what: str
    """Where the counts come from, for a person to read."""
    activity: ActivityDocument
    profile: UsageProfile

    def layer_counts(self, layer: int) -> dict[int, int]:
        """Return how often each expert of a layer was asked for; never 0."""
        return dict(self.profile.layers.get(layer, {}))

    def require_counts(self) -> None:
        """Demand that some expert is counted: none is when counting was off.

        Raises:
            IncompatibleError: when none is.
        """
        if not any(self.profile.layers.values()):
            raise IncompatibleError(
                f"{self.what} counts no expert as asked for",
                hint="give one that was counted while texts were answered",
            )

    def check_fits(self, routed: ExpertsConfig) -> None:
        """Demand that the counts are of a base with these experts.

        Raises:
            IncompatibleError: when they are of other experts, or of layers that have none.
        """
        told, there = self.profile.experts, routed.count
        if told != there:
            raise IncompatibleError(
                f"{self.what} is of {told} routed experts in a layer, the base has {there}",
                hint="name a profile of this base",
            )
        used = self.activity.used
        if used not in (0, routed.used):
            raise IncompatibleError(
                f"{self.what} is of tokens that use {used} experts each, those of the base use "
                f"{routed.used}",
                hint="name a profile of this base",
            )
        highest = max(
            (max(counts, default=0) for counts in self.profile.layers.values()), default=0
        )
        if highest >= there:
            raise IncompatibleError(
                f"{self.what} counts expert {highest}, the base has {there} in a layer",
                hint="name a profile of this base",
            )
        if unknown := sorted(self.profile.layers.keys() - set(routed.layers)):
            raise IncompatibleError(
                f"{self.what} tells of layer {unknown[0]}, which has no routed experts",
                hint="name a profile of this base",
            )


def build_expert_usage(
    activity: ActivityDocument, routed: ExpertsConfig, *, what: str
) -> ExpertUsage:
    """Return what counts say of a base.

    Raises:
        IncompatibleError: when they are of another one.
    """
    guide = ExpertUsage(
        what, activity, profile_from_activity(activity, experts=activity.experts or routed.count)
    )
    guide.check_fits(routed)
    return guide


def profile_from_activity(
    activity: ActivityDocument, *, experts: int, model: str = ""
) -> UsageProfile:
    """Return counts as a profile: of prompts where these were counted, else of tokens.

    A prompt asks the last layer of a base for its last token alone, so fewer tokens ask there.
    """
    layers = {layer.layer: dict(sorted(layer.hits.items())) for layer in activity.layers}
    preset = activity.preset if activity.prompts else TOKENS_PRESET
    told, used = count_tokens(activity), 0 if activity.prompts else activity.used
    tokens = {n: -(-sum(counts.values()) // used) for n, counts in layers.items()} if used else {}
    asking = {n: count for n, count in tokens.items() if count < told}
    return UsageProfile(model, told, experts, layers, preset=preset, asking=asking)


def activity_from_profile(usage: UsageProfile) -> ActivityDocument:
    """Return a profile as raw counts: it does not say which were hot."""
    layers = (LayerActivity(layer, raw=counts) for layer, counts in usage.layers.items())
    return ActivityDocument(
        "update",
        tuple(layers),
        experts=usage.experts,
        prompts=usage.prompts,
        preset=usage.preset,
    )


def read_expert_usage(path: Path, routed: ExpertsConfig) -> ExpertUsage:
    """Read a file of either kind, for a base.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is neither, malformed or too large.
        IncompatibleError: when it is of another base, or counts no expert.
    """
    with open_profile(path) as stream:
        document = load_document(stream.read(MAX_BYTES + 1), what=str(path))
        guide = parse_expert_usage(document, routed, what=str(path))
        guide.require_counts()
        return guide


@contextmanager
def open_profile(path: Path) -> Iterator[BinaryIO]:
    """Open a profile, to read it or only to check that this is possible.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is no regular file, or what is read of it is malformed.
    """
    try:
        with open_regular_file(path) as stream:
            yield stream
    except OSError as error:
        fact = f"{path} cannot be read: {error.strerror or error}"
        raise StoreError(fact, hint="name a file that this user may read") from error
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error


def parse_expert_usage(document: JsonObject, routed: ExpertsConfig, *, what: str) -> ExpertUsage:
    """Return what a document of either kind says of a base.

    Raises:
        InvalidPackageError: when it is neither, or malformed.
        IncompatibleError: when it is of another base.
    """
    try:
        if "schema" in document:
            return build_expert_usage(parse_activity(document, what=what), routed, what=what)
        if not _PROFILE_FIELDS & document.keys():
            neither = "it is neither an activity document (schema) nor a profile (num_prompts)"
            raise InvalidPackageError(what, [neither])
        usage = parse_profile(document, what=what)
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error
    guide = ExpertUsage(what, activity_from_profile(usage), usage)
    guide.check_fits(routed)
    return guide
