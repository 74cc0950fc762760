"""Ways to keep the experts of one base: the same scores, and what each says about itself."""

from collections.abc import Iterator
from contextlib import closing
from functools import cached_property
from pathlib import Path

import pytest
import torch

from benchmarks.cache_policies import Trace, belady, lru
from benchmarks.routed.decoders import (
    BlockSplit,
    ExpertPlacement,
    RoutedDecoder,
    open_decoders,
    split_blocks,
)
from benchmarks.routed.expert_sources import LoadOnMissCache, make_packed_copy
from expertctl.engine.cpu.base_loader import load_packed_base
from expertctl.engine.cpu.decoder import PackedDecoder
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.moe.expert_cache import ExpertCache
from expertctl.engine.moe.expert_files import StoredExperts
from expertctl.engine.moe.routed_experts import RoutingChoices
from expertctl.package.base_tensors import read_base_tensors
from expertctl.package.model_config import read_model_config
from tests.benchmarks.routed.conftest import SHAPE
from tests.engine.conftest import stack_logits


@pytest.fixture
def crew() -> Iterator[ThreadPool]:
    with closing(ThreadPool(2)) as crew:
        yield crew


class RecordingCache(LoadOnMissCache):
    """A rival that remembers what was chosen, a list of layers for each token."""

    def request(
        self, layer: int, choices: RoutingChoices, tokens: int, *, predicts_next: bool = True
    ) -> bool:
        waits = super().request(layer, choices, tokens)
        if layer == 0:
            self.asked.append([])
        self.asked[-1].append(set(choices.selected[layer, 0].tolist()))
        return waits

    @cached_property
    def asked(self) -> list[list[set[int]]]:
        return []


def test_tokens_ask_for_what_the_trace_says(
    directory: Path, tmp_path: Path, trace: Trace, crew: ThreadPool
) -> None:
    config = read_model_config(directory)
    trunk = load_packed_base(directory, config, Scheme.BFLOAT16, experts=False)
    files = StoredExperts(read_base_tensors(directory, config), config, Scheme.BFLOAT16)
    shape = make_expert_shape(config, Scheme.BFLOAT16)
    rival = RecordingCache(shape, files, numbers=(0, 1), experts=8, slots=4)
    RoutedDecoder(trunk, crew, rival, tokens=len(trace)).decode(len(trace))
    assert rival.asked == [[set(layer) for layer in token] for token in trace.tolist()]
    hits = rival.requests - rival.misses
    assert hits == pytest.approx(lru(trace, 4), rel=0.1), "of one token the order is another"
    assert hits <= belady(trace, 4)


def test_where_experts_are_changes_no_score(
    directory: Path, tmp_path: Path, trace: Trace, crew: ThreadPool
) -> None:
    config = read_model_config(directory)
    base = load_packed_base(directory, config, Scheme.INT4)
    expected = _scores(PackedDecoder(base, crew))
    make_packed_copy(directory, tmp_path / "bases", Scheme.INT4)
    homes = open_decoders(
        directory,
        list(ExpertPlacement),
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
    directory: Path, tmp_path: Path, trace: Trace, crew: ThreadPool
) -> None:
    make_packed_copy(directory, tmp_path / "bases", Scheme.INT4)
    homes = open_decoders(
        directory,
        list(ExpertPlacement),
        crew,
        scheme=Scheme.INT4,
        share=0.5,
        tokens=len(trace),
        copies=tmp_path / "bases",
    )
    for home in homes.values():
        assert home.decode(60) > 0
    whole, cached = homes[ExpertPlacement.WHOLE], homes[ExpertPlacement.CACHED]
    assert (whole.miss_rate, whole.read_bytes, cached.miss_rate) == (0, 0, 0)
    for keeping in (ExpertPlacement.LENT, ExpertPlacement.PREPACKED, ExpertPlacement.ON_MISS):
        home = homes[keeping]
        assert 0 < home.miss_rate < 1
        assert home.read_bytes > 0
        assert home.nbytes < whole.nbytes + 64 * 2**20, "buffers of readers are counted"
    for _ in range(2):
        assert homes[ExpertPlacement.WHOLE].decode(600) > 0, "a text that is too long begins anew"
    assert whole.read_prompt(20) > 0
    for home in homes.values():
        if isinstance(home.experts, ExpertCache):
            home.experts.close()


def test_the_pool_is_a_part_of_what_is_resident() -> None:
    routed = SHAPE.make_config().experts
    assert routed is not None
    assert split_blocks(routed, 0.5) == BlockSplit(slots=2, pool=4)
    assert split_blocks(routed, 1.0) == BlockSplit(slots=6, pool=4)


def _scores(decoder: PackedDecoder) -> torch.Tensor:
    cache = PagedKVCache(decoder.config, 40)
    return stack_logits([decoder.decode(token, cache).logits for token in range(30)])
