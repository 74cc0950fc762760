"""The list of models, as the official client of the Anthropic API reads it."""

import time
from typing import Any

import anthropic
import pytest
from anthropic.types import ModelInfo
from anthropic.types.shared import ErrorResponse

from tests.server.anthropic.client import make_client
from tests.server.harness import EXPERTS, ServerHarness
from tests.server.openai.scripted_base import CONTEXT

NAMES = ["tiny", "auto", *sorted(EXPERTS)]
VERSION = {"anthropic-version": "2023-06-01"}


def test_the_base_auto_and_every_expert_are_models(served: ServerHarness) -> None:
    with make_client(served) as client:
        page = client.models.list()
    assert [model.id for model in page.data] == NAMES
    assert (page.has_more, page.first_id, page.last_id) == (False, NAMES[0], NAMES[-1])
    for model in page.data:
        shown = ModelInfo.model_validate(model.model_dump(exclude_unset=True), strict=True)
        assert (shown.type, shown.display_name) == ("model", model.id)
        assert 0 <= time.time() - model.created_at.timestamp() < 3600


@pytest.mark.parametrize("limit", [1, 2, 3, 5, 1000])
def test_pages_add_up_to_all_models_in_both_directions(served: ServerHarness, limit: int) -> None:
    with make_client(served) as client:
        assert [model.id for model in client.models.list(limit=limit)] == NAMES
        back = list(client.models.list(limit=limit, before_id=NAMES[-1]).iter_pages())
    pages = [[model.id for model in page.data] for page in back]
    assert [name for page in reversed(pages) for name in page] == NAMES[:-1]
    assert all(len(page) <= limit for page in pages)


def test_a_page_says_whether_there_are_more_in_its_direction(served: ServerHarness) -> None:
    with make_client(served) as client:
        behind = client.models.list(after_id="auto", limit=2)
        before = client.models.list(before_id="acme/dates", limit=2)
        none = client.models.list(after_id=NAMES[-1])
    assert ([m.id for m in behind.data], behind.has_more) == (["acme/dates", "acme/json"], True)
    assert ([m.id for m in before.data], before.has_more) == (["tiny", "auto"], False)
    assert (none.data, none.has_more, none.first_id, none.last_id) == ([], False, None, None)


@pytest.mark.parametrize(
    ("stages", "names"), [(["active", "retired"], NAMES), (["deprecated", "retired"], [])]
)
def test_every_model_is_in_use(served: ServerHarness, stages: Any, names: list[str]) -> None:
    with make_client(served) as client:
        page = client.models.list(lifecycle=stages)
    assert [model.id for model in page.data] == names


def test_one_model_is_told_with_what_it_reads(client: anthropic.Anthropic) -> None:
    model = client.models.retrieve("acme/sql")
    assert (model.id, model.display_name, model.max_input_tokens) == (
        "acme/sql",
        "acme/sql",
        CONTEXT,
    )


def test_a_model_that_is_not_there_is_not_found_in_the_words_of_this_api(
    client: anthropic.Anthropic,
) -> None:
    with pytest.raises(anthropic.NotFoundError) as refused:
        client.models.retrieve("acme/none")
    body = ErrorResponse.model_validate(refused.value.body, strict=True)
    assert body.error.type == "not_found_error"


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"limit": 0}, "limit"),
        ({"limit": 1001}, "limit"),
        ({"limit": "ten"}, "limit"),
        ({"limit": "9" * 5000}, "limit"),
        ({"after_id": "gone"}, "after_id"),
        ({"before_id": "gone"}, "before_id"),
        ({"before_id": "auto", "after_id": "tiny"}, "before_id"),
        ({"lifecycle": ["born"]}, "lifecycle"),
        ({"extra_query": {"colour": "red"}}, "colour"),
    ],
)
def test_a_page_that_cannot_be_given_is_refused_by_its_field(
    client: anthropic.Anthropic, query: Any, field: str
) -> None:
    with pytest.raises(anthropic.BadRequestError, match=field) as refused:
        client.models.list(**query)
    ErrorResponse.model_validate(refused.value.body, strict=True)


def test_the_header_decides_at_this_address_alone(scripted: ServerHarness) -> None:
    client = scripted.client()
    assert client.get("/v1/models").json()["object"] == "list"
    assert client.get("/v1/models", headers=VERSION).json()["first_id"] == "tiny"
    refused = client.post("/v1/chat/completions", headers=VERSION, json={"nothing": 1})
    assert set(refused.json()) == {"error"}
