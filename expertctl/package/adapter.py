"""What an adapter is: its parts, each a change to one module of the base or to the prompt.

A closed set of kinds. Tensors are named as PEFT names them; `expertctl.package.adapter_spec` reads
them.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from expertctl.schema.manifest import AdapterKind, Dtype

PEFT_PREFIX = "base_model.model."
"""What stands before the name of a module in the names of its tensors."""
KIND_NAMES: Mapping[AdapterKind, str] = {
    "lora": "LoRA",
    "dora": "DoRA",
    "ia3": "IA³",
    "soft_prompt": "soft prompt",
}
"""What people call the kinds."""
_WRAPPERS = (
    ("_orig_mod.", "save the model that torch.compile was given, not the one that it returned"),
    ("_fsdp_wrapped_module.", "gather the model that FSDP wrapped, and save again"),
    ("_checkpoint_wrapped_module.", "save the model without the wrapper of its checkpoints"),
)
_MAX_PROBLEMS = 20


@dataclass(frozen=True, slots=True)
class StackSlice:
    """Where the halves of one expert lie in tensors that hold those of all experts of a layer."""

    expert: int
    experts: int
    first: int
    """The first of its outputs among those that share a stack."""
    transposed: bool
    """Whether A lies in the tensor of B, and B in that of A, both transposed."""


@dataclass(frozen=True, slots=True)
class Lora:
    """``f + weight * scale * B A x`` on one linear layer; ``a`` and ``b`` are tensor names.

    Shapes are those of its own halves, wherever they lie.
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
        """The width of the layer's input."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The width of the layer's output."""
        return self.b_shape[0]

    @property
    def module_after_stack(self) -> str | None:
        """For the last expert of a stack, the module after it, which no fitting base has."""
        if self.stacked is None or self.stacked.expert + 1 < self.stacked.experts:
            return None
        experts, _, name = self.module.rsplit(".", 2)
        return f"{experts}.{self.stacked.experts}.{name}"


@dataclass(frozen=True, slots=True)
class Dora:
    """``c (g + scale B A x)`` for ``g``, the layer without bias; ``c`` is magnitude over row norm.

    ``magnitude`` names a tensor of one number for each output.
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
        """The width of the layer's input."""
        return self.a_shape[1]

    @property
    def outputs(self) -> int:
        """The width of the layer's output."""
        return self.b_shape[0]


@dataclass(frozen=True, slots=True)
class Ia3:
    """A factor for each input of one linear layer, or for each output; ``vector`` names it."""

    module: str
    vector: str
    on_input: bool
    """Before the layer, as in feed-forward modules: a tensor [1, size]; else [size, 1]."""
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
    """One adapter: its parts in the order of module names, and what its files must hold."""

    kind: AdapterKind
    parts: tuple[Part, ...]
    dtype: Dtype
    rank: int | None
    """Of LoRA and DoRA: what the configuration says for modules that no pattern names."""
    tokens: int | None
    """Of soft prompts: how many virtual tokens."""
    tensors: int


def describe_wrapper(name: str) -> str | None:
    """Say which wrapper of a model is in a tensor's name; PEFT would not find its module."""
    if name.startswith(f"{PEFT_PREFIX}base_model."):
        return f"the prefix {PEFT_PREFIX!r} is doubled: an adapter was saved inside another one"
    for part, why in _WRAPPERS:
        if part in name:
            return f"{part!r} is in the name: {why}"
    return None


def truncate_problems(problems: Iterable[str]) -> list[str]:
    """Return the first problems, and how many more there are; one cause is one line.

    What stands before the first colon is the thing, what follows is what is wrong with it.
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
