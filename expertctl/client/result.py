"""What a refusal of the server means: its code, else its status, becomes an error of ours.

What a server answers, as frozen values; fields that are new to this client are left out.
"""

import math
import re
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
)

_UNSAFE_CHARACTERS = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""As in `expertctl.messages`, which the client does not import."""
MAX_ERROR_TEXT = 1000
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
    """Return the error for an answer that is none of those that were hoped for."""
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
    """Return the error that a server tells by its code; one that is not known by its status."""
    kind = _BY_CODE.get(code) or _BY_STATUS.get(status, RegistryError)
    if kind is InvalidPackageError:
        return InvalidPackageError("the server", [message], hint=hint)
    return kind(message, hint=hint)


def build_stream_error(event: bytes) -> ExpertError:
    """Return the error that ends a stream."""
    error = _decode_error(event)
    return build_error_for_code(
        error.code or "", sanitise_text(error.message) or "the answer broke off"
    )


def sanitise_text(text: str) -> str:
    """Return a text of a server as it may be printed: bounded, one line, nothing to obey."""
    clean = " ".join(_UNSAFE_CHARACTERS.sub(" ", text[:MAX_ERROR_TEXT]).split())
    return clean if len(text) <= MAX_ERROR_TEXT else f"{clean}…"


def parse_retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds of ``Retry-After``; a date, which needs a right clock, counts as none."""
    text = headers.get("retry-after", "").strip()
    return float(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def _build_redirect_error(headers: Mapping[str, str], what: str) -> ExpertError:
    place = sanitise_text(headers.get("location", "")) or "another address"
    return UnreachableError(
        f"{what}: the server sends requests on to {place}",
        hint="if that is right, give it as base_url: a key is not sent to where a server points",
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
    """One expert of a plan and why it is there."""

    ref: str
    content_digest: str
    package_digest: str
    kind: str
    score: float
    weight: float
    reason: str


class PlanSampling(Struct, frozen=True, kw_only=True):
    """How tokens are drawn."""

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
    """Experts in order on one base; none means that the base answers alone."""

    identity: str
    seed: int
    base: str
    experts: tuple[PlanExpert, ...]
    params: PlanSampling


class Tokens(Struct, frozen=True, kw_only=True):
    """How many tokens there were, and which were generated."""

    prompt: int
    generated: int
    ids: tuple[int, ...]


class Stages(Struct, frozen=True, kw_only=True):
    """Milliseconds of each stage; waiting for a turn is none of them."""

    reception: float
    reasoning: float
    preparation: float
    inference: float
    post_processing: float


class CacheUse(Struct, frozen=True, kw_only=True):
    """What was there already."""

    experts_hit: int
    experts_loaded: int
    kv_reused_tokens: int


class MoeUse(Struct, frozen=True, kw_only=True):
    """What became of the routed experts of a base, of all that was answered in the same time."""

    miss: MoeMiss
    cold: MoeCold
    layers: int
    experts: int
    """Of each layer."""
    slots: int
    """Of each layer: how many are kept."""
    in_memory: int
    """Of all layers, at most."""
    requests: int
    """Experts that were asked for, each once for a pass and layer."""
    misses: int
    """Those of them that were not in memory then."""
    fallback_rate: float
    skipped_mass: float
    """The share of the routers' weights that was left out."""
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
    """Of each layer."""
    slots: int
    """Of each layer: how many are kept; the mean, where layers differ."""
    in_memory: int
    """Of all layers, at most."""
    cold: MoeCold


class MoeGuide(Struct, frozen=True, kw_only=True):
    """What a profile says of which experts stay."""

    exchange: float
    """The share of all residents that an update may exchange for others of it."""
    pinned: dict[str, tuple[int, ...]]
    """The experts that keep their slots, by the number of the layer."""


class MoeLayer(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one layer was asked for; hot is what was in memory. Times are microseconds of a call."""

    layer: int
    calls: int = 0
    hot_slots_total: int = 0
    cold_slots_total: int = 0
    hot_slot_ratio: float = 0.0
    requests: int = 0
    """Experts that calls asked for, each once for a call."""
    missed_requests: int = 0
    fallback_rate: float = 0.0
    """Missed requests by requests."""
    swaps: int = 0
    parallel_hot_lane_wall_time_per_call_us: float = 0.0
    """Computing."""
    parallel_cold_lane_wall_time_per_call_us: float = 0.0
    """Waiting for experts that were not there."""
    experts: tuple[tuple[int, int], ...] = ()
    """How often each was asked for."""
    hot_experts: tuple[tuple[int, int], ...] = ()
    cold_experts: tuple[tuple[int, int], ...] = ()


class MoeActivity(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a server counted of its routed experts; a profile, too."""

    schema: str
    mode: MoeMode
    layers: tuple[MoeLayer, ...]
    """Empty where nothing is counted."""
    n_expert: int = 0
    n_expert_used: int = 0
    updates: int = 0
    overflow_resets: int = 0
    base: str | None = None
    residence: MoeResidence | None = None
    guide: MoeGuide | None = None
    """None where no expert could be missing."""


class OmittedExpert(Struct, frozen=True, kw_only=True):
    """An expert that was left out, and why."""

    ref: str
    content_digest: str
    reason: str


class InferResult(Struct, frozen=True, kw_only=True):
    """One answer, and how it came about."""

    job_id: str
    submitted_at: str
    text: str
    tokens_generated: int
    experts_used: tuple[str, ...]
    latency_ms: float
    finish_reason: FinishReason
    stopped_by: str | None
    """The stop string that ended it."""
    validation_passed: bool | None
    """Whether the answer has the form that was asked for; None where none was."""
    stages: Stages
    plan: RoutePlan
    dropped: tuple[OmittedExpert, ...]
    tokens: Tokens
    timings_ms: dict[str, float]
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    memory: dict[str, int]
    cache: CacheUse
    moe: MoeUse | None = None
    """None where the base has no routed experts."""
    numerics: dict[str, Any]
    threads: int
    seed: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


class RouteCandidate(Struct, frozen=True, kw_only=True):
    """An expert that the router looked at."""

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
    """A job as it was when the server was asked."""

    job_id: str
    status: JobStatus
    submitted_at: str
    started_at: str | None
    ended_at: str | None
    estimated_wait_ms: float | None
    """About how long until it begins; None once it has."""
    text: str
    """As much of the answer as is certain."""
    result: InferResult | None
    error: JobFailure | None

    @property
    def is_over(self) -> bool:
        """Whether it will change no more."""
        return self.ended_at is not None

    def demand_result(self) -> InferResult:
        """Return the answer; of a job that was cancelled, what was there by then.

        Raises:
            NoAnswerError: when it is not over yet, or was cancelled before it began.
            ExpertError: why it failed.
        """
        if self.result is not None:
            return self.result
        if self.error is not None:
            raise build_error_for_code(self.error.code, self.error.message, hint=self.error.hint)
        if self.status == "cancelled":
            raise CancelledError(f"the job {self.job_id} was cancelled")
        raise NoAnswerError(f"the job {self.job_id} is {self.status}", hint="wait for its end")


class Expert(Struct, frozen=True, kw_only=True):
    """One version of an installed expert, and what it is to the server."""

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
    """All that are installed."""

    base: str
    experts: tuple[Expert, ...]


class Model(Struct, frozen=True, kw_only=True):
    """What the ``model`` of the OpenAI and Anthropic calls can be."""

    id: str
    created: int
    owned_by: str


class ModelList(Struct, frozen=True, kw_only=True):
    """All of them."""

    data: tuple[Model, ...]


class InferStarted(Struct, frozen=True, kw_only=True):
    """What is known of an answer before its first token."""

    job_id: str
    submitted_at: str
    plan: RoutePlan


class InferPiece(Struct, frozen=True, kw_only=True):
    """Text that has become certain."""

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
