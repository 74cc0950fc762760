"""Layers that are alike are multiplied together, and each gets its own numbers back."""

import tracemalloc
from itertools import product

import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.compile import CompileSpec, WeightedAdapter, fold_plan
from expertctl.engine.adapters.fuse import ChainStep, FoldedChain, fold_chain
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.plan_tensors import batch_key, factor_scratch_bytes, multiply_factors
from expertctl.engine.adapters.steps import (
    AdapterStep,
    DoraTensors,
    Ia3Tensors,
    compute_dora_scales,
)
from expertctl.engine.torch.functional import apply_linear
from expertctl.engine.torch.plan import to_array, to_tensor
from expertctl.engine.torch.reference import apply_chain
from tests.engine.random_experts import ON_HOST, make_dora, make_ia3, make_lora

SHAPES = {f"model.layers.{n}.mlp.up_proj": (3 + n % 4, 2 + n % 3) for n in range(40)}
KINDS = ("lora", "dora", "ia3", "ia3 on the input")
WEIGHTS = {"one": 1.0, "two": 0.5, "three": -0.7, "four": 1.0}


def step_of(kind: str, out: int, inputs: int) -> AdapterStep:
    a, b = torch.randn(2, inputs), torch.randn(out, 2)
    match kind:
        case "lora":
            return make_lora(a, b, 0.5)
        case "dora":
            return make_dora(a, b, torch.rand(out) + 0.1, 0.5)
        case "ia3":
            return make_ia3(torch.randn(out), on_input=False)
        case _:
            return make_ia3(torch.randn(inputs), on_input=True)


def test_layers_of_different_shapes_and_chains_equal_the_plain_formulas() -> None:
    """Each expert changes some of the layers, each of them in its own way."""
    matrices: dict[str, Tensor] = {module: torch.randn(shape) for module, shape in SHAPES.items()}
    links: dict[str, list[ChainStep]] = {module: [] for module in SHAPES}
    chain = []
    for number, (name, weight) in enumerate(WEIGHTS.items()):
        steps: dict[str, tuple[AdapterStep, ...]] = {}
        for position, (module, shape) in enumerate(SHAPES.items()):
            if position % (number + 2):
                steps[module] = (step_of(KINDS[(position // 5 + number) % 4], *shape),)
                links[module].append(ChainStep(steps[module][0], weight))
        found = {
            module: (compute_dora_scales(to_array(matrices[module]), step, what=module),)
            for module, [step] in steps.items()
            if isinstance(step, DoraTensors)
        }
        chain.append(
            WeightedAdapter(LoadedAdapter(f"acme/{name}@1", steps, (), 0, 0), weight, found)
        )
    plan = fold_plan(chain, CompileSpec(SHAPES, 4, ON_HOST)).compile()
    for module, matrix in matrices.items():
        x, bias = torch.randn(2, matrix.shape[1]), torch.randn(len(matrix))
        exact = apply_chain(x.double(), matrix.double(), bias.double(), links[module])
        got = apply_linear(x, matrix, bias, plan.torch_deltas.get(module)).double()
        assert float((got - exact).abs().max()) <= 1e-5 * max(1.0, float(exact.abs().max()))


def test_what_differs_in_a_number_or_a_kind_is_not_alike() -> None:
    def of(*chain: tuple[str, float], out: int = 3) -> object:
        return batch_key(
            fold_chain([ChainStep(step_of(kind, out, 2), weight) for kind, weight in chain])
        )

    plain = of(("lora", 1.0), ("ia3", 1.0))
    assert plain == of(("lora", 1.0), ("ia3", 1.0), out=7)
    others = [
        of(("lora", 0.5), ("ia3", 1.0)),
        of(("lora", 1.0), ("ia3", 0.5)),
        of(("ia3", 1.0), ("lora", 1.0)),
        of(("lora", 1.0), ("ia3 on the input", 1.0)),
        of(("lora", 1.0)),
    ]
    assert all(other != plain for other in others)


def test_running_products_begin_at_the_end_of_the_chain() -> None:
    vectors = [torch.tensor([2.0, 3.0]), torch.tensor([5.0, 7.0]), torch.tensor([0.5, 1.0])]
    chain = [ChainStep(make_ia3(vector, on_input=False)) for vector in vectors]
    lora = ChainStep(make_lora(torch.ones(1, 2), torch.ones(2, 1), 4.0))
    [found] = multiply_factors([fold_chain([chain[0], lora, *chain[1:]])])
    assert [row.tolist() for row in found.outputs] == [[0.5, 1.0], [2.5, 7.0], [5.0, 21.0]]
    assert [row.tolist() for row in found.bias] == [[0.5, 1.0], [2.5, 7.0], [5.0, 21.0]]
    [scale] = found.b_scales
    assert scale is not None
    assert scale.tolist() == [10.0, 28.0]
    assert found.inputs == ()


OBJECTS = 16 << 10
"""What Python objects take that only refer to numbers."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("chain", list(product(KINDS, repeat=3)), ids=" ".join)
def test_what_multiplying_takes_is_known(chain: tuple[str, ...], dtype: torch.dtype) -> None:
    def layer(out: int, inputs: int) -> FoldedChain:
        return fold_chain([link(kind, out, inputs) for kind in chain])

    def link(kind: str, out: int, inputs: int) -> ChainStep:
        match step_of(kind, out, inputs):
            case Ia3Tensors(vector, on_input):
                narrow = make_ia3(to_tensor(vector).to(dtype), on_input=on_input)
                return ChainStep(narrow, 0.5)
            case step:
                scale = to_array(torch.rand(out)) if isinstance(step, DoraTensors) else None
                return ChainStep(step, 0.5, scale)

    layers = [layer(50_000, 30_000), layer(20_000, 40_000)]
    announced = factor_scratch_bytes(layers)
    multiply_factors(layers)  # imports
    tracemalloc.start()
    found = multiply_factors(layers)
    taken = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del found
    assert taken <= announced + OBJECTS
    assert (announced == 0) == (set(chain) == {"lora"})
    assert announced <= 3 * taken
