"""`AdapterSpec`: the parts of an adapter, each of which changes one module or the prompt.

The kinds form a closed set. Tensor names are PEFT's; `expertctl.package.adapter_spec` reads them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from expertctl.schema.manifest import AdapterKind, Dtype

PEFT_PREFIX = "base_model.model."
"""The prefix of a module name in PEFT's tensor names."""
KIND_NAMES: Mapping[AdapterKind, str] = {
    "lora": "LoRA",
    "dora": "DoRA",
    "ia3": "IA³",
    "soft_prompt": "soft prompt",
}
"""The display names of the kinds."""
_WRAPPERS = (
    ("_orig_mod.", "save the model that torch.compile was given, not the one that it returned"),
    ("_fsdp_wrapped_module.", "gather the model that FSDP wrapped, and save again"),
    ("_checkpoint_wrapped_module.", "save the model without the wrapper of its checkpoints"),
)
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class StackSlice:
    """The part of one expert in tensors that hold the LoRA of all experts of a layer."""

    expert: int
    experts: int
    first: int
    """The first of its outputs in a stack that holds several modules."""
    transposed: bool
    """Whether A is stored in the tensor of B and B in that of A, both transposed."""


@dataclass(frozen=True, slots=True)
class Lora:
    """``f + weight * scale * B A x`` on one linear layer; ``a`` and ``b`` are tensor names.

    Shapes are those of this module alone, even if its tensors are stacked.
    """

    module: str
    a: str
    b: str
    rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    stacked: StackSlice | None = None

    @property
    def inputs(self) -> int:
        """The input size of the layer."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The output size of the layer."""
        return self.b_shape[0]

    @property
    def module_after_stack(self) -> str | None:
        """For the last expert of a stack, the module that would follow; no fitting base has it."""
        if self.stacked is None or self.stacked.expert + 1 < self.stacked.experts:
            return None
        experts, _, name = self.module.rsplit(".", 2)
        return f"{experts}.{self.stacked.experts}.{name}"


@dataclass(frozen=True, slots=True)
class Dora:
    """``c (g + scale B A x)`` for ``g``, the layer without bias; ``c`` is magnitude over row norm.

    ``magnitude`` names a tensor [outputs].
    """

    module: str
    a: str
    b: str
    magnitude: str
    rank: int
    scale: float
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]

    @property
    def inputs(self) -> int:
        """The input size of the layer."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The output size of the layer."""
        return self.b_shape[0]


@dataclass(frozen=True, slots=True)
class Ia3:
    """One factor for each input, or each output, of a linear layer; ``vector`` names the tensor."""

    module: str
    vector: str
    on_input: bool
    """Whether it scales the input, as in feed-forward modules: [1, size]; else [size, 1]."""
    size: int


@dataclass(frozen=True, slots=True)
class SoftPrompt:
    """Virtual tokens before the prompt; ``embeddings`` names a tensor [tokens, width]."""

    embeddings: str
    tokens: int
    width: int


Part = Lora | Dora | Ia3 | SoftPrompt
"""One thing that an adapter changes."""


@dataclass(frozen=True, slots=True)
class AdapterSpec:
    """One adapter: its parts sorted by module name, and the expected contents of its files."""

    kind: AdapterKind
    parts: tuple[Part, ...]
    dtype: Dtype
    rank: int | None
    """For LoRA and DoRA, the rank of modules without a pattern."""
    tokens: int | None
    """For soft prompts, the number of virtual tokens."""
    tensors: int


def describe_wrapper(name: str) -> str | None:
    """Return which wrapper of a model a tensor name contains, which PEFT would not find."""
    if name.startswith(f"{PEFT_PREFIX}base_model."):
        return f"the prefix {PEFT_PREFIX!r} is doubled: an adapter was saved inside another one"
    for part, why in _WRAPPERS:
        if part in name:
            return f"{part!r} is in the name: {why}"
    return None


def truncate_problems(problems: Iterable[str]) -> list[str]:
    """Merge problems with the same cause into one line, and return the first `_MAX_PROBLEMS`.

    The text before the first colon of a problem is the thing, the text after it the cause.
    """
    by_cause: dict[str, list[str]] = {}
    for problem in problems:
        thing, colon, cause = problem.partition(": ")
        by_cause.setdefault(cause if colon else problem, []).append(thing)
    merged = [
        cause if things[0] == cause else f"{_format_several(things)}: {cause}"
        for cause, things in by_cause.items()
    ]
    rest = len(merged) - _MAX_PROBLEMS
    return [*merged[:_MAX_PROBLEMS], *([f"… and {rest} more"] if rest > 0 else [])]


def _format_several(things: list[str]) -> str:
    return things[0] if len(things) == 1 else f"{things[0]} and {len(things) - 1} more"
