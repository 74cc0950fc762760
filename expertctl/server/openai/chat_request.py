"""`ChatRequest`: the body of a chat call, every field that the published API has, and ours.

A field that would change the answer, but is not implemented here, is accepted only with its
neutral value: to ignore it silently would mislead the client.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from expertctl.server.openai.conversation import Name, Turn
from expertctl.server.openai.shared_fields import Key, SharedFields, Tokens
from expertctl.server.openai.tool import Tool, ToolChoice
from expertctl.server.post_processing.response_format import ResponseFormat

MAX_TURNS = 10_000
MAX_TOOLS = 128
_MAX_METADATA = 16
_METADATA_KEY = Annotated[str, Meta(max_length=64)]


class CacheOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How prefixes are kept: always, and as long as there is room."""

    mode: Literal["implicit"] | None = None
    ttl: Literal["30m"] | None = None


class ChatRequest(SharedFields, frozen=True, kw_only=True):
    """One chat call."""

    messages: Annotated[list[Turn], Meta(min_length=1, max_length=MAX_TURNS)]
    max_completion_tokens: Tokens | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    metadata: Annotated[dict[_METADATA_KEY, Key], Meta(max_length=_MAX_METADATA)] | None = None
    prompt_cache_key: Key | None = None
    safety_identifier: Key | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Meta(max_length=64)] | None = None

    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    """The longest time that a prefix may be kept; ours are kept for less."""
    modalities: list[Literal["text", "audio"]] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    moderation: Any = None
    prediction: Any = None
    web_search_options: Any = None
