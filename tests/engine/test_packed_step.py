"""One step for several texts: each row has its own cache and plan, and the bits it has alone."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.arrays import AnyArray
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.decoder_program import build_decoder_program, estimate_program_bytes
from expertctl.engine.cpu.packed_base import PackedBase, PackedMlp
from expertctl.engine.cpu.program_cache import ADAPTER_SCHEMES, MAX_PROGRAMS, estimate_buffer_bytes
from expertctl.engine.cpu.workspace import RowRange, Workspace, choose_variant
from expertctl.engine.kernels.packed_format import AdapterDtype, PackedDeltas, Scheme
from expertctl.engine.kernels.packed_matrix import MatrixStack
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.result import count_allocations
from expertctl.engine.text.prompt import PromptLogprobs
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError, IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import KERNEL_SIZES, ReferenceModel, build_reference_model, stack_logits
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.packing import pack_base
from tests.engine.random_experts import make_packed_plan, make_random_expert

TOKENS = 6
TEXTS = (1, 2, 5, 16, 19)
"""How many of them are read in one step."""
OBJECTS = 2 << 10
"""Bytes of the Python objects of a call, for each text: its row, its place, tuples, numbers."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    return build_reference_model(
        tmp_path_factory.mktemp("llama") / "model",
        "llama",
        **KERNEL_SIZES,
        attention_bias=True,
        mlp_bias=True,
    )


def decoder_of(
    model: ReferenceModel, crew: ThreadPool, scheme: Scheme = Scheme.FLOAT32
) -> PackedDecoder:
    config = read_model_config(model.directory)
    weights = load_base_weights(model.directory, config)
    return PackedDecoder(pack_base(config, weights, scheme), crew, chunk=8)


def plans_of(
    config: ModelConfig, base: Scheme, adapters: AdapterDtype = "published"
) -> list[PackedDeltas | None]:
    """Base alone, and plans of every kind; several are in bfloat16 where the base is not exact."""
    chains = [
        [("lora", torch.bfloat16)],
        [("lora", torch.bfloat16), ("lora", torch.bfloat16)],
        [("ia3", torch.float32)],
        [("lora", torch.float16)],
        [("lora", torch.bfloat16), ("ia3", torch.float32), ("dora", torch.bfloat16)],
        [("dora", torch.float32)],
        [("ia3", torch.float32), ("ia3", torch.float32)],
    ]
    plans: list[PackedDeltas | None] = [None]
    for number, chain in enumerate(chains):
        experts = [
            make_random_expert(config, kind, seed=10 * number + place, dtype=dtype)
            for place, (kind, dtype) in enumerate(chain)
        ]
        plans.append(make_packed_plan(config, experts, base=base, adapters=adapters))
    return plans


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 61 for place in range(3 + number % 11)]


def token_of(number: int, turn: int) -> int:
    return (5 * number + turn) % 61


def alone(decoder: PackedDecoder, number: int, plan: PackedDeltas | None) -> Tensor:
    """Scores of one text that is read by itself, [1 + tokens, vocab]."""
    cache = PagedKVCache(decoder.config, 40)
    rows = [decoder.prefill(prompt_of(number), cache, plan).logits]
    rows += [decoder.decode(token_of(number, t), cache, plan).logits for t in range(TOKENS)]
    cache.check_integrity()
    return stack_logits(rows)


def together(decoder: PackedDecoder, plans: Sequence[PackedDeltas | None]) -> Tensor:
    """The same of all texts in one batch, [texts, 1 + tokens, vocab]."""
    caches = [PagedKVCache(decoder.config, 40) for _ in plans]
    first = [
        decoder.prefill(prompt_of(number), cache, plan).logits
        for number, (cache, plan) in enumerate(zip(caches, plans, strict=True))
    ]
    rows = [stack_logits(first)]
    for turn in range(TOKENS):
        step = [
            DecodeRow(token_of(number, turn), cache, plan)
            for number, (cache, plan) in enumerate(zip(caches, plans, strict=True))
        ]
        rows.append(decoder.step(step))
    return stack_logits(rows, dim=1)


def split_stacks(base: PackedBase) -> PackedBase:
    """The same base, in which every matrix is a part of its own, as in a GGUF file of all kinds."""
    config = base.config
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

    def split(stack: MatrixStack, *rows: int) -> MatrixStack:
        firsts = np.cumsum([0, *rows[:-1]]).tolist()
        parts = (stack.row_slice(first, count) for first, count in zip(firsts, rows, strict=True))
        return MatrixStack(tuple(parts))

    layers = []
    for layer in base.layers:
        assert isinstance(layer.mlp, PackedMlp)
        wide = config.intermediate_size
        mlp = replace(layer.mlp, gate_up=split(layer.mlp.gate_up, wide, wide))
        layers.append(replace(layer, mlp=mlp, inputs=split(layer.inputs, queries, keys, keys)))
    return replace(base, layers=tuple(layers))


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.INT8])
def test_matrices_in_parts_have_the_bits_of_one_matrix(
    base: Scheme, model: ReferenceModel, crew: ThreadPool
) -> None:
    config = read_model_config(model.directory)
    whole = pack_base(config, load_base_weights(model.directory, config), base)
    decoder = PackedDecoder(whole, crew, chunk=8)
    parts = PackedDecoder(split_stacks(whole), crew, chunk=8)
    plans = plans_of(decoder.config, base)
    for number, plan in enumerate(plans):
        torch.testing.assert_close(
            alone(parts, number, plan), alone(decoder, number, plan), rtol=0, atol=0
        )
    torch.testing.assert_close(together(parts, plans), together(decoder, plans), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("base", "adapters"),
    [
        (Scheme.FLOAT32, "published"),
        (Scheme.BFLOAT16, "published"),
        (Scheme.INT8, "published"),
        (Scheme.INT4, "int8"),
        (Scheme.FLOAT32, "int8"),
        (Scheme.BFLOAT16, "fp16"),
    ],
)
def test_a_row_has_the_bits_that_it_has_alone(
    base: Scheme, adapters: AdapterDtype, model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew, base)
    kinds = plans_of(decoder.config, base, adapters)
    plans = [kinds[5 * number % len(kinds)] for number in range(max(TEXTS))]
    one = ThreadPool(1)
    try:
        other = decoder_of(model, one, base)
        wanted = torch.stack([alone(other, number, plan) for number, plan in enumerate(plans)])
    finally:
        one.close()
    assert not torch.allclose(wanted[0], wanted[1], atol=0.05)
    for texts in TEXTS:
        batch = together(decoder, plans[:texts])
        for number, scores in enumerate(batch):
            assert torch.equal(scores, wanted[number]), (texts, number)


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8])
def test_a_step_allocates_nothing_whoever_is_in_it(
    scheme: Scheme, model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew, scheme)
    plans = plans_of(decoder.config, scheme)
    caches = [PagedKVCache(decoder.config, 1000) for _ in plans]
    out = np.empty((len(plans), decoder.config.vocab_size), np.float32)

    def turns(count: int) -> None:
        for turn in range(count):
            shift = turn % len(plans)
            rows = [
                DecodeRow(turn % 61, cache, plans[place - shift])
                for place, cache in enumerate(caches)
            ]
            decoder.step(rows, out=out)

    found = count_fewest_allocations(lambda: turns(100))
    assert found.python_bytes < OBJECTS * len(plans) < decoder.nbytes
    assert found.compiled_arrays == 0
    assert found.native_bytes < 1 << 17


def test_what_a_decoder_holds_is_what_was_announced(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    for base in (Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT4):
        decoder = decoder_of(model, crew, base)
        config = decoder.config
        assert decoder.nbytes == 0
        with count_allocations() as found:
            decoder.prefill(prompt_of(9), PagedKVCache(config, 40))
        assert decoder.nbytes <= estimate_buffer_bytes(config, base, tokens=12, chunk=8)
        assert found.python_bytes >= decoder.nbytes
        for dtype in (torch.bfloat16, torch.float32):
            chain = [
                make_random_expert(config, "lora", dtype=dtype),
                make_random_expert(config, "ia3"),
            ]
            plan = make_packed_plan(config, chain, base=base)
            other = decoder_of(model, crew, base)
            other.step([DecodeRow(1, PagedKVCache(config, 9), plan) for _ in range(3)])
            announced = partial(
                estimate_buffer_bytes, config, base, tokens=3, chunk=8, rows=3, width=plan.width
            )
            assert other.nbytes <= announced(adapters=[plan.scheme]) <= announced()


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.INT8])
def test_plans_of_factors_and_of_several_schemes_hold_no_more_than_was_announced(
    base: Scheme, model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew, base)
    config, room = decoder.config, partial(PagedKVCache, decoder.config, 40)
    factors = make_packed_plan(config, [make_random_expert(config, "ia3")], base=base)
    assert factors.width == 0
    for _ in range(2):
        decoder.prefill(prompt_of(9), room(), factors)
        decoder.decode(1, room(), factors)
    assert 0 < decoder.nbytes <= estimate_buffer_bytes(config, base, tokens=12, chunk=8)
    decoder.free_buffers()
    plans = [plan for plan in plans_of(config, base) if plan is not None]
    decoder.step([DecodeRow(1, room(), plan) for plan in plans])
    announced = estimate_buffer_bytes(
        config,
        base,
        tokens=len(plans),
        chunk=8,
        rows=len(plans),
        width=max(plan.width for plan in plans),
        adapters={plan.scheme for plan in plans if plan.width},
    )
    assert decoder.nbytes <= announced


def test_programs_are_few_and_take_no_more_than_is_said(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew, Scheme.INT8)
    config = decoder.config
    plans = plans_of(config, Scheme.INT8)
    for plan in (*plans, *plans):
        decoder.decode(1, PagedKVCache(config, 9), plan)
        assert len(decoder._programs) <= MAX_PROGRAMS
    room = Workspace(config, Scheme.INT8, tokens=4, rows=4)
    for chosen in ([], plans[1:2], plans[3:4], plans[5:6], plans[1:]):
        kinds = choose_variant(
            single_sequence=False,
            numbers=Scheme.FLOAT16,
            plans=[plan for plan in chosen if plan is not None],
        )
        build = partial(build_decoder_program, decoder._base, room, kinds)
        held = build()  # kernels and room are there from now on
        found = count_fewest_allocations(build)
        assert held.layers[0].program.table.nbytes < found.python_bytes
        assert found.python_bytes <= estimate_program_bytes(
            config, schemes=len(kinds.adapters), scales=kinds.scales
        )


def test_scores_of_another_shape_are_refused_before_anything_is_read(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew)
    caches = [PagedKVCache(decoder.config, 9) for _ in range(2)]
    rows = [DecodeRow(3, cache) for cache in caches]
    with pytest.raises(AssertionError, match="scores are"):
        decoder.step(rows, out=np.empty((1, decoder.config.vocab_size), np.float32))
    assert [cache.length for cache in caches] == [0, 0]


def test_nothing_is_read_where_one_of_the_texts_has_no_room(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew)
    full, free = PagedKVCache(decoder.config, 1), PagedKVCache(decoder.config, 9)
    decoder.decode(4, full)
    with pytest.raises(BudgetError):
        decoder.step([DecodeRow(3, free), DecodeRow(3, full)])
    with pytest.raises(IncompatibleError):
        decoder.step([DecodeRow(3, free), DecodeRow(61, PagedKVCache(decoder.config, 9))])
    assert (free.length, full.length) == (0, 1)


def test_scores_are_written_where_it_was_asked(model: ReferenceModel, crew: ThreadPool) -> None:
    decoder = decoder_of(model, crew)
    out = np.empty(decoder.config.vocab_size, np.float32)
    cache, other = PagedKVCache(decoder.config, 9), PagedKVCache(decoder.config, 9)
    fresh = decoder.decode(5, other).logits
    given = decoder.decode(5, cache, out=out).logits
    assert np.shares_memory(given, out)
    assert np.array_equal(given, fresh)
    decoder.decode(6, other)
    assert np.array_equal(given, fresh)


def test_threads_that_call_at_once_get_what_they_get_alone(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew)
    plans = plans_of(decoder.config, Scheme.FLOAT32)
    wanted = [alone(decoder, number, plan) for number, plan in enumerate(plans)]
    found: dict[int, Tensor] = {}

    def read(number: int) -> None:
        found[number] = alone(decoder, number, plans[number])

    for _ in range(3):
        threads = [threading.Thread(target=read, args=(n,)) for n in range(len(plans))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(torch.equal(found[n], scores) for n, scores in enumerate(wanted))


def test_a_program_that_runs_again_as_it_was_set_gives_the_same(
    tmp_path: Path, crew: ThreadPool
) -> None:
    """Counts of one run that the next began with would let B begin before A is done."""
    model = build_reference_model(tmp_path / "qwen3", **KERNEL_SIZES)
    config = read_model_config(model.directory)
    base = pack_base(config, load_base_weights(model.directory, config), Scheme.FLOAT32)
    plan = make_packed_plan(config, [make_random_expert(config)])
    room = Workspace(config, Scheme.FLOAT32, tokens=4, rows=4)
    wanted = choose_variant(single_sequence=False, numbers=Scheme.FLOAT32, plans=[plan])
    program, pages = (
        build_decoder_program(base, room, wanted),
        [PagedKVCache(config, 9) for _ in range(4)],
    )
    for place, cache in enumerate(pages):
        cache.ensure_capacity(1)
        room.tables[place] = cache.table
    room.tokens[...], room.positions[...] = (3, 14, 15, 9), 0
    program.set(4, [RowRange(plan, 1, 3)])
    [layers] = [stage.program for stage in program.layers]

    def scores() -> Tensor:
        for part in (program.embed, layers, program.score):
            crew.run(part)
        return torch.from_numpy(room.logits.copy())

    assert any(name.startswith("multiply float32, adapted") for name in layers.names)
    first = scores()
    assert all(torch.equal(scores(), first) for _ in range(50))


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8])
def test_texts_that_step_between_two_layers_of_a_prompt_change_no_bit_of_it_nor_of_theirs(
    base: Scheme, model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew, base)
    kinds = plans_of(decoder.config, base)
    plans, plan = (kinds[1], kinds[3]), kinds[5]
    prompt = [(11 * place) % 61 for place in range(30)]
    whole = PagedKVCache(decoder.config, 40)
    expected = decoder.prefill(prompt, whole, plan).logits
    caches = [PagedKVCache(decoder.config, 80) for _ in plans]
    for number, cache in enumerate(caches):
        decoder.prefill(prompt_of(number), cache, plans[number])
    turns = list[AnyArray]()

    def step() -> None:
        turn = len(turns)
        rows = [DecodeRow(token_of(n, turn), cache, plans[n]) for n, cache in enumerate(caches)]
        turns.append(decoder.step(rows))

    cut = PagedKVCache(decoder.config, 40)
    for part in (prompt[:3], prompt[3:4], prompt[4:]):  # any chunks have the bits of one
        found = decoder.prefill(part, cut, plan, between_layers=step).logits
    assert np.array_equal(found, expected)
    chunks = 1 + 1 + 4
    assert len(turns) == chunks * (decoder.config.layers - 1)
    again = [PagedKVCache(decoder.config, 80) for _ in plans]
    for number, cache in enumerate(again):
        decoder.prefill(prompt_of(number), cache, plans[number])
        alone = [
            decoder.decode(token_of(number, turn), cache, plans[number]).logits
            for turn in range(len(turns))
        ]
        assert torch.equal(stack_logits([rows[number] for rows in turns]), stack_logits(alone))
    widest = max(each.width for each in (*plans, plan) if each is not None)
    assert decoder.nbytes <= estimate_buffer_bytes(
        decoder.config, base, tokens=30, chunk=8, rows=2, width=widest, adapters=ADAPTER_SCHEMES
    )


def test_texts_that_step_while_a_prompt_is_scored_change_no_score(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder, alone = decoder_of(model, crew), decoder_of(model, crew)
    prompt = [(11 * place) % 61 for place in range(30)]
    wanted, found = PromptLogprobs(prompt, top=3), PromptLogprobs(prompt, top=3)
    expected = alone.prefill(prompt, PagedKVCache(alone.config, 40), scores=wanted.record).logits
    caches = [PagedKVCache(decoder.config, 300) for _ in range(2)]
    for number, cache in enumerate(caches):
        decoder.prefill(prompt_of(number), cache)
    times = 0

    def step() -> None:
        nonlocal times
        times += 1
        decoder.step([DecodeRow(token_of(n, times), cache) for n, cache in enumerate(caches)])

    result = decoder.prefill(
        prompt, PagedKVCache(decoder.config, 40), scores=found.record, between_layers=step
    )
    assert times > 4 * (decoder.config.layers - 1)  # of four chunks: others step there, too
    assert np.array_equal(result.logits, expected)
    for place in range(1, len(prompt)):
        assert found.logprob(place) == wanted.logprob(place)
        assert found.top_logprobs(place) == wanted.top_logprobs(place)


def test_a_prompt_that_is_stopped_between_two_layers_leaves_nothing(
    model: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = decoder_of(model, crew)
    cache = PagedKVCache(decoder.config, 40)
    decoder.prefill([1, 2, 3], cache)

    def stop() -> None:
        raise BudgetError("enough")

    with pytest.raises(BudgetError, match="enough"):
        decoder.prefill([4, 5, 6], cache, between_layers=stop)
    assert cache.length == 3
    other = PagedKVCache(decoder.config, 40)
    expected = decoder.prefill([1, 2, 3, 4, 5, 6], other).logits
    assert np.array_equal(decoder.prefill([4, 5, 6], cache).logits, expected)
