"""The addresses of our own API: inference, jobs, routing, and what is installed or observed."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.engine.moe.observation import Observation
from expertctl.engine.request import RunRequest
from expertctl.errors import ExpertError, RateLimitError
from expertctl.routing.planner import Planned
from expertctl.server.body import Body, read_body, read_lenient_body
from expertctl.server.caller import caller_of, demand_manager
from expertctl.server.field_error import FieldError
from expertctl.server.generation import finished
from expertctl.server.native.answer import answer_of
from expertctl.server.native.call import Arrival, Call, call_of
from expertctl.server.native.expert_document import experts_document
from expertctl.server.native.infer_request import REFUSED, InferRequest, RouteFields
from expertctl.server.native.job_document import document_of
from expertctl.server.native.job_store import JobStore, StoredJob
from expertctl.server.native.observing import ObserveRequest
from expertctl.server.native.stream import infer_lines
from expertctl.server.reply import json_reply
from expertctl.server.service import Service
from expertctl.server.sse import event_stream, while_connected
from expertctl.server.unknown_fields import ignored_headers

INFER = "/v1/infer"
JOBS = "/v1/jobs"
JOB = "/v1/jobs/{job_id}"
ROUTE = "/v1/route"
EXPERTS = "/v1/experts"
MOE = "/moe"
PLANS = 16
"""How many requests to ``/v1/route`` wait for a plan at a time: answers need plans, too."""


def routes(service: Service) -> list[BaseRoute]:
    """Return the addresses, on one engine."""
    wire = _Wire(service)
    return [
        Route(INFER, wire.infer, methods=["POST"]),
        Route(JOBS, wire.submit, methods=["POST"]),
        Route(JOB, wire.job, methods=["GET"]),
        Route(JOB, wire.cancel, methods=["DELETE"]),
        Route(ROUTE, wire.route, methods=["POST"]),
        Route(EXPERTS, wire.experts, methods=["GET"]),
        Route(MOE, wire.observation, methods=["GET"]),
        Route(MOE, wire.observe, methods=["POST"]),
    ]


class _Wire:
    """Answers the requests of one server."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._jobs = JobStore()
        self._plans = 0
        """How many plans are waited for."""
        self._adopts = False
        """Whether a profile is being adopted."""

    async def infer(self, request: Request) -> Response:
        """Answer a prompt, at once or piece by piece."""
        arrival = Arrival()
        body = await self._body(request)
        call, engine = self._call(request, body, arrival), self._service.engine
        headers = ignored_headers(call.ignored)
        if body.value.stream:
            lines = infer_lines(engine, call, request.scope)
            return event_stream(request, lines, headers=headers)
        answer = answer_of(call, await while_connected(request, finished(engine, call.job)))
        return json_reply(answer, headers=headers)

    async def submit(self, request: Request) -> Response:
        """Begin a background job."""
        arrival = Arrival()
        body = await self._body(request)
        if body.value.stream:
            raise FieldError(
                "stream: a job has none",
                field="stream",
                hint=f"ask for the job now and then, or post to {INFER}",
            )
        call, engine = self._call(request, body, arrival), self._service.engine
        expected_wait = engine.expected_wait()
        job = self._jobs.add(
            call.job.id,
            owner=call.job.owner,
            submitted=arrival.at,
            describe=partial(answer_of, call),
        )
        try:
            engine.submit(call.job, call.filtered(partial(self._jobs.hear, job.id)))
        except ExpertError:
            self._jobs.drop(job.id)
            raise
        document = document_of(job, expected_wait=expected_wait)
        headers = {"Location": f"{JOBS}/{job.id}", **ignored_headers(call.ignored)}
        return json_reply(document, status=202, headers=headers)

    async def job(self, request: Request) -> Response:
        """Answer with the state of a job."""
        job = self._jobs.find(request.path_params["job_id"], owner=caller_of(request).id)
        return self._told(job)

    async def cancel(self, request: Request) -> Response:
        """Cancel a job."""
        job = self._jobs.call_off(request.path_params["job_id"], owner=caller_of(request).id)
        self._service.engine.cancel(job.id)
        return self._told(job)

    async def route(self, request: Request) -> Response:
        """Plan a prompt; nothing is loaded."""
        body = await read_body(request, RouteFields)
        planned = await while_connected(request, self._planned(body.planned()))
        return json_reply(planned.result.to_json())

    async def _planned(self, request: RunRequest) -> Planned:
        """Have a plan made; if the client leaves, planning that has not begun is cancelled."""
        if self._plans >= PLANS:
            raise RateLimitError("too many plans are asked for at once")
        planning = asyncio.wrap_future(self._service.engine.plan(request))
        self._plans += 1
        try:
            return await planning
        finally:
            self._plans -= 1

    async def experts(self, _: Request) -> Response:
        """List what is installed."""
        engine = self._service.engine
        experts = await asyncio.wrap_future(engine.experts())
        return json_reply(experts_document(experts, base=engine.base_name))

    async def observation(self, _: Request) -> Response:
        """Answer with what was counted of routed experts."""
        seen = await to_thread.run_sync(self._service.engine.observation)
        return json_reply(seen.to_json())

    async def observe(self, request: Request) -> Response:
        """Change how routed experts are counted, count anew, or adopt a profile."""
        demand_manager(caller_of(request))
        body = await read_body(request, ObserveRequest)
        body.check(base=self._service.engine.base_name)
        with self._one_profile(body):
            seen = await to_thread.run_sync(partial(self._changed, body))
        return json_reply(seen.to_json())

    @contextmanager
    def _one_profile(self, body: ObserveRequest) -> Iterator[None]:
        """Adopt one profile at a time: that waits for a pass to end, and blocks a thread."""
        if body.profile is None:
            yield
            return
        if self._adopts:
            raise RateLimitError("another profile is being taken")
        self._adopts = True
        try:
            yield
        finally:
            self._adopts = False

    def _changed(self, body: ObserveRequest) -> Observation:
        """Apply the changes of a body; the profile first, since it may be refused."""
        engine = self._service.engine
        if body.profile is not None:
            engine.adopt(body.document, body.wishes)
        return engine.observe(mode=body.mode, reset=body.reset)

    async def _body(self, request: Request) -> Body[InferRequest]:
        strict = self._service.settings.strict_fields
        return await read_lenient_body(request, InferRequest, strict=strict, refused=REFUSED)

    def _call(self, request: Request, body: Body[InferRequest], arrival: Arrival) -> Call:
        return call_of(
            body.value,
            ignored=body.ignored,
            caller=caller_of(request),
            settings=self._service.settings,
            arrival=arrival,
        )

    def _told(self, job: StoredJob) -> Response:
        wait = self._service.engine.expected_wait(job.id)
        return json_reply(document_of(job, expected_wait=wait))
