"""``run --engine transformers``: one expert on one base through transformers and PEFT.

Slow, and only for what our own decoder does not run. Sampling, stop strings, templates and the
result are the same; so is what is demanded of a package. The memory that it takes is an estimate,
entered into the budget before anything is loaded, and given back when the text is written.
"""

import inspect
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.compat_adapter import attach, float_bytes
from expertctl.engine.compat_base import CompatBase, load_model
from expertctl.engine.context import FittedPrompt
from expertctl.engine.decoder import DecodeResult, PrefillResult
from expertctl.engine.experts import ExpertSource
from expertctl.engine.generate import Cancelled, Generated, Reading, Writer, generate
from expertctl.engine.tiers import Tier, Tiers
from expertctl.engine.trace import Trace, TracedReading
from expertctl.errors import IncompatibleError, UsageError
from expertctl.routing.plan import Plan
from expertctl.routing.planner import Planned
from expertctl.routing.request import RouteRequest

SLOW = "transformers and PEFT made the text: slowly, and with one expert at most"
ESTIMATE = "what memory they took is an estimate"


class TransformersReading:
    """A model of transformers in the middle of one text; the owner of its keys and values."""

    def __init__(self, model: Any, *, soft_prompt: Tensor | None = None) -> None:
        """Begin a text; virtual tokens stand before its first."""
        self._model, self._soft_prompt = model, soft_prompt
        self._past: Any = None
        self._length = 0
        one = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if one else {}

    @torch.inference_mode()
    def prefill(self, ids: Sequence[int]) -> PrefillResult:
        """Read a prompt.

        Raises:
            UsageError: for a prompt without tokens.
            IncompatibleError: for a token that the base does not have.
        """
        started = time.perf_counter()
        if not ids:
            raise UsageError("there is no token to read", hint="give a prompt that is not empty")
        tokens = self._checked(ids)
        if self._soft_prompt is None:
            logits = self._forward(len(ids), input_ids=tokens)
        else:
            embeddings = self._model.get_input_embeddings()(tokens)
            virtual = self._soft_prompt.to(embeddings.dtype)[None]
            joined = torch.cat([virtual, embeddings], dim=1)  # [1, virtual + tokens, width]
            logits = self._forward(joined.shape[1], inputs_embeds=joined)
        return PrefillResult(logits, len(ids), _since(started))

    @torch.inference_mode()
    def decode(self, token: int) -> DecodeResult:
        """Read one more token.

        Raises:
            IncompatibleError: for a token that the base does not have.
        """
        position, started = self._length, time.perf_counter()
        logits = self._forward(1, input_ids=self._checked([token]))
        return DecodeResult(logits, position, _since(started))

    def _forward(self, tokens: int, **inputs: Tensor) -> Tensor:
        """Run the model over some tokens behind those before: [vocab], float32."""
        self._length += tokens
        try:
            output = self._model(
                **inputs,
                attention_mask=torch.ones(1, self._length, dtype=torch.long),
                past_key_values=self._past,
                use_cache=True,
                return_dict=True,
                **self._options,
            )
        except Exception as error:  # whatever the code of an architecture raises
            raise IncompatibleError(
                f"transformers cannot run {self._model.config.model_type} so: {str(error)[:1000]}",
                hint="the base, or the expert on it, is not made for generation token by token",
            ) from error
        self._past = getattr(output, "past_key_values", None)
        if self._past is None:
            raise IncompatibleError(
                f"{self._model.config.model_type} keeps no keys and values in transformers",
                hint="use a base that generates with past_key_values",
            )
        last: Tensor = output.logits[0, -1]
        return last.float()

    def _checked(self, ids: Sequence[int]) -> Tensor:
        known = int(self._model.get_input_embeddings().weight.shape[0])
        low, high = min(ids), max(ids)
        if low < 0 or high >= known:
            raise IncompatibleError(
                f"token {low if low < 0 else high} is not among the {known} of the base",
                hint="the tokenizer belongs to another base",
            )
        return torch.tensor([list(ids)])


@dataclass(frozen=True, slots=True)
class CompatReady:
    """All that a generation through transformers needs, in memory."""

    base: CompatBase
    reading: TransformersReading
    reused: int = 0
    """Nothing is kept from one request to the next."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What a person should know of the engine and the base."""
        return (SLOW, ESTIMATE, *self.base.warnings)

    @property
    def routed(self) -> None:
        """Nothing is known of what routed experts do in transformers."""

    def generate(
        self,
        prompt: FittedPrompt,
        plan: Plan,
        cancelled: Cancelled,
        *,
        trace: Trace | None = None,
    ) -> Generator[str, None, Generated]:
        """Yield pieces of text as they become certain; return the whole at the end.

        A trace gets no layers: transformers does not show its own.
        """
        writer = Writer(
            self.base.tokenizer, plan.params, seed=plan.seed, max_tokens=prompt.max_tokens
        )
        reading: Reading = self.reading
        if trace is not None:
            reading = TracedReading(reading, lambda _: nullcontext(), trace)
        return (yield from generate(reading, prompt.ids, writer, cancelled))


@contextmanager
def compat_reading(
    base: CompatBase, expert: tuple[ExpertSource, float] | None, *, tokens: int, tiers: Tiers
) -> Iterator[TransformersReading]:
    """Borrow a model with its expert for one text of so many tokens, virtual ones included.

    Raises:
        BudgetError: when the estimate does not fit; nothing was loaded then.
        DigestError: when bytes of the expert are not those that were verified.
        IncompatibleError: when the expert does not fit the base.
    """
    buffers = base.buffer_bytes(tokens)
    name = f"the base {base.stored.name}"
    with (
        tiers.holding(Tier.DEVICE, "base", base.weight_bytes, what=name),
        tiers.holding(Tier.DEVICE, "kv", base.kv_bytes(tokens), what=_of(tokens, "KV cache")),
        tiers.holding(Tier.DEVICE, "buffers", buffers, what=_of(tokens, "buffers")),
    ):
        if expert is None:
            yield TransformersReading(load_model(base))
            return
        source, weight = expert
        with tiers.pin([source.wanted]) as [adapter]:
            size = float_bytes(adapter)
            with tiers.holding(Tier.RAM, "experts", size, what=adapter.ref):
                model = load_model(base)
                prompt = attach(model, adapter, weight=weight)
                yield TransformersReading(model, soft_prompt=prompt)


def plan_one(
    plan: Callable[[RouteRequest], Planned], request: RouteRequest, *, chosen: bool
) -> Planned:
    """Plan with one expert at most: the best, where the router chooses.

    ``chosen`` says that the user, or a saved plan, names the experts.

    Raises:
        IncompatibleError: when more than one is named.
    """
    planned = plan(request)
    experts = planned.result.plan.experts
    if len(experts) < 2:
        return planned
    if chosen:
        raise IncompatibleError(
            f"{len(experts)} experts cannot run together under --engine transformers: "
            f"{', '.join(expert.ref for expert in experts)}",
            hint="name one that requires no other, or leave out --engine transformers",
        )
    single = plan(replace(request, max_experts=1))
    kept = {expert.content_digest for expert in single.result.plan.experts}
    left = tuple(
        f"{expert.ref} was left out: --engine transformers runs one expert"
        for expert in experts
        if expert.content_digest not in kept
    )
    warnings = (*single.result.warnings, *left)
    return replace(single, result=replace(single.result, warnings=warnings))


def _of(tokens: int, what: str) -> str:
    return f"the {what} of {tokens} tokens"


def _since(started: float) -> float:
    return (time.perf_counter() - started) * 1e3
