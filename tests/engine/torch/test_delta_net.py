"""Layers with a gated DeltaNet in torch: long prompts, batches, and states that are kept."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from expertctl.digest import Digest
from expertctl.engine.arrays import AnyArray
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache, estimate_static_kv_bytes
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.sequence_cache import KVCache, KVCacheFactory, SequenceKVCache
from expertctl.engine.torch.static_kv_store import StaticKVStore, plan_arena
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import CancelledError
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import assert_same_logits, stack_logits
from tests.engine.family_models import DELTA_NET, build_family_model

CONFIG = {
    **DELTA_NET,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "max_position_embeddings": 512,
}
TEXT = [(n * n + 7 * n) % 61 for n in range(200)]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[Decoder, CudaGraphDecoder, Any]:
    directory = tmp_path_factory.mktemp("base")
    model = build_family_model(directory, "qwen3_5_text", **CONFIG)
    config = read_model_config(directory)
    weights = load_base_weights(directory, config)
    steps = CudaGraphDecoder(config, weights, rows=3, captures=False, min_capacity=4)
    return Decoder(config, weights), steps, model


def read(decoder: Decoder, ids: Sequence[int]) -> AnyArray:
    return decoder.prefill(ids, KVCache(decoder.config, 200)).logits


def make_arena(config: ModelConfig, rows: int = 3) -> StaticKVCache:
    return StaticKVCache(config, rows=rows, capacity=200, dtype=torch.float32, device=CPU)


def make_request(config: ModelConfig, ids: Sequence[int]) -> KVRequest:
    return KVRequest(
        cache_key="chat",
        identity=Digest("sha256:" + "0" * 64),
        config=config,
        ids=tuple(ids),
        virtual_tokens=0,
        capacity=200,
    )


@pytest.mark.parametrize(("prompt", "chunk"), [(128, 512), (193, 64), (150, 50), (70, 7)])
def test_long_prompts_equal_one_pass_of_transformers(
    base: tuple[Decoder, CudaGraphDecoder, Any], prompt: int, chunk: int
) -> None:
    decoder, _, model = base
    with torch.inference_mode():
        theirs = model(torch.tensor([TEXT]), use_cache=False).logits[0]
    cache = KVCache(decoder.config, 200)
    rows = [decoder.prefill(TEXT[:prompt], cache, chunk=chunk).logits]
    rows += [decoder.decode(token, cache).logits for token in TEXT[prompt : prompt + 4]]
    cache.check_integrity()
    assert_same_logits(stack_logits(rows), theirs[prompt - 1 : prompt + 4], relative=True)


def test_a_failed_prompt_changes_no_state(base: tuple[Decoder, CudaGraphDecoder, Any]) -> None:
    decoder, _, _ = base
    cache, calls = KVCache(decoder.config, 200), list[int]()
    decoder.prefill(TEXT[:37], cache)

    def fail(tokens: int) -> None:
        calls.append(tokens)
        if len(calls) == 2:
            raise CancelledError("it is no longer needed")

    with pytest.raises(CancelledError):
        decoder.prefill(TEXT[37:190], cache, chunk=70, progress=fail)
    assert cache.length == 37
    found = decoder.prefill(TEXT[37:60], cache).logits
    assert_same_logits(found, read(decoder, TEXT[:60]), relative=True)


def test_a_step_that_is_repeated_changes_no_state(
    base: tuple[Decoder, CudaGraphDecoder, Any],
) -> None:
    """A device calls a step once before it captures it, and rows between others are unused."""
    decoder, steps, _ = base
    arena = make_arena(decoder.config)
    rows = {number: arena.get_row(number) for number in (0, 2)}
    kept = arena.get_row(1)
    steps.prefill(TEXT[50:70], kept)
    for number, row in rows.items():
        steps.prefill(TEXT[number : 40 + number], row)
    inner = steps.graphs.run
    steps.graphs.run = lambda key, function: (inner(key, function), inner(key, function))[0]  # type: ignore[method-assign]  # as a capture does
    try:
        for token in (5, 9, 3):
            batch = [GraphStepRow(token + number, row, {}) for number, row in rows.items()]
            found = steps.step(batch)
    finally:
        steps.graphs.run = inner  # type: ignore[method-assign]  # it is shared
    for logits, number in zip(found, rows, strict=True):
        ids = [*TEXT[number : 40 + number], *(n + number for n in (5, 9, 3))]
        assert_same_logits(logits, read(decoder, ids), relative=True)
    assert_same_logits(
        steps.decode(TEXT[70], kept).logits, read(decoder, TEXT[50:71]), relative=True
    )


def make_sequence_store(config: ModelConfig) -> SequenceKVCache:
    def estimate(request: KVRequest) -> int:
        capacity = request.capacity - 1
        return estimate_static_kv_bytes(config, capacity=capacity, dtype=torch.float32)

    budget = MemoryBudget(1 << 26)
    factory = KVCacheFactory(lambda wanted: KVCache(config, wanted.capacity), estimate)
    return SequenceKVCache(AdapterCache(ram=budget, device=budget), factory)


def make_row_store(config: ModelConfig) -> StaticKVStore:
    budget = MemoryBudget(1 << 26)
    plan = plan_arena(
        rows=3,
        context=200,
        memory=None,
        kv_bytes=lambda n: estimate_static_kv_bytes(config, capacity=n, dtype=torch.float32),
        buffer_bytes=lambda n: n,
    )
    tiers = AdapterCache(ram=budget, device=budget)
    return StaticKVStore(tiers, config, plan, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize("make_store", [make_sequence_store, make_row_store])
def test_only_a_whole_sequence_is_continued(
    base: tuple[Decoder, CudaGraphDecoder, Any], make_store: Any
) -> None:
    decoder, config = base[0], base[0].config
    store = make_store(config)
    for ids, expected in (
        (TEXT[:60], 0),
        (TEXT[:90], 60),
        (TEXT[:80], 0),
        ([*TEXT[:85], 3, 4], 80),
        (TEXT[:120], 90),
    ):
        with store.allocate(make_request(config, ids)) as loan:
            store.check_integrity()
            assert loan.reused == expected
            found = decoder.prefill(ids[loan.reused :], loan.cache).logits
            assert_same_logits(found, read(decoder, ids), relative=True)
            loan.complete(ids)
        store.check_integrity()
