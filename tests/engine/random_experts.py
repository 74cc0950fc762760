"""Random experts on whole bases, and their plans in both forms.

Random chains of every kind on one linear layer, for property tests.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from expertctl.engine.adapters.compile import (
    CompiledPlan,
    CompileSpec,
    TorchPlacement,
    WeightedAdapter,
    fold_plan,
)
from expertctl.engine.adapters.fuse import ChainStep
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import (
    AdapterStep,
    DoraTensors,
    Ia3Tensors,
    LoraTensors,
    compute_dora_scales,
)
from expertctl.engine.arrays import AnyArray
from expertctl.engine.kernels.packed_format import AdapterDtype, PackedDeltas, PlanPacking, Scheme
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.reference import apply_chain
from expertctl.package.model_config import ModelConfig

KINDS = ("lora", "dora", "ia3")
ON_HOST = TorchPlacement("cpu")


def make_plan_form(
    config: ModelConfig, target: PlanPacking | TorchPlacement | None = None
) -> CompileSpec:
    """What plans on a base are compiled for."""
    return CompileSpec(config.linear_shapes(), config.hidden_size, target)


def make_torch_plan(config: ModelConfig, experts: Sequence[WeightedAdapter]) -> CompiledPlan:
    """A plan as the torch decoder takes it."""
    return fold_plan(experts, make_plan_form(config, ON_HOST)).compile()


def make_packed_plan(
    config: ModelConfig,
    experts: Sequence[WeightedAdapter],
    *,
    base: Scheme = Scheme.FLOAT32,
    adapters: AdapterDtype = "published",
) -> PackedDeltas:
    """A plan as the packed decoder takes it."""
    packed = (
        fold_plan(experts, make_plan_form(config, PlanPacking(base, adapters))).compile().packed
    )
    assert packed is not None
    return packed


def make_lora(a: Tensor, b: Tensor, scale: float) -> LoraTensors:
    """A LoRA with the numbers of tensors."""
    return LoraTensors(to_array(a), to_array(b), scale)


def make_dora(a: Tensor, b: Tensor, magnitude: Tensor, scale: float) -> DoraTensors:
    """A DoRA with the numbers of tensors."""
    return DoraTensors(to_array(a), to_array(b), to_array(magnitude), scale)


def make_ia3(vector: Tensor, *, on_input: bool) -> Ia3Tensors:
    """An IA³ with the numbers of a tensor."""
    return Ia3Tensors(to_array(vector), on_input)


def make_random_expert(
    config: ModelConfig,
    kind: str = "lora",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight: float = 1.0,
) -> WeightedAdapter:
    """An expert on three of four layers of a base, each of another rank and scale."""
    draw = _RandomTensors(seed, dtype)
    modules: dict[str, tuple[AdapterStep, ...]] = {}
    gains: dict[str, tuple[AnyArray, ...]] = {}
    for place, (module, (out, into)) in enumerate(config.linear_shapes().items()):
        if (place + seed) % 4 == 3:
            continue
        modules[module] = (draw.step(kind, out, into, rank=1 + 7 * (place + seed) % 23),)
        if kind == "dora":
            gains[module] = (to_array(1 + 0.1 * draw(out).float()),)
    ref = f"acme/{kind}-{seed}@1.0.0"
    return WeightedAdapter(LoadedAdapter(ref, modules, (), 1, 0), weight, gains)


class _RandomTensors:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def step(self, kind: str, out: int, into: int, *, rank: int) -> AdapterStep:
        a, b = self(rank, into) * 0.03, self(out, rank) * 0.06
        match kind:
            case "lora":
                return make_lora(a, b, 1.5)
            case "dora":
                return make_dora(a, b, 1 + self(out).abs(), 0.75)
            case _:
                on_input = rank % 2 == 0
                return make_ia3(1 + 0.1 * self(into if on_input else out), on_input=on_input)


MODULE = "model.layers.0.self_attn.q_proj"
DTYPES = {"32": torch.float32, "b16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer and inputs for it."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor

    @property
    def plan_form(self) -> CompileSpec:
        out, inputs = self.weight.shape
        return CompileSpec({MODULE: (out, inputs)}, 4)

    def compute_exact(self, links: Sequence[ChainStep]) -> Tensor:
        """The plain formula, expert by expert, in float64."""
        bias = None if self.bias is None else self.bias.double()
        return apply_chain(self.x.double(), self.weight.double(), bias, links)

    def make_weighted(self, link: ChainStep) -> WeightedAdapter:
        """One expert that takes this step, with its gains on this layer."""
        step = link.step
        found = (
            (compute_dora_scales(to_array(self.weight), step, what=MODULE),)
            if isinstance(step, DoraTensors)
            else ()
        )
        return WeightedAdapter(make_chain_step(step), link.weight, {MODULE: found})


def make_chain_step(*steps: AdapterStep, ref: str = "acme/x@1.0.0") -> LoadedAdapter:
    return LoadedAdapter(ref, {MODULE: steps}, (), 2 * len(steps), 0)


@st.composite
def draw_chain_case(draw: st.DrawFn) -> tuple[LinearLayer, list[ChainStep]]:
    """A random layer, and up to ten steps of any kind, rank, dtype, scale and weight on it."""
    out, inputs, seed = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(st.integers(0, 999))
    generator = torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weights, links = rand(out, inputs) + 0.1, []
    for _ in range(draw(st.integers(0, 10))):
        kind = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
        rank, scale = draw(st.integers(1, 6)), draw(st.floats(0.125, 2))
        a, b = rand(rank, inputs).to(kind), rand(out, rank).to(kind)
        on_input = draw(st.booleans())
        step: AdapterStep
        match draw(st.sampled_from(["lora", "dora", "ia3"])):
            case "lora":
                step = make_lora(a, b, scale)
            case "dora":
                magnitude = (rand(out).abs() + 0.1).to(kind)
                step = make_dora(a, _avoid_cancelled_rows(weights, a, b), magnitude, scale)
            case _:
                vector = (1 + rand(inputs if on_input else out) / 2).to(kind)
                step = make_ia3(vector, on_input=on_input)
        any_weight = st.floats(-1.5, 1.5, allow_subnormal=False)
        weight = draw(st.one_of(st.sampled_from([0.0, 1.0, 1.0, -1.0, 0.5]), any_weight))
        links.append(ChainStep(step, weight))
    bias = rand(out) if draw(st.booleans()) else None
    return LinearLayer(weights, bias, rand(3, inputs)), links


def _avoid_cancelled_rows(weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Turn the rows of B that would cancel a row of W: its direction is then no number's fault."""
    change = b.float() @ a.float()
    cancels = (weights + change).norm(dim=1) < (weights - change).norm(dim=1)
    return torch.where(cancels[:, None], -b, b)
