"""The options that ``route``, ``run`` and ``chat`` share, and how their values are read."""

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
    from expertctl.engine.moe.start import StartWishes
    from expertctl.routing.request import DeviceName

Prompt = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[PROMPT]...",
        help="The prompt; several words are joined. Piped text follows it, or is it; - is stdin.",
        show_default=False,
    ),
]
Expert = Annotated[
    list[str] | None,
    typer.Option(metavar="REF[:WEIGHT]", help="Use this expert, in this order; repeatable."),
]
Exclude = Annotated[
    list[str] | None, typer.Option(metavar="REF", help="Never use this one; repeatable.")
]
MaxExperts = Annotated[int, typer.Option(help="How many experts a plan may have, 1 to 10.")]
NoExperts = Annotated[bool, typer.Option("--no-experts", help="Let the base answer alone.")]
Base = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR",
        help="The base that answers, or its folder; else that of the experts, the setting `base`, "
        "the newest.",
    ),
]
Temperature = Annotated[float | None, typer.Option(help="0 to 2; 0 is greedy.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Above 0, up to 1.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="0 switches it off.")]
MinP = Annotated[float | None, typer.Option("--min-p", help="0 switches it off.")]
Repetition = Annotated[float | None, typer.Option("--repetition-penalty", help="1 to 2.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="1 to 200000.")]
Stop = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="End before this text; repeatable.")
]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same text.")]
Greedy = Annotated[bool, typer.Option("--greedy", help="Always take the likeliest token.")]
DtypeName = Literal["float32", "bf16", "int8", "int4"]
AdapterDtypeName = Literal["published", "fp16", "int8"]
Dtype = Annotated[
    DtypeName | None,
    typer.Option(help="How base weights are held.", show_default="float32, or bf16 as stored"),
]
AdapterDtype = Annotated[
    AdapterDtypeName | None,
    typer.Option("--adapter-dtype", help="How experts are held.", show_default="published"),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic/--no-deterministic",
        help="The same bits each time, whatever the threads and what else is computed.",
        show_default=False,
    ),
]
MoeMiss = Annotated[
    Literal["exact", "skip"],
    typer.Option(
        "--moe-miss", help="When a routed expert is not in memory: read it, or leave it out."
    ),
]
SKIP_CAP = 0.25
"""The value of `expertctl.routing.request`, whose import is too slow for ``--help``."""
MoeSkipCap = Annotated[
    float | None,
    typer.Option(
        "--moe-skip-cap",
        metavar="SHARE",
        help="The most to leave out of a token, from 0 to 1.",
        show_default=str(SKIP_CAP),
    ),
]
MoeColdName = Literal["auto", "read", "map", "direct"]
MoeCold = Annotated[
    MoeColdName | None,
    typer.Option(
        "--moe-cold",
        help="Where routed experts do not fit: read them, past the system's file cache (direct) "
        "or through it, or compute them there, outside the budget (map).",
        show_default="auto",
    ),
]
MoeProfile = Annotated[
    Path | None,
    typer.Option(
        "--moe-profile",
        metavar="FILE",
        help="Begin with the routed experts of this profile, whatever was learnt.",
    ),
]
MoePin = Annotated[
    str | None,
    typer.Option(
        "--moe-pin",
        metavar="N|SHARE%",
        help="Keep the N first routed experts of each layer, or those that SHARE of tokens ask "
        "for.",
    ),
]
WarmupName = Literal["none", "hybrid", "full"]
MoeWarmup = Annotated[
    WarmupName | None,
    typer.Option(
        "--moe-warmup",
        help="Routed experts are read when asked for; those that are known beside the work; or "
        "all there is room for before the first token.",
        show_default="hybrid",
    ),
]
MoeExchange = Annotated[
    float,
    typer.Option(
        "--moe-exchange",
        metavar="SHARE",
        help="How many routed experts an update may exchange for those of the profile, 0 to 1.",
    ),
]
MoeLearn = Annotated[
    bool | None,
    typer.Option(
        "--moe-learn/--no-moe-learn",
        help="Keep with the base which routed experts are asked for, and begin with those.",
        show_default="--moe-learn",
    ),
]
EngineOption = Annotated[
    Literal["native", "transformers"],
    typer.Option("--engine", help="transformers: any base, one expert, slow; needs [compat]."),
]
Mismatch = Annotated[
    bool, typer.Option("--allow-base-mismatch", help="Accept experts made for another base.")
]
MemoryBudget = Annotated[
    str | None,
    typer.Option(
        "--memory-budget", metavar="SIZE", help="The most memory to take, such as 512MiB."
    ),
]


Body = Annotated[
    str | None, typer.Option(metavar="FILE", help="Text that follows the prompt; - is stdin.")
]
Template = Annotated[
    str | None, typer.Option(metavar="TEXT", help="With {prompt} and {body}, once at most.")
]
Truncate = Annotated[
    bool, typer.Option("--truncate", help="Cut the end of a prompt that is too long.")
]
Device = Annotated[
    Literal["cpu", "cuda", "auto"] | None,
    typer.Option(
        help="Where to compute; auto: CUDA if there is such a device.", show_default="cpu"
    ),
]
VerifyBase = Annotated[
    bool, typer.Option("--verify-base", help="Hash every byte of the base again.")
]
OnBudget = Annotated[
    Literal["refuse", "fewer", "queue"],
    typer.Option(
        "--on-budget", help="When it does not fit: refuse, drop experts, or wait for other runs."
    ),
]
Trace = Annotated[bool, typer.Option("--trace", help="Time each layer, count allocations; slower.")]
Stats = Annotated[bool, typer.Option("--stats", help="Show all figures below.")]

_SETTING = "`expertctl config unset device`, or set EXPERT_DEVICE=cpu"


def budget_of(text: str | None, settings: Settings) -> int | None:
    """Return the memory budget in bytes: the option's, else the setting's."""
    return parse_size(text) if text else settings.memory_budget


def chosen_device(device: str | None, settings: Settings) -> "DeviceName":
    """Return the device: from the option, else the setting, else the processor."""
    wanted = device or settings.device or "cpu"
    _check_known(wanted)
    if wanted == "cpu":
        return "cpu"
    try:
        from expertctl.engine.accelerator import check_cuda, has_cuda
    except ModuleNotFoundError as error:
        from expertctl.cli.opening import without_engine

        raise without_engine(error) from error
    if wanted == "auto":
        return "cuda" if has_cuda() else "cpu"
    check_cuda()
    return "cuda"


def check_processor(settings: Settings, what: str) -> None:
    """Refuse a CUDA setting for work that only the processor does."""
    _check_known(settings.device or "cpu")
    if settings.device == "cuda":
        raise UsageError(f"{what} computes on the processor alone", hint=_SETTING)


def _check_known(device: str) -> None:
    if device not in DEVICES:
        raise UsageError(f"device {device!r} is not supported", hint=_SETTING)


@dataclass(frozen=True, slots=True)
class Numerics:
    """How weights are held (None: as stored), and whether the same bits are always wanted."""

    dtype: DtypeName | None
    adapter_dtype: AdapterDtypeName
    deterministic: bool


def numerics_of(
    settings: Settings,
    *,
    dtype: DtypeName | None,
    adapter_dtype: AdapterDtypeName | None,
    deterministic: bool | None,
) -> Numerics:
    """Return the numerics of the options, else of the settings.

    Raises:
        UsageError: when a setting that counts names what is not there.
    """
    held = dtype or _chosen("dtype", settings.dtype, DTYPES)
    experts = adapter_dtype or _chosen("adapter_dtype", settings.adapter_dtype, ADAPTER_DTYPES)
    return Numerics(
        dtype=cast("DtypeName | None", held),
        adapter_dtype=cast(AdapterDtypeName, experts or "published"),
        deterministic=settings.deterministic if deterministic is None else deterministic,
    )


def cap_of(cap: float | None, misses: Sequence[str]) -> float:
    """Return the largest share left out of a token: from the option, else a quarter.

    Raises:
        UsageError: when the option is given though nothing is left out.
    """
    if cap is not None and "skip" not in misses:
        raise UsageError(
            f"--moe-skip-cap {cap}: nothing is left out of a token with --moe-miss exact",
            hint="say --moe-miss skip, or give no cap",
        )
    return SKIP_CAP if cap is None else cap


def cold_of(moe_cold: MoeColdName | None, settings: Settings) -> MoeColdName:
    """Return how routed experts are read from disk: from the option, else the setting.

    Raises:
        UsageError: when a setting that counts names what is not there.
    """
    found = moe_cold or _chosen("moe_cold", settings.moe_cold, MOE_COLDS)
    return cast(MoeColdName, found or "auto")


def start_of(
    settings: Settings,
    *,
    profile: Path | None,
    pin: str | None,
    warmup: WarmupName | None,
    exchange: float,
    learn: bool | None,
) -> "StartWishes":
    """Return how routed experts start: from the options, else the settings.

    Raises:
        NotFoundError: when there is no such profile; it is read only if experts are missing.
        StoreError: when the profile cannot be opened.
        InvalidPackageError: when the profile is not a file.
        UsageError: when an option or a setting has an impossible value.
    """
    from expertctl.engine.moe.guide import open_profile
    from expertctl.engine.moe.pins import parse_pins
    from expertctl.engine.moe.start import StartWishes, parse_rate

    if profile is not None:
        with open_profile(profile):
            pass
    chosen = warmup or _chosen("moe_warmup", settings.moe_warmup, MOE_WARMUPS)
    return StartWishes(
        profile=profile,
        pins=None if pin is None else parse_pins(pin),
        warmup=cast(WarmupName, chosen or "hybrid"),
        exchange=parse_rate(exchange),
        learns=settings.moe_learn if learn is None else learn,
    )


def _chosen(key: str, value: str | None, known: Sequence[str]) -> str | None:
    """Return a value of the environment or ``config.toml``, checked only here."""
    if value is None or value in known:
        return value
    hint = f"`expertctl config set {key} {known[0]}`, or {CONFIG_KEYS[key]}={known[0]}; "
    raise UsageError(
        f"{key} {value[:40]!r} is not supported", hint=f"{hint}known: {', '.join(known)}"
    )
