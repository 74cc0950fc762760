"""Evaluation: the same prompts answered by the base alone, by an expert, and by a chain with it.

Every answer is greedy and comes from `Engine.run`, from one engine, with the length and the stops
that the expert recommends whoever answers. Being evaluated does not count as being used.
"""

import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from expertctl.digest import Digest, Progress, no_progress
from expertctl.engine.evaluation_result import Answer, Evaluated, Score
from expertctl.engine.message import UserMessage
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.runtime import Engine
from expertctl.errors import DigestError, UsageError
from expertctl.package.build import Plan as BuildPlan
from expertctl.package.build import build
from expertctl.package.evaluation_data import EvaluationData, Sample, is_right
from expertctl.package.read import read_package
from expertctl.routing.plan import PlannedExpert
from expertctl.routing.planner import Planner
from expertctl.routing.presets import SamplingWishes
from expertctl.routing.request import RouteRequest
from expertctl.schema.manifest import Manifest
from expertctl.store.catalogue import Catalogue

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
) -> Evaluated:
    """Answer every prompt in every way that the request asks for; ``progress`` counts answers.

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
    decoding = _manifest(planner, request.expert).decoding
    limit = request.max_tokens or decoding.max_tokens or DEFAULT_MAX_TOKENS
    wishes = SamplingWishes(greedy=True, max_tokens=limit, stop=decoding.stop)
    with _uncounted(planner) as unseen:
        asker = _Asker(Engine(unseen, budget=budget), request, wishes, progress)
        chain = asker.score([request.expert, *request.compose]) if request.compose else None
        expert = asker.score([request.expert])
        base = asker.score([])
        others = tuple(asker.score([replace(e, weight=1.0)]) for e in request.compose)
    return Evaluated(
        data=request.data,
        base_name=asker.base or "",
        max_tokens=limit,
        base=base,
        expert=expert,
        others=others,
        chain=chain,
        warnings=(*request.data.warnings, *asker.warnings),
    )


def evaluate_build(
    planner: Planner,
    plan: BuildPlan,
    data: EvaluationData,
    *,
    beside: Path,
    budget: int | None = None,
    progress: Progress = no_progress,
) -> Evaluated:
    """Evaluate a package that is only planned: an unsigned one, which is removed in any case.

    Raises:
        UsageError: when the directory of ``beside`` is missing.
        ExpertError: as `evaluate` does.
    """
    parent = beside.absolute().parent
    if not parent.is_dir():
        raise UsageError(f"{parent}: no such directory")
    with tempfile.TemporaryDirectory(prefix=".expertctl-", dir=parent) as folder:
        package = build(plan, Path(folder) / "evaluated.expert").path
        request = EvaluationRequest(data=data, expert=FileExpert(package))
        return evaluate(planner, request, budget=budget, progress=progress)


class _Asker:
    """Asks one engine everything; knows the base after the first answer."""

    def __init__(
        self,
        engine: Engine,
        request: EvaluationRequest,
        wishes: SamplingWishes,
        progress: Progress,
    ) -> None:
        self.base = request.base
        self.warnings: dict[str, None] = {}
        self._engine, self._data = engine, request.data
        self._wishes, self._progress = wishes, progress
        self._longest_first = _longest_first(request.data)

    def score(self, experts: Sequence[NamedExpert]) -> Score:
        """Answer all prompts one way, the longest first: what does not fit is refused at once."""
        answers: dict[int, Answer] = {}
        plans: dict[Digest, tuple[PlannedExpert, ...]] = {}
        for sample in self._longest_first:
            result = self._ask(sample, experts)
            plan = result.planned.result.plan
            plans[plan.identity] = plan.experts
            answers[sample.line] = self._judged(sample, result)
        if len(plans) > 1:
            raise DigestError("an expert changed while it was evaluated", hint="evaluate it again")
        [planned] = plans.values()
        return Score(planned, tuple(answers[sample.line] for sample in self._data.samples))

    def _ask(self, sample: Sample, experts: Sequence[NamedExpert]) -> RunResult:
        request = RunRequest(
            message=_message(sample),
            experts=tuple(experts),
            route=RouteRequest(prompt=sample.prompt, base_alone=not experts, wishes=self._wishes),
            base=self.base,
        )
        with _naming(self._data, sample):
            result = _result(self._engine.run(request))
        self.base = result.planned.base.name
        self.warnings |= dict.fromkeys(result.warnings)
        self._progress(1)
        return result

    def _judged(self, sample: Sample, result: RunResult) -> Answer:
        text = result.generated.text
        right = is_right(text, sample.answer, metric=self._data.metric)
        return Answer(sample, text, right, result.generated.finish_reason == "length")


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


def _longest_first(data: EvaluationData) -> list[Sample]:
    """Order the samples by the length of their messages, all of which can be read."""
    sizes: dict[int, int] = {}
    for sample in data.samples:
        with _naming(data, sample):
            sizes[sample.line] = len(_message(sample).text())
    return sorted(data.samples, key=lambda sample: -sizes[sample.line])


def _message(sample: Sample) -> UserMessage:
    return UserMessage(prompt=sample.prompt, body=sample.body)


def _result(pieces: Generator[str, None, RunResult]) -> RunResult:
    """Let a run come to its end."""
    while True:
        try:
            next(pieces)
        except StopIteration as end:
            result: RunResult = end.value
            return result


def _manifest(planner: Planner, expert: NamedExpert) -> Manifest:
    if isinstance(expert, FileExpert):
        return read_package(expert.path).manifest
    return planner.store.manifest(planner.store.find(expert.target))
