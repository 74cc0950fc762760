"""The spans of a job and of its stages, made when it has ended, with its actual times.

They follow the semantic conventions for generative AI. They contain neither prompt nor answer, nor
other texts of the request, such as stop strings.
"""

import time
from collections.abc import Iterator

from opentelemetry.util.types import AttributeValue

from expertctl.engine.lent import AFTERWARDS
from expertctl.engine.request import RunRequest
from expertctl.engine.run_result import Lap, RunResult
from expertctl.engine.serving.job import Event, Failed, Finished, Job, Piece, Sink, Started
from expertctl.errors import CancelledError, ExpertError
from expertctl.routing.request import Forced
from expertctl.server.tracing.request_span import RequestSpan, current_request

PROVIDER = "expertctl"
LEAST_MS = 1.0
"""Shorter laps have no span of their own, except the longest one of each step."""
MOST_LAPS = 32
Attributes = dict[str, AttributeValue]


def traced(job: Job, sink: Sink) -> Sink:
    """Return a sink that makes the spans of a job from its events, and passes them on.

    A job without a recorded request has no spans.
    """
    request = current_request()
    return sink if request is None else _TracedJob(request, job, sink)


class _TracedJob:
    """Makes the spans of one job, before it passes on the last event."""

    def __init__(self, request: RequestSpan, job: Job, sink: Sink) -> None:
        self._request, self._job, self._sink = request, job, sink
        self._submitted = time.perf_counter()
        self._started: float | None = None
        self._base: str | None = None
        request.receive(self._submitted)

    def __call__(self, event: Event) -> None:
        try:
            self._hear(event)
        finally:  # the answer goes out even if tracing fails
            self._sink(event)

    def _hear(self, event: Event) -> None:
        match event:
            case Started():
                self._started, self._base = time.perf_counter(), event.plan.base
            case Finished():
                self._finish(event.results)
            case Failed():
                self._fail(event.error)
            case Piece():
                pass

    def _finish(self, results: tuple[RunResult, ...]) -> None:
        ended, first = time.perf_counter(), results[0]
        known = _asked(self._job, first.planned.result.plan.base) | _answered(results)
        span = self._request.part(
            _name(known), began=self._submitted, ended=ended, attributes=known
        )
        for lap in (*_worth_a_span(first.laps), *_inference(first, self._started)):
            self._request.part(
                lap.step,
                began=max(lap.began, self._submitted),
                ended=min(lap.ended, ended),
                within=span,
            )

    def _fail(self, error: ExpertError) -> None:
        known = _asked(self._job, self._base) | {"error.type": error.code}
        self._request.part(
            _name(known),
            began=self._submitted,
            ended=time.perf_counter(),
            attributes=known,
            failed=not isinstance(error, CancelledError),  # the caller wanted that
        )


def _name(known: Attributes) -> str:
    parts = (known.get(name) for name in ("gen_ai.operation.name", "gen_ai.request.model"))
    return " ".join(part for part in parts if isinstance(part, str))


def _asked(job: Job, base: str | None) -> Attributes:
    """Return the attributes of the request; the base is known once there is a plan."""
    request, wishes = job.request, job.request.route.wishes
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": "chat" if request.raw is None else "text_completion",
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": _model(request, base),
        "gen_ai.request.max_tokens": wishes.max_tokens,
        "gen_ai.request.temperature": wishes.temperature,
        "gen_ai.request.top_p": wishes.top_p,
        "gen_ai.request.top_k": wishes.top_k,
        "gen_ai.request.seed": request.route.seed,
        "gen_ai.request.choice.count": job.texts if job.texts != 1 else None,
        "gen_ai.response.id": job.id,
        "gen_ai.response.model": base,
        "expertctl.job.priority": job.priority,
    }
    return {name: value for name, value in found.items() if value is not None}


def _model(request: RunRequest, base: str | None) -> str | None:
    """Return the ``model`` of a request, as `expertctl.server.model_name` would read it."""
    if request.route.base_alone:
        return base
    forced = [expert for expert in request.experts if isinstance(expert, Forced)]
    return "+".join(_weighed(expert) for expert in forced) or "auto"


def _weighed(expert: Forced) -> str:
    return str(expert.target) if expert.weight == 1.0 else f"{expert.target}:{expert.weight:g}"


def _answered(results: tuple[RunResult, ...]) -> Attributes:
    first, generated = results[0], [result.generated for result in results]
    return {
        "gen_ai.response.finish_reasons": [one.finish_reason for one in generated],
        "gen_ai.usage.input_tokens": first.prompt_tokens,
        "gen_ai.usage.cache_read.input_tokens": first.kv_reused_tokens,
        "gen_ai.usage.output_tokens": sum(len(one.tokens) for one in generated),
        "expertctl.experts": [expert.ref for expert in first.planned.result.plan.experts],
        "expertctl.experts_loaded": first.experts_loaded,
    }


def _worth_a_span(laps: tuple[Lap, ...]) -> list[Lap]:
    """Return the laps that took a while, but at least one of each step."""
    longest = {lap.step: lap for lap in sorted(laps, key=lambda lap: lap.ms)}
    told = [lap for lap in laps if lap.ms >= LEAST_MS or lap is longest[lap.step]]
    return told if len(told) <= MOST_LAPS else list(longest.values())


def _inference(first: RunResult, started: float | None) -> Iterator[Lap]:
    """Yield the lap of reading the prompt and that of writing, to the end of the last text."""
    if started is None:
        return
    generated = first.generated
    read = started + generated.first_token_ms / 1e3
    yield Lap("prefill", started, read)
    after = next((lap for lap in first.laps if lap.step == AFTERWARDS), None)
    if generated.decode_steps and after is not None:
        yield Lap("decode", read, after.began)
