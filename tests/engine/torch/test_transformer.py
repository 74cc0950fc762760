"""Layers alone: what a pass says about plans, stored rows and rows that attend is what they do."""

import torch

from expertctl.engine.torch.cuda_graph_step import StepPlans
from expertctl.engine.torch.functional import FeedForward, Linear, LinearPlans, TorchDeltas
from expertctl.engine.torch.routed_mlp import SharedExpert
from expertctl.engine.torch.sequence_cache import KVCache
from tests.engine.conftest import ReferenceModel
from tests.engine.torch.test_lora_slots import DOWN, UP, draw, lora, slots_of

IDS = [3, 1, 4, 1, 5]


def test_only_the_last_rows_attend_but_all_are_stored(shared_oracle: ReferenceModel) -> None:
    decoder = shared_oracle.load_decoder()
    model, whole, part = decoder.transformer, *(KVCache(decoder.config, 8) for _ in range(2))
    with torch.inference_mode():
        x = model.embed(torch.tensor(IDS))
        every = model.run_attention(x, 0, decoder._start_pass(whole, {}, len(IDS)))
        last = model.run_attention(x, 0, decoder._start_pass(part, {}, len(IDS), query_rows=2))
    assert every.shape == x.shape
    assert last.shape == (2, x.shape[1])
    assert torch.allclose(last, every[-2:], atol=1e-6)
    for one, other in ((whole._keys, part._keys), (whole._values, part._values)):
        assert torch.equal(one[0, :, : len(IDS)], other[0, :, : len(IDS)])


def test_an_mlp_computes_each_row_with_its_own_plan() -> None:
    plans: list[TorchDeltas] = [{}, {UP: lora(3, seed=1)}, {UP: lora(5), DOWN: lora(2, seed=2)}]
    gate, up, down = (
        Linear(module, draw(8, 8, seed=seed), None)
        for seed, module in enumerate(("model.layers.0.mlp.gate_proj", UP, DOWN))
    )
    mlp = SharedExpert(FeedForward(gate, up, down), Linear("gate", draw(1, 8, seed=9), None))
    rows = [plans[n] for n in (2, 0, 1, 2)]
    room = slots_of(plans, slots=4)
    slots = torch.tensor(room.assign_slots(rows))
    own: LinearPlans = StepPlans(room, slots, room.mask_foreign_columns(slots))
    x = draw(len(rows), 8, seed=22)
    wanted = torch.cat([mlp(x[n : n + 1], plan) for n, plan in enumerate(rows)])
    assert torch.allclose(mlp(x, own), wanted, atol=1e-5)
