"""Configuration of the serving engine; imports neither torch nor the engine's memory."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from expertctl.engine.moe.warmup import DEFAULT_WARMUP, WarmupConfig
from expertctl.routing.request import (
    DEFAULT_SKIP_CAP,
    AdapterDtype,
    DeviceName,
    Dtype,
    MoeColdOption,
    MoeMiss,
)

DEFAULT_ROWS, DEFAULT_QUEUE = 16, 128


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One base with its options, and the number of sequences decoded at a time."""

    base: str | None = None
    """Name of the base; None: the only one, or the one that `expertctl base` prefers."""
    budget: int | None = None
    """Bytes of the device's memory; None: the default of `run`."""
    kept_kv: int | None = None
    """Bytes of KV kept for later requests; None: a fraction of the budget."""
    device: DeviceName = "cpu"
    dtype: Dtype | None = None
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = DEFAULT_SKIP_CAP
    moe_cold: MoeColdOption = "auto"
    moe: WarmupConfig = DEFAULT_WARMUP
    """Warm-up of routed experts, where not all of them fit."""
    rows: int = DEFAULT_ROWS
    """Number of sequences decoded at a time."""
    queue: int = DEFAULT_QUEUE
    """Number of jobs that may wait; more are refused."""
    on_budget: Literal["queue", "fewer"] = "queue"
    """What happens when experts do not fit: wait, or drop those that never would."""
    warm_experts: bool = True
    """Whether kernels are compiled at the start for each kind of installed expert."""
    tell_memory: bool = True
    """Whether the memory use is reported to the operator at the start."""
    files: tuple[Path, ...] = ()
    """The ``.expert`` files that jobs may name; each is read into memory once, at the start."""
    warm: tuple[str, ...] = ()
    """Prompts that are answered with a few tokens before the first job is accepted."""
