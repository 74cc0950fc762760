"""One expert on a model of transformers, through PEFT's layers and never through PEFT's loader.

What comes here was parsed by our own readers and hashed in memory. The configuration that PEFT gets
is made here, with the exact names of modules, so nothing that a publisher wrote is a pattern, a
path or the name of a library. Afterwards everything is counted: a tensor without its place in the
model, or a place without its tensor, is an error.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Step
from expertctl.engine.dora import DoraTensors
from expertctl.engine.ia3 import Ia3Tensors, ia3_scale
from expertctl.engine.lora import LoraTensors
from expertctl.errors import IncompatibleError
from expertctl.package.adapter import PREFIX, shortened

NAME = "expert"
_TENSORS_OF: Mapping[type, int] = {LoraTensors: 2, DoraTensors: 3, Ia3Tensors: 1}
_LAYERS = ("lora_", "ia3_")


@dataclass(frozen=True, slots=True)
class _Part:
    """One adapted module as PEFT is to hold it, all in float32."""

    module: str
    tensors: Mapping[str, Tensor]
    rank: int = 0
    scale: float = 1.0


def attach(model: Any, adapter: LoadedAdapter, *, weight: float) -> Tensor | None:
    """Put an expert into a model; return its soft prompt, float32 [virtual tokens, width], if any.

    Raises:
        IncompatibleError: when PEFT cannot run it so, or when it does not fit the model.
    """
    if weight == 0.0:  # leaving an expert out is exact, 0 * inf is not
        return None
    steps = _single_steps(adapter)
    prompt = _soft_prompt(model, adapter, weight)
    if not steps and prompt is None:
        raise IncompatibleError(f"{adapter.ref} does not fit the base: it changes no module at all")
    if steps:
        parts = [_part(adapter.ref, module, step, weight) for module, step in steps.items()]
        _inject(model, adapter.ref, parts, steps)
    return prompt


def float_bytes(adapter: LoadedAdapter) -> int:
    """Return what an expert takes in a model: all numbers in float32."""
    numbers = sum(prompt.numel() for prompt in adapter.soft_prompts)
    for steps in adapter.modules.values():
        numbers += sum(tensor.numel() for step in steps for tensor in _tensors_of(step))
    return numbers * torch.float32.itemsize


def _tensors_of(step: Step) -> tuple[Tensor, ...]:
    match step:
        case LoraTensors():
            return (step.a, step.b)
        case DoraTensors():
            return (step.a, step.b, step.magnitude)
        case Ia3Tensors():
            return (step.vector,)


def _single_steps(adapter: LoadedAdapter) -> dict[str, Step]:
    """PEFT holds one adapter of one kind at a time, and each changes a module once."""
    kinds = {type(step) for steps in adapter.modules.values() for step in steps}
    if len(kinds) > 1 or any(len(steps) > 1 for steps in adapter.modules.values()):
        raise IncompatibleError(
            f"{adapter.ref} holds several adapters for the layers of the base, which PEFT does not "
            "run together",
            hint="leave out --engine transformers where our own decoder runs the base",
        )
    return {module: steps[0] for module, steps in adapter.modules.items() if steps}


def _part(ref: str, module: str, step: Step, weight: float) -> _Part:
    match step:
        case LoraTensors(a=a, b=b, scale=scale):
            halves = {"lora_A.weight": a.float(), "lora_B.weight": b.float()}
            return _Part(module, halves, step.rank, scale * weight)
        case DoraTensors(a=a, b=b, magnitude=magnitude, scale=scale):
            if weight != 1.0:
                raise IncompatibleError(
                    f"{ref} is a DoRA, which PEFT runs with the weight 1 only",
                    hint="name it without a weight",
                )
            tensors = {"lora_A.weight": a.float(), "lora_B.weight": b.float()}
            tensors["lora_magnitude_vector"] = magnitude.float()
            return _Part(module, tensors, step.rank, scale)
        case Ia3Tensors(on_input=on_input):
            vector = ia3_scale(step, weight)
            shaped = vector.reshape(1, -1) if on_input else vector.reshape(-1, 1)
            return _Part(module, {"ia3_l": shaped})


def _soft_prompt(model: Any, adapter: LoadedAdapter, weight: float) -> Tensor | None:
    if not adapter.soft_prompts:
        return None
    if weight != 1.0:
        raise IncompatibleError(
            f"{adapter.ref} has a soft prompt, which has no weight but 1",
            hint="name it without a weight, or leave it out",
        )
    width = int(model.get_input_embeddings().weight.shape[1])
    wrong = [prompt.shape[1] for prompt in adapter.soft_prompts if prompt.shape[1] != width]
    if wrong:
        raise IncompatibleError(
            f"{adapter.ref} does not fit the base: a soft prompt is {wrong[0]} wide, tokens of the "
            f"base are {width}"
        )
    return torch.cat([prompt.float() for prompt in adapter.soft_prompts])


def _inject(model: Any, ref: str, parts: Sequence[_Part], steps: Mapping[str, Step]) -> None:
    from peft import inject_adapter_in_model, set_peft_model_state_dict
    from peft.functional import cast_adapter_dtype

    known = {name for name, _ in model.named_modules()}
    _refuse(
        ref, [f"{p.module}: the base has no such layer" for p in parts if p.module not in known]
    )
    state = {f"{PREFIX}{p.module}.{name}": t for p in parts for name, t in p.tensors.items()}
    with _quietly():
        try:
            inject_adapter_in_model(_config(parts, steps), model, NAME)
            cast_adapter_dtype(model, NAME)  # float32, whatever the base is in, as PEFT loads
            loaded: Any = set_peft_model_state_dict(model, state, NAME)
        except (ValueError, RuntimeError, KeyError, TypeError) as error:
            raise IncompatibleError(
                f"{ref} does not fit the base: {str(error)[:1000]}",
                hint="PEFT says so; see what `expertctl inspect` shows of the expert",
            ) from error
    _count(model, ref, state, loaded.unexpected_keys)
    for part in parts:
        if part.rank:
            model.get_submodule(part.module).scaling[NAME] = part.scale


def _config(parts: Sequence[_Part], steps: Mapping[str, Step]) -> Any:
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


def _count(model: Any, ref: str, state: Mapping[str, Tensor], unexpected: Sequence[str]) -> None:
    """Demand that every tensor has its place, every place its tensor, and nothing else changed."""
    placed = dict(_placed(model))
    wanted = sorted(name.removeprefix(PREFIX) for name in state)
    problems = [f"{name}: no layer of the model takes it" for name in sorted(unexpected)]
    problems += [
        f"{name}: nothing of the expert belongs there" for name in placed if name not in wanted
    ]
    problems += [f"{name}: it was not taken" for name in wanted if name not in placed]
    problems += [f"{n}: it has no values" for n, t in placed.items() if t.is_meta]
    _refuse(ref, problems)


def _placed(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of PEFT's layers in the model, by its name in an adapter's file."""
    for name, tensor in model.named_parameters():
        module, dot, rest = name.partition(f".{NAME}")
        if dot and rest in {"", ".weight"}:
            kind = module.rpartition(".")[2]
            if kind.startswith(_LAYERS):
                suffix = "" if kind == "lora_magnitude_vector" else rest
                yield f"{module}{suffix}", tensor


def _refuse(ref: str, problems: Sequence[str]) -> None:
    if problems:
        lines = "; ".join(shortened(list(problems)))
        raise IncompatibleError(
            f"{ref} does not fit the base: {lines}",
            hint="the expert was made for another base, or for layers that PEFT does not adapt",
        )


@contextmanager
def _quietly() -> Iterator[None]:
    """Ignore PEFT's warnings of matrices stored as [in, out]: it handles them as we want."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
