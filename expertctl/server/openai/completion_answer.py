"""The answers to a completion call, told in one document."""

from collections.abc import Sequence

from expertctl.engine.run_result import RunResult
from expertctl.engine.serving.job import Drawn
from expertctl.server.openai.completion_call import CompletionCall
from expertctl.server.openai.completion_document import (
    Completion,
    CompletionChoice,
    CompletionLogprobs,
    PromptExtensions,
)
from expertctl.server.openai.logprobs import (
    TextPlaces,
    completion_logprobs,
    joined,
    prompt_logprobs,
)
from expertctl.server.openai.outcome import (
    Answered,
    Extension,
    extension_of,
    fingerprint_of,
    finish_reason_of,
    usage_of,
)
from expertctl.server.openai.several_jobs import Collected


def completion(call: CompletionCall, came: Sequence[Collected]) -> Completion:
    """Return the answer to a completion call: for each prompt in order, all its answers."""
    results = [one.results for one in came]
    return Completion(
        id=call.id,
        created=call.created,
        model=call.model,
        choices=[one for number, each in enumerate(came) for one in _choices(call, number, each)],
        usage=usage_of(results),
        system_fingerprint=fingerprint_of(results[0][0].planned.result.plan),
        expertctl=told(call, results),
    )


def told(
    call: CompletionCall, results: Sequence[Sequence[RunResult]]
) -> Extension | PromptExtensions:
    """Return the ``expertctl`` object, prompt by prompt if there are several."""
    each = [
        extension_of(
            [Answered(call.index(number, i), r) for i, r in enumerate(one)], ignored=call.ignored
        )
        for number, one in enumerate(results)
    ]
    return each[0] if len(each) == 1 else PromptExtensions(prompts=each)


def _choices(call: CompletionCall, number: int, came: Collected) -> list[CompletionChoice]:
    head = call.head(number)
    prompt = None if came.prompt is None else prompt_logprobs(came.prompt, head, call.tokenizer)
    return [
        CompletionChoice(
            index=call.index(number, i),
            text=head + result.generated.text,
            logprobs=_scores(call, tokens, prompt, start=len(head)),
            finish_reason=finish_reason_of(result.generated.finish_reason),
        )
        for i, (result, tokens) in enumerate(zip(came.results, came.drawn, strict=False))
    ]


def _scores(
    call: CompletionCall,
    drawn: Sequence[Drawn],
    prompt: CompletionLogprobs | None,
    *,
    start: int,
) -> CompletionLogprobs | None:
    """Return the columns of an answer, behind those of its prompt; None if they are not wanted.

    A prompt that was not read to its end, for want of time, has none, nor has its answer then.
    """
    if call.jobs[0].logprobs is None or (call.scores_prompt and prompt is None):
        return None
    places = TextPlaces(call.tokenizer, start=start)
    scores = completion_logprobs(drawn, call.tokenizer.spell, places)
    return scores if prompt is None else joined(prompt, scores)
