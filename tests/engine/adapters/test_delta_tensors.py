"""Plans for another device: compiled in the machine's memory, moved as one block, never shared."""

import pytest
import torch

from expertctl.engine.adapters.compile import CompileSpec, fold_plan
from expertctl.engine.adapters.plan_tensors import _rebase_deltas
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import ReferenceModel
from tests.engine.random_experts import make_plan_form, make_random_expert

ELSEWHERE = torch.device("meta")
"""A device whose tensors have shapes and no numbers."""
CHAINS = [["lora"], ["dora"], ["ia3"], ["lora", "lora"], ["lora", "ia3", "dora"]]


@pytest.mark.parametrize("kinds", CHAINS)
def test_a_plan_for_a_device_has_the_same_parts_there(
    kinds: list[str], shared_oracle: ReferenceModel
) -> None:
    config = read_model_config(shared_oracle.directory)
    chain = [make_random_expert(config, kind, seed=n) for n, kind in enumerate(kinds)]
    form = CompileSpec(config.linear_shapes(), config.hidden_size, torch.float32, ELSEWHERE)
    composed, here = fold_plan(chain, form), fold_plan(chain, make_plan_form(config))
    plan, wanted = composed.compile(), here.compile()
    assert not composed.shares_adapter_memory
    assert composed.width == plan.width == here.width == wanted.width > 0
    sizes = [delta.nbytes for delta in plan.deltas.values()]
    assert sum(sizes) == composed.nbytes
    assert composed.scratch_bytes >= here.scratch_bytes + composed.nbytes
    assert plan.deltas.keys() == wanted.deltas.keys()
    for module, delta in wanted.deltas.items():
        parts = zip(delta.tensors, plan.deltas[module].tensors, strict=True)
        for one, other in parts:
            assert other.device == ELSEWHERE
            assert one.shape == other.shape


@pytest.mark.parametrize("kinds", CHAINS[3:])
def test_every_part_is_found_again_in_a_copy_of_the_block(
    kinds: list[str], shared_oracle: ReferenceModel
) -> None:
    config = read_model_config(shared_oracle.directory)
    chain = [make_random_expert(config, kind, seed=n, weight=0.5) for n, kind in enumerate(kinds)]
    wider = CompileSpec(
        config.linear_shapes(), config.hidden_size, torch.float64, torch.device("cpu")
    )
    for module, delta in (
        fold_plan(chain, wider).compile().deltas.items()
    ):  # of which none is shared
        storage = delta.tensors[0].untyped_storage()
        whole = torch.empty(0, dtype=torch.float64).set_(storage)
        copied = _rebase_deltas({module: delta}, whole.clone())[module]
        for one, other in zip(delta.tensors, copied.tensors, strict=True):
            assert torch.equal(one, other)
            assert one.stride() == other.stride()
            assert one.data_ptr() != other.data_ptr()
