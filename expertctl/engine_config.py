"""`EngineConfig`: how an engine computes, in how much memory, and how many sequences at a time.

The command line builds it once, from options, settings and environment
(`expertctl.cli.run_options`), and passes it whole: to the router, because data types and device are
part of a plan's identity, to the local engine and to the serving engine, to evaluations and to
benchmarks. This module imports only errors, so that ``--help`` can use its names.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from expertctl.errors import UsageError

EngineName = Literal["native", "transformers"]
"""Our own decoder, or transformers: slower, for models that our decoder does not support."""
DeviceName = Literal["cpu", "cuda"]
"""The device that computes."""
DeviceChoice = Literal["cpu", "cuda", "auto"]
"""The user's choice; ``auto`` is a CUDA device if there is one."""
Dtype = Literal["float32", "bf16", "int8", "int4", "gguf"]
"""The data type of the base weights in memory; ``gguf``: the blocks of a GGUF file as they are."""
GGUF_BLOCKS = frozenset({"Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K"})
"""The kinds of blocks that kernels compute with as they are, by ggml's names."""
QUANTISED_DTYPES = frozenset[Dtype]({"int8", "int4"})
"""The dtypes with one scale per group of weights."""
KL_LIMITS: dict[Dtype, float] = {"int8": 0.05, "int4": 0.25}
"""Maximum KL divergence from its own weights, in nats, at which a base runs in a dtype."""
AdapterDtype = Literal["published", "fp16", "int8"]
"""The data type of the expert weights in memory."""
MoeMiss = Literal["exact", "skip"]
"""What happens when a routed expert is not in memory: it is loaded, or skipped."""
MoeCold = Literal["read", "map", "direct"]
"""How a routed expert is read from disk: copied, mapped in the page cache, or by direct I/O."""
MoeColdOption = Literal["auto", "read", "map", "direct"]
"""The user's choice; ``auto`` uses direct I/O if the page cache could hold little of the model."""
Warmup = Literal["none", "hybrid", "full"]
"""none: experts are read when chosen; hybrid: known ones are read during passes; full: before."""
DEVICES: tuple[DeviceChoice, ...] = get_args(DeviceChoice)
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
ADAPTER_DTYPES: tuple[AdapterDtype, ...] = get_args(AdapterDtype)
MOE_COLDS: tuple[MoeColdOption, ...] = get_args(MoeColdOption)
MOE_WARMUPS: tuple[Warmup, ...] = get_args(Warmup)
DEFAULT_SKIP_CAP = 0.25
"""The default share of a token's router weights that may be skipped in a layer."""
DEFAULT_ROWS, DEFAULT_QUEUE = 16, 128


@dataclass(frozen=True, slots=True)
class TopPins:
    """The most frequent experts of each layer, by number."""

    count: int

    def __str__(self) -> str:
        """Return it as the user writes it."""
        return str(self.count)


@dataclass(frozen=True, slots=True)
class SharePins:
    """The experts that at least a share of all prompts, or tokens, of a profile choose."""

    share: float
    """From 0 to 1."""

    def __str__(self) -> str:
        """Return it as the user writes it."""
        return f"{self.share:.0%}"


Pins = TopPins | SharePins


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupConfig:
    """Which routed experts are in memory at the start, and what is learnt, whatever the base."""

    profile: Path | None = None
    """The file to use instead of the learnt usage."""
    pins: Pins | None = None
    warmup: Warmup = "hybrid"
    exchange: float = 0.0
    """The share of all residents that a profile may swap in an update, from 0, none, to 1."""
    learns: bool = True
    """Whether usage is learnt, and used."""

    @property
    def options(self) -> tuple[str, ...]:
        """The options that the user gave, without those that may also be settings."""
        given = (
            ("--moe-profile", self.profile is not None),
            ("--moe-pin", self.pins is not None),
            ("--moe-exchange", self.exchange > 0),
        )
        return tuple(option for option, is_given in given if is_given)


DEFAULT_WARMUP = WarmupConfig()
COLD_START = WarmupConfig(warmup="none", learns=False)
"""For measurements: no usage is used or learnt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchingConfig:
    """The batch of the serving engine, its queue, and what is done before the first job."""

    rows: int = DEFAULT_ROWS
    """Number of sequences decoded at a time."""
    queue: int = DEFAULT_QUEUE
    """Number of jobs that may wait; more are refused."""
    kept_kv: int | None = None
    """Bytes of KV kept for later requests; None: a fraction of the memory budget."""
    on_budget: Literal["queue", "fewer"] = "queue"
    """What happens when experts do not fit: wait, or drop those that never would."""
    warm_experts: bool = True
    """Whether kernels are compiled at the start for each kind of installed expert."""
    warm: tuple[str, ...] = ()
    """Prompts that are answered with a few tokens before the first job is accepted."""
    tell_memory: bool = True
    """Whether the memory use is reported to the operator at the start."""
    files: tuple[Path, ...] = ()
    """The ``.expert`` files that jobs may name; each is read into memory once, at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """One base with the options by which it is loaded and run."""

    engine: EngineName = "native"
    base: str | None = None
    """Name of the base to serve or to measure; None: the preferred one. A run names its own."""
    device: DeviceName = "cpu"
    memory_budget: int | None = None
    """Bytes of the device's memory; None: a fraction of all of it."""
    dtype: Dtype | None = None
    """None: `expertctl.routing.base_dtype.choose_dtype` decides."""
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    moe_skip_cap: float = DEFAULT_SKIP_CAP
    """The largest share of a token's router weights that may be skipped in a layer."""
    moe_cold: MoeColdOption = "auto"
    moe: WarmupConfig = DEFAULT_WARMUP
    """Used where not all routed experts fit into memory."""
    batching: BatchingConfig = BatchingConfig()
    """Used by the serving engine only."""


DEFAULT_CONFIG = EngineConfig()


_MIN_BUDGET = 1000
"""Bytes; whoever gives a smaller number means another unit."""


def check_engine_config(config: EngineConfig) -> None:
    """Check values that exclude each other or are outside their range.

    Raises:
        UsageError: naming the option and the way out.
    """
    budget = config.memory_budget
    if budget is not None and budget < _MIN_BUDGET:
        meant = f"{budget}MB" if budget else "4GB"
        raise UsageError(
            f"a memory budget of {budget} bytes is too small for any base",
            hint=f"write for example {meant}, or leave it out",
        )
    _check_engine(config)
    _check_device(config)
    _check_moe_misses(config)


def check_exchange_rate(rate: float) -> float:
    """Return a share of residents after checking it.

    Raises:
        UsageError: when it is not from 0 to 1.
    """
    if not 0.0 <= rate <= 1.0:
        raise UsageError(
            f"--moe-exchange {rate} is not a share from 0 to 1",
            hint="it is the share of residents that a profile may swap in an update; 0: none",
        )
    return rate


def _check_engine(config: EngineConfig) -> None:
    """Reject options that only our own kernels support for another engine."""
    refused = _list_kernel_options(config)
    if config.moe_miss == "skip":
        refused |= {"--moe-miss skip": "--moe-miss exact"}
    if refused and config.engine == "transformers":
        raise UsageError(
            f"--engine transformers does not support {', '.join(refused)}",
            hint=f"leave out --engine transformers, or give {' '.join(refused.values())}",
        )


def _check_device(config: EngineConfig) -> None:
    """Reject options that only the CPU supports for a CUDA device."""
    refused = _list_kernel_options(config)
    if config.moe_cold in {"map", "direct"}:
        refused |= {f"--moe-cold {config.moe_cold}": "--moe-cold auto"}
    if config.engine != "native":
        refused |= {f"--engine {config.engine}": "--engine native"}
    if refused and config.device == "cuda":
        raise UsageError(
            f"--device cuda does not support {', '.join(refused)}",
            hint=f"give {' '.join(refused.values())}, or compute with --device cpu",
        )


def _check_moe_misses(config: EngineConfig) -> None:
    """Reject a cap outside 0 to 1, and skipping experts together with ``deterministic``."""
    if not 0.0 <= config.moe_skip_cap <= 1.0:
        raise UsageError(
            f"--moe-skip-cap {config.moe_skip_cap} is not a share of the weights of a token",
            hint="the range is 0 (nothing is skipped) to 1",
        )
    if config.moe_miss == "skip" and config.deterministic:
        raise UsageError(
            "--deterministic excludes --moe-miss skip, whose results depend on what is in memory",
            hint="leave out the one or the other",
        )


def _list_kernel_options(config: EngineConfig) -> dict[str, str]:
    """Return the options that need the CPU kernels, each with the option that disables it.

    The value may come from a setting, which cannot be left out on the command line.
    """
    dtype, adapters = f"--dtype {config.dtype}", f"--adapter-dtype {config.adapter_dtype}"
    options = (
        (dtype, "--dtype float32", config.dtype in QUANTISED_DTYPES),
        (adapters, "--adapter-dtype published", config.adapter_dtype != "published"),
        ("--deterministic", "--no-deterministic", config.deterministic),
    )
    return {option: other for option, other, given in options if given}
