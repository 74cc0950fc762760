"""What a batch is: its base, its limits, and what it does where memory is short."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.engine.moe.start import USUAL, StartWishes
from expertctl.routing.request import (
    SKIP_CAP,
    AdapterDtype,
    DeviceName,
    Dtype,
    MoeColdWish,
    MoeMiss,
)

ROWS, QUEUE = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSettings:
    """One base in one form, and how many texts of it are written at a time."""

    base: str | None = None
    """Its name; None: the only one there is, or the one that `expertctl base` prefers."""
    budget: int | None = None
    """Bytes of the device's memory; None: as much as `run` would take."""
    kept_kv: int | None = None
    """Bytes of keys and values that are kept for later requests; None: a part of the budget."""
    device: DeviceName = "cpu"
    dtype: Dtype | None = None
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = SKIP_CAP
    moe_cold: MoeColdWish = "auto"
    moe: StartWishes = USUAL
    """How routed experts begin, where not all of them fit."""
    rows: int = ROWS
    """How many texts are written at a time."""
    queue: int = QUEUE
    """How many jobs may wait; more are refused."""
    on_budget: Literal["queue", "fewer"] = "queue"
    """What is done when experts do not fit: wait, or leave out those that never would."""
    warm_experts: bool = True
    """Whether kernels are compiled at the start for each kind of the installed experts."""
    tell_memory: bool = True
    """Whether the operator is told at the start what the memory is used for."""
    files: tuple[Path, ...] = ()
    """The ``.expert`` files that jobs may name; each is read into memory once, at the start."""
    warm: tuple[str, ...] = ()
    """Prompts that are answered with a few tokens before the first job is taken."""
