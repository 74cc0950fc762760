"""`CompletionRequest`: the body of a completion call, which continues texts as they stand.

``parse_special`` is llama.cpp's name, ``add_special_tokens`` that of vLLM.
"""

from typing import Annotated

from msgspec import Meta

from expertctl.routing.presets import LIMITS
from expertctl.server.openai.shared_fields import SharedFields

MAX_PROMPTS = 128
Token = Annotated[int, Meta(ge=0, lt=2**31)]
Tokens = Annotated[list[Token], Meta(min_length=1, max_length=200_000)]
Prompts = str | Annotated[list[str | Token | Tokens], Meta(min_length=1, max_length=200_000)]


class CompletionRequest(SharedFields, frozen=True, kw_only=True):
    """One completion call; with ``max_tokens`` 0 the prompts are only read."""

    prompt: Prompts
    max_tokens: Annotated[int, Meta(ge=0, le=LIMITS["max_tokens"][1])] | None = None
    best_of: int | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    suffix: str | None = None
    parse_special: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def has_token_prompts(self) -> bool:
        """Whether a prompt is given as tokens, whose text takes a while to read."""
        prompt = self.prompt
        return not isinstance(prompt, str) and any(not isinstance(one, str) for one in prompt)

    @property
    def scores_prompt(self) -> bool:
        """Whether the log-probabilities of the prompts' tokens are wanted."""
        return bool(self.echo) and self.logprobs is not None
