"""What an adapter's tensors mean: which of them belong to which module of the base.

A closed set of kinds; only `Lora` exists so far. Tensor names are PEFT's:
``base_model.model.<module>.lora_A.weight``. A tensor that means nothing is an error.
"""

import re
from dataclasses import dataclass

from expertctl.errors import InvalidPackageError
from expertctl.package.adapter_config import LoraConfig
from expertctl.package.tensor_file import TensorInfo, TensorTable
from expertctl.schema.manifest import Dtype

PREFIX = "base_model.model."
DTYPES: dict[str, Dtype] = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_TENSOR = re.compile(r"base_model\.model\.(?P<module>.+)\.lora_(?P<half>[AB])\.weight")
_OTHERS = (
    (".lora_magnitude_vector", "it belongs to DoRA, which is not supported"),
    (".lora_embedding_A", "LoRA on embeddings is not supported"),
    (".lora_embedding_B", "LoRA on embeddings is not supported"),
    (".modules_to_save.", "whole modules in an adapter are not supported"),
    (".ia3_l", "it belongs to IA³, which is not supported"),
    ("prompt_embeddings", "it belongs to a soft prompt, which is not supported"),
)
_MAX_PROBLEMS = 20
_MAX_EFFORT = 100_000_000


@dataclass(frozen=True, slots=True)
class Lora:
    """``f + weight * scale * B A x`` on one linear layer; ``a`` and ``b`` are tensor names."""

    module: str
    a: str
    b: str
    rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """The width of the layer's input."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The width of the layer's output."""
        return self.b_shape[0]


Part = Lora
"""One adapted module; a union of the kinds as they come."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter: its parts in the order of module names, and what its files must hold."""

    parts: tuple[Part, ...]
    dtype: Dtype
    rank: int
    tensors: int


def lora_spec(config: LoraConfig, table: TensorTable, *, what: str) -> AdapterSpec:
    """Pair the tensors of a LoRA and check them against its configuration.

    Raises:
        InvalidPackageError: with every problem.
    """
    problems: list[str] = []
    halves: dict[str, dict[str, str]] = {}
    for name in table.tensors:
        match = _TENSOR.fullmatch(name)
        if match is None:
            problems.append(f"{name}: {_why_not(name)}")
        else:
            halves.setdefault(match["module"], {})[match["half"]] = name
    _check_effort(len(halves), config.pattern_size, what)
    parts = []
    for module in sorted(halves):
        part = _part(config, table, module, halves[module], problems)
        parts += [part] if part else []
    dtype = _dtype(table, problems)
    if problems:
        raise InvalidPackageError(what, shortened(problems))
    return AdapterSpec(tuple(parts), dtype, config.r, len(table.tensors))


def _check_effort(modules: int, pattern_size: int, what: str) -> None:
    """Every module is held against every pattern, and a stranger chose both."""
    if modules * pattern_size > _MAX_EFFORT:
        problem = f"{modules} modules are too many for such long patterns of rank and alpha"
        raise InvalidPackageError(what, [problem])


def shortened(problems: list[str]) -> list[str]:
    """Return the first problems, and how many more there are."""
    rest = len(problems) - _MAX_PROBLEMS
    return [*problems[:_MAX_PROBLEMS], *([f"… and {rest} more"] if rest > 0 else [])]


def _why_not(name: str) -> str:
    for part, why in _OTHERS:
        if part in name:
            return why
    if not name.startswith(PREFIX):
        return f"a LoRA tensor of PEFT begins with {PREFIX!r}"
    return "not the name of a LoRA tensor, …lora_A.weight or …lora_B.weight"


def _part(
    config: LoraConfig,
    table: TensorTable,
    module: str,
    halves: dict[str, str],
    problems: list[str],
) -> Part | None:
    if len(halves) != 2:
        absent = "B" if "A" in halves else "A"
        problems.append(f"{module}: lora_{absent} is missing")
        return None
    a, b = table.tensors[halves["A"]], table.tensors[halves["B"]]
    rank = config.rank_of(module)
    found = _shape_problems(module, a, b, rank)
    if not config.adapts(module):
        found.append(f"{module}: the configuration does not target this module")
    problems += found
    if found:
        return None
    scale = config.scale_of(module)
    return Lora(module, halves["A"], halves["B"], rank, scale, a.shape, b.shape)


def _shape_problems(module: str, a: TensorInfo, b: TensorInfo, rank: int) -> list[str]:
    if len(a.shape) != 2 or len(b.shape) != 2:
        return [f"{module}: lora_A {list(a.shape)} and lora_B {list(b.shape)} are not matrices"]
    if a.shape[0] != rank or b.shape[1] != rank:
        return [
            f"{module}: rank {a.shape[0]} in lora_A, {b.shape[1]} in lora_B, "
            f"{rank} in the configuration"
        ]
    return []


def _dtype(table: TensorTable, problems: list[str]) -> Dtype:
    names = {tensor.dtype for tensor in table.tensors.values()}
    known = [DTYPES[name] for name in names if name in DTYPES]
    if len(names) != 1 or not known:
        problems.append(
            f"tensors are {', '.join(sorted(names))}; one of F32, F16, BF16 for all is supported"
        )
    return known[0] if known else "float32"
