"""Measure the starter pack with the engine: `python -m examples.starter.evaluate [--json]`.

Each expert answers held-out prompts three ways: the base alone, the expert forced, and routed as a
person would run it. Beside that: how many answers differ, how well one would do by copying the
answer of the most similar training prompt, and whether a held-out argument occurs in training.
Pairs of experts answer held-out prompts that need both: together, each alone, and routed.
`--dtype` says what the base is held in, so that quantising can be judged by its answers.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from examples.starter.baselines import argument_parts, nearest_copies, share_right
from examples.starter.compositions import COMPOSITIONS, Composition
from examples.starter.experts import EXPERTS
from examples.starter.samples import Sample, Task, held_out, training_set
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine_config import Dtype, EngineConfig
from expertctl.install.installer import InstallContext, install_starter
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import NO_OVERRIDES, SamplingOverrides, UserMessage

DTYPES: tuple[Dtype, ...] = get_args(Dtype)
GREEDY = SamplingOverrides(temperature=0.0, max_tokens=160)
HELD_OUT_SEED = 2026  # not the one that training was tuned on


@dataclass(frozen=True, slots=True)
class Asked:
    """What answers: an engine, and what it holds the base in; None: as it is stored."""

    engine: LocalEngine
    dtype: Dtype | None = None


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


@dataclass(frozen=True, slots=True)
class Together:
    """What was measured of a plan of two experts; `alone` has one share for each of them."""

    plan: tuple[str, ...]
    n: int
    together: float
    alone: tuple[float, ...]
    routed: float
    routed_here: float


def main() -> None:
    """Install the pack into a new home and measure every expert and composition."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--n", type=int, default=200, help="held-out prompts per expert")
    parser.add_argument("--pairs", type=int, default=100, help="held-out prompts per composition")
    parser.add_argument("--only", choices=[task.name for task in EXPERTS])
    parser.add_argument("--dtype", choices=DTYPES, help="what the base is held in")
    parser.add_argument("--encoder", help="folder of a MiniLM, or 'lexical'")
    options = parser.parse_args()
    only = options.only
    with tempfile.TemporaryDirectory() as folder:
        engine = starter_engine(Settings(home=Home(Path(folder)), encoder=options.encoder))
        asked = Asked(engine, options.dtype)
        experts = [measure(asked, t, options.n) for t in EXPERTS if only in (None, t.name)]
        chosen = [c for c in COMPOSITIONS if only in (None, *(task.name for task in c.plan))]
        pairs = [measure_together(asked, each, options.pairs) for each in chosen]
    document = {"experts": list(map(asdict, experts)), "compositions": list(map(asdict, pairs))}
    print(json.dumps(document) if options.json else as_table(experts, pairs))


def starter_engine(settings: Settings) -> LocalEngine:
    """Install the pack and open an engine on it."""
    planner = Planner.open(settings)
    stores, home = (planner.store, planner.bases, planner.trust), settings.home
    install_starter(InstallContext(*stores, home.registries, planner.catalogue, planner.index))
    return LocalEngine(planner)


def measure(asked: Asked, task: Task, n: int) -> Figures:
    """All figures of one expert."""
    samples, seen = held_out(task, n, HELD_OUT_SEED), training_set(task)
    wanted = [sample.answer for sample in samples]
    alone = [ask(asked, each, base_alone=True, wishes=GREEDY) for each in samples]
    forced = forced_answers(asked, samples, [task])
    routed = [ask(asked, each) for each in samples]
    plan = forced[0].planned.result.plan.experts[0]
    return Figures(
        ref=plan.ref,
        kind=plan.kind,
        n=n,
        base=share_right(_texts(alone), wanted),
        forced=share_right(_texts(forced), wanted),
        routed=share_right(_texts(routed), wanted),
        routed_here=_share_planned(routed, [plan.ref]),
        distinct=len(set(wanted)),
        nearest_copy=share_right(nearest_copies(samples, seen), wanted),
        train_overlap=len(argument_parts(samples) & argument_parts(seen)),
    )


def measure_together(asked: Asked, composition: Composition, n: int) -> Together:
    """All figures of one composition; the wanted answer is that of both."""
    samples = held_out(composition, n, HELD_OUT_SEED)
    wanted = [sample.answer for sample in samples]
    both = forced_answers(asked, samples, composition.plan)
    alone = [forced_answers(asked, samples, [task]) for task in composition.plan]
    routed = [ask(asked, each) for each in samples]
    plan = tuple(expert.ref for expert in both[0].planned.result.plan.experts)
    return Together(
        plan=plan,
        n=n,
        together=share_right(_texts(both), wanted),
        alone=tuple(share_right(_texts(each), wanted) for each in alone),
        routed=share_right(_texts(routed), wanted),
        routed_here=_share_planned(routed, plan),
    )


def forced_answers(
    asked: Asked, samples: Sequence[Sample], tasks: Sequence[Task]
) -> list[RunResult]:
    """What these experts answer together, greedily."""
    force = tuple(ForcedExpert(Reference.parse(task.name)) for task in tasks)
    return [ask(asked, sample, force, wishes=GREEDY) for sample in samples]


def ask(
    asked: Asked,
    sample: Sample,
    experts: tuple[ForcedExpert, ...] = (),
    *,
    base_alone: bool = False,
    wishes: SamplingOverrides = NO_OVERRIDES,
) -> RunResult:
    """One answer."""
    route = RouteRequest(
        prompt=sample.prompt,
        base_alone=base_alone,
        sampling=wishes,
        config=EngineConfig(dtype=asked.dtype),
    )
    message = UserMessage(prompt=sample.prompt)
    pieces = asked.engine.run(RunRequest(message=message, route=route, experts=experts))
    while True:
        try:
            next(pieces)
        except StopIteration as stop:
            result: RunResult = stop.value
            return result


def as_table(experts: Sequence[Figures], pairs: Sequence[Together]) -> str:
    """The figures for a person."""
    head = ("expert", "kind", "n", "base", "forced", "routed", "distinct", "copy", "overlap")
    rows = [
        (f.ref, f.kind, str(f.n), *_shares(f.base, f.forced, f.routed), str(f.distinct),
         *_shares(f.nearest_copy), str(f.train_overlap))
        for f in experts
    ]  # fmt: skip
    pair_head = ("plan", "n", "together", "alone", "routed")
    pair_rows = [
        (" + ".join(p.plan), str(p.n), *_shares(p.together), " ".join(_shares(*p.alone)),
         *_shares(p.routed))
        for p in pairs
    ]  # fmt: skip
    return "\n\n".join([_aligned([head, *rows]), _aligned([pair_head, *pair_rows])])


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _shares(*shares: float) -> list[str]:
    return [f"{share:.3f}" for share in shares]


def _share_planned(results: Sequence[RunResult], plan: Sequence[str]) -> float:
    """The share of runs whose plan is exactly these experts."""
    chosen = [[expert.ref for expert in each.planned.result.plan.experts] for each in results]
    return sum(refs == list(plan) for refs in chosen) / len(chosen)


def _texts(results: Sequence[RunResult]) -> list[str]:
    return [result.generated.text for result in results]


if __name__ == "__main__":
    main()
