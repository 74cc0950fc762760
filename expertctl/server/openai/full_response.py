"""The whole, unstreamed answers to chat and completion requests."""

from collections.abc import Sequence

from msgspec import UNSET

from expertctl.engine.result import RunResult
from expertctl.engine.running_sequence import SampledToken
from expertctl.server.openai.chat_request import MAX_CALLS_PER_ANSWER, ChatCall
from expertctl.server.openai.completion_request import CompletionCall
from expertctl.server.openai.conversation import CalledFunction, ToolCall
from expertctl.server.openai.response import (
    AnsweredChoice,
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    Extension,
    PromptExtensions,
    TokenOffsets,
    build_chat_logprobs,
    build_completion_logprobs,
    build_extension,
    build_prompt_logprobs,
    build_usage,
    join_logprobs,
    make_fingerprint,
    map_finish_reason,
)
from expertctl.server.output_parser import ParsedOutput
from expertctl.server.streaming import CollectedJob
from expertctl.server.tool_parser import ParsedToolCall, make_call_id


def build_chat_completion(
    call: ChatCall, collected: CollectedJob, *, reasoning_tokens: int = 0
) -> ChatCompletion:
    """Return the answer to a chat request, without choices not started before the deadline."""
    read = [call.parser_config.parse(result.generated.text) for result in collected.results]
    parts = zip(collected.results, read, collected.sampled, strict=False)
    return ChatCompletion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[_build_choice(call, index, *one) for index, one in enumerate(parts)],
        usage=build_usage([collected.results], reasoning=reasoning_tokens),
        system_fingerprint=make_fingerprint(collected.results[0].planned.result.plan),
        expertctl=build_extension(
            [
                AnsweredChoice(index, result, one.warnings)
                for index, (result, one) in enumerate(zip(collected.results, read, strict=True))
            ],
            ignored=call.ignored_fields,
            warnings=call.warnings,
        ),
    )


def build_tool_call(call: ChatCall, found: ParsedToolCall, *, index: int, number: int) -> ToolCall:
    """Return a tool call of an answer; its id is unique within the job."""
    number += index * MAX_CALLS_PER_ANSWER
    return ToolCall(
        id=make_call_id("call_", job_id=call.job.id, number=number),
        function=CalledFunction(name=found.name, arguments=found.arguments_json),
    )


def _build_choice(
    call: ChatCall,
    index: int,
    result: RunResult,
    read: ParsedOutput,
    sampled: Sequence[SampledToken],
) -> ChatChoice:
    return ChatChoice(
        index=index,
        message=_build_message(call, index, read),
        logprobs=None
        if call.job.logprobs is None
        else build_chat_logprobs(sampled, call.token_bytes),
        finish_reason=map_finish_reason(result.generated.finish_reason, calls=len(read.calls)),
    )


def _build_message(call: ChatCall, index: int, read: ParsedOutput) -> ChatMessage:
    calls = [
        build_tool_call(call, found, index=index, number=number)
        for number, found in enumerate(read.calls)
    ]
    return ChatMessage(
        role="assistant",
        content=read.text or (None if calls else ""),
        refusal=None,
        reasoning_content=read.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def build_completion(call: CompletionCall, collected: Sequence[CollectedJob]) -> Completion:
    """Return the answer to a completion request: for each prompt in order, all its answers."""
    results = [one.results for one in collected]
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[
            one
            for number, each in enumerate(collected)
            for one in _build_choices(call, number, each)
        ],
        usage=build_usage(results),
        system_fingerprint=make_fingerprint(results[0][0].planned.result.plan),
        expertctl=build_call_extension(call, results),
    )


def build_call_extension(
    call: CompletionCall, results: Sequence[Sequence[RunResult]]
) -> Extension | PromptExtensions:
    """Return the ``expertctl`` object, per prompt if there are several."""
    each = [
        build_extension(
            [AnsweredChoice(call.choice_index(number, i), r) for i, r in enumerate(one)],
            ignored=call.ignored_fields,
        )
        for number, one in enumerate(results)
    ]
    return each[0] if len(each) == 1 else PromptExtensions(prompts=each)


def _build_choices(
    call: CompletionCall, number: int, collected: CollectedJob
) -> list[CompletionChoice]:
    head = call.echoed_text(number)
    prompt = (
        None
        if collected.prompt is None
        else build_prompt_logprobs(collected.prompt, head, call.tokenizer)
    )
    return [
        CompletionChoice(
            index=call.choice_index(number, i),
            text=head + result.generated.text,
            logprobs=_build_logprobs(call, tokens, prompt, start=len(head)),
            finish_reason=map_finish_reason(result.generated.finish_reason),
        )
        for i, (result, tokens) in enumerate(
            zip(collected.results, collected.sampled, strict=False)
        )
    ]


def _build_logprobs(
    call: CompletionCall,
    sampled: Sequence[SampledToken],
    prompt: CompletionLogprobs | None,
    *,
    start: int,
) -> CompletionLogprobs | None:
    """Return the logprobs of the prompt and an answer; None if not requested.

    If the deadline passed before the whole prompt was read, there are none either.
    """
    if call.jobs[0].logprobs is None or (call.scores_prompt and prompt is None):
        return None
    places = TokenOffsets(call.tokenizer, start=start)
    scores = build_completion_logprobs(sampled, call.tokenizer.token_text, places)
    return scores if prompt is None else join_logprobs(prompt, scores)
