"""Evaluation: the same prompts answered by the base alone, by an expert, and by a chain with it.

All answers are greedy and come from one engine, with the length and the stop strings that the
expert recommends. Several prompts are answered at once where the results are the same
(`expertctl.engine.offline`). Evaluations are not recorded as usage.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

from expertctl.digest import Digest, Progress, ignore_progress
from expertctl.engine.evaluation_result import AccuracyScore, EvaluationResult, ScoredAnswer
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.moe.counters import RoutedExpertStats
from expertctl.engine.offline import (
    BATCH_SIZE,
    AnswerError,
    AnswerRequests,
    answer_sequentially,
    can_batch,
    open_batch_answering,
    without_usage_history,
)
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.result_builder import check_answer
from expertctl.engine_config import COLD_START, DEFAULT_CONFIG, EngineConfig
from expertctl.errors import (
    BudgetError,
    DigestError,
    DiskFullError,
    Notify,
    StoreError,
    UsageError,
    ignore_notification,
)
from expertctl.package.build import BuildPlan as BuildPlan
from expertctl.package.build import build_package
from expertctl.package.evaluation import EvaluationData, EvaluationSample, is_correct
from expertctl.package.write import require_folder
from expertctl.routing.base_dtype import choose_dtype
from expertctl.routing.plan import PlannedExpert
from expertctl.routing.planner import PlannedPrompt, Planner
from expertctl.routing.request import RouteRequest
from expertctl.store.base_record import StoredBase
from expertctl.store.catalogue import Catalogue
from expertctl.store.run_record import PairGain
from expertctl.user_request import SamplingOverrides, UserMessage

DEFAULT_MAX_TOKENS = 256
"""Default answer length where neither the caller nor the expert sets one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRequest:
    """An expert to evaluate, and with ``compose`` the experts that follow it in a chain."""

    data: EvaluationData
    expert: NamedExpert
    compose: tuple[NamedExpert, ...] = ()
    config: EngineConfig = DEFAULT_CONFIG
    max_tokens: int | None = None
    batch_size: int = BATCH_SIZE
    """Number of prompts answered at a time, where the base supports it."""

    @property
    def answers(self) -> int:
        """Number of answers that the evaluation generates."""
        ways = 2 + len(self.compose) + bool(self.compose)
        return ways * len(self.data.samples)


def evaluate(
    planner: Planner,
    request: EvaluationRequest,
    *,
    progress: Progress = ignore_progress,
    notify: Notify = ignore_notification,
) -> EvaluationResult:
    """Answer every prompt in every way that the request asks for.

    ``progress`` gets 1 for each answer, and 0 now and then while answers are generated. Files of
    experts are read once where several prompts are answered at a time. ``notify`` gets messages for
    the user during the evaluation.

    Raises:
        UsageError: when a prompt cannot be read, naming its line.
        DigestError: when an expert changes meanwhile.
        ExpertError: for any other error of a run.
    """
    if request.expert.weight != 1:
        raise UsageError(
            f"the expert is evaluated at weight 1, not {request.expert.weight:g}",
            hint="weights apply to the experts of --compose: --compose acme/style:0.5",
        )
    with without_usage_history(planner) as unseen:
        config = replace(request.config, moe=COLD_START)
        engine = LocalEngine.from_config(unseen, config, tell=notify)
        evaluator = _make_evaluator(engine, request, progress)
        found = _evaluate_batched(evaluator, unseen, request, notify=notify)
        found = found or _evaluate_all(evaluator, request)
    return replace(found, warnings=(*found.warnings, *_remember_gain(planner.catalogue, found)))


def _evaluate_batched(
    evaluator: "_Evaluator",
    planner: Planner,
    request: EvaluationRequest,
    *,
    notify: Notify,
) -> EvaluationResult | None:
    """Evaluate several prompts at a time; return None where that is impossible or does not fit."""
    like = replace(evaluator.pattern, experts=(request.expert, *request.compose))
    if request.batch_size < 2 or not can_batch(
        evaluator.stored, like, prompts=len(request.data.samples)
    ):
        return None
    answered = 0

    def count(answers: int) -> None:
        nonlocal answered
        answered += answers
        evaluator.progress(answers)

    try:
        with open_batch_answering(
            planner,
            evaluator.stored,
            like,
            batch_size=request.batch_size,
            notify=notify,
            progress=count,
        ) as answering:
            batched = replace(
                evaluator, answer_requests=answering, progress=count, warnings={}, routed=[]
            )
            return _evaluate_all(batched, request)
    except BudgetError as error:
        notify(f"prompts are answered one at a time, which takes less memory: {error.message}")
        count(-answered)
        return None


def _evaluate_all(evaluator: "_Evaluator", request: EvaluationRequest) -> EvaluationResult:
    chain = evaluator.score([request.expert, *request.compose]) if request.compose else None
    expert = evaluator.score([request.expert])
    base = evaluator.score([])
    others = tuple(evaluator.score([replace(e, weight=1.0)]) for e in request.compose)
    return EvaluationResult(
        data=request.data,
        base_name=evaluator.stored.name,
        dtype=evaluator.dtype,
        max_tokens=evaluator.max_tokens,
        base=base,
        expert=expert,
        others=others,
        chain=chain,
        warnings=(*request.data.warnings, *evaluator.warnings),
        moe=reduce(RoutedExpertStats.combine, evaluator.routed) if evaluator.routed else None,
    )


def _remember_gain(catalogue: Catalogue, found: EvaluationResult) -> tuple[str, ...]:
    """Record the gain of a chain of two at weight 1; return a warning if it cannot be written."""
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
        p=gain.p_value,
        n=len(found.data.samples),
        at=time.time(),
    )
    try:
        catalogue.history.record_gain(measured)
    except (StoreError, DiskFullError) as error:
        return (f"the gain was not saved for routing: {error.message}",)
    return ()


def evaluate_build(
    planner: Planner,
    plan: BuildPlan,
    data: EvaluationData,
    *,
    sibling: Path,
    config: EngineConfig = DEFAULT_CONFIG,
    progress: Progress = ignore_progress,
    notify: Notify = ignore_notification,
) -> EvaluationResult:
    """Evaluate a planned package: it is built without a signature, and always removed.

    Raises:
        NotFoundError: when the folder of ``sibling`` is missing.
        ExpertError: as `evaluate` does.
    """
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=require_folder(sibling)) as folder:
        package = build_package(plan, Path(folder) / "evaluated.expert").path
        request = EvaluationRequest(data=data, expert=FileExpert(package), config=config)
        return evaluate(planner, request, progress=progress, notify=notify)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Evaluator:
    """Answers every prompt on one base with the settings of the expert."""

    answer_requests: AnswerRequests
    data: EvaluationData
    longest_first: Sequence[EvaluationSample]
    stored: StoredBase
    dtype: str
    """Data type of the base weights."""
    pattern: RunRequest
    """The request of every answer, except for its prompt."""
    max_tokens: int
    contents: frozenset[Digest]
    """Digests of all experts, as they were when the evaluation began."""
    progress: Progress
    warnings: dict[str, None] = field(default_factory=dict)
    routed: list[RoutedExpertStats] = field(default_factory=list)
    """Routed-expert statistics of each answer."""

    def score(self, experts: Sequence[NamedExpert]) -> AccuracyScore:
        """Answer all prompts with these experts, the longest first: misfits are refused at once."""
        answers: dict[int, ScoredAnswer] = {}
        warnings: dict[int, list[str]] = {}
        plans: dict[Digest, tuple[PlannedExpert, ...]] = {}
        samples = self.longest_first
        requests = [_make_run_request(sample, experts, self.pattern) for sample in samples]
        try:
            for number, result in self.answer_requests(requests):
                warnings[number] = self._record_answer(samples[number], result)
                plan = result.planned.result.plan
                plans[plan.identity] = plan.experts
                answers[samples[number].line] = self._judge_answer(samples[number], result)
        except AnswerError as failed:
            with _name_line(self.data, samples[failed.number]):
                raise failed.error from failed
        for number in sorted(warnings):  # answers arrive in any order; warnings must not
            self.warnings.update(dict.fromkeys(warnings[number]))
        used = {expert.content_digest for planned in plans.values() for expert in planned}
        if len(plans) > 1 or not used <= self.contents:
            raise DigestError("an expert changed while it was evaluated", hint="evaluate it again")
        [planned] = plans.values()
        return AccuracyScore(planned, tuple(answers[sample.line] for sample in self.data.samples))

    def _record_answer(self, sample: EvaluationSample, result: RunResult) -> list[str]:
        """Count an answer; return its warnings, except those that `check_answer` gives."""
        self.routed.extend([] if result.moe is None else [result.moe])
        self.progress(1)
        judged = check_answer(result.generated, result.planned, sample.prompt).warnings
        return [warning for warning in result.warnings if warning not in judged]

    def _judge_answer(self, sample: EvaluationSample, result: RunResult) -> ScoredAnswer:
        text = result.generated.text
        right = is_correct(text, sample.answer, metric=self.data.metric)
        return ScoredAnswer(sample, text, right, result.generated.finish_reason == "length")


def _make_evaluator(
    engine: LocalEngine, request: EvaluationRequest, progress: Progress
) -> _Evaluator:
    """Plan before anything is loaded: errors of the experts are raised before any answer."""
    longest_first, pattern = _sort_longest_first(request.data), _make_pattern(request)

    def plan(experts: Sequence[NamedExpert]) -> PlannedPrompt:
        return engine.plan(_make_run_request(longest_first[0], experts, pattern))

    planned = plan([request.expert])
    together = plan([request.expert, *request.compose])
    decoding = planned.experts[-1].manifest.decoding  # the last one, after those that it requires
    limit = request.max_tokens or decoding.max_tokens or DEFAULT_MAX_TOKENS
    return _Evaluator(
        answer_requests=answer_sequentially(engine, progress=progress),
        data=request.data,
        longest_first=longest_first,
        stored=planned.base,
        dtype=choose_dtype(planned.base, request.config.dtype, device=request.config.device),
        pattern=replace(
            pattern,
            base=planned.base.name,
            route=replace(
                pattern.route,
                sampling=SamplingOverrides(greedy=True, max_tokens=limit, stop=decoding.stop),
            ),
        ),
        max_tokens=limit,
        contents=frozenset(expert.digest for expert in (*planned.experts, *together.experts)),
        progress=progress,
    )


@contextmanager
def _name_line(data: EvaluationData, sample: EvaluationSample) -> Iterator[None]:
    """Add the line of the prompt to usage errors."""
    try:
        yield
    except UsageError as error:
        where = f"{data.path}, line {sample.line}"
        raise UsageError(f"{where}: {error.message}") from error


def _sort_longest_first(data: EvaluationData) -> list[EvaluationSample]:
    """Sort the samples by the length of their messages, which must all be readable."""
    sizes: dict[int, int] = {}
    for sample in data.samples:
        with _name_line(data, sample):
            sizes[sample.line] = len(_make_message(sample).text())
    return sorted(data.samples, key=lambda sample: -sizes[sample.line])


def _make_pattern(request: EvaluationRequest) -> RunRequest:
    """Return the part shared by the requests of all answers: the base and the engine."""
    sample, config = request.data.samples[0], request.config
    route = RouteRequest(prompt=sample.prompt, config=config)
    return RunRequest(message=_make_message(sample), route=route, base=config.base)


def _make_run_request(
    sample: EvaluationSample, experts: Sequence[NamedExpert], pattern: RunRequest
) -> RunRequest:
    route = replace(pattern.route, prompt=sample.prompt, base_alone=not experts)
    return replace(pattern, message=_make_message(sample), experts=tuple(experts), route=route)


def _make_message(sample: EvaluationSample) -> UserMessage:
    return UserMessage(prompt=sample.prompt, body=sample.body)
