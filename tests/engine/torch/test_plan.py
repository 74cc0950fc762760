"""Plans as tensors: views of what was compiled, or one block on another device, never shared."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from expertctl.engine.adapters.compile import CompileSpec, TorchPlacement, fold_plan
from expertctl.engine.adapters.plan_tensors import DeltaCompiler, allocate_floats
from expertctl.engine.torch.plan import TorchPlanCompiler, _move_delta, to_array, to_tensor
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import ReferenceModel
from tests.engine.random_experts import ON_HOST, make_plan_form, make_random_expert

ELSEWHERE = "meta"
"""A device whose tensors have shapes and no numbers."""
CHAINS = [["lora"], ["dora"], ["ia3"], ["lora", "lora"], ["lora", "ia3", "dora"]]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(scope="module")
def config(shared_oracle: ReferenceModel) -> ModelConfig:
    return read_model_config(shared_oracle.directory)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_the_same_in_the_same_memory(dtype: torch.dtype) -> None:
    tensor = torch.randn(6, 8).to(dtype)
    for view in (tensor, tensor.T, tensor[1::2, ::3]):
        array = to_array(view)
        assert array.ctypes.data == view.data_ptr()
        again = to_tensor(array)
        assert (again.dtype, again.stride()) == (dtype, view.stride())
        assert torch.equal(again, view)


def test_bfloat16_is_its_bits() -> None:
    assert to_array(torch.tensor([1.0, -2.0]).bfloat16()).tolist() == [0x3F80, 0xC000]


@pytest.mark.parametrize("kinds", CHAINS)
def test_a_plan_on_the_processor_is_the_compiled_one_without_a_copy(
    kinds: list[str], config: ModelConfig
) -> None:
    chain = [make_random_expert(config, kind, seed=n) for n, kind in enumerate(kinds)]
    composed, plain = (fold_plan(chain, make_plan_form(config, t)) for t in (ON_HOST, None))
    plan, wanted = composed.compile(), plain.compile()
    assert (composed.nbytes, composed.width) == (plain.nbytes, plain.width)
    assert composed.scratch_bytes == plain.scratch_bytes
    assert composed.shares_adapter_memory == plain.shares_adapter_memory
    assert plan.width == wanted.width
    assert plan.torch_deltas.keys() == wanted.deltas.keys()
    for module, delta in wanted.deltas.items():
        parts = zip(delta.tensors, plan.torch_deltas[module].tensors, strict=True)
        assert all(np.array_equal(one, other.numpy()) for one, other in parts)


def test_published_tensors_are_used_in_place(config: ModelConfig) -> None:
    expert = make_random_expert(config, "lora")
    plan = fold_plan([expert], make_plan_form(config, ON_HOST)).compile()
    for module, [step] in expert.adapter.modules.items():
        a = plan.torch_deltas[module].a
        assert a is not None
        assert a.data_ptr() == step.a.ctypes.data


@pytest.mark.parametrize("kinds", CHAINS)
def test_a_plan_for_a_device_has_the_same_parts_there(
    kinds: list[str], config: ModelConfig
) -> None:
    chain = [make_random_expert(config, kind, seed=n) for n, kind in enumerate(kinds)]
    composed = fold_plan(chain, make_plan_form(config, TorchPlacement(ELSEWHERE)))
    here = fold_plan(chain, make_plan_form(config))
    plan, wanted = composed.compile(), here.compile()
    assert not composed.shares_adapter_memory
    assert composed.width == plan.width == here.width == wanted.width > 0
    parts = [part for delta in plan.torch_deltas.values() for part in delta.tensors]
    assert sum(part.nbytes for part in parts) == composed.nbytes
    assert composed.scratch_bytes >= here.scratch_bytes + composed.nbytes
    assert plan.torch_deltas.keys() == wanted.deltas.keys()
    for module, delta in wanted.deltas.items():
        for one, other in zip(delta.tensors, plan.torch_deltas[module].tensors, strict=True):
            assert other.device.type == ELSEWHERE
            assert one.shape == other.shape


@pytest.mark.parametrize("kinds", CHAINS)
def test_every_part_is_found_again_in_a_copy_of_the_block(
    kinds: list[str], config: ModelConfig
) -> None:
    chain = [make_random_expert(config, kind, seed=n, weight=0.5) for n, kind in enumerate(kinds)]
    compiler = fold_plan(chain, make_plan_form(config, TorchPlacement(ELSEWHERE))).compiler
    assert isinstance(compiler, TorchPlanCompiler)
    memory = allocate_floats(compiler.nbytes // 4)
    deltas = DeltaCompiler(compiler.layers, in_place=False).compile_into(memory, 1)
    block = torch.from_numpy(memory.copy())
    for delta in deltas.values():
        moved = _move_delta(delta, memory, block)
        for one, other in zip(delta.tensors, moved.tensors, strict=True):
            assert np.array_equal(one, other.numpy())
            assert [4 * stride for stride in other.stride()] == list(one.strides)
            assert one.ctypes.data != other.data_ptr()


def test_a_plan_without_changes_is_empty_on_every_device(config: ModelConfig) -> None:
    expert = replace(make_random_expert(config), weight=0.0)
    for target in (ON_HOST, TorchPlacement(ELSEWHERE)):
        form = CompileSpec(config.linear_shapes(), config.hidden_size, target)
        plan = fold_plan([expert], form).compile()
        assert (plan.torch_deltas, plan.nbytes, plan.width) == ({}, 0, 0)
