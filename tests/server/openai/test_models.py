"""The list of models: what can be asked for."""

import time
from dataclasses import replace

import openai
import pytest
from openai.types import Model

from expertctl.server.models import list_served_models
from tests.server.harness import EXPERTS, ServerHarness
from tests.server.openai.client import Client, make_client


def test_the_base_auto_and_every_expert_are_models(served: ServerHarness) -> None:
    with make_client(served) as client:
        models = list(client.models.list())
    assert [model.id for model in models] == ["tiny", "auto", *sorted(EXPERTS)]
    for model in models:
        Model.model_validate(model.model_dump(exclude_unset=True), strict=True)
        assert 0 <= time.time() - model.created < 3600
    assert [model.owned_by for model in models] == ["expertctl"] * 2 + ["acme"] * len(EXPERTS)


def test_a_model_is_found_by_its_name_whether_its_slash_is_escaped_or_not(
    client: Client, scripted: ServerHarness
) -> None:
    model = client.models.retrieve("acme/sql")
    assert (model.id, model.object, model.owned_by) == ("acme/sql", "model", "acme")
    for name in ("acme/sql", "acme%2Fsql", "acme%2fsql"):
        found = scripted.client().get(f"/v1/models/{name}").json()
        assert found == model.model_dump(exclude_unset=True)
    assert client.models.retrieve("auto").id == "auto"


@pytest.mark.parametrize("name", ["acme/none", "gpt-5", "acme", "acme/sql/more"])
def test_a_model_that_is_not_there_is_not_found(client: Client, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve(name)
    assert refused.value.code == "model_not_found"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/models/..%2f..%2fetc",
        "/v1/models/%2e%2e%2fmodels",
        "/v1/models/a%2F%2Fb",
        "/v1/models/a%5cb",
        "/v1%2fmodels/auto",
        "/v1/experts%2f",
    ],
)
def test_a_path_with_two_readings_stays_refused(scripted: ServerHarness, path: str) -> None:
    answer = scripted.client().get(path)
    assert answer.status_code == 400
    assert "more than one reading" in answer.text


def test_experts_that_cannot_answer_are_no_models(scripted: ServerHarness) -> None:
    [here] = scripted.engine.list_experts().result()
    unfit = replace(here, fits=False)
    revoked = replace(here, expert=replace(here.expert, revoked=True))
    assert [one.name for one in list_served_models("tiny", [unfit, revoked])] == ["tiny", "auto"]
