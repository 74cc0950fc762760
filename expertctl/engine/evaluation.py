"""Evaluation: the same prompts answered by the base alone, by an expert, and by a chain with it.

Every answer, with the expert or without, is greedy and comes from one engine, with the length and
the stops that the expert recommends; several prompts are answered at once where that gives the same
(`expertctl.engine.evaluation_answers`). Being evaluated does not count as being used.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.evaluation_answers import (
    AT_ONCE,
    Answering,
    FailedAnswer,
    can_batch,
    in_batch,
    one_by_one,
)
from expertctl.engine.evaluation_result import Answer, Evaluated, Score
from expertctl.engine.message import UserMessage
from expertctl.engine.moe.report import RoutedReport
from expertctl.engine.moe.start import UNKNOWN
from expertctl.engine.recording import check_answer
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.errors import BudgetError, DigestError, DiskFullError, StoreError, UsageError
from expertctl.package.build import Plan as BuildPlan
from expertctl.package.build import build
from expertctl.package.evaluation_data import EvaluationData, Sample, is_right
from expertctl.package.write import demand_folder
from expertctl.routing.numerics import dtype_of
from expertctl.routing.plan import PlannedExpert
from expertctl.routing.planner import Planned, Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import SKIP_CAP, AdapterDtype, Dtype, MoeMiss, RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.catalogue import Catalogue
from expertctl.store.pair_gain import PairGain
from expertctl.telling import Tell, tell_nobody

DEFAULT_MAX_TOKENS = 256
"""How long an answer may be where neither the caller nor the expert says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """What is evaluated: an expert, and with ``compose`` those that stand after it in a chain."""

    data: EvaluationData
    expert: NamedExpert
    compose: tuple[NamedExpert, ...] = ()
    base: str | None = None
    max_tokens: int | None = None
    dtype: Dtype | None = None
    """What base weights are held in; None: as they are stored."""
    adapter_dtype: AdapterDtype = "published"
    deterministic: bool = False
    moe_miss: MoeMiss = "exact"
    """What happens where a routed expert is not in memory."""
    moe_skip_cap: float = SKIP_CAP
    at_once: int = AT_ONCE
    """How many prompts are answered at a time, where the base can do that."""

    @property
    def answers(self) -> int:
        """How many answers it takes."""
        ways = 2 + len(self.compose) + bool(self.compose)
        return ways * len(self.data.samples)


def evaluate(
    planner: Planner,
    request: EvaluationRequest,
    *,
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> Evaluated:
    """Answer every prompt in every way that the request asks for.

    ``progress`` gets 1 for each answer, and 0 now and then while answers are written. Files of
    experts are read once where several prompts are answered at a time. ``tell`` gets what a
    person should know while they wait.

    Raises:
        UsageError: when a prompt cannot be read, naming its line.
        DigestError: when an expert changes meanwhile.
        ExpertError: whatever else a run may raise.
    """
    if request.expert.weight != 1:
        raise UsageError(
            f"the expert is evaluated at weight 1, not {request.expert.weight:g}",
            hint="weights are for what is composed with it: --compose acme/style:0.5",
        )
    with _uncounted(planner) as unseen:
        engine = Engine(unseen, budget=budget, tell=tell, moe=UNKNOWN)
        asker = _asker(engine, request, progress)
        found = _evaluated_at_once(asker, unseen, request, budget=budget, tell=tell)
        found = found or _evaluated(asker, request)
    return replace(found, warnings=(*found.warnings, *_remember_gain(planner.catalogue, found)))


def _evaluated_at_once(
    asker: "_Asker", planner: Planner, request: EvaluationRequest, *, budget: int | None, tell: Tell
) -> Evaluated | None:
    """Evaluate with several prompts at a time; None where that is not possible or does not fit."""
    like = replace(asker.pattern, experts=(request.expert, *request.compose))
    if request.at_once < 2 or not can_batch(asker.stored, like, prompts=len(request.data.samples)):
        return None
    answered = 0

    def count(answers: int) -> None:
        nonlocal answered
        answered += answers
        asker.progress(answers)

    try:
        with in_batch(
            planner,
            asker.stored,
            like,
            budget=budget,
            at_once=request.at_once,
            tell=tell,
            progress=count,
        ) as answering:
            return _evaluated(asker.with_answering(answering, count), request)
    except BudgetError as error:
        tell(f"prompts are answered one at a time, which takes less memory: {error.message}")
        count(-answered)
        return None


def _evaluated(asker: "_Asker", request: EvaluationRequest) -> Evaluated:
    chain = asker.score([request.expert, *request.compose]) if request.compose else None
    expert = asker.score([request.expert])
    base = asker.score([])
    others = tuple(asker.score([replace(e, weight=1.0)]) for e in request.compose)
    return Evaluated(
        data=request.data,
        base_name=asker.stored.name,
        dtype=asker.dtype,
        max_tokens=asker.max_tokens,
        base=base,
        expert=expert,
        others=others,
        chain=chain,
        warnings=(*request.data.warnings, *asker.warnings),
        moe=asker.moe,
    )


def _remember_gain(catalogue: Catalogue, found: Evaluated) -> tuple[str, ...]:
    """Remember what a chain of two, each at weight 1, gains; return what could not be written."""
    experts = found.chain.experts if found.chain else ()
    if len(experts) != 2 or any(expert.weight != 1 for expert in experts):
        return ()
    gain = found.gains[-1]
    measured = PairGain(
        first=experts[0].content_digest,
        second=experts[1].content_digest,
        base=found.base_name,
        gain=gain.value,
        low=gain.interval.low,
        high=gain.interval.high,
        p=gain.p,
        n=len(found.data.samples),
        at=time.time(),
    )
    try:
        catalogue.history.record_gain(measured)
    except (StoreError, DiskFullError) as error:
        return (f"the gain was not remembered for routing: {error.message}",)
    return ()


def evaluate_build(
    planner: Planner,
    plan: BuildPlan,
    data: EvaluationData,
    *,
    beside: Path,
    budget: int | None = None,
    progress: Progress = no_progress,
    tell: Tell = tell_nobody,
) -> Evaluated:
    """Evaluate a planned package: it is built without a signature, and removed in any case.

    Raises:
        NotFoundError: when the directory of ``beside`` is missing.
        ExpertError: as `evaluate` does.
    """
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=demand_folder(beside)) as folder:
        package = build(plan, Path(folder) / "evaluated.expert").path
        request = EvaluationRequest(data=data, expert=FileExpert(package))
        return evaluate(planner, request, budget=budget, progress=progress, tell=tell)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asker:
    """Asks one engine everything, on one base, with the settings of the expert."""

    answering: Answering
    data: EvaluationData
    longest_first: Sequence[Sample]
    stored: StoredBase
    dtype: str
    """What its weights are held in."""
    pattern: RunRequest
    """The request of every answer, except for its prompt."""
    max_tokens: int
    contents: frozenset[Digest]
    """The experts of all ways, as they were when the evaluation began."""
    progress: Progress
    warnings: dict[str, None] = field(default_factory=dict)
    routed: list[RoutedReport] = field(default_factory=list)
    """What became of routed experts, answer by answer."""

    def with_answering(self, answering: Answering, progress: Progress) -> "_Asker":
        """Return one that has found nothing yet, and has other ways to answer and to count."""
        return replace(self, answering=answering, progress=progress, warnings={}, routed=[])

    @property
    def moe(self) -> RoutedReport | None:
        """What became of them in all answers; None where the base has none."""
        return reduce(RoutedReport.and_then, self.routed) if self.routed else None

    def score(self, experts: Sequence[NamedExpert]) -> Score:
        """Answer all prompts one way, the longest first: what does not fit is refused at once."""
        answers: dict[int, Answer] = {}
        warnings: dict[int, list[str]] = {}
        plans: dict[Digest, tuple[PlannedExpert, ...]] = {}
        samples = self.longest_first
        requests = [_run_request(sample, experts, self.pattern) for sample in samples]
        with _naming_failed(self.data, samples):
            for number, result in self.answering(requests):
                warnings[number] = self._count(samples[number], result)
                plan = result.planned.result.plan
                plans[plan.identity] = plan.experts
                answers[samples[number].line] = self._judged(samples[number], result)
        for number in sorted(warnings):  # answers come in any order, warnings do not
            self.warnings.update(dict.fromkeys(warnings[number]))
        used = {expert.content_digest for planned in plans.values() for expert in planned}
        if len(plans) > 1 or not used <= self.contents:
            raise DigestError("an expert changed while it was evaluated", hint="evaluate it again")
        [planned] = plans.values()
        return Score(planned, tuple(answers[sample.line] for sample in self.data.samples))

    def _count(self, sample: Sample, result: RunResult) -> list[str]:
        """Count an answer; return its warnings, but for those of its form (see `_judged`)."""
        self.routed.extend([] if result.moe is None else [result.moe])
        self.progress(1)
        judged = check_answer(result.generated, result.planned, sample.prompt).warnings
        return [warning for warning in result.warnings if warning not in judged]

    def _judged(self, sample: Sample, result: RunResult) -> Answer:
        text = result.generated.text
        right = is_right(text, sample.answer, metric=self.data.metric)
        return Answer(sample, text, right, result.generated.finish_reason == "length")


def _asker(engine: Engine, request: EvaluationRequest, progress: Progress) -> _Asker:
    """Plan before anything is loaded: errors of the experts are raised before any answer."""
    longest_first, pattern = _longest_first(request.data), _pattern(request)

    def plan(experts: Sequence[NamedExpert]) -> Planned:
        return engine.plan(_run_request(longest_first[0], experts, pattern))

    planned = plan([request.expert])
    together = plan([request.expert, *request.compose])
    decoding = planned.experts[-1].manifest.decoding  # after those that it requires
    limit = request.max_tokens or decoding.max_tokens or DEFAULT_MAX_TOKENS
    return _Asker(
        answering=one_by_one(engine, progress=progress),
        data=request.data,
        longest_first=longest_first,
        stored=planned.base,
        dtype=dtype_of(planned.base, request.dtype),
        pattern=replace(
            pattern,
            base=planned.base.name,
            route=replace(
                pattern.route,
                wishes=SamplingWishes(greedy=True, max_tokens=limit, stop=decoding.stop),
            ),
        ),
        max_tokens=limit,
        contents=frozenset(expert.digest for expert in (*planned.experts, *together.experts)),
        progress=progress,
    )


@contextmanager
def _uncounted(planner: Planner) -> Iterator[Planner]:
    """Lend the planner with a usage history that is forgotten."""
    with tempfile.TemporaryDirectory() as folder:
        yield replace(planner, catalogue=Catalogue(Path(folder) / "index.db"))


@contextmanager
def _naming(data: EvaluationData, sample: Sample) -> Iterator[None]:
    """Say at which line a prompt cannot be answered."""
    try:
        yield
    except UsageError as error:
        where = f"{data.path}, line {sample.line}"
        raise UsageError(f"{where}: {error.message}") from error


@contextmanager
def _naming_failed(data: EvaluationData, samples: Sequence[Sample]) -> Iterator[None]:
    """Raise the error of the prompt that could not be answered, with its line."""
    try:
        yield
    except FailedAnswer as failed:
        with _naming(data, samples[failed.number]):
            raise failed.error from failed


def _longest_first(data: EvaluationData) -> list[Sample]:
    """Order the samples by the length of their messages, all of which can be read."""
    sizes: dict[int, int] = {}
    for sample in data.samples:
        with _naming(data, sample):
            sizes[sample.line] = len(_message(sample).text())
    return sorted(data.samples, key=lambda sample: -sizes[sample.line])


def _pattern(request: EvaluationRequest) -> RunRequest:
    """Return what the requests of all answers share: the base, and how it is held."""
    sample = request.data.samples[0]
    route = RouteRequest(
        prompt=sample.prompt,
        dtype=request.dtype,
        adapter_dtype=request.adapter_dtype,
        deterministic=request.deterministic,
        moe_miss=request.moe_miss,
        moe_skip_cap=request.moe_skip_cap,
    )
    return RunRequest(message=_message(sample), route=route, base=request.base)


def _run_request(sample: Sample, experts: Sequence[NamedExpert], pattern: RunRequest) -> RunRequest:
    route = replace(pattern.route, prompt=sample.prompt, base_alone=not experts)
    return replace(pattern, message=_message(sample), experts=tuple(experts), route=route)


def _message(sample: Sample) -> UserMessage:
    return UserMessage(prompt=sample.prompt, body=sample.body)
