"""``expertctl bench``: measure how fast this machine reads prompts and writes tokens.

The result is compared with the roofline of the machine. Numba is imported inside the
functions, after everything else was checked.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.bench_moe import bench_moe
from expertctl.cli.completion import complete_bases, complete_experts
from expertctl.cli.engine import guard_engine_import, open_planner, resolve_base
from expertctl.cli.help import CommandGroup
from expertctl.cli.output import (
    JsonFlag,
    emit,
    format_count,
    format_rate,
    format_table,
    make_printable,
    note,
    warn,
)
from expertctl.cli.progress import show_counter, show_progress
from expertctl.cli.run_options import (
    AdapterDtypeOption,
    DtypeOption,
    EngineFlags,
    MemoryBudget,
    NumericsFlags,
    check_cpu_only,
)
from expertctl.engine_config import EngineConfig
from expertctl.errors import UsageError
from expertctl.settings import Settings, format_size, load_settings

if TYPE_CHECKING:
    from expertctl.engine.bench import BenchSettings, BenchSubject
    from expertctl.engine.bench_result import BenchResult, BenchRow


_HEADER = ["WHAT", "THREADS", "MEDIAN", "QUARTILES", "ROOF", "SHARE", "LIMIT"]
_FOOT = [
    "The roof is what the memory, or the arithmetic, of this machine allows with that",
    "number of threads; the share is how much of it was reached, round by round.",
]


def format_bench(result: "BenchResult") -> str:
    """Return what was measured, then one row a figure; at most 80 columns wide."""
    rows = [_format_row(row) for row in result.rows]
    return "\n".join([*_format_header(result), "", format_table(_HEADER, rows), "", *_FOOT])


def _format_header(result: "BenchResult") -> list[str]:
    work = result.text_work()
    parts = {
        "weights": work.weight_bytes,
        "experts": work.expert_bytes,
        "keys and values": work.kv_bytes,
    }
    reads = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size)
    return [
        make_printable(f"{result.what}, {result.dtype}"),
        f"{result.costs.numbers / 1e6:.1f} million weights are multiplied for a token",
        f"a token after {result.context} reads {format_size(work.nbytes)}: {reads}",
        make_printable(f"on {result.cpu}"),
    ]


def _format_row(row: "BenchRow") -> list[str]:
    reach = row.reach
    return [
        f"{row.case}, {row.unit}",
        f"{row.threads}",
        format_rate(row.rate.median),
        f"{format_rate(row.rate.low)} to {format_rate(row.rate.high)}",
        "" if row.roof is None else format_rate(row.roof),
        "" if reach is None else f"{reach.share.median:.2f}",
        "" if reach is None else reach.bound,
    ]


DEFAULT_DTYPE: Literal["bf16"] = "bf16"
"""Data type of random weights; those of a base keep the type they are stored in."""

BenchBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="NAME|DIR",
        autocompletion=complete_bases,
        help="Base to measure, by name or folder (default: the experts' base, the setting `base`, "
        "or the newest one; the demo base only if named).",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR", help="Use random weights: qwen3-0.6b, or a folder with a config.json."
    ),
]
Experts = Annotated[
    list[str] | None,
    typer.Option(
        "--expert",
        metavar="REF[:WEIGHT]",
        autocompletion=complete_experts,
        help="Use this expert; repeatable.",
    ),
]
Tokens = Annotated[int, typer.Option(min=1, max=4096, help="Tokens to generate in a round.")]
Prompts = Annotated[
    list[int] | None,
    typer.Option(
        "--prompt-tokens",
        min=1,
        max=131072,
        metavar="N",
        help="Length of a prompt; repeatable.",
        show_default="128, 512",
    ),
]
Context = Annotated[
    int, typer.Option(min=1, max=131072, help="Tokens in the context before the generated ones.")
]
Threads = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        metavar="N",
        help="Number of threads, at most one per core; repeatable.",
        show_default="1, 2, 4, …, all",
    ),
]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="Number of rounds.")]
Plot = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Plot the roofline to a .svg or .png file.")
]


app = CommandGroup(no_args_is_help=False)
app.command("moe")(bench_moe)


@app.callback(invoke_without_command=True)
def bench(
    invoked: typer.Context,
    base: BenchBase = None,
    shape: Shape = None,
    expert: Experts = None,
    dtype: DtypeOption = None,
    adapter_dtype: AdapterDtypeOption = None,
    tokens: Tokens = 32,
    prompt_tokens: Prompts = None,
    context: Context = 128,
    threads: Threads = None,
    rounds: Rounds = 5,
    plot: Plot = None,
    memory_budget: MemoryBudget = None,
    as_json: JsonFlag = False,
) -> None:
    """Measure how fast this machine runs a base. The roofline shows what limits it.

    Example: expertctl bench --dtype int8 --plot roofline.png
    """
    if invoked.invoked_subcommand is not None:
        return

    settings = load_settings()
    check_cpu_only(settings, "bench")
    numerics = NumericsFlags(dtype, adapter_dtype, deterministic=False)
    config = EngineFlags("cpu", memory_budget, numerics).resolve(settings)
    config = replace(config, base=resolve_base(base, settings, as_json=as_json))
    subject_options = _BenchOptions(config, shape, tuple(expert or ()))
    subject_options.check()
    _check_plot(plot)
    wanted = _build_request(tokens, context, prompt_tokens, threads, rounds, as_json=as_json)
    with _open_subject(subject_options, wanted, settings, as_json=as_json) as subject:
        from expertctl.engine.bench import run_bench

        with show_counter("measuring", wanted.run_count, as_json=as_json) as report:
            found = run_bench(subject, wanted, progress=report)
    warn(found.notes)
    _draw_plot(found, plot)
    emit(found.to_json(), format_bench(found), as_json=as_json)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.plot import check_plot_path

        check_plot_path(plot, example="roofline")


def _draw_plot(result: "BenchResult", plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.plot import draw_roofline

        draw_roofline(result, plot)


@dataclass(frozen=True, slots=True)
class _BenchOptions:
    """What to measure."""

    config: EngineConfig
    shape: str | None
    experts: tuple[str, ...]

    def check(self) -> None:
        """Raise `UsageError` for options that contradict each other."""
        if self.shape and (self.config.base or self.experts):
            other = "--base" if self.config.base else "--expert"
            raise UsageError(
                f"--shape uses random weights, so {other} has no effect",
                hint="leave one of them out",
            )


def _build_request(
    tokens: int,
    context: int,
    prompts: Sequence[int] | None,
    threads: Sequence[int] | None,
    rounds: int,
    *,
    as_json: bool,
) -> "BenchSettings":
    with guard_engine_import(as_json=as_json):
        from expertctl.engine.bench import BenchSettings, list_thread_counts
        from expertctl.engine.memory.host import count_usable_cores
    cores = count_usable_cores()
    if threads and max(threads) > cores:
        raise UsageError(
            f"--threads {max(threads)}: only {format_count(cores, 'core')} can be used",
            hint=f"--threads {cores} is the maximum",
        )
    return BenchSettings(
        threads=tuple(sorted(set(threads))) if threads else list_thread_counts(),
        tokens=tokens,
        context=context,
        prompts=tuple(dict.fromkeys(prompts)) if prompts else (128, 512),
        rounds=rounds,
    )


@contextmanager
def _open_subject(
    options: _BenchOptions, wanted: "BenchSettings", settings: Settings, *, as_json: bool
) -> Iterator["BenchSubject"]:
    """Load the named base, else the default base, else random weights of a default shape."""
    from expertctl.engine.bench_subject import DEFAULT_SHAPE, open_random_subject, random_base_bytes

    config = options.config
    if options.shape is None and not options.experts:
        config = replace(config, base=config.base or _find_default_base(settings))
    if options.shape is None and (config.base or options.experts):
        options = replace(options, config=config)
        with _open_installed_subject(options, wanted, settings, as_json=as_json) as subject:
            yield subject
        return
    shape, dtype = options.shape or DEFAULT_SHAPE, config.dtype or DEFAULT_DTYPE
    with ExitStack() as stack:
        total = random_base_bytes(shape, dtype)
        with show_progress("generating random weights", total, as_json=as_json) as report:
            drawn = open_random_subject(
                shape,
                dtype,
                wanted,
                home=settings.home,
                budget=config.memory_budget,
                progress=report,
                notify=note,
            )
            subject = stack.enter_context(drawn)
        yield subject


@contextmanager
def _open_installed_subject(
    options: _BenchOptions, wanted: "BenchSettings", settings: Settings, *, as_json: bool
) -> Iterator["BenchSubject"]:
    from expertctl.engine.bench_subject import open_installed_subject
    from expertctl.engine.request import parse_expert

    planner = open_planner(settings, as_json=as_json)
    with ExitStack() as stack:
        with show_progress("loading", None, as_json=as_json) as report:
            loaded = open_installed_subject(
                planner,
                wanted,
                config=options.config,
                experts=[parse_expert(text) for text in options.experts],
                progress=report,
                notify=note,
            )
            subject = stack.enter_context(loaded)
        yield subject


def _find_default_base(settings: Settings) -> str | None:
    """Return the default base; None for the demo base, unless the setting `base` names it.

    The demo is too small to measure a machine.
    """
    from expertctl.reference import DEMO_BASE
    from expertctl.routing.base_choice import BaseSelector
    from expertctl.store.bases import BaseStore

    base = BaseSelector(BaseStore(settings.home.bases), settings.base).find_default()
    is_measured = base is not None and (base.name != DEMO_BASE or settings.base is not None)
    return base.name if base is not None and is_measured else None
