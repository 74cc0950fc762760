"""`Call`: a request to answer a prompt, as a job for the engine, and its time of arrival."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from expertctl.engine.answer_form import Checked
from expertctl.engine.serving.job import DEFAULT_PRIORITY, Check, Event, Finished, Job, Piece, Sink
from expertctl.errors import UsageError
from expertctl.server.caller import Caller
from expertctl.server.deadline import deadline_of
from expertctl.server.field_error import FieldError
from expertctl.server.json_filter import JsonFilter, json_of
from expertctl.server.json_instruction import ADDED
from expertctl.server.native.infer_request import InferRequest
from expertctl.server.post_processing.check import Commands, check_of
from expertctl.server.settings import ServeSettings
from expertctl.server.unknown_fields import ignored_warning


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
    json_asked: bool = False
    """Whether the answer was to be JSON, so that what stands around it is removed."""
    ignored: tuple[str, ...] = ()
    """Fields of the request that are ignored."""
    warnings: tuple[str, ...] = ()
    """Warnings of reading the request."""

    def filtered(self, sink: Sink) -> Sink:
        """Return a sink that passes the events of the job on, with the text that is given out."""
        if not self.json_asked:
            return sink
        json = JsonFilter()

        def pass_on(event: Event) -> None:
            for one in given_out(event, json):
                sink(one)

        return pass_on

    @property
    def submitted_at(self) -> str:
        """When it came, as RFC 3339 has it."""
        return moment(self.arrival.at)


def given_out(event: Event, json: JsonFilter) -> tuple[Event, ...]:
    """Return an event of an answer as a filter leaves it, behind what the filter held back."""
    match event:
        case Piece():
            return (replace(event, text=json.push(event.text)),)
        case Finished():
            rest = json.finish()
            return (Piece(0, rest), event) if rest else (event,)
        case _:
            return (event,)


def call_of(
    body: InferRequest,
    *,
    caller: Caller,
    settings: ServeSettings,
    arrival: Arrival,
    ignored: Sequence[str] = (),
) -> Call:
    """Make a job of a request; ``ignored`` fields were left out of it.

    Raises:
        UsageError: when fields do not fit together.
        FieldError: when a field names something that does not exist.
    """
    instruction = body.instruction() if settings.json_instruction else None
    job = Job(
        id=uuid.uuid4().hex,
        request=body.asked(caller, instruction=instruction),
        owner=caller.id,
        priority=DEFAULT_PRIORITY if body.priority is None else body.priority,
        deadline=deadline_of(body.timeout_ms, usual=settings.timeout),
        check=_check(body, settings.validators),
    )
    form = body.response_format
    return Call(
        job=job,
        arrival=arrival,
        reception_ms=arrival.since_ms,
        json_asked=form is not None and form.is_json,
        ignored=tuple(ignored),
        warnings=(*ignored_warning(ignored), *([ADDED] if instruction else [])),
    )


def moment(seconds: float) -> str:
    """Return a time as text, in UTC."""
    text = datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
    return f"{text.removesuffix('+00:00')}Z"


def _check(body: InferRequest, commands: Commands) -> Check | None:
    form = body.response_format
    try:
        check = check_of(form, commands=commands)
    except UsageError as error:
        raise FieldError(error.message, field="response_format", hint=error.hint) from error
    if check is None or form is None or not form.is_json:
        return check

    def check_json(text: str) -> Checked | str:
        return check(json_of(text))

    return check_json
