"""Fields that chat and completion requests share: sampling, caching, deadlines, unsupported fields.

The last group of fields is not OpenAI's. A field listed neither here nor in the request is unknown.

A field of the published API that is not implemented is accepted with its neutral value. With
another value it is ignored and reported if it only affects how an answer is stored, paid for or
sent, and refused if it would change the answer. A server with strict fields refuses both.
"""

from collections.abc import Iterator, Mapping
from typing import Annotated

from msgspec import Meta, Struct

from expertctl.engine.generation import StopRules
from expertctl.http.operation import FieldError
from expertctl.reference import parse_target
from expertctl.routing.request import DEFAULT_MAX_EXPERTS, RouteRequest, check_request
from expertctl.server.request_body import (
    MinTokens,
    StopTokenIds,
    TimeoutMs,
    TopK,
    field_limits,
    normalise_top_k,
    normalise_top_p,
)
from expertctl.server.settings import ModelSelection
from expertctl.user_request import MAX_STOP_CHARACTERS, MAX_STOPS, SamplingOverrides

MAX_TEXTS = 128
_MAX_KEY = 512
_MAX_SEED = 2**53

Key = Annotated[str, Meta(max_length=_MAX_KEY)]
Tokens = Annotated[int, field_limits("max_tokens")]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """What a stream contains besides the text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """Whether every chunk contains the usage so far, with ``include_usage``."""
    include_obfuscation: bool | None = None


class GenerationFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The fields that chat completions and completions share."""

    model: Annotated[str, Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_TEXTS)] | None = None
    max_tokens: Tokens | None = None
    temperature: Annotated[float, field_limits("temperature")] | None = None
    top_p: Annotated[float, field_limits("top_p")] | None = None
    presence_penalty: Annotated[float, field_limits("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, field_limits("frequency_penalty")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: int | None = None
    user: Key | None = None
    logit_bias: dict[str, float] | None = None

    priority: Annotated[int, field_limits("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    cache_key: Key | None = None
    session_id: Key | None = None
    top_k: TopK | None = None
    min_p: Annotated[float, field_limits("min_p")] | None = None
    repetition_penalty: Annotated[float, field_limits("repetition_penalty")] | None = None
    min_tokens: MinTokens | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopTokenIds | None = None
    exclude_experts: Annotated[list[str], Meta(max_length=100)] | None = None
    max_experts: Annotated[int, field_limits("max_experts")] | None = None

    @property
    def answer_count(self) -> int:
        """Number of answers to each prompt."""
        return self.n or 1

    @property
    def with_usage(self) -> bool:
        """Whether the last chunk of a stream contains the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def with_continuous_usage(self) -> bool:
        """Whether every chunk of a stream contains the usage so far."""
        options = self.stream_options
        return self.with_usage and options is not None and bool(options.continuous_usage_stats)


def build_route_request(
    fields: GenerationFields, prompt: str, choice: ModelSelection, *, max_tokens: int | None
) -> RouteRequest:
    """Return the routing request.

    Raises:
        UsageError: when fields contradict each other, or the name of an expert is malformed.
    """
    most = fields.max_experts
    route = RouteRequest(
        prompt=prompt,
        exclude=tuple(parse_target(text) for text in fields.exclude_experts or ()),
        base_alone=choice.base_alone,
        seed=None if fields.seed is None else fields.seed % _MAX_SEED,
        sampling=build_sampling_options(fields, max_tokens=max_tokens),
        max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
    )
    check_request(route)
    return route


def build_sampling_options(
    fields: GenerationFields, *, max_tokens: int | None
) -> SamplingOverrides:
    """Return the sampling options of a request; `expertctl.routing` fills in the missing ones."""
    return SamplingOverrides(
        temperature=fields.temperature,
        top_p=normalise_top_p(fields.top_p),
        top_k=normalise_top_k(fields.top_k),
        min_p=fields.min_p,
        repetition_penalty=fields.repetition_penalty,
        presence_penalty=fields.presence_penalty,
        frequency_penalty=fields.frequency_penalty,
        max_tokens=max_tokens,
        stop=_list_stops(fields.stop),
    )


def build_stop_rules(fields: GenerationFields, *, max_tokens: int | None) -> StopRules:
    """Return the stop rules of the answers.

    Raises:
        FieldError: when ``min_tokens`` exceeds ``max_tokens``.
    """
    least = fields.min_tokens or 0
    if max_tokens is not None and least > max_tokens:
        raise FieldError(
            f"min_tokens {least} is more than max_tokens {max_tokens}", field="min_tokens"
        )
    return StopRules(least, bool(fields.ignore_eos), frozenset(fields.stop_token_ids or ()))


def _list_stops(stop: str | list[str] | None) -> tuple[str, ...] | None:
    if stop is None:
        return None
    return (stop,) if isinstance(stop, str) else tuple(stop)


_NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "audio": (None,),
    "best_of": (None, 1),
    "function_call": (None,),
    "functions": (None, []),
    "logit_bias": (None, {}),
    "modalities": (None, ["text"]),
    "moderation": (None,),
    "prediction": (None,),
    "service_tier": (None, "auto", "default"),
    "store": (None, False),
    "verbosity": (None, "medium"),
    "web_search_options": (None,),
}
_IGNORED_FIELDS = frozenset({"prediction", "service_tier", "store", "verbosity"})
_REPLACEMENTS = {"function_call": "tool_choice", "functions": "tools"}


def check_unsupported(fields: GenerationFields, *, strict: bool = False) -> tuple[str, ...]:
    """Return the names of ignored fields; with ``strict`` they are refused, too.

    Raises:
        FieldError: names the first field that asks for something unsupported.
    """
    ignored = list[str]()
    for error in _find_unsupported(fields):
        if strict or error.field not in _IGNORED_FIELDS:
            raise error
        ignored.append(error.field)
    for error in _find_unsupported_stream_options(fields):
        if strict:
            raise error
        ignored.append(error.field)
    return tuple(ignored)


def _find_unsupported(fields: GenerationFields) -> Iterator[FieldError]:
    for name, values in _NEUTRAL_VALUES.items():
        value = getattr(fields, name, None)
        if not any(type(value) is type(one) and value == one for one in values):
            instead = _REPLACEMENTS.get(name)
            hint = f"use {instead}" if instead else "leave it out"
            yield FieldError.at(name, "not supported by this server", hint=hint)


def _find_unsupported_stream_options(fields: GenerationFields) -> Iterator[FieldError]:
    options = fields.stream_options
    if options is None:
        return
    if not fields.stream:
        yield FieldError.at(
            "stream_options", "they require stream", hint="set stream, or leave them out"
        )
    if options.include_obfuscation:
        field = "stream_options.include_obfuscation"
        yield FieldError.at(field, "not supported by this server")
