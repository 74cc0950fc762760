"""A profile is taken over between two passes: pins come, updates exchange, nothing else changes."""

from collections import Counter
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from expertctl.engine.moe.counters import Phase
from expertctl.engine.moe.expert_cache import EXACT_POLICY, ExpertCache
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import Numbers
from expertctl.engine.moe.routed_experts import RoutingChoices
from expertctl.engine.moe.usage_profile import build_prompt_profile
from expertctl.engine.moe.warmup import ProfileOptions, find_active_profile
from expertctl.engine_config import DEFAULT_WARMUP, SharePins, TopPins, WarmupConfig
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.package.model_config import ModelConfig
from expertctl.store.quantised_file import always_wanted
from tests.engine.moe.test_expert_cache import (
    EXPERTS,
    LAYERS,
    NUMBERS,
    Marked,
    config,
    draw_pass,
    marks,
    new_cache,
)

__all__ = ["config"]

USAGE = build_prompt_profile(
    experts=EXPERTS, prompts=10, layers={n: {7: 10, 6: 8, 5: 2} for n in NUMBERS}
)
GUIDE = replace(USAGE, source="the profile")
NOBODY = build_prompt_profile(experts=EXPERTS, prompts=10, layers={1: {}})


def read_drawn(cache: ExpertCache, room: RoutingChoices) -> None:
    """Read a token that asks for who is drawn; all of them are there then."""
    for layer in range(LAYERS):
        cache.load(layer, room, 1)
        wanted = set(room.selected[layer, 0].tolist())
        assert wanted <= {expert for expert, _ in marks(cache, layer)}
    cache.end_pass(room, 1, phase=Phase.DECODE)
    cache.check_integrity()


def test_pinned_experts_come_while_texts_are_written_and_stay(config: ModelConfig) -> None:
    drawn, room = np.random.default_rng(7), RoutingChoices(config.experts, tokens=1)
    assert config.experts is not None
    with closing(new_cache(Marked(), slots=3, policy=EXACT_POLICY)) as cache:

        def write(tokens: int) -> None:
            for _ in range(tokens):
                draw_pass(room, drawn, 1)
                read_drawn(cache, room)

        write(10)
        wishes = ProfileOptions(pins=TopPins(2))
        before = [slots.resident_ids for slots in cache.slots]
        adoption = wishes.make_update(GUIDE, cache, warmup=DEFAULT_WARMUP)
        assert [slots.pinned for slots in cache.slots] == [frozenset()] * LAYERS, "not yet"
        adoption.apply(cache)
        assert [slots.resident_ids for slots in cache.slots] == before, "that waits for a pass"
        for _ in range(5000):  # they are read beside the work, which is nothing here
            write(1)
            if all({6, 7} <= set(slots.resident_ids) for slots in cache.slots):
                break
        write(40)
        assert all({6, 7} <= set(slots.resident_ids) for slots in cache.slots), "they stay"
        told = find_active_profile(cache).to_json()
        assert told == {"exchange": 0.0, "pinned": {"1": [6, 7], "2": [6, 7], "4": [6, 7]}}
        ProfileOptions(pins=TopPins(0)).make_update(GUIDE, cache, warmup=DEFAULT_WARMUP).apply(
            cache
        )
        assert find_active_profile(cache).to_json() == {
            "exchange": 0.0,
            "pinned": {},
        }
        write(40)
        assert not all({6, 7} <= set(slots.resident_ids) for slots in cache.slots)


class Broken(Marked):
    """Cannot read some experts, and counts how often somebody tried."""

    def __init__(self, broken: set[tuple[int, int]]) -> None:
        super().__init__()
        self.broken, self.tried = broken, Counter[tuple[int, int]]()

    def read(
        self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always_wanted
    ) -> int:
        if (layer, expert) in self.broken:
            self.tried[layer, expert] += 1
            raise InvalidPackageError("model.safetensors", ["it is cut short"])
        return super().read(layer, expert, block, is_wanted=is_wanted)


def test_expected_experts_that_cannot_be_read_hold_up_nobody(config: ModelConfig) -> None:
    """More of them than are looked at after a pass stand in front of the others."""
    reader = Broken({(number, expert) for number in NUMBERS for expert in (6, 7)})
    room = RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=4, policy=EXACT_POLICY)) as cache:
        cache.schedule_fill([[7, 6, 5, 4]] * LAYERS)
        for _ in range(5000):
            for layer in range(LAYERS):
                room.selected[layer, 0] = (0, 1)
                cache.load(layer, room, 1)
            cache.end_pass(room, 1, phase=Phase.DECODE)
            there = [{expert for expert, _ in marks(cache, layer)} for layer in range(LAYERS)]
            if all({4, 5} <= experts for experts in there):
                break
        assert all({4, 5} <= experts for experts in there)
        cache.check_integrity()


def test_pinned_experts_that_cannot_be_read_hold_up_nobody_and_are_told_once(
    config: ModelConfig,
) -> None:
    """More of them than are read at once stand in front of the others."""
    broken = {(number, expert) for number in NUMBERS[:2] for expert in (6, 7)}
    reader, drawn = Broken(broken), np.random.default_rng(7)
    room = RoutingChoices(config.experts, tokens=1)
    with closing(new_cache(reader, slots=3, policy=EXACT_POLICY)) as cache:

        def write(tokens: int) -> None:
            for _ in range(tokens):
                draw_pass(room, drawn, 1)
                room.selected %= 6  # nobody asks for who cannot be read
                room.likely %= 6
                room.selected[..., 1] = (room.selected[..., 0] + 1) % 6
                read_drawn(cache, room)

        write(10)
        cache.pin([frozenset({6, 7})] * LAYERS)
        for _ in range(5000):
            write(1)
            if {6, 7} <= set(cache.slots[2].resident_ids) and len(reader.tried) == len(broken):
                break
        write(40)
        assert {6, 7} <= set(cache.slots[2].resident_ids)
        assert reader.tried == dict.fromkeys(broken, 1)
        notes = cache.take_notes()
        assert len(notes) == 1
        assert "could not prefetch 4 routed experts; the first is" in notes[0]
        assert "it is cut short" in notes[0]
        write(1)
        assert cache.take_notes() == ()
        reader.broken = set()
        room.selected[0, 0] = (6, 7)
        cache.load(0, room, 1)  # somebody needs them, and now they can be read
        for _ in range(5000):
            write(1)
            if {6, 7} <= set(cache.slots[0].resident_ids):
                break
        assert {6, 7} <= set(cache.slots[0].resident_ids)
        assert not {6, 7} & set(cache.slots[1].resident_ids)


def test_what_is_not_said_is_as_it_was_wished_at_the_start(config: ModelConfig) -> None:
    started = WarmupConfig(pins=SharePins(0.9), exchange=0.25)
    assert config.experts is not None
    with closing(new_cache(Marked(), slots=3, policy=EXACT_POLICY)) as cache:
        same = ProfileOptions().make_update(GUIDE, cache, warmup=started)
        assert (same.pinned, same.rate) == ((frozenset({7}),) * LAYERS, 0.25)
        other = ProfileOptions(pins=TopPins(1), exchange=0.0)
        found = other.make_update(GUIDE, cache, warmup=started)
        assert (found.pinned, found.rate) == ((frozenset({7}),) * LAYERS, 0.0)
        assert found.scores == ({7: 10, 6: 8, 5: 2},) * LAYERS


def test_what_would_change_nothing_or_does_not_fit_is_refused(config: ModelConfig) -> None:
    assert config.experts is not None
    nobody = replace(NOBODY, source="the profile")
    with closing(new_cache(Marked(), slots=3, policy=EXACT_POLICY)) as cache:
        with pytest.raises(UsageError, match="changes nothing") as caught:
            ProfileOptions().make_update(GUIDE, cache, warmup=DEFAULT_WARMUP)
        assert "exchange" in caught.value.hint
        with pytest.raises(UsageError, match="layer 1 has 3 slots"):
            ProfileOptions(pins=TopPins(4)).make_update(GUIDE, cache, warmup=DEFAULT_WARMUP)
        with pytest.raises(IncompatibleError, match="counts no expert"):
            ProfileOptions(pins=TopPins(1)).make_update(nobody, cache, warmup=DEFAULT_WARMUP)
