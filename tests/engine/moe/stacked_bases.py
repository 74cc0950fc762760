"""Bases whose routed experts are in a stack, all of them or some, on any device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.base_weights import load_base
from expertctl.engine.linear import Deltas
from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.moe.expert_stack import StackShape
from expertctl.engine.moe.stacked_experts import StackedExperts, open_experts
from expertctl.engine.static_decoder import StaticDecoder
from expertctl.engine.static_kv import KVArena
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import ModelConfig, read_config
from tests.engine.conftest import Oracle

CPU = torch.device("cpu")


def plan_of(config: ModelConfig, slots: int, **options: Any) -> CachePlan:
    """So many slots in each layer, and the pool that they need beside them."""
    assert config.experts is not None
    layers, experts = len(config.experts.layers), config.experts.count
    return CachePlan(layers=layers, experts=experts, slots=slots, **options)


@contextmanager
def stacked(
    model: Oracle,
    *,
    slots: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    captures: bool = True,
    **options: Any,
) -> Iterator[tuple[StaticDecoder, StackedExperts]]:
    """A base with so many slots in each layer; None: every expert is there."""
    config = read_config(model.directory)
    experts = open_experts(
        config,
        base_tensors(model.directory, config),
        StackShape.of(config, dtype),
        plan=None if slots is None else plan_of(config, slots, **options),
        device=device,
    )
    weights = load_base(model.directory, config, dtype=dtype, device=device, experts=False)
    if experts.is_whole:
        experts.fill_all()
    try:
        yield (
            StaticDecoder(config, weights, experts=experts, captures=captures, shortest=4),
            experts,
        )
    finally:
        experts.close()


def arena_of(decoder: StaticDecoder, rows: int = 1, *, capacity: int = 60) -> KVArena:
    return KVArena(
        decoder.config, rows=rows, capacity=capacity, dtype=torch.float32, device=decoder.device
    )


def scores(
    decoder: StaticDecoder,
    ids: Sequence[int],
    *,
    prefill: int,
    deltas: Deltas | None = None,
    **options: Any,
) -> Tensor:
    """Scores from the last prompt token on, [1 + decoded, vocab]."""
    row, plan = arena_of(decoder).row(0), deltas or {}
    found = [decoder.prefill(ids[:prefill], row, plan, **options).logits.cpu()]
    found += [decoder.decode(token, row, plan).logits for token in ids[prefill:]]
    row.check_integrity()
    return torch.stack(found)
