"""What an answer holds besides its text: why it ended, its usage, and an extension of our own.

The extension is the object ``expertctl``: which experts answered and why, how long it took, what
was checked. The published API has no place for it; its clients keep unknown fields.

The documents of chat answers: a whole one, and the chunks of a stream.

The document of completions: a whole answer, or a chunk of a stream, which looks like one.

How likely the tokens of an answer were, in the form of each API call.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from expertctl.engine.generation import FinishReason
from expertctl.engine.result import RunResult
from expertctl.engine.serving.request import SampledToken, TokenLogprob
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.text.tokenizer import IncrementalDetokenizer, Tokenizer
from expertctl.routing.plan import Plan
from expertctl.schema.strict_json import JsonValue
from expertctl.server.openai.conversation import ToolCall
from expertctl.server.openapi import PlanDocument, make_reference
from expertctl.server.request_body import format_ignored_warning

OpenAIFinishReason = Literal["stop", "length", "tool_calls"]


class PromptTokens(Struct, frozen=True, kw_only=True):
    """Tokens of a prompt that were taken from what was kept."""

    cached_tokens: int


class CompletionTokens(Struct, frozen=True, kw_only=True):
    """Tokens of answers that were thought."""

    reasoning_tokens: int


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens that were read and written; a prompt with several answers was read once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokens
    completion_tokens_details: CompletionTokens | UnsetType = UNSET


class AnswerFacts(Struct, frozen=True, kw_only=True):
    """What is told of one of several answers."""

    index: int
    finish_reason: FinishReason
    stopped_by: str | None
    validation_passed: bool | None


class Extension(Struct, frozen=True, kw_only=True):
    """What is told of the answers to a prompt; plan and times are those of the first one.

    ``validation_passed`` is false when one failed, null when nothing was to be checked.
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
    """One answer, its index among the choices, and warnings from reading it."""

    index: int
    result: RunResult
    warnings: tuple[str, ...] = ()


def map_finish_reason(reason: FinishReason, *, calls: int = 0) -> OpenAIFinishReason:
    """Return why an answer ended; one that was cut off, for any reason, is ``length``."""
    if reason != "stop":
        return "length"
    return "tool_calls" if calls else "stop"


def build_usage(jobs: Sequence[Sequence[RunResult]], *, reasoning: int = 0) -> Usage:
    """Return the ``usage`` of jobs; ``thought`` tokens are reported separately, if any."""
    prompt = sum(results[0].prompt_tokens for results in jobs)
    cached = sum(results[0].kv_reused_tokens for results in jobs)
    written = sum(len(one.generated.tokens) for results in jobs for one in results)
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
    """The usage of answers that are being written."""

    prompt: int = 0
    cached: int = 0
    generated: dict[int, int] = field(default_factory=dict)
    """Index of an answer → how many tokens it has so far."""

    def count_prompt(self, *, prompt: int, cached: int) -> None:
        """Count a prompt, and how much of it was read before."""
        self.prompt += prompt
        self.cached += cached

    def usage(self) -> Usage:
        """Return what was read and written until now."""
        written = sum(self.generated.values())
        return Usage(
            prompt_tokens=self.prompt,
            completion_tokens=written,
            total_tokens=self.prompt + written,
            prompt_tokens_details=PromptTokens(cached_tokens=self.cached),
        )


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
    """Return a fingerprint: if it differs, the same request and seed may give another answer."""
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
    """Return False if a check failed, None if nothing was checked."""
    known = [outcome for outcome in outcomes if outcome is not None]
    return all(known) if known else None


class TokenScore(Struct, frozen=True, kw_only=True):
    """A token, how likely it was, and its bytes, where they are known."""

    token: str
    logprob: float
    bytes: list[int] | None


class DrawnScore(TokenScore, frozen=True, kw_only=True):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[TokenScore]


class ChatLogprobs(Struct, frozen=True, kw_only=True):
    """How likely the tokens of an answer were."""

    content: list[DrawnScore]
    refusal: None


class ChatMessage(Struct, frozen=True, kw_only=True):
    """What a model said, thought and called."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(Struct, frozen=True, kw_only=True):
    """One of the answers."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason


class ChatCompletion(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion"):
    """The answers to a chat call."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    expertctl: Extension


class ChunkCall(ToolCall, frozen=True, kw_only=True):
    """A call, whole, and its place among those of an answer."""

    index: int


class ChatDelta(Struct, frozen=True, kw_only=True):
    """What an answer grows by."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ChunkCall] | UnsetType = UNSET


class ChunkChoice(Struct, frozen=True, kw_only=True):
    """What one of the answers grows by; its reason to end comes last."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: OpenAIFinishReason | None


class ChatChunk(Struct, frozen=True, kw_only=True, tag_field="object", tag="chat.completion.chunk"):
    """One event of a stream; only the last one has ``expertctl``, and a usage that is not null."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: Extension | UnsetType = UNSET


class PromptExtensions(Struct, frozen=True, kw_only=True):
    """What is told besides of the answers to each of several prompts."""

    prompts: list[Extension]


_EXTENSION_SCHEMAS: list[JsonValue] = [
    make_reference("Extension"),
    make_reference("PromptExtensions"),
]
ExtensionDocument = Annotated[Any, Meta(extra_json_schema={"anyOf": _EXTENSION_SCHEMAS})]
"""An `Extension` or `PromptExtensions`: a union without tags, which no type can express."""


class CompletionLogprobs(Struct, frozen=True, kw_only=True):
    """How likely tokens were, and where in the text they begin.

    With ``echo`` those of the prompt come first; nothing is said of the first token of all.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    """One of the answers, or what it grows by; its reason to end comes last."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: OpenAIFinishReason | None


class Completion(Struct, frozen=True, kw_only=True, tag_field="object", tag="text_completion"):
    """The answers to a completion call; of a stream, only the last event has ``expertctl``."""

    id: str
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str | None
    usage: Usage | UnsetType | None = UNSET
    expertctl: ExtensionDocument | UnsetType = UNSET


TokenBytes = Callable[[int], bytes | None]
"""Returns the bytes of a token, if they are known."""
SpellToken = Callable[[int], str]
"""Returns how a token looks alone."""


def build_chat_logprobs(sampled: Iterable[SampledToken], token_bytes: TokenBytes) -> ChatLogprobs:
    """Return the ``logprobs`` of a choice of a chat."""
    return ChatLogprobs(content=[_score_drawn(one, token_bytes) for one in sampled], refusal=None)


class TokenOffsets:
    """Where the tokens of an answer begin in its text, counted in characters, as they come.

    The tokens of one character begin where it does, and control tokens take no room.
    """

    def __init__(self, tokenizer: Tokenizer, *, start: int = 0) -> None:
        """Begin at ``start``."""
        self._stream, self._offset = IncrementalDetokenizer(tokenizer), start

    def advance(self, token: int) -> int:
        """Return where a token begins, and go on behind it."""
        place = self._offset
        self._offset += len(self._stream.push(token))
        return place


def build_completion_logprobs(
    sampled: Sequence[SampledToken], spell: SpellToken, places: TokenOffsets
) -> CompletionLogprobs:
    """Return the ``logprobs`` of a choice of a completion, or of what it grows by."""
    return CompletionLogprobs(
        tokens=[spell(one.chosen.token) for one in sampled],
        token_logprobs=[one.chosen.logprob for one in sampled],
        top_logprobs=[_map_by_text(one, spell) for one in sampled],
        text_offset=[places.advance(one.chosen.token) for one in sampled],
    )


def build_prompt_logprobs(
    scores: PromptLogprobs, text: str, tokenizer: Tokenizer
) -> CompletionLogprobs:
    """Return the same for the tokens of a prompt, which stand in ``text``."""
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
    """Return the columns of a prompt with those of its continuation behind them."""
    return CompletionLogprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + second.text_offset,
    )


def _find_offsets(ids: Sequence[int], text: str, tokenizer: Tokenizer) -> list[int]:
    """Return where tokens begin in a text; a control token that it does not spell takes no room.

    Where a tokenizer changes a text, by lower case say, other tokens take the room of their own
    characters.
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
    """Return the logprobs of the likeliest tokens and of the drawn one, by spelling."""
    return {spell(one.token): one.logprob for one in (sampled.chosen, *sampled.likeliest)}
