"""`MessageRequest` and `CountRequest`: bodies of requests, with the fields of the published API.

A field that would change the answer, but is not implemented here, is accepted only with its
neutral value. The last group of fields is our own, as in the other APIs of the server.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.routing.presets import MAX_STOP_CHARACTERS, MAX_STOPS
from expertctl.server.anthropic.content_block import CacheControl, Texts
from expertctl.server.anthropic.conversation import Turn
from expertctl.server.anthropic.tool import MAX_TOOLS, Choice, OfferedTool
from expertctl.server.deadline import TimeoutMs
from expertctl.server.field_error import FieldError
from expertctl.server.sampling_fields import TopK, within

MAX_TURNS = 10_000
LEAST_THINKING = 1024
_MAX_KEY = 512

_Key = Annotated[str, Meta(max_length=_MAX_KEY)]
_Display = Literal["summarized", "omitted"]


class _Thinking(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """Whether a model thinks before it answers, and whether that is shown."""


class ThinkingEnabled(_Thinking, frozen=True, tag="enabled"):
    """It does; how much it thinks is up to it, within ``max_tokens``."""

    budget_tokens: Annotated[int, Meta(ge=LEAST_THINKING)]
    display: _Display | None = None


class ThinkingAdaptive(_Thinking, frozen=True, tag="adaptive"):
    """It does where it sees fit."""

    display: _Display | None = None


class ThinkingDisabled(_Thinking, frozen=True, tag="disabled"):
    """It does not."""


Thinking = ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled


class JsonFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema that an answer is checked against."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How an answer should be."""

    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None
    format: JsonFormat | None = None


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    """Who the request is made for: texts are kept for each of them apart."""

    user_id: _Key | None = None


class CountRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose tokens are counted."""

    model: Annotated[str, Meta(min_length=1)]
    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_TURNS)]
    system: Texts | None = None
    tools: Annotated[list[OfferedTool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: Choice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: CacheControl | None = None
    speed: Literal["standard"] | None = None

    @property
    def thinks(self) -> bool:
        """Whether the model is to think before it answers."""
        return isinstance(self.thinking, ThinkingEnabled | ThinkingAdaptive)

    @property
    def shows_thinking(self) -> bool:
        """Whether what it thought is part of the answer."""
        match self.thinking:
            case ThinkingEnabled(display=display) | ThinkingAdaptive(display=display):
                return display != "omitted"
            case _:
                return False


class MessageRequest(CountRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A conversation whose next turn is asked for."""

    max_tokens: Annotated[int, within("max_tokens")]
    stream: bool | None = None
    stop_sequences: (
        Annotated[
            list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]],
            Meta(max_length=MAX_STOPS),
        ]
        | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    top_k: TopK | None = None
    metadata: Metadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    container: None = None
    inference_geo: None = None
    diagnostics: None = None

    seed: Annotated[int, within("seed")] | None = None
    priority: Annotated[int, within("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    cache_key: _Key | None = None
    session_id: _Key | None = None
    exclude_experts: Annotated[list[str], Meta(max_length=100)] | None = None
    max_experts: Annotated[int, within("max_experts")] | None = None


def check_thinking(request: MessageRequest) -> None:
    """Refuse a thinking budget that is not below ``max_tokens``.

    Raises:
        FieldError: naming the budget.
    """
    thinking = request.thinking
    if isinstance(thinking, ThinkingEnabled) and thinking.budget_tokens >= request.max_tokens:
        field = "thinking.budget_tokens"
        raise FieldError(f"{field}: it must be less than max_tokens", field=field)
