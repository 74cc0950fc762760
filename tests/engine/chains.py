"""Random chains of every kind on one linear layer, for property tests."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Link, Step, apply_chain
from expertctl.engine.compose import Form, Weighted
from expertctl.engine.dora import DoraTensors, gains
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.engine.lora import LoraTensors

MODULE = "model.layers.0.self_attn.q_proj"
DTYPES = {"32": torch.float32, "b16": torch.bfloat16, "16": torch.float16}


@dataclass(frozen=True)
class Layer:
    """A linear layer and inputs for it."""

    weight: Tensor
    bias: Tensor | None
    x: Tensor

    @property
    def form(self) -> Form:
        out, inputs = self.weight.shape
        return Form({MODULE: (out, inputs)}, 4, torch.float32, torch.device("cpu"))

    def exact(self, links: Sequence[Link]) -> Tensor:
        """The plain formula, expert by expert, in float64."""
        bias = None if self.bias is None else self.bias.double()
        return apply_chain(self.x.double(), self.weight.double(), bias, links)

    def weighted(self, link: Link) -> Weighted:
        """One expert that takes this step, with its gains on this layer."""
        step = link.step
        found = (gains(self.weight, step, what=MODULE),) if isinstance(step, DoraTensors) else ()
        return Weighted(adapter(step), link.weight, {MODULE: found})


def adapter(*steps: Step, ref: str = "acme/x@1.0.0") -> LoadedAdapter:
    return LoadedAdapter(ref, {MODULE: steps}, (), 2 * len(steps), 0)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Layer, list[Link]]:
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
        step: Step
        match draw(st.sampled_from(["lora", "dora", "ia3"])):
            case "lora":
                step = LoraTensors(a, b, scale)
            case "dora":
                magnitude = (rand(out).abs() + 0.1).to(kind)
                step = DoraTensors(a, _turned(weights, a, b), magnitude, scale)
            case _:
                step = Ia3Tensors((1 + rand(inputs if on_input else out) / 2).to(kind), on_input)
        any_weight = st.floats(-1.5, 1.5, allow_subnormal=False)
        weight = draw(st.one_of(st.sampled_from([0.0, 1.0, 1.0, -1.0, 0.5]), any_weight))
        links.append(Link(step, weight))
    bias = rand(out) if draw(st.booleans()) else None
    return Layer(weights, bias, rand(3, inputs)), links


def _turned(weights: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Turn the rows of B that would cancel a row of W: its direction is then no number's fault."""
    change = b.float() @ a.float()
    cancels = (weights + change).norm(dim=1) < (weights - change).norm(dim=1)
    return torch.where(cancels[:, None], -b, b)
