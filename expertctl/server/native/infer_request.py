"""The bodies of ``/v1/route``, ``/v1/infer`` and ``/v1/jobs``.

A field that is not listed here is ignored and reported, or refused where it would change what the
answer is; ``/v1/route`` refuses all of them. Experts are named by reference or digest, and must be
installed: there is no way to name a file or an address.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from expertctl.engine.message import UserMessage
from expertctl.engine.request import RunRequest
from expertctl.errors import UsageError
from expertctl.routing.presets import (
    DEFAULT_MAX_EXPERTS,
    LIMITS,
    MAX_PROMPT_CHARACTERS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingWishes,
)
from expertctl.routing.request import RouteRequest, check_request, parse_forced, parse_target
from expertctl.server.caller import Caller, cache_key_of
from expertctl.server.deadline import TimeoutMs
from expertctl.server.field_error import FieldError
from expertctl.server.json_instruction import json_instruction, shows_form
from expertctl.server.post_processing.response_format import ResponseFormat
from expertctl.server.sampling_fields import within

MAX_EXCLUDED = 100
_MAX_CONTEXT = 2**31
_MAX_METADATA = 16
_NAMED_BY = "experts are named by force_experts"
_ONE_PROMPT = "this call takes a prompt; ask for a chat completion"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("model", "expert", "experts", "force_expert", "plan"), _NAMED_BY),
    **dict.fromkeys(("exclude", "exclude_expert"), "experts are excluded by exclude_experts"),
    **dict.fromkeys(
        ("messages", "system", "tools", "tool_choice", "functions", "suffix"), _ONE_PROMPT
    ),
    "base": "a server has one base",
}
"""Unknown fields of ``/v1/infer`` without which the answer would be another one, and why."""
_Named = TypeVar("_Named")


Text = Annotated[str, Meta(max_length=MAX_PROMPT_CHARACTERS)]
Expert = Annotated[str, Meta(min_length=1, max_length=512, examples=["acme/sql", "acme/sql:0.5"])]
Stop = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Key = Annotated[str, Meta(min_length=1, max_length=512)]
_MetadataKey = Annotated[str, Meta(max_length=64)]


class RouteFields(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a plan depends on: the body of ``/v1/route``."""

    prompt: Annotated[Text, Meta(min_length=1)]
    temperature: Annotated[float, within("temperature")] | None = None
    max_tokens: Annotated[int, within("max_tokens")] | None = None
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, within("top_k")] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty")] | None = None
    force_experts: Annotated[list[Expert], Meta(max_length=int(LIMITS["max_experts"][1]))] = []
    exclude_experts: Annotated[list[Expert], Meta(max_length=MAX_EXCLUDED)] = []
    max_experts: Annotated[int, within("max_experts")] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)] | None = None
    seed: Annotated[int, within("seed")] | None = None

    def route(self) -> RouteRequest:
        """Return the request for a route, without forced experts.

        Raises:
            UsageError: when fields do not fit together.
            FieldError: when an expert is named wrongly.
        """
        most = self.max_experts
        request = RouteRequest(
            prompt=self.prompt,
            exclude=_each("exclude_experts", self.exclude_experts, parse_target),
            max_experts=DEFAULT_MAX_EXPERTS if most is None else most,
            seed=self.seed,
            wishes=self._wishes(),
        )
        check_request(request)
        return request

    def planned(self) -> RunRequest:
        """Return the request that a plan is made for; raises as `route` does."""
        return RunRequest(
            message=UserMessage(prompt=self.prompt),
            route=self.route(),
            experts=_each("force_experts", self.force_experts, parse_forced),
        )

    def _wishes(self) -> SamplingWishes:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        return SamplingWishes(
            temperature=self.temperature,
            max_tokens=self.max_tokens,
            top_p=self.top_p,
            top_k=self.top_k,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            stop=None if stop is None else tuple(stop),
        )


class InferRequest(RouteFields, frozen=True, kw_only=True):
    """What an answer depends on, and how it is wanted: the body of ``/v1/infer``."""

    template: Text | None = None
    body: Text | None = None
    context_size: Annotated[int, Meta(ge=1, le=_MAX_CONTEXT)] | None = None
    response_format: ResponseFormat | None = None
    user_id: Key | None = None
    session_id: Key | None = None
    cache_key: Key | None = None
    metadata: Annotated[dict[_MetadataKey, Key], Meta(max_length=_MAX_METADATA)] | None = None
    priority: Annotated[int, within("priority")] | None = None
    timeout_ms: TimeoutMs | None = None
    stream: bool = False

    def instruction(self) -> str | None:
        """Return what the model is told of the form of the JSON that is asked for, if anything.

        A template says itself what the model reads, so nothing is added to one.
        """
        schema = self.response_format and self.response_format.shown_schema
        if not schema or self.template is not None:
            return None
        return (
            None
            if shows_form((self.prompt, self.body or ""), schema)
            else (json_instruction(schema))
        )

    def asked(self, caller: Caller, *, instruction: str | None = None) -> RunRequest:
        """Return the request that is answered; the message ends with the instruction, if any.

        Raises:
            UsageError: when fields do not fit together.
            FieldError: when an expert is named wrongly.
        """
        body = "\n\n".join(filter(None, (self.body, instruction))) if instruction else self.body
        message = UserMessage(prompt=self.prompt, body=body, template=self.template)
        message.text()
        return RunRequest(
            message=message,
            route=self.route(),
            experts=_each("force_experts", self.force_experts, parse_forced),
            context_size=self.context_size,
            cache_key=self._cache_key(caller),
        )

    def _cache_key(self, caller: Caller) -> str:
        metadata = self.metadata or {}
        return cache_key_of(
            caller,
            self.cache_key,
            self.session_id,
            metadata.get("cache_key"),
            metadata.get("session_id"),
            self.user_id,
        )


def _each(field: str, texts: list[str], read: Callable[[str], _Named]) -> tuple[_Named, ...]:
    return tuple(_one(f"{field}[{n}]", text, read) for n, text in enumerate(texts))


def _one(field: str, text: str, read: Callable[[str], _Named]) -> _Named:
    try:
        return read(text)
    except UsageError as error:
        raise FieldError(f"{field}: {error.message}", field=field, hint=error.hint) from error
