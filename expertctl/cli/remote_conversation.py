"""`RemoteConversation`: a conversation of `chat` with a running server, without the engine.

It behaves as `expertctl.engine.conversation.Conversation` does; the server applies the rules: each
message is routed again unless experts are named, and the experts of the previous turn stay only for
a short or referring message. The server keeps the KV of the conversation under its cache key.
"""

import uuid
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from expertctl.cli.output import debug
from expertctl.cli.remote import RemoteEngine
from expertctl.cli.remote_question import (
    KeptConversation,
    RemoteAnswer,
    RemoteQuestion,
    build_sampling_options,
)
from expertctl.cli.run_options import SamplingFlags
from expertctl.client.client import ExpertClient
from expertctl.client.protocol import InferOptions, RouteOptions
from expertctl.client.result import Expert, RoutePlan, RunAnswer
from expertctl.errors import (
    BaseMismatchError,
    InvalidPackageError,
    NotFoundError,
    TooLargeError,
    UnreachableError,
)
from expertctl.user_request import MAX_MESSAGES, SamplingOverrides, check_limit, check_overrides

if TYPE_CHECKING:
    from expertctl.engine.conversation import Conversation
    from expertctl.engine.request import SavedConversation
    from expertctl.engine.text.prompt import ConversationMessage
    from expertctl.routing.plan import Plan

_Answer = TypeVar("_Answer")
_PLACEHOLDER_PROMPT = "?"
"""Named experts do not depend on the prompt."""


class ServerLeftError(Exception):
    """The server does not answer this conversation as this process would: it is to go on here."""


@dataclass(frozen=True, slots=True)
class RemoteTurn:
    """A message of the user and the answer of a server."""

    message: RemoteQuestion
    remote: RemoteAnswer
    replanned: bool
    """Whether the plan differs from that of the previous turn."""

    @property
    def prompt(self) -> str:
        """What the user wrote, without body and template."""
        return self.message.prompt

    @property
    def plan(self) -> "Plan | None":
        """The plan that answered, as the engine reads it; None if it is of another version."""
        from expertctl.routing.plan import parse_plan

        with suppress(InvalidPackageError):
            return parse_plan(msgspec.json.encode({"plan": self.document["plan"]})).plan
        return None

    @property
    def answer(self) -> RunAnswer:
        """The answer."""
        return self.remote.answer

    @property
    def document(self) -> dict[str, Any]:
        """The document of ``run --json``."""
        return dict(self.remote.document)

    @property
    def has_messages(self) -> bool:
        """Whether later turns read it: not if it was cancelled before the first piece."""
        return bool(self.answer.text) or self.answer.finish_reason != "cancelled"

    def iter_messages(self) -> "Iterator[ConversationMessage]":
        """Yield the messages that later turns read, as the engine reads them."""
        from expertctl.engine.text.prompt import ConversationMessage

        if self.has_messages:
            yield ConversationMessage("user", self.message.message)
            yield ConversationMessage("assistant", self.answer.text)


class RemoteConversation:
    """The owner of its turns."""

    def __init__(
        self, engine: RemoteEngine, pattern: RemoteQuestion, sampling: SamplingFlags
    ) -> None:
        """Start without turns; each question is a copy of ``pattern`` with its own prompt."""
        self.turns: list[RemoteTurn] = []
        self.system = ""
        """The system message of all turns from now on, if not empty."""
        self.sampling, self.seed = sampling.overrides, sampling.seed
        self._engine, self._pattern = engine, pattern
        self._restored = KeptConversation()
        self._plan: dict[str, Any] | None = None
        self._named: tuple[str, ...] = ()
        self._named_digests: tuple[str, ...] = ()
        self._base_alone = bool(pattern.options.get("no_experts", False))
        self._key = uuid.uuid4().hex

    @property
    def current_experts(self) -> tuple[str, ...]:
        """The content digests of the experts that were named, else of those that answered last."""
        last = (self._plan or {}).get("experts", ())
        return self._named_digests or tuple(one["content_digest"] for one in last)

    @property
    def described(self) -> str:
        """The first server that may answer, as messages name it."""
        return self._engine.places[0].described

    @property
    def is_named(self) -> bool:
        """Whether the user named the server."""
        return self._engine.is_named

    @property
    def saved(self) -> KeptConversation:
        """The system message, if any, all turns, and the last plan."""
        kept = self._restored
        for turn in self.turns:
            if turn.has_messages:
                kept = kept.add_turn(turn.message.message, turn.answer.text, None)
        return replace_plan(kept.with_system(self.system), self._plan)

    def set_sampling(self, sampling: SamplingOverrides, *, seed: int | None) -> None:
        """Generate with these settings from now on.

        Raises:
            UsageError: when one of them is outside its limits, or they contradict each other.
        """
        check_overrides(sampling)
        check_limit("seed", seed)
        self.sampling, self.seed = sampling, seed

    def send(
        self, prompt: str, *, cancelled: Callable[[], bool]
    ) -> Generator[str, None, RemoteTurn]:
        """Answer a prompt: yield text as it becomes final, return the turn.

        A turn that fails leaves the conversation unchanged.

        Raises:
            ServerLeftError: when this process is to answer it.
            ExpertError: when the server refuses it, or the connection breaks.
        """
        return (yield from self._send(prompt, seed=self.seed, cancelled=cancelled))

    def retry(self, *, cancelled: Callable[[], bool]) -> Generator[str, None, RemoteTurn]:
        """Answer the last prompt again, with another seed, in place of the last answer.

        Raises:
            NotFoundError: when there is no answer of this conversation yet.
            ExpertError: as `send` does.
        """
        if not self.turns:
            raise NotFoundError("there is no answer of this chat yet", hint="send a message first")
        last, before, turn = self.turns.pop(), self._plan, None
        if before is not None:
            self._plan = self.turns[-1].document["plan"] if self.turns else self._restored.plan
        try:
            turn = yield from self._send(last.prompt, seed=None, cancelled=cancelled)
        finally:
            if turn is None or not turn.has_messages:
                self.turns[len(self.turns) - (turn is not None) :] = [last]
                self._plan = before
        return turn

    def _send(
        self, prompt: str, *, seed: int | None, cancelled: Callable[[], bool]
    ) -> Generator[str, None, RemoteTurn]:
        question = self._build_question(prompt, seed)
        if len(question.earlier.messages) > MAX_MESSAGES and not self.is_named:
            raise ServerLeftError
        begun = self._engine.start(question, leave=(BaseMismatchError, TooLargeError))
        if begun is None:
            raise ServerLeftError
        debug(f"answered by {begun.place.described}")
        answer = yield from begun.read(cancelled)
        plan = answer.answer.plan
        replanned = bool(self.turns) and self.turns[-1].answer.plan.identity != plan.identity
        self.turns.append(RemoteTurn(question, answer, replanned))
        self._plan = answer.document["plan"]
        return self.turns[-1]

    def _build_question(self, prompt: str, seed: int | None) -> RemoteQuestion:
        pattern = self._pattern
        is_first = not any(turn.has_messages for turn in self.turns)
        options: InferOptions = {
            **pattern.options,
            **build_sampling_options(self.sampling, seed),
            "force_experts": self._named,
            "no_experts": self._base_alone,
            "cache_key": self._key,
        }
        body = pattern.body if is_first or pattern.template is not None else None
        return replace(pattern, prompt=prompt, body=body, options=options, earlier=self.saved)

    def use_named(self, texts: Sequence[str]) -> RoutePlan:
        """Answer with these experts from now on; return the plan for them.

        Raises:
            ExpertError: when they cannot be planned; the previous experts stay.
        """
        question = self._build_question(_PLACEHOLDER_PROMPT, self.seed)
        options = {**question.options, "force_experts": tuple(texts), "no_experts": False}
        known: Any = {name: options[name] for name in RouteOptions.__optional_keys__ & {*options}}
        plan = self._ask(lambda client: client.route(_PLACEHOLDER_PROMPT, **known).plan)
        self._named, self._base_alone = tuple(texts), False
        self._named_digests = tuple(expert.content_digest for expert in plan.experts)
        return plan

    def use_base_only(self) -> None:
        """Answer with the base alone from now on."""
        self.use_automatic_routing()
        self._base_alone = True

    def use_automatic_routing(self) -> None:
        """Choose experts for each message from now on; those of the last turn do not stay."""
        self._named, self._named_digests = (), ()
        self._base_alone, self._plan = False, None

    def list_experts(self) -> tuple[Expert, ...]:
        """Return the experts that are installed where the server runs and fit its base.

        Raises:
            ExpertError: when there is no answer.
        """
        return tuple(one for one in self._ask(lambda client: client.experts()) if one.fits)

    def _ask(self, call: Callable[[ExpertClient], _Answer]) -> _Answer:
        """Ask the servers in turn, that of the last base first, until one serves what is asked."""
        base = (self._plan or {}).get("base", self._pattern.options.get("base"))
        *others, last = sorted(
            self._engine.places, key=lambda one: one.record is None or one.record.base != base
        )
        for place in others:
            with (
                suppress(BaseMismatchError, UnreachableError),
                replace(self._engine, places=(place,)).open_client() as client,
            ):
                return call(client)
        with replace(self._engine, places=(last,)).open_client() as client:
            return call(client)

    def reset(self) -> None:
        """Drop all turns; the system message stays."""
        self.turns.clear()
        self._restored, self._plan, self._key = KeptConversation(), None, uuid.uuid4().hex

    def restore(self, saved: "SavedConversation") -> None:
        """Continue a saved conversation in place of all turns."""
        self.restore_document(msgspec.json.encode(saved.to_json()))

    def restore_document(self, data: bytes) -> None:
        """Continue the conversation of a document.

        Raises:
            InvalidPackageError: when it is not one.
        """
        kept = KeptConversation.parse(data, what="the conversation")
        self.reset()
        self.system, self._restored, self._plan = kept.system, kept.with_system(""), kept.plan

    def move_to(self, other: "Conversation") -> None:
        """Continue with another conversation, of an engine in this process.

        Raises:
            ExpertError: when it cannot go on there.
        """
        from expertctl.engine.request import SavedConversation

        data = msgspec.json.encode(self._restored.with_system(self.system).to_json())
        other.restore(SavedConversation.parse(data, what="the conversation"))
        other.add_turns(self.turns)
        other.set_sampling(self.sampling, seed=self.seed)
        if self._plan is None:
            other.use_automatic_routing()
        if self._named:
            other.use_named(self._named)
        elif self._base_alone:
            other.use_base_only()


def replace_plan(kept: KeptConversation, plan: dict[str, Any] | None) -> KeptConversation:
    """Return a conversation with another plan."""
    return KeptConversation(kept.messages, plan)
