"""What all decoders share: the results of a pass, its times, and the checks of its input.

Tokens, virtual tokens and logits cross the seam between the generation loop and a decoder as numpy
arrays. This module imports neither numba nor torch.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from expertctl.engine.arrays import AnyArray
from expertctl.errors import IncompatibleError, UsageError
from expertctl.schema.strict_json import JsonObject, JsonValue

PREFILL_CHUNK = 512
"""Maximum number of prompt tokens in one pass."""


@dataclass(frozen=True, slots=True, eq=False)
class PrefillResult:
    """Result of a prompt: the logits of the first new token, float32 [vocab]."""

    logits: AnyArray
    tokens: int
    ms: float


@dataclass(frozen=True, slots=True, eq=False)
class DecodeResult:
    """Result of one token at ``position``: the logits of the next one, float32 [vocab]."""

    logits: AnyArray
    position: int
    ms: float


class LayerTimer:
    """Adds up the time of passes over one base, in seconds by place and by kind of operation.

    Places are ``embedding``, ``layers.3.attention``, ``layers.3.mlp`` and ``head``; with the suffix
    ``.experts``, what a plan adds there. A kind is the name of a kernel; a decoder that knows only
    places reports none.
    """

    def __init__(self) -> None:
        """Start with no time."""
        self.places: dict[str, float] = defaultdict(float)
        self.kinds: dict[str, float] = defaultdict(float)

    def add(self, place: str, seconds: float, *, kind: str | None = None) -> None:
        """Add the time of one operation, or of a whole place."""
        self.places[place] += seconds
        if kind is not None:
            self.kinds[kind] += seconds

    def add_all(
        self, places: Iterable[str], kinds: Iterable[str], seconds: Iterable[float]
    ) -> None:
        """Add the times of the operations of a program."""
        for place, kind, spent in zip(places, kinds, seconds, strict=True):
            self.add(place, float(spent), kind=kind)

    @property
    def seconds(self) -> float:
        """Total time."""
        return sum(self.places.values())

    def to_json(self, *, passes: int) -> JsonObject:
        """Return milliseconds per pass, by place and by kind, in insertion order."""
        return {"places": _round_ms(self.places, passes), "kinds": _round_ms(self.kinds, passes)}


def _round_ms(seconds: Mapping[str, float], passes: int) -> JsonValue:
    return {name: round(spent / passes * 1e3, 4) for name, spent in seconds.items()}


def check_tokens(ids: Sequence[int], vocabulary: int) -> AnyArray:
    """Return tokens as int64.

    Raises:
        UsageError: when there are none.
        IncompatibleError: for a token that the base does not have.
    """
    tokens = np.asarray(ids, dtype=np.int64)
    if len(tokens) == 0:
        raise UsageError("the prompt has no tokens", hint="give a prompt that is not empty")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        raise IncompatibleError(
            f"token {low if low < 0 else high} is outside the vocabulary of the base, {vocabulary}",
            hint="the tokenizer belongs to another base",
        )
    return tokens


def check_modules(changed: Collection[str], modules: frozenset[str]) -> None:
    """Check that a plan changes only layers that the base has.

    Raises:
        IncompatibleError: when it does not.
    """
    strange = [name for name in changed if name not in modules]
    if strange:
        raise IncompatibleError(
            f"the base has no linear layer {_format_names(strange)}",
            hint="the expert was made for another base",
        )


def check_soft_prompt(soft_prompt: AnyArray, hidden_size: int, *, length: int) -> None:
    """Check that virtual tokens [tokens, hidden] fit the base and come first.

    Raises:
        IncompatibleError: when their width differs from that of the base.
    """
    assert length == 0, "a soft prompt stands before the first token"
    if soft_prompt.shape[1] != hidden_size:
        raise IncompatibleError(
            f"a soft prompt has width {soft_prompt.shape[1]}, the base {hidden_size}",
            hint="the expert was made for another base",
        )


def make_token_input_error() -> IncompatibleError:
    """Return the error for a soft prompt on a base whose layers read embeddings of tokens."""
    return IncompatibleError(
        "the layers of this base read an embedding of each token, which virtual tokens do not have",
        hint="use a LoRA or another kind of expert",
    )


def _format_names(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (f" and {len(ordered) - 3} more" if len(ordered) > 3 else "")
