"""Measuring does what it says, as often as it says, and leaves nothing behind."""

import threading
from itertools import pairwise
from pathlib import Path

import pytest

from expertctl.engine.bench import (
    Subject,
    Wanted,
    kv_bytes,
    measure,
    passing_bytes,
    thread_counts,
)
from expertctl.engine.bench_result import CACHED
from expertctl.engine.decoder_programs import buffer_bytes
from expertctl.engine.kernels.scheme import Scheme
from expertctl.engine.random_base import base_bytes, random_base
from expertctl.engine.threads import usable_cores
from expertctl.package.model_config import read_config
from tests.benchmarks.test_gguf import small_config
from tests.engine.conftest import build_oracle
from tests.engine.moe.test_packed_experts import fitting
from tests.engine.plans import packed_plan, random_expert

WANTED = Wanted(threads=(1, 2), tokens=3, context=5, prompts=(4, 9), rounds=2)


@pytest.fixture(scope="module")
def subject() -> Subject:
    return Subject(what="a small base", base=random_base(small_config(), Scheme.INT8))


def crews() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "crew"]


def test_every_round_does_everything_and_is_counted(subject: Subject) -> None:
    before, done = len(crews()), list[int]()
    found = measure(subject, WANTED, progress=done.append)
    assert sum(done) == WANTED.runs == 3 * (3 * 2 + 2)
    assert found.threads == [1, 2]
    for n in found.threads:
        assert [len(each) for each in found.tokens[n].rounds] == [3, 3]
        assert len(found.memory[n].rounds) == len(found.arithmetic[n].rounds) == 2
        assert found.arithmetic_operations[n] > 0
    assert sorted(found.prompts) == [4, 9]
    figures = [*found.memory.values(), *found.tokens.values(), *found.prompts.values()]
    assert all(s > 0 for series in figures for each in series.rounds for s in each)
    assert found.work().weight_bytes == base_bytes(subject.base)
    assert found.read_bytes == CACHED  # such weights would come from a cache
    assert len(crews()) == before


def test_a_token_reads_those_routed_experts_that_it_uses_with_what_a_plan_has_for_them(
    tmp_path: Path,
) -> None:
    build_oracle(tmp_path / "base", "olmoe", **fitting("olmoe", {}))
    config = read_config(tmp_path / "base")
    assert config.experts is not None
    base = random_base(config, Scheme.FLOAT32)
    everywhere = packed_plan(config, [random_expert(config)])
    found = measure(Subject(what="a routed base", base=base, plan=everywhere), WANTED)
    assert found.work().weight_bytes == base_bytes(base)
    unused = 1 - config.experts.used / config.experts.count
    assert 0 < everywhere.routed_bytes < everywhere.nbytes
    assert found.work().expert_bytes == pytest.approx(
        everywhere.nbytes - unused * everywhere.routed_bytes, abs=1
    )


def test_a_bench_that_is_given_up_leaves_no_thread(subject: Subject) -> None:
    before = len(crews())

    def interrupt(_: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(subject, WANTED, progress=interrupt)
    assert len(crews()) == before


def test_what_it_takes_is_known_before() -> None:
    config = small_config()
    tokens = (16, 16)  # pages of sixteen: 5 + 3 tokens, and 9
    for numbers, size in ((Scheme.FLOAT32, 4), (Scheme.FLOAT16, 2)):
        expected = sum(config.kv_bytes(n, itemsize=size) for n in tokens)
        assert kv_bytes(config, WANTED, numbers=numbers) == expected
    two = passing_bytes(config, Scheme.INT8, WANTED)
    one = passing_bytes(config, Scheme.INT8, Wanted(threads=(2,)))
    assert two - one == buffer_bytes(config, Scheme.INT8, tokens=1)


def test_threads_are_doubled_up_to_all() -> None:
    counts = thread_counts()
    assert counts[-1] == usable_cores()
    assert all(b in (2 * a, counts[-1]) for a, b in pairwise(counts))
    assert len(set(counts)) == len(counts)
