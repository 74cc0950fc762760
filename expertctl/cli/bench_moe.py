"""``expertctl bench moe``: measure a base with only some of its routed experts in memory.

The engine is imported inside the functions, after everything else was checked.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from expertctl.cli.completion import complete_bases
from expertctl.cli.engine import guard_engine_import, open_planner, resolve_base
from expertctl.cli.help import expand_flags
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_percent,
    format_rate,
    format_table,
    make_printable,
    note,
    warn,
)
from expertctl.cli.progress import show_counter
from expertctl.cli.run_options import (
    DeviceOption,
    DtypeOption,
    EngineFlags,
    MemoryBudget,
    MoeSkipCap,
    NumericsFlags,
    WarmupFlags,
    resolve_skip_cap,
)
from expertctl.engine_config import MoeMiss, check_engine_config
from expertctl.errors import NotFoundError, UsageError
from expertctl.settings import Settings, format_size, load_settings

if TYPE_CHECKING:
    from expertctl.engine.moe.bench import RoutedBenchConfig
    from expertctl.engine.moe.bench_result import RoutedBenchResult, RoutedBenchRow
    from expertctl.store.base_record import StoredBase


_HEADER = ["RESIDENT", "MISS", "WRITE", "READ", "HITS", "MISSED", "LEFT OUT", "WAITED", "MEMORY"]
_FOOT = [
    "WRITE and READ: tokens per second. HITS: the share of routed slots whose expert",
    "was in memory. MISSED: of the distinct experts that one pass requested, those",
    "not in memory. LEFT OUT: the share of router weight that was skipped. WAITED:",
    "for experts, per generated token; READ includes waiting while prompts are read.",
]


def format_bench_moe(result: "RoutedBenchResult") -> str:
    """Return what was measured, then one row a number of resident experts; at most 80 columns."""
    rows = [_format_row(result, row) for row in result.rows]
    return "\n".join([*_format_header(result), "", format_table(_HEADER, rows), "", *_FOOT])


def _format_header(result: "RoutedBenchResult") -> list[str]:
    return [
        make_printable(f"{result.what}, {result.dtype}"),
        f"{result.layers} layers of {result.experts} routed experts, of which a token uses "
        f"{result.used}",
        result.texts,
        *_format_start_options(result),
        make_printable(f"on {result.device or f'{result.cpu}, threads: {result.threads}'}"),
    ]


def _format_start_options(result: "RoutedBenchResult") -> list[str]:
    """Return the warm-up options that were given, and the skip cap where experts may be skipped."""
    wishes = result.start
    parts = [] if wishes.profile is None else [f"starts with {wishes.profile}"]
    parts += [] if wishes.pins is None else [f"pins {wishes.pins}"]
    parts += [f"exchanges {wishes.exchange:g}"] if wishes.exchange else []
    parts += ["all slots filled first"] if wishes.warmup == "full" else []
    cap = result.skip_cap
    parts += [] if cap is None else [f"skips up to {cap:g} of a token's router weight"]
    parts += [] if result.cold == "auto" else [f"cold experts: {result.cold}"]
    return [make_printable("; ".join(parts))] if parts else []


def _format_row(result: "RoutedBenchResult", row: "RoutedBenchRow") -> list[str]:
    holding = row.case
    residence = row.report.residence
    return [
        f"{residence.slots} of {residence.experts}",
        "" if holding.is_whole else holding.miss,
        format_rate(row.decode_rate.median),
        format_rate(row.prefill_rate),
        format_percent(row.hit_rate),
        format_percent(row.report.fallback_rate),
        format_percent(row.report.skipped_share),
        f"{row.waited_ms_per_token:.2f} ms",
        format_size(row.memory),
    ]


DEFAULT_SHARES = "1.0,0.6,0.4"
MAX_SHARES = 16

BenchBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="NAME|DIR",
        autocompletion=complete_bases,
        help="Base, by name or folder (default: the newest with routed experts).",
    ),
]
Resident = Annotated[
    str,
    typer.Option(
        metavar="SHARES", help="Shares of a layer's experts to keep in memory, above 0, up to 1."
    ),
]
Misses = Annotated[
    list[str] | None,
    typer.Option(
        "--moe-miss",
        metavar="exact|skip",
        help="When a routed expert is not in memory: read it, or skip it; repeatable.",
        show_default="exact and skip",
    ),
]
Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompt", metavar="TEXT", help="Use this prompt instead of random tokens; repeatable."
    ),
]
PromptTokens = Annotated[
    int, typer.Option("--prompt-tokens", min=1, max=131072, help="Length of a random prompt.")
]
Tokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens to generate after each prompt.")]
Rounds = Annotated[
    int, typer.Option(min=1, max=1000, help="Number of rounds; the first fills the slots.")
]
Seed = Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Seed of the random prompt.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1, help="Number of threads, at most one per core.", show_default="as run does"
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Plot the hit rate of each layer over time to a .svg or .png file."
    ),
]


@expand_flags
def bench_moe(
    *,
    base: BenchBase = None,
    resident: Resident = DEFAULT_SHARES,
    moe_miss: Misses = None,
    moe_skip_cap: MoeSkipCap = None,
    prompt: Prompts = None,
    prompt_tokens: PromptTokens = 64,
    tokens: Tokens = 64,
    rounds: Rounds = 3,
    seed: Seed = 0,
    dtype: DtypeOption = None,
    threads: Threads = None,
    warmup: WarmupFlags,
    plot: Plot = None,
    device: DeviceOption = None,
    memory_budget: MemoryBudget = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure a mixture-of-experts base with all routed experts in memory, and with fewer.

    Example: expertctl bench moe --resident 1.0,0.6,0.4 --plot hits.png
    """
    settings = load_settings()
    numerics = NumericsFlags(dtype, adapter_dtype="published", deterministic=False)
    flags = EngineFlags(device, memory_budget, numerics)
    config = flags.resolve(settings, warmup=warmup, learn=False)
    check_engine_config(config)
    shares, misses = _parse_shares(resident), _parse_miss_policies(moe_miss or ())
    _check_plot(plot, shares)
    cap = _check_skip_cap(resolve_skip_cap(moe_skip_cap, misses))
    wanted = _import_bench_request(as_json=as_json)(
        engine=replace(config, moe_skip_cap=cap),
        shares=shares,
        misses=misses,
        prompts=tuple(prompt or ()),
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        rounds=rounds,
        seed=seed,
        threads=_check_threads(threads),
    )
    found = _measure(wanted, settings, base=base, as_json=as_json)
    warn(found.warnings)
    _draw_plot(found, plot)
    emit(found.to_json(), format_bench_moe(found), as_json=as_json)


def _parse_shares(text: str) -> tuple[float, ...]:
    """Parse shares separated by commas; return each once, the largest first."""
    try:
        shares = {float(word) for word in text.split(",")}
    except ValueError as error:
        raise _build_shares_error(text) from error
    if not all(0 < share <= 1 for share in shares) or len(shares) > MAX_SHARES:
        raise _build_shares_error(text)
    return tuple(sorted(shares, reverse=True))


def _build_shares_error(text: str) -> UsageError:
    return UsageError(
        f"--resident {text!r}: must be up to {MAX_SHARES} numbers above 0, up to 1",
        hint=f"such as --resident {DEFAULT_SHARES}",
    )


def _parse_miss_policies(words: Sequence[str]) -> tuple[MoeMiss, ...]:
    known: tuple[MoeMiss, ...] = get_args(MoeMiss)
    wrong = [word for word in words if word not in known]
    if wrong:
        raise UsageError(
            f"--moe-miss {wrong[0]!r} is neither exact nor skip", hint="give it twice for both"
        )
    return tuple(miss for miss in known if not words or miss in words)


def _check_skip_cap(share: float) -> float:
    if not 0 <= share <= 1:
        raise UsageError(f"--moe-skip-cap {share} is not between 0 and 1", hint="0 skips nothing")
    return share


def _check_plot(plot: Path | None, shares: Sequence[float]) -> None:
    if plot is not None:
        from expertctl.cli.plot import check_plot_path

        check_plot_path(plot, example="hits")
        if min(shares) >= 1:
            raise UsageError(
                "--plot shows missing experts, and with all resident none is missing",
                hint="give --resident a share below 1",
            )


def _import_bench_request(*, as_json: bool) -> "type[RoutedBenchConfig]":
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.moe.bench import RoutedBenchConfig
    return RoutedBenchConfig


def _check_threads(threads: int | None) -> int | None:
    from expertctl.engine.memory.host import count_usable_cores

    cores = count_usable_cores()
    if threads is not None and threads > cores:
        raise UsageError(
            f"--threads {threads}: only {format_count(cores, 'core')} can be used",
            hint=f"--threads {cores} is the maximum",
        )
    return threads


def _measure(
    wanted: "RoutedBenchConfig", settings: Settings, *, base: str | None, as_json: bool
) -> "RoutedBenchResult":
    from expertctl.engine.moe.bench import measure_routed

    named = resolve_base(base, settings, as_json=as_json)
    planner = open_planner(settings, as_json=as_json)
    name = named or _find_routed_base(planner.base_selector.list_by_preference())
    with show_counter("measuring", wanted.run_count, as_json=as_json) as report:
        return measure_routed(planner, wanted, base=name, progress=report, tell=note)


def _find_routed_base(bases: "Sequence[StoredBase]") -> str:
    """Return the first base that has routed experts."""
    from expertctl.cli.base_profile import read_routed_config

    routed = [base for base in bases if read_routed_config(base) is not None]
    if not routed:
        raise NotFoundError(
            "no registered base has routed experts",
            hint="`expertctl base add DIR` adds one: Mixtral, Qwen2-MoE, Qwen3-MoE, OLMoE or Dots1",
        )
    return routed[0].name


def _draw_plot(result: "RoutedBenchResult", plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.plot import draw_hit_rates

        draw_hit_rates(result, plot)
