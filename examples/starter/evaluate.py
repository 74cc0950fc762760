"""Measure the starter pack with the engine: `python -m examples.starter.evaluate [--json]`.

Each expert answers held-out prompts three ways: the base alone, the expert forced, and routed as a
person would run it. Beside that: how many answers differ, how well one would do by copying the
answer of the most similar training prompt, and whether a held-out argument occurs in training.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from examples.starter.baselines import argument_parts, nearest_copies, share_right
from examples.starter.tasks import TASKS, Sample, Task, held_out, training_set
from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.install.starter import install_starter
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import Forced, RouteRequest
from expertctl.settings import Home, Settings

GREEDY = SamplingWishes(temperature=0.0, max_tokens=160)
HELD_OUT_SEED = 2026  # not the one that training was tuned on


@dataclass(frozen=True, slots=True)
class Figures:
    """What was measured of one expert; shares are between 0 and 1."""

    ref: str
    kind: str
    n: int
    base: float
    forced: float
    routed: float
    routed_here: float
    distinct: int
    nearest_copy: float
    train_overlap: int


def main() -> None:
    """Install the pack into a new home and measure every expert."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--n", type=int, default=200, help="held-out prompts per expert")
    parser.add_argument("--only", choices=[task.name for task in TASKS])
    parser.add_argument("--encoder", help="folder of a MiniLM, or 'lexical'")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        engine = starter_engine(Settings(home=Home(Path(folder)), encoder=options.encoder))
        chosen = [task for task in TASKS if options.only in (None, task.name)]
        figures = [measure(engine, task, options.n) for task in chosen]
    document = {"experts": [asdict(each) for each in figures], "compositions": []}
    print(json.dumps(document) if options.json else as_table(figures))


def starter_engine(settings: Settings) -> Engine:
    """Install the pack and open an engine on it."""
    planner = Planner.open(settings)
    install_starter(
        store=planner.store,
        bases=planner.bases,
        trust=planner.trust,
        catalogue=planner.catalogue,
        index=planner.index,
    )
    return Engine(planner)


def measure(engine: Engine, task: Task, n: int) -> Figures:
    """All figures of one expert."""
    samples, seen = held_out(task, n, HELD_OUT_SEED), training_set(task)
    wanted = [sample.answer for sample in samples]
    force = (Forced(Reference.parse(task.name)),)
    alone = [ask(engine, each, RouteRequest(prompt=each.prompt, base_alone=True, wishes=GREEDY))
             for each in samples]  # fmt: skip
    forced = [ask(engine, each, RouteRequest(prompt=each.prompt, wishes=GREEDY), force)
              for each in samples]  # fmt: skip
    routed = [ask(engine, each, RouteRequest(prompt=each.prompt)) for each in samples]
    plan = forced[0].planned.result.plan.experts[0]
    chosen = [[e.ref for e in each.planned.result.plan.experts] for each in routed]
    return Figures(
        ref=plan.ref,
        kind=plan.kind,
        n=n,
        base=share_right(_texts(alone), wanted),
        forced=share_right(_texts(forced), wanted),
        routed=share_right(_texts(routed), wanted),
        routed_here=sum(refs == [plan.ref] for refs in chosen) / n,
        distinct=len(set(wanted)),
        nearest_copy=share_right(nearest_copies(samples, seen), wanted),
        train_overlap=len(argument_parts(samples) & argument_parts(seen)),
    )


def ask(
    engine: Engine, sample: Sample, route: RouteRequest, experts: tuple[Forced, ...] = ()
) -> RunResult:
    """One answer."""
    message = UserMessage(prompt=sample.prompt)
    pieces = engine.run(RunRequest(message=message, route=route, experts=experts))
    while True:
        try:
            next(pieces)
        except StopIteration as stop:
            result: RunResult = stop.value
            return result


def as_table(figures: Sequence[Figures]) -> str:
    """The figures for a person."""
    rows: list[tuple[str, ...]] = [
        ("expert", "n", "base", "forced", "routed", "distinct", "copy", "overlap")
    ]
    rows += [
        (f.ref, str(f.n), *(f"{x:.3f}" for x in (f.base, f.forced, f.routed)), str(f.distinct),
         f"{f.nearest_copy:.3f}", str(f.train_overlap))
        for f in figures
    ]  # fmt: skip
    return "\n".join("  ".join(cell.ljust(8) for cell in row).rstrip() for row in rows)


def _texts(results: Sequence[RunResult]) -> list[str]:
    return [result.generated.text for result in results]


if __name__ == "__main__":
    main()
