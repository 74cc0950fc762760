"""What the engine of a server is doing, in numbers that are read now and then to be shown."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from expertctl.engine.budget import Purpose
from expertctl.engine.moe.counters import Observed
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.serving.batch import Counts
from expertctl.engine.serving.expert_counts import ExpertCounts
from expertctl.engine.tiers import Traffic

BLOCK = 16
"""Tokens of a block of keys and values; packed bases hold them in pages of as many."""


@dataclass(slots=True)
class Totals:
    """What became of jobs so far."""

    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    refused: int = 0
    """For want of a place in the queue."""
    paused: int = 0
    """Texts that gave their memory to those that began before them, and went on later."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    generated_tokens: int = 0
    experts: ExpertCounts = field(default_factory=ExpertCounts)
    """How many answered jobs each expert had a part in."""

    def copy(self) -> "Totals":
        """Return what became of jobs until now."""
        return replace(self, experts=self.experts.copy())


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """One moment; sizes in bytes, counts since the start."""

    waiting: int
    """Jobs in the queue."""
    preparing: int
    """Jobs that are being planned or loaded, or are ready for a row."""
    running: int
    """Texts in the batch."""
    rows: int
    """How many there may be."""
    totals: Totals
    counts: Counts
    held: Mapping[Purpose, int]
    limit: int
    peak: int
    kv_limit: int
    """What keys and values may take beside what else is held."""
    kv_in_use: int
    """Keys and values of texts that run; `held` counts those that are kept, too."""
    kv_kept_limit: int
    """What those may take that are kept for later requests."""
    kv_block: int
    """Bytes of the keys and values of `BLOCK` tokens."""
    traffic: Mapping[str, Traffic]
    """By tier."""
    running_plans: tuple[tuple[str, ...], ...]
    """The experts of each text in the batch."""
    waiting_plans: tuple[tuple[str, ...], ...]
    """The experts of each prepared job, and those that jobs in the queue ask for."""
    routed: RoutedReport | None = None
    """What became of routed experts; None where the base has none."""
    observed: Observed | None = None
    """What was counted of them, layer by layer; None where nothing is counted."""
    residents: Mapping[int, int] = field(default_factory=dict)
    """How many of them have a slot, by the number of the layer; empty where none needs one."""
