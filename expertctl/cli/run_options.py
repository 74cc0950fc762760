"""The options that `run`, `chat`, `route`, `serve`, `eval` and `bench` share, each declared once.

A dataclass named ``…Flags`` is a group of options: `expertctl.cli.help.expand_flags` turns a
parameter of that type into the options of its fields. The ``resolve`` methods and functions combine
the options with the settings and the defaults, and check the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from expertctl.errors import UsageError
from expertctl.settings import (
    ADAPTER_DTYPES,
    CONFIG_KEYS,
    DEVICES,
    DTYPES,
    MOE_COLDS,
    MOE_WARMUPS,
    Settings,
    parse_size,
)

if TYPE_CHECKING:
    from expertctl.engine.moe.warmup import WarmupConfig
    from expertctl.routing.request import DeviceName, RouteRequest

SAMPLING, EXPERTS, PLACEMENT, ADVANCED = "Sampling", "Experts", "Memory and precision", "Advanced"
"""Sections of the options in ``--help``; an option without one is under *Options*."""
DtypeName = Literal["float32", "bf16", "int8", "int4"]
AdapterDtypeName = Literal["published", "fp16", "int8"]
MoeColdName = Literal["auto", "read", "map", "direct"]
WarmupName = Literal["none", "hybrid", "full"]
SKIP_CAP = 0.25
"""Same value as in `expertctl.routing.request`, whose import is too slow for ``--help``."""
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
Truncate = Annotated[
    bool, _option("--truncate", help="Cut off the end of a prompt that is too long.")
]
Stats = Annotated[bool, _option("--stats", help="Show all statistics below the answer.")]
Dtype = Annotated[
    DtypeName | None,
    _option(
        help="Data type of the base weights in memory.",
        show_default="float32, or bf16 as stored",
        section=PLACEMENT,
    ),
]
AdapterDtype = Annotated[
    AdapterDtypeName | None,
    _option(
        help="Data type of the experts in memory.", show_default="published", section=PLACEMENT
    ),
]
Device = Annotated[
    Literal["cpu", "cuda", "auto"] | None,
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
        show_default=str(SKIP_CAP),
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
    Literal["native", "transformers"],
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
            help="Use this expert; repeat for several, applied in this order.",
            section=EXPERTS,
        ),
    ] = None
    exclude: Annotated[
        list[str] | None,
        _option(metavar="REF", help="Never use this expert; repeatable.", section=EXPERTS),
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


@dataclass(frozen=True, slots=True)
class NumericsOptions:
    """Data types of base (None: as stored) and experts; whether results are bit-reproducible."""

    dtype: DtypeName | None
    adapter_dtype: AdapterDtypeName
    deterministic: bool


@dataclass(frozen=True, slots=True)
class NumericsFlags:
    """The data types of weights in memory, and reproducibility."""

    dtype: Dtype = None
    adapter_dtype: AdapterDtype = None
    deterministic: Annotated[
        bool | None,
        _option(
            "--deterministic/--no-deterministic",
            help="Bit-identical results, whatever the number of threads and the other requests.",
            show_default=False,
            section=PLACEMENT,
        ),
    ] = None

    def resolve(self, settings: Settings) -> NumericsOptions:
        """Return the numerics: each value from its option, else from its setting.

        Raises:
            UsageError: when a setting that is used has an unknown value.
        """
        dtype = self.dtype or _check_setting("dtype", settings.dtype, DTYPES)
        adapter_dtype = self.adapter_dtype or _check_setting(
            "adapter_dtype", settings.adapter_dtype, ADAPTER_DTYPES
        )
        return NumericsOptions(
            dtype=cast("DtypeName | None", dtype),
            adapter_dtype=cast(AdapterDtypeName, adapter_dtype or "published"),
            deterministic=settings.deterministic
            if self.deterministic is None
            else self.deterministic,
        )


@dataclass(frozen=True, slots=True)
class MissFlags:
    """What to do with routed experts that are not in memory."""

    moe_miss: Annotated[
        Literal["exact", "skip"],
        _option(
            help="What to do when a routed expert is not in memory: read it (exact), or skip it.",
            section=ADVANCED,
        ),
    ] = "exact"
    moe_skip_cap: MoeSkipCap = None

    def resolve_cap(self) -> float:
        """Return `resolve_skip_cap` of these options."""
        return resolve_skip_cap(self.moe_skip_cap, (self.moe_miss,))


@dataclass(frozen=True, slots=True)
class WarmupFlags:
    """How routed experts are read, and which are in memory at the start."""

    moe_cold: Annotated[
        MoeColdName | None,
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
        WarmupName | None,
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

    def resolve_cold(self, settings: Settings) -> MoeColdName:
        """Return how routed experts are read from disk: from the option, else the setting.

        Raises:
            UsageError: when a setting that is used has an unknown value.
        """
        found = self.moe_cold or _check_setting("moe_cold", settings.moe_cold, MOE_COLDS)
        return cast(MoeColdName, found or "auto")

    def resolve_warmup(self, settings: Settings, *, learn: bool | None) -> "WarmupConfig":
        """Return how routed experts are warmed up: from the options, else the settings.

        The profile is opened here to check it, but read only if routed experts do not all fit.

        Raises:
            NotFoundError: when there is no such profile.
            StoreError: when the profile cannot be opened.
            InvalidPackageError: when the profile is not a file.
            UsageError: when an option or a setting has an invalid value.
        """
        from expertctl.engine.moe.cache_plan import parse_pins
        from expertctl.engine.moe.profile_codecs import open_profile
        from expertctl.engine.moe.warmup import WarmupConfig, check_exchange_rate

        if self.moe_profile is not None:
            with open_profile(self.moe_profile):
                pass
        chosen = self.moe_warmup or _check_setting("moe_warmup", settings.moe_warmup, MOE_WARMUPS)
        return WarmupConfig(
            profile=self.moe_profile,
            pins=None if self.moe_pin is None else parse_pins(self.moe_pin),
            warmup=cast(WarmupName, chosen or "hybrid"),
            exchange=check_exchange_rate(self.moe_exchange),
            learns=settings.moe_learn if learn is None else learn,
        )


def build_route_request(
    prompt: str,
    settings: Settings,
    *,
    experts: ExpertFlags,
    sampling: SamplingFlags,
    numerics: NumericsOptions,
    miss: MissFlags,
    device: "DeviceName",
    memory_budget: str | None,
) -> "RouteRequest":
    """Return the request that ``run``, ``chat`` and ``route`` have in common."""
    from expertctl.routing.request import RouteRequest, parse_target
    from expertctl.routing.sampling_presets import SamplingOverrides

    return RouteRequest(
        prompt=prompt,
        exclude=tuple(map(parse_target, experts.exclude or ())),
        max_experts=experts.max_experts,
        base_alone=experts.no_experts,
        seed=sampling.seed,
        sampling=SamplingOverrides(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            max_tokens=sampling.max_tokens,
            stop=tuple(sampling.stop) if sampling.stop else None,
            greedy=sampling.greedy,
        ),
        dtype=numerics.dtype,
        adapter_dtype=numerics.adapter_dtype,
        deterministic=numerics.deterministic,
        moe_miss=miss.moe_miss,
        moe_skip_cap=miss.resolve_cap(),
        device=device,
        memory_budget=resolve_memory_budget(memory_budget, settings),
        allow_base_mismatch=experts.allow_base_mismatch,
    )


def resolve_memory_budget(text: str | None, settings: Settings) -> int | None:
    """Return the memory budget in bytes: from the option, else the setting, else None."""
    return parse_size(text) if text else settings.memory_budget


def resolve_device(device: str | None, settings: Settings) -> "DeviceName":
    """Return the device: from the option, else the setting, else ``cpu``."""
    wanted = device or settings.device or "cpu"
    _check_device_name(wanted)
    if wanted == "cpu":
        return "cpu"
    try:
        from expertctl.engine.devices import is_cuda_available, require_cuda
    except ModuleNotFoundError as error:
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
    """Return the largest share of a token's router weight to skip; the default is `SKIP_CAP`.

    Raises:
        UsageError: when the option is given although no routed expert is skipped.
    """
    if cap is not None and "skip" not in misses:
        raise UsageError(
            f"--moe-skip-cap {cap}: no routed expert is skipped with --moe-miss exact",
            hint="use --moe-miss skip, or leave out the cap",
        )
    return SKIP_CAP if cap is None else cap


def _check_device_name(device: str) -> None:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not supported", hint=_DEVICE_HINT)


def _check_setting(key: str, value: str | None, known: Sequence[str]) -> str | None:
    """Return a value from the environment or ``config.toml``, which are not checked when loaded."""
    if value is None or value in known:
        return value
    hint = f"`expertctl config set {key} {known[0]}`, or {CONFIG_KEYS[key]}={known[0]}; "
    raise UsageError(
        f"{key} {value[:40]!r} is not supported", hint=f"{hint}known: {', '.join(known)}"
    )
