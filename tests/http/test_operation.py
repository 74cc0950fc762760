"""Operations: the inputs of a handler, its answers, and their descriptions in OpenAPI."""

import threading
from typing import Annotated, Any

import pytest
from jsonschema_rs import Draft202012Validator
from msgspec import Meta, Struct
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from expertctl.errors import ExpertError, ForbiddenError
from expertctl.http.openapi import ApiDescription, build_openapi, refer_to_schema
from expertctl.http.operation import (
    Arrival,
    Operation,
    OperationRouter,
    ParsedBody,
    Reply,
    find_status,
    read_body,
)


class ParcelPath(Struct, frozen=True):
    name: Annotated[str, Meta(min_length=2)]


class ParcelQuery(Struct, frozen=True, forbid_unknown_fields=True):
    limit: Annotated[int, Meta(ge=1, le=9)] = 3


class ParcelBody(Struct, frozen=True, forbid_unknown_fields=True):
    weight: int


class ParcelAnswer(Struct, frozen=True):
    """A parcel."""

    name: str
    weight: int
    thread: bool = False


class ParcelError(Struct, frozen=True):
    """An error."""

    message: str


FileAnswer = Annotated[dict[str, Any], refer_to_schema("FromFile")]


def show_parcel(depot: str, path: ParcelPath, query: ParcelQuery) -> ParcelAnswer:
    """Show a parcel."""
    in_thread = threading.current_thread() is not threading.main_thread()
    return ParcelAnswer(f"{depot}/{path.name}", query.limit, in_thread)


async def store_parcel(
    _: str, path: ParcelPath, body: ParsedBody[ParcelBody], arrival: Arrival
) -> Reply[ParcelAnswer]:
    """Store a parcel.

    This line is not part of the summary.
    """
    assert arrival.elapsed_ms >= 0
    headers = {"Location": f"/parcels/{path.name}", "x-ignored": ",".join(body.ignored_fields)}
    return Reply(ParcelAnswer(path.name, body.value.weight), headers)


async def remove_parcel(_: str, request: Request) -> None:
    """Remove a parcel."""
    assert request.method == "DELETE"


async def print_parcel(_: str) -> PlainTextResponse | FileAnswer:
    """Print a parcel."""
    return PlainTextResponse("parcel\n")


def require_stamp(request: Request) -> None:
    if "stamp" not in request.headers:
        raise ForbiddenError("a stamp is required")


PATH = "/parcels/{name:path}"
OPERATIONS = (
    Operation("GET", PATH, show_parcel, "parcels", errors=(404,), is_public=True),
    Operation("PUT", PATH, store_parcel, "parcels", 201, authorise=require_stamp),
    Operation("DELETE", PATH, remove_parcel, "parcels", 204),
    Operation("GET", "/print", print_parcel, "parcels"),
)
API = ApiDescription(
    title="parcels",
    description="Parcels.",
    common_statuses=(400, 500),
    status_descriptions=dict.fromkeys((200, 201, 204, 400, 404, 500), "It happens."),
    list_error_types=lambda _: (ParcelError,),
    security_schemes={},
    security=({"key": []},),
    public_security=({},),
    name_operation=str.upper,
    schemas={"FromFile": {"type": "object"}},
)


async def read_operation_body(request: Request, operation: Operation) -> object:
    assert operation.body_type is ParcelBody
    assert operation.allows_unknown_fields
    return ParsedBody(await read_body(request, ParcelBody), ("colour",))


async def answer_error(_: Request, error: Exception) -> PlainTextResponse:
    assert isinstance(error, ExpertError)
    return PlainTextResponse(error.message, find_status(error, {}))


@pytest.fixture
def client() -> TestClient:
    router = OperationRouter(make_context=lambda _: "depot", read_body=read_operation_body)
    routes = router.build_routes(OPERATIONS)
    app = Starlette(routes=routes, exception_handlers={ExpertError: answer_error})
    return TestClient(app)


@pytest.fixture
def document() -> dict[str, Any]:
    return dict(build_openapi(API, OPERATIONS, url="https://depot.example", strict=False))


def test_path_and_query_are_converted_and_a_function_runs_in_a_thread(client: TestClient) -> None:
    answer = client.get("/parcels/a/b?limit=5")
    assert answer.json() == {"name": "depot/a/b", "weight": 5, "thread": True}
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("/parcels/a", "the path is invalid"),
        ("/parcels/ab?limit=0", "the query is invalid"),
        ("/parcels/ab?limit=x", "the query is invalid"),
        ("/parcels/ab?page=1", "the query is invalid"),
        ("/parcels/ab?limit=1&limit=2", "given twice"),
    ],
)
def test_invalid_parameters_are_refused(client: TestClient, path: str, fact: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 400
    assert fact in answer.text


def test_a_reply_has_the_status_of_its_operation_and_headers(client: TestClient) -> None:
    answer = client.put("/parcels/ab", json={"weight": 7}, headers={"stamp": "1"})
    assert answer.status_code == 201
    assert answer.json() == {"name": "ab", "weight": 7, "thread": False}
    assert answer.headers["location"] == "/parcels/ab"
    assert answer.headers["x-ignored"] == "colour"
    assert answer.headers["cache-control"] == "no-store"


def test_a_caller_without_the_right_is_refused_before_the_body_is_read(client: TestClient) -> None:
    answer = client.put("/parcels/ab", content=b"no JSON")
    assert (answer.status_code, answer.text) == (403, "a stamp is required")


def test_none_is_an_empty_answer_and_a_response_is_sent_as_it_is(client: TestClient) -> None:
    gone, printed = client.delete("/parcels/ab"), client.get("/print")
    assert (gone.status_code, gone.content) == (204, b"")
    assert (printed.text, printed.headers["content-type"]) == (
        "parcel\n",
        "text/plain; charset=utf-8",
    )


def test_one_route_answers_all_methods_of_a_path(client: TestClient) -> None:
    refused = client.post("/parcels/ab")
    assert refused.status_code == 405
    assert set(refused.headers["allow"].split(", ")) == {"GET", "HEAD", "PUT", "DELETE"}
    assert client.head("/parcels/ab").status_code == 200


def test_an_operation_is_described_by_its_annotations(document: dict[str, Any]) -> None:
    store = document["paths"]["/parcels/{name}"]["put"]
    assert store["operationId"] == "STORE_PARCEL"
    assert store["summary"] == "Store a parcel."
    assert store["security"] == [{"key": []}]
    assert store["parameters"] == [
        {
            "name": "name",
            "in": "path",
            "required": True,
            "schema": {"type": "string", "minLength": 2},
        }
    ]
    body = {"schema": {"$ref": "#/components/schemas/ParcelBody"}}
    assert store["requestBody"] == {"required": True, "content": {"application/json": body}}
    assert list(store["responses"]) == ["201", "400", "500"]


def test_answers_are_described_by_media_type(document: dict[str, Any]) -> None:
    printed = document["paths"]["/print"]["get"]["responses"]
    assert printed["200"]["content"] == {
        "text/plain": {"schema": {"type": "string"}},
        "application/json": {"schema": {"$ref": "#/components/schemas/FromFile"}},
    }
    error = {"schema": {"$ref": "#/components/schemas/ParcelError"}}
    assert printed["400"]["content"] == {"application/json": error}
    removed = document["paths"]["/parcels/{name}"]["delete"]["responses"]
    assert "content" not in removed["204"]


def test_a_body_whose_unknown_fields_are_ignored_allows_them_unless_strict(
    document: dict[str, Any],
) -> None:
    open_body = document["components"]["schemas"]["ParcelBody"]
    assert Draft202012Validator(open_body).is_valid({"weight": 1, "colour": "red"})
    strict: dict[str, Any] = build_openapi(API, OPERATIONS, url="")
    assert strict["components"]["schemas"]["ParcelBody"]["additionalProperties"] is False
