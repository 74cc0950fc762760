"""Measuring does what it says, as often as it says, and leaves nothing behind."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from expertctl.engine.bench import (
    BenchSettings,
    BenchSubject,
    bench_buffer_bytes,
    bench_kv_bytes,
    list_thread_counts,
    run_bench,
)
from expertctl.engine.bench_result import CACHE_BYTES
from expertctl.engine.cpu.base_loader import create_random_base, decode_bytes_per_token
from expertctl.engine.cpu.program_cache import estimate_buffer_bytes
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.kv.block_pool import InterleavedPages
from expertctl.engine.memory.host import count_usable_cores
from expertctl.package.model_config import read_model_config
from tests.benchmarks.test_gguf import small_config
from tests.engine.conftest import build_reference_model
from tests.engine.moe.test_packed_experts import fitting
from tests.engine.random_experts import make_packed_plan, make_random_expert

WANTED = BenchSettings(threads=(1, 2), tokens=3, context=5, prompts=(4, 9), rounds=2)


@pytest.fixture(scope="module")
def subject() -> BenchSubject:
    return BenchSubject(
        description="a small base", base=create_random_base(small_config(), Scheme.INT8)
    )


def crews() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crew"]


def test_every_round_does_everything_and_is_counted(subject: BenchSubject) -> None:
    before, done = len(crews()), list[int]()
    found = run_bench(subject, WANTED, progress=done.append)
    assert sum(done) == WANTED.run_count == 3 * (3 * 2 + 2)
    assert found.threads == [1, 2]
    for n in found.threads:
        assert [len(each) for each in found.tokens[n].rounds] == [3, 3]
        assert len(found.memory[n].rounds) == len(found.arithmetic[n].rounds) == 2
        assert found.arithmetic_operations[n] > 0
    assert sorted(found.prompts) == [4, 9]
    figures = [*found.memory.values(), *found.tokens.values(), *found.prompts.values()]
    assert all(s > 0 for series in figures for each in series.rounds for s in each)
    assert found.text_work().weight_bytes == decode_bytes_per_token(subject.base)
    assert found.read_bytes == CACHE_BYTES  # such weights would come from a cache
    assert len(crews()) == before


def test_a_token_reads_those_routed_experts_that_it_uses_with_what_a_plan_has_for_them(
    tmp_path: Path,
) -> None:
    build_reference_model(tmp_path / "base", "olmoe", **fitting("olmoe", {}))
    config = read_model_config(tmp_path / "base")
    assert config.experts is not None
    base = create_random_base(config, Scheme.FLOAT32)
    everywhere = make_packed_plan(config, [make_random_expert(config)])
    found = run_bench(BenchSubject(description="a routed base", base=base, plan=everywhere), WANTED)
    assert found.text_work().weight_bytes == decode_bytes_per_token(base)
    unused = 1 - config.experts.used / config.experts.count
    assert 0 < everywhere.routed_bytes < everywhere.nbytes
    assert found.text_work().expert_bytes == pytest.approx(
        everywhere.nbytes - unused * everywhere.routed_bytes, abs=1
    )


def test_a_bench_that_is_given_up_leaves_no_thread(subject: BenchSubject) -> None:
    before = len(crews())

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_bench(subject, WANTED, progress=interrupt)
    assert len(crews()) == before


def test_what_it_takes_is_known_before() -> None:
    config = small_config()
    tokens = (16, 16)  # pages of sixteen: 5 + 3 tokens, and 9
    for numbers, size in ((Scheme.FLOAT32, 4), (Scheme.FLOAT16, 2)):
        expected = sum(config.count_kv_bytes(n, itemsize=size) for n in tokens)
        assert bench_kv_bytes(config, WANTED, layout=InterleavedPages(numbers)) == expected
    two = bench_buffer_bytes(config, Scheme.INT8, WANTED)
    one = bench_buffer_bytes(config, Scheme.INT8, BenchSettings(threads=(2,)))
    assert two - one == estimate_buffer_bytes(config, Scheme.INT8, tokens=1)


def test_threads_are_doubled_up_to_all() -> None:
    counts = list_thread_counts()
    assert counts[-1] == count_usable_cores()
    assert all(b in (2 * a, counts[-1]) for a, b in pairwise(counts))
    assert len(set(counts)) == len(counts)
