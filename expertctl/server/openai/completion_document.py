"""The document of completions: a whole answer, or a chunk of a stream, which looks like one."""

from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from expertctl.schema.strict_json import JsonValue
from expertctl.server.documents import reference
from expertctl.server.openai.outcome import EndReason, Extension, Usage


class PromptExtensions(Struct, frozen=True, kw_only=True):
    """What is told besides of the answers to each of several prompts."""

    prompts: list[Extension]


_EITHER: list[JsonValue] = [reference("Extension"), reference("PromptExtensions")]
Told = Annotated[Any, Meta(extra_json_schema={"anyOf": _EITHER})]
"""An `Extension` or `PromptExtensions`: a union without tags, which no type can express."""


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """How likely tokens were, and where in the text they begin.

    With ``echo`` those of the prompt come first; nothing is said of the first token of all.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One of the answers, or what it grows by; its reason to end comes last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: EndReason | None


class Completion(Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    """The answers to a completion call; of a stream, only the last event has ``expertctl``."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: Told | UnsetType = UNSET
