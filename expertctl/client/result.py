"""Responses of the server as frozen values, and its errors as `ExpertError`.

Fields that are newer than this client are ignored. An error is chosen by its code, else by the
HTTP status.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from expertctl.errors import (
    BudgetError,
    CancelledError,
    ExpertError,
    ForbiddenError,
    IncompatibleError,
    InvalidPackageError,
    NoAnswerError,
    NotFoundError,
    RateLimitError,
    RegistryError,
    TimedOutError,
    TooLargeError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
    sanitise_text,
)

_BY_STATUS: Mapping[int, type[ExpertError]] = {
    400: UsageError,
    401: UnauthenticatedError,
    403: ForbiddenError,
    404: NotFoundError,
    405: UsageError,
    408: TimedOutError,
    413: TooLargeError,
    415: UsageError,
    422: IncompatibleError,
    504: TimedOutError,
    507: BudgetError,
}


class _ErrorBody(Struct, frozen=True):
    message: str = ""
    code: str | None = None
    hint: str = ""


class _ErrorResponse(Struct, frozen=True):
    error: _ErrorBody


_ERROR_DECODER = msgspec.json.Decoder(_ErrorResponse)  # made as this is imported, by one thread


def build_response_error(
    status: int, headers: Mapping[str, str], body: bytes, *, what: str
) -> ExpertError:
    """Return the error for a response that is not a success."""
    error = _decode_error(body)
    message = sanitise_text(error.message) or f"{what}: the server answers with status {status}"
    hint = sanitise_text(error.hint)
    pause = parse_retry_after(headers)
    if status == 429:
        return RateLimitError(message, retry_after=max(1, math.ceil(pause or 0)), hint=hint)
    if status in {502, 503}:
        return UnreachableError(message, sent=status != 503, retry_after=pause, hint=hint)
    if 300 <= status < 400:
        return _build_redirect_error(headers, what)
    return build_error_for_code(error.code or "", message, hint=hint, status=status)


def build_error_for_code(
    code: str, message: str, *, hint: str = "", status: int = 500
) -> ExpertError:
    """Return the error for a server's error code; for an unknown code, that of the status."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, RegistryError)
    if kind is InvalidPackageError:
        return InvalidPackageError("the server", [message], hint=hint)
    return kind(message, hint=hint)


def build_stream_error(event: bytes) -> ExpertError:
    """Return the error of an event that ends a stream."""
    error = _decode_error(event)
    return build_error_for_code(
        error.code or "", sanitise_text(error.message) or "the answer was cut off"
    )


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; None for a date, which would need a correct clock."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _build_redirect_error(headers: Mapping[str, str], what: str) -> ExpertError:
    place = sanitise_text(headers.get("location", "")) or "another address"
    return UnreachableError(
        f"{what}: the server redirects to {place}",
        hint="if that is right, name it (EXPERT_SERVER, base_url): API keys are not sent there",
    )


def _decode_error(body: bytes) -> _ErrorBody:
    try:
        return _ERROR_DECODER.decode(body).error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _ErrorBody()


def _walk_error_classes(kind: type[ExpertError]) -> Iterator[type[ExpertError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == ExpertError.__module__:
            yield from _walk_error_classes(child)


_BY_CODE: Mapping[str, type[ExpertError]] = {
    kind.code: kind for kind in _walk_error_classes(ExpertError)
}


FinishReason = Literal["stop", "length", "timeout", "cancelled"]
MoeMode = Literal["full", "update", "off"]
MoeMiss = Literal["exact", "skip"]
MoeCold = Literal["read", "map", "direct"]
JobStatus = Literal["queued", "processing", "finished", "failed", "cancelled"]


class PlanExpert(Struct, frozen=True, kw_only=True):
    """One expert of a plan and why it was chosen."""

    ref: str
    content_digest: str
    package_digest: str
    kind: str
    score: float
    weight: float
    reason: str


class PlanSampling(Struct, frozen=True, kw_only=True):
    """The sampling parameters."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    max_tokens: int
    stop: tuple[str, ...]


class RoutePlan(Struct, frozen=True, kw_only=True):
    """Experts in order on one base; without experts the base answers alone."""

    identity: str
    seed: int
    base: str
    experts: tuple[PlanExpert, ...]
    params: PlanSampling


class Tokens(Struct, frozen=True, kw_only=True):
    """The numbers of tokens, and the ids of the generated ones."""

    prompt: int
    generated: int
    ids: tuple[int, ...]


class Stages(Struct, frozen=True, kw_only=True):
    """Milliseconds of each stage; queueing time is in none of them."""

    reception: float
    reasoning: float
    preparation: float
    inference: float
    post_processing: float


class CacheUse(Struct, frozen=True, kw_only=True):
    """What was found in caches."""

    experts_hit: int
    experts_loaded: int
    kv_reused_tokens: int


class MoeUse(Struct, frozen=True, kw_only=True):
    """Counters of the base's routed experts, for all requests answered in the same time."""

    miss: MoeMiss
    cold: MoeCold
    layers: int
    experts: int
    """Per layer."""
    slots: int
    """Resident experts per layer."""
    in_memory: int
    """Resident experts in all layers, at most."""
    requests: int
    """Requested experts, each once per pass and layer."""
    misses: int
    """Requested experts that were not in memory."""
    fallback_rate: float
    skipped_mass: float
    """The share of router weight that was skipped."""
    loads: int
    read_ahead: int
    bytes_read: int
    waited_ms: float
    swaps: int
    lent: int


class MoeResidence(Struct, frozen=True, kw_only=True):
    """How many routed experts a base has, and how many of them are in memory at most."""

    miss: MoeMiss
    layers: int
    experts: int
    """Per layer."""
    slots: int
    """Resident experts per layer; the mean, where layers differ."""
    in_memory: int
    """Resident experts in all layers, at most."""
    cold: MoeCold


class MoeGuide(Struct, frozen=True, kw_only=True):
    """How a usage profile controls which routed experts stay in memory."""

    exchange: float
    """The share of all resident experts that an update may swap for others of the profile."""
    pinned: dict[str, tuple[int, ...]]
    """The pinned experts, by the number of the layer."""


class MoeLayer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counters of one layer; hot experts were in memory, cold ones were not. Times: µs per call."""

    layer: int
    calls: int = 0
    hot_slots_total: int = 0
    cold_slots_total: int = 0
    hot_slot_ratio: float = 0.0
    requests: int = 0
    """Requested experts, each once per call."""
    missed_requests: int = 0
    fallback_rate: float = 0.0
    """Missed requests divided by requests."""
    swaps: int = 0
    parallel_hot_lane_wall_time_per_call_us: float = 0.0
    """Time spent computing."""
    parallel_cold_lane_wall_time_per_call_us: float = 0.0
    """Time spent waiting for missing experts."""
    experts: tuple[tuple[int, int], ...] = ()
    """Pairs of expert and number of requests."""
    hot_experts: tuple[tuple[int, int], ...] = ()
    cold_experts: tuple[tuple[int, int], ...] = ()


class MoeActivity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counters of a server's routed experts; also a usage profile."""

    schema: str
    mode: MoeMode
    layers: tuple[MoeLayer, ...]
    """Empty if nothing is counted."""
    n_expert: int = 0
    n_expert_used: int = 0
    updates: int = 0
    overflow_resets: int = 0
    base: str | None = None
    residence: MoeResidence | None = None
    guide: MoeGuide | None = None
    """None if all routed experts are resident."""


class OmittedExpert(Struct, frozen=True, kw_only=True):
    """An expert that was dropped from a plan, and why."""

    ref: str
    content_digest: str
    reason: str


class RunAnswer(Struct, frozen=True, kw_only=True):
    """One answer, with its plan and statistics: the document of ``run --json``."""

    job_id: str
    text: str
    finish_reason: FinishReason
    validation_passed: bool | None
    """Whether the answer has the requested format; None if none was requested."""
    plan: RoutePlan
    dropped: tuple[OmittedExpert, ...]
    tokens: Tokens
    timings_ms: dict[str, float]
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    memory: dict[str, int]
    cache: CacheUse
    moe: MoeUse | None = None
    """None if the base has no routed experts."""
    numerics: dict[str, Any]
    threads: int
    seed: int
    bytes_read: dict[str, int]
    """From files (``ssd``), and compiled in memory (``ram``)."""
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class InferResult(RunAnswer, frozen=True, kw_only=True):
    """One answer of a server."""

    submitted_at: str
    tokens_generated: int
    experts_used: tuple[str, ...]
    latency_ms: float
    stopped_by: str | None
    """The stop string that ended it."""
    stages: Stages


class RouteCandidate(Struct, frozen=True, kw_only=True):
    """An expert that the router considered."""

    ref: str
    content_digest: str
    chosen: bool
    score: float
    reason: str


class RouteResult(Struct, frozen=True, kw_only=True):
    """Which experts would answer, and which others were considered."""

    plan: RoutePlan
    candidates: tuple[RouteCandidate, ...]
    encoder: str
    threshold: float
    notes: tuple[str, ...]
    warnings: tuple[str, ...]
    timings_ms: dict[str, float]


class JobFailure(Struct, frozen=True, kw_only=True):
    """Why there is no answer."""

    code: str
    message: str
    hint: str


class Job(Struct, frozen=True, kw_only=True):
    """A snapshot of a job."""

    job_id: str
    status: JobStatus
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    estimated_wait_ms: float | None
    """Estimated milliseconds until it starts; None once it has."""
    text: str
    """The text so far."""
    result: InferResult | None
    error: JobFailure | None

    @property
    def is_over(self) -> bool:
        """Whether its state is final."""
        return self.ended_at is not None

    def demand_result(self) -> InferResult:
        """Return the answer; of a cancelled job, the text so far.

        Raises:
            NoAnswerError: when it is not over yet, or was cancelled before it started.
            ExpertError: when it failed.
        """
        if self.result is not None:
            return self.result
        if self.error is not None:
            raise build_error_for_code(self.error.code, self.error.message, hint=self.error.hint)
        if self.status == "cancelled":
            raise CancelledError(f"the job {self.job_id} was cancelled")
        raise NoAnswerError(f"the job {self.job_id} is {self.status}", hint="wait for its end")


class Expert(Struct, frozen=True, kw_only=True):
    """One version of an installed expert, and its state on the server."""

    ref: str
    name: str
    version: str
    description: str
    license: str
    kind: str
    content_digest: str
    package_digest: str
    base: str
    size: int
    fits: bool
    """Whether it was made for the base that is served."""
    revoked: bool
    in_memory: bool


class ExpertList(Struct, frozen=True, kw_only=True):
    """All installed experts."""

    base: str
    experts: tuple[Expert, ...]


class Model(Struct, frozen=True, kw_only=True):
    """A valid value of ``model`` in OpenAI and Anthropic calls."""

    id: str
    created: int
    owned_by: str


class ModelList(Struct, frozen=True, kw_only=True):
    """All models."""

    data: tuple[Model, ...]


class InferStarted(Struct, frozen=True, kw_only=True):
    """What is known about an answer before its first token."""

    job_id: str
    submitted_at: str
    plan: RoutePlan


class InferPiece(Struct, frozen=True, kw_only=True):
    """A piece of generated text that will not change."""

    text: str


Document = (
    InferResult
    | RouteResult
    | Job
    | ExpertList
    | ModelList
    | MoeActivity
    | InferStarted
    | InferPiece
)
