"""What only a CUDA device can show: capture, memory that does not grow, and whole runs."""

import gc
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.compile import TorchPlacement, fold_plan
from expertctl.engine.torch.cuda_graph_decoder import (
    MAX_GRAPH_KEYS,
    CudaGraphDecoder,
    GraphStepRow,
    estimate_buffer_bytes,
    estimate_step_buffer_bytes,
)
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.devices import get_workspace_bytes
from expertctl.engine.torch.functional import (
    TorchDeltas,
    make_attention_mask,
    scaled_dot_product_attention,
)
from expertctl.engine.torch.reference import reference_attention
from expertctl.engine.torch.weights import load_base_weights
from expertctl.engine_config import BatchingConfig, EngineConfig
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.cli.command_runner import CommandRunner, expertctl
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    build_reference_model,
    stack_logits,
)
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.random_experts import make_plan_form, make_random_expert, make_torch_plan
from tests.engine.serving.harness import SETTINGS, make_request, open_engine_harness
from tests.engine.torch.static_kv_harness import StoreHarness
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "expertctl", "fast", "user_home"]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
CUDA = torch.device("cuda")
SIZES: dict[str, Any] = {"head_dim": 16, "max_position_embeddings": 2048}
TOKENS = 40
STREAMS = 2
"""Prompts are read on the usual one, steps are captured on another."""
LIMIT = 1e-4
"""How far scores may be from those of a processor; products of CUDA are summed in other orders."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    directory = tmp_path_factory.mktemp("llama") / "model"
    return build_reference_model(directory, "llama", attention_bias=True, mlp_bias=True, **SIZES)


def decoder_of(model: ReferenceModel, **options: Any) -> CudaGraphDecoder:
    config = read_model_config(model.directory)
    return CudaGraphDecoder(
        config, load_base_weights(model.directory, config, device=CUDA), **options
    )


def arena_of(decoder: CudaGraphDecoder, rows: int, *, capacity: int = 100) -> StaticKVCache:
    return StaticKVCache(
        decoder.config, rows=rows, capacity=capacity, dtype=torch.float32, device=decoder.device
    )


def plan_on(config: ModelConfig, device: torch.device, kind: str, seed: int) -> TorchDeltas:
    form = make_plan_form(config, TorchPlacement(device.type))
    return fold_plan([make_random_expert(config, kind, seed=seed)], form).compile().torch_deltas


def texts(decoder: CudaGraphDecoder, count: int) -> Tensor:
    """Scores of several texts with plans of their own, [tokens, texts, vocab]."""
    arena = arena_of(decoder, count)
    plans: list[TorchDeltas] = [{}]
    for seed, kind in enumerate(("lora", "dora", "ia3")):
        plans.append(plan_on(decoder.config, decoder.device, kind, seed))
    rows = [arena.get_row(number) for number in range(count)]
    for number, row in enumerate(rows):
        decoder.prefill([number, 3, 9, 27, 5 * number % 61], row, plans[number % 4], chunk=3)
    found = []
    for turn in range(TOKENS):
        step = [GraphStepRow((n + turn) % 61, row, plans[n % 4]) for n, row in enumerate(rows)]
        found.append(decoder.step(step))
    return stack_logits(found)


@pytest.mark.parametrize("count", [1, 2, 5, 16])
def test_captured_steps_give_what_they_give_uncaptured_and_on_a_processor(
    count: int, model: ReferenceModel
) -> None:
    captured, called = (
        decoder_of(model, min_capacity=8),
        decoder_of(model, captures=False, min_capacity=8),
    )
    config = captured.config
    plain = CudaGraphDecoder(config, load_base_weights(model.directory, config), min_capacity=8)
    first = texts(captured, count)
    assert captured.graphs.captured > 1
    assert called.graphs.captured == 0
    assert float((first - texts(called, count)).abs().max()) <= LIMIT
    assert float((first - texts(plain, count)).abs().max()) <= LIMIT


def test_a_graph_is_captured_once_for_each_bucket_and_replayed(model: ReferenceModel) -> None:
    decoder = decoder_of(model, min_capacity=8)
    arena = arena_of(decoder, 4)
    rows = [arena.get_row(number) for number in range(4)]
    seen = []
    for turn in range(TOKENS):
        for batch in (rows[:1], rows[1:2], rows):
            decoder.step([GraphStepRow(turn, row) for row in batch])
        seen.append(decoder.graphs.captured)
    lengths = {8, 16, 32, 64, 100}
    again = 2  # of one row and of two, captured before there was room for four
    kinds = 3 * len(lengths)
    anew = 2 * (
        (kinds + again) // MAX_GRAPH_KEYS
    )  # one kind too many clears all, two of them still used
    assert seen[-1] <= kinds + again + anew
    assert seen[-1] == seen[-4]
    decoder.free_buffers()
    decoder.decode(1, arena.get_row(0))
    assert decoder.graphs.captured == seen[-1] + 1


def test_a_step_allocates_nothing_on_the_device(model: ReferenceModel) -> None:
    decoder = decoder_of(model)
    arena = arena_of(decoder, 5)
    plans = [plan_on(decoder.config, CUDA, kind, 7) for kind in ("lora", "dora", "ia3")]
    rows, out = [arena.get_row(number) for number in range(5)], np.empty((5, 61), np.float32)

    def step(turn: int) -> None:
        batch = [GraphStepRow(turn, row, plans[(n + turn) % 3]) for n, row in enumerate(rows)]
        decoder.step(batch, out=out)

    for turn in range(3):
        step(turn)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for turn in range(30):
        step(turn)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("capacity", [64, 1500])
def test_no_more_is_taken_than_was_announced(
    capacity: int, count: int, model: ReferenceModel
) -> None:
    decoder = decoder_of(model, rows=count)
    config, arena = decoder.config, arena_of(decoder, count, capacity=capacity)
    rows = [arena.get_row(number) for number in range(count)]
    plans = [plan_on(config, CUDA, "lora", 2 + number) for number in range(count)]
    decoder.decode(1, arena_of(decoder, 1).get_row(0), plans[0])  # libraries have their workspaces
    decoder.free_buffers()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for row, plan in zip(rows, plans, strict=True):
        decoder.prepare(row, plan, rows=count)
        decoder.prefill([n % 61 for n in range(capacity - 20)], row, plan)
    for token in range(20):
        batch = zip(rows, plans, strict=True)
        decoder.step([GraphStepRow(token, row, plan) for row, plan in batch])
    width = max(len(delta.a) for plan in plans for delta in plan.values() if delta.a is not None)
    sizes = {"capacity": capacity, "rows": count, "plans": count, "width": width}
    announced = estimate_buffer_bytes(config, **sizes)
    if count > 1:  # graphs of the steps before the slots grew may still be held
        announced += estimate_step_buffer_bytes(config, **sizes)
    announced += STREAMS * get_workspace_bytes()  # torch lets go of one with the graphs that rest
    rounding = 2 << 20  # a block of the allocator
    assert torch.cuda.max_memory_allocated() - before <= announced + rounding


@pytest.mark.parametrize(("start", "tokens", "window"), [(0, 5, None), (7, 4, None), (7, 4, 3)])
@pytest.mark.parametrize("start_alone", [False, True])
def test_attention_is_the_textbook_formula(
    start: int, tokens: int, window: int | None, start_alone: bool
) -> None:
    count = 1 if start_alone else tokens
    generator = torch.Generator().manual_seed(1)
    queries = torch.randn(6, count, 16, generator=generator)
    keys, values = torch.randn(2, 2, start + count, 16, generator=generator)
    view = make_attention_mask(start, count, window, device=CUDA)
    given = scaled_dot_product_attention(
        queries.to(CUDA), keys.to(CUDA), values.to(CUDA), view
    ).cpu()
    wanted = reference_attention(queries, keys, values, window=window)
    assert float((given - wanted).abs().max()) <= 1e-5


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_plan_is_the_same_on_the_device(kind: str, model: ReferenceModel) -> None:
    config = read_model_config(model.directory)
    chain = [make_random_expert(config, kind), make_random_expert(config, seed=1)]
    form = make_plan_form(config, TorchPlacement("cuda"))
    there, here = fold_plan(chain, form).compile(), make_torch_plan(config, chain)
    for module, delta in here.torch_deltas.items():
        for one, other in zip(delta.tensors, there.torch_deltas[module].tensors, strict=True):
            assert other.is_cuda
            assert torch.equal(one, other.cpu())


@pytest.mark.parametrize("window", [None, 4])
def test_a_whole_text_equals_transformers(window: int | None, oracle: MakeReferenceModel) -> None:
    model = oracle("mistral", sliding_window=window, **SIZES)
    decoder, ids = decoder_of(model, min_capacity=4), [(7 * n * n + 3 * n) % 61 for n in range(50)]
    row = arena_of(decoder, 1).get_row(0)
    scores = [decoder.prefill(ids[:20], row, chunk=7).logits]
    scores += [decoder.decode(token, row).logits for token in ids[20:]]
    assert float((stack_logits(scores) - model.compute_logits(ids)[19:]).abs().max()) <= LIMIT


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_run_answers_on_the_device(dtype: str, expertctl: CommandRunner) -> None:
    words = ("run", "Sort these numbers: 41, 17, 23, 15", "--greedy", "--json", "--dtype", dtype)
    there = expertctl(*words, "--device", "cuda").document
    assert there["numerics"]["backend"] == "cuda"
    assert there["memory"]["base"] > 0
    assert "15, 17, 23, 41" in there["text"]
    assert expertctl(*words, "--device", "auto").document["text"] == there["text"]


def test_a_traced_run_tells_each_layer(expertctl: CommandRunner) -> None:
    words = ("run", "Sort these numbers: 41, 17, 23", "--greedy", "--json", "--device", "cuda")
    plain, traced = expertctl(*words).document, expertctl(*words, "--trace").document
    assert traced["text"] == plain["text"]
    assert traced["trace"]["token_ms"]["places"]["head"] > 0


def read_in_rows(
    decoder: CudaGraphDecoder, harness: StoreHarness, plans: Sequence[TorchDeltas]
) -> Tensor:
    """Scores of sequences that come one after the other into a batch, each with its plan."""
    found = []
    with ExitStack() as stack:
        running = []
        for number, plan in enumerate(plans):
            ids = [(7 * number + 3 * place) % 61 for place in range(5 + number)]
            loan = stack.enter_context(harness.lend(ids, capacity=60, cache_key=None))
            decoder.prepare(loan.cache, plan, rows=len(plans))
            decoder.prefill(ids, loan.cache, plan)
            running.append((loan.cache, plan))
            for turn in range(12):
                rows = [GraphStepRow((n + turn) % 61, *each) for n, each in enumerate(running)]
                found.append(torch.from_numpy(decoder.step(rows)))
    return torch.cat(found)


def test_rows_that_a_store_lends_are_captured_together_and_their_memory_is_given_back(
    model: ReferenceModel,
) -> None:
    """Graphs that read it may stay; the next arena is read by others."""
    captured = decoder_of(model, min_capacity=8, rows=3)
    called = decoder_of(model, min_capacity=8, rows=3, captures=False)
    config = captured.config
    plans = [{}, plan_on(config, CUDA, "lora", 3), plan_on(config, CUDA, "ia3", 5)]
    harness = StoreHarness(config, capacity=60, longest=60, device=CUDA)
    first = read_in_rows(captured, harness, plans)
    assert captured.graphs.captured > 2
    for _ in range(2):
        gc.collect()
        before, size = torch.cuda.memory_allocated(), harness.store.nbytes
        harness.store.clear()
        assert harness.budget.used == 0
        assert before - torch.cuda.memory_allocated() >= size > 0
        assert float((read_in_rows(captured, harness, plans) - first).abs().max()) <= LIMIT
    harness.store.clear()
    assert float((read_in_rows(called, harness, plans) - first).abs().max()) <= LIMIT


def test_a_server_decodes_rows_with_different_plans_as_a_processor_does_one(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(*(engine_packages.package(f"acme/{n}", seed=i) for i, n in enumerate("ab")))
    names: list[tuple[str, ...]] = [(), ("a",), ("b",), ("a", "b")]
    wanted = [make_request(f"Sort: {n}, 1", *names[n % 4], max_tokens=24) for n in range(8)]
    here = replace(SETTINGS, batching=BatchingConfig(rows=1))
    with open_engine_harness(user_home.home, here) as harness:
        expected = [harness.answer(one).results[0].generated.tokens for one in wanted]
    there = EngineConfig(device="cuda", batching=BatchingConfig(rows=4))
    with open_engine_harness(user_home.home, there) as harness:
        callers = [harness.submit_until_ready(one) for one in wanted[:4]]
        callers += [harness.submit(one) for one in wanted[4:]]
        harness.finish(*callers)
        counts = harness.loop.batch.counts
        assert counts.step_rows > counts.steps
        for caller, tokens in zip(callers, expected, strict=True):
            assert caller.results[0].generated.tokens == tokens
            assert caller.results[0].numerics.backend == "cuda"
