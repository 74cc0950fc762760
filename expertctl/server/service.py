"""`Service`: what the routes of the generation server share, and the measuring of its jobs.

`Readiness` says whether jobs are accepted: not before the base is loaded and warm, nor during
shutdown. Routes submit jobs through `MeteredJobs`, which counts them, limits them by quotas and, if
tracing is on, traces them; their events are observed in the engine's threads, on the way to the
job's sink. Everything else is asked of the engine itself.

Each job that ends adds one line to the log: experts, duration of each stage, outcome; neither
prompt nor answer. All lines have the same keys.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Literal

from msgspec import Struct

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import OutputDelta
from expertctl.engine.serving.engine import ServingEngine
from expertctl.engine.serving.request import (
    GenerationJob,
    JobEvent,
    JobFailed,
    JobFinished,
    JobStarted,
    TokenSink,
)
from expertctl.errors import (
    ExpertError,
    InvalidPackageError,
    StoreError,
    UnauthenticatedError,
)
from expertctl.routing.planner import Planner
from expertctl.schema.strict_json import JsonObject, JsonValue
from expertctl.server.api_keys import ApiKeyStore
from expertctl.server.metrics import Metrics
from expertctl.server.responses import Caller, Quotas
from expertctl.server.settings import ServeSettings, is_exposed
from expertctl.store.server_record import is_owner_key

if TYPE_CHECKING:
    from expertctl.server.tracing import Tracing


ReadinessState = Literal["loading", "ready", "failed", "ending"]


class ReadinessDocument(Struct, frozen=True):
    """Whether jobs are accepted, and the state that decides it."""

    ready: bool
    state: ReadinessState


class Readiness:
    """The state of the engine; any thread may change it."""

    def __init__(self, state: ReadinessState = "ready") -> None:
        """Start in the given state."""
        self.state: ReadinessState = state

    @property
    def document(self) -> ReadinessDocument:
        """The state as a document."""
        return ReadinessDocument(self.is_ready, self.state)

    @property
    def is_ready(self) -> bool:
        """Whether jobs are accepted."""
        return self.state == "ready"


_INFERENCE_STAGES = ("prefill", "decode")
_INCOMPLETE_REASONS = {"cancelled", "timeout"}


def record_answered_job(
    job: GenerationJob, results: Sequence[RunResult], *, total_ms: float
) -> JsonObject:
    """Return the log record of a job that was answered.

    Times are those of its first answer; ``memory_peak`` is the server's peak so far, in bytes.
    """
    first, times = results[0], results[0].timings_ms
    experts = [expert.ref for expert in first.planned.result.plan.experts]
    reasons = [result.generated.finish_reason for result in results]
    checked = [r.validation_passed for r in results if r.validation_passed is not None]
    return _make_empty_record(job, total_ms) | {
        "router_latency_ms": round(times.get("route", 0.0), 3),
        "expert_load_latency_ms": round(times.get("load", 0.0), 3),
        "queue_latency_ms": round(times.get("queue", 0.0), 3),
        "inference_latency_ms": round(sum(times.get(name, 0.0) for name in _INFERENCE_STAGES), 3),
        "ttft_ms": round(times["ttft"], 3),
        "experts_used": list[JsonValue](experts),
        "num_experts": len(experts),
        "memory_peak": first.memory.peak,
        "input_tokens": first.prompt_tokens,
        "kv_reused_tokens": first.kv_reused_tokens,
        "output_tokens": sum(len(result.generated.tokens) for result in results),
        "tokens_per_second": round(first.generated.tokens_per_s, 2),
        "finish_reasons": list[JsonValue](reasons),
        "success": _INCOMPLETE_REASONS.isdisjoint(reasons),
        "validation_passed": all(checked) if checked else None,
    }


def record_failed_job(job: GenerationJob, error: ExpertError, *, total_ms: float) -> JsonObject:
    """Return the log record of a job that failed."""
    return _make_empty_record(job, total_ms) | {"error": error.code}


def _make_empty_record(job: GenerationJob, total_ms: float) -> JsonObject:
    """Return the log record of an ended job with every other field empty."""
    submitted = datetime.now(UTC) - timedelta(milliseconds=total_ms)
    return {
        "job": job.id,
        "owner": job.owner,
        "submitted_at": submitted.isoformat(timespec="milliseconds"),
        "router_latency_ms": None,
        "expert_load_latency_ms": None,
        "queue_latency_ms": None,
        "inference_latency_ms": None,
        "ttft_ms": None,
        "total_latency_ms": round(total_ms, 3),
        "experts_used": [],
        "num_experts": 0,
        "memory_peak": None,
        "input_tokens": None,
        "kv_reused_tokens": 0,
        "output_tokens": 0,
        "tokens_per_second": None,
        "finish_reasons": [],
        "success": False,
        "error": None,
        "validation_passed": None,
    }


LOG = logging.getLogger("expertctl.server.jobs")
Trace = Callable[[GenerationJob, TokenSink], TokenSink]
"""Wraps a sink so that it also records spans of the events."""


def pass_untraced(_: GenerationJob, sink: TokenSink) -> TokenSink:
    """Return the sink unchanged: no spans are recorded."""
    return sink


class MeteredJobs:
    """Submits jobs to an engine; counts, limits, logs and traces them."""

    def __init__(
        self,
        engine: ServingEngine,
        metrics: Metrics,
        quotas: Quotas,
        *,
        trace: Trace = pass_untraced,
        log_prompts: bool = False,
    ) -> None:
        """Submit to ``engine``; prompts are logged only with ``log_prompts``."""
        self._engine, self._metrics, self._quotas = engine, metrics, quotas
        self._trace, self._log_prompts = trace, log_prompts

    def submit(self, job: GenerationJob, sink: TokenSink) -> None:
        """Queue a job; its events go to the sink.

        Raises:
            RateLimitError: when the queue is full, or the owner has used up its tokens.
            UsageError: when the job asks for something unsupported.
        """
        if self._log_prompts:
            fields = {"job": job.id, "owner": job.owner, "prompt": job.request.message.prompt}
            LOG.info("prompt", extra={"fields": fields})
        try:
            self._quotas.require_tokens(job.owner)
            traced = self._trace(job, sink)
            self._engine.submit(job, _JobMeter(job, traced, self._metrics, self._quotas))
        except ExpertError as error:
            self._metrics.count_refusal(error)
            raise

    def cancel(self, job_id: str) -> None:
        """Cancel a job; unknown and ended jobs are ignored."""
        self._engine.cancel(job_id)


class _JobMeter:
    """Observes the events of one job, then passes them on.

    So metrics, log and quotas have counted an answer before the client gets it.
    """

    def __init__(
        self, job: GenerationJob, sink: TokenSink, metrics: Metrics, quotas: Quotas
    ) -> None:
        self._job, self._sink, self._metrics, self._quotas = job, sink, metrics, quotas
        self._started = time.perf_counter()
        self._last_piece: dict[int, float] = {}

    @property
    def _total_ms(self) -> float:
        return (time.perf_counter() - self._started) * 1e3

    def __call__(self, event: JobEvent) -> None:
        try:
            self._observe(event)
        finally:  # deliver the event even if observing fails
            self._sink(event)

    def _observe(self, event: JobEvent) -> None:
        match event:
            case OutputDelta():
                self._observe_gap(event.number)
            case JobFinished():
                self._observe_answer(event.results)
            case JobFailed():
                self._metrics.count_failure(event.error)
                fields = record_failed_job(self._job, event.error, total_ms=self._total_ms)
                LOG.info("job", extra={"fields": fields})
            case JobStarted():
                pass

    def _observe_gap(self, number: int) -> None:
        now = time.perf_counter()
        before = self._last_piece.get(number)
        self._last_piece[number] = now
        if before is not None:
            self._metrics.observe_gap(now - before)

    def _observe_answer(self, results: Sequence[RunResult]) -> None:
        for result in results:
            self._metrics.count_answer(result)
        fields = record_answered_job(self._job, results, total_ms=self._total_ms)
        LOG.info("job", extra={"fields": fields})
        tokens = sum(len(result.generated.tokens) for result in results)
        prompt = results[0].prompt_tokens  # read once for all answers
        self._quotas.spend_tokens(self._job.owner, prompt + tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """The engine with its settings, keys and metrics; one per application."""

    engine: ServingEngine
    jobs: MeteredJobs
    planner: Planner
    settings: ServeSettings
    keys: ApiKeyStore
    metrics: Metrics
    quotas: Quotas
    readiness: Readiness = field(default_factory=Readiness)
    tracing: "Tracing | None" = None
    """Exports traces; opened and closed together with the engine."""

    def identify_caller(self, secret: str) -> Caller:
        """Return the caller with this secret; one stat of the key file costs less than a thread.

        Raises:
            UnauthenticatedError: when a key is required and the secret is not one.
            StoreError: when the keys cannot be read.
        """
        if not (self.keys.are_required or is_exposed(self.settings)):
            return Caller(manages=True)
        own = self.settings.secret
        if own is not None and is_owner_key(own, secret):
            return Caller(manages=True)
        try:
            key = self.keys.find(secret, now=time.time())
        except InvalidPackageError as error:  # clients must not learn where the file is
            LOG.error(error.message)
            raise StoreError("the API keys of this server cannot be read") from error
        if key is None:
            raise UnauthenticatedError(
                "an API key is required: it is missing, wrong, expired or revoked",
                hint="send it as `Authorization: Bearer KEY` or as `x-api-key`",
            )
        return Caller(
            id=key.id,
            name=key.name,
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            manages=key.manages,
        )


def build_service(
    engine: ServingEngine,
    planner: Planner,
    settings: ServeSettings,
    *,
    readiness: Readiness | None = None,
) -> Service:
    """Return the service of an engine, with all counters at zero."""
    metrics, quotas = Metrics(), Quotas()
    tracing, trace = (None, pass_untraced) if settings.traces is None else _build_tracing(settings)
    return Service(
        engine=engine,
        jobs=MeteredJobs(engine, metrics, quotas, trace=trace, log_prompts=settings.log_prompts),
        planner=planner,
        settings=settings,
        keys=ApiKeyStore(planner.home.api_keys),
        metrics=metrics,
        quotas=quotas,
        readiness=readiness or Readiness(),
        tracing=tracing,
    )


def _build_tracing(settings: ServeSettings) -> "tuple[Tracing, Trace]":
    """Create the tracing; the optional OpenTelemetry extra is imported only here."""
    from expertctl.server.tracing import Tracing, trace_job

    assert settings.traces is not None
    return Tracing(settings.traces, server=settings.public_url), trace_job
