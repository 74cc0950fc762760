"""A model with the plan and the KV of one answer, and the generation with them."""

from collections.abc import Generator
from dataclasses import dataclass

from expertctl.digest import Progress, ignore_progress
from expertctl.engine.adapters.compile import CompiledPlan
from expertctl.engine.backend import RunnableModel
from expertctl.engine.context_window import FittedPrompt
from expertctl.engine.generation import (
    DEFAULT_STOP_RULES,
    CancelCheck,
    GenerationOutput,
    OutputWriter,
    StopRules,
)
from expertctl.engine.kv.kv_cache import KVAllocation, KVCacheBase
from expertctl.engine.load_plan import OpenBase
from expertctl.engine.moe.counters import RoutedExpertStats
from expertctl.engine.result import GenerationTrace, TracedModel
from expertctl.engine.running_batch import TextConsumer, generate_text
from expertctl.engine.running_sequence import Consumer, RunningSequence
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.errors import CountProgress, ignore_count
from expertctl.routing.plan import Plan


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """All that a generation needs, in memory."""

    base: OpenBase
    model: RunnableModel
    kv: KVAllocation[KVCacheBase]
    plan: CompiledPlan

    @property
    def reused(self) -> int:
        """Number of prompt tokens whose KV was reused."""
        return self.kv.reused

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the base."""
        return (*self.base.warnings, *self.model.warnings)

    @property
    def kl_divergence(self) -> float | None:
        """What the base loses in int8 or int4, in nats; None where it is not measured."""
        return None if self.model.quality is None else self.model.quality.kl

    @property
    def routed(self) -> RoutedExpertStats | None:
        """Routed-expert statistics so far; None where the base has no such experts."""
        return self.model.routed

    def generate(
        self,
        prompt: FittedPrompt,
        plan: Plan,
        cancelled: CancelCheck,
        *,
        trace: GenerationTrace | None = None,
        reading: CountProgress = ignore_count,
    ) -> Generator[str, None, GenerationOutput]:
        """Yield text as it becomes final; return the complete output at the end.

        ``reading`` counts the tokens of the prompt that are read, of all that must be.
        """
        consumer, read, total = TextConsumer(cancelled), 0, len(prompt.ids) - self.reused

        def count(tokens: int) -> None:
            nonlocal read
            read += tokens
            reading(min(read, total), total)
            consumer.check_prefill(tokens)

        reading(0, total)
        sequence = self.start_sequence(consumer, prompt, plan, progress=count)
        model = self.model if trace is None else TracedModel(self.model, trace)
        generated = yield from generate_text(model, sequence)
        if generated.finish_reason != "cancelled":
            self.kv.complete((*prompt.ids, *generated.tokens))
        return generated

    def start_sequence(
        self,
        consumer: Consumer,
        prompt: FittedPrompt,
        plan: Plan,
        *,
        progress: Progress = ignore_progress,
        number: int = 0,
        rules: StopRules = DEFAULT_STOP_RULES,
        logprobs: int | None = None,
        scores: PromptLogprobs | None = None,
    ) -> RunningSequence[Consumer]:
        """Start an answer, whose prompt is read from the end of the reused KV.

        ``progress`` counts tokens of the prompt and may raise.
        """
        record = None if scores is None else scores.record
        return RunningSequence(
            consumer,
            self.model.start_session(self.kv.cache, self.plan, progress=progress, scores=record),
            OutputWriter(
                self.base.tokenizer,
                plan.params,
                seed=plan.seed + number,
                max_tokens=prompt.max_tokens,
                rules=rules,
                end_ids=prompt.end_ids,
            ),
            cache=self.kv.cache,
            unread=prompt.ids[self.reused :],
            number=number,
            logprobs=logprobs,
            scores=scores,
        )
