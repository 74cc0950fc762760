"""The client and the description of the server say the same."""

import json
from typing import Any, get_type_hints

import msgspec
import pytest

from expertctl.client.protocol import InferOptions, MoeOptions, RouteOptions
from expertctl.client.result import (
    ExpertList,
    InferResult,
    Job,
    MoeActivity,
    MoeGuide,
    MoeLayer,
    MoeResidence,
    MoeUse,
    RouteResult,
)
from expertctl.schema.validation import find_schema
from tests.server.harness import ServerHarness

NOT_OPTIONS = {"prompt", "stream"}
"""An argument of its own, and a method of its own."""


@pytest.fixture(scope="module")
def document(served: ServerHarness) -> dict[str, Any]:
    described: dict[str, Any] = served.client().get("/openapi.json").json()
    return described


def resolved(document: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        target: Any = document
        for word in schema["$ref"].removeprefix("#/").split("/"):
            target = target[word]
        schema = target
    return schema


def body(document: dict[str, Any], path: str) -> dict[str, Any]:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return resolved(document, content["application/json"]["schema"])


def answer(document: dict[str, Any], method: str, path: str, status: str) -> dict[str, Any]:
    content = document["paths"][path][method]["responses"][status]["content"]
    return resolved(document, content["application/json"]["schema"])


@pytest.mark.parametrize(
    ("path", "options"),
    [
        ("/v1/infer", InferOptions),
        ("/v1/jobs", InferOptions),
        ("/v1/route", RouteOptions),
        ("/moe", MoeOptions),
    ],
)
def test_an_option_is_a_field_and_a_field_an_option(
    document: dict[str, Any], path: str, options: type
) -> None:
    fields = set(body(document, path)["properties"])
    assert fields - NOT_OPTIONS == set(get_type_hints(options))


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("post", "/v1/jobs", "202", Job),
        ("get", "/v1/jobs/{job_id}", "200", Job),
        ("delete", "/v1/jobs/{job_id}", "200", Job),
        ("get", "/v1/experts", "200", ExpertList),
    ],
)
def test_what_the_client_reads_is_always_there(
    document: dict[str, Any], method: str, path: str, status: str, kind: type[msgspec.Struct]
) -> None:
    described = answer(document, method, path, status)
    assert set(kind.__struct_fields__) <= set(described["required"])


@pytest.mark.parametrize(("name", "kind"), [("infer", InferResult), ("route", RouteResult)])
def test_what_the_client_reads_is_in_the_schema_of_the_document(
    name: str, kind: type[msgspec.Struct]
) -> None:
    schema = json.loads(find_schema(name).read_text(encoding="utf-8"))
    assert set(kind.__struct_fields__) <= set(schema["properties"])


def test_what_the_client_reads_of_routed_experts_is_all_that_there_is() -> None:
    schema = json.loads(find_schema("infer").read_text(encoding="utf-8"))
    moe = schema["properties"]["moe"]
    assert set(MoeUse.__struct_fields__) == set(moe["properties"]) == set(moe["required"])
    assert "moe" not in schema["required"], "of other bases it is not there"


def test_what_the_client_reads_of_what_was_counted_is_in_the_schema() -> None:
    schema = json.loads(find_schema("moe-activity").read_text(encoding="utf-8"))
    fields = schema["properties"]
    assert set(MoeActivity.__struct_fields__) <= set(fields)
    assert set(MoeLayer.__struct_fields__) <= set(schema["$defs"]["layer"]["properties"])
    for kind, name in ((MoeResidence, "residence"), (MoeGuide, "guide")):
        assert set(kind.__struct_fields__) == set(fields[name]["properties"])
