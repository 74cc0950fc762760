"""The options that `run`, `chat`, `route`, `serve`, `eval` and `bench` share, each declared once.

A dataclass named ``…Flags`` is a group of options: `expertctl.cli.help.expand_flags` turns a
parameter of that type into the options of its fields. `EngineFlags.resolve` combines the options
with the settings and the defaults, and builds the `EngineConfig` of a command. Values that exclude
each other are refused later, by `check_engine_config`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer

from expertctl.cli.completion import complete_bases, complete_experts
from expertctl.engine_config import (
    ADAPTER_DTYPES,
    DEFAULT_SKIP_CAP,
    DEVICES,
    DTYPES,
    MOE_COLDS,
    MOE_WARMUPS,
    AdapterDtype,
    DeviceChoice,
    DeviceName,
    Dtype,
    EngineConfig,
    EngineName,
    MoeColdOption,
    MoeMiss,
    Warmup,
    WarmupConfig,
    check_exchange_rate,
)
from expertctl.errors import UsageError
from expertctl.settings import CONFIG_KEYS, Settings, parse_size
from expertctl.user_request import SamplingOverrides

if TYPE_CHECKING:
    from expertctl.routing.request import RouteRequest

SAMPLING, EXPERTS, PLACEMENT, ADVANCED = "Sampling", "Experts", "Memory and precision", "Advanced"
"""Sections of the options in ``--help``; an option without one is under *Options*."""
_Value = TypeVar("_Value", bound=str)
_DEVICE_HINT = "`expertctl config unset device`, or set EXPERT_DEVICE=cpu"


def _option(*names: str, section: str | None = None, **details: Any) -> Any:
    return typer.Option(*names, rich_help_panel=section, **details)


Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        help="The prompt; words are joined. Piped text is appended to it; - is stdin.",
        show_default=False,
    ),
]
Base = Annotated[
    str | None,
    _option(
        metavar="NAME|DIR",
        autocompletion=complete_bases,
        help="Base model, by name or folder (default: the experts' base, the setting `base`, or "
        "the newest one).",
    ),
]
Body = Annotated[
    str | None, _option(metavar="FILE", help="File to append to the prompt; - is stdin.")
]
Template = Annotated[
    str | None,
    _option(metavar="TEXT", help="Template with {prompt} and {body}, each at most once."),
]
System = Annotated[
    str | None,
    _option("--system", "-s", metavar="TEXT", help="System message of the conversation."),
]
Continue = Annotated[
    bool, _option("--continue", "-c", help="Continue the last conversation of run or chat.")
]
Local = Annotated[
    bool, _option("--local", help="Answer in this process, whatever server is running.")
]
Truncate = Annotated[
    bool, _option("--truncate", help="Cut off the end of a prompt that is too long.")
]
Stats = Annotated[bool, _option("--stats", help="Show all statistics below the answer.")]
DtypeOption = Annotated[
    Dtype | None,
    _option(
        help="Data type of the base weights in memory.",
        show_default="as stored: float32, bf16 or gguf",
        section=PLACEMENT,
    ),
]
AdapterDtypeOption = Annotated[
    AdapterDtype | None,
    _option(
        help="Data type of the experts in memory.", show_default="published", section=PLACEMENT
    ),
]
DeviceOption = Annotated[
    DeviceChoice | None,
    _option(
        help="Device to compute on; auto uses CUDA if available.",
        show_default="cpu",
        section=PLACEMENT,
    ),
]
MemoryBudget = Annotated[
    str | None,
    _option(metavar="SIZE", help="Maximum memory to use, such as 512MiB.", section=PLACEMENT),
]
OnBudget = Annotated[
    Literal["refuse", "fewer", "queue"],
    _option(
        help="When memory is too small: refuse, use fewer experts, or wait for other runs.",
        section=PLACEMENT,
    ),
]
MoeSkipCap = Annotated[
    float | None,
    _option(
        metavar="SHARE",
        help="The largest share of a token's router weight to skip, 0 to 1.",
        section=ADVANCED,
        show_default=str(DEFAULT_SKIP_CAP),
    ),
]
MoeLearn = Annotated[
    bool | None,
    _option(
        "--moe-learn/--no-moe-learn",
        help="Save which routed experts the base uses, and start with those next time.",
        section=ADVANCED,
        show_default="--moe-learn",
    ),
]
MoeProfile = Annotated[
    Path | None,
    _option(
        metavar="FILE",
        help="Start with the routed experts of this usage profile instead of the learnt one.",
        section=ADVANCED,
    ),
]
MoePin = Annotated[
    str | None,
    _option(
        metavar="N|SHARE%",
        help="Pin the N most used routed experts of each layer, or those that serve SHARE of the "
        "tokens.",
        section=ADVANCED,
    ),
]
EngineOption = Annotated[
    EngineName,
    _option(
        help="transformers runs any base with one expert, slowly; needs the extra `compat`.",
        section=ADVANCED,
    ),
]
VerifyBase = Annotated[
    bool, _option("--verify-base", help="Hash every byte of the base again.", section=ADVANCED)
]
Trace = Annotated[
    bool,
    _option("--trace", help="Time each layer and count allocations; slower.", section=ADVANCED),
]


@dataclass(frozen=True, slots=True)
class ExpertFlags:
    """Which experts may answer."""

    expert: Annotated[
        list[str] | None,
        _option(
            "--expert",
            "-e",
            metavar="REF[:WEIGHT]",
            autocompletion=complete_experts,
            help="Use this expert; repeat for several, applied in this order.",
            section=EXPERTS,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        _option(
            metavar="REF",
            help="Never use this expert; repeatable.",
            section=EXPERTS,
            autocompletion=complete_experts,
        ),
    ] = None
    max_experts: Annotated[
        int, _option(help="Maximum number of experts to combine, 1 to 10.", section=EXPERTS)
    ] = 10
    no_experts: Annotated[
        bool, _option("--no-experts", help="Answer with the base model only.", section=EXPERTS)
    ] = False
    allow_base_mismatch: Annotated[
        bool,
        _option(
            "--allow-base-mismatch", help="Accept experts made for another base.", section=EXPERTS
        ),
    ] = False


@dataclass(frozen=True, slots=True)
class SamplingFlags:
    """How tokens are sampled; None leaves the choice to the experts and the preset."""

    temperature: Annotated[float | None, _option(help="0 to 2; 0 is greedy.", section=SAMPLING)] = (
        None
    )
    top_p: Annotated[float | None, _option(help="Above 0, up to 1.", section=SAMPLING)] = None
    top_k: Annotated[int | None, _option(help="0 disables it.", section=SAMPLING)] = None
    min_p: Annotated[float | None, _option(help="0 disables it.", section=SAMPLING)] = None
    repetition_penalty: Annotated[
        float | None, _option(help="1 to 2; 1 disables it.", section=SAMPLING)
    ] = None
    max_tokens: Annotated[
        int | None,
        _option(
            "--max-tokens",
            "-n",
            help="Maximum number of tokens to generate, 1 to 200000.",
            section=SAMPLING,
        ),
    ] = None
    stop: Annotated[
        list[str] | None,
        _option(metavar="TEXT", help="Stop before this text; repeatable.", section=SAMPLING),
    ] = None
    seed: Annotated[
        int | None, _option(help="The same seed gives the same text.", section=SAMPLING)
    ] = None
    greedy: Annotated[
        bool, _option("--greedy", help="Always take the most likely token.", section=SAMPLING)
    ] = False

    @property
    def overrides(self) -> SamplingOverrides:
        """The settings without the seed."""
        return SamplingOverrides(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop) if self.stop else None,
            greedy=self.greedy,
        )


@dataclass(frozen=True, slots=True)
class NumericsFlags:
    """The data types of weights in memory, and reproducibility."""

    dtype: DtypeOption = None
    adapter_dtype: AdapterDtypeOption = None
    deterministic: Annotated[
        bool | None,
        _option(
            "--deterministic/--no-deterministic",
            help="Bit-identical results, whatever the number of threads and the other requests.",
            show_default=False,
            section=PLACEMENT,
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class MissFlags:
    """What to do with routed experts that are not in memory."""

    moe_miss: Annotated[
        MoeMiss,
        _option(
            help="What to do when a routed expert is not in memory: read it (exact), or skip it.",
            section=ADVANCED,
        ),
    ] = "exact"
    moe_skip_cap: MoeSkipCap = None


@dataclass(frozen=True, slots=True)
class WarmupFlags:
    """How routed experts are read, and which are in memory at the start."""

    moe_cold: Annotated[
        MoeColdOption | None,
        _option(
            help="How to reach routed experts that do not fit: read them through the page cache "
            "(read), past it (direct), or compute from the page cache, outside the budget (map).",
            section=ADVANCED,
            show_default="auto",
        ),
    ] = None
    moe_profile: MoeProfile = None
    moe_pin: MoePin = None
    moe_warmup: Annotated[
        Warmup | None,
        _option(
            help="When to read routed experts: on demand (none), known ones in the background "
            "(hybrid), or all that fit before the first token (full).",
            section=ADVANCED,
            show_default="hybrid",
        ),
    ] = None
    moe_exchange: Annotated[
        float,
        _option(
            metavar="SHARE",
            help="The share of routed experts that an update may swap for the profile's, 0 to 1.",
            section=ADVANCED,
        ),
    ] = 0.0

    def resolve_cold(self, settings: Settings) -> MoeColdOption:
        """Return how routed experts are read from disk: from the option, else the setting.

        Raises:
            UsageError: when a setting that is used has an unknown value.
        """
        return self.moe_cold or _check_setting("moe_cold", settings.moe_cold, MOE_COLDS) or "auto"

    def resolve(self, settings: Settings, *, learn: bool | None) -> WarmupConfig:
        """Return how routed experts are warmed up: from the options, else the settings.

        The profile is opened here to check it, but read only if routed experts do not all fit.

        Raises:
            NotFoundError: when there is no such profile.
            StoreError: when the profile cannot be opened.
            InvalidPackageError: when the profile is not a file.
            UsageError: when an option or a setting has an invalid value.
        """
        chosen = self.moe_warmup or _check_setting("moe_warmup", settings.moe_warmup, MOE_WARMUPS)
        config = WarmupConfig(
            profile=self.moe_profile,
            warmup=chosen or "hybrid",
            exchange=check_exchange_rate(self.moe_exchange),
            learns=settings.moe_learn if learn is None else learn,
        )
        if self.moe_profile is None and self.moe_pin is None:
            return config
        from expertctl.engine.moe.cache_plan import parse_pins
        from expertctl.engine.moe.profile_codecs import open_profile

        if self.moe_profile is not None:
            with open_profile(self.moe_profile):
                pass
        return replace(config, pins=None if self.moe_pin is None else parse_pins(self.moe_pin))


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """Where and how a base is computed."""

    device: DeviceOption = None
    memory_budget: MemoryBudget = None
    numerics: NumericsFlags = NumericsFlags()
    miss: MissFlags = MissFlags()

    def resolve(
        self,
        settings: Settings,
        *,
        warmup: WarmupFlags | None = None,
        learn: bool | None = None,
        engine: EngineName = "native",
    ) -> EngineConfig:
        """Return the configuration: each value from its option, else its setting, else the default.

        Without ``warmup`` the defaults apply to routed experts, whatever the settings are.

        Raises:
            NotFoundError: when there is no such device, or no such profile.
            UsageError: when an option, or a setting that is used, has an invalid value.
            ExpertError: when a profile cannot be opened.
        """
        numerics, deterministic = self.numerics, self.numerics.deterministic
        budget = parse_size(self.memory_budget) if self.memory_budget else settings.memory_budget
        config = EngineConfig(
            engine=engine,
            dtype=numerics.dtype or _check_setting("dtype", settings.dtype, DTYPES),
            adapter_dtype=numerics.adapter_dtype
            or _check_setting("adapter_dtype", settings.adapter_dtype, ADAPTER_DTYPES)
            or "published",
            deterministic=settings.deterministic if deterministic is None else deterministic,
            device=_resolve_device(self.device, settings),
            moe_miss=self.miss.moe_miss,
            moe_skip_cap=resolve_skip_cap(self.miss.moe_skip_cap, (self.miss.moe_miss,)),
            memory_budget=budget,
        )
        if warmup is None:
            return config
        cold = warmup.resolve_cold(settings)
        return replace(config, moe_cold=cold, moe=warmup.resolve(settings, learn=learn))


def build_route_request(
    prompt: str, config: EngineConfig, *, experts: ExpertFlags, sampling: SamplingFlags
) -> "RouteRequest":
    """Return the request that ``run``, ``chat`` and ``route`` have in common."""
    from expertctl.reference import parse_target
    from expertctl.routing.request import RouteRequest

    return RouteRequest(
        prompt=prompt,
        exclude=tuple(map(parse_target, experts.exclude or ())),
        max_experts=experts.max_experts,
        base_alone=experts.no_experts,
        seed=sampling.seed,
        sampling=sampling.overrides,
        allow_base_mismatch=experts.allow_base_mismatch,
        config=config,
    )


def _resolve_device(device: str | None, settings: Settings) -> DeviceName:
    """Return the device: from the option, else the setting, else ``cpu``."""
    wanted = device or settings.device or "cpu"
    _check_device_name(wanted)
    if wanted == "cpu":
        return "cpu"
    try:
        from expertctl.engine.torch.devices import is_cuda_available, require_cuda
    except ModuleNotFoundError as error:
        if wanted == "auto" and error.name == "torch":
            return "cpu"
        from expertctl.cli.engine import build_missing_engine_error

        raise build_missing_engine_error(error) from error
    if wanted == "auto":
        return "cuda" if is_cuda_available() else "cpu"
    require_cuda()
    return "cuda"


def check_cpu_only(settings: Settings, what: str) -> None:
    """Raise `UsageError` for a CUDA setting if a command computes on the CPU only."""
    _check_device_name(settings.device or "cpu")
    if settings.device == "cuda":
        raise UsageError(f"{what} runs on the CPU only", hint=_DEVICE_HINT)


def resolve_skip_cap(cap: float | None, misses: Sequence[str]) -> float:
    """Return the largest share of a token's router weight to skip; it has a default.

    Raises:
        UsageError: when the option is given although no routed expert is skipped.
    """
    if cap is not None and "skip" not in misses:
        raise UsageError(
            f"--moe-skip-cap {cap}: no routed expert is skipped with --moe-miss exact",
            hint="use --moe-miss skip, or leave out the cap",
        )
    return DEFAULT_SKIP_CAP if cap is None else cap


def _check_device_name(device: str) -> None:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not supported", hint=_DEVICE_HINT)


def _check_setting(key: str, value: str | None, known: Sequence[_Value]) -> _Value | None:
    """Return a value from the environment or ``config.toml``, which are not checked when loaded."""
    if value is None:
        return None
    for each in known:
        if each == value:
            return each
    hint = f"`expertctl config set {key} {known[0]}`, or {CONFIG_KEYS[key]}={known[0]}; "
    raise UsageError(
        f"{key} {value[:40]!r} is not supported", hint=f"{hint}known: {', '.join(known)}"
    )
