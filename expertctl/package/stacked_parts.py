"""The tensors of a LoRA on stacks of routed experts: each is cut into the parts of single experts.

PEFT wraps the module of all experts once for each stack that it changes, in the order of the
stacks in the module. So the last of them is named by the module itself, and each one before it by
one ``base_layer`` more. For E experts and rank r, ``lora_A`` is [E r, in], expert after expert, and
``lora_B`` [out, r E], where for each rank the columns of all experts stand side by side.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from expertctl.package.adapter import Lora, Stacked
from expertctl.package.experts_config import MAX_ALL, MAX_COUNT
from expertctl.package.lora_config import LoraConfig
from expertctl.package.target_parameters import STACKS
from expertctl.package.tensor_file import TensorTable

Halves = Mapping[str, str]
"""The names of tensors, by A and B."""
_WRAPPED = re.compile(r"(?P<experts>(?:.+\.)?experts)(?P<inner>(?:\.base_layer)*)")


def is_stack(config: LoraConfig, module: str) -> bool:
    """Tell whether tensors that are named by a module are those of a stack."""
    return bool(config.target_parameters) and _WRAPPED.fullmatch(module) is not None


def stacked_parts(
    config: LoraConfig, table: TensorTable, halves: Mapping[str, Halves], problems: list[str]
) -> list[Lora]:
    """Cut the halves of stacks; what is wrong with them goes to ``problems``."""
    stacks: list[_Stack] = []
    for experts, wrapped in _by_layer(halves).items():
        found = list(_layer_stacks(config, table, experts, wrapped, problems))
        if len({stack.count for stack in found}) > 1:
            counts = " and ".join(f"{stack.count} for {stack.parameter}" for stack in found)
            problems.append(f"{experts}: made for different numbers of experts: {counts}")
        stacks += found
    cut = sum(stack.count for stack in stacks)
    if cut > len(STACKS) * MAX_ALL:
        problems.append(f"{cut} experts in all stacks, at most {len(STACKS) * MAX_ALL} supported")
        return []
    return [part for stack in stacks for part in stack.parts()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stack:
    """A stack whose halves fit together."""

    experts: str
    """The module of all experts."""
    parameter: str
    a: str
    b: str
    rank: int
    scale: float
    count: int
    inputs: int
    outputs: int
    """Of one expert, of all its matrices in the stack."""
    turned: bool

    def parts(self) -> Iterator[Lora]:
        """Give each matrix of each expert its part; those of one expert share A."""
        modules = STACKS[self.parameter]
        rows = self.outputs // len(modules)
        for expert in range(self.count):
            for place, module in enumerate(modules):
                yield Lora(
                    module=f"{self.experts}.{expert}.{module}",
                    a=self.a,
                    b=self.b,
                    rank=self.rank,
                    scale=self.scale,
                    a_shape=(self.rank, self.inputs),
                    b_shape=(rows, self.rank),
                    stacked=Stacked(expert, self.count, place * rows, self.turned),
                )


def _by_layer(halves: Mapping[str, Halves]) -> dict[str, dict[int, Halves]]:
    """Return the halves of each module of experts, by how often it is wrapped inside."""
    layers: dict[str, dict[int, Halves]] = {}
    for module, pair in halves.items():
        match = _WRAPPED.fullmatch(module)
        assert match is not None, "only stacks come here"
        layers.setdefault(match["experts"], {})[match["inner"].count(".")] = pair
    return layers


def _layer_stacks(
    config: LoraConfig,
    table: TensorTable,
    experts: str,
    wrapped: dict[int, Halves],
    problems: list[str],
) -> Iterator[_Stack]:
    changed = [name for name in STACKS if config.targets_parameter(f"{experts}.{name}")]
    for inside, parameter in enumerate(reversed(changed)):
        pair = wrapped.pop(inside, {})
        stack = _stack(config, table, (experts, parameter), pair, problems)
        if stack is not None:
            yield stack
    for inside in sorted(wrapped):
        module = experts + inside * ".base_layer"
        problems.append(f"{module}: the configuration targets no such parameter")


def _stack(
    config: LoraConfig,
    table: TensorTable,
    name: tuple[str, str],
    pair: Halves,
    problems: list[str],
) -> _Stack | None:
    what = ".".join(name)
    absent = [f"lora_{half}" for half in "AB" if half not in pair]
    if absent:
        problems.append(f"{what}: {' and '.join(absent)} missing")
        return None
    a, b = table.tensors[pair["A"]].shape, table.tensors[pair["B"]].shape
    rank = config.rank_of(what)
    problem = _misshapen(a, b, rank)
    if problem is None and len(STACKS[name[1]]) > 1:
        outputs = a[1] if config.turned else b[0]
        problem = f"{outputs} outputs are not two halves" if outputs % 2 else None
    if problem is not None:
        problems.append(f"{what}: {problem}")
        return None
    inputs, outputs = (b[0], a[1]) if config.turned else (a[1], b[0])
    return _Stack(
        experts=name[0],
        parameter=name[1],
        a=pair["A"],
        b=pair["B"],
        rank=rank,
        scale=config.scale_of(what),
        count=a[0] // rank,
        inputs=inputs,
        outputs=outputs,
        turned=config.turned,
    )


def _misshapen(a: tuple[int, ...], b: tuple[int, ...], rank: int) -> str | None:
    """Say why two halves are not those of a stack of that rank."""
    if len(a) != 2 or len(b) != 2:
        return f"lora_A {list(a)} and lora_B {list(b)} are not matrices"
    if a[0] != b[1] or a[0] % rank or not a[0]:
        return (
            f"{a[0]} rows in lora_A and {b[1]} columns in lora_B are not rank {rank} of the "
            "configuration for each expert"
        )
    if a[0] // rank > MAX_COUNT:
        return f"made for {a[0] // rank} experts, at most {MAX_COUNT} are supported"
    return None
