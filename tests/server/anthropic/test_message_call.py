"""What the engine is asked for a request."""

from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.text.tokenizer import Tokenizer
from expertctl.errors import UsageError
from expertctl.http.operation import FieldError, parse_body
from expertctl.server.anthropic.message_request import (
    MessageCall,
    MessageRequest,
    build_message_call,
)
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.responses import Caller
from expertctl.server.settings import ModelNotFoundError, ServeSettings
from expertctl.user_request import SamplingOverrides
from tests.factories import write_base
from tests.server.anthropic.client import WEATHER, make_body
from tests.server.harness import BASE, ServerHarness


@pytest.fixture
def text(scripted: ServerHarness) -> ChatTemplateTraits:
    return ChatTemplateTraits(scripted.engine.tokenizer)


def called(text: ChatTemplateTraits, *, usual: float | None = None, **fields: Any) -> MessageCall:
    request = parse_body(make_body(**{"max_tokens": 16, **fields}), MessageRequest)
    caller = Caller(id="key-1")
    settings = ServeSettings(timeout=usual)
    return build_message_call(
        request, caller=caller, base_name=BASE, template=text, settings=settings
    )


@pytest.mark.parametrize("model", [BASE, "auto", "acme/sql"])
def test_silence_leaves_the_choice_to_the_experts_and_the_base_whatever_the_model(
    text: ChatTemplateTraits, model: str
) -> None:
    call = called(text, model=model, top_k=5)
    assert call.job.request.route.base_alone == (model == BASE)
    assert call.job.request.route.sampling == SamplingOverrides(top_k=5, max_tokens=16)


def test_experts_may_be_named_with_weights(text: ChatTemplateTraits) -> None:
    call = called(text, model="acme/sql:0.5+acme/json")
    assert [(str(e.target), e.weight) for e in call.job.request.experts] == [  # type: ignore[union-attr]  # none is a file
        ("acme/sql", 0.5),
        ("acme/json", 1.0),
    ]


def test_what_is_kept_is_kept_for_the_caller_and_the_user_apart(text: ChatTemplateTraits) -> None:
    assert called(text).job.request.cache_key == "key-1/default"
    assert called(text, metadata={"user_id": "u"}).job.request.cache_key == "key-1/u"
    assert called(text, metadata={"user_id": "u"}, session_id="s").job.request.cache_key == (
        "key-1/s"
    )
    assert called(text).job.owner == "key-1"


def test_the_template_is_told_of_tools_and_of_thinking(text: ChatTemplateTraits) -> None:
    variables = called(text, tools=[WEATHER]).job.request.variables
    assert variables["enable_thinking"] is False
    [tool] = variables["tools"]  # type: ignore[misc]  # a list of tools
    assert tool["function"]["name"] == "weather"  # type: ignore[index, call-overload]  # of objects
    assert called(text, thinking={"type": "adaptive"}).job.request.variables == {
        "enable_thinking": True
    }
    asked = called(text, output_config={"effort": "high"}).job.request.variables
    assert asked["reasoning_effort"] == "high"


def test_a_request_has_the_usual_time_unless_it_names_another(text: ChatTemplateTraits) -> None:
    assert called(text).job.deadline is None
    usual, own = called(text, usual=1000.0), called(text, usual=1000.0, timeout_ms=1)
    assert usual.job.deadline is not None
    assert own.job.deadline is not None
    assert usual.job.deadline - own.job.deadline > 900


def test_priority_and_experts_that_are_not_wanted_are_passed_on(text: ChatTemplateTraits) -> None:
    call = called(text, model="auto", priority=9, exclude_experts=["acme/sql"], max_experts=2)
    assert call.job.priority == 9
    assert [str(one) for one in call.job.request.route.exclude] == ["acme/sql"]
    assert call.job.request.route.max_experts == 2
    assert called(text).job.priority == 5


def test_each_job_has_an_id_of_its_own(text: ChatTemplateTraits) -> None:
    assert called(text).id != called(text).id


def test_a_model_that_is_none_is_not_found(text: ChatTemplateTraits) -> None:
    with pytest.raises(ModelNotFoundError):
        called(text, model="claude-9")


def test_what_cannot_go_together_is_refused(text: ChatTemplateTraits) -> None:
    with pytest.raises(UsageError):
        called(text, model="auto", exclude_experts=["not a name"])
    wrong = {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}
    with pytest.raises(FieldError, match=r"output_config\.format\.schema"):
        called(text, output_config=wrong)


def test_tools_are_refused_where_the_template_knows_of_none(tmp_path: Path) -> None:
    text = ChatTemplateTraits(Tokenizer.open(write_base(tmp_path / "base", tie=True)))
    assert (
        called(text, tools=[WEATHER], tool_choice={"type": "none"}).parser_config.tools
        == frozenset()
    )
    with pytest.raises(FieldError) as refused:
        called(text, tools=[WEATHER])
    assert refused.value.field == "tools"
