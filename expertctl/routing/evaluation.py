"""Evaluation of routing on labelled prompts: which expert answers each, and how often correctly.

A file is JSON Lines in UTF-8, one `LabelledPrompt` a line (``schemas/routing-sample.schema.json``).
It is bounded and read strictly, and all of its problems are reported at once with their lines.

Each prompt is decided separately, as `route` decides it, on one reading of the installed experts.
The expert that *answers* is the one that leads the plan: the best of those composed, never one that
is only required. Nothing is recorded as usage.
"""

import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from statistics import median

from expertctl.errors import NotFoundError
from expertctl.package.evaluation import Interval, wilson_interval
from expertctl.reference import Digest, PackageName, Progress, ignore_progress
from expertctl.routing.candidate import (
    InstalledExpert,
    RoutingCandidate,
    explain_misfit,
    explain_untrusted,
)
from expertctl.routing.planner import Inventory, Planner
from expertctl.routing.request import RouteRequest
from expertctl.routing.router import RoutingResult
from expertctl.routing.score import THRESHOLD, Prediction
from expertctl.routing.selection import format_suggestion
from expertctl.routing.session import PlanningSession
from expertctl.schema.strict_json import JsonObject
from expertctl.schema.validation import (
    MAX_PROBLEMS,
    JsonLinesReader,
    read_json_lines,
    warn_repeated,
)
from expertctl.store.base_record import StoredBase

_ALIASES = {"text": "prompt", "label": "expert"}
_HINT = 'each line is an object such as {"prompt": "Sort 3, 1, 2", "expert": "acme/sorting"}'


@dataclass(frozen=True, slots=True)
class LabelledPrompt:
    """One line: a prompt and the expected expert; ``None`` expects the base alone."""

    line: int
    prompt: str
    expert: PackageName | None
    id: str | None = None


@dataclass(frozen=True, slots=True)
class LabelledPrompts:
    """The labelled prompts of a file; ``digest`` is that of its bytes."""

    path: Path
    digest: Digest
    prompts: tuple[LabelledPrompt, ...]
    warnings: tuple[str, ...] = ()

    @property
    def expected_experts(self) -> list[PackageName]:
        """The expected experts, sorted by name."""
        return sorted({p.expert for p in self.prompts if p.expert is not None})


def read_labelled_prompts(path: Path) -> LabelledPrompts:
    """Read a file of labelled prompts.

    Raises:
        NotFoundError: when the file cannot be read.
        InvalidPackageError: with every problem of the file.
    """
    data = read_json_lines(path)
    lines = JsonLinesReader(str(path), schema="routing-sample", hint=_HINT, aliases=_ALIASES)
    prompts = [_parse_labelled_prompt(number, document) for number, document in lines.read(data)]
    lines.check_duplicate_ids((prompt.line, prompt.id) for prompt in prompts)
    lines.raise_problems()
    again = warn_repeated(path, ((prompt.line, prompt.prompt) for prompt in prompts))
    return LabelledPrompts(path, Digest.compute(data), tuple(prompts), again)


def require_experts_installed(data: LabelledPrompts, installed: Collection[PackageName]) -> None:
    """Require that every expected expert is installed.

    Raises:
        NotFoundError: with every name that is not installed, the first line that expects it, and
            similar names.
    """
    first: dict[PackageName, int] = {}
    for prompt in data.prompts:
        if prompt.expert is not None and prompt.expert not in installed:
            first.setdefault(prompt.expert, prompt.line)
    if first:
        lines = [_describe_unknown(*pair, installed) for pair in list(first.items())[:MAX_PROBLEMS]]
        lines += ["… and more"] * (len(first) > MAX_PROBLEMS)
        count = "1 expert is" if len(first) == 1 else f"{len(first)} experts are"
        raise NotFoundError(
            f"{data.path}: {count} not installed\n" + "\n".join(f"  - {line}" for line in lines),
            hint="`expertctl list` shows what is installed; null is for the base alone",
        )


def _describe_unknown(name: PackageName, line: int, installed: Collection[PackageName]) -> str:
    meant = format_suggestion(name, installed)
    return f"line {line}: {name}{f'; {meant}' if meant else ''}"


def _parse_labelled_prompt(number: int, document: JsonObject) -> LabelledPrompt:
    expert, name = document["expert"], document.get("id")
    return LabelledPrompt(
        line=number,
        prompt=str(document["prompt"]),
        expert=None if expert is None else PackageName.parse(str(expert)),
        id=None if name is None else str(name),
    )


@dataclass(frozen=True, slots=True)
class Proportion:
    """A count out of a total, which is at least one."""

    correct: int
    n: int

    @property
    def value(self) -> float:
        """The proportion."""
        return self.correct / self.n

    @property
    def interval(self) -> Interval:
        """The confidence interval of the proportion."""
        return wilson_interval(self.correct, self.n)


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """The decision for one prompt: the expert that answers, and the one that ranks first."""

    prompt: LabelledPrompt
    expert: PackageName | None  # None: the base alone
    first: PackageName | None  # None: no expert is eligible
    confidence: float | None  # of ``first``
    reason: str
    experts: int  # in the plan
    timings_ms: Mapping[str, float]

    @property
    def is_correct(self) -> bool:
        """Whether the expected expert answers, or none if the base should."""
        return self.expert == self.prompt.expert

    @property
    def prediction(self) -> Prediction:
        """The prediction, which also holds for other thresholds."""
        wanted = self.prompt.expert
        return Prediction(
            self.confidence, wanted is not None and self.first == wanted, bool(wanted)
        )


@dataclass(frozen=True, slots=True)
class Latency:
    """The duration of one stage of routing, in milliseconds."""

    median: float
    p95: float


@dataclass(frozen=True, slots=True)
class ExpertScore:
    """The results of one expert."""

    expert: PackageName
    expected: int
    correct: int
    abstained: int  # prompts that expect it but were left to the base
    answered: int  # prompts that it answered, whatever they expect


@dataclass(frozen=True, slots=True)
class RoutingEvaluation:
    """All decisions and the figures derived from them; a share of nothing is ``None``."""

    data: LabelledPrompts
    decisions: tuple[EvaluatedPrompt, ...]
    experts: int  # installed
    encoder: str
    bases: tuple[str, ...]
    threshold: float
    warnings: tuple[str, ...]

    @property
    def accuracy(self) -> Proportion:
        """Correctly decided prompts, of all."""
        return Proportion(sum(d.is_correct for d in self.decisions), len(self.decisions))

    @property
    def in_scope(self) -> Proportion | None:
        """Prompts answered by the expected expert, of those that expect one."""
        return _count_share(d.is_correct for d in self.decisions if d.prompt.expert)

    @property
    def abstention(self) -> Proportion | None:
        """Prompts left to the base, of those that expect an expert."""
        return _count_share(d.expert is None for d in self.decisions if d.prompt.expert)

    @property
    def out_of_scope(self) -> Proportion | None:
        """Prompts left to the base, of those that expect no expert."""
        return _count_share(d.is_correct for d in self.decisions if not d.prompt.expert)

    @property
    def precision(self) -> Proportion | None:
        """Prompts answered by the expected expert, of those answered by an expert."""
        return _count_share(d.is_correct for d in self.decisions if d.expert)

    @property
    def coverage(self) -> Proportion:
        """Prompts answered by an expert, of all."""
        return Proportion(sum(d.expert is not None for d in self.decisions), len(self.decisions))

    @property
    def composed_count(self) -> int:
        """The number of plans with more than one expert."""
        return sum(d.experts > 1 for d in self.decisions)

    @property
    def mistakes(self) -> list[EvaluatedPrompt]:
        """The wrong decisions, in the order of the file."""
        return [decision for decision in self.decisions if not decision.is_correct]

    @property
    def confusion(self) -> Counter[tuple[PackageName | None, PackageName | None]]:
        """(Expected expert or None, answering expert or None) → count."""
        return Counter((d.prompt.expert, d.expert) for d in self.decisions)

    def score_experts(self) -> list[ExpertScore]:
        """Return the results of each expert that is expected or answers, the worst first."""
        cells = self.confusion
        wanted, answered = Counter[PackageName](), Counter[PackageName]()
        for (want, got), n in cells.items():
            wanted.update({want: n} if want else {})
            answered.update({got: n} if got else {})
        scores = [
            ExpertScore(name, wanted[name], cells[name, name], cells[name, None], answered[name])
            for name in wanted.keys() | answered.keys()
        ]
        return sorted(
            scores, key=lambda s: (s.correct - s.expected, s.correct - s.answered, s.expert)
        )

    def measure_latencies(self) -> dict[str, Latency]:
        """Return the latency of each stage, without the first prompt, which opens the index."""
        timed = [d.timings_ms for d in self.decisions][1 if len(self.decisions) > 1 else 0 :]
        names = dict.fromkeys(name for timings in timed for name in timings)
        return {name: _summarise_times([t[name] for t in timed if name in t]) for name in names}


def evaluate_routing(
    planner: Planner,
    data: LabelledPrompts,
    *,
    base: str | None = None,
    progress: Progress = ignore_progress,
) -> RoutingEvaluation:
    """Route every prompt and compare the result with its label.

    Raises:
        NotFoundError: when an expected expert is not installed, or there is no base.
        BaseMismatchError: when a base changed since it was added.
    """
    session = PlanningSession(planner)
    inventory = session.inventory
    require_experts_installed(data, {expert.stored.package for expert in inventory.experts})
    planner.index.load_search_graph()
    decisions, results = [], []
    for prompt in data.prompts:
        start = time.perf_counter()
        planned = session.plan(RouteRequest(prompt=prompt.prompt), base=base)
        took = (time.perf_counter() - start) * 1000
        decisions.append(_evaluate_prompt(prompt, planned.result, took))
        results.append((planned.base.name, planned.result.encoder))
        progress(1)
    unnamed = RouteRequest(prompt=data.prompts[0].prompt)
    bases = planner.base_selector.select_bases(unnamed, inventory.experts, base_name=base)
    idle = _warn_never_chosen(data, inventory, bases)
    return RoutingEvaluation(
        data=data,
        decisions=tuple(decisions),
        experts=len(inventory.experts),
        encoder=results[0][1],
        bases=tuple(sorted({name for name, _ in results})),
        threshold=THRESHOLD,
        warnings=(*data.warnings, *inventory.warnings, *idle),
    )


def _evaluate_prompt(
    prompt: LabelledPrompt, result: RoutingResult, took_ms: float
) -> EvaluatedPrompt:
    leader = _find_leader(result)
    first = leader or next(filter(_can_lead, result.candidates), None)
    return EvaluatedPrompt(
        prompt=prompt,
        expert=_package_name(leader),
        first=_package_name(first),
        confidence=None if first is None else first.score,
        reason=first.reason if first else "",
        experts=len(result.plan.experts),
        timings_ms={**result.timings_ms, "plan": took_ms},
    )


def _find_leader(result: RoutingResult) -> RoutingCandidate | None:
    """Return the expert of the plan that was chosen first, not one that another requires."""
    led = {choice.expert.digest for choice in result.selected if not choice.is_dependency}
    return next((c for c in result.candidates if c.chosen and c.expert.digest in led), None)


def _package_name(candidate: RoutingCandidate | None) -> PackageName | None:
    return None if candidate is None else candidate.expert.stored.package


def _can_lead(candidate: RoutingCandidate) -> bool:
    """Tell whether a candidate could lead a plan at a lower threshold."""
    return candidate.probability is not None and not candidate.is_vetoed


def _count_share(marks: Iterable[bool]) -> Proportion | None:
    counted = list(marks)
    return Proportion(sum(counted), len(counted)) if counted else None


def _summarise_times(times: Sequence[float]) -> Latency:
    """Return the median and the 95th percentile (nearest rank) of at least one time."""
    return Latency(median(times), sorted(times)[ceil(0.95 * len(times)) - 1])


def _warn_never_chosen(
    data: LabelledPrompts, inventory: Inventory, bases: Sequence[StoredBase]
) -> Iterator[str]:
    """Warn of expected experts that no prompt can reach, with the reason of the newest version."""
    for name in data.expected_experts:
        versions = [e for e in inventory.experts if e.stored.package == name]
        newest = max(versions, key=lambda expert: expert.stored.version)
        if all(_explain_never_eligible(expert, bases) for expert in versions):
            yield f"{newest.ref} is never chosen: {_explain_never_eligible(newest, bases)}"


def _explain_never_eligible(expert: InstalledExpert, bases: Sequence[StoredBase]) -> str:
    misfits = [explain_misfit(expert, base.identity, allow_mismatch=False) for base in bases]
    return explain_untrusted(expert) or ("" if "" in misfits else misfits[0])
