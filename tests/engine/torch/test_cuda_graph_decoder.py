"""Steps over memory that does not move: each text as if it were alone, whatever stands beside it.

Here the function that a CUDA device captures is called as it is. That whole models with experts
equal PEFT is in ``test_compose_against_peft``; what needs a device is in ``test_on_cuda``.
"""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.steps import LinearDelta
from expertctl.engine.arrays import AnyArray
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.torch.cuda_graph_decoder import (
    CudaGraphDecoder,
    GraphStepRow,
    estimate_buffer_bytes,
)
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.functional import TorchDelta, TorchDeltas
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError, IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import (
    MakeReferenceModel,
    ReferenceModel,
    assert_same_logits,
    build_reference_model,
    stack_logits,
)
from tests.engine.random_experts import make_random_expert, make_torch_plan

TOKENS = 9
"""Steps of each text: with the longest prompt they cross two length buckets."""
SHORTEST = 4
CAPACITY = 40
NOTHING: TorchDeltas = {}
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"attention_bias": True, "mlp_bias": True}),
    ("mistral", {"sliding_window": 4}),
    ("mistral", {"sliding_window": 1}),
    ("qwen2", {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 5}),
    ("qwen3", {"num_key_value_heads": 4}),
    ("qwen3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    """A base with every bias, so that each factor of a plan has something to multiply."""
    return build_reference_model(
        tmp_path_factory.mktemp("llama") / "model", "llama", attention_bias=True, mlp_bias=True
    )


def decoder_of(model: ReferenceModel, **options: Any) -> CudaGraphDecoder:
    config = read_model_config(model.directory)
    return CudaGraphDecoder(
        config, load_base_weights(model.directory, config), min_capacity=SHORTEST, **options
    )


def arena_of(decoder: CudaGraphDecoder, rows: int, *, capacity: int = CAPACITY) -> StaticKVCache:
    return StaticKVCache(
        decoder.config,
        rows=rows,
        capacity=capacity,
        dtype=torch.float32,
        device=decoder.device,
    )


def plans_of(config: ModelConfig) -> list[TorchDeltas]:
    """Base alone, and plans of every kind, of many ranks."""
    chains = [["lora"], ["ia3"], ["lora", "lora"], ["dora"], ["lora", "ia3", "dora"], ["ia3"] * 2]
    plans = [NOTHING]
    for number, chain in enumerate(chains):
        experts = [make_random_expert(config, k, seed=10 * number + n) for n, k in enumerate(chain)]
        plans.append(make_torch_plan(config, experts).torch_deltas)
    return plans


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 61 for place in range(3 + number % 11)]


def token_of(number: int, turn: int) -> int:
    return (5 * number + turn) % 61


def alone(plain: Decoder, number: int, plan: TorchDeltas) -> Tensor:
    """What the decoder that allocates as it goes gives one text, [1 + tokens, vocab]."""
    cache = KVCache(plain.config, CAPACITY)
    rows = [plain.prefill(prompt_of(number), cache, plan).logits]
    rows += [plain.decode(token_of(number, turn), cache, plan).logits for turn in range(TOKENS)]
    return stack_logits(rows)


def together(decoder: CudaGraphDecoder, plans: Sequence[TorchDeltas]) -> Tensor:
    """The same of all texts in one batch, [texts, 1 + tokens, vocab]."""
    arena = arena_of(decoder, len(plans))
    caches = [arena.get_row(number) for number in range(len(plans))]
    texts = list(enumerate(zip(caches, plans, strict=True)))
    rows = [stack_logits([decoder.prefill(prompt_of(n), c, plan).logits for n, (c, plan) in texts])]
    for turn in range(TOKENS):
        rows.append(
            decoder.step([GraphStepRow(token_of(n, turn), c, plan) for n, (c, plan) in texts])
        )
    for cache in caches:
        cache.check_integrity()
    return stack_logits(rows, dim=1)


@pytest.mark.parametrize("texts", [1, 2, 5, 16])
def test_each_row_with_its_own_plan_is_as_if_it_were_alone(
    texts: int, model: ReferenceModel
) -> None:
    decoder, plain = decoder_of(model), model.load_decoder()
    kinds = plans_of(decoder.config)
    plans = [kinds[5 * number % len(kinds)] for number in range(texts)]
    for number, scores in enumerate(together(decoder, plans)):
        assert_same_logits(scores, alone(plain, number, plans[number]))


@pytest.mark.parametrize(("arch", "config"), KINDS)
def test_texts_side_by_side_equal_transformers(
    arch: str, config: dict[str, Any], oracle: MakeReferenceModel
) -> None:
    model = oracle(arch, **config)
    batch = together(decoder_of(model), [NOTHING] * 10)  # sums of text 10 cancel in one of them
    for number, scores in enumerate(batch):
        prompt = prompt_of(number)
        text = prompt + [token_of(number, turn) for turn in range(TOKENS)]
        assert_same_logits(scores, model.compute_logits(text)[len(prompt) - 1 :])


def test_what_a_padded_bucket_holds_besides_changes_nothing(model: ReferenceModel) -> None:
    """Texts in rows 0 and 3 of a bucket of four, of a larger arena; rows between were in use."""
    decoder, plain = decoder_of(model), model.load_decoder()
    plans = plans_of(decoder.config)[1:3]
    arena = arena_of(decoder, 6)
    between, after = arena.get_row(1), arena.get_row(5)
    for other in (between, after):
        decoder.prefill(prompt_of(9), other, plans[0])
    kept = [tensor.clone() for tensor in (arena.keys[:, [1, 5]], arena.values[:, [1, 5]])]
    caches = [arena.get_row(0), arena.get_row(3)]
    for number, (cache, plan) in enumerate(zip(caches, plans, strict=True)):
        decoder.prefill(prompt_of(number), cache, plan)
    for turn in range(TOKENS):
        step = [
            GraphStepRow(token_of(number, turn), cache, plan)
            for number, (cache, plan) in enumerate(zip(caches, plans, strict=True))
        ]
        scores = decoder.step(step[::-1])  # in any order
        for number in range(2):
            wanted = alone(plain, number, plans[number])[turn + 1]
            assert_same_logits(scores[1 - number], wanted)
    now = (arena.keys[:, [1, 5]], arena.values[:, [1, 5]])
    for before, tensor in zip(kept, now, strict=True):
        assert torch.equal(before[..., :-1, :], tensor[..., :-1, :])  # all but the spare place
    assert (between.length, after.length) == (len(prompt_of(9)),) * 2


def test_a_text_may_go_on_to_the_last_place_of_its_row(model: ReferenceModel) -> None:
    decoder, ids = decoder_of(model), [(7 * n * n + 3 * n) % 61 for n in range(35)]
    for capacity in (33, 35, 40):
        arena = arena_of(decoder, 3, capacity=capacity)
        full, beside = arena.get_row(2), arena.get_row(0)
        decoder.prefill([1, 2], beside)
        rows = [decoder.prefill(ids[:2], full).logits]
        for token in ids[2 : min(capacity, 35)]:
            rows.append(decoder.step([GraphStepRow(token, full)])[0])
        assert_same_logits(stack_logits(rows), model.compute_logits(ids[: min(capacity, 35)])[1:])
        assert_same_logits(
            decoder.step([GraphStepRow(3, beside)]), model.compute_logits([1, 2, 3])[2:]
        )
        if capacity < 35:
            with pytest.raises(BudgetError):
                decoder.step([GraphStepRow(1, full), GraphStepRow(1, beside)])
            assert (full.length, beside.length) == (capacity, 3)


def test_soft_prompts_and_chunks_stand_before_steps(model: ReferenceModel) -> None:
    decoder, plain = decoder_of(model), model.load_decoder()
    soft = (torch.randn(5, 32, generator=torch.Generator().manual_seed(1)) * 0.2).numpy()
    arena, cache = arena_of(decoder, 1), KVCache(plain.config, CAPACITY)
    wanted = [plain.prefill(prompt_of(9), cache, soft_prompt=soft).logits]
    wanted += [plain.decode(token, cache).logits for token in range(8)]
    row, seen = arena.get_row(0), list[int]()
    first = decoder.prefill(prompt_of(9), row, soft_prompt=soft, chunk=4, progress=seen.append)
    assert first.tokens == sum(seen) == row.length
    rows = [first.logits, *(decoder.decode(token, row).logits for token in range(8))]
    assert_same_logits(stack_logits(rows), stack_logits(wanted))


def test_an_arena_serves_again(model: ReferenceModel) -> None:
    decoder, arena = decoder_of(model), None
    for text in ([5, 9, 1, 7, 3, 3, 8], [1, 2, 3], [60, 4, 4, 9, 2]):
        arena = arena or arena_of(decoder, 2)
        row = arena.get_row(1)
        scores = [decoder.prefill(text[:2], row).logits]
        scores += [decoder.decode(token, row).logits for token in text[2:]]
        assert_same_logits(stack_logits(scores), model.compute_logits(text)[1:])


@pytest.mark.parametrize("left", [float("nan"), float("inf"), -1e38])
def test_what_another_text_left_in_a_row_changes_nothing(
    left: float, model: ReferenceModel
) -> None:
    decoder = decoder_of(model)
    arena, text = arena_of(decoder, 2), [5, 9, 1, 7, 3, 3, 8]
    for memory in (arena.keys, arena.values):
        memory.fill_(left)
    row = arena.get_row(1)
    scores = [decoder.prefill(text[:2], row).logits]
    scores += [decoder.step([GraphStepRow(token, row)])[0] for token in text[2:]]
    assert_same_logits(stack_logits(scores), model.compute_logits(text)[1:])


def test_plans_take_turns_in_few_slots(model: ReferenceModel) -> None:
    """More plans than slots, later ones wider and of other kinds, and back again."""
    decoder, plain = decoder_of(model), model.load_decoder()
    plans = plans_of(decoder.config)
    wanted = [alone(plain, number, plan) for number, plan in enumerate(plans)]
    arena = arena_of(decoder, 2)
    pairs = [(a, b) for a in range(len(plans)) for b in (0, 3, 6) if a != b]
    for pair in (*pairs, *pairs[::-1]):
        rows = [arena.get_row(place) for place in range(2)]
        for number, row in zip(pair, rows, strict=True):
            decoder.prefill(prompt_of(number), row, plans[number])
        step = [
            GraphStepRow(token_of(number, 0), row, plans[number])
            for number, row in zip(pair, rows, strict=True)
        ]
        for number, scores in zip(pair, decoder.step(step), strict=True):
            assert_same_logits(scores[None], wanted[number][1:2])


def damaged(plan: TorchDeltas) -> dict[str, TorchDelta]:
    module, delta = next((m, d) for m, d in plan.items() if d.b is not None)
    assert delta.b is not None
    return {**plan, module: LinearDelta(a=delta.a, b=delta.b * float("nan"))}


def test_a_damaged_plan_is_refused_and_reaches_no_other_row(model: ReferenceModel) -> None:
    decoder, plain = decoder_of(model), model.load_decoder()
    good = plans_of(decoder.config)[1]
    arena = arena_of(decoder, 2)
    rows = [arena.get_row(0), arena.get_row(1)]
    for number, row in enumerate(rows):
        decoder.prefill(prompt_of(number), row, good)
    with pytest.raises(IncompatibleError, match="not a number"):
        decoder.step([GraphStepRow(1, rows[0], good), GraphStepRow(2, rows[1], damaged(good))])
    assert [row.length for row in rows] == [len(prompt_of(0)), len(prompt_of(1))]
    scores = decoder.step([GraphStepRow(token_of(n, 0), row, good) for n, row in enumerate(rows)])
    for number in range(2):
        assert_same_logits(scores[number][None], alone(plain, number, good)[1:2])


def test_a_damaged_plan_is_refused_before_it_stands_beside_others(model: ReferenceModel) -> None:
    """What prepares a row says so, and the rows that run go on, with their plans in fewer slots."""
    decoder, plain = decoder_of(model), model.load_decoder()
    plans = plans_of(decoder.config)[1:3]
    arena = arena_of(decoder, 3)
    rows = [arena.get_row(number) for number in range(3)]
    for number, plan in enumerate(plans):
        decoder.prepare(rows[number], plan, rows=3)
        decoder.prefill(prompt_of(number), rows[number], plan)
    with pytest.raises(IncompatibleError, match="not a number"):
        decoder.prepare(rows[2], damaged(plans[0]), rows=3)
    before = decoder.nbytes
    batch = list(zip(rows, plans, strict=False))
    scores = decoder.step([GraphStepRow(token_of(n, 0), *pair) for n, pair in enumerate(batch)])
    for number, plan in enumerate(plans):
        assert_same_logits(scores[number][None], alone(plain, number, plan)[1:2])
    assert decoder._room is not None
    assert decoder._room.rows == 3
    assert decoder.nbytes >= before


def test_what_does_not_belong_to_the_base_is_refused_before_anything_is_read(
    model: ReferenceModel,
) -> None:
    decoder = decoder_of(model)
    arena = arena_of(decoder, 2)
    rows, strange = (
        [arena.get_row(0), arena.get_row(1)],
        {"model.layers.9.mlp.up_proj": LinearDelta()},
    )
    for bad in (GraphStepRow(61, rows[1]), GraphStepRow(3, rows[1], strange)):
        with pytest.raises(IncompatibleError):
            decoder.step([GraphStepRow(3, rows[0]), bad])
    with pytest.raises(AssertionError, match="share an arena"):
        decoder.step([GraphStepRow(3, rows[0]), GraphStepRow(3, arena_of(decoder, 1).get_row(0))])
    with pytest.raises(AssertionError, match="its own row"):
        decoder.step([GraphStepRow(3, rows[0]), GraphStepRow(3, arena.get_row(0))])
    for few in (np.empty((1, 61), np.float32), np.empty((2, 60), np.float32)):
        with pytest.raises(AssertionError, match="scores are"):
            decoder.step([GraphStepRow(3, row) for row in rows], out=few)
    assert [row.length for row in rows] == [0, 0]


def test_scores_are_written_where_it_was_asked_and_stay(model: ReferenceModel) -> None:
    decoder = decoder_of(model)
    row, out = arena_of(decoder, 1).get_row(0), np.empty((1, 61), np.float32)
    given = decoder.step([GraphStepRow(5, row)], out=out)
    assert given is out
    fresh = decoder.decode(6, row).logits
    kept = fresh.copy()
    decoder.decode(7, row)
    assert np.array_equal(fresh, kept)
    assert_same_logits(np.concatenate((out, fresh[None])), model.compute_logits([5, 6]))


def test_nothing_a_step_uses_moves_or_grows(model: ReferenceModel) -> None:
    decoder, plans = decoder_of(model), plans_of(model.load_decoder().config)
    arena = arena_of(decoder, 3)
    rows = [arena.get_row(place) for place in range(3)]
    batch = [GraphStepRow(place, row, plans[4 + place]) for place, row in enumerate(rows)]
    decoder.step(batch)
    before = addresses(decoder, arena), decoder.nbytes
    for shift in range(12):
        decoder.step([GraphStepRow(shift, row, plans[4 + (shift + n) % 3]) for n, row in
                      enumerate(rows)])  # fmt: skip
    assert (addresses(decoder, arena), decoder.nbytes) == before


def addresses(decoder: CudaGraphDecoder, arena: StaticKVCache) -> list[int]:
    room, plans = decoder._room, decoder._plans
    assert room is not None
    assert plans is not None
    own = [room.inputs, room.logits, room.places, arena.keys, arena.values]
    own += room.rotations.tables.values()
    stacks = [part for stack in plans.stacks.values() for part in stack.tensors]
    return [tensor.data_ptr() for tensor in (*own, *stacks, *plans.columns.values())]


def test_what_a_decoder_holds_is_what_was_announced(model: ReferenceModel) -> None:
    decoder = decoder_of(model)
    config = decoder.config
    assert decoder.nbytes == 0
    assert decoder.holds_only_weights
    for rows, plans in ((1, []), (1, plans_of(config)[5:6]), (5, plans_of(config)[1:])):
        arena = arena_of(decoder, rows)
        step = [
            GraphStepRow(3, arena.get_row(place), plans[place % len(plans)] if plans else NOTHING)
            for place in range(rows)
        ]
        decoder.step(step)
        width = max((widest(plan) for plan in plans), default=0)
        announced = estimate_buffer_bytes(
            config, capacity=CAPACITY, rows=rows, plans=len(plans), width=width
        )
        passing = estimate_buffer_bytes(config, capacity=CAPACITY, rows=rows) - count_static_bytes(
            config, rows
        )
        assert 0 < decoder.nbytes <= announced - passing
        decoder.free_buffers()
        assert decoder.nbytes == 0
        assert decoder.holds_only_weights


def count_static_bytes(config: ModelConfig, rows: int) -> int:
    """Inputs and places as int64, cosines and sines, scores of a bucket: as it stands in a room."""
    count = 1 << (rows - 1).bit_length()
    numbers = 2 * (CAPACITY + 1) * config.head_dim + count * config.vocab_size
    return 8 * (3 * count + CAPACITY + 1) + 4 * numbers


def widest(plan: Mapping[str, TorchDelta]) -> int:
    return max(1 if delta.a is None else len(delta.a) for delta in plan.values())


def test_the_time_of_each_part_is_told_and_adds_up(model: ReferenceModel) -> None:
    decoder, times = decoder_of(model), LayerTimer()
    row = arena_of(decoder, 1).get_row(0)
    with decoder.time_layers(times):
        decoder.prefill(prompt_of(3), row)
        decoder.decode(4, row)
    decoder.decode(5, row)
    parts = {f"layers.{n}.{part}" for n in range(3) for part in ("attention", "mlp")}
    assert times.places.keys() == {*parts, "head"}
    assert min(times.places.values()) > 0


def test_threads_that_call_at_once_get_what_they_get_alone(model: ReferenceModel) -> None:
    decoder, plain = decoder_of(model), model.load_decoder()
    plans = plans_of(decoder.config)[:4]
    found: dict[int, Tensor] = {}

    def read(number: int) -> None:
        row, rows = arena_of(decoder, 1).get_row(0), list[AnyArray]()
        rows.append(decoder.prefill(prompt_of(number), row, plans[number]).logits)
        for turn in range(TOKENS):
            rows.append(decoder.decode(token_of(number, turn), row, plans[number]).logits)
        found[number] = stack_logits(rows)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(len(plans))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, plan in enumerate(plans):
        assert_same_logits(found[number], alone(plain, number, plan))


def test_a_base_in_bfloat16_equals_the_other_decoder(tmp_path: Path) -> None:
    """To the digits of bfloat16: the last bit of a sum decides how the next one is rounded."""
    model = build_reference_model(tmp_path / "model", "qwen3")
    config = read_model_config(model.directory)
    weights = load_base_weights(model.directory, config, dtype=torch.bfloat16)
    decoder, plain = CudaGraphDecoder(config, weights, min_capacity=4), Decoder(config, weights)
    plan = make_torch_plan(config, [make_random_expert(config)]).torch_deltas
    for numbers, limit in ((torch.float32, 0.01), (torch.bfloat16, 0.05)):
        arena = StaticKVCache(
            config, rows=1, capacity=CAPACITY, dtype=numbers, device=decoder.device
        )
        row, cache = arena.get_row(0), KVCache(config, CAPACITY)
        for token in (3, 9, 27, 20, 60):
            given = decoder.decode(token, row, plan).logits
            wanted = plain.decode(token, cache, plan).logits
            assert np.abs(given - wanted).max() <= limit * np.abs(wanted).max()
