"""Evaluation of routing: which expert would answer labelled prompts, and how often that is right.

Each prompt is decided alone, as `route` decides it, on one reading of the installed experts. The
expert that *answers* is the one that leads the plan: the best of those that were composed, never
one that is only required. Nothing is counted as use.
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

from expertctl.digest import Progress, no_progress
from expertctl.package.proportion import Interval, share_interval
from expertctl.reference import PackageName
from expertctl.routing.candidate import Candidate, Installed, misfit, untrusted
from expertctl.routing.labelled_prompts import LabelledPrompt, LabelledPrompts, check_installed
from expertctl.routing.planner import Inventory, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.risk_coverage import Guess
from expertctl.routing.router import RoutingResult
from expertctl.routing.score import THRESHOLD
from expertctl.routing.session import PlanningSession
from expertctl.store.base_record import StoredBase


@dataclass(frozen=True, slots=True)
class Share:
    """A count out of a total, which is at least one."""

    right: int
    n: int

    @property
    def value(self) -> float:
        """The share."""
        return self.right / self.n

    @property
    def interval(self) -> Interval:
        """The confidence interval of the share."""
        return share_interval(self.right, self.n)


@dataclass(frozen=True, slots=True)
class Decision:
    """What the router made of one prompt: what answers, and what comes first, answering or not."""

    prompt: LabelledPrompt
    expert: PackageName | None  # None: the base alone
    first: PackageName | None  # None: no expert may answer
    confidence: float | None  # of the first
    reason: str
    experts: int  # in the plan
    timings_ms: Mapping[str, float]

    @property
    def right(self) -> bool:
        """Whether the wanted expert answers, or none where the base should."""
        return self.expert == self.prompt.expert

    @property
    def guess(self) -> Guess:
        """What counts for other thresholds."""
        wanted = self.prompt.expert
        return Guess(self.confidence, wanted is not None and self.first == wanted, bool(wanted))


@dataclass(frozen=True, slots=True)
class Latency:
    """How long one part of routing takes, in milliseconds."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class ExpertScore:
    """How the prompts of one expert fared, and its answers."""

    expert: PackageName
    wanted: int
    right: int
    abstained: int  # prompts of it that were left to the base
    answered: int  # prompts of any expert or none


@dataclass(frozen=True, slots=True)
class RoutingEvaluation:
    """All decisions, and the figures that follow from them; a share of nothing is ``None``."""

    data: LabelledPrompts
    decisions: tuple[Decision, ...]
    experts: int  # installed
    encoder: str
    bases: tuple[str, ...]
    threshold: float
    warnings: tuple[str, ...]

    @property
    def accuracy(self) -> Share:
        """Prompts that were decided as wanted, of all."""
        return Share(sum(d.right for d in self.decisions), len(self.decisions))

    @property
    def in_scope(self) -> Share | None:
        """Prompts answered by the wanted expert, of those that want one."""
        return _share(d.right for d in self.decisions if d.prompt.expert)

    @property
    def abstention(self) -> Share | None:
        """Prompts left to the base, of those that want an expert."""
        return _share(d.expert is None for d in self.decisions if d.prompt.expert)

    @property
    def out_of_scope(self) -> Share | None:
        """Prompts left to the base, of those that want no expert."""
        return _share(d.right for d in self.decisions if not d.prompt.expert)

    @property
    def precision(self) -> Share | None:
        """Prompts answered by the wanted expert, of those that an expert answers."""
        return _share(d.right for d in self.decisions if d.expert)

    @property
    def coverage(self) -> Share:
        """Prompts that an expert answers, of all."""
        return Share(sum(d.expert is not None for d in self.decisions), len(self.decisions))

    @property
    def composed(self) -> int:
        """The number of plans with more than one expert."""
        return sum(d.experts > 1 for d in self.decisions)

    @property
    def wrong(self) -> list[Decision]:
        """The decisions that are not as wanted, in the order of the file."""
        return [decision for decision in self.decisions if not decision.right]

    @property
    def confusion(self) -> Counter[tuple[PackageName | None, PackageName | None]]:
        """How often prompts of one expert, or none, were answered by another, or none."""
        return Counter((d.prompt.expert, d.expert) for d in self.decisions)

    def per_expert(self) -> list[ExpertScore]:
        """Return how each expert that is wanted or answers fared, the worst first."""
        cells = self.confusion
        wanted, answered = Counter[PackageName](), Counter[PackageName]()
        for (want, got), n in cells.items():
            wanted.update({want: n} if want else {})
            answered.update({got: n} if got else {})
        scores = [
            ExpertScore(name, wanted[name], cells[name, name], cells[name, None], answered[name])
            for name in wanted.keys() | answered.keys()
        ]
        return sorted(scores, key=lambda s: (s.right - s.wanted, s.right - s.answered, s.expert))

    def latencies(self) -> dict[str, Latency]:
        """Return how long each part takes; the first prompt, which opens the index, is left out."""
        timed = [d.timings_ms for d in self.decisions][1 if len(self.decisions) > 1 else 0 :]
        names = dict.fromkeys(name for timings in timed for name in timings)
        return {name: _latency([t[name] for t in timed if name in t]) for name in names}


def evaluate_routing(
    planner: Planner,
    data: LabelledPrompts,
    *,
    base: str | None = None,
    progress: Progress = no_progress,
) -> RoutingEvaluation:
    """Route every prompt, and compare.

    Raises:
        NotFoundError: when a wanted expert is not installed, or there is no base.
        BaseMismatchError: when a base is not what was added.
    """
    session = PlanningSession(planner)
    inventory = session.inventory
    check_installed(data, {expert.stored.package for expert in inventory.experts})
    planner.index.prepare()
    decisions, results = [], []
    for prompt in data.prompts:
        start = time.perf_counter()
        planned = session.plan(RouteRequest(prompt=prompt.prompt), base=base)
        took = (time.perf_counter() - start) * 1000
        decisions.append(_decision(prompt, planned.result, took))
        results.append((planned.base.name, planned.result.encoder))
        progress(1)
    unnamed = RouteRequest(prompt=data.prompts[0].prompt)
    bases = planner.rule.answering(unnamed, inventory.experts, named=base)
    idle = _never_chosen(data, inventory, bases)
    return RoutingEvaluation(
        data=data,
        decisions=tuple(decisions),
        experts=len(inventory.experts),
        encoder=results[0][1],
        bases=tuple(sorted({name for name, _ in results})),
        threshold=THRESHOLD,
        warnings=(*data.warnings, *inventory.warnings, *idle),
    )


def _decision(prompt: LabelledPrompt, result: RoutingResult, took_ms: float) -> Decision:
    leader = _leader(result)
    first = leader or next(filter(_is_able, result.candidates), None)
    return Decision(
        prompt=prompt,
        expert=_package(leader),
        first=_package(first),
        confidence=None if first is None else first.score,
        reason=first.reason if first else "",
        experts=len(result.plan.experts),
        timings_ms={**result.timings_ms, "plan": took_ms},
    )


def _leader(result: RoutingResult) -> Candidate | None:
    """Return the expert of the plan that was chosen first, not one that another requires."""
    led = {choice.expert.digest for choice in result.choices if not choice.pulled}
    return next((c for c in result.candidates if c.chosen and c.expert.digest in led), None)


def _package(candidate: Candidate | None) -> PackageName | None:
    return None if candidate is None else candidate.expert.stored.package


def _is_able(candidate: Candidate) -> bool:
    """Tell whether a lower threshold could have made a candidate lead a plan."""
    return candidate.share is not None and not candidate.vetoed


def _share(marks: Iterable[bool]) -> Share | None:
    counted = list(marks)
    return Share(sum(counted), len(counted)) if counted else None


def _latency(times: Sequence[float]) -> Latency:
    """Return the median and the 95th percentile (nearest rank) of at least one time."""
    return Latency(median(times), sorted(times)[ceil(0.95 * len(times)) - 1])


def _never_chosen(
    data: LabelledPrompts, inventory: Inventory, bases: Sequence[StoredBase]
) -> Iterator[str]:
    """Warn of wanted experts that no prompt can reach, with the reason of the newest version."""
    for name in data.experts:
        versions = [e for e in inventory.experts if e.stored.package == name]
        newest = max(versions, key=lambda expert: expert.stored.version)
        if all(_bar(expert, bases) for expert in versions):
            yield f"{newest.ref} is never chosen: {_bar(newest, bases)}"


def _bar(expert: Installed, bases: Sequence[StoredBase]) -> str:
    misfits = [misfit(expert, base.identity, allow_mismatch=False) for base in bases]
    return untrusted(expert) or ("" if "" in misfits else misfits[0])
