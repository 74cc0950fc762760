"""What is described of the server: every address that programs ask, and the document's own."""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from expertctl.schema.strict_json import JsonObject
from expertctl.server.anthropic.message_request import CountRequest, MessageRequest
from expertctl.server.body import JSON
from expertctl.server.native.expert_document import ExpertsDocument
from expertctl.server.native.infer_request import InferRequest, RouteFields
from expertctl.server.native.job_document import JobDocument
from expertctl.server.openai.chat_request import ChatRequest
from expertctl.server.openai.completion_request import CompletionRequest
from expertctl.server.openapi import Operation, openapi
from expertctl.server.readiness import ReadinessDocument
from expertctl.server.service import Service

DOCUMENT = "/openapi.json"
_OBJECT: JsonObject = {"type": "object"}
_TEXT: JsonObject = {"type": "string"}
_GENERATING = (404, 422)

OPERATIONS = (
    Operation(
        method="POST",
        path="/v1/chat/completions",
        name="createChatCompletion",
        summary="Answer a conversation, as OpenAI's API does.",
        tag="openai",
        body=ChatRequest,
        answer=_OBJECT,
        streams=True,
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/completions",
        name="createCompletion",
        summary="Go on with texts, as OpenAI's API does.",
        tag="openai",
        body=CompletionRequest,
        answer=_OBJECT,
        streams=True,
        errors=_GENERATING,
    ),
    Operation(
        method="GET",
        path="/v1/models",
        name="listModels",
        summary="List what a request can name as its model.",
        tag="openai",
        answer=_OBJECT,
    ),
    Operation(
        method="GET",
        path="/v1/models/{name}",
        name="retrieveModel",
        summary="Describe one model.",
        tag="openai",
        answer=_OBJECT,
        errors=(404,),
    ),
    Operation(
        method="POST",
        path="/v1/messages",
        name="createMessage",
        summary="Answer a conversation, as Anthropic's API does.",
        tag="anthropic",
        body=MessageRequest,
        answer=_OBJECT,
        streams=True,
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/messages/count_tokens",
        name="countTokens",
        summary="Count the tokens that a conversation is to the base.",
        tag="anthropic",
        body=CountRequest,
        answer=_OBJECT,
        errors=(404, 422),
    ),
    Operation(
        method="POST",
        path="/v1/infer",
        name="infer",
        summary="Answer a prompt with the experts that suit it, or named ones.",
        tag="native",
        body=InferRequest,
        answer=_OBJECT,
        streams=True,
        errors=_GENERATING,
    ),
    Operation(
        method="POST",
        path="/v1/jobs",
        name="submitJob",
        summary="Take a prompt, to be answered while nobody waits.",
        tag="native",
        body=InferRequest,
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
        answer=_OBJECT,
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
    url = service.settings.public_url
    by_keyed = {
        keyed: msgspec.json.encode(openapi(OPERATIONS, url=url, keyed=keyed))
        for keyed in (False, True)
    }

    async def describe(_: Request) -> Response:
        return Response(by_keyed[service.keys.are_demanded], media_type=JSON)

    return [Route(DOCUMENT, describe, methods=["GET"])]
