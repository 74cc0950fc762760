"""The operations of the OpenAPI document, and the routes for operating the server.

``/health``, ``/healthz``, ``/readyz`` and ``/version`` are public. ``/healthz`` says that the
process answers; ``/health``, which clients of other inference servers poll, and ``/readyz`` say
that requests are accepted. ``/metrics`` names experts and their load, so it needs a key where the
server does.
"""

from functools import partial
from typing import Literal, get_args

import msgspec
from anyio import to_thread
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from expertctl import __version__
from expertctl.engine.serving.running_batch import EngineSnapshot
from expertctl.schema.strict_json import JsonObject
from expertctl.server.anthropic.message_request import CountRequest, MessageRequest
from expertctl.server.anthropic.message_response import Message, StreamEvent, TokenCount
from expertctl.server.metrics import CONTENT_TYPE
from expertctl.server.models import ModelDocument, ModelInfo, ModelPage, ModelsDocument
from expertctl.server.native.infer import InferRequest, RouteFields
from expertctl.server.native.jobs import JobDocument
from expertctl.server.native.routes import ExpertsDocument, ObserveRequest
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openai.response import ChatChunk, ChatCompletion, Completion, PromptExtensions
from expertctl.server.openapi import (
    Operation,
    PieceEvent,
    StartedEvent,
    build_openapi,
    make_reference,
)
from expertctl.server.request_body import JSON_MEDIA_TYPE
from expertctl.server.responses import RETRY_SECONDS, json_response
from expertctl.server.service import ReadinessDocument, Service

_NO_STORE = {"Cache-Control": "no-store"}


class HealthDocument(msgspec.Struct, frozen=True):
    """Whether requests are accepted."""

    status: Literal["ok", "unavailable"]


class VersionDocument(msgspec.Struct, frozen=True):
    """The version of the server."""

    version: str


def build_health_routes(service: Service) -> list[BaseRoute]:
    """Return the routes for the operator of the server."""

    def read() -> tuple[str, EngineSnapshot] | None:
        return service.engine.base_name, service.engine.take_snapshot()

    def answer_readiness(body: msgspec.Struct, *, ready: bool) -> Response:
        again = {} if ready else {"Retry-After": str(RETRY_SECONDS)}
        return json_response(body, status=200 if ready else 503, headers=again)

    async def healthz(_: Request) -> Response:
        return PlainTextResponse("ok\n", headers=_NO_STORE)

    async def health(_: Request) -> Response:
        ready = service.readiness.is_ready
        return answer_readiness(HealthDocument("ok" if ready else "unavailable"), ready=ready)

    async def version(_: Request) -> Response:
        return json_response(VersionDocument(__version__))

    async def readyz(_: Request) -> Response:
        body = service.readiness.document
        return answer_readiness(body, ready=body.ready)

    async def metrics(_: Request) -> Response:
        text = await to_thread.run_sync(service.metrics.render, read)
        return Response(text, headers=_NO_STORE, media_type=CONTENT_TYPE)

    return [
        Route("/health", health, methods=["GET"]),
        Route("/version", version, methods=["GET"]),
        Route("/healthz", healthz, methods=["GET"]),
        Route("/readyz", readyz, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]


OPENAPI_PATH = "/openapi.json"
_TEXT_SCHEMA: JsonObject = {"type": "string"}
_GENERATION_ERRORS = (404, 422)
_INFER_ANSWER = make_reference("InferAnswer")


def _anthropic_parameter(name: str, words: str, *, place: str = "query") -> JsonObject:
    schema: JsonObject = {"type": "string", "description": words}
    return {"name": name, "in": place, "schema": schema}


_PAGING_PARAMETERS = (
    _anthropic_parameter("anthropic-version", "Selects the answer of that API.", place="header"),
    _anthropic_parameter("limit", "From 1 to 1000; with the header of Anthropic's API"),
    _anthropic_parameter("before_id", "The page ends before this model; with the header"),
    _anthropic_parameter("after_id", "The page begins after this model; with the header"),
)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Create a chat completion, as in OpenAI's API.",
        tag="openai",
        body=ChatRequest,
        lenient=True,
        answer=ChatCompletion,
        events=(ChatChunk,),
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Complete texts, as in OpenAI's API.",
        tag="openai",
        body=CompletionRequest,
        lenient=True,
        answer=Completion,
        events=(Completion,),
        referenced_types=(PromptExtensions,),
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="List the models that a request can name.",
        tag="openai",
        parameters=_PAGING_PARAMETERS,
        answer=ModelsDocument,
        other_answers=(ModelPage,),
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        name="retrieveModel",
        summary="Describe one model.",
        tag="openai",
        parameters=_PAGING_PARAMETERS[:1],
        answer=ModelDocument,
        other_answers=(ModelInfo,),
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        summary="Create a message, as in Anthropic's API.",
        tag="anthropic",
        body=MessageRequest,
        lenient=True,
        answer=Message,
        events=get_args(StreamEvent),
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countTokens",
        summary="Count the tokens of a conversation.",
        tag="anthropic",
        body=CountRequest,
        lenient=True,
        answer=TokenCount,
        errors=(404, 422),
    ),
    Operation(
        method="POST",
        path="/v1/infer",
        name="infer",
        summary="Answer a prompt with the experts that suit it, or with named ones.",
        tag="native",
        body=InferRequest,
        lenient=True,
        answer=_INFER_ANSWER,
        events=(StartedEvent, PieceEvent, _INFER_ANSWER),
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        summary="Submit a prompt as a background job.",
        tag="native",
        body=InferRequest,
        lenient=True,
        answer=JobDocument,
        status=202,
        errors=_GENERATION_ERRORS,
    ),
    Operation(
        method="GET",
        path="/v1/jobs/{job_id}",
        name="getJob",
        summary="Return the state of a job, and its answer once it has finished.",
        tag="native",
        answer=JobDocument,
        errors=(404,),
    ),
    Operation(
        method="DELETE",
        path="/v1/jobs/{job_id}",
        name="cancelJob",
        summary="Cancel a job.",
        tag="native",
        answer=JobDocument,
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/route",
        name="route",
        summary="Return the plan for a prompt, and why.",
        tag="native",
        body=RouteFields,
        answer=make_reference("RouteAnswer"),
        errors=(404, 422),
    ),
    Operation(
        method="GET",
        path="/v1/experts",
        name="listExperts",
        summary="List the installed experts.",
        tag="native",
        answer=ExpertsDocument,
    ),
    Operation(
        method="GET",
        path="/moe",
        name="observation",
        summary="Return the counters of the base's routed experts.",
        tag="native",
        answer=make_reference("MoeActivity"),
    ),
    Operation(
        method="POST",
        path="/moe",
        name="observe",
        summary="Change the counting of routed experts, or apply a usage profile.",
        tag="native",
        body=ObserveRequest,
        answer=make_reference("MoeActivity"),
        errors=(404, 422),
    ),
    Operation(
        method="GET",
        path="/health",
        name="isHealthy",
        summary="Check whether requests are accepted, as on other inference servers.",
        tag="operation",
        answer=HealthDocument,
        same_form_statuses=(503,),
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/version",
        name="readVersion",
        summary="Return the version of the server.",
        tag="operation",
        answer=VersionDocument,
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/healthz",
        name="isAlive",
        summary="Check that the server answers.",
        tag="operation",
        answer=_TEXT_SCHEMA,
        media_type="text/plain",
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/readyz",
        name="isReady",
        summary="Check whether jobs are accepted.",
        tag="operation",
        answer=ReadinessDocument,
        same_form_statuses=(503,),
        is_public=True,
    ),
    Operation(
        method="GET",
        path="/metrics",
        name="readMetrics",
        summary="Return the metrics, in the text format of Prometheus.",
        tag="operation",
        answer=_TEXT_SCHEMA,
        media_type="text/plain",
    ),
)


def build_openapi_routes(service: Service) -> list[BaseRoute]:
    """Return the route of the OpenAPI document."""
    settings = service.settings
    describe_all = partial(
        build_openapi, OPERATIONS, url=settings.public_url, strict=settings.strict_fields
    )
    by_keyed = {keyed: msgspec.json.encode(describe_all(keyed=keyed)) for keyed in (False, True)}

    async def describe(_: Request) -> Response:
        return Response(by_keyed[service.keys.are_required], media_type=JSON_MEDIA_TYPE)

    return [Route(OPENAPI_PATH, describe, methods=["GET"])]
