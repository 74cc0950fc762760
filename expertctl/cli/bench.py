"""``expertctl bench``: how fast this machine reads and writes text, beside what it could do.

Torch and numba are imported inside the functions, after everything else was checked.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from expertctl.cli.bench_moe import bench_moe
from expertctl.cli.help import CommandGroup
from expertctl.cli.named_base import known_base
from expertctl.cli.opening import importing_engine, open_planner
from expertctl.cli.output import JsonFlag, counted, counting, emit, note, progress, warn
from expertctl.cli.run_options import (
    AdapterDtype,
    Dtype,
    MemoryBudget,
    Numerics,
    budget_of,
    check_processor,
    numerics_of,
)
from expertctl.errors import UsageError
from expertctl.settings import Settings, load_settings

if TYPE_CHECKING:
    from expertctl.engine.bench import Subject, Wanted
    from expertctl.engine.bench_result import Measured

USUAL_DTYPE: Literal["bf16"] = "bf16"
"""The dtype of random weights; those of a base are held as they are stored."""

BenchBase = Annotated[
    str | None,
    typer.Option(
        "--base",
        metavar="NAME|DIR",
        help="The base, or its folder; else that of the experts, the setting `base`, the newest; "
        "the starter's only if named.",
    ),
]
Shape = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|DIR", help="Random weights: qwen3-0.6b, or a folder with a config.json."
    ),
]
Experts = Annotated[
    list[str] | None,
    typer.Option("--expert", metavar="REF[:WEIGHT]", help="With this expert; repeatable."),
]
Tokens = Annotated[int, typer.Option(min=1, max=4096, help="How many to write in a round.")]
Prompts = Annotated[
    list[int] | None,
    typer.Option(
        "--prompt-tokens",
        min=1,
        max=131072,
        metavar="N",
        help="Repeatable.",
        show_default="128, 512",
    ),
]
Context = Annotated[
    int, typer.Option(min=1, max=131072, help="Tokens before those that are written.")
]
Threads = Annotated[
    list[int] | None,
    typer.Option(
        min=1,
        metavar="N",
        help="At most as many as there are cores; repeatable.",
        show_default="1, 2, 4, …, all",
    ),
]
Rounds = Annotated[int, typer.Option(min=1, max=1000, help="How often all is measured.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the roofline: .svg or .png.")]


app = CommandGroup(no_args_is_help=False)
app.command("moe")(bench_moe)


@app.callback(invoke_without_command=True)
def bench(
    invoked: typer.Context,
    base: BenchBase = None,
    shape: Shape = None,
    expert: Experts = None,
    dtype: Dtype = None,
    adapter_dtype: AdapterDtype = None,
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
    from expertctl.cli.bench_view import bench_text

    settings = load_settings()
    check_processor(settings, "bench")
    held = numerics_of(settings, dtype=dtype, adapter_dtype=adapter_dtype, deterministic=False)
    budget = budget_of(memory_budget, settings)
    base = known_base(base, settings, as_json=as_json)
    asked = _Asked(base, shape, tuple(expert or ()), held, budget)
    asked.check()
    _check_plot(plot)
    wanted = _wanted(tokens, context, prompt_tokens, threads, rounds, as_json=as_json)
    with _subject(asked, wanted, settings, as_json=as_json) as subject:
        from expertctl.engine.bench import measure

        with counting("measuring", wanted.runs, as_json=as_json) as report:
            found = measure(subject, wanted, progress=report)
    warn(found.notes)
    _draw(found, plot)
    emit(found.to_json(), bench_text(found), as_json=as_json)


def _check_plot(plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.plot import check_picture

        check_picture(plot, example="roofline")


def _draw(found: "Measured", plot: Path | None) -> None:
    if plot is not None:
        from expertctl.cli.roofline_plot import draw_roofline

        draw_roofline(found, plot)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What the user wants to measure."""

    base: str | None
    shape: str | None
    experts: tuple[str, ...]
    held: Numerics
    memory_budget: int | None

    def check(self) -> None:
        """Refuse options that contradict each other."""
        if self.shape and (self.base or self.experts):
            other = "--base" if self.base else "--expert"
            raise UsageError(
                f"--shape draws random weights, so {other} has no meaning",
                hint="leave one of them out",
            )


def _wanted(
    tokens: int,
    context: int,
    prompts: Sequence[int] | None,
    threads: Sequence[int] | None,
    rounds: int,
    *,
    as_json: bool,
) -> "Wanted":
    with importing_engine(as_json=as_json):
        from expertctl.engine.bench import Wanted, thread_counts
        from expertctl.engine.threads import usable_cores
    if threads and max(threads) > usable_cores():
        raise UsageError(
            f"--threads {max(threads)}: only {counted(usable_cores(), 'core')} can be used here",
            hint=f"--threads {usable_cores()} is the most: more would wait for each other",
        )
    return Wanted(
        threads=tuple(sorted(set(threads))) if threads else thread_counts(),
        tokens=tokens,
        context=context,
        prompts=tuple(dict.fromkeys(prompts)) if prompts else (128, 512),
        rounds=rounds,
    )


@contextmanager
def _subject(
    asked: _Asked, wanted: "Wanted", settings: Settings, *, as_json: bool
) -> Iterator["Subject"]:
    """Load what was asked for, else the base that answers by default, else a usual shape."""
    from expertctl.engine.bench_subject import USUAL_SHAPE, drawn_bytes, random_subject

    own = asked.base
    if asked.shape is None and not asked.experts:
        own = own or _usual_base(settings)
    if asked.shape is None and (own or asked.experts):
        with _installed(asked, own, wanted, settings, as_json=as_json) as subject:
            yield subject
        return
    shape, dtype = asked.shape or USUAL_SHAPE, asked.held.dtype or USUAL_DTYPE
    with ExitStack() as stack:
        total = drawn_bytes(shape, dtype)
        with progress("drawing random weights", total, as_json=as_json) as report:
            drawn = random_subject(
                shape,
                dtype,
                wanted,
                home=settings.home,
                budget=asked.memory_budget,
                progress=report,
                tell=note,
            )
            subject = stack.enter_context(drawn)
        yield subject


@contextmanager
def _installed(
    asked: _Asked, base: str | None, wanted: "Wanted", settings: Settings, *, as_json: bool
) -> Iterator["Subject"]:
    from expertctl.engine.bench_subject import installed_subject
    from expertctl.engine.request import parse_expert

    planner = open_planner(settings, as_json=as_json)
    with ExitStack() as stack:
        with progress("loading", None, as_json=as_json) as report:
            loaded = installed_subject(
                planner,
                wanted,
                base=base,
                experts=[parse_expert(text) for text in asked.experts],
                dtype=asked.held.dtype,
                adapter_dtype=asked.held.adapter_dtype,
                budget=asked.memory_budget,
                progress=report,
                tell=note,
            )
            subject = stack.enter_context(loaded)
        yield subject


def _usual_base(settings: Settings) -> str | None:
    """Return the base that answers by default; None for the demo, unless it is set.

    The demo is too small to say anything about a machine.
    """
    from expertctl.routing.base_choice import DEMO, BaseRule
    from expertctl.store.bases import BaseStore

    base = BaseRule(BaseStore(settings.home.bases), settings.base).default()
    is_measured = base is not None and (base.name != DEMO or settings.base is not None)
    return base.name if base is not None and is_measured else None
