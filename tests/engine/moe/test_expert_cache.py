"""Whoever is asked for is there, and is who he should be; what is left out is within the cap."""

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from threading import Event

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.packed_matrix import ExpertShape
from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache, MissPolicy
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import ExpertMemory, Numbers
from expertctl.engine.moe.layer_slots import LayerSlots
from expertctl.engine.moe.routed_experts import RoutingChoices, compute_skipped_share
from expertctl.errors import InvalidPackageError
from expertctl.package.model_config import ModelConfig, parse_model_config
from expertctl.store.quantised_file import ReadCancelled, always_wanted

LAYERS, EXPERTS, USED, TOKENS = 3, 8, 2, 4
NUMBERS = (1, 2, 4)
"""Of routed layers in the base."""


class Marked:
    """Reads experts that are nothing but their own names."""

    def __init__(self) -> None:
        self.fails = False
        self.read_names: list[tuple[int, int]] = []

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        if self.fails:
            raise InvalidPackageError("model.safetensors", ["it is cut short"])
        if not is_wanted():
            raise ReadCancelled(0)
        self.read_names.append((layer, expert))
        block[...] = 16 * layer + expert
        return block.nbytes

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        return None


class Slow(Marked):
    """Reads half of one expert, and waits then until it is told to go on, or that it may not."""

    def __init__(self, expert: tuple[int, int]) -> None:
        super().__init__()
        self._expert, self.has_begun, self.goes_on = expert, Event(), Event()

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        if (layer, expert) == self._expert and not self.goes_on.is_set():
            block[: len(block) // 2] = 16 * layer + expert
            self.has_begun.set()
            while is_wanted() and not self.goes_on.wait(0.001):
                pass
            if not is_wanted():
                raise ReadCancelled(len(block) // 2)
        return super().read(layer, expert, block, is_wanted=is_wanted)


class CachedNowAndThen(Marked):
    """Lends experts every now and then."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._chance = np.random.default_rng(seed)
        self._marks = np.repeat(np.arange(16 * 16, dtype=np.uint8)[:, None], 64, axis=1)

    def find_cached_address(self, layer: int, expert: int) -> int | None:
        is_lent = self._chance.random() < 0.5
        return int(self._marks[16 * layer + expert].ctypes.data) if is_lent else None


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return parse_model_config(
        {
            "model_type": "qwen3_moe",
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 16,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 5,
            "num_attention_heads": 1,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": EXPERTS,
            "num_experts_per_tok": USED,
            "mlp_only_layers": [0, 3],
        }
    )


def new_cache(reader: Marked, *, slots: int, policy: MissPolicy) -> ExpertCache:
    return cache_of(reader, capacities=[slots] * LAYERS, policy=policy)


def cache_of(reader: Marked, *, capacities: Sequence[int], policy: MissPolicy) -> ExpertCache:
    memory = ExpertMemory(
        ExpertShape(Scheme.FLOAT32, 16, 16),
        layers=LAYERS,
        experts=EXPERTS,
        blocks=sum(capacities) + EXPERTS - min(capacities),
    )
    return ExpertCache(
        memory,
        reader,
        layer_numbers=NUMBERS,
        slots=[LayerSlots(experts=EXPERTS, capacity=capacity) for capacity in capacities],
        policy=policy,
    )


def draw_pass(room: RoutingChoices, drawn: np.random.Generator, tokens: int) -> None:
    """What tokens choose, the earlier experts more often, and what is foreseen, often wrongly."""
    likely = 1.0 / np.arange(1, EXPERTS + 1)
    for layer in range(LAYERS):
        for token in range(tokens):
            for chosen in (room.selected, room.likely):
                chosen[layer, token] = drawn.choice(
                    EXPERTS, USED, replace=False, p=likely / likely.sum()
                )
        room.weights[layer, :tokens] = drawn.random((tokens, USED))


def marks(cache: ExpertCache, layer: int) -> Iterator[tuple[int, int]]:
    """The experts that are there, and whose bytes lie where they should be."""
    for expert, address in enumerate(cache.places(layer)):
        if address:
            yield expert, ctypes.c_uint8.from_address(int(address)).value


def test_what_is_ranked_behind_those_with_slots_fills_the_pool() -> None:
    """Layer by layer in turn, as far as there are free blocks; nobody is evicted for it."""
    reader = Marked()
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:  # and a pool of seven
        cache.fill_slots([[5, 4, 3, 2], [7, 6, 1, 0], [2]])
        there = [[expert for expert, _ in marks(cache, layer)] for layer in range(LAYERS)]
        assert there == [[2, 3, 4, 5], [0, 1, 6, 7], [2]], "nobody knows of more in the last layer"
        assert [slots.resident_ids for slots in cache.slots] == [[5], [7], [2]]
        cache.fill_slots([[5, 4, 3, 2, 1, 0], [7, 6, 1, 0], [2, 3]])
        now = [[expert for expert, _ in marks(cache, layer)] for layer in range(LAYERS)]
        assert now == [[2, 3, 4, 5], [0, 1, 6, 7], [2, 3]], "one block was free"
        assert len(reader.read_names) == len(set(reader.read_names)) == 10
        cache.check_integrity()
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:
        cache.fill_slots([[]] * LAYERS)
        assert sum(len(list(marks(cache, layer))) for layer in range(LAYERS)) == LAYERS


@settings(max_examples=60, deadline=None)
@given(
    slots=st.sampled_from([0, 1, 3, 8]),
    cap=st.sampled_from([None, 0.0, 0.4, 1.0]),
    seed=st.integers(0, 1000),
    passes=st.lists(st.integers(1, TOKENS), min_size=1, max_size=12),
    lends=st.booleans(),
)
def test_who_is_asked_for_is_there_and_no_other_in_his_place(
    config: ModelConfig, slots: int, cap: float | None, seed: int, passes: list[int], lends: bool
) -> None:
    drawn, room = (
        np.random.default_rng(seed),
        RoutingChoices(config.experts, tokens=TOKENS),
    )
    policy = EXACT_POLICY if cap is None else MissPolicy(skips=True, cap=cap)
    reader = CachedNowAndThen(seed) if lends else Marked()
    with closing(new_cache(reader, slots=slots, policy=policy)) as cache:
        for tokens in passes:
            draw_pass(room, drawn, tokens)
            for layer in range(LAYERS):
                cache.load(layer, room, tokens)
                selected = room.selected[layer, :tokens]
                there = cache.hits(layer)[selected]
                left_out = compute_skipped_share(room.weights[layer, :tokens], there)
                assert (left_out <= (0.0 if cap is None else cap)).all()
                for expert, mark in marks(cache, layer):
                    assert mark == 16 * NUMBERS[layer] + expert
                assert np.array_equal(cache.places(layer) != 0, cache.hits(layer) == 1)
            cache.end_pass(room, tokens, phase=Phase.DECODE if tokens == 1 else Phase.PROMPT)
            cache.check_integrity()
        requests = cache.activity().requests
        assert 0 < requests <= sum(min(EXPERTS, tokens * USED) * LAYERS for tokens in passes)


def test_who_came_and_had_to_go_again_gets_no_slot(config: ModelConfig) -> None:
    """He has a free slot and is worth nothing yet; behind him stands a guess that was wrong."""
    reader, room = Slow((NUMBERS[2], 5)), RoutingChoices(config.experts, tokens=TOKENS)

    def ask(tokens: Sequence[Sequence[Sequence[int]]], likely: Sequence[Sequence[int]]) -> None:
        count = len(tokens)
        room.selected[:, :count] = np.array(tokens).swapaxes(0, 1)
        room.likely[:, :count] = np.array(likely)[:, None]
        room.weights[:, :count] = 0.5
        for layer in range(LAYERS):
            cache.load(layer, room, count)
        cache.end_pass(room, count, phase=Phase.DECODE)
        cache.check_integrity()

    def some(layer: int, *, there: bool, count: int) -> list[int]:
        found = [e for e in range(EXPERTS) if bool(cache.hits(layer)[e]) is there]
        return found[-count:] if layer == 0 else found[:count]

    with ExitStack() as stack:
        cache = stack.enter_context(closing(new_cache(reader, slots=3, policy=EXACT_POLICY)))
        stack.callback(reader.goes_on.set)  # whatever fails: closing waits for the read
        cache.schedule_fill([[], [], [5]])
        assert reader.has_begun.wait(120)
        firsts = [[0, 1]] * LAYERS
        ask([[pair, pair, [0, 1]] for pair in ([0, 1], [2, 3], [4, 5], [6, 7])], firsts)
        for _ in range(2):  # layer 0 takes blocks of layer 1
            absent = [e for e in range(EXPERTS) if not cache.hits(0)[e]][:2]
            ask([[absent, some(1, there=True, count=2), [0, 1]]], firsts)
        here, held = some(0, there=True, count=2), some(1, there=True, count=2)
        gone = some(1, there=False, count=3)
        guessed = [[0, 1], [gone[0], held[0]], [0, 1]]
        for _ in range(100):  # a wrong guess, behind the slow one, once a block is free for it
            ask([[here, held, [0, 1]]], guessed)
            if len(cache._loader) == 2:
                break
        assert len(cache._loader) == 2
        threading.Timer(0.1, reader.goes_on.set).start()
        ask([[here, gone[:2], [0, 1]], [here, [gone[0], gone[2]], [0, 1]]], guessed)


def test_an_expert_is_read_once_as_long_as_it_is_there(config: ModelConfig) -> None:
    reader, room = Marked(), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=2, policy=MissPolicy(prefetches=False))) as cache:
        for _ in range(5):
            for layer in range(LAYERS):
                room.selected[layer, 0] = (3, 5)
                cache.load(layer, room, 1)
            cache.end_pass(room, 1, phase=Phase.DECODE)
        told = cache.activity()
    assert sorted(reader.read_names) == [(layer, name) for layer in NUMBERS for name in (3, 5)]
    assert (told.requests, told.misses, told.loads, told.read_ahead) == (30, 6, 6, 0)


def test_who_is_in_the_pool_is_no_miss(config: ModelConfig) -> None:
    room = RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(Marked(), slots=0, policy=MissPolicy(prefetches=False))) as cache:
        for asked in ((3, 5), (5, 3), (3, 5)):
            for layer in range(LAYERS):
                room.selected[layer, 0] = asked
                cache.load(layer, room, 1)
            cache.end_pass(room, 1, phase=Phase.DECODE)
        told, layers = cache.activity(), cache.counters.observed_snapshot().layers
    assert (told.requests, told.misses, told.loads) == (6 * LAYERS, 2 * LAYERS, 2 * LAYERS)
    assert [(layer.hits, layer.misses) for layer in layers.values()] == [(4, 2)] * LAYERS


def test_of_layers_that_have_different_slots_the_mean_is_told() -> None:
    with closing(cache_of(Marked(), capacities=(EXPERTS, 1, 2), policy=EXACT_POLICY)) as cache:
        held = cache.report().residence
    assert held.slots == (EXPERTS + 1 + 2) // 3 < EXPERTS
    assert (held.blocks, held.total) == (EXPERTS + 1 + 2 + EXPERTS - 1, 3 * EXPERTS)


def test_what_was_left_out_is_there_for_later_tokens(config: ModelConfig) -> None:
    reader, room = Marked(), RoutingChoices(config.experts, tokens=1)
    policy = MissPolicy(skips=True, prefetches=False)
    with closing(new_cache(reader, slots=2, policy=policy)) as cache:
        for _ in range(40):
            for layer in range(LAYERS):
                room.selected[layer, 0] = (3, 5)
                cache.load(layer, room, 1)
            cache.end_pass(room, 1, phase=Phase.DECODE)
            while len(cache._loader):
                cache._collect_loaded()
        assert all(set(slots.resident_ids) == {3, 5} for slots in cache.slots)


def test_a_wrong_guess_is_dropped_in_the_middle_and_read_again_when_it_is_wanted(
    config: ModelConfig,
) -> None:
    reader, room = Slow((NUMBERS[1], 7)), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:
        room.selected[0, 0], room.likely[1, 0] = (1, 2), (7, 6)
        cache.load(0, room, 1)
        assert reader.has_begun.wait(120)
        room.selected[1, 0], room.likely[2, 0] = (3, 4), (0, 1)
        cache.load(1, room, 1)  # does not wait for 7, and has it end
        for chosen in ((7, 3), (6, 5)):  # 7 is read again, to its end, at once
            room.selected[1, 0] = chosen
            reader.goes_on.set()
            cache.load(1, room, 1)
            assert dict(marks(cache, 1)).items() >= {e: 16 * NUMBERS[1] + e for e in chosen}.items()
        told = cache.activity()
        half = cache.shape.nbytes // 2
        assert told.read_bytes == told.loads * cache.shape.nbytes + half
        assert reader.read_names.count((NUMBERS[1], 7)) == 1
        cache.check_integrity()


def test_a_right_guess_goes_on_when_it_may_be_left_out(config: ModelConfig) -> None:
    """It comes too late for this token, and is there for the next."""
    reader, room = Slow((NUMBERS[1], 7)), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=1, policy=MissPolicy(skips=True))) as cache:
        room.selected[0, 0], room.likely[1, 0] = (1, 2), (7, 6)
        cache.load(0, room, 1)
        assert reader.has_begun.wait(120)
        for layer, chosen in ((1, (7, 6)), (2, (0, 1))):
            room.selected[layer, 0] = chosen
            cache.load(layer, room, 1)
        reader.goes_on.set()
        while len(cache._loader):
            cache._collect_loaded()
        assert (7, 16 * NUMBERS[1] + 7) in marks(cache, 1)


def test_a_reading_that_fails_is_told_to_who_needs_it_and_tried_again(config: ModelConfig) -> None:
    reader, room = Marked(), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:
        room.selected[0, 0], reader.fails = (1, 2), True
        with pytest.raises(InvalidPackageError, match="cut short"):
            cache.load(0, room, 1)
        reader.fails = False
        cache.load(0, room, 1)
        assert dict(marks(cache, 0)) == {1: 17, 2: 18}
        cache.check_integrity()


def test_who_cannot_be_read_is_tried_again_when_he_is_wanted_and_not_before(
    config: ModelConfig,
) -> None:
    reader, room = Marked(), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:
        reader.fails = True
        for _ in range(3):
            cache._loader.prefetch([(0, 6)], frozenset())
            tried = len(cache._loader)
            while len(cache._loader):
                cache._collect_loaded()
        assert tried == 0, "it was tried once"
        reader.fails = False
        room.selected[0, 0] = (6, 2)
        cache.load(0, room, 1)
        assert (6, 22) in marks(cache, 0)
        cache.check_integrity()


def test_no_block_is_lost_where_no_thread_can_be_started(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    reader, room = Marked(), RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=1, policy=EXACT_POLICY)) as cache:
        room.selected[0, 0] = (6, 2)
        with monkeypatch.context() as patch:
            patch.setattr(cache._loader._urgent_pool, "submit", refuse)
            for _ in range(EXPERTS * LAYERS):
                with pytest.raises(RuntimeError, match="new thread"):
                    cache.load(0, room, 1)
        cache.load(0, room, 1)
        assert dict(marks(cache, 0)) == {6: 22, 2: 18}
        cache.check_integrity()


def test_what_was_mapped_for_a_pass_that_failed_is_mapped_no_more(config: ModelConfig) -> None:
    reader, room = CachedNowAndThen(0), RoutingChoices(config.experts, tokens=1)
    reader.find_cached_address = lambda layer, expert: (  # type: ignore[method-assign]
        int(reader._marks[16 * layer + expert].ctypes.data) if expert == 1 else None
    )
    with closing(new_cache(reader, slots=1, policy=MissPolicy(prefetches=False))) as cache:
        room.selected[0, 0], reader.fails = (1, 2), True
        with pytest.raises(InvalidPackageError, match="cut short"):
            cache.load(0, room, 1)
        reader.fails = False
        room.selected[0, 0] = (3, 4)
        cache.load(0, room, 1)
        assert dict(marks(cache, 0)) == {3: 19, 4: 20}
        cache.check_integrity()


def test_what_is_mapped_takes_no_block_and_is_copied_once_it_gets_a_slot(
    config: ModelConfig,
) -> None:
    reader, room = CachedNowAndThen(0), RoutingChoices(config.experts, tokens=1)
    reader.find_cached_address = lambda layer, expert: int(
        reader._marks[16 * layer + expert].ctypes.data
    )  # type: ignore[method-assign]
    with closing(new_cache(reader, slots=2, policy=MissPolicy(prefetches=False))) as cache:
        for number in range(40):
            for layer in range(LAYERS):
                room.selected[layer, 0] = (3, 5)
                cache.load(layer, room, 1)
                if number == 0:
                    assert not reader.read_names, "nobody waits for what is lent"
                assert {expert for expert, _ in marks(cache, layer)} >= {3, 5}
            cache.end_pass(room, 1, phase=Phase.DECODE)
            while len(cache._loader):
                cache._collect_loaded()
        told = cache.activity()
        assert all(set(slots.resident_ids) == {3, 5} for slots in cache.slots)
        assert sorted(reader.read_names) == [(layer, name) for layer in NUMBERS for name in (3, 5)]
        assert 0 < told.mapped == told.misses < told.requests
        assert told.waited_ms == 0


def test_who_is_mapped_ahead_is_a_miss_all_the_same(config: ModelConfig) -> None:
    reader, room = CachedNowAndThen(0), RoutingChoices(config.experts, tokens=1)
    reader.find_cached_address = lambda layer, expert: int(
        reader._marks[16 * layer + expert].ctypes.data
    )  # type: ignore[method-assign]
    with closing(new_cache(reader, slots=2, policy=EXACT_POLICY)) as cache:
        for layer in range(LAYERS):
            room.selected[layer, 0] = room.likely[layer, 0] = (3, 5)
        for layer in range(LAYERS):
            assert cache.hits(layer)[3] == (layer > 0), "whoever is foreseen is lent before"
            cache.load(layer, room, 1)
        cache.end_pass(room, 1, phase=Phase.DECODE)
        told = cache.activity()
    assert (told.requests, told.misses, told.mapped) == (6, 6, 6)
