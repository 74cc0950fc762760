"""`Call`: a request to answer a prompt, as a job for the engine, and its time of arrival."""

import time
import uuid
from dataclasses import dataclass, field
from datetime import UTC, datetime

from expertctl.engine.serving.job import DEFAULT_PRIORITY, Check, Job
from expertctl.errors import UsageError
from expertctl.server.caller import Caller
from expertctl.server.deadline import deadline_of
from expertctl.server.field_error import FieldError
from expertctl.server.native.infer_request import InferRequest
from expertctl.server.post_processing.check import Commands, check_of
from expertctl.server.settings import ServeSettings


@dataclass(frozen=True, slots=True)
class Arrival:
    """When a request came, by both clocks."""

    at: float = field(default_factory=time.time)
    tick: float = field(default_factory=time.perf_counter)

    @property
    def since_ms(self) -> float:
        """Milliseconds since then."""
        return (time.perf_counter() - self.tick) * 1e3


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request, read."""

    job: Job
    arrival: Arrival
    reception_ms: float

    @property
    def submitted_at(self) -> str:
        """When it came, as RFC 3339 has it."""
        return moment(self.arrival.at)


def call_of(
    body: InferRequest, *, caller: Caller, settings: ServeSettings, arrival: Arrival
) -> Call:
    """Make a job of a request.

    Raises:
        UsageError: when fields do not fit together.
        FieldError: when a field names something that does not exist.
    """
    job = Job(
        id=uuid.uuid4().hex,
        request=body.asked(caller),
        owner=caller.id,
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        deadline=deadline_of(body.timeout_ms, usual=settings.timeout),
        check=_check(body, settings.validators),
    )
    return Call(job=job, arrival=arrival, reception_ms=arrival.since_ms)


def moment(seconds: float) -> str:
    """Return a time as text, in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return f"{text.removesuffix('+00:00')}Z"


def _check(body: InferRequest, commands: Commands) -> Check | None:
    try:
        return check_of(body.response_format, commands=commands)
    except UsageError as error:
        raise FieldError(error.message, field="response_format", hint=error.hint) from error
