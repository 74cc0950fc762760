"""The blocks that the content of a message is made of.

Only text is read. Blocks of any other kind are known by name and refused, as are fields that the
published API does not have. Cache marks change nothing: every prompt is kept as long as there is
room.
"""

from typing import Annotated, Any, Literal, cast

from msgspec import Meta, Struct

from expertctl.schema.strict_json import JsonObject
from expertctl.server.field_error import FieldError

_MAX_ID = 256
_MAX_BLOCKS = 10_000

Id = Annotated[str, Meta(min_length=1, max_length=_MAX_ID)]


class CacheControl(Struct, frozen=True, forbid_unknown_fields=True):
    """Where a prefix ends that should be kept."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(Struct, frozen=True, tag_field="type", forbid_unknown_fields=True):
    """One block."""


class TextBlock(_Block, frozen=True, tag="text"):
    """Text; what it cites is no part of it."""

    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None


class ThinkingBlock(_Block, frozen=True, tag="thinking"):
    """What a model thought before it answered."""

    thinking: str
    signature: str = ""


class RedactedThinkingBlock(_Block, frozen=True, tag="redacted_thinking"):
    """What a model thought, in a form that only another server reads."""

    data: str


class ToolUseBlock(_Block, frozen=True, tag="tool_use"):
    """A call of a tool, by the model."""

    id: Id
    name: Id
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: dict[str, Any] | None = None

    def to_json(self) -> JsonObject:
        """Return the call as templates read it."""
        arguments = cast("JsonObject", self.input)
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": arguments},
        }


class _NoText(_Block, frozen=True, forbid_unknown_fields=False):
    """A block that is not read."""


class ImageBlock(_NoText, frozen=True, tag="image"):
    """An image."""


class DocumentBlock(_NoText, frozen=True, tag="document"):
    """A document."""


class SearchResultBlock(_NoText, frozen=True, tag="search_result"):
    """A place that was found."""


NoText = ImageBlock | DocumentBlock | SearchResultBlock
Told = TextBlock | NoText
"""What a tool answers with."""


class ToolResultBlock(_Block, frozen=True, tag="tool_result"):
    """What a tool answered."""

    tool_use_id: Id
    content: str | Annotated[list[Told], Meta(max_length=_MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None


UserBlock = TextBlock | ToolResultBlock | NoText
AssistantBlock = TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | NoText
UserContent = str | Annotated[list[UserBlock], Meta(max_length=_MAX_BLOCKS)]
AssistantContent = str | Annotated[list[AssistantBlock], Meta(max_length=_MAX_BLOCKS)]
Texts = str | Annotated[list[TextBlock], Meta(max_length=_MAX_BLOCKS)]


def texts_of(content: str | list[TextBlock]) -> str:
    """Return a text, or the text of blocks, joined by line ends."""
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


def not_read(block: NoText, field: str) -> FieldError:
    """Return the error for a block that is not read."""
    what = block.__struct_config__.tag
    return FieldError(f"{field}: a block of type {what} is not read, only text is", field=field)


def told(result: ToolResultBlock, field: str) -> str:
    """Return what a tool answered; an error is marked in the text, since no template marks it.

    Raises:
        FieldError: when it contains a block that is not read.
    """
    parts = [result.content] if isinstance(result.content, str) else list[str]()
    blocks = result.content if isinstance(result.content, list) else []
    for number, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            raise not_read(block, f"{field}.content[{number}]")
        parts.append(block.text)
    text = "\n".join(parts)
    return f"Error: {text}" if result.is_error else text
