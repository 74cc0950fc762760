"""Random experts on whole bases, and their plans in both forms."""

from collections.abc import Sequence

import torch
from torch import Tensor

from expertctl.engine.adapter_load import LoadedAdapter
from expertctl.engine.chain import Step
from expertctl.engine.compose import CompiledPlan, Form, Weighted, compose
from expertctl.engine.dora import DoraTensors
from expertctl.engine.ia3 import Ia3Tensors
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.lora import LoraTensors
from expertctl.engine.packed_delta import AdapterDtype, PackedDeltas, Packing
from expertctl.package.model_config import ModelConfig

CPU = torch.device("cpu")
KINDS = ("lora", "dora", "ia3")


def form_of(config: ModelConfig, packing: Packing | None = None) -> Form:
    """What plans on a base are compiled for."""
    return Form(config.linear_shapes(), config.hidden_size, torch.float32, CPU, packing)


def torch_plan(config: ModelConfig, experts: Sequence[Weighted]) -> CompiledPlan:
    """A plan as the torch decoder takes it."""
    return compose(experts, form_of(config)).compile()


def packed_plan(
    config: ModelConfig,
    experts: Sequence[Weighted],
    *,
    base: Scheme = Scheme.FLOAT32,
    adapters: AdapterDtype = "published",
) -> PackedDeltas:
    """A plan as the packed decoder takes it."""
    packed = compose(experts, form_of(config, Packing(base, adapters))).compile().packed
    assert packed is not None
    return packed


def random_expert(
    config: ModelConfig,
    kind: str = "lora",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    weight: float = 1.0,
) -> Weighted:
    """An expert on three of four layers of a base, each of another rank and scale."""
    draw = _Drawing(seed, dtype)
    modules: dict[str, tuple[Step, ...]] = {}
    gains: dict[str, tuple[Tensor, ...]] = {}
    for place, (module, (out, into)) in enumerate(config.linear_shapes().items()):
        if (place + seed) % 4 == 3:
            continue
        modules[module] = (draw.step(kind, out, into, rank=1 + 7 * (place + seed) % 23),)
        if kind == "dora":
            gains[module] = (1 + 0.1 * draw(out).float(),)
    ref = f"acme/{kind}-{seed}@1.0.0"
    return Weighted(LoadedAdapter(ref, modules, (), 1, 0), weight, gains)


class _Drawing:
    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        self._generator, self._dtype = torch.Generator().manual_seed(seed), dtype

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._dtype)

    def step(self, kind: str, out: int, into: int, *, rank: int) -> Step:
        a, b = self(rank, into) * 0.03, self(out, rank) * 0.06
        match kind:
            case "lora":
                return LoraTensors(a, b, 1.5)
            case "dora":
                return DoraTensors(a, b, 1 + self(out).abs(), 0.75)
            case _:
                on_input = rank % 2 == 0
                return Ia3Tensors(1 + 0.1 * self(into if on_input else out), on_input)
