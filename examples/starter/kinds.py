"""The kinds of adapter that experts are trained as, each with its settings."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lora:
    """Low-rank matrices on all seven projections, perhaps with rank-stabilised scaling."""

    rank: int
    rslora: bool = False


@dataclass(frozen=True, slots=True)
class Dora:
    """LoRA with a trained length for each row of a projection."""

    rank: int


@dataclass(frozen=True, slots=True)
class Ia3:
    """A factor for each output of a projection, for each input of the last feed-forward one."""


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """Virtual tokens before the prompt, which start as the tokens of a system turn."""

    start: str


Kind = Lora | Dora | Ia3 | SoftPrompt
