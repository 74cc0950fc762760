"""`CompletionRequest`: the body of a completion call, which continues texts as they stand."""

from typing import Annotated

from msgspec import Meta

from expertctl.server.openai.shared_fields import SharedFields

MAX_PROMPTS = 128
Prompts = str | Annotated[list[str | int | list[int]], Meta(min_length=1, max_length=200_000)]


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """One completion call; prompts of token numbers are known by their type and refused."""

    prompt: Prompts
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
