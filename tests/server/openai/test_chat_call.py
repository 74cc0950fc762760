"""From a chat request to a job: whose it is, what is asked of the engine, how it is read."""

import json
import time
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.serving.request import GenerationJob
from expertctl.http.operation import FieldError
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from expertctl.server.chat_prompt import ChatTemplateTraits
from expertctl.server.openai.chat_request import ChatCall, build_chat_call
from expertctl.server.responses import Caller
from expertctl.server.settings import ServeSettings
from expertctl.server.validator import ValidatorCommand
from tests.server.harness import ServerHarness
from tests.server.openai.client import make_chat_request
from tests.server.openai.test_chat_answer import WEATHER

VECTORS = Path(__file__).parents[2] / "vectors" / "runtime.json"
ANN = Caller(id="key-ann")


@pytest.fixture
def text(scripted: ServerHarness) -> ChatTemplateTraits:
    return ChatTemplateTraits(scripted.engine.tokenizer)


def call(
    text: ChatTemplateTraits, settings: ServeSettings | None = None, **fields: Any
) -> ChatCall:
    request = make_chat_request(**fields)
    chosen = settings or ServeSettings()
    return build_chat_call(request, caller=ANN, base_name="tiny", template=text, settings=chosen)


def job(text: ChatTemplateTraits, **fields: Any) -> GenerationJob:
    return call(text, **fields).job


def test_a_job_belongs_to_who_asked_and_has_an_id_that_nobody_guesses(
    text: ChatTemplateTraits,
) -> None:
    one, other = job(text), job(text)
    assert one.owner == "key-ann"
    assert one.id != other.id
    assert len(one.id) == 32
    assert (one.priority, one.answers, one.logprobs, one.deadline) == (5, 1, None, None)
    assert (job(text, priority=0).priority, job(text, n=3).answers) == (0, 3)


def test_the_beginning_of_an_answer_is_read_without_its_thoughts(text: ChatTemplateTraits) -> None:
    begun = {"role": "assistant", "content": "<think>Easy.</think>[1,"}
    turns = [{"role": "user", "content": "Count"}, begun]
    assert call(text, messages=turns).parser_config.prefix == "[1,"
    assert call(text, messages=turns, add_generation_prompt=True).parser_config.prefix == ""
    assert call(text).parser_config.prefix == ""


@pytest.mark.parametrize(
    ("content", "tag"), [("Yes <thi", "<thi"), ("<think>Hm</th", "</th"), ("Yes", ""), ("a <b", "")]
)
def test_a_tag_that_the_beginning_of_an_answer_cuts_is_read_on(
    text: ChatTemplateTraits, content: str, tag: str
) -> None:
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
    assert call(text, messages=turns).parser_config.partial_tag == tag
    assert call(text, messages=turns, add_generation_prompt=True).parser_config.partial_tag == ""


def test_experts_are_forced_in_the_order_of_the_model(text: ChatTemplateTraits) -> None:
    named = job(text, model="acme/sql:0.5+acme/json", max_experts=2, exclude_experts=["acme/go"])
    assert named.request.experts == (
        ForcedExpert(Reference.parse("acme/sql"), 0.5),
        ForcedExpert(Reference.parse("acme/json")),
    )
    assert named.request.route.max_experts == 2
    assert named.request.route.exclude == (Reference.parse("acme/go"),)
    assert not named.request.route.base_alone
    assert job(text).request.route.base_alone


def test_the_conversation_is_read_whole_and_routed_by_its_last_question(
    text: ChatTemplateTraits,
) -> None:
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    request = job(text, messages=[*turns, {"role": "user", "content": "Sort"}]).request
    assert [turn.content for turn in request.turns] == ["system", "user", "assistant", "Sort"]
    assert request.message.prompt == request.route.prompt == "Sort"
    assert request.raw is None


def test_the_first_source_of_a_cache_key_counts_and_keys_are_the_callers_own(
    text: ChatTemplateTraits,
) -> None:
    order = json.loads(VECTORS.read_text())["kv_reuse_key"]
    given: list[tuple[str, dict[str, Any]]] = []
    for name in order[:-1]:
        outer, _, inner = name.partition(".")
        given.append((name, {outer: {inner: name} if inner else name}))
    for place, (name, _) in enumerate(given):
        fields: dict[str, Any] = {}
        for _, one in given[place:]:
            for key, value in one.items():
                both = isinstance(value, dict) and fields.get(key, {})
                fields[key] = {**both, **value} if both else value
        assert job(text, **fields).request.cache_key == f"key-ann/{name}"
    assert job(text).request.cache_key == f"key-ann/{order[-1]}"


def test_the_newer_names_of_user_are_sources_too(text: ChatTemplateTraits) -> None:
    fields = {"prompt_cache_key": "a", "session_id": "b", "safety_identifier": "c"}
    assert job(text, **fields).request.cache_key == "key-ann/a"
    assert job(text, safety_identifier="c").request.cache_key == "key-ann/c"
    assert job(text, safety_identifier="c", user="d").request.cache_key == "key-ann/d"


def test_an_answer_has_the_time_that_the_request_names_else_that_of_the_server(
    text: ChatTemplateTraits,
) -> None:
    usual = ServeSettings(timeout=50)
    now = time.monotonic()
    own, servers = call(text, usual, timeout_ms=2000).job.deadline, call(text, usual).job.deadline
    assert own is not None
    assert servers is not None
    assert 1 < own - now < 3
    assert 49 < servers - now < 51


def test_scores_are_wanted_with_so_many_others(text: ChatTemplateTraits) -> None:
    assert job(text, logprobs=True).logprobs == 0
    assert job(text, logprobs=True, top_logprobs=5).logprobs == 5
    assert job(text, logprobs=False).logprobs is None


def test_the_template_is_told_of_tools_of_effort_and_of_what_the_client_says(
    text: ChatTemplateTraits,
) -> None:
    said = {"tools": [WEATHER], "chat_template_kwargs": {"enable_thinking": True, "style": "old"}}
    assert job(text, **said).request.variables == {
        "tools": [WEATHER],
        "enable_thinking": True,
        "style": "old",
    }
    effort = job(text, reasoning_effort="high").request.variables
    assert effort == {"reasoning_effort": "high"}
    none = job(text, reasoning_effort="none").request.variables
    assert none == {"reasoning_effort": "none", "enable_thinking": False}


@pytest.mark.parametrize(
    "name", ["messages", "tools", "add_generation_prompt", "bos_token", "raise_exception"]
)
def test_what_the_call_tells_the_template_cannot_be_told_otherwise(
    text: ChatTemplateTraits, name: str
) -> None:
    with pytest.raises(FieldError) as refused:
        call(text, chat_template_kwargs={name: []})
    assert refused.value.field == f"chat_template_kwargs.{name}"


def test_any_integer_is_a_seed(text: ChatTemplateTraits) -> None:
    assert job(text, seed=7).request.route.seed == 7
    assert job(text).request.route.seed is None
    negative = job(text, seed=-1).request.route.seed
    assert negative == job(text, seed=-1).request.route.seed == 2**53 - 1


def test_no_nucleus_at_all_is_the_likeliest_token_alone(text: ChatTemplateTraits) -> None:
    wishes = job(text, top_p=0).request.route.sampling
    assert wishes.top_p is not None
    assert 0 < wishes.top_p < 1e-6


def test_stop_strings_are_one_or_several_or_left_to_the_experts(text: ChatTemplateTraits) -> None:
    assert job(text, stop="a").request.route.sampling.stop == ("a",)
    assert job(text, stop=["a", "b"]).request.route.sampling.stop == ("a", "b")
    assert job(text, stop=[]).request.route.sampling.stop == ()
    assert job(text).request.route.sampling.stop is None


def test_fields_that_do_not_fit_together_are_refused(text: ChatTemplateTraits) -> None:
    with pytest.raises(FieldError, match="min_tokens 9 is more than max_tokens 3"):
        call(text, min_tokens=9, max_tokens=3)
    with pytest.raises(FieldError, match="contradict each other"):
        call(text, max_tokens=1, max_completion_tokens=2)
    with pytest.raises(FieldError, match="it requires logprobs"):
        call(text, top_logprobs=1)


def test_a_check_that_only_the_operator_can_name_is_one_of_theirs(text: ChatTemplateTraits) -> None:
    form = {"type": "custom", "name": "short"}
    known = ServeSettings(validators={"short": ValidatorCommand(("true",))})
    assert call(text, known, response_format=form).job.check is not None
    with pytest.raises(FieldError) as refused:
        call(text, response_format=form)
    assert refused.value.field == "response_format"
    usual = call(text, response_format={"type": "text"}).job.check
    assert usual is not None
    assert usual("<think>So?</think>Hi") == "Hi"


def test_a_base_that_reads_no_tools_is_not_told_of_any(text: ChatTemplateTraits) -> None:
    deaf = retold(text, "{{ messages[0].content }}")
    with pytest.raises(FieldError, match="does not support tools"):
        call(deaf, tools=[WEATHER])


def test_a_template_that_demands_short_ids_of_calls_gets_them(text: ChatTemplateTraits) -> None:
    called = {"id": "call_0123456789abcdef", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "tool_calls": [called]},
        {"role": "tool", "tool_call_id": called["id"], "content": "1"},
    ]
    mistral = retold(text, "{{ tools }}[TOOL_CALLS]{{ messages }}")
    _, said, answered = call(mistral, messages=messages).job.request.turns
    [known] = said.fields["tool_calls"]  # type: ignore[misc]  # a list of one
    assert len(answered.fields["tool_call_id"]) == 9  # type: ignore[arg-type]  # a text
    assert known["id"] == answered.fields["tool_call_id"]  # type: ignore[index,call-overload]  # an object
    assert call(text, messages=messages).job.request.turns[2].fields["tool_call_id"] == called["id"]


def retold(text: ChatTemplateTraits, template: str) -> ChatTemplateTraits:
    """The same words with another chat template."""
    tokenizer = copy(text.tokenizer)
    assert tokenizer.config.template is not None
    source = replace(tokenizer.config.template, text=template)
    tokenizer.config = replace(tokenizer.config, template=source)
    return ChatTemplateTraits(tokenizer)
