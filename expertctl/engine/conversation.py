"""A conversation with one engine: its turns, and the experts that answer the next one.

Each message is routed again unless experts are named. Where routing finds none, the base answers;
the experts of the previous turn stay only for a short or referring message. The engine keeps
computed KV as far as it has room, and reuses it for turns with the same plan. A cancelled answer
stays in the conversation as far as it was generated.
"""

import uuid
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from expertctl.digest import Digest
from expertctl.engine.generation import CancelCheck, never_cancelled
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import (
    FileExpert,
    NamedExpert,
    RunRequest,
    SavedConversation,
    parse_expert,
)
from expertctl.engine.result import RunResult
from expertctl.engine.text.prompt import ConversationMessage
from expertctl.errors import NotFoundError
from expertctl.routing.plan import Plan
from expertctl.routing.request import check_request
from expertctl.routing.session import KEPT_REASON
from expertctl.user_request import SamplingOverrides, UserMessage

_PLACEHOLDER_PROMPT = "?"
"""Named experts do not depend on the prompt."""


class AnsweredTurn(Protocol):
    """What a conversation reads of its turns; a server may have answered the first ones."""

    @property
    def prompt(self) -> str:
        """What the user wrote, without body and template."""

    @property
    def plan(self) -> Plan | None:
        """The plan that answered; None if it is not one of this version."""

    @property
    def has_messages(self) -> bool:
        """Whether later turns read it."""

    def iter_messages(self) -> Iterator[ConversationMessage]:
        """Yield the messages that later turns read."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A message of the user and its result."""

    message: UserMessage
    result: RunResult
    replanned: bool
    """Whether the plan differs from that of the previous turn, whose KV was then of no use.

    KV kept from earlier turns with this plan may have been reused: see ``kv_reused_tokens``."""

    @property
    def prompt(self) -> str:
        """What the user wrote, without body and template."""
        return self.message.prompt

    @property
    def plan(self) -> Plan:
        """The plan that answered."""
        return self.result.planned.result.plan

    @property
    def interrupted(self) -> bool:
        """Whether the answer was cancelled before its end."""
        return self.result.generated.finish_reason == "cancelled"

    @property
    def kept_experts(self) -> bool:
        """Whether the experts were chosen only because they answered the previous turn."""
        return any(expert.reason == KEPT_REASON for expert in self.plan.experts)

    @property
    def has_messages(self) -> bool:
        """Whether later turns read it: not if it was cancelled before the first piece."""
        return bool(self.result.generated.text) or not self.interrupted

    def iter_messages(self) -> Iterator[ConversationMessage]:
        """Yield the messages that later turns read."""
        if self.has_messages:
            yield ConversationMessage("user", self.message.text())
            yield ConversationMessage("assistant", self.result.generated.text)


class Conversation:
    """The owner of its turns; several conversations may share an engine."""

    def __init__(self, engine: LocalEngine, pattern: RunRequest) -> None:
        """Start without turns. Each request is a copy of ``pattern`` with its own prompt.

        The template of the pattern's message is applied to every prompt. With a template, its body
        is part of every prompt; without one, it follows only the first prompt.
        """
        self.turns: list[AnsweredTurn] = []
        self.system = ""
        """The system message of all turns from now on, if not empty."""
        self._engine, self._pattern = engine, pattern
        self._restored = SavedConversation()
        self._key = uuid.uuid4().hex
        self._before: Plan | None = None
        self._named: tuple[Digest, ...] = ()

    @property
    def current_experts(self) -> tuple[Digest, ...]:
        """The experts that answer: those that were named, else those of the last turn."""
        last = self._before.experts if self._before else ()
        return self._named or tuple(expert.content_digest for expert in last)

    @property
    def base(self) -> str | None:
        """The base of the last turn, else the requested one, if any."""
        last = self.turns[-1].plan if self.turns else None
        return last.base if last else self._pattern.base

    @property
    def saved(self) -> SavedConversation:
        """What `restore` takes; without the plan if experts of it are not installed."""
        from_files = any(isinstance(expert, FileExpert) for expert in self._pattern.experts)
        return SavedConversation(self.messages, None if from_files else self._before)

    @property
    def messages(self) -> tuple[ConversationMessage, ...]:
        """The system message, if any, and all turns."""
        turns = (message for turn in self.turns for message in turn.iter_messages())
        whole = SavedConversation((*self._restored.messages, *turns))
        return whole.with_system(self.system).messages

    @property
    def sampling(self) -> SamplingOverrides:
        """The sampling settings that the user gave."""
        return self._pattern.route.sampling

    @property
    def seed(self) -> int | None:
        """The seed that the user gave."""
        return self._pattern.route.seed

    def set_sampling(self, sampling: SamplingOverrides, *, seed: int | None) -> None:
        """Generate with these settings from now on.

        Raises:
            UsageError: when one of them is outside its limits, or they contradict each other.
        """
        route = replace(self._pattern.route, sampling=sampling, seed=seed)
        check_request(replace(route, prompt=_PLACEHOLDER_PROMPT))
        self._pattern = replace(self._pattern, route=route)

    def send(
        self, prompt: str, *, cancelled: CancelCheck = never_cancelled
    ) -> Generator[str, None, Turn]:
        """Answer a prompt: yield text as it becomes final, return the turn.

        A turn that fails, or whose generator is closed, leaves the conversation unchanged.

        Raises:
            ExpertError: as `LocalEngine.run` does.
        """
        return (yield from self._send(prompt, seed=self.seed, cancelled=cancelled))

    def retry(self, *, cancelled: CancelCheck = never_cancelled) -> Generator[str, None, Turn]:
        """Answer the last prompt again, with another seed, in place of the last answer.

        A turn that fails, or whose generator is closed, leaves the conversation unchanged.

        Raises:
            NotFoundError: when there is no answer of this conversation yet.
            ExpertError: as `LocalEngine.run` does.
        """
        if not self.turns:
            message = "there is no answer of this chat yet"
            raise NotFoundError(message, hint="send a message first")
        last, before, turn = self.turns.pop(), self._before, None
        if before is not None:  # else experts are chosen anew
            self._before = self.turns[-1].plan if self.turns else self._restored.plan
        try:
            turn = yield from self._send(last.prompt, seed=None, cancelled=cancelled)
        finally:
            if turn is None or not turn.has_messages:
                self.turns[len(self.turns) - (turn is not None) :] = [last]
                self._before = before
        return turn

    def _send(
        self, prompt: str, *, seed: int | None, cancelled: CancelCheck
    ) -> Generator[str, None, Turn]:
        history = self.messages
        message = self._make_message(prompt, first=not any(t.has_messages for t in self.turns))
        request = replace(
            self._pattern,
            route=replace(self._pattern.route, prompt=prompt, seed=seed),
            cache_key=self._key,
            message=message,
            history=history,
            before=self._before,
        )
        result = yield from self._engine.run(request, cancelled=cancelled)
        plan = result.planned.result.plan
        last = self.turns[-1].plan if self.turns else plan
        turn = Turn(message, result, last is None or last.identity != plan.identity)
        self.turns.append(turn)
        self._before = plan
        return turn

    def use_named(self, texts: Sequence[str]) -> Plan:
        """Answer with the experts that ``--expert`` would name so; raises as `use_experts`."""
        return self.use_experts([parse_expert(text) for text in texts])

    def use_experts(self, experts: Sequence[NamedExpert]) -> Plan:
        """Answer with these experts from now on; return the plan for them.

        Raises:
            ExpertError: when they cannot be planned; the previous experts stay.
        """
        route = replace(self._pattern.route, base_alone=False)
        pattern = replace(self._pattern, route=route, experts=tuple(experts))
        asked = replace(pattern.route, prompt=_PLACEHOLDER_PROMPT)
        plan = self._engine.plan(replace(pattern, route=asked)).result.plan
        self._pattern = pattern
        self._named = tuple(expert.content_digest for expert in plan.experts)
        return plan

    def use_base_only(self) -> None:
        """Answer with the base alone from now on."""
        route = replace(self._pattern.route, base_alone=True)
        self._pattern = replace(self._pattern, route=route, experts=())
        self._named, self._before = (), None

    def use_automatic_routing(self) -> None:
        """Choose experts for each message from now on; those of the last turn do not stay."""
        route = replace(self._pattern.route, base_alone=False)
        self._pattern = replace(self._pattern, route=route, experts=())
        self._named, self._before = (), None

    def reset(self) -> None:
        """Drop all turns and their cached KV; the system message stays."""
        self._engine.forget(self._key)
        self.turns.clear()
        self._restored, self._before = SavedConversation(), None

    def restore(self, saved: SavedConversation) -> None:
        """Continue a saved conversation in place of all turns."""
        self.reset()
        self.system = saved.system
        self._restored, self._before = SavedConversation(saved.turns, saved.plan), saved.plan

    def add_turns(self, turns: Iterable[AnsweredTurn]) -> None:
        """Continue after turns that were answered elsewhere."""
        for turn in turns:
            self.turns.append(turn)
            self._before = turn.plan

    def _make_message(self, prompt: str, *, first: bool) -> UserMessage:
        given = self._pattern.message
        body = given.body if first or given.template is not None else None
        return UserMessage(prompt=prompt, body=body, template=given.template)
