"""The options that `run`, `chat`, `route`, `serve`, `eval` and `bench` share, each declared once.

Every option is an ``Annotated`` type for a parameter of a command. The ``resolve_*`` functions
combine a value of the command line with the settings and the default, and check the result.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

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
    from expertctl.routing.request import DeviceName

SAMPLING, EXPERTS, PLACEMENT, ADVANCED = "Sampling", "Experts", "Memory and precision", "Advanced"
"""Sections of the options in ``--help``; an option without one is under *Options*."""
Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PROMPT",
        help="The prompt; words are joined. Piped text is appended to it; - is stdin.",
        show_default=False,
    ),
]
Expert = Annotated[
    list[str] | None,
    typer.Option(
        "--expert",
        "-e",
        metavar="REF[:WEIGHT]",
        help="Use this expert; repeat for several, applied in this order.",
        rich_help_panel=EXPERTS,
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(metavar="REF", help="Never use this expert; repeatable.", rich_help_panel=EXPERTS),
]
MaxExperts = Annotated[
    int,
    typer.Option(help="Maximum number of experts to combine, 1 to 10.", rich_help_panel=EXPERTS),
]
NoExperts = Annotated[
    bool,
    typer.Option("--no-experts", help="Answer with the base model only.", rich_help_panel=EXPERTS),
]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR",
        help="Base model, by name or folder (default: the experts' base, the setting `base`, or "
        "the newest one).",
    ),
]
Temperature = Annotated[
    float | None, typer.Option(help="0 to 2; 0 is greedy.", rich_help_panel=SAMPLING)
]
TopP = Annotated[
    float | None, typer.Option("--top-p", help="Above 0, up to 1.", rich_help_panel=SAMPLING)
]
TopK = Annotated[
    int | None, typer.Option("--top-k", help="0 disables it.", rich_help_panel=SAMPLING)
]
MinP = Annotated[
    float | None, typer.Option("--min-p", help="0 disables it.", rich_help_panel=SAMPLING)
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", help="1 to 2; 1 disables it.", rich_help_panel=SAMPLING),
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens",
        "-n",
        help="Maximum number of tokens to generate, 1 to 200000.",
        rich_help_panel=SAMPLING,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="Stop before this text; repeatable.", rich_help_panel=SAMPLING
    ),
]
Seed = Annotated[
    int | None, typer.Option(help="The same seed gives the same text.", rich_help_panel=SAMPLING)
]
Greedy = Annotated[
    bool,
    typer.Option("--greedy", help="Always take the most likely token.", rich_help_panel=SAMPLING),
]
DtypeName = Literal["float32", "bf16", "int8", "int4"]
AdapterDtypeName = Literal["published", "fp16", "int8"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(
        help="Data type of the base weights in memory.",
        show_default="float32, or bf16 as stored",
        rich_help_panel=PLACEMENT,
    ),
]
AdapterDtype = Annotated[
    AdapterDtypeName | None,
    typer.Option(
        "--adapter-dtype",
        help="Data type of the experts in memory.",
        show_default="published",
        rich_help_panel=PLACEMENT,
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="Bit-identical results, whatever the number of threads and the other requests.",
        show_default=False,
        rich_help_panel=PLACEMENT,
    ),
]
MoeMiss = Annotated[
    Literal["exact", "skip"],
    typer.Option(
        "--moe-miss",
        help="What to do when a routed expert is not in memory: read it (exact), or skip it.",
        rich_help_panel=ADVANCED,
    ),
]
SKIP_CAP = 0.25
"""Same value as in `expertctl.routing.request`, whose import is too slow for ``--help``."""
MoeSkipCap = Annotated[
    float | None,
    typer.Option(
        "--moe-skip-cap",
        metavar="SHARE",
        help="The largest share of a token's router weight to skip, 0 to 1.",
        rich_help_panel=ADVANCED,
        show_default=str(SKIP_CAP),
    ),
]
MoeColdName = Literal["auto", "read", "map", "direct"]
MoeCold = Annotated[
    MoeColdName | None,
    typer.Option(
        "--moe-cold",
        help="How to reach routed experts that do not fit: read them through the page cache "
        "(read), past it (direct), or compute from the page cache, outside the budget (map).",
        rich_help_panel=ADVANCED,
        show_default="auto",
    ),
]
MoeProfile = Annotated[
    Path | None,
    typer.Option(
        "--moe-profile",
        metavar="FILE",
        help="Start with the routed experts of this usage profile instead of the learnt one.",
        rich_help_panel=ADVANCED,
    ),
]
MoePin = Annotated[
    str | None,
    typer.Option(
        "--moe-pin",
        metavar="N|SHARE%",
        help="Pin the N most used routed experts of each layer, or those that serve SHARE of the "
        "tokens.",
        rich_help_panel=ADVANCED,
    ),
]
WarmupName = Literal["none", "hybrid", "full"]
MoeWarmup = Annotated[
    WarmupName | None,
    typer.Option(
        "--moe-warmup",
        help="When to read routed experts: on demand (none), known ones in the background "
        "(hybrid), or all that fit before the first token (full).",
        rich_help_panel=ADVANCED,
        show_default="hybrid",
    ),
]
MoeExchange = Annotated[
    float,
    typer.Option(
        "--moe-exchange",
        metavar="SHARE",
        help="The share of routed experts that an update may swap for the profile's, 0 to 1.",
        rich_help_panel=ADVANCED,
    ),
]
MoeLearn = Annotated[
    bool | None,
    typer.Option(
        "--moe-learn/--no-moe-learn",
        help="Save which routed experts the base uses, and start with those next time.",
        rich_help_panel=ADVANCED,
        show_default="--moe-learn",
    ),
]
EngineOption = Annotated[
    Literal["native", "transformers"],
    typer.Option(
        "--engine",
        help="transformers runs any base with one expert, slowly; needs the extra `compat`.",
        rich_help_panel=ADVANCED,
    ),
]
BaseMismatchOption = Annotated[
    bool,
    typer.Option(
        "--allow-base-mismatch",
        help="Accept experts made for another base.",
        rich_help_panel=EXPERTS,
    ),
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        "--memory-budget",
        metavar="SIZE",
        help="Maximum memory to use, such as 512MiB.",
        rich_help_panel=PLACEMENT,
    ),
]


Body = Annotated[
    str | None, typer.Option(metavar="FILE", help="File to append to the prompt; - is stdin.")
]
Template = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="Template with {prompt} and {body}, each at most once."),
]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Cut off the end of a prompt that is too long.")
]
Device = Annotated[
    Literal["cpu", "cuda", "auto"] | None,
    typer.Option(
        help="Device to compute on; auto uses CUDA if available.",
        show_default="cpu",
        rich_help_panel=PLACEMENT,
    ),
]
VerifyBase = Annotated[
    bool,
    typer.Option(
        "--verify-base", help="Hash every byte of the base again.", rich_help_panel=ADVANCED
    ),
]
OnBudget = Annotated[
    Literal["refuse", "fewer", "queue"],
    typer.Option(
        "--on-budget",
        help="When memory is too small: refuse, use fewer experts, or wait for other runs.",
        rich_help_panel=PLACEMENT,
    ),
]
Trace = Annotated[
    bool,
    typer.Option(
        "--trace", help="Time each layer and count allocations; slower.", rich_help_panel=ADVANCED
    ),
]
Stats = Annotated[bool, typer.Option("--stats", help="Show all statistics below the answer.")]

_DEVICE_HINT = "`expertctl config unset device`, or set EXPERT_DEVICE=cpu"


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


def _check_device_name(device: str) -> None:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not supported", hint=_DEVICE_HINT)


@dataclass(frozen=True, slots=True)
class NumericsOptions:
    """Data types of base (None: as stored) and experts; whether results are bit-reproducible."""

    dtype: DtypeName | None
    adapter_dtype: AdapterDtypeName
    deterministic: bool


def resolve_numerics(
    settings: Settings,
    *,
    dtype: DtypeName | None,
    adapter_dtype: AdapterDtypeName | None,
    deterministic: bool | None,
) -> NumericsOptions:
    """Return the numerics: each value from its option, else from its setting.

    Raises:
        UsageError: when a setting that is used has an unknown value.
    """
    held = dtype or _check_setting("dtype", settings.dtype, DTYPES)
    experts = adapter_dtype or _check_setting(
        "adapter_dtype", settings.adapter_dtype, ADAPTER_DTYPES
    )
    return NumericsOptions(
        dtype=cast("DtypeName | None", held),
        adapter_dtype=cast(AdapterDtypeName, experts or "published"),
        deterministic=settings.deterministic if deterministic is None else deterministic,
    )


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


def resolve_moe_cold(moe_cold: MoeColdName | None, settings: Settings) -> MoeColdName:
    """Return how routed experts are read from disk: from the option, else the setting.

    Raises:
        UsageError: when a setting that is used has an unknown value.
    """
    found = moe_cold or _check_setting("moe_cold", settings.moe_cold, MOE_COLDS)
    return cast(MoeColdName, found or "auto")


def resolve_moe_start(
    settings: Settings,
    *,
    profile: Path | None,
    pin: str | None,
    warmup: WarmupName | None,
    exchange: float,
    learn: bool | None,
) -> "WarmupConfig":
    """Return how routed experts are warmed up: from the options, else the settings.

    The profile is opened here to check it, but read only if routed experts do not all fit.

    Raises:
        NotFoundError: when there is no such profile.
        StoreError: when the profile cannot be opened.
        InvalidPackageError: when the profile is not a file.
        UsageError: when an option or a setting has an invalid value.
    """
    from expertctl.engine.moe.usage_profile import open_profile, parse_pins
    from expertctl.engine.moe.warmup import WarmupConfig, check_exchange_rate

    if profile is not None:
        with open_profile(profile):
            pass
    chosen = warmup or _check_setting("moe_warmup", settings.moe_warmup, MOE_WARMUPS)
    return WarmupConfig(
        profile=profile,
        pins=None if pin is None else parse_pins(pin),
        warmup=cast(WarmupName, chosen or "hybrid"),
        exchange=check_exchange_rate(exchange),
        learns=settings.moe_learn if learn is None else learn,
    )


def _check_setting(key: str, value: str | None, known: Sequence[str]) -> str | None:
    """Return a value from the environment or ``config.toml``, which are not checked when loaded."""
    if value is None or value in known:
        return value
    hint = f"`expertctl config set {key} {known[0]}`, or {CONFIG_KEYS[key]}={known[0]}; "
    raise UsageError(
        f"{key} {value[:40]!r} is not supported", hint=f"{hint}known: {', '.join(known)}"
    )
