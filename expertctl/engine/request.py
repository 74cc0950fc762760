"""What a caller asks the engine: a message, experts from the store or from files, and limits."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from expertctl.engine.text.prompt import ChatEnd, ConversationMessage, RawPrompt, UserMessage
from expertctl.package.read import is_file_name
from expertctl.routing.plan import Plan, SavedPlan
from expertctl.routing.request import ForcedExpert, RouteRequest, parse_forced, parse_weight
from expertctl.schema.strict_json import JsonValue

_WEIGHT = r"(?::(?P<weight>[^:/\\]*))?"
_PACKAGE = re.compile(rf"(?P<path>.*\.expert){_WEIGHT}", re.DOTALL)
_WEIGHED = re.compile(rf"(?P<path>.*?){_WEIGHT}", re.DOTALL)


@dataclass(frozen=True, slots=True)
class FileExpert:
    """An expert that the user names by its ``.expert`` file, and its weight."""

    path: Path
    weight: float = 1.0


NamedExpert = ForcedExpert | FileExpert
OnBudget = Literal["refuse", "fewer", "queue"]
"""What is done when a plan does not fit: refuse it, drop experts, or wait for other runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """One prompt to be answered.

    ``route`` says what is wanted of the plan, with nothing forced; ``experts`` are forced, in
    order, from the store or from files. A ``saved`` plan says all that itself.

    In a conversation ``history`` stands before the message, and the experts of the plan ``before``
    answer again when routing finds none. What is computed for it is kept for the next request of
    the same ``cache_key``. A conversation that does not end with a user's turn is given whole, as
    ``turns``: it is read instead, and the message is only what it is routed by.
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
    variables: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the chat template is given besides: ``tools``, say."""
    chat_end: ChatEnd = "new_turn"
    """Whether the answer is a new turn, or continues the last message."""
    raw: RawPrompt | None = None
    """The prompt where no chat template reads it; the message is only what it is routed by."""
    context_size: int | None = None
    """How many tokens prompt and answer may have together; never more than the base reads."""
    before: Plan | None = None
    cache_key: str | None = None
    on_budget: OnBudget = "refuse"
    trace: bool = False
    """Whether the time of each layer and the allocations of tokens are wanted, too."""

    @property
    def messages(self) -> tuple[ConversationMessage, ...]:
        """The conversation, up to the message that is to be answered.

        Raises:
            UsageError: when the message is empty, too long or not text.
        """
        return self.turns or (*self.history, ConversationMessage("user", self.message.text()))


def parse_expert(text: str) -> NamedExpert:
    """Read ``REF[:weight]``, ``sha256:<hex>[:weight]`` or ``FILE[:weight]``.

    Raises:
        UsageError: when it is none of them.
    """
    match = _PACKAGE.fullmatch(text) or _WEIGHED.fullmatch(text)
    if match is None or text.startswith("sha256:") or not is_file_name(match["path"]):
        return parse_forced(text)
    weight = 1.0 if match["weight"] is None else parse_weight(match["weight"], text)
    return FileExpert(Path(match["path"]), weight)
