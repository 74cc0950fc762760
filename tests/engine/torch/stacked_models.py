"""Bases whose routed experts are in a stack, all of them or some, on any device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from expertctl.engine.moe.cache_plan import CachePlan
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.expert_stack import StackShape
from expertctl.engine.torch.functional import TorchDeltas
from expertctl.engine.torch.stacked_experts import StackedExperts, open_stacked_experts
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import ReferenceModel, stack_logits

CPU = torch.device("cpu")


def make_slot_plan(config: ModelConfig, slots: int, **options: Any) -> CachePlan:
    """So many slots in each layer, and the pool that they need beside them."""
    assert config.experts is not None
    layers, experts = len(config.experts.layers), config.experts.count
    return CachePlan(layers=layers, experts=experts, slots=slots, **options)


@contextmanager
def load_stacked_decoder(
    model: ReferenceModel | Path,
    *,
    slots: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    captures: bool = True,
    **options: Any,
) -> Iterator[tuple[CudaGraphDecoder, StackedExperts]]:
    """A base with so many slots in each layer; None: every expert is there."""
    directory = model if isinstance(model, Path) else model.directory
    config = read_model_config(directory)
    experts = open_stacked_experts(
        config,
        read_base_tensors(directory, config),
        StackShape.from_config(config, dtype),
        plan=None if slots is None else make_slot_plan(config, slots, **options),
        device=device,
    )
    weights = load_base_weights(directory, config, dtype=dtype, device=device, experts=False)
    if experts.is_whole:
        experts.load_all()
    try:
        yield (
            CudaGraphDecoder(config, weights, experts=experts, captures=captures, min_capacity=4),
            experts,
        )
    finally:
        experts.close()


def make_kv_cache(decoder: CudaGraphDecoder, rows: int = 1, *, capacity: int = 60) -> StaticKVCache:
    return StaticKVCache(
        decoder.config, rows=rows, capacity=capacity, dtype=torch.float32, device=decoder.device
    )


def compute_scores(
    decoder: CudaGraphDecoder,
    ids: Sequence[int],
    *,
    prefill: int,
    deltas: TorchDeltas | None = None,
    **options: Any,
) -> Tensor:
    """Scores from the last prompt token on, [1 + decoded, vocab]."""
    row, plan = make_kv_cache(decoder).get_row(0), deltas or {}
    found = [decoder.prefill(ids[:prefill], row, plan, **options).logits]
    found += [decoder.decode(token, row, plan).logits for token in ids[prefill:]]
    row.check_integrity()
    return stack_logits(found)
