"""A profile is taken over between two passes: pins come, updates exchange, nothing else changes."""

from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.moe.adoption import ProfileWishes, guidance_of
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import IsWanted
from expertctl.engine.moe.expert_memory import Numbers
from expertctl.engine.moe.guide import Guide, activity_of
from expertctl.engine.moe.miss_policy import EXACT
from expertctl.engine.moe.phase import Phase
from expertctl.engine.moe.pins import SharePins, TopPins
from expertctl.engine.moe.routed_room import RoutedRoom
from expertctl.engine.moe.start import USUAL, StartWishes
from expertctl.engine.moe.usage_profile import UsageProfile
from expertctl.errors import IncompatibleError, InvalidPackageError, UsageError
from expertctl.package.model_config import ModelConfig
from expertctl.store.copy_file import always
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

USAGE = UsageProfile("", 10, EXPERTS, {n: {7: 10, 6: 8, 5: 2} for n in NUMBERS})
GUIDE = Guide("the profile", activity_of(USAGE), USAGE)
NOBODY = UsageProfile("", 10, EXPERTS, {1: {}})


def read_drawn(cache: ExpertCache, room: RoutedRoom) -> None:
    """Read a token that asks for who is drawn; all of them are there then."""
    for layer in range(LAYERS):
        cache.bring(layer, room, 1)
        wanted = set(room.selected[layer, 0].tolist())
        assert wanted <= {expert for expert, _ in marks(cache, layer)}
    cache.passed(room, 1, phase=Phase.DECODE)
    cache.check_integrity()


def test_pinned_experts_come_while_texts_are_written_and_stay(config: ModelConfig) -> None:
    drawn, room = np.random.default_rng(7), RoutedRoom(config, Scheme.FLOAT32, tokens=1)
    assert config.experts is not None
    with closing(new_cache(Marked(), slots=3, policy=EXACT)) as cache:

        def write(tokens: int) -> None:
            for _ in range(tokens):
                draw_pass(room, drawn, 1)
                read_drawn(cache, room)

        write(10)
        wishes = ProfileWishes(pins=TopPins(2))
        before = [slots.residents for slots in cache.slots]
        adoption = wishes.adoption(GUIDE, cache, config.experts, started=USUAL)
        assert [slots.pinned for slots in cache.slots] == [frozenset()] * LAYERS, "not yet"
        adoption.apply(cache)
        assert [slots.residents for slots in cache.slots] == before, "that waits for a pass"
        for _ in range(5000):  # they are read beside the work, which is nothing here
            write(1)
            if all({6, 7} <= set(slots.residents) for slots in cache.slots):
                break
        write(40)
        assert all({6, 7} <= set(slots.residents) for slots in cache.slots), "they stay"
        told = guidance_of(cache, config.experts).to_json()
        assert told == {"exchange": 0.0, "pinned": {"1": [6, 7], "2": [6, 7], "4": [6, 7]}}
        ProfileWishes(pins=TopPins(0)).adoption(GUIDE, cache, config.experts, started=USUAL).apply(
            cache
        )
        assert guidance_of(cache, config.experts).to_json() == {"exchange": 0.0, "pinned": {}}
        write(40)
        assert not all({6, 7} <= set(slots.residents) for slots in cache.slots)


class Broken(Marked):
    """Cannot read some experts, and counts how often somebody tried."""

    def __init__(self, broken: set[tuple[int, int]]) -> None:
        super().__init__()
        self.broken, self.tried = broken, Counter[tuple[int, int]]()

    def read(self, layer: int, expert: int, block: Numbers, *, is_wanted: IsWanted = always) -> int:
        if (layer, expert) in self.broken:
            self.tried[layer, expert] += 1
            raise InvalidPackageError("model.safetensors", ["it is cut short"])
        return super().read(layer, expert, block, is_wanted=is_wanted)


def test_expected_experts_that_cannot_be_read_hold_up_nobody(config: ModelConfig) -> None:
    """More of them than are looked at after a pass stand in front of the others."""
    reader = Broken({(number, expert) for number in NUMBERS for expert in (6, 7)})
    room = RoutedRoom(config, Scheme.FLOAT32, tokens=1)
    with closing(new_cache(reader, slots=4, policy=EXACT)) as cache:
        cache.expect([[7, 6, 5, 4]] * LAYERS)
        for _ in range(5000):
            for layer in range(LAYERS):
                room.selected[layer, 0] = (0, 1)
                cache.bring(layer, room, 1)
            cache.passed(room, 1, phase=Phase.DECODE)
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
    room = RoutedRoom(config, Scheme.FLOAT32, tokens=1)
    with closing(new_cache(reader, slots=3, policy=EXACT)) as cache:

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
            if {6, 7} <= set(cache.slots[2].residents) and len(reader.tried) == len(broken):
                break
        write(40)
        assert {6, 7} <= set(cache.slots[2].residents)
        assert reader.tried == dict.fromkeys(broken, 1)
        notes = cache.take_notes()
        assert len(notes) == 1
        assert "could not be read: 4; the first was" in notes[0]
        assert "it is cut short" in notes[0]
        write(1)
        assert cache.take_notes() == ()
        reader.broken = set()
        room.selected[0, 0] = (6, 7)
        cache.bring(0, room, 1)  # somebody needs them, and now they can be read
        for _ in range(5000):
            write(1)
            if {6, 7} <= set(cache.slots[0].residents):
                break
        assert {6, 7} <= set(cache.slots[0].residents)
        assert not {6, 7} & set(cache.slots[1].residents)


def test_what_is_not_said_is_as_it_was_wished_at_the_start(config: ModelConfig) -> None:
    started = StartWishes(pins=SharePins(0.9), exchange=0.25)
    assert config.experts is not None
    with closing(new_cache(Marked(), slots=3, policy=EXACT)) as cache:
        same = ProfileWishes().adoption(GUIDE, cache, config.experts, started=started)
        assert (same.pinned, same.rate) == ((frozenset({7}),) * LAYERS, 0.25)
        other = ProfileWishes(pins=TopPins(1), exchange=0.0)
        found = other.adoption(GUIDE, cache, config.experts, started=started)
        assert (found.pinned, found.rate) == ((frozenset({7}),) * LAYERS, 0.0)
        assert found.scores == ({7: 10, 6: 8, 5: 2},) * LAYERS


def test_what_would_change_nothing_or_does_not_fit_is_refused(config: ModelConfig) -> None:
    assert config.experts is not None
    nobody = Guide("the profile", activity_of(NOBODY), NOBODY)
    with closing(new_cache(Marked(), slots=3, policy=EXACT)) as cache:
        with pytest.raises(UsageError, match="changes nothing") as caught:
            ProfileWishes().adoption(GUIDE, cache, config.experts, started=USUAL)
        assert "exchange" in caught.value.hint
        with pytest.raises(UsageError, match="layer 1 has 3 slots"):
            ProfileWishes(pins=TopPins(4)).adoption(GUIDE, cache, config.experts, started=USUAL)
        with pytest.raises(IncompatibleError, match="counts no expert"):
            ProfileWishes(pins=TopPins(1)).adoption(nobody, cache, config.experts, started=USUAL)
