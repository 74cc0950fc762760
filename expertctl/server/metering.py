"""`Metered`: the engine as routes use it; jobs are counted, limited and, if wanted, traced.

Events are observed in the threads of the engine, on their way to the sink of the job.
"""

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from expertctl.engine.moe.adoption import ProfileWishes
from expertctl.engine.moe.counters import Mode
from expertctl.engine.moe.observation import Observation
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.batch_engine import BatchEngine
from expertctl.engine.serving.expert_here import ExpertHere
from expertctl.engine.serving.job import Event, Failed, Finished, Job, Piece, Sink, Started
from expertctl.engine.serving.snapshot import Snapshot
from expertctl.engine.tokenizer import Tokenizer
from expertctl.errors import ExpertError
from expertctl.routing.planner import Planned
from expertctl.schema.strict_json import JsonObject
from expertctl.server import job_record
from expertctl.server.metrics import Metrics
from expertctl.server.quotas import Quotas

LOG = logging.getLogger("expertctl.server.jobs")
Trace = Callable[[Job, Sink], Sink]
"""Returns a sink that makes spans of the events that it passes on."""


def untraced(_: Job, sink: Sink) -> Sink:
    """Make no spans."""
    return sink


class Metered:
    """A batch engine whose jobs are measured."""

    def __init__(
        self,
        engine: BatchEngine,
        metrics: Metrics,
        quotas: Quotas,
        *,
        trace: Trace = untraced,
        log_prompts: bool = False,
    ) -> None:
        """Measure the jobs of ``engine``; prompts are logged only with ``log_prompts``."""
        self._engine, self._metrics, self._quotas = engine, metrics, quotas
        self._trace, self._log_prompts = trace, log_prompts

    @property
    def base_name(self) -> str:
        """The name of the base that is served."""
        return self._engine.base_name

    @property
    def context(self) -> int:
        """How many tokens a text can have, the prompt included."""
        return self._engine.context

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the base, with its chat template."""
        return self._engine.tokenizer

    def submit(self, job: Job, sink: Sink) -> None:
        """Take a job into the queue; its events come to the sink from now on.

        Raises:
            RateLimitError: when the queue is full, or the owner had too many tokens.
            UsageError: when the job asks for what is not done here.
        """
        if self._log_prompts:
            fields = {"job": job.id, "owner": job.owner, "prompt": job.request.message.prompt}
            LOG.info("prompt", extra={"fields": fields})
        try:
            self._quotas.demand_tokens(job.owner)
            heard = self._trace(job, sink)
            self._engine.submit(job, _Meter(job, heard, self._metrics, self._quotas))
        except ExpertError as error:
            self._metrics.refused(error)
            raise

    def cancel(self, job_id: str) -> None:
        """Cancel a job; do nothing if it is unknown or has ended."""
        self._engine.cancel(job_id)

    def plan(self, request: RunRequest) -> Future[Planned]:
        """Return the plan for a request, once it is made."""
        return self._engine.plan(request)

    def experts(self) -> Future[tuple[ExpertHere, ...]]:
        """Return the installed experts, once earlier planning is done."""
        return self._engine.experts()

    def expected_wait(self, job_id: str | None = None) -> float:
        """Return about how many seconds a job has to wait; without an id, one that came now."""
        return self._engine.expected_wait(job_id)

    def forget(self, cache_key: str) -> None:
        """Forget what is kept under a cache key."""
        self._engine.forget(cache_key)

    def snapshot(self) -> Snapshot:
        """Return what goes on now."""
        return self._engine.snapshot()

    def observation(self) -> Observation:
        """Return what was counted of routed experts."""
        return self._engine.observation()

    def observe(self, *, mode: Mode | None, reset: bool) -> Observation:
        """Count routed experts in another mode, or from zero; return what is counted then.

        Raises:
            IncompatibleError: when the base has no routed experts that can be counted.
        """
        return self._engine.observe(mode=mode, reset=reset)

    def adopt(self, profile: JsonObject | None, wishes: ProfileWishes) -> Observation:
        """Let a profile, or what was learnt of the base, decide which routed experts stay.

        Raises:
            ExpertError: when it does not fit, or changes nothing.
        """
        return self._engine.adopt(profile, wishes)


class _Meter:
    """Observes the events of one job, and passes them on.

    In this order: once a client has its answer, metrics, log and limits have counted it.
    """

    def __init__(self, job: Job, sink: Sink, metrics: Metrics, quotas: Quotas) -> None:
        self._job, self._sink, self._metrics, self._quotas = job, sink, metrics, quotas
        self._begun = time.perf_counter()
        self._last: dict[int, float] = {}

    @property
    def _total_ms(self) -> float:
        return (time.perf_counter() - self._begun) * 1e3

    def __call__(self, event: Event) -> None:
        try:
            self._observe(event)
        finally:  # the answer goes out even if the observer fails
            self._sink(event)

    def _observe(self, event: Event) -> None:
        match event:
            case Piece():
                self._observe_gap(event.number)
            case Finished():
                self._observe_end(event.results)
            case Failed():
                self._metrics.failed(event.error)
                fields = job_record.failed(self._job, event.error, total_ms=self._total_ms)
                LOG.info("job", extra={"fields": fields})
            case Started():
                pass

    def _observe_gap(self, number: int) -> None:
        now = time.perf_counter()
        before = self._last.get(number)
        self._last[number] = now
        if before is not None:
            self._metrics.gap(now - before)

    def _observe_end(self, results: Sequence[RunResult]) -> None:
        for result in results:
            self._metrics.answered(result)
        fields = job_record.answered(self._job, results, total_ms=self._total_ms)
        LOG.info("job", extra={"fields": fields})
        tokens = sum(len(result.generated.tokens) for result in results)
        self._quotas.spend(self._job.owner, results[0].prompt_tokens + tokens)  # prompt: read once
