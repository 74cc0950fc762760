"""``expertctl bench moe``: measures a base with only some of its routed experts in memory.

Torch and numba are imported inside the functions, after everything else was checked.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from expertctl.cli.named_base import known_base
from expertctl.cli.opening import importing_engine, open_planner
from expertctl.cli.output import JsonFlag, counted, counting, emit, note, warn
from expertctl.cli.run_options import (
    Device,
    Dtype,
    MemoryBudget,
    MoeCold,
    MoeExchange,
    MoePin,
    MoeProfile,
    MoeSkipCap,
    MoeWarmup,
    Numerics,
    budget_of,
    cap_of,
    chosen_device,
    cold_of,
    numerics_of,
    start_of,
)
from expertctl.errors import ExpertError, NotFoundError, UsageError
from expertctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from expertctl.engine.routed_bench import RoutedWanted
    from expertctl.engine.routed_bench_result import RoutedMeasured
    from expertctl.routing.request import DeviceName, MoeColdWish, MoeMiss
    from expertctl.store.base_record import StoredBase

SHARES = "1.0,0.6,0.4"
MOST_SHARES = 16

BenchBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="NAME|DIR",
        help="The base, or its folder; else the newest with routed experts.",
    ),
]
Resident = Annotated[
    str,
    typer.Option(metavar="SHARES", help="How many of a layer keep a slot, above 0, up to 1."),
]
Misses = Annotated[
    list[str] | None,
    typer.Option(
        "--moe-miss",
        metavar="exact|skip",
        help="When one is not in memory: read it, or leave it out; repeatable.",
        show_default="exact and skip",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option("--prompt", metavar="TEXT", help="Read this, else random tokens; repeatable."),
]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, max=131072, help="How long a random text is.")
]
Tokens = Annotated[int, typer.Option(min=1, max=4096, help="How many to write behind each text.")]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="How often; the first fills the slots.")]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the random text.")]
Threads = Annotated[
    int | None,
    typer.Option(min=1, help="At most as many as there are cores.", show_default="as run does"),
]
Plot = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Draw the hit rate of each layer over time: .svg or .png."),
]


def bench_moe(
    base: BenchBase = None,
    resident: Resident = SHARES,
    moe_miss: Misses = None,
    moe_skip_cap: MoeSkipCap = None,
    prompt: Prompts = None,
    prompt_tokens: PromptTokens = 64,
    tokens: Tokens = 64,
    rounds: Rounds = 3,
    seed: Seed = 0,
    dtype: Dtype = None,
    threads: Threads = None,
    moe_cold: MoeCold = None,
    moe_profile: MoeProfile = None,
    moe_pin: MoePin = None,
    moe_warmup: MoeWarmup = None,
    moe_exchange: MoeExchange = 0.0,
    plot: Plot = None,
    device: Device = None,
    memory_budget: MemoryBudget = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a base of routed experts with all of them in memory, and with fewer.

    Example: expertctl bench moe --resident 1.0,0.6,0.4 --plot hits.png
    """
    from expertctl.cli.bench_moe_view import bench_moe_text

    settings = load_settings()
    chosen = chosen_device(device, settings)
    held = numerics_of(settings, dtype=dtype, adapter_dtype=None, deterministic=False)
    cold = cold_of(moe_cold, settings)
    _check_request(chosen, held, cold)
    budget = budget_of(memory_budget, settings)
    shares, misses = _shares(resident), _misses(moe_miss or ())
    _check_plot(plot, shares)
    wanted = _engine(as_json=as_json)(
        shares=shares,
        misses=misses,
        cap=_share(cap_of(moe_skip_cap, misses)),
        prompts=tuple(prompt or ()),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        rounds=rounds,
        seed=seed,
        dtype=held.dtype,
        threads=_usable(threads),
        cold=cold,
        device=chosen,
        start=start_of(
            settings,
            profile=moe_profile,
            pin=moe_pin,
            warmup=moe_warmup,
            exchange=moe_exchange,
            learn=False,
        ),
    )
    found = _measured(wanted, settings, base=base, budget=budget, as_json=as_json)
    warn(found.warnings)
    _draw(found, plot)
    emit(found.to_json(), bench_moe_text(found), as_json=as_json)


def _check_request(device: "DeviceName", held: Numerics, cold: "MoeColdWish") -> None:
    """Refuse options that the device does not support, as ``run`` does."""
    from expertctl.routing.request import RouteRequest, check_request

    check_request(RouteRequest(prompt="bench", dtype=held.dtype, moe_cold=cold, device=device))


def _shares(text: str) -> tuple[float, ...]:
    """Read shares separated by commas; return each once, the largest first."""
    try:
        shares = {float(word) for word in text.split(",")}
    except ValueError as error:
        raise _no_shares(text) from error
    if not all(0 < share <= 1 for share in shares) or len(shares) > MOST_SHARES:
        raise _no_shares(text)
    return tuple(sorted(shares, reverse=True))


def _no_shares(text: str) -> UsageError:
    return UsageError(
        f"--resident {text!r}: not up to {MOST_SHARES} numbers above 0, up to 1",
        hint=f"such as --resident {SHARES}",
    )


def _misses(words: Sequence[str]) -> "tuple[MoeMiss, ...]":
    from expertctl.routing.request import MoeMiss

    known: tuple[MoeMiss, ...] = get_args(MoeMiss)
    wrong = [word for word in words if word not in known]
    if wrong:
        raise UsageError(
            f"--moe-miss {wrong[0]!r} is neither exact nor skip", hint="give it twice for both"
        )
    return tuple(miss for miss in known if not words or miss in words)


def _share(share: float) -> float:
    if not 0 <= share <= 1:
        raise UsageError(
            f"--moe-skip-cap {share} is not a share of the weights of a token",
            hint="it goes from 0, nothing is left out, to 1",
        )
    return share


def _check_plot(plot: Path | None, shares: Sequence[float]) -> None:
    if plot is not None:
        from expertctl.cli.plot import check_picture

        check_picture(plot, example="hits")
        if min(shares) >= 1:
            raise UsageError(
                "--plot draws which experts are missing, and with all resident none is",
                hint="give --resident a share below 1",
            )


def _engine(*, as_json: bool) -> "type[RoutedWanted]":
    with importing_engine(as_json=as_json):
        from expertctl.engine.routed_bench import RoutedWanted
    return RoutedWanted


def _usable(threads: int | None) -> int | None:
    from expertctl.engine.threads import usable_cores

    if threads is not None and threads > usable_cores():
        raise UsageError(
            f"--threads {threads}: only {counted(usable_cores(), 'core')} can be used here",
            hint=f"--threads {usable_cores()} is the most: more would wait for each other",
        )
    return threads


def _measured(
    wanted: "RoutedWanted",
    settings: Settings,
    *,
    base: str | None,
    budget: int | None,
    as_json: bool,
) -> "RoutedMeasured":
    from expertctl.engine.routed_bench import measure_routed

    named = known_base(base, settings, as_json=as_json)
    planner = open_planner(settings, as_json=as_json)
    name = named or _first_routed(planner.rule.ordered())
    with counting("measuring", wanted.runs, as_json=as_json) as report:
        return measure_routed(planner, wanted, base=name, budget=budget, progress=report, tell=note)


def _first_routed(bases: "Sequence[StoredBase]") -> str:
    """Return the first base that has routed experts."""
    routed = [base for base in bases if _is_routed(base)]
    if not routed:
        raise NotFoundError(
            "no base of this home has routed experts",
            hint="expertctl base add DIR adds one: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or Dots1",
        )
    return routed[0].name


def _is_routed(base: "StoredBase") -> bool:
    """Whether a base that our engine runs has routed experts."""
    from expertctl.package.model_config import read_config

    try:
        return not base.foreign and read_config(base.path).experts is not None
    except ExpertError:  # naming the base shows the error
        return False


def _draw(found: "RoutedMeasured", plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.hit_rate_plot import draw_hit_rates

        draw_hit_rates(found, plot)
