"""The usage of routed experts before a run, from a file or learnt, and the experts it pins.

There are two codecs of one profile, `ActivityDocument`: activity documents, which count tokens, and
usage profiles in the format of flash-moe, which count in how many prompts each expert of a layer
was activated. Tokens are written to a usage profile as if each was a prompt. An expert is
*universal* if at least a share of all prompts, the threshold, activate it. Pinned experts are
loaded first and keep their slots, whatever is chosen later.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import msgspec

from expertctl.engine.moe.activity import (
    MAX_BYTES,
    ActivityDocument,
    Counts,
    LayerActivity,
    load_document,
    parse_activity,
    parse_document,
)
from expertctl.engine.moe.activity_sum import count_tokens
from expertctl.engine_config import Pins, SharePins, TopPins
from expertctl.errors import IncompatibleError, InvalidPackageError, StoreError, UsageError
from expertctl.files import open_regular_file
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER, ExpertsConfig
from expertctl.schema.strict_json import JsonObject

DEFAULT_THRESHOLD = 0.5
"""The share of prompts that makes an expert universal in a profile that is written."""
TOKENS_PRESET = "tokens"
"""The prompt preset of a profile that counts tokens."""


@dataclass(frozen=True)
class ExpertUsage:
    """How often each expert of a base was chosen, read from either kind of document."""

    what: str
    """Where the counts come from, for a person to read."""
    activity: ActivityDocument

    @cached_property
    def layers(self) -> Mapping[int, Counts]:
        """The counts of each layer of the document, by expert; never 0."""
        return {each.layer: dict(sorted(each.hits.items())) for each in self.activity.layers}

    @property
    def prompts(self) -> int:
        """How many prompts were counted, or tokens where no prompts were."""
        return count_tokens(self.activity)

    @property
    def preset(self) -> str:
        """The prompts that were counted; `TOKENS_PRESET` where tokens were."""
        return self.activity.preset if self.activity.prompts else TOKENS_PRESET

    def layer_counts(self, layer: int) -> Counts:
        """Return how often each expert of a layer was chosen; never 0."""
        return self.layers.get(layer, {})

    def rank_experts(self, layer: int) -> list[int]:
        """Return the experts of a layer that were chosen, the most frequent first."""
        counts = self.layer_counts(layer)
        return sorted(counts, key=lambda expert: (-counts[expert], expert))

    def list_universal(self, layer: int, share: float) -> list[int]:
        """Return the experts that at least this share of the prompts or tokens of a layer chose.

        A prompt runs the last layer for its last token only, so fewer tokens may count there.
        """
        counts, used, asking = self.layer_counts(layer), self.activity.used, self.prompts
        if used and not self.activity.prompts:
            asking = -(-sum(counts.values()) // used)
        return [expert for expert, count in counts.items() if count >= share * asking]

    def require_counts(self) -> None:
        """Check that some expert is counted: none is when counting was off.

        Raises:
            IncompatibleError: when none is.
        """
        if not any(self.layers.values()):
            raise IncompatibleError(
                f"{self.what} counts no expert that was chosen",
                hint="use a profile that was recorded while requests were answered",
            )

    def check_fits(self, routed: ExpertsConfig) -> None:
        """Check that the counts can be of a base with these experts.

        Raises:
            IncompatibleError: when they are of other experts, or of layers that have none.
        """
        if fact := next(self._find_misfits(routed), None):
            raise IncompatibleError(f"{self.what} {fact}", hint="use a profile of this base")

    def _find_misfits(self, routed: ExpertsConfig) -> Iterator[str]:
        experts, used, count = self.activity.experts, self.activity.used, routed.count
        if experts not in (0, count):
            yield f"has {experts} routed experts in a layer, the base has {count}"
        if used not in (0, routed.used):
            yield f"has {used} experts per token, the base has {routed.used}"
        highest = max((max(counts, default=0) for counts in self.layers.values()), default=0)
        if highest >= count:
            yield f"counts expert {highest}, the base has {count} in a layer"
        if unknown := sorted(self.layers.keys() - set(routed.layers)):
            yield f"has layer {unknown[0]}, which has no routed experts"


def build_expert_usage(
    activity: ActivityDocument, routed: ExpertsConfig, *, what: str
) -> ExpertUsage:
    """Return the usage of the experts of a base.

    Raises:
        IncompatibleError: when the counts are of another base.
    """
    usage = ExpertUsage(what, activity)
    usage.check_fits(routed)
    return usage


def activity_from_counts(
    layers: Mapping[int, Counts], *, experts: int, prompts: int, preset: str = ""
) -> ActivityDocument:
    """Return counts of prompts as raw counts, which are not known to be hot or cold."""
    return ActivityDocument(
        "update",
        tuple(LayerActivity(layer, raw=counts) for layer, counts in sorted(layers.items())),
        experts=experts,
        prompts=prompts,
        preset=preset,
    )


def parse_profile(document: JsonObject, *, what: str) -> ActivityDocument:
    """Return the counts of a usage profile.

    Raises:
        InvalidPackageError: when it is malformed.
    """
    read = parse_document(document, _ProfileFields, what=what, schema="moe-profile")
    layers = {
        int(layer): {int(e): n for e, n in sorted(record.activation_counts.items()) if n}
        for layer, record in read.layers.items()
    }
    if problems := list(_find_invalid_numbers(read, layers)):
        raise InvalidPackageError(what, problems)
    return activity_from_counts(
        layers, experts=read.num_experts, prompts=read.num_prompts, preset=read.prompt_preset
    )


def write_profile(usage: ExpertUsage, *, experts: int, model: str) -> bytes:
    """Return the usage of a model with so many experts in a layer as a usage profile, in JSON."""
    document = {
        "model": model,
        "num_prompts": usage.prompts,
        "threshold": DEFAULT_THRESHOLD,
        "capacity": 0,
        "num_experts": experts,
        "moe_layers": len(usage.layers),
        "prompt_preset": usage.preset,
        "layers": {
            str(layer): {
                "universal": usage.list_universal(layer, DEFAULT_THRESHOLD),
                "activation_counts": {str(expert): count for expert, count in counts.items()},
                "total_unique": len(counts),
            }
            for layer, counts in usage.layers.items()
        },
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


class _ProfileLayer(msgspec.Struct):
    activation_counts: dict[str, int]


class _ProfileFields(msgspec.Struct):
    num_prompts: int
    num_experts: int
    layers: dict[str, _ProfileLayer]
    prompt_preset: str = ""


def _find_invalid_numbers(read: _ProfileFields, layers: Mapping[int, Counts]) -> Iterator[str]:
    """Yield what a schema cannot say: experts that do not exist, counts beyond all prompts."""
    for layer, counts in layers.items():
        if (highest := max(counts, default=0)) >= read.num_experts:
            yield f"layers/{layer}: expert {highest} of only {read.num_experts}"
        if (most := max(counts.values(), default=0)) > read.num_prompts:
            yield f"layers/{layer}: activated by {most} of {read.num_prompts} prompts"


_PINS = re.compile(r"([0-9]{1,4})(%?)")
_PERCENT = 100


def parse_pins(text: str) -> Pins:
    """Parse a number of experts, such as ``8``, or a share of prompts, such as ``50%``.

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
        hint="write 8, the most frequent of each layer, or 50%, those that half of the tokens use",
    )


def select_pinned(pins: Pins, usage: ExpertUsage, layer: int, *, capacity: int) -> frozenset[int]:
    """Return the pinned experts of a layer with ``capacity`` slots.

    A share pins no more experts than there are slots.

    Raises:
        UsageError: when a number is larger than the slots, or a share pins some and there are none.
    """
    match pins:
        case TopPins(count):
            if count > capacity:
                raise UsageError(
                    f"cannot pin {count} routed experts of each layer: layer {layer} has "
                    f"{capacity} slots",
                    hint="pin fewer experts, or give more memory",
                )
            return frozenset(usage.rank_experts(layer)[:count])
        case SharePins(share):
            universal = set(usage.list_universal(layer, share))
            ranked = [expert for expert in usage.rank_experts(layer) if expert in universal]
            if ranked and not capacity:
                raise UsageError(
                    f"cannot pin {len(ranked)} routed experts of layer {layer}: it has no slots",
                    hint="pin none, or give more memory",
                )
            return frozenset(ranked[:capacity])


_PROFILE_FIELDS = {"num_prompts", "num_experts", "layers"}
"""Fields of usage profiles; a document without any of them is not one."""
_HINT = "name a profile: `expertctl base profile export` writes one"


def read_expert_usage(path: Path, routed: ExpertsConfig) -> ExpertUsage:
    """Read a file of either format, for a base.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is neither, malformed or too large.
        IncompatibleError: when it is of another base, or counts no expert.
    """
    with open_profile(path) as stream:
        document = load_document(stream.read(MAX_BYTES + 1), what=str(path))
        usage = parse_expert_usage(document, routed, what=str(path))
        usage.require_counts()
        return usage


@contextmanager
def open_profile(path: Path) -> Iterator[BinaryIO]:
    """Open a profile, to read it or only to check that this is possible.

    Raises:
        NotFoundError: when there is no such file.
        StoreError: when it cannot be read.
        InvalidPackageError: when it is not a regular file, or its contents are malformed.
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
    """Convert a document of either format, for a base.

    Raises:
        InvalidPackageError: when it is neither, or malformed.
        IncompatibleError: when it is of another base.
    """
    try:
        if "schema" in document:
            activity = parse_activity(document, what=what)
        elif not _PROFILE_FIELDS & document.keys():
            neither = "it is neither an activity document (schema) nor a profile (num_prompts)"
            raise InvalidPackageError(what, [neither])
        else:
            activity = parse_profile(document, what=what)
    except InvalidPackageError as error:
        raise InvalidPackageError(error.what, error.problems, hint=_HINT) from error
    return build_expert_usage(activity, routed, what=what)
