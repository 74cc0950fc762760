"""The operations that the OpenAPI document describes, and the route of the document itself."""

from functools import partial
from typing import get_args

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.schema.strict_json import JsonObject
from expertctl.server.anthropic.message_document import Message, StreamEvent, TokenCount
from expertctl.server.anthropic.message_request import CountRequest, MessageRequest
from expertctl.server.anthropic.models import ModelInfo, ModelPage
from expertctl.server.body import JSON
from expertctl.server.documents import PieceEvent, StartedEvent, reference
from expertctl.server.health import HealthDocument, VersionDocument
from expertctl.server.native.expert_document import ExpertsDocument
from expertctl.server.native.infer_request import InferRequest, RouteFields
from expertctl.server.native.job_document import JobDocument
from expertctl.server.native.observing import ObserveRequest
from expertctl.server.openai.chat_document import ChatChunk, ChatCompletion
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_document import Completion, PromptExtensions
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openai.models import ModelDocument, ModelsDocument
from expertctl.server.openapi import Operation, openapi
from expertctl.server.readiness import ReadinessDocument
from expertctl.server.service import Service

DOCUMENT = "/openapi.json"
_TEXT: JsonObject = {"type": "string"}
_GENERATING = (404, 422)
_INFER = reference("InferAnswer")


def _only_anthropic(name: str, words: str, *, place: str = "query") -> JsonObject:
    schema: JsonObject = {"type": "string", "description": words}
    return {"name": name, "in": place, "schema": schema}


_PAGING = (
    _only_anthropic("anthropic-version", "Asks for the answer of that API.", place="header"),
    _only_anthropic("limit", "From 1 to 1000; with the header of Anthropic's API"),
    _only_anthropic("before_id", "The model that the page ends before; with the header"),
    _only_anthropic("after_id", "The model that the page begins after; with the header"),
)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answer a conversation, as OpenAI's API does.",
        tag="openai",
        body=ChatRequest,
        lenient=True,
        answer=ChatCompletion,
        events=(ChatChunk,),
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Go on with texts, as OpenAI's API does.",
        tag="openai",
        body=CompletionRequest,
        lenient=True,
        answer=Completion,
        events=(Completion,),
        parts=(PromptExtensions,),
        errors=_GENERATING,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="List what a request can name as its model.",
        tag="openai",
        parameters=_PAGING,
        answer=ModelsDocument,
        also=(ModelPage,),
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        name="retrieveModel",
        summary="Describe one model.",
        tag="openai",
        parameters=_PAGING[:1],
        answer=ModelDocument,
        also=(ModelInfo,),
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        summary="Answer a conversation, as Anthropic's API does.",
        tag="anthropic",
        body=MessageRequest,
        lenient=True,
        answer=Message,
        events=get_args(StreamEvent),
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countTokens",
        summary="Count the tokens that a conversation is to the base.",
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
        summary="Answer a prompt with the experts that suit it, or named ones.",
        tag="native",
        body=InferRequest,
        lenient=True,
        answer=_INFER,
        events=(StartedEvent, PieceEvent, _INFER),
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        summary="Take a prompt as a job, whose answer is fetched later.",
        tag="native",
        body=InferRequest,
        lenient=True,
        answer=JobDocument,
        status=202,
        errors=_GENERATING,
    ),
    Operation(
        method="GET",
        path="/v1/jobs/{job_id}",
        name="getJob",
        summary="Tell how far a job is, and its answer when it is there.",
        tag="native",
        answer=JobDocument,
        errors=(404,),
    ),
    Operation(
        method="DELETE",
        path="/v1/jobs/{job_id}",
        name="cancelJob",
        summary="End a job where it is.",
        tag="native",
        answer=JobDocument,
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/route",
        name="route",
        summary="Return the plan that a prompt would have, and why.",
        tag="native",
        body=RouteFields,
        answer=reference("RouteAnswer"),
        errors=(404, 422),
    ),
    Operation(
        method="GET",
        path="/v1/experts",
        name="listExperts",
        summary="List the experts that are installed.",
        tag="native",
        answer=ExpertsDocument,
    ),
    Operation(
        method="GET",
        path="/moe",
        name="observation",
        summary="Tell what was counted of the routed experts of the base.",
        tag="native",
        answer=reference("MoeActivity"),
    ),
    Operation(
        method="POST",
        path="/moe",
        name="observe",
        summary="Count routed experts otherwise, or let a profile say which stay.",
        tag="native",
        body=ObserveRequest,
        answer=reference("MoeActivity"),
        errors=(404, 422),
    ),
    Operation(
        method="GET",
        path="/health",
        name="isHealthy",
        summary="Tell whether requests are answered, as other inference servers do.",
        tag="operation",
        answer=HealthDocument,
        same=(503,),
        open=True,
    ),
    Operation(
        method="GET",
        path="/version",
        name="readVersion",
        summary="Return the version of the server.",
        tag="operation",
        answer=VersionDocument,
        open=True,
    ),
    Operation(
        method="GET",
        path="/healthz",
        name="isAlive",
        summary="Tell that the server answers.",
        tag="operation",
        answer=_TEXT,
        media_type="text/plain",
        open=True,
    ),
    Operation(
        method="GET",
        path="/readyz",
        name="isReady",
        summary="Tell whether jobs are taken.",
        tag="operation",
        answer=ReadinessDocument,
        same=(503,),
        open=True,
    ),
    Operation(
        method="GET",
        path="/metrics",
        name="readMetrics",
        summary="Return what was counted, in the text format of Prometheus.",
        tag="operation",
        answer=_TEXT,
        media_type="text/plain",
    ),
)


def routes(service: Service) -> list[BaseRoute]:
    """Return the address of the document."""
    settings = service.settings
    describe_all = partial(
        openapi, OPERATIONS, url=settings.public_url, strict=settings.strict_fields
    )
    by_keyed = {keyed: msgspec.json.encode(describe_all(keyed=keyed)) for keyed in (False, True)}

    async def describe(_: Request) -> Response:
        return Response(by_keyed[service.keys.are_demanded], media_type=JSON)

    return [Route(DOCUMENT, describe, methods=["GET"])]
