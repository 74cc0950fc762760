"""Input of the engine: a message, experts from the store or from files, and limits.

A conversation is saved as the ``messages`` of a chat request (system, user and assistant, in turn)
with the last ``plan`` beside them.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import msgspec

from expertctl.engine.text.prompt import ChatEnd, ConversationMessage, RawPrompt
from expertctl.errors import InvalidPackageError
from expertctl.package.read import is_file_name
from expertctl.routing.plan import Plan, SavedPlan, parse_plan
from expertctl.routing.request import ForcedExpert, RouteRequest, parse_forced, parse_weight
from expertctl.schema.strict_json import JsonValue
from expertctl.schema.validation import decode_json
from expertctl.user_request import UserMessage

_WEIGHT = r"(?::(?P<weight>[^:/\\]*))?"
_PACKAGE = re.compile(rf"(?P<path>.*\.expert){_WEIGHT}", re.DOTALL)
_WEIGHED = re.compile(rf"(?P<path>.*?){_WEIGHT}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileExpert:
    """An expert named by its ``.expert`` file, and its weight."""

    path: Path
    weight: float = 1.0


NamedExpert = ForcedExpert | FileExpert
OnBudget = Literal["refuse", "fewer", "queue"]
"""What happens when a plan does not fit: refuse it, drop experts, or wait for other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """A request to answer one prompt.

    ``route`` holds the routing options without forced experts; ``experts`` are forced, in order,
    from the store or from files. A ``saved`` plan replaces both.

    In a conversation ``history`` precedes the message, and the experts of the plan ``before``
    answer again when routing finds none. KV is kept for the next request with the same
    ``cache_key``. A conversation that does not end with a user's turn is passed whole, as
    ``turns``: the model reads it, and the message is used only for routing. ``samples`` are turns
    that precede the conversation where the base accepts them and they fit.
    """

    message: UserMessage
    route: RouteRequest
    experts: tuple[NamedExpert, ...] = ()
    base: str | None = None
    saved: SavedPlan | None = None
    truncate: bool = False
    verify_base: bool = False
    history: tuple[ConversationMessage, ...] = ()
    turns: tuple[ConversationMessage, ...] = ()
    samples: tuple[ConversationMessage, ...] = ()
    variables: Mapping[str, JsonValue] = field(default_factory=dict)
    """Additional variables of the chat template, such as ``tools``."""
    chat_end: ChatEnd = "new_turn"
    """Whether the answer is a new turn, or continues the last message."""
    raw: RawPrompt | None = None
    """The prompt, where no chat template is applied; the message is used only for routing."""
    context_size: int | None = None
    """Maximum number of tokens of prompt and answer; limited by the context of the base."""
    before: Plan | None = None
    cache_key: str | None = None
    on_budget: OnBudget = "refuse"
    trace: bool = False
    """Whether to record the time of each layer and the allocations of each token."""

    @property
    def messages(self) -> tuple[ConversationMessage, ...]:
        """The conversation, up to the message to answer.

        Raises:
            UsageError: when the message is empty, too long or not text.
        """
        return self.turns or (*self.history, ConversationMessage("user", self.message.text()))


class _MessageDocument(msgspec.Struct, frozen=True):
    role: Literal["system", "user", "assistant"]
    content: str


class _ConversationDocument(msgspec.Struct, frozen=True):
    messages: list[_MessageDocument]
    plan: msgspec.Raw = msgspec.Raw(b"null")


@dataclass(frozen=True, slots=True)
class SavedConversation:
    """Messages, and the plan that answered last, whose experts answer a follow-up."""

    messages: tuple[ConversationMessage, ...] = ()
    plan: Plan | None = None

    @property
    def system(self) -> str:
        """The system message; empty if there is none."""
        first = self.messages[0] if self.messages else None
        return first.content if first is not None and first.role == "system" else ""

    @property
    def turns(self) -> tuple[ConversationMessage, ...]:
        """The messages of user and assistant."""
        return tuple(message for message in self.messages if message.role != "system")

    def with_system(self, text: str) -> "SavedConversation":
        """Return the same with another system message, or with none for a blank text."""
        first = (ConversationMessage("system", text),) if text.strip() else ()
        return replace(self, messages=(*first, *self.turns))

    @classmethod
    def parse(cls, data: bytes, *, what: str, hint: str = "") -> "SavedConversation":
        """Read a document; what else it has, and a plan of another version, are ignored.

        Raises:
            InvalidPackageError: if it is not JSON, or its messages are not at most one of the
                system, then those of user and assistant in turn, the assistant's last.
        """
        try:
            saved = decode_json(data, _ConversationDocument)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise InvalidPackageError(what, [str(error)], hint=hint) from error
        turns = saved.messages[1 if saved.messages and saved.messages[0].role == "system" else 0 :]
        if [each.role for each in turns] != ["user", "assistant"] * (len(turns) // 2):
            problem = "messages: not those of a user and an assistant in turn, an answer last"
            raise InvalidPackageError(what, [problem], hint=hint)
        for number, each in enumerate(saved.messages):
            if not each.content.strip() and each.role != "assistant":
                raise InvalidPackageError(what, [f"messages[{number}] is empty"], hint=hint)
        messages = tuple(ConversationMessage(each.role, each.content) for each in saved.messages)
        with suppress(InvalidPackageError):
            return cls(messages, parse_plan(b'{"plan": ' + bytes(saved.plan) + b"}").plan)
        return cls(messages)

    def to_json(self) -> dict[str, JsonValue]:
        """Return the document, which `parse` reads."""
        messages: list[JsonValue] = [
            {"role": each.role, "content": each.content} for each in self.messages
        ]
        plan = {} if self.plan is None else {"plan": self.plan.to_json()}
        return {"messages": messages, **plan}


def parse_expert(text: str) -> NamedExpert:
    """Parse ``REF[:weight]``, ``sha256:<hex>[:weight]`` or ``FILE[:weight]``.

    Raises:
        UsageError: when it is none of them.
    """
    match = _PACKAGE.fullmatch(text) or _WEIGHED.fullmatch(text)
    if match is None or text.startswith("sha256:") or not is_file_name(match["path"]):
        return parse_forced(text)
    weight = 1.0 if match["weight"] is None else parse_weight(match["weight"], text)
    return FileExpert(Path(match["path"]), weight)
