"""A compiled plan as the kernels read it, and how a plan is to be packed.

What is computed is that of `linear.LinearDelta`: ``y = d * (W (u * x)) + B (A x) + e * b``. All of
a plan's matrices have one scheme and are reached through one table of addresses, so a decoder
copies nothing and a batch may hold rows of several plans.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from expertctl.engine.kernels.scheme import Scheme

Numbers = np.ndarray[Any, Any]
AdapterDtype = Literal["published", "fp16", "int8"]


@dataclass(frozen=True, slots=True)
class Packing:
    """What the base of a plan is held in, and what the plan's matrices are to be stored in.

    ``published``: float32 beside a float32 base, where everything is exact; else as the experts
    were published, float32 where they were published in several types.
    """

    base: Scheme
    adapters: AdapterDtype = "published"


@dataclass(frozen=True, slots=True)
class Site:
    """Linear layers with one input, by their full names; ``first`` is the place of the first."""

    modules: tuple[str, ...]
    first: int


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """How many items of each kind a plan has at each site, int64 [sites]."""

    reduce_steps: Numbers
    reduce_prompts: Numbers
    expand: Numbers
    scales: Numbers
    """Not 0 where it has factors of the input, the output or the bias."""


@dataclass(frozen=True, slots=True, eq=False)
class PackedDeltas:
    """What a plan changes, packed; made by `packed_plan`.

    ``table`` int64 [modules, words] is what kernels read: records of the modules of sites, behind
    them those of routed experts, where it changes any. ``width`` columns lie between the A and the
    B of a site, at most.
    """

    scheme: Scheme
    modules: frozenset[str]
    table: Numbers
    work: Work
    width: int
    nbytes: int
    routed: int | None
    """The place of the first record of a routed expert."""
    routed_bytes: int
    """How much of it is for routed experts."""
    scales_routed: bool
    """Whether it has factors of the input of a routed expert."""
    _kept: tuple[object, ...]
    """What the addresses in the table point into."""

    def __len__(self) -> int:
        """Return how many layers it changes."""
        return len(self.modules)

    @property
    def address(self) -> int:
        """Where kernels find its table."""
        return self.table.ctypes.data

    @property
    def routed_address(self) -> int:
        """Where kernels find the records of routed experts, 0 where it changes none."""
        return 0 if self.routed is None else self.table[self.routed :].ctypes.data

    @property
    def has_scales(self) -> bool:
        """Whether it has factors of inputs, outputs or biases at any site."""
        return bool(self.work.scales.any())


def sites(names: Collection[str]) -> tuple[Site, ...]:
    """Return the sites of a base in the order in which they are computed; the head comes last.

    ``names`` are those of its linear layers. Routed experts have no site: each token has others.
    """
    layers = sorted({int(name.split(".")[2]) for name in names if name.count(".") > _IN_LAYER})
    found = [_site(f"model.layers.{layer}.", *each) for layer in layers for each in _SITES]
    placed, first = list[Site](), 0
    for modules in (*(each for each in found if each[0] in names), ("lm_head",)):
        placed.append(Site(modules, first))
        first += len(modules)
    return tuple(placed)


def routed_modules(names: Iterable[str]) -> tuple[str, ...]:
    """Return the linear layers of routed experts in the order of their records.

    Layer by layer, expert by expert: gate, up, down.
    """
    found = (name.split(".") for name in names if is_routed(name))
    order = sorted((int(p[_LAYER]), int(p[_EXPERT]), _PARTS.index(p[-1])) for p in found)
    return tuple(
        f"model.layers.{layer}.{_EXPERTS}.{expert}.{_PARTS[part]}" for layer, expert, part in order
    )


def is_routed(name: str) -> bool:
    """Tell whether a linear layer is one of a routed expert."""
    return f".{_EXPERTS}." in name


ATTENTION_INPUTS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
MLP_INPUTS = ("mlp.gate_proj", "mlp.up_proj")
SHARED_INPUTS = ("mlp.shared_expert.gate_proj", "mlp.shared_expert.up_proj")
SHARED_OUTPUT = "mlp.shared_expert.down_proj"
SHARED_GATE = "mlp.shared_expert_gate"
_EXPERTS = "mlp.experts"
_LAYER, _EXPERT = 2, 5
"""Where the numbers stand in the name of a module of a routed expert."""
_PARTS = ("gate_proj", "up_proj", "down_proj")
_IN_LAYER = 2
"""How many dots the name of a module in a layer has at least."""
_SITES = (
    ATTENTION_INPUTS,
    ("self_attn.o_proj",),
    MLP_INPUTS,
    ("mlp.down_proj",),
    SHARED_INPUTS,
    (SHARED_OUTPUT,),
    (SHARED_GATE,),
)


def _site(at: str, *modules: str) -> tuple[str, ...]:
    return tuple(f"{at}{module}" for module in modules)
