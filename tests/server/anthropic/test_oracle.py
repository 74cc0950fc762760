"""Greedy answers over the wire are those of `run`, with and without experts, turn after turn."""

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest
from anthropic.types import TextBlock

from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.server.anthropic.client import make_client
from tests.server.harness import ServerHarness

TOKENS = 24


@pytest.fixture(scope="module")
def engine(served: ServerHarness) -> Iterator[LocalEngine]:
    planner = Planner.open(Settings(Home(served.user_home.root), encoder="lexical"))
    engine = LocalEngine(planner, budget=64 << 20)
    yield engine
    engine.close()


def alone(
    engine: LocalEngine, turns: list[tuple[Any, str]], experts: tuple[ForcedExpert, ...]
) -> RunResult:
    """What `run` answers to a conversation."""
    *before, (_, prompt) = turns
    wishes = SamplingOverrides(temperature=0.0, max_tokens=TOKENS)
    request = RunRequest(
        message=UserMessage(prompt=prompt),
        route=RouteRequest(prompt=prompt, base_alone=not experts, sampling=wishes),
        experts=experts,
        history=tuple(ConversationMessage(role, content) for role, content in before),
    )
    running = engine.run(request)
    while True:
        try:
            next(running)
        except StopIteration as done:
            result: RunResult = done.value
            return result


def expert(name: str, weight: float = 1.0) -> ForcedExpert:
    return ForcedExpert(Reference.parse(f"acme/{name}"), weight)


@pytest.mark.parametrize(
    ("model", "experts"),
    [
        ("tiny", ()),
        ("acme/sql", (expert("sql"),)),
        ("acme/json:0.5+acme/dates", (expert("json", 0.5), expert("dates"))),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_every_turn_is_answered_as_run_answers_it(
    served: ServerHarness,
    engine: LocalEngine,
    model: str,
    experts: tuple[ForcedExpert, ...],
    streams: bool,
) -> None:
    turns = [("system", "Be brief."), ("user", "Sort: 3, 1, 2")]
    ask: dict[str, Any] = {"model": model, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}
    for prompt in ("And backwards?", "Once more."):
        wanted = alone(engine, turns, experts)
        sent: Any = [{"role": role, "content": content} for role, content in turns[1:]]
        with make_client(served) as client:
            message = _asked(client, streams, system="Be brief.", messages=sent, **ask)
        text = "".join(block.text for block in message.content if isinstance(block, TextBlock))
        read = message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0)
        assert text == wanted.generated.text
        assert message.usage.output_tokens == len(wanted.generated.tokens)
        assert read == wanted.prompt_tokens
        turns += [("assistant", text or "?"), ("user", prompt)]


def _asked(client: anthropic.Anthropic, streams: bool, **ask: Any) -> anthropic.types.Message:
    if not streams:
        return client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        return stream.get_final_message()
