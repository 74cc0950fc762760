"""The documents of the OpenAI API: whole answers, stream chunks, usage and log-probabilities.

The object ``expertctl`` is an extension: the plan, times, checks and warnings. The published API
has no place for it; its clients keep unknown fields.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from expertctl.engine.generation import FinishReason
from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import SampledToken, TokenLogprob
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer
from expertctl.http.openapi import make_reference
from expertctl.routing.plan import Plan
from expertctl.schema.strict_json import JsonValue
from expertctl.server.openai.conversation import ToolCall
from expertctl.server.request_body import PlanDocument, format_ignored_warning

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Prompt tokens reused from the cache."""

    cached_tokens: int


class CompletionTokens(Struct, frozen=True, kw_only=True):
    """Reasoning tokens of the answers."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens read and generated; a prompt with several answers is counted once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class AnswerFacts(Struct, frozen=True, kw_only=True):
    """Facts about one of several answers."""

    index: int
    finish_reason: FinishReason
    stopped_by: str | None
    validation_passed: bool | None


class Extension(Struct, frozen=True, kw_only=True):
    """Facts about the answers to a prompt; plan and times are those of the first one.

    ``validation_passed`` is false if one check failed, null if nothing was checked.
    """

    job_id: str
    plan: PlanDocument
    notes: list[str]
    validation_passed: bool | None
    warnings: list[str]
    timings_ms: dict[str, float]
    answers: list[AnswerFacts]


@dataclass(frozen=True, slots=True)
class AnsweredChoice:
    """An answer, its index among the choices, and warnings from parsing it."""

    index: int
    result: RunResult
    warnings: tuple[str, ...] = ()


def map_finish_reason(reason: FinishReason, *, calls: int = 0) -> OpenAIFinishReason:
    """Return the finish reason; an answer cut off for any reason has ``length``."""
    if reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def build_usage(jobs: Sequence[Sequence[RunResult]], *, reasoning: int = 0) -> Usage:
    """Return the ``usage`` of jobs; ``reasoning`` tokens are reported separately, if any."""
    prompt = sum(results[0].prompt_tokens for results in jobs)
    cached = sum(results[0].kv_reused_tokens for results in jobs)
    written = sum(len(one.generated.tokens) for results in jobs for one in results)
    return _make_usage(prompt=prompt, cached=cached, written=written, reasoning=reasoning)


def _make_usage(*, prompt: int, cached: int, written: int, reasoning: int = 0) -> Usage:
    return Usage(
        prompt_tokens=prompt,
        completion_tokens=written,
        total_tokens=prompt + written,
        prompt_tokens_details=PromptTokens(cached_tokens=cached),
        completion_tokens_details=CompletionTokens(reasoning_tokens=reasoning)
        if reasoning
        else UNSET,
    )


@dataclass(slots=True)
class RunningUsage:
    """The usage of answers being generated, for the chunks of a stream."""

    with_usage: bool
    is_continuous: bool
    """Whether every chunk contains the usage so far."""
    prompt: int = 0
    cached: int = 0
    generated: dict[int, int] = field(default_factory=dict)
    """Index of an answer → its number of tokens so far."""

    def count_prompt(self, *, prompt: int, cached: int) -> None:
        """Add a prompt, and how many of its tokens were cached."""
        self.prompt += prompt
        self.cached += cached

    def for_chunk(self) -> Usage | UnsetType | None:
        """Return the ``usage`` of a chunk other than the last."""
        if not self.is_continuous:
            return None if self.with_usage else UNSET
        written = sum(self.generated.values())
        return _make_usage(prompt=self.prompt, cached=self.cached, written=written)


def build_extension(
    answers: Sequence[AnsweredChoice], *, ignored: Sequence[str] = (), warnings: Sequence[str] = ()
) -> Extension:
    """Return the ``expertctl`` object for the answers to one prompt."""
    first = answers[0].result
    of_answers = (text for one in answers for text in (*one.result.warnings, *one.warnings))
    return Extension(
        job_id=first.job_id,
        plan=first.planned.result.plan.to_json(),
        notes=list(first.planned.result.notes),
        validation_passed=_combine_checks(one.result.validation_passed for one in answers),
        warnings=list(dict.fromkeys((*format_ignored_warning(ignored), *warnings, *of_answers))),
        timings_ms={name: round(ms, 3) for name, ms in first.timings_ms.items()},
        answers=[_build_answer_facts(one) for one in answers],
    )


def make_fingerprint(plan: Plan) -> str:
    """Return the fingerprint: if it differs, a request with the same seed may differ, too."""
    return f"fp_{plan.identity.hex[:12]}"


def _build_answer_facts(answered: AnsweredChoice) -> AnswerFacts:
    result = answered.result
    return AnswerFacts(
        index=answered.index,
        finish_reason=result.generated.finish_reason,
        stopped_by=result.generated.stopped_by,
        validation_passed=result.validation_passed,
    )


def _combine_checks(outcomes: Iterable[bool | None]) -> bool | None:
    """Return whether all checks passed; None if nothing was checked."""
    known = [outcome for outcome in outcomes if outcome is not None]
    return all(known) if known else None


class TokenScore(Struct, frozen=True, kw_only=True):
    """A token, its log-probability, and its bytes, if known."""

    token: str
    logprob: float
    bytes: list[int] | None


class DrawnScore(TokenScore, frozen=True, kw_only=True):
    """A token of the answer, and the most likely ones at its position."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """The log-probabilities of an answer's tokens."""

    content: list[DrawnScore]
    refusal: None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """The model's text, reasoning and tool calls."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """An answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """The answers to a chat request."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    expertctl: Extension


class ChunkCall(ToolCall, frozen=True, kw_only=True):
    """A whole tool call, and its index among those of the answer."""

    index: int


class ChatDelta(Struct, frozen=True, kw_only=True):
    """An addition to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChunkCall] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """An addition to one of the answers; the finish reason comes last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None


class ChatChunk(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """An event of a stream; only the last has ``expertctl`` and the total usage."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: Extension | UnsetType = UNSET


class PromptExtensions(Struct, frozen=True, kw_only=True):
    """Facts about the answers to each of several prompts."""

    prompts: list[Extension]


_EXTENSION_SCHEMAS: list[JsonValue] = [
    make_reference("Extension"),
    make_reference("PromptExtensions"),
]
ExtensionDocument = Annotated[Any, Meta(extra_json_schema={"anyOf": _EXTENSION_SCHEMAS})]
"""An `Extension` or `PromptExtensions`: an untagged union, which no type can express."""


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """The log-probabilities of tokens, and their offsets in the text.

    With ``echo`` those of the prompt come first; the first token of all has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """An answer, or an addition to it; the finish reason comes last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None


class Completion(Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    """The answers to a completion request; in a stream, only the last event has ``expertctl``."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: ExtensionDocument | UnsetType = UNSET


TokenBytes = Callable[[int], bytes | None]
"""Returns the bytes of a token, if known."""
SpellToken = Callable[[int], str]
"""Returns the text of a single token."""


def build_chat_logprobs(sampled: Iterable[SampledToken], token_bytes: TokenBytes) -> ChatLogprobs:
    """Return the ``logprobs`` of a chat choice."""
    return ChatLogprobs(content=[_score_drawn(one, token_bytes) for one in sampled], refusal=None)


class TokenOffsets:
    """The offsets of an answer's tokens in its text, in characters.

    Several tokens of one character have its offset, and control tokens take no space.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0) -> None:
        """Start at the offset ``start``."""
        self._stream, self._offset = IncrementalDetokenizer(tokenizer), start

    def advance(self, token: int) -> int:
        """Return the offset of the next token, and move past it."""
        place = self._offset
        self._offset += len(self._stream.push(token))
        return place


def build_completion_logprobs(
    sampled: Sequence[SampledToken], spell: SpellToken, places: TokenOffsets
) -> CompletionLogprobs:
    """Return the ``logprobs`` of a completion choice, or of an addition to it."""
    return CompletionLogprobs(
        tokens=[spell(one.chosen.token) for one in sampled],
        token_logprobs=[one.chosen.logprob for one in sampled],
        top_logprobs=[_map_by_text(one, spell) for one in sampled],
        text_offset=[places.advance(one.chosen.token) for one in sampled],
    )


def build_prompt_logprobs(
    scores: PromptLogprobs, text: str, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Return the ``logprobs`` of a prompt's tokens, with offsets in ``text``."""
    spell, ids = cache(tokenizer.token_text), scores.ids
    tops: list[dict[str, float] | None] = [None]
    for place in range(1, len(ids)):
        chosen = (ids[place], scores.logprob(place) or 0.0)
        pairs = (chosen, *scores.top_logprobs(place))
        tops.append({spell(token): logprob for token, logprob in pairs})
    return CompletionLogprobs(
        tokens=[spell(token) for token in ids],
        token_logprobs=[scores.logprob(place) for place in range(len(ids))],
        top_logprobs=tops,
        text_offset=_find_offsets(ids, text, tokenizer),
    )


def join_logprobs(first: CompletionLogprobs, second: CompletionLogprobs) -> CompletionLogprobs:
    """Return the columns of ``first`` followed by those of ``second``."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _find_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the offsets of tokens; a control token not spelled in the text takes no space.

    Where a tokenizer changes the text, to lower case for example, other tokens take the space of
    their own characters.
    """
    stream, place, found = IncrementalDetokenizer(tokenizer, raw=True), 0, list[int]()
    for token in ids:
        found.append(place)
        piece = stream.push(token)
        shown = piece if text.startswith(piece, place) else piece.removeprefix(" ")
        if text.startswith(shown, place) or token not in tokenizer.control_ids:
            place = min(place + len(shown), len(text))
    return found


def _score_drawn(sampled: SampledToken, token_bytes: TokenBytes) -> DrawnScore:
    return DrawnScore(
        token=sampled.chosen.text,
        logprob=sampled.chosen.logprob,
        bytes=_list_bytes(sampled.chosen, token_bytes),
        top_logprobs=[_score_token(other, token_bytes) for other in sampled.likeliest],
    )


def _score_token(one: TokenLogprob, token_bytes: TokenBytes) -> TokenScore:
    return TokenScore(token=one.text, logprob=one.logprob, bytes=_list_bytes(one, token_bytes))


def _list_bytes(one: TokenLogprob, token_bytes: TokenBytes) -> list[int] | None:
    found = token_bytes(one.token)
    return None if found is None else list(found)


def _map_by_text(sampled: SampledToken, spell: SpellToken) -> dict[str, float]:
    """Return the logprobs of the most likely tokens and the sampled one, by text."""
    return {spell(one.token): one.logprob for one in (sampled.chosen, *sampled.likeliest)}
