"""Ways to keep the experts of one base: the same scores, and what each says about itself."""

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import pytest
import torch

from benchmarks.cache_oracles import Trace, belady, lru
from benchmarks.routed.homes import Home, Split, open_homes, split
from benchmarks.routed.load_on_miss import LoadOnMiss
from benchmarks.routed.readers import keep_copy
from benchmarks.routed.tasks import Keeping
from expertctl.engine.kernels.crew import Crew
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.kv_pages import KVPages
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.engine.moe.routed_room import RoutedRoom
from expertctl.engine.packed_base import expert_shape
from expertctl.engine.packed_decoder import PackedDecoder
from expertctl.engine.packed_load import load_packed_base
from expertctl.package.base_tensors import base_tensors
from expertctl.package.model_config import read_config
from tests.benchmarks.routed.conftest import SHAPE


@pytest.fixture
def crew() -> Iterator[Crew]:
    with closing(Crew(2)) as crew:
        yield crew


class Seen(LoadOnMiss):
    """A rival that remembers what was chosen, a list of layers for each token."""

    def ask(self, layer: int, room: RoutedRoom, tokens: int, *, foresees: bool = True) -> bool:
        waits = super().ask(layer, room, tokens)
        if layer == 0:
            self.asked.append([])
        self.asked[-1].append(set(room.selected[layer, 0].tolist()))
        return waits

    @cached_property
    def asked(self) -> list[list[set[int]]]:
        return []


def test_tokens_ask_for_what_the_trace_says(
    directory: Path, tmp_path: Path, trace: Trace, crew: Crew
) -> None:
    config = read_config(directory)
    trunk = load_packed_base(directory, config, Scheme.BFLOAT16, experts=False)
    files = StoredExperts(base_tensors(directory, config), config, Scheme.BFLOAT16)
    shape = expert_shape(config, Scheme.BFLOAT16)
    rival = Seen(shape, files, numbers=(0, 1), experts=8, slots=4)
    Home(trunk, crew, rival, tokens=len(trace)).follow(len(trace))
    assert rival.asked == [[set(layer) for layer in token] for token in trace.tolist()]
    hits = rival.requests - rival.misses
    assert hits == pytest.approx(lru(trace, 4), rel=0.1), "of one token the order is another"
    assert hits <= belady(trace, 4)


def test_where_experts_are_changes_no_score(
    directory: Path, tmp_path: Path, trace: Trace, crew: Crew
) -> None:
    config = read_config(directory)
    base = load_packed_base(directory, config, Scheme.INT4)
    expected = _scores(PackedDecoder(base, crew))
    keep_copy(directory, tmp_path / "bases", Scheme.INT4)
    homes = open_homes(
        directory,
        list(Keeping),
        crew,
        scheme=Scheme.INT4,
        share=0.5,
        tokens=len(trace),
        copies=tmp_path / "bases",
    )
    for keeping, home in homes.items():
        assert torch.equal(_scores(home.decoder), expected), keeping
        if isinstance(home.experts, ExpertCache):
            home.experts.check_integrity()
            home.experts.close()


def test_homes_say_what_they_hold_miss_and_read(
    directory: Path, tmp_path: Path, trace: Trace, crew: Crew
) -> None:
    keep_copy(directory, tmp_path / "bases", Scheme.INT4)
    homes = open_homes(
        directory,
        list(Keeping),
        crew,
        scheme=Scheme.INT4,
        share=0.5,
        tokens=len(trace),
        copies=tmp_path / "bases",
    )
    for home in homes.values():
        assert home.follow(60) > 0
    whole, cached = homes[Keeping.WHOLE], homes[Keeping.CACHED]
    assert (whole.misses, whole.read_bytes, cached.misses) == (0, 0, 0)
    for keeping in (Keeping.LENT, Keeping.PREPACKED, Keeping.ON_MISS):
        home = homes[keeping]
        assert 0 < home.misses < 1
        assert home.read_bytes > 0
        assert home.nbytes < whole.nbytes + 64 * 2**20, "buffers of readers are counted"
    for _ in range(2):
        assert homes[Keeping.WHOLE].follow(600) > 0, "a text that is too long begins anew"
    assert whole.read(20) > 0
    for home in homes.values():
        if isinstance(home.experts, ExpertCache):
            home.experts.close()


def test_the_pool_is_a_part_of_what_is_resident() -> None:
    routed = SHAPE.config().experts
    assert routed is not None
    assert split(routed, 0.5) == Split(slots=2, pool=4)
    assert split(routed, 1.0) == Split(slots=6, pool=4)


def _scores(decoder: PackedDecoder) -> torch.Tensor:
    cache = KVPages(decoder.config, 40)
    return torch.stack([decoder.decode(token, cache).logits for token in range(30)])
