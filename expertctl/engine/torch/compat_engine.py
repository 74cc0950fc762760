"""``run --engine transformers``: one expert on one base through transformers and PEFT.

Slow, and only for bases that our own decoder does not support. Sampling, stop strings, chat
templates, the result and the checks of a package are the same. The memory is an estimate, reserved
in the budget before anything is loaded and released when the text is complete.

PEFT's layers are used, its loader is not. All input was parsed by our own readers and hashed in
memory. The configuration for PEFT is built here with exact module names, so nothing that a
publisher wrote acts as a pattern, a path or the name of a library. Afterwards everything is
counted: a tensor without a place in the model, or a place without a tensor, is an error.
"""

import inspect
import re
import time
import warnings
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.adapters.experts import ExpertSource
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import (
    AdapterStep,
    DoraTensors,
    Ia3Tensors,
    LoraTensors,
    weighted_ia3_vector,
)
from expertctl.engine.arrays import AnyArray, FloatArray, widen
from expertctl.engine.context_window import FittedPrompt
from expertctl.engine.decoding import DecodeResult, PrefillResult
from expertctl.engine.generation import (
    CancelCheck,
    GenerationOutput,
    OutputWriter,
    SequentialModel,
    measure_elapsed_ms,
)
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.result import GenerationTrace, TracedModel
from expertctl.engine.running_batch import TextConsumer, generate_text
from expertctl.engine.running_sequence import RunningSequence
from expertctl.engine.torch.compat_base import CompatBase, load_model
from expertctl.errors import CountProgress, IncompatibleError, UsageError, ignore_count
from expertctl.package.adapter import PEFT_PREFIX, truncate_problems
from expertctl.routing.plan import Plan
from expertctl.routing.planner import PlannedPrompt
from expertctl.routing.request import RouteRequest

NAME = "expert"
_LAYERS = ("lora_", "ia3_")


@dataclass(frozen=True, slots=True)
class _PeftModule:
    """The tensors of one adapted module in PEFT's names, all float32."""

    module: str
    tensors: Mapping[str, Tensor]
    rank: int = 0
    scale: float = 1.0


def attach_adapter(model: Any, adapter: LoadedAdapter, *, weight: float) -> Tensor | None:
    """Add an expert to a model; return its soft prompt, float32 [virtual tokens, hidden], if any.

    Raises:
        IncompatibleError: when PEFT does not support it, or it does not fit the model.
    """
    if weight == 0.0:  # leaving an expert out is exact, 0 * inf is not
        return None
    steps = _require_single_steps(adapter)
    prompt = _load_soft_prompt(model, adapter, weight)
    if not steps and prompt is None:
        raise IncompatibleError(f"{adapter.ref} does not fit the base: it changes no module")
    if steps:
        parts = [
            _make_peft_module(adapter.ref, module, step, weight) for module, step in steps.items()
        ]
        _inject_modules(model, adapter.ref, parts, steps)
    return prompt


def float32_adapter_bytes(adapter: LoadedAdapter) -> int:
    """Return the bytes of an expert in the model, where all its numbers are float32."""
    numbers = sum(prompt.size for prompt in adapter.soft_prompts)
    for steps in adapter.modules.values():
        numbers += sum(tensor.size for step in steps for tensor in _step_tensors(step))
    return numbers * torch.float32.itemsize


def _step_tensors(step: AdapterStep) -> tuple[FloatArray, ...]:
    match step:
        case LoraTensors():
            return (step.a, step.b)
        case DoraTensors():
            return (step.a, step.b, step.magnitude)
        case Ia3Tensors():
            return (step.vector,)


def _require_single_steps(adapter: LoadedAdapter) -> dict[str, AdapterStep]:
    """Require one step per module and one adapter kind, which is all that PEFT supports at once."""
    kinds = {type(step) for steps in adapter.modules.values() for step in steps}
    if len(kinds) > 1 or any(len(steps) > 1 for steps in adapter.modules.values()):
        raise IncompatibleError(
            f"{adapter.ref} has several adapters for the layers of the base, which PEFT cannot "
            "combine",
            hint="leave out --engine transformers where our own decoder runs the base",
        )
    return {module: steps[0] for module, steps in adapter.modules.items() if steps}


def _make_peft_module(ref: str, module: str, step: AdapterStep, weight: float) -> _PeftModule:
    match step:
        case LoraTensors(a=a, b=b, scale=scale):
            halves = {"lora_A.weight": _to_float32(a), "lora_B.weight": _to_float32(b)}
            return _PeftModule(module, halves, step.rank, scale * weight)
        case DoraTensors(a=a, b=b, magnitude=magnitude, scale=scale):
            if weight != 1.0:
                raise IncompatibleError(
                    f"{ref} is a DoRA, which PEFT supports only with weight 1",
                    hint="name it without a weight",
                )
            tensors = {"lora_A.weight": _to_float32(a), "lora_B.weight": _to_float32(b)}
            tensors["lora_magnitude_vector"] = _to_float32(magnitude)
            return _PeftModule(module, tensors, step.rank, scale)
        case Ia3Tensors(on_input=on_input):
            vector = weighted_ia3_vector(step, weight)
            shaped = vector.reshape(1, -1) if on_input else vector.reshape(-1, 1)
            return _PeftModule(module, {"ia3_l": torch.from_numpy(shaped)})


def _to_float32(numbers: FloatArray) -> Tensor:
    return torch.from_numpy(widen(numbers))


def _load_soft_prompt(model: Any, adapter: LoadedAdapter, weight: float) -> Tensor | None:
    if not adapter.soft_prompts:
        return None
    if weight != 1.0:
        raise IncompatibleError(
            f"{adapter.ref} has a soft prompt, which supports only weight 1",
            hint="name it without a weight, or leave it out",
        )
    width = int(model.get_input_embeddings().weight.shape[1])
    wrong = [prompt.shape[1] for prompt in adapter.soft_prompts if prompt.shape[1] != width]
    if wrong:
        raise IncompatibleError(
            f"{adapter.ref} does not fit the base: its soft prompt has width {wrong[0]}, the base "
            f"{width}"
        )
    return torch.cat([_to_float32(prompt) for prompt in adapter.soft_prompts])


def _inject_modules(
    model: Any, ref: str, parts: Sequence[_PeftModule], steps: Mapping[str, AdapterStep]
) -> None:
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from peft.functional import cast_adapter_dtype

    known = {name for name, _ in model.named_modules()}
    _raise_incompatible(
        ref, [f"{p.module}: the base has no such layer" for p in parts if p.module not in known]
    )
    state = {f"{PEFT_PREFIX}{p.module}.{name}": t for p in parts for name, t in p.tensors.items()}
    with _ignore_peft_warnings():
        try:
            inject_adapter_in_model(_make_peft_config(parts, steps), model, NAME)
            cast_adapter_dtype(model, NAME)  # float32, whatever the base is in, as PEFT loads
            loaded: Any = set_peft_model_state_dict(model, state, NAME)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise IncompatibleError(
                f"{ref} does not fit the base: {str(error)[:1000]}",
                hint="PEFT reports this; compare it with `expertctl inspect`",
            ) from error
    _check_all_placed(model, ref, state, loaded.unexpected_keys)
    for part in parts:
        if part.rank:
            model.get_submodule(part.module).scaling[NAME] = part.scale


def _make_peft_config(parts: Sequence[_PeftModule], steps: Mapping[str, AdapterStep]) -> Any:
    from peft import IA3Config, LoraConfig

    modules = [part.module for part in parts]
    first = next(iter(steps.values()))
    if isinstance(first, Ia3Tensors):
        inputs = [m for m, s in steps.items() if isinstance(s, Ia3Tensors) and s.on_input]
        return IA3Config(target_modules=modules, feedforward_modules=inputs, init_ia3_weights=False)
    rank = parts[0].rank
    return LoraConfig(
        r=rank,
        lora_alpha=rank,  # every scale is set afterwards, exactly
        rank_pattern={re.escape(p.module): p.rank for p in parts if p.rank != rank},
        target_modules=modules,
        use_dora=isinstance(first, DoraTensors),
        init_lora_weights=False,
    )


def _check_all_placed(
    model: Any, ref: str, state: Mapping[str, Tensor], unexpected: Sequence[str]
) -> None:
    """Check that each tensor has its place, each place its tensor, and nothing else changed."""
    placed = dict(_iter_peft_tensors(model))
    wanted = sorted(name.removeprefix(PEFT_PREFIX) for name in state)
    problems = [f"{name}: the model has no layer for it" for name in sorted(unexpected)]
    problems += [f"{n}: the expert has no tensor for it" for n in placed if n not in wanted]
    problems += [f"{name}: it was not loaded" for name in wanted if name not in placed]
    problems += [f"{n}: it has no values" for n, t in placed.items() if t.is_meta]
    _raise_incompatible(ref, problems)


def _iter_peft_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor of PEFT's layers in the model with its name in an adapter file."""
    for name, tensor in model.named_parameters():
        module, dot, rest = name.partition(f".{NAME}")
        if dot and rest in {"", ".weight"}:
            kind = module.rpartition(".")[2]
            if kind.startswith(_LAYERS):
                suffix = "" if kind == "lora_magnitude_vector" else rest
                yield f"{module}{suffix}", tensor


def _raise_incompatible(ref: str, problems: Sequence[str]) -> None:
    if problems:
        lines = "; ".join(truncate_problems(list(problems)))
        raise IncompatibleError(
            f"{ref} does not fit the base: {lines}",
            hint="the expert was made for another base, or for layers that PEFT does not adapt",
        )


@contextmanager
def _ignore_peft_warnings() -> Iterator[None]:
    """Ignore PEFT's warnings about matrices stored as [in, out]; it handles them correctly."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


SLOW = "transformers and PEFT generated the text, slowly and with at most one expert"
ESTIMATE = "their memory use is an estimate"


class TransformersSession:
    """A transformers model in the middle of one sequence; owns its keys and values."""

    def __init__(self, model: Any, *, soft_prompt: Tensor | None = None) -> None:
        """Start a sequence; the virtual tokens precede its first token."""
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
            raise UsageError("the prompt has no tokens", hint="give a prompt that is not empty")
        tokens = self._check_tokens(ids)
        if self._soft_prompt is None:
            logits = self._run_model(len(ids), input_ids=tokens)
        else:
            embeddings = self._model.get_input_embeddings()(tokens)
            virtual = self._soft_prompt.to(embeddings.dtype)[None]
            joined = torch.cat([virtual, embeddings], dim=1)  # [1, virtual + tokens, width]
            logits = self._run_model(joined.shape[1], inputs_embeds=joined)
        return PrefillResult(logits, len(ids), measure_elapsed_ms(started))

    @torch.inference_mode()
    def decode(self, token: int) -> DecodeResult:
        """Read one more token.

        Raises:
            IncompatibleError: for a token that the base does not have.
        """
        position, started = self._length, time.perf_counter()
        logits = self._run_model(1, input_ids=self._check_tokens([token]))
        return DecodeResult(logits, position, measure_elapsed_ms(started))

    def _run_model(self, tokens: int, **inputs: Tensor) -> AnyArray:
        """Run the model over tokens after those already read; return logits [vocab], float32."""
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
        except Exception as error:  # each architecture's code raises its own errors
            raise IncompatibleError(
                f"transformers cannot run {self._model.config.model_type}: {str(error)[:1000]}",
                hint="the base or the expert does not support generation token by token",
            ) from error
        self._past = getattr(output, "past_key_values", None)
        if self._past is None:
            raise IncompatibleError(
                f"{self._model.config.model_type} has no KV cache in transformers",
                hint="use a base that generates with past_key_values",
            )
        last: Tensor = output.logits[0, -1]
        return last.float().numpy()

    def _check_tokens(self, ids: Sequence[int]) -> Tensor:
        known = int(self._model.get_input_embeddings().weight.shape[0])
        low, high = min(ids), max(ids)
        if low < 0 or high >= known:
            raise IncompatibleError(
                f"token {low if low < 0 else high} is outside the vocabulary of the base, {known}",
                hint="the tokenizer belongs to another base",
            )
        return torch.tensor([list(ids)])


@dataclass(frozen=True, slots=True)
class CompatLoadedModel:
    """All that a generation through transformers needs, in memory."""

    base: CompatBase
    reading: TransformersSession
    reused: int = 0
    """Nothing is kept from one request to the next."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings for the user about the engine and the base."""
        return (SLOW, ESTIMATE, *self.base.warnings)

    @property
    def kl_divergence(self) -> None:
        """None: nothing is quantised."""

    @property
    def routed(self) -> None:
        """None: the routing of experts inside transformers is not visible."""

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

        The trace has no layers, and the prompt is read at once: transformers does not expose more.
        """
        reading(0, len(prompt.ids))
        writer = OutputWriter(
            self.base.tokenizer, plan.params, seed=plan.seed, max_tokens=prompt.max_tokens
        )
        sequence = RunningSequence(
            TextConsumer(cancelled), self.reading, writer, cache=None, unread=prompt.ids
        )
        model = SequentialModel()
        traced = model if trace is None else TracedModel(model, trace)
        return (yield from generate_text(traced, sequence))


@contextmanager
def open_compat_session(
    base: CompatBase, expert: tuple[ExpertSource, float] | None, *, tokens: int, tiers: AdapterCache
) -> Iterator[TransformersSession]:
    """Borrow a model with its expert for one sequence of ``tokens``, virtual ones included.

    Raises:
        BudgetError: when the estimate does not fit; nothing was loaded then.
        DigestError: when bytes of the expert differ from those that were verified.
        IncompatibleError: when the expert does not fit the base.
    """
    buffers = base.buffer_bytes(tokens)
    name = f"the base {base.stored.name}"
    with (
        tiers.reserve_during(Tier.DEVICE, "base", base.weight_bytes, what=name),
        tiers.reserve_during(
            Tier.DEVICE, "kv", base.kv_bytes(tokens), what=_describe_tokens(tokens, "KV cache")
        ),
        tiers.reserve_during(
            Tier.DEVICE, "buffers", buffers, what=_describe_tokens(tokens, "buffers")
        ),
    ):
        if expert is None:
            yield TransformersSession(load_model(base))
            return
        source, weight = expert
        with tiers.pin([source.cache_request]) as [adapter]:
            size = float32_adapter_bytes(adapter)
            with tiers.reserve_during(Tier.RAM, "experts", size, what=adapter.ref):
                model = load_model(base)
                prompt = attach_adapter(model, adapter, weight=weight)
                yield TransformersSession(model, soft_prompt=prompt)


def plan_single_expert(
    plan: Callable[[RouteRequest], PlannedPrompt], request: RouteRequest, *, chosen: bool
) -> PlannedPrompt:
    """Plan with one expert at most; where the router chooses, the best one.

    ``chosen`` is True where the user, or a saved plan, names the experts.

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


def _describe_tokens(tokens: int, what: str) -> str:
    return f"the {what} of {tokens} tokens"
