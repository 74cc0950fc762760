"""Whether an expert's tensors have their places in a base; one that matches nothing is an error."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Step
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.errors import IncompatibleError
from expertctl.package.adapter import shortened
from expertctl.package.module_names import name_among, why_absent

Shapes = Mapping[str, tuple[int, int]]
"""``(out, in)`` of every linear layer of a base."""


def named_for(adapter: LoadedAdapter, shapes: Shapes) -> LoadedAdapter:
    """Return an adapter with its modules called what the base calls them."""
    if all(module in shapes for module in adapter.modules):
        return adapter
    modules: dict[str, tuple[Step, ...]] = {}
    for module, steps in adapter.modules.items():
        name = name_among(module, shapes)
        modules[name] = (*modules.get(name, ()), *steps)
    return replace(adapter, modules=modules)


def check_fit(adapter: LoadedAdapter, shapes: Shapes, *, width: int) -> None:
    """Demand that every tensor of an adapter has its place in a base with tokens of that width.

    Raises:
        IncompatibleError: with everything that does not fit, or when there is nothing at all.
    """
    problems = list(_problems(adapter, shapes, width))
    if not adapter.modules and not adapter.soft_prompts:
        problems.append("it changes no module at all")
    if problems:
        lines = "; ".join(shortened(problems))
        raise IncompatibleError(f"{adapter.ref} does not fit the base: {lines}")


def _problems(adapter: LoadedAdapter, shapes: Shapes, width: int) -> Iterator[str]:
    for module, steps in adapter.modules.items():
        if module not in shapes:
            yield f"{module}: {why_absent(module, shapes)}"
            continue
        yield from filter(None, (_misfit(module, step, shapes[module]) for step in steps))
    for module in adapter.beyond:
        if name_among(module, shapes) in shapes:
            yield f"{module}: the base has it, and stacks of the adapter end before it"
    for prompt in adapter.soft_prompts:
        if prompt.shape[1] != width:
            yield f"a soft prompt is {prompt.shape[1]} wide, tokens of the base are {width}"


def _misfit(module: str, step: Step, wanted: tuple[int, int]) -> str:
    if isinstance(step, Ia3Tensors):
        side, size = ("inputs", wanted[1]) if step.on_input else ("outputs", wanted[0])
        found = len(step.vector)
        return "" if found == size else f"{module}: made for {found} {side}, the base has {size}"
    made = (step.b.shape[0], step.a.shape[1])
    if made == wanted:
        return ""
    return f"{module}: made for {made[0]} x {made[1]}, the base has {wanted[0]} x {wanted[1]}"
