import re
from typing import Any

import pytest
from jsonschema_rs import Draft202012Validator

from registry_server.api.routes import API, OPERATIONS
from tests.registry_server.harness import URL, JsonApiClient, RegistryHarness


@pytest.fixture
def document(nobody: JsonApiClient) -> dict[str, Any]:
    status, document = nobody("GET", "openapi.json")
    assert status == 200
    return dict(document)


def test_the_document_names_the_registry_by_its_settings(document: dict[str, Any]) -> None:
    assert document["openapi"] == "3.1.0"
    assert document["servers"] == [{"url": URL}]


def test_every_operation_of_the_application_is_described(
    served: RegistryHarness, document: dict[str, Any]
) -> None:
    described = {
        (method.upper(), path) for path, item in document["paths"].items() for method in item
    }
    routed = {
        (method, route.path)  # type: ignore[attr-defined]  # all routes of the API are Route
        for route in served.app.routes
        if getattr(route, "path", "").startswith("/api/v1/")
        for method in route.methods - {"HEAD"}  # type: ignore[attr-defined]  # likewise
    }
    assert described == routed - {("GET", "/api/v1/openapi.json")}


def test_every_schema_is_one_and_every_reference_leads_somewhere(
    document: dict[str, Any],
) -> None:
    schemas = document["components"]["schemas"]
    for name, schema in schemas.items():
        Draft202012Validator({**schema, "components": document["components"]})
        assert schema.get("description"), name
    references = set(re.findall(r"#/components/schemas/(\w+)", str(document)))
    assert references == set(schemas)


def test_every_path_parameter_is_described(document: dict[str, Any]) -> None:
    for path, item in document["paths"].items():
        for operation in item.values():
            named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
            assert named == set(re.findall(r"{(\w+)}", path))
            assert operation["summary"].endswith(".")


def test_bodies_refuse_what_they_do_not_know(document: dict[str, Any]) -> None:
    for item in document["paths"].values():
        for operation in item.values():
            if "requestBody" in operation:
                schema = operation["requestBody"]["content"]["application/json"]["schema"]
                name = schema["$ref"].rpartition("/")[2]
                assert document["components"]["schemas"][name]["additionalProperties"] is False


def test_names_of_operations_are_unique() -> None:
    assert len({operation.name for operation in OPERATIONS}) == len(OPERATIONS)


def test_every_operation_says_all_its_statuses() -> None:
    for operation in OPERATIONS:
        assert {operation.status, *API.common_statuses} <= set(API.list_statuses(operation))
        if "{" in operation.path:
            assert 404 in API.list_statuses(operation)
