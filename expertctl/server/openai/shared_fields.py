"""The fields of both calls: how tokens are drawn, whose cache is used, how long it may take.

The last group is our own. A field that is listed neither here nor in the call is refused.
"""

from typing import Annotated

from msgspec import Meta, Struct

from expertctl.engine.stop import StopRules
from expertctl.routing.presets import (
    DEFAULT_MAX_EXPERTS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingWishes,
)
from expertctl.routing.request import RouteRequest, Target, check_request, parse_target
from expertctl.server.deadline import TimeoutMs
from expertctl.server.model_name import Choice
from expertctl.server.sampling_fields import (
    MinTokens,
    StopTokenIds,
    TopK,
    stop_rules_of,
    top_k_of,
    top_p_of,
    within,
)

MAX_TEXTS = 128
_MAX_KEY = 512
_MAX_SEED = 2**53

Key = Annotated[str, Meta(max_length=_MAX_KEY)]
Tokens = Annotated[int, within("max_tokens")]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream holds besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk holds the usage so far, where ``include_usage`` is given."""
    include_obfuscation: bool | None = None


class SharedFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions have in common."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, within("temperature")] | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    user: Key | None = None
    logit_bias: dict[str, float] | None = None

    priority: Annotated[int, within("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    cache_key: Key | None = None
    session_id: Key | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    exclude_experts: Annotated[list[str], Meta(max_length=100)] | None = None
    max_experts: Annotated[int, within("max_experts")] | None = None

    @property
    def texts(self) -> int:
        """How many answers there are to a prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether the last chunk of a stream holds the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def with_running_usage(self) -> bool:
        """Whether every chunk of a stream holds the usage so far."""
        options = self.stream_options
        return self.with_usage and options is not None and bool(options.continuous_usage_stats)


def route_of(
    fields: SharedFields, prompt: str, choice: Choice, *, max_tokens: int | None
) -> RouteRequest:
    """Return the request for a route.

    Raises:
        UsageError: when fields do not fit together, or an expert is named wrongly.
    """
    most = fields.max_experts
    route = RouteRequest(
        prompt=prompt,
        exclude=_excluded(fields),
        base_alone=choice.base_alone,
        seed=None if fields.seed is None else fields.seed % _MAX_SEED,
        wishes=wishes_of(fields, max_tokens=max_tokens),
        max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
    )
    check_request(route)
    return route


def wishes_of(fields: SharedFields, *, max_tokens: int | None) -> SamplingWishes:
    """Return what a request says of how tokens are drawn.

    What it does not give is decided by the experts, the base and the preset of the task, for every
    model alike.
    """
    return SamplingWishes(
        temperature=fields.temperature,
        top_p=top_p_of(fields.top_p),
        top_k=top_k_of(fields.top_k),
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        max_tokens=max_tokens,
        stop=_stops(fields.stop),
    )


def stop_rules(fields: SharedFields, *, max_tokens: int | None) -> StopRules:
    """Return when answers may end.

    Raises:
        FieldError: when they may not end before they have to.
    """
    return stop_rules_of(
        min_tokens=fields.min_tokens,
        ignore_eos=fields.ignore_eos,
        stop_token_ids=fields.stop_token_ids,
        max_tokens=max_tokens,
    )


def _excluded(fields: SharedFields) -> tuple[Target, ...]:
    return tuple(parse_target(text) for text in fields.exclude_experts or ())


def _stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)
