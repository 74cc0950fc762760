"""Conversations: every turn equals reading all of it anew, whoever answers, however it ends.

The oracle of a turn is the same conversation said to an engine that has kept nothing.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from typing import Any

import pytest

from expertctl.engine.conversation import Conversation, Turn
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import NamedExpert, RunRequest, SavedConversation
from expertctl.engine_config import EngineConfig
from expertctl.errors import BudgetError, ExpertError, NotFoundError, UsageError
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from expertctl.routing.session import KEPT_REASON
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import planner
from tests.factories import make_route_request, write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "user_home"]

WISHES = SamplingOverrides(greedy=True, max_tokens=6)
SORTING: dict[str, Any] = {"description": "Sorts numbers in ascending order."}
SORT, OTHER = "Sort these numbers in ascending order: 3, 1, 2", "Guten Morgen"


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")


@pytest.fixture
def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), budget=8 << 20)


def named(*names: str) -> list[NamedExpert]:
    return [ForcedExpert(Reference.parse(f"acme/{name}")) for name in names]


def pattern(**options: Any) -> RunRequest:
    message = UserMessage(prompt="?", **options.pop("message", {}))
    route = {"prompt": "?", "seed": 0, "sampling": WISHES, **options.pop("route", {})}
    return RunRequest(message=message, route=make_route_request(**route), **options)


def talk(engine: LocalEngine, **options: Any) -> Conversation:
    return Conversation(engine, pattern(**options))


def say(conversation: Conversation, prompt: str, **options: Any) -> Turn:
    pieces, stream = [], conversation.send(prompt, **options)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            turn = end.value
            break
    assert isinstance(turn, Turn)
    assert "".join(pieces) == turn.result.generated.text
    conversation._engine.check_integrity()
    return turn


def reused(turn: Turn) -> int:
    return turn.result.kv_reused_tokens


def after(steps: int) -> Callable[[], bool]:
    """Want an answer no more from the n-th time on that it is asked."""
    asked = count()
    return lambda: next(asked) >= steps


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_every_turn_answers_as_if_all_had_been_read_anew(
    user_home: HomeFixture,
    engine_packages: EnginePackages,
    tmp_path: Any,
    soft: bool,
    window: int | None,
) -> None:
    """Grouped heads, with and without a sliding window, with virtual tokens before the first."""
    base_dir = write_base(tmp_path / "other", arch="mistral", tie=False, sliding_window=window)
    user_home.bases.add(base_dir)
    adapters = [("soft_prompt", {"tokens": 5, "seed": 3})] if soft else None
    package_factory = replace(
        engine_packages, folder=tmp_path / "packages", base_dir=base_dir, base=read_base(base_dir)
    )
    user_home.install(package_factory.package("acme/one", adapters=adapters))
    kept = talk(LocalEngine(planner(user_home), budget=8 << 20), experts=tuple(named("one")))
    for number, prompt in enumerate((SORT, "And now?", "Once more")):
        turn = say(kept, prompt)
        fresh = talk(LocalEngine(planner(user_home), budget=8 << 20), experts=tuple(named("one")))
        fresh.turns = kept.turns[:number]
        oracle = say(fresh, prompt)
        assert turn.result.generated.tokens == oracle.result.generated.tokens
        assert turn.result.prompt_tokens == oracle.result.prompt_tokens
        assert reused(oracle) == 0
        before = kept.turns[number - 1].result.prompt_tokens if number else 0
        assert before <= reused(turn) < turn.result.prompt_tokens


def test_virtual_tokens_take_their_part_of_context_and_cache(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    prompts = [("soft_prompt", {"tokens": 9, "seed": 3})]
    user_home.install(engine_packages.package("acme/soft", adapters=prompts))
    turn = say(talk(engine, experts=tuple(named("soft"))), "x")
    per_page = 2 * 2 * 2 * 8 * 4 * 16
    rows = 9 + turn.result.prompt_tokens + 6
    assert turn.result.memory.held["kv"] == -(-rows // 16) * per_page
    with pytest.raises(UsageError, match="and 9 virtual tokens of its experts"):
        say(talk(engine, experts=tuple(named("soft"))), "x" * 490)
    say(talk(engine), "x" * 490)


def test_what_is_kept_stays_within_the_budget_and_counts_as_kv(engine: LocalEngine) -> None:
    conversation = talk(engine, base="market-base")
    turn = say(conversation, SORT)
    assert engine.budget.reserved_bytes("kv") == turn.result.memory.held["kv"] > 0
    conversation.reset()
    assert engine.budget.reserved_bytes("kv") == 0
    assert reused(say(conversation, SORT)) == 0


def test_short_memory_costs_what_is_kept_and_never_a_refusal(
    user_home: HomeFixture, engine_packages: EnginePackages, engine: LocalEngine
) -> None:
    first = say(talk(engine), SORT).result.memory
    needed = sum(first.held.values())
    small = LocalEngine(planner(user_home), budget=needed + first.held["kv"] // 2)
    say(talk(small), SORT)
    turn = say(talk(small), SORT)
    assert reused(turn) == 0
    assert turn.result.memory.peak <= small.budget.limit
    with pytest.raises(BudgetError):
        say(talk(LocalEngine(planner(user_home), budget=needed - 1)), SORT)


def test_two_conversations_that_take_turns_go_on_each_from_its_own(
    engine: LocalEngine, user_home: HomeFixture
) -> None:
    """What is read is only what is new; the words are those of an engine that reads all."""
    talks = talk(engine), talk(engine)
    for number, prompts in enumerate((("aaaa", SORT), ("bbbb", "And now?"), ("cc", "Once more"))):
        for conversation, prompt in zip(talks, prompts, strict=True):
            fresh = talk(LocalEngine(planner(user_home), budget=8 << 20))
            fresh.turns = conversation.turns[:number]
            turn, oracle = say(conversation, prompt), say(fresh, prompt)
            assert turn.result.generated.tokens == oracle.result.generated.tokens
            assert (reused(oracle), turn.message.prompt) == (0, prompt)
            before = conversation.turns[number - 1].result.prompt_tokens if number else 0
            assert before <= reused(turn) < turn.result.prompt_tokens
            assert (reused(turn) > 0) == (number > 0)
            read = turn.result.generated.prefill_tokens
            assert read == turn.result.prompt_tokens - reused(turn)


def test_another_expert_is_another_plan_that_reads_all_again(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(
        engine_packages.package("acme/one", seed=1), engine_packages.package("acme/two", seed=2)
    )
    conversation = talk(engine, experts=tuple(named("one")))
    assert not say(conversation, "x").replanned
    kept = say(conversation, "y")
    assert reused(kept) > 0
    assert [e.ref for e in conversation.use_experts(named("two")).experts] == ["acme/two@1.0.0"]
    changed = say(conversation, "z")
    assert (changed.replanned, reused(changed)) == (True, 0)
    assert not say(conversation, "z").replanned
    assert changed.plan.experts[0].ref == "acme/two@1.0.0"


def test_a_message_that_was_said_before_is_routed_from_memory(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    conversation = talk(engine)
    plans = []
    for prompt in (SORT, SORT, OTHER):
        plans.append(say(conversation, prompt).result.planned.result)
        conversation.reset()
    assert ["remembered" in plan.timings_ms for plan in plans] == [False, True, False]
    user_home.install(engine_packages.package("acme/sorting", **SORTING))
    assert [e.ref for e in say(conversation, SORT).plan.experts] == ["acme/sorting@1.0.0"]


def test_another_dtype_is_another_plan(engine: LocalEngine) -> None:
    plain = pattern()
    rounded = replace(plain, route=replace(plain.route, config=EngineConfig(dtype="bf16")))
    conversation = Conversation(engine, plain)
    say(conversation, "x")
    conversation._pattern = rounded
    turn = say(conversation, "y")
    assert (turn.replanned, reused(turn)) == (True, 0)


def test_experts_that_cannot_answer_are_refused_and_the_others_stay(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package("acme/one"))
    conversation = talk(engine, experts=tuple(named("one")))
    say(conversation, "x")
    with pytest.raises(NotFoundError):
        conversation.use_experts(named("nobody"))
    assert say(conversation, "y").plan.experts[0].ref == "acme/one@1.0.0"


def test_a_follow_up_without_an_expert_of_its_own_keeps_those_before(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package("acme/sorting", **SORTING))
    conversation = talk(engine)
    assert say(conversation, OTHER).plan.experts == ()
    first = say(conversation, SORT)
    assert (first.kept_experts, first.plan.experts[0].ref) == (False, "acme/sorting@1.0.0")
    second = say(conversation, OTHER)
    assert second.kept_experts
    assert [(e.ref, e.reason) for e in second.plan.experts] == [("acme/sorting@1.0.0", KEPT_REASON)]
    assert second.result.planned.result.candidates[0].reason == KEPT_REASON
    assert reused(second) > 0
    assert say(conversation, OTHER).kept_experts
    conversation.use_automatic_routing()
    assert say(conversation, OTHER).plan.experts == ()
    say(conversation, SORT)
    conversation.reset()
    assert say(conversation, OTHER).plan.experts == ()


def test_naming_experts_ends_a_conversation_of_the_base_alone(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package("acme/sorting", **SORTING))
    conversation = talk(engine, route={"base_alone": True})
    assert say(conversation, SORT).plan.experts == ()
    conversation.use_experts(named("sorting"))
    assert conversation.current_experts == tuple(
        e.content_digest for e in say(conversation, OTHER).plan.experts
    )
    assert len(conversation.current_experts) == 1


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_a_stopped_answer_stays_as_far_as_it_went_and_keeps_no_rows_of_its_own(
    engine: LocalEngine, steps: int
) -> None:
    conversation = talk(engine)
    say(conversation, "x")
    kept = engine.budget.reserved_bytes("kv")
    turn = say(conversation, "tell me", cancelled=after(steps))
    assert turn.interrupted
    assert len(turn.result.generated.tokens) == steps
    assert engine.budget.reserved_bytes("kv") == kept
    told = [m.content for m in turn.iter_messages()]
    assert told == (["tell me", turn.result.generated.text] if turn.result.generated.text else [])
    following = say(conversation, "go on")
    assert reused(following) == reused(turn) > 0
    assert following.result.prompt_tokens > 0


def test_a_stopped_answer_is_a_beginning_of_the_whole_one(engine: LocalEngine) -> None:
    whole = say(talk(engine), SORT).result.generated
    part = say(talk(engine), SORT, cancelled=after(4)).result.generated
    assert whole.tokens[: len(part.tokens)] == part.tokens
    assert 0 < len(part.tokens) < len(whole.tokens)


def test_a_turn_that_is_given_up_or_fails_leaves_the_conversation_as_it_was(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    conversation = talk(engine)
    say(conversation, "x")
    kept = engine.budget.reserved_bytes("kv")
    stream = conversation.send("y")
    next(stream)
    stream.close()
    engine.check_integrity()
    assert engine.budget.reserved_bytes("kv") == kept
    with pytest.raises(UsageError):
        say(conversation, " ")
    with pytest.raises(UsageError, match="the conversation has"):
        say(conversation, "x" * 500)
    assert [turn.message.prompt for turn in conversation.turns] == ["x"]
    assert say(conversation, "y").result.prompt_tokens > 0


def test_the_oldest_turns_are_left_out_only_when_asked(engine: LocalEngine) -> None:
    prompts = ["a" * 150, "b" * 150, "c" * 150]
    strict, cut = talk(engine), talk(engine, truncate=True)
    for prompt in prompts[:2]:
        say(strict, prompt)
        say(cut, prompt)
    with pytest.raises(UsageError, match="the conversation has") as caught:
        say(strict, prompts[2])
    assert "oldest turns" in caught.value.hint
    turn = say(cut, prompts[2])
    assert any("the oldest of 2 turns did not fit" in w for w in turn.result.warnings)
    assert len(cut.turns) == 3


def test_a_body_follows_the_first_message_and_a_template_every_one(engine: LocalEngine) -> None:
    def texts(**message: Any) -> list[str]:
        conversation = talk(engine, message=message)
        return [say(conversation, prompt).message.text() for prompt in ("x", "y")]

    assert texts(body="B") == ["x\n\nB", "y"]
    assert texts(template="<{prompt}>") == ["<x>", "<y>"]
    assert texts(template="{body}: {prompt}", body="B") == ["B: x", "B: y"]


def test_every_conversation_is_another_key(engine: LocalEngine) -> None:
    say(talk(engine), "x")
    assert reused(say(talk(engine), "x")) == 0


def test_a_base_without_a_chat_template_takes_one_message(
    user_home: HomeFixture, tmp_path: Any, engine: LocalEngine
) -> None:
    directory = write_base(tmp_path / "plain")
    config = directory / "tokenizer_config.json"
    config.write_text(
        json.dumps({**json.loads(config.read_text()), "chat_template": None}), encoding="utf-8"
    )
    user_home.bases.add(directory)
    conversation = talk(engine, base="plain")
    say(conversation, "x")
    with pytest.raises(ExpertError, match="no chat template"):
        say(conversation, "y")


def test_a_system_message_precedes_every_turn_and_a_body_still_the_first(
    engine: LocalEngine,
) -> None:
    conversation = talk(engine, message={"body": "B"})
    conversation.system = "S"
    say(conversation, "x")
    say(conversation, "y")
    roles = [(each.role, each.content) for each in conversation.messages]
    answers = [turn.result.generated.text for turn in conversation.turns]
    assert roles == [
        ("system", "S"),
        *(("user", "x\n\nB"), ("assistant", answers[0])),
        *(("user", "y"), ("assistant", answers[1])),
    ]
    conversation.reset()
    assert [each.role for each in conversation.messages] == ["system"]


def test_a_restored_conversation_answers_as_the_one_it_was_saved_from(engine: LocalEngine) -> None:
    first = talk(engine)
    first.system = "S"
    say(first, "x")
    data = json.dumps(first.saved.to_json()).encode()
    second = talk(engine)
    say(second, "something else")
    second.restore(SavedConversation.parse(data, what="a file"))
    found, expected = say(second, "y").result, say(first, "y").result
    assert found.generated.tokens == expected.generated.tokens
    assert found.prompt_tokens == expected.prompt_tokens
    assert second.messages == first.messages


def test_an_answer_that_is_given_again_replaces_the_last_or_leaves_it(engine: LocalEngine) -> None:
    conversation = talk(engine, route={"sampling": SamplingOverrides(temperature=2, max_tokens=6)})
    with pytest.raises(NotFoundError, match="no answer of this chat yet"):
        next(conversation.retry())
    say(conversation, "x")
    last = say(conversation, "y")
    assert last.result.planned.result.plan.seed == 0
    stream = conversation.retry()
    next(stream)
    stream.close()
    assert conversation.turns[-1] is last
    pieces = "".join(conversation.retry())
    again = conversation.turns[-1]
    assert (len(conversation.turns), again.message.prompt) == (2, "y")
    assert pieces == again.result.generated.text
    assert again.result.planned.result.plan.seed != 0
    assert again.result.prompt_tokens == last.result.prompt_tokens
    conversation._engine.check_integrity()
