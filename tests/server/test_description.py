"""The OpenAPI document says what the routes do: all of them, and nothing else."""

from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator
from starlette.routing import Route

from expertctl.server.operations import OPERATIONS
from tests.server.harness import ServerHarness

UNDESCRIBED = {"/", "/openapi.json"}
"""Beside the pages, which are for browsers."""


def _is_for_browsers(path: str) -> bool:
    return path in UNDESCRIBED or path.startswith(("/status", "/static", "/chat", "/docs"))


@pytest.fixture
def document(served: ServerHarness) -> Any:
    answer = served.client().get("/openapi.json")
    assert answer.headers["content-type"] == "application/json"
    return answer.json()


def test_every_address_is_described(served: ServerHarness, document: Any) -> None:
    routed = {
        (route.path.replace(":path", ""), method.lower())
        for route in served.app.routes
        if isinstance(route, Route)
        for method in route.methods or ()
        if method != "HEAD" and not _is_for_browsers(route.path)
    }
    described = {(path, method) for path, item in document["paths"].items() for method in item}
    assert described == routed


def test_it_is_of_version_3_1_and_every_reference_leads_somewhere(document: Any) -> None:
    assert document["openapi"] == "3.1.0"
    schemas = document["components"]["schemas"]
    wanted: list[str] = []

    def visit(node: Any) -> None:
        if isinstance(node, dict):
            wanted.extend(v for k, v in node.items() if k == "$ref" and isinstance(v, str))
            for child in node.values():
                visit(child)
        elif isinstance(node, list):
            for child in node:
                visit(child)

    visit(document)
    assert {ref.removeprefix("#/components/schemas/") for ref in wanted} <= set(schemas)


def test_names_of_operations_are_given_once(document: Any) -> None:
    names = [operation.name for operation in OPERATIONS]
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("path", ["/v1/infer", "/v1/messages", "/v1/chat/completions"])
def test_errors_are_described_in_the_shape_of_their_api(
    served: ServerHarness, document: Any, path: str
) -> None:
    shape = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]
    name = shape["schema"]["$ref"].rpartition("/")[2]
    body = served.client().post(path, json={"nothing": 1}).json()
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert Draft202012Validator(schema).is_valid(body)


def test_every_body_has_an_example_that_is_answered(served: ServerHarness, document: Any) -> None:
    client, statuses = served.client(), dict[str, int]()
    for path, item in document["paths"].items():
        for method, operation in item.items():
            if "requestBody" not in operation:
                continue
            content = operation["requestBody"]["content"]["application/json"]
            schema = {**content["schema"], "components": document["components"]}
            assert Draft202012Validator(schema).is_valid(content["example"]), path
            statuses[path] = client.request(method, path, json=content["example"]).status_code
    assert statuses.pop("/moe") == 422, "the base has no routed experts"
    assert statuses.pop("/v1/jobs") == 202
    assert statuses.pop("/v1/proof") == 404, "it has no record in a home"
    assert set(statuses.values()) == {200}
