"""What is known of a base's routed experts before a run: from a named file, or from habits.

Both kinds of files are read: activity documents, with counts of tokens, and usage profiles, with
counts of prompts. An activity document is also a usage profile, one whose prompts are tokens.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from expertctl.engine.moe.activity_document import (
    ActivityDocument,
    LayerActivity,
    activity_in,
)
from expertctl.engine.moe.activity_sum import tokens_of
from expertctl.engine.moe.large_document import MAX_BYTES, load_document
from expertctl.engine.moe.usage_profile import UsageProfile, profile_in
from expertctl.errors import IncompatibleError, InvalidPackageError, StoreError
from expertctl.package.experts_config import ExpertsConfig
from expertctl.regular_file import open_regular
from expertctl.schema.strict_json import JsonObject

TOKENS = "tokens"
"""The prompt preset of a profile that counts tokens."""
_OF_PROMPTS = {"num_prompts", "num_experts", "layers"}
"""Fields of usage profiles; a document without any of them is no profile."""
_HINT = "name a profile: `expertctl base profile export` writes one"


@dataclass(frozen=True, slots=True)
class Guide:
    """The counts of each expert, as both kinds of documents give them."""

    what: str
    """Where the counts come from, for a person to read."""
    activity: ActivityDocument
    usage: UsageProfile

    def counts(self, layer: int) -> dict[int, int]:
        """Return how often each expert of a layer was asked for; never 0."""
        return dict(self.usage.layers.get(layer, {}))

    def demand_counts(self) -> None:
        """Demand that some expert is counted: none is when counting was off.

        Raises:
            IncompatibleError: when none is.
        """
        if not any(self.usage.layers.values()):
            raise IncompatibleError(
                f"{self.what} counts no expert as asked for",
                hint="give one that was counted while texts were answered",
            )

    def check_fits(self, routed: ExpertsConfig) -> None:
        """Demand that the counts are of a base with these experts.

        Raises:
            IncompatibleError: when they are of other experts, or of layers that have none.
        """
        told, there = self.usage.experts, routed.count
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
        highest = max((max(counts, default=0) for counts in self.usage.layers.values()), default=0)
        if highest >= there:
            raise IncompatibleError(
                f"{self.what} counts expert {highest}, the base has {there} in a layer",
                hint="name a profile of this base",
            )
        if unknown := sorted(self.usage.layers.keys() - set(routed.layers)):
            raise IncompatibleError(
                f"{self.what} tells of layer {unknown[0]}, which has no routed experts",
                hint="name a profile of this base",
            )


def guide_of(activity: ActivityDocument, routed: ExpertsConfig, *, what: str) -> Guide:
    """Return what counts say of a base.

    Raises:
        IncompatibleError: when they are of another one.
    """
    guide = Guide(what, activity, usage_of(activity, experts=activity.experts or routed.count))
    guide.check_fits(routed)
    return guide


def usage_of(activity: ActivityDocument, *, experts: int, model: str = "") -> UsageProfile:
    """Return counts as a profile: of prompts where these were counted, else of tokens.

    A prompt asks the last layer of a base for its last token alone, so fewer tokens ask there.
    """
    layers = {layer.layer: dict(sorted(layer.hits.items())) for layer in activity.layers}
    preset = activity.preset if activity.prompts else TOKENS
    told, used = tokens_of(activity), 0 if activity.prompts else activity.used
    tokens = {n: -(-sum(counts.values()) // used) for n, counts in layers.items()} if used else {}
    asking = {n: count for n, count in tokens.items() if count < told}
    return UsageProfile(model, told, experts, layers, preset=preset, asking=asking)


def activity_of(usage: UsageProfile) -> ActivityDocument:
    """Return a profile as raw counts: it does not say which were hot."""
    layers = (LayerActivity(layer, raw=counts) for layer, counts in usage.layers.items())
    return ActivityDocument(
        "update",
        tuple(layers),
        experts=usage.experts,
        prompts=usage.prompts,
        preset=usage.preset,
    )


def read_guide(path: Path, routed: ExpertsConfig) -> Guide:
    """Read a file of either kind, for a base.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is neither, malformed or too large.
        IncompatibleError: when it is of another base, or counts no expert.
    """
    with open_profile(path) as stream:
        document = load_document(stream.read(MAX_BYTES + 1), what=str(path))
        guide = guide_in(document, routed, what=str(path))
        guide.demand_counts()
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
        with open_regular(path) as stream:
            yield stream
    except OSError as error:
        fact = f"{path} cannot be read: {error.strerror or error}"
        raise StoreError(fact, hint="name a file that this user may read") from error
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error


def guide_in(document: JsonObject, routed: ExpertsConfig, *, what: str) -> Guide:
    """Return what a document of either kind says of a base.

    Raises:
        InvalidPackageError: when it is neither, or malformed.
        IncompatibleError: when it is of another base.
    """
    try:
        if "schema" in document:
            return guide_of(activity_in(document, what=what), routed, what=what)
        if not _OF_PROMPTS & document.keys():
            neither = "it is neither an activity document (schema) nor a profile (num_prompts)"
            raise InvalidPackageError(what, [neither])
        usage = profile_in(document, what=what)
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error
    guide = Guide(what, activity_of(usage), usage)
    guide.check_fits(routed)
    return guide
