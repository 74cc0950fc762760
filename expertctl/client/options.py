"""What can be asked of a server besides the prompt; what is left out is the server's to choose."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from expertctl.client.result import MoeActivity


class RouteOptions(TypedDict, total=False):
    """What a plan depends on."""

    temperature: float
    max_tokens: int
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    force_experts: Sequence[str]
    """``acme/sql`` or ``acme/sql:0.5``, in order; then no others answer."""
    exclude_experts: Sequence[str]
    max_experts: int
    stop: str | Sequence[str]
    seed: int


class InferOptions(RouteOptions, total=False):
    """What an answer depends on, and how it is wanted."""

    template: str
    """With ``{prompt}`` and ``{body}``, each at most once."""
    body: str
    context_size: int
    """How many tokens prompt and answer may have together."""
    response_format: Mapping[str, Any]
    """``{"type": "json"}``, ``{"type": "json_schema", "schema": {…}}``, ``{"type": "sql"}`` …"""
    user_id: str
    session_id: str
    cache_key: str
    """Whose earlier prompts may begin this one; seen by nobody with another API key."""
    metadata: Mapping[str, str]
    priority: int
    """0 to 9; 9 is served first."""
    timeout_ms: int
    """After so long the answer is what is there by then."""


class MoeOptions(TypedDict, total=False):
    """What a server is to count of its routed experts, and which profile says which stay."""

    mode: Literal["full", "update", "off"]
    """Another one begins to count again."""
    reset: bool
    """Whether to begin again in any case."""
    profile: str | Mapping[str, Any] | MoeActivity
    """A profile, or the name of the base, for what was learnt of it."""
    pin: int | str
    """So many experts of each layer stay, or, as ``"50%"``, those that half of all tokens want."""
    exchange: float
    """The share of residents that an update may exchange for others of the profile."""
