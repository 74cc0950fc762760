"""The routes of the native API: inference, jobs, routing, installed experts and ``/moe``.

``/moe`` is about the routed experts of the base; GET changes nothing, POST does. It answers with
the activity document of `expertctl.engine.moe`, from which experts can be placed. A profile is
given as a document, or as the name of the base, which stands for the profile learnt here; no file
can be named.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Annotated, Any, TypeVar

from anyio import to_thread
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.routing import BaseRoute
from starlette.types import Scope

from expertctl.engine.moe.cache_plan import parse_pins
from expertctl.engine.moe.counters import CounterMode
from expertctl.engine.moe.usage_store import Observation
from expertctl.engine.moe.warmup import ProfileOptions
from expertctl.engine.serving.request import AdapterStatus, JobEvent, JobFinished
from expertctl.errors import (
    BaseMismatchError,
    ExpertError,
    NotFoundError,
    RateLimitError,
    UsageError,
)
from expertctl.http.operation import Arrival, FieldError, Operation, ParsedBody, Reply
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER
from expertctl.schema.strict_json import JsonObject
from expertctl.server.native.infer import (
    InferCall,
    InferRequest,
    PieceEvent,
    RouteFields,
    StartedEvent,
    build_answer,
    build_call,
    stream_infer,
)
from expertctl.server.native.jobs import JobDocument, JobStore, StoredJob, build_job_document
from expertctl.server.request_body import (
    EXAMPLE_PROMPT,
    InferAnswer,
    MoeActivity,
    RouteAnswer,
    build_ignored_headers,
    build_router,
)
from expertctl.server.responses import GENERATION_ERRORS, get_caller, require_manager
from expertctl.server.service import Service
from expertctl.server.streaming import EventStream, run_job, while_connected
from expertctl.store.server_record import make_proof


class ExpertDocument(Struct, frozen=True, kw_only=True):
    """One version of an installed expert, and its state in this server."""

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
    """Bytes of all its files."""
    fits: bool
    """Whether it fits the served base."""
    revoked: bool
    """Whether the key that signed it was revoked."""
    in_memory: bool


class ExpertsDocument(Struct, frozen=True, kw_only=True):
    """All installed experts, by name and version."""

    base: str
    experts: tuple[ExpertDocument, ...]


def build_experts_document(experts: tuple[AdapterStatus, ...], *, base: str) -> ExpertsDocument:
    """Return the document of the installed experts."""
    documents = sorted((_build_document(one) for one in experts), key=lambda one: one.ref)
    return ExpertsDocument(base=base, experts=tuple(documents))


def _build_document(here: AdapterStatus) -> ExpertDocument:
    stored, manifest = here.expert.stored, here.expert.manifest
    return ExpertDocument(
        ref=stored.ref,
        name=str(stored.package),
        version=str(stored.version),
        description=manifest.description,
        license=manifest.license,
        kind=manifest.kind,
        content_digest=str(stored.content_digest),
        package_digest=str(stored.package_digest),
        base=stored.base.name,
        size=stored.size,
        fits=here.fits,
        revoked=here.expert.revoked,
        in_memory=here.in_memory,
    )


_Name = Annotated[str, Meta(min_length=1, max_length=512)]
_Share = Annotated[str, Meta(max_length=8, examples=["50%"])]
_Count = Annotated[int, Meta(ge=0, le=MAX_EXPERTS_PER_LAYER)]


class ObserveRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A change to the counting of routed experts, or to the profile that decides which stay."""

    mode: Annotated[
        CounterMode | None,
        Meta(
            description="Full, what exchanges need, or off; changing the mode resets the counters."
        ),
    ] = None
    reset: Annotated[bool, Meta(description="Reset the counters.")] = False
    profile: Annotated[
        _Name | dict[str, Any] | None,
        Meta(description="A profile, or the name of the base for its learnt profile."),
    ] = None
    pin: Annotated[
        _Count | _Share | None,
        Meta(
            description="Experts of each layer that always stay in memory: a number, or the "
            "percentage of tokens to cover. Default: as set at server start."
        ),
    ] = None
    exchange: Annotated[
        Annotated[float, Meta(ge=0.0, le=1.0)] | None,
        Meta(
            description="The share of resident experts that an update may exchange for others of "
            "the profile. Default: as set at server start."
        ),
    ] = None

    def check_change(self, *, base: str) -> None:
        """Refuse a body without a change, or with the profile of another base.

        Raises:
            FieldError: names the invalid field.
        """
        _require_profile(self)
        if self.mode is None and not self.reset and self.profile is None:
            raise FieldError(
                "the body changes nothing",
                field="mode",
                hint='set "mode" to "full", "update" or "off", "reset" to true, or a "profile"',
            )
        if isinstance(self.profile, str) and self.profile != base:
            raise FieldError.at(
                "profile",
                f"this server serves {base}, not {self.profile[:80]!r}",
                hint=f"use {base}, or the document that `base profile export` writes",
            )

    @property
    def profile_document(self) -> JsonObject | None:
        """The profile of the body; None stands for the base's learnt profile."""
        return self.profile if isinstance(self.profile, dict) else None

    @property
    def profile_options(self) -> ProfileOptions:
        """The requested pins and exchange rate of the profile.

        Raises:
            FieldError: when ``pin`` is neither a number of experts nor a percentage.
        """
        try:
            pins = None if self.pin is None else parse_pins(str(self.pin))
        except UsageError as error:
            raise FieldError.at("pin", error.message, hint=error.hint) from error
        return ProfileOptions(pins=pins, exchange=self.exchange)


def _require_profile(body: ObserveRequest) -> None:
    """Refuse ``pin`` and ``exchange`` without a profile."""
    for name, value in (("pin", body.pin), ("exchange", body.exchange)):
        if value is not None and body.profile is None:
            raise FieldError.at(
                name,
                "it requires a profile",
                hint='set "profile": a document, or the name of the base for its learnt profile',
            )


INFER = "/v1/infer"
JOBS = "/v1/jobs"
JOB = "/v1/jobs/{job_id}"
ROUTE = "/v1/route"
EXPERTS = "/v1/experts"
MOE = "/moe"
PROOF = "/v1/proof"
CHOSEN_BASE = "auto"
MAX_PENDING_PLANS = 16
"""Maximum requests waiting for a route or a choice of base at a time: answers need plans, too."""
_Planned = TypeVar("_Planned")


def build_routes(service: Service) -> list[BaseRoute]:
    """Return the routes of the native API."""
    router = build_router(NativeEndpoints(service), strict=service.settings.strict_fields)
    return router.build_routes(OPERATIONS)


class JobPath(Struct, frozen=True):
    """Identifies a job."""

    job_id: Annotated[str, Meta(min_length=1)]


class ProofRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """A nonce, chosen by the client."""

    nonce: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class ProofDocument(Struct, frozen=True):
    """The HMAC-SHA256 of the nonce with the secret of the server's record."""

    proof: str


class NativeEndpoints:
    """Handles the requests of the native API."""

    def __init__(self, service: Service) -> None:
        """Generate with the engine of ``service``; start without jobs."""
        self._service = service
        self._jobs = JobStore()
        self._pending_plans = 0
        """Number of plans being waited for."""
        self._is_adopting = False
        """Whether a profile is being applied."""

    async def infer(
        self, request: Request, arrival: Arrival, body: ParsedBody[InferRequest]
    ) -> Reply[InferAnswer] | EventStream[StartedEvent | PieceEvent | InferAnswer]:
        """Answer a prompt with the experts that suit it, or with named ones."""
        call, jobs = self._build_call(request, body, arrival), self._service.jobs
        await while_connected(request, self._require_base(body.value.base, call))
        headers = build_ignored_headers(call.ignored_fields)
        if body.value.stream:
            return EventStream(request, self._stream_call(call, request.scope), headers=headers)
        answer = build_answer(call, await while_connected(request, run_job(jobs, call.job)))
        return Reply(answer, headers)

    async def submit_job(
        self, request: Request, arrival: Arrival, body: ParsedBody[InferRequest]
    ) -> Reply[JobDocument]:
        """Submit a prompt as a background job."""
        if body.value.stream:
            raise FieldError.at(
                "stream", "jobs are not streamed", hint=f"poll the job, or post to {INFER}"
            )
        call, service = self._build_call(request, body, arrival), self._service
        await while_connected(request, self._require_base(body.value.base, call))
        expected_wait = service.engine.estimate_wait()
        job = self._jobs.add(
            call.job.id,
            owner=call.job.owner,
            submitted=arrival.wall_time,
            describe=partial(build_answer, call),
        )
        try:
            record = partial(self._jobs.record_event, job.id)
            service.jobs.submit(call.job, call.filter_sink(record))
        except ExpertError:
            self._jobs.drop(job.id)
            raise
        document = build_job_document(job, expected_wait=expected_wait)
        headers = {"Location": f"{JOBS}/{job.id}", **build_ignored_headers(call.ignored_fields)}
        return Reply(document, headers)

    async def _stream_call(self, call: InferCall, scope: Scope) -> AsyncGenerator[bytes, None]:
        """Yield the events of an answer; until its end it can be cancelled as a job."""
        job, jobs = call.job, self._service.jobs
        describe, submitted = partial(build_answer, call), call.arrival.wall_time
        self._jobs.add(job.id, owner=job.owner, submitted=submitted, describe=describe)

        def record(event: JobEvent) -> None:
            if not isinstance(event, JobFinished):  # its answer is not kept
                self._jobs.record_event(job.id, event)

        try:
            async with aclosing(stream_infer(jobs, call, scope, record)) as lines:
                async for line in lines:
                    yield line
        finally:
            self._jobs.drop(job.id)

    async def _require_base(self, wanted: str | None, call: InferCall) -> None:
        """Refuse a request that another base is to answer.

        Raises:
            BaseMismatchError: when this server does not serve it.
            RateLimitError: when too many plans are waited for.
        """
        engine, bases = self._service.engine, self._service.planner.bases
        if wanted is None:
            return
        if wanted == CHOSEN_BASE:
            wanted = engine.base_name
            if len(await to_thread.run_sync(bases.list_bases)) > 1:
                wanted = await self._wait_for_plan(partial(engine.choose_base, call.job.request))
        if wanted != engine.base_name:
            raise BaseMismatchError(
                f"this server serves {engine.base_name}, not {wanted[:80]}",
                hint="leave out the base, or ask a server of that base",
            )

    async def prove(self, body: ProofRequest) -> ProofDocument:
        """Prove to a command on this machine that this is the server of its home."""
        secret = self._service.settings.secret
        if secret is None:
            raise NotFoundError("this server has no record in its home")
        return ProofDocument(make_proof(secret, body.nonce))

    async def get_job(self, request: Request, path: JobPath) -> JobDocument:
        """Return the state of a job, and its answer once it has finished."""
        return self._describe_job(self._jobs.find(path.job_id, owner=get_caller(request).id))

    async def cancel_job(self, request: Request, path: JobPath) -> JobDocument:
        """Cancel a job, or an answer that is being streamed."""
        job = self._jobs.cancel(path.job_id, owner=get_caller(request).id)
        self._service.engine.cancel(job.id)
        return self._describe_job(job)

    async def route(self, request: Request, body: RouteFields) -> RouteAnswer:
        """Return the plan for a prompt, and why."""
        begin = partial(self._service.engine.plan, body.to_plan_request())
        planned = await while_connected(request, self._wait_for_plan(begin))
        return planned.result.to_json()

    async def _wait_for_plan(self, begin: Callable[[], Future[_Planned]]) -> _Planned:
        """Wait for a plan; if the client disconnects, planning that has not begun is cancelled."""
        if self._pending_plans >= MAX_PENDING_PLANS:
            raise RateLimitError("too many plans are being made at once")
        planning = asyncio.wrap_future(begin())
        self._pending_plans += 1
        try:
            return await planning
        finally:
            self._pending_plans -= 1

    async def list_experts(self) -> ExpertsDocument:
        """List the installed experts."""
        engine = self._service.engine
        experts = await asyncio.wrap_future(engine.list_experts())
        return build_experts_document(experts, base=engine.base_name)

    def observation(self) -> MoeActivity:
        """Return the counters of the base's routed experts."""
        return self._service.engine.get_observation().to_json()

    async def observe(self, body: ObserveRequest) -> MoeActivity:
        """Change the counting of routed experts, or apply a usage profile."""
        body.check_change(base=self._service.engine.base_name)
        with self._exclusive_adoption(body):
            seen = await to_thread.run_sync(partial(self._apply_changes, body))
        return seen.to_json()

    @contextmanager
    def _exclusive_adoption(self, body: ObserveRequest) -> Iterator[None]:
        """Allow one profile change at a time: it waits for a step to end and blocks a thread."""
        if body.profile is None:
            yield
            return
        if self._is_adopting:
            raise RateLimitError("another profile is being applied")
        self._is_adopting = True
        try:
            yield
        finally:
            self._is_adopting = False

    def _apply_changes(self, body: ObserveRequest) -> Observation:
        """Apply the changes of a body, the profile first, since it may be refused."""
        engine = self._service.engine
        if body.profile is not None:
            engine.apply_profile(body.profile_document, body.profile_options)
        return engine.observe(mode=body.mode, reset=body.reset)

    def _build_call(
        self, request: Request, body: ParsedBody[InferRequest], arrival: Arrival
    ) -> InferCall:
        return build_call(
            body.value,
            ignored=body.ignored_fields,
            caller=get_caller(request),
            settings=self._service.settings,
            arrival=arrival,
        )

    def _describe_job(self, job: StoredJob) -> JobDocument:
        return build_job_document(job, expected_wait=self._service.engine.estimate_wait(job.id))


OPERATIONS = (
    Operation(
        "POST",
        INFER,
        NativeEndpoints.infer,
        "native",
        errors=GENERATION_ERRORS,
        example={"prompt": EXAMPLE_PROMPT},
    ),
    Operation(
        "POST",
        JOBS,
        NativeEndpoints.submit_job,
        "native",
        202,
        GENERATION_ERRORS,
        example={"prompt": EXAMPLE_PROMPT},
    ),
    Operation("GET", JOB, NativeEndpoints.get_job, "native", errors=(404,)),
    Operation("DELETE", JOB, NativeEndpoints.cancel_job, "native", errors=(404,)),
    Operation(
        "POST",
        ROUTE,
        NativeEndpoints.route,
        "native",
        errors=GENERATION_ERRORS,
        example={"prompt": EXAMPLE_PROMPT},
    ),
    Operation(
        "POST",
        PROOF,
        NativeEndpoints.prove,
        "native",
        errors=(404,),
        example={"nonce": "0" * 64},
        is_public=True,
    ),
    Operation("GET", EXPERTS, NativeEndpoints.list_experts, "native"),
    Operation("GET", MOE, NativeEndpoints.observation, "native"),
    Operation(
        "POST",
        MOE,
        NativeEndpoints.observe,
        "native",
        errors=GENERATION_ERRORS,
        authorise=require_manager,
        example={"mode": "full"},
    ),
)
