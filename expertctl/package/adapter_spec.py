"""Building an `AdapterSpec`: which tensor of a file belongs to which part, with nothing left over.

A tensor without a meaning is an error, and so is a file without any tensor that has one.

- LoRA and DoRA: ``base_model.model.<module>.lora_A.weight``, ``…lora_B.weight`` and, for DoRA,
  ``…lora_magnitude_vector``.
- IA³: ``base_model.model.<module>.ia3_l``, [size, 1] for outputs, [1, size] for the inputs of
  feed-forward modules.
- LoRA on stacks of routed experts, which are split into single experts. PEFT wraps the module of
  all experts once for each stack that it changes, in the order of the stacks in the module. So the
  last one has the name of the module itself, and each earlier one has one more ``base_layer``. For
  E experts and rank r, ``lora_A`` is [E r, in], expert after expert, and ``lora_B`` [out, r E],
  where for each rank the columns of all experts are adjacent.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter import (
    PEFT_PREFIX,
    AdapterConfig,
    AdapterSpec,
    Dora,
    Ia3,
    Lora,
    Part,
    SoftPrompt,
    StackSlice,
    describe_wrapper,
    truncate_problems,
)
from expertctl.package.architectures import MAX_EXPERTS_PER_LAYER, MAX_EXPERTS_TOTAL
from expertctl.package.peft_config import STACKED_MODULES, Ia3Config, LoraConfig, SoftPromptConfig
from expertctl.package.tensor_file import TensorInfo, TensorTable
from expertctl.schema.manifest import Dtype

HalvesByName = Mapping[str, str]
"""``A`` or ``B`` → tensor name."""
_WRAPPED_EXPERTS = re.compile(r"(?P<experts>(?:.+\.)?experts)(?P<inner>(?:\.base_layer)*)")


def is_stack(config: LoraConfig, module: str) -> bool:
    """Tell whether the tensors of a module are those of a stack of experts."""
    return bool(config.target_parameters) and _WRAPPED_EXPERTS.fullmatch(module) is not None


def split_stacks(
    config: LoraConfig, table: TensorTable, halves: Mapping[str, HalvesByName], problems: list[str]
) -> list[Lora]:
    """Split the tensors of stacks by expert; problems are appended to ``problems``."""
    stacks: list[_ExpertStack] = []
    for experts, wrapped in _group_by_layer(halves).items():
        found = list(_iter_layer_stacks(config, table, experts, wrapped, problems))
        if len({stack.count for stack in found}) > 1:
            counts = " and ".join(f"{stack.count} for {stack.parameter}" for stack in found)
            problems.append(f"{experts}: made for different numbers of experts: {counts}")
        stacks += found
    cut = sum(stack.count for stack in stacks)
    limit = len(STACKED_MODULES) * MAX_EXPERTS_TOTAL
    if cut > limit:
        problems.append(f"{cut} experts in all stacks, at most {limit} supported")
        return []
    return [part for stack in stacks for part in stack.iter_parts()]


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExpertStack:
    """A stack whose tensors fit together."""

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
    """Of one expert, over all its matrices in the stack."""
    transposed: bool

    def iter_parts(self) -> Iterator[Lora]:
        """Yield one part for each matrix of each expert; those of one expert share A."""
        modules = STACKED_MODULES[self.parameter]
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
                    stacked=StackSlice(expert, self.count, place * rows, self.transposed),
                )


def _group_by_layer(halves: Mapping[str, HalvesByName]) -> dict[str, dict[int, HalvesByName]]:
    """Return, for each module of experts, nesting depth → tensor names."""
    layers: dict[str, dict[int, HalvesByName]] = {}
    for module, pair in halves.items():
        match = _WRAPPED_EXPERTS.fullmatch(module)
        assert match is not None, "only stacks come here"
        layers.setdefault(match["experts"], {})[match["inner"].count(".")] = pair
    return layers


def _iter_layer_stacks(
    config: LoraConfig,
    table: TensorTable,
    experts: str,
    wrapped: dict[int, HalvesByName],
    problems: list[str],
) -> Iterator[_ExpertStack]:
    changed = [name for name in STACKED_MODULES if config.targets_parameter(f"{experts}.{name}")]
    for inside, parameter in enumerate(reversed(changed)):
        pair = wrapped.pop(inside, {})
        stack = _build_stack(config, table, (experts, parameter), pair, problems)
        if stack is not None:
            yield stack
    for inside in sorted(wrapped):
        module = experts + inside * ".base_layer"
        problems.append(f"{module}: the configuration targets no such parameter")


def _build_stack(
    config: LoraConfig,
    table: TensorTable,
    name: tuple[str, str],
    pair: HalvesByName,
    problems: list[str],
) -> _ExpertStack | None:
    what = ".".join(name)
    absent = [f"lora_{half}" for half in "AB" if half not in pair]
    if absent:
        problems.append(f"{what}: {' and '.join(absent)} missing")
        return None
    a, b = table.tensors[pair["A"]].shape, table.tensors[pair["B"]].shape
    rank = config.rank_for(what)
    problem = _describe_bad_shapes(a, b, rank)
    if problem is None and len(STACKED_MODULES[name[1]]) > 1:
        outputs = a[1] if config.transposed else b[0]
        problem = f"{outputs} outputs are not two halves" if outputs % 2 else None
    if problem is not None:
        problems.append(f"{what}: {problem}")
        return None
    inputs, outputs = (b[0], a[1]) if config.transposed else (a[1], b[0])
    return _ExpertStack(
        experts=name[0],
        parameter=name[1],
        a=pair["A"],
        b=pair["B"],
        rank=rank,
        scale=config.scale_for(what),
        count=a[0] // rank,
        inputs=inputs,
        outputs=outputs,
        transposed=config.transposed,
    )


def _describe_bad_shapes(a: tuple[int, ...], b: tuple[int, ...], rank: int) -> str | None:
    if len(a) != 2 or len(b) != 2:
        return f"lora_A {list(a)} and lora_B {list(b)} are not matrices"
    if a[0] != b[1] or a[0] % rank or not a[0]:
        return (
            f"{a[0]} rows in lora_A and {b[1]} columns in lora_B are not rank {rank} of the "
            "configuration for each expert"
        )
    if a[0] // rank > MAX_EXPERTS_PER_LAYER:
        return f"made for {a[0] // rank} experts, at most {MAX_EXPERTS_PER_LAYER} are supported"
    return None


_LORA_HALF = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_MAGNITUDE = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_magnitude_vector(\.weight)?")
_OTHER_SUFFIXES = (
    (".lora_magnitude_vector", "it belongs to DoRA, and the configuration does not set use_dora"),
    (".lora_embedding_A", "LoRA on embeddings is not supported"),
    (".lora_embedding_B", "LoRA on embeddings is not supported"),
    (".modules_to_save.", "whole modules in an adapter are not supported"),
    (".ia3_l", "it belongs to IA³"),
    ("prompt_embeddings", "it belongs to a soft prompt"),
)
_NAMED_ADAPTER = re.compile(r"\.lora_[AB]\.[^.]+\.weight$")
_MAX_MATCHING_COST = 100_000_000


def find_lora_parts(
    config: LoraConfig, table: TensorTable, problems: list[str], *, what: str
) -> list[Lora]:
    """Pair the tensors of a LoRA; problems are appended to ``problems``.

    Raises:
        InvalidPackageError: when matching the patterns would take too long.
    """
    others: list[str] = []
    halves = _pair_halves(table, others)
    problems += [f"{name}: {_describe_unexpected_lora_tensor(name)}" for name in others]
    _check_matching_cost(len(halves), config.pattern_size, what)
    stacks = {module: halves.pop(module) for module in sorted(halves) if is_stack(config, module)}
    parts = [
        _build_lora(config, table, module, halves[module], problems) for module in sorted(halves)
    ]
    cut = split_stacks(config, table, stacks, problems)
    return sorted([*(part for part in parts if part is not None), *cut], key=lambda p: p.module)


def find_dora_parts(
    config: LoraConfig, table: TensorTable, problems: list[str], *, what: str
) -> list[Dora]:
    """Find the three tensors of each DoRA module; see `find_lora_parts`."""
    others: list[str] = []
    halves = _pair_halves(table, others)
    magnitudes = _find_magnitudes(others, problems)
    _check_matching_cost(len(halves), config.pattern_size, what)
    unpaired = sorted(magnitudes.keys() - halves.keys())
    problems += [f"{module}: lora_A and lora_B are missing" for module in unpaired]
    parts = []
    for module in sorted(halves):
        lora = _build_lora(config, table, module, halves[module], problems)
        part = _build_dora(lora, table, module, magnitudes.get(module), problems)
        parts += [part] if part else []
    return parts


def _pair_halves(table: TensorTable, others: list[str]) -> dict[str, dict[str, str]]:
    """Return the halves of each module; the names of all other tensors are added to ``others``."""
    halves: dict[str, dict[str, str]] = {}
    for name in table.tensors:
        match = None if describe_wrapper(name) else _LORA_HALF.fullmatch(name)
        if match is None:
            others.append(name)
        else:
            halves.setdefault(match["module"], {})[match["half"]] = name
    return halves


def _find_magnitudes(names: list[str], problems: list[str]) -> dict[str, str]:
    magnitudes: dict[str, str] = {}
    for name in names:
        match = _MAGNITUDE.fullmatch(name)
        if match is None:
            problems.append(f"{name}: {_describe_unexpected_lora_tensor(name)}")
        elif magnitudes.setdefault(match["module"], name) != name:
            problems.append(f"{match['module']}: its magnitude is duplicated")
    return magnitudes


def _check_matching_cost(modules: int, pattern_size: int, what: str) -> None:
    """Limit the time to match every module with every pattern, as both are untrusted."""
    if modules * pattern_size > _MAX_MATCHING_COST:
        problem = f"{modules} modules are too many for such long patterns of rank and alpha"
        raise InvalidPackageError(what, [problem])


def _describe_unexpected_lora_tensor(name: str) -> str:
    found = describe_wrapper(name)
    if found is not None:
        return found
    for part, why in _OTHER_SUFFIXES:
        if part in name:
            return why
    if not name.startswith(PEFT_PREFIX):
        return f"a LoRA tensor of PEFT begins with {PEFT_PREFIX!r}"
    if _NAMED_ADAPTER.search(name):
        return (
            "not the name of a LoRA tensor: the adapter's own name is part of it, so it was not "
            "saved with save_pretrained"
        )
    return "not the name of a LoRA tensor, …lora_A.weight or …lora_B.weight"


def _build_lora(
    config: LoraConfig,
    table: TensorTable,
    module: str,
    halves: Mapping[str, str],
    problems: list[str],
) -> Lora | None:
    if len(halves) != 2:
        absent = "B" if "A" in halves else "A"
        problems.append(f"{module}: lora_{absent} is missing")
        return None
    a, b = table.tensors[halves["A"]], table.tensors[halves["B"]]
    rank = config.rank_for(module)
    found = _find_shape_problems(module, a, b, rank)
    if not config.adapts(module):
        found.append(f"{module}: the configuration does not target this module")
    problems += found
    if found:
        return None
    scale = config.scale_for(module)
    return Lora(module, halves["A"], halves["B"], rank, scale, a.shape, b.shape)


def _find_shape_problems(module: str, a: TensorInfo, b: TensorInfo, rank: int) -> list[str]:
    if len(a.shape) != 2 or len(b.shape) != 2:
        return [f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not matrices"]
    if a.shape[0] != rank or b.shape[1] != rank:
        return [
            f"{module}: rank {a.shape[0]} in lora_A, {b.shape[1]} in lora_B, "
            f"{rank} in the configuration"
        ]
    return []


def _build_dora(
    lora: Lora | None, table: TensorTable, module: str, magnitude: str | None, problems: list[str]
) -> Dora | None:
    if magnitude is None:
        problems.append(f"{module}: lora_magnitude_vector is missing, and use_dora requires it")
        return None
    if lora is None:
        return None
    shape = table.tensors[magnitude].shape
    if shape != (lora.outputs,):
        problems.append(
            f"{module}: lora_magnitude_vector {list(shape)} for {lora.outputs} outputs of lora_B"
        )
        return None
    return Dora(
        module, lora.a, lora.b, magnitude, lora.rank, lora.scale, lora.a_shape, lora.b_shape
    )


_IA3_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.ia3_l")


def find_ia3_parts(config: Ia3Config, table: TensorTable, problems: list[str]) -> list[Ia3]:
    """Assign each tensor to its module; problems are appended to ``problems``."""
    modules: dict[str, str] = {}
    for name in table.tensors:
        match = None if describe_wrapper(name) else _IA3_TENSOR.fullmatch(name)
        if match is None:
            problems.append(f"{name}: {_describe_unexpected_ia3_tensor(name)}")
        else:
            modules[match["module"]] = name
    parts = [
        _build_ia3_part(config, table, module, modules[module], problems)
        for module in sorted(modules)
    ]
    return [part for part in parts if part is not None]


def _describe_unexpected_ia3_tensor(name: str) -> str:
    found = describe_wrapper(name)
    if found is not None:
        return found
    if ".modules_to_save." in name:
        return "whole modules in an adapter are not supported"
    if not name.startswith(PEFT_PREFIX):
        return f"an IA³ tensor of PEFT begins with {PEFT_PREFIX!r}"
    return "not the name of an IA³ tensor, …ia3_l"


def _build_ia3_part(
    config: Ia3Config, table: TensorTable, module: str, name: str, problems: list[str]
) -> Ia3 | None:
    if not config.adapts(module):
        problems.append(f"{module}: the configuration does not target this module")
        return None
    shape = table.tensors[name].shape
    if len(shape) != 2 or 1 not in shape:
        problems.append(f"{module}: ia3_l {list(shape)} is neither [size, 1] nor [1, size]")
        return None
    on_input = config.scales_input(module)
    if on_input is None and shape == (1, 1):
        problems.append(f"{module}: ia3_l [1, 1]: list feedforward_modules, else it is ambiguous")
        return None
    if on_input is None:
        on_input = shape[0] == 1
    if shape[0 if on_input else 1] != 1:
        side = "inputs, as [1, size]" if on_input else "outputs, as [size, 1]"
        problems.append(f"{module}: ia3_l {list(shape)}, the configuration scales {side}")
        return None
    return Ia3(module, name, on_input, shape[1] if on_input else shape[0])


DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_EMBEDDINGS = "prompt_embeddings"


def build_adapter_spec(config: AdapterConfig, table: TensorTable, *, what: str) -> AdapterSpec:
    """Assign every tensor of an adapter, and check it against the configuration.

    Raises:
        InvalidPackageError: with every problem.
    """
    problems: list[str] = []
    parts: list[Part] = []
    rank = tokens = None
    match config:
        case LoraConfig():
            read = find_dora_parts if config.use_dora else find_lora_parts
            parts += read(config, table, problems, what=what)
            rank = config.r
        case Ia3Config():
            parts += find_ia3_parts(config, table, problems)
        case SoftPromptConfig():
            parts += _find_soft_prompt(config, table, problems)
            tokens = config.tokens
    dtype = _find_common_dtype(table, problems)
    if problems:
        raise InvalidPackageError(what, truncate_problems(problems))
    return AdapterSpec(config.kind, tuple(parts), dtype, rank, tokens, len(table.tensors))


def _find_soft_prompt(
    config: SoftPromptConfig, table: TensorTable, problems: list[str]
) -> list[SoftPrompt]:
    """Read the one tensor of a soft prompt, the same for prompt tuning and P-tuning."""
    others = [name for name in table.tensors if name != _EMBEDDINGS]
    problems += [f"{name}: a soft prompt has one tensor, {_EMBEDDINGS}" for name in others]
    tensor = table.tensors.get(_EMBEDDINGS)
    if tensor is None:
        problems.append(f"{_EMBEDDINGS} is missing")
        return []
    match tensor.shape:
        case (config.tokens, width) if config.width in (None, width):
            return [SoftPrompt(_EMBEDDINGS, config.tokens, width)]
    stated = f"[{config.tokens}, {config.width or 'width'}]"
    problems.append(f"{_EMBEDDINGS}: {list(tensor.shape)}, the configuration says {stated}")
    return []


def _find_common_dtype(table: TensorTable, problems: list[str]) -> Dtype:
    names = {tensor.dtype for tensor in table.tensors.values()}
    known = [DTYPES[name] for name in names if name in DTYPES]
    if len(names) != 1 or not known:
        problems.append(
            f"tensors are {', '.join(sorted(names))}; one of F32, F16, BF16 for all is supported"
        )
    return known[0] if known else "float32"
