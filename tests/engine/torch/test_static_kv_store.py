"""Rows of one arena: who gets which, what is kept and found, and bytes that are paid before."""

import gc
import weakref
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.engine.memory.adapter_cache import CacheRequest, Tier
from expertctl.engine.torch import static_kv_store
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder, GraphStepRow
from expertctl.engine.torch.cuda_graph_step import StaticKVCache, StaticKVRow
from expertctl.engine.torch.static_kv_store import plan_arena
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError
from expertctl.package.model_config import read_model_config
from tests.engine.conftest import ReferenceModel, assert_same_logits, stack_logits
from tests.engine.torch.static_kv_harness import (
    OTHER_PLAN,
    Allocation,
    StoreHarness,
    arena_bytes,
    read,
    write,
)
from tests.engine.torch.test_kv_cache import config

FIRST, ANSWER = list(range(1, 13)), [40, 41, 42]


@pytest.fixture
def harness() -> StoreHarness:
    return StoreHarness(config())


@dataclass
class Reader:
    """A decoder, and a store for what it reads."""

    decoder: CudaGraphDecoder
    harness: StoreHarness

    def turn(
        self, ids: Sequence[int], answer: Sequence[int] = (), **options: Any
    ) -> tuple[int, torch.Tensor]:
        """Read a prompt and an answer; return what was reused, and the logits that follow it."""
        with self.harness.lend(ids, **options) as loan:
            found = [self.decoder.prefill(ids[loan.reused :], loan.cache).logits]
            for token in answer:
                found.append(self.decoder.step([GraphStepRow(token, loan.cache)])[0])
            loan.complete((*ids, *answer))
            return loan.reused, stack_logits(found)


@pytest.fixture
def reader(shared_oracle: ReferenceModel) -> Reader:
    config = read_model_config(shared_oracle.directory)
    weights = load_base_weights(shared_oracle.directory, config)
    return Reader(CudaGraphDecoder(config, weights, min_capacity=4), StoreHarness(config))


def test_sequences_side_by_side_score_as_transformers_does(
    reader: Reader, shared_oracle: ReferenceModel
) -> None:
    """Each row begins at another time; the last sequence comes while others are in the middle."""
    texts = [[5, 9, 1, 7, 3, 3, 8, 2], [60, 4, 4, 9, 2, 11, 12, 13], [1, 2, 3, 4, 5, 6, 7, 8]]
    with ExitStack() as stack:
        running = list[tuple[list[int], Allocation]]()
        for text in texts:
            loan = stack.enter_context(reader.harness.lend(text[:2], cache_key=None))
            reader.decoder.prefill(text[:2], loan.cache)
            running.append((text, loan))
            batch = [GraphStepRow(ids[one.cache.length], one.cache) for ids, one in running]
            scores = reader.decoder.step(batch)
        for (text, loan), logits in zip(running, scores, strict=True):
            read = loan.cache.length
            assert_same_logits(logits[None], shared_oracle.compute_logits(text[:read])[-1:])
        assert [loan.cache.number for _, loan in running] == [0, 1, 2]
    assert reader.harness.store.cached_bytes == reader.harness.store.nbytes


def test_a_turn_on_kept_rows_scores_as_transformers_does(
    reader: Reader, shared_oracle: ReferenceModel
) -> None:
    reader.turn(FIRST, ANSWER)
    second = [*FIRST, *ANSWER, 7, 8]
    reused, logits = reader.turn(second, [12, 13])
    assert reused == len(FIRST) + len(ANSWER)
    wanted = shared_oracle.compute_logits([*second, 12, 13])[len(second) - 1 :]
    assert_same_logits(logits, wanted)
    assert reader.turn(FIRST, cache_key="another")[0] == 0
    assert reader.turn(FIRST, identity=OTHER_PLAN)[0] == 0
    assert reader.turn(second, reuse=False)[0] == 0


def test_a_prompt_that_runs_is_shared_as_far_as_it_was_read(
    reader: Reader, shared_oracle: ReferenceModel
) -> None:
    """As several answers to one prompt: they write on, each for itself."""
    with ExitStack() as stack:
        first = stack.enter_context(reader.harness.lend(FIRST))
        reader.decoder.prefill(FIRST[:7], first.cache)
        second = stack.enter_context(reader.harness.lend(FIRST))
        reader.decoder.prefill(FIRST[7:], first.cache)
        third = stack.enter_context(reader.harness.lend(FIRST))
        assert [loan.reused for loan in (first, second, third)] == [0, 7, len(FIRST) - 1]
        for loan in (second, third):
            reader.decoder.prefill(FIRST[loan.reused :], loan.cache)
        loans = (first, second, third)
        for turn in range(3):
            batch = [GraphStepRow(20 + n + turn, loan.cache) for n, loan in enumerate(loans)]
            scores = reader.decoder.step(batch)
        for number, logits in enumerate(scores):
            text = [*FIRST, *(20 + number + turn for turn in range(3))]
            assert_same_logits(logits[None], shared_oracle.compute_logits(text)[-1:])


def test_the_arena_is_paid_for_before_it_is_allocated_and_as_a_whole(
    harness: StoreHarness,
) -> None:
    assert harness.store.nbytes == harness.budget.used == 0
    with harness.lend([1, 2]) as loan:
        assert loan.cache.capacity == 24
        assert harness.budget.used == 3 * harness.row == loan.cache.arena.nbytes
        assert harness.store.cached_bytes == 2 * harness.row
    assert harness.store.cached_bytes == harness.store.nbytes == 3 * harness.row
    harness.store.check_idle()
    harness.store.clear()
    assert harness.store.nbytes == harness.budget.used == 0


def test_a_new_sequence_gets_the_first_row_and_what_was_kept_there_moves(
    harness: StoreHarness,
) -> None:
    """So a step of few sequences has few rows."""
    texts = [(1, 1, 1), (2, 2, 2)]
    for ids in texts:
        with harness.lend(ids) as loan:
            assert loan.cache.number == 0
            write(loan, ids)
            loan.complete(ids)
    for ids in texts:
        with harness.lend((*ids, 9), reuse=True) as loan:
            assert (loan.cache.number, loan.reused, read(loan)) == (0, 3, list(ids))
            loan.complete(ids)


def test_where_all_rows_are_filled_a_sequence_goes_on_where_it_is(harness: StoreHarness) -> None:
    texts = [(1, 1, 1), (2, 2, 2), (3, 3, 3)]
    for ids in texts:
        harness.fill(ids)
    found = []
    for ids in texts:
        with harness.lend((*ids, 9)) as loan:
            found.append((loan.cache.number, loan.reused))
            loan.complete(ids)
    assert found == [(2, 3), (1, 3), (0, 3)]


def test_where_no_row_is_free_the_one_unused_longest_goes(harness: StoreHarness) -> None:
    for ids in ((1, 1, 1), (2, 2, 2), (3, 3, 3)):
        harness.fill(ids)
    with harness.lend((1, 1, 1, 9)) as loan:  # just used: now 2 is the oldest
        assert loan.reused == 3
        loan.complete((1, 1, 1))
    harness.fill((4, 4, 4))
    with harness.lend((2, 2, 2, 9)) as loan:
        assert loan.reused == 0
    with harness.lend((3, 3, 3, 9)) as one, harness.lend((1, 1, 1, 9)) as other:
        assert (one.reused, other.reused) == (0, 3), "the last one took the row of 3"


def test_a_beginning_in_common_is_copied_and_both_stay(harness: StoreHarness) -> None:
    harness.fill((1, 2, 3, 4, 5, 6, 7))
    with harness.lend((1, 2, 9)) as loan:
        assert loan.reused == 2
        write(loan, [5])
        loan.complete((1, 2, 9))
    for ids, reused in (((1, 2, 3, 4, 5, 6, 7, 8), 7), ((1, 2, 9, 9), 3)):
        with harness.lend(ids) as loan:
            assert loan.reused == reused
            loan.complete(ids[:reused])


def test_in_a_single_row_what_is_kept_serves_what_only_begins_alike() -> None:
    harness = StoreHarness(config(), rows=1)
    harness.fill((1, 2, 3, 4, 5, 6, 7))
    with harness.lend((1, 2, 9)) as loan:
        assert (loan.cache.number, loan.reused) == (0, 2)
    with harness.lend((1, 2, 9)) as loan:
        assert loan.reused == 0, "it was not completed"


def test_more_sequences_than_rows_wait_and_change_nothing(harness: StoreHarness) -> None:
    with ExitStack() as stack:
        loans = [stack.enter_context(harness.lend([n, n])) for n in range(3)]
        for number, loan in enumerate(loans):
            write(loan, [number, number])
        with pytest.raises(BudgetError, match="all 3 rows are in use"):
            stack.enter_context(harness.store.allocate(harness.wanted([7, 7])))
        harness.check()
        assert [read(loan) for loan in loans] == [[0, 0], [1, 1], [2, 2]]
    harness.store.check_idle()
    assert harness.fill([7, 7]) == 0


def test_a_longer_sequence_waits_for_all_others_and_gets_longer_rows(
    harness: StoreHarness,
) -> None:
    """With multiples of the usual capacity, so that a conversation that grows keeps its row."""
    with harness.lend([1, 2]) as loan:
        loan.complete([1, 2])
        with pytest.raises(BudgetError, match="the rows in use have 24 tokens"):
            harness.store.allocate(harness.wanted([1] * 9, capacity=25)).__enter__()
        harness.check()
    with harness.lend([1] * 9, capacity=25) as loan:
        assert (loan.cache.capacity, harness.shape) == (48, (1, 48))
        write(loan, [1] * 9)
        with pytest.raises(BudgetError, match="all 1 rows are in use"):
            harness.store.allocate(harness.wanted([1])).__enter__()
        loan.complete([1] * 9)
    with harness.lend([1] * 10, capacity=40) as loan:
        assert (loan.reused, harness.shape) == (9, (1, 48))
    with harness.lend([1] * 10, capacity=49) as loan:
        assert (loan.reused, harness.shape) == (0, (1, 72))
    with harness.lend([1] * 10) as loan:
        assert (loan.reused, harness.shape) == (0, (3, 24)), "short ones get many rows again"


def test_in_little_memory_there_are_fewer_rows_and_at_last_one_of_what_is_needed() -> None:
    for room, shape in ((2.9, (2, 24)), (1.5, (1, 24)), (0.6, (1, 12))):
        harness = StoreHarness(config(), rows=4, room=room)
        with harness.lend([1, 2], capacity=12) as loan:
            assert harness.shape == shape
            assert harness.budget.used == arena_bytes(harness.config, *shape)
            assert loan.cache.capacity >= 12
    harness = StoreHarness(config(), room=0.6)
    exact = arena_bytes(harness.config, 1, 14)
    assert exact <= harness.budget.limit < exact + harness.row
    with pytest.raises(BudgetError, match="the KV cache of 24 tokens") as refused:
        harness.store.allocate(harness.wanted([1])).__enter__()
    assert "--memory-budget" in refused.value.hint
    harness.check()
    assert harness.budget.used == 0


def test_when_there_is_memory_again_there_are_all_rows_again(harness: StoreHarness) -> None:
    with (
        harness.tiers.reserve_during(Tier.DEVICE, "buffers", 2 * harness.row, what="others"),
        harness.lend([1, 2]),
    ):
        assert harness.shape == (1, 24)
    with (
        harness.tiers.reserve_during(Tier.DEVICE, "buffers", harness.row, what="others"),
        harness.lend([1, 2]),
    ):
        assert harness.shape == (1, 24), "less than that replaces nothing"
    with harness.lend([1, 2]):
        assert harness.shape == (3, 24)


def test_the_old_arena_is_gone_before_the_next_one_is_allocated(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocate, arenas, alive = StaticKVCache.__init__, list[Any](), list[int]()

    def seen(arena: StaticKVCache, *values: Any, **options: Any) -> None:
        alive.append(sum(one() is not None for one in arenas))
        arenas.append(weakref.ref(arena))
        allocate(arena, *values, **options)

    monkeypatch.setattr(StaticKVCache, "__init__", seen)
    for capacity in (24, 48, 24):
        with harness.lend([1, 2, 3], capacity=capacity) as loan:
            write(loan, [1, 2, 3])
            loan.complete([1, 2, 3])
        del loan
    assert alive == [0, 0, 0]


def pin(harness: StoreHarness, name: str, rows: float) -> Any:
    size = int(rows * harness.row)
    key = (Tier.DEVICE, Digest.compute(name.encode()))
    return harness.tiers.pin([CacheRequest(key, size, name, lambda: object())])


def test_an_arena_that_nobody_uses_is_given_up_for_a_plan_and_one_in_use_is_not(
    harness: StoreHarness,
) -> None:
    with harness.lend([1, 2]):
        with pytest.raises(BudgetError), pin(harness, "plan", 0.5):
            pass
        harness.check()
    assert harness.budget.reserved_bytes("kv") == 3 * harness.row
    with pin(harness, "plan", 0.5):
        harness.check()
        assert harness.store.nbytes == 0
        with harness.lend([1, 2]):
            assert harness.shape == (1, 24), "a half of three rows, and there are two"
    with harness.lend([1, 2]):
        assert harness.shape == (3, 24), "plans that nobody uses make room"


def test_what_is_forgotten_is_neither_found_nor_kept(harness: StoreHarness) -> None:
    harness.fill([1, 2, 3], cache_key="a")
    harness.fill([1, 2, 3], cache_key="b")
    with harness.lend([4, 5, 6], cache_key="a") as loan:
        write(loan, [4, 5, 6])
        harness.store.forget("a")
        with harness.lend([4, 5, 6], cache_key="a") as other:
            assert other.reused == 0, "it runs on, but for itself"
        loan.complete([4, 5, 6])
    for key, reused in (("a", 0), ("b", 2)):
        for ids in ([1, 2, 3], [4, 5, 6]):
            with harness.lend(ids, cache_key=key) as loan:
                assert loan.reused == (reused if ids[0] == 1 else 0)
                loan.complete(ids[: loan.cache.length])


def test_rows_of_a_soft_prompt_are_reused_with_at_least_one_token(harness: StoreHarness) -> None:
    """They are no tokens of the prompt, and are the same for one plan."""
    soft = {"virtual_tokens": 4}
    with harness.lend([1, 2, 3], **soft) as first:
        write(first, [9, 9, 9])
        with harness.lend([1, 2, 3], **soft) as loan:
            assert (loan.reused, loan.cache.length) == (0, 0), "not all of its rows were written"
        write(first, [9, 1, 2, 3])
        with harness.lend([1, 2, 5], **soft) as loan:
            assert (loan.reused, read(loan)) == (2, [9, 9, 9, 9, 1, 2])
        first.complete([1, 2, 3])
    with harness.lend([1, 2, 3, 4], **soft) as loan:
        assert (loan.reused, read(loan)) == (3, [9, 9, 9, 9, 1, 2, 3])
        loan.complete([1, 2, 3])
    with harness.lend([7, 2, 3, 4], **soft) as loan:
        assert (loan.reused, loan.cache.length) == (0, 0)


@pytest.mark.parametrize("kept_rows", [0, 1, 2])
def test_no_more_is_kept_than_may_be(kept_rows: int) -> None:
    harness = StoreHarness(config(), kept_rows=kept_rows)
    for number in range(3):
        harness.fill([number, 1, 2])
    found = []
    for number in (2, 1, 0):
        with harness.lend([number, 1, 2, 9]) as loan:
            found.append(loan.reused)
            loan.complete([number, 1, 2])
    assert found[:kept_rows] == [3] * kept_rows
    assert found[kept_rows:] == [0] * (3 - kept_rows)


def test_a_sequence_that_fails_keeps_nothing_and_frees_its_row(harness: StoreHarness) -> None:
    harness.fill([1, 2, 3])
    with suppress(ZeroDivisionError), harness.lend([1, 2, 3, 4]) as loan:
        assert loan.reused == 3
        raise ZeroDivisionError
    harness.store.check_idle()
    harness.check()
    with harness.lend([1, 2, 3, 4]) as loan:
        assert loan.reused == 0


@pytest.mark.parametrize("fails", ["allocating", "copying"])
def test_a_device_that_fails_leaves_the_store_as_it_was(
    fails: str, harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    if fails == "copying":
        harness.fill([1, 2, 3])
    owner, name = (StaticKVCache, "__init__") if fails == "allocating" else (
        StaticKVRow, "copy_from")  # fmt: skip
    with monkeypatch.context() as broken:
        broken.setattr(owner, name, full)
        with pytest.raises(BudgetError, match="less memory left"):
            harness.store.allocate(harness.wanted([9, 9])).__enter__()
    harness.check()
    harness.store.check_idle()
    assert harness.store.nbytes == (0 if fails == "allocating" else 3 * harness.row)
    with harness.lend([1, 2, 3, 4]) as loan:
        assert loan.reused == (0 if fails == "allocating" else 3)


def test_a_small_arena_is_replaced_under_load_when_there_is_memory_but_not_all_the_time() -> None:
    harness = StoreHarness(config(), rows=4, room=6)
    ids, others = [1, 2, 3], int(3.5 * harness.row)

    def is_draining(why: str = "all 2 rows") -> bool:
        with pytest.raises(BudgetError, match=why):
            harness.store.check_free_row(harness.wanted(ids))
        return harness.store._is_draining

    with harness.lend(ids):
        assert harness.shape[0] == 4
    harness.store.clear()
    with ExitStack() as first, ExitStack() as second:
        with harness.tiers.reserve_during(Tier.DEVICE, "experts", others, what="others"):
            for stack in (first, second):
                stack.enter_context(harness.lend(ids))
            assert not is_draining(), "there is no memory for more"
        assert not is_draining(), "it was looked for a moment ago"
        harness.now += static_kv_store.DRAIN_INTERVAL
        assert is_draining()
        second.close()
        assert is_draining("more rows are to be allocated")
        assert harness.store.free_rows == 0
    with harness.lend(ids):
        assert harness.shape[0] == 4
        harness.store.check_free_row(harness.wanted(ids))
        assert harness.store.free_rows == 3


def test_the_memory_of_an_arena_is_given_back_to_the_device_before_its_bytes_are_free(
    harness: StoreHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness.fill([1, 2, 3])
    arena, seen = weakref.ref(harness.store._arena), list[tuple[bool, int]]()
    monkeypatch.setattr(harness.store, "_device", torch.device("cuda"))
    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: seen.append((arena() is None, harness.budget.used))
    )
    harness.store.clear()
    assert seen == [(True, 3 * harness.row)]
    assert harness.budget.used == 0


def test_a_decoder_does_not_keep_an_arena_that_was_given_up(
    reader: Reader, shared_oracle: ReferenceModel
) -> None:
    """Its bytes would be somebody else's already; and the next arena is read with inputs anew."""
    for text in ([5, 9, 1, 7, 3, 3, 8], [60, 4, 4, 9, 2]):
        with reader.harness.lend(text[:2], cache_key=None) as loan:
            reader.decoder.prepare(loan.cache, rows=3)
            found = [reader.decoder.prefill(text[:2], loan.cache).logits]
            found += [reader.decoder.step([GraphStepRow(t, loan.cache)])[0] for t in text[2:]]
        assert_same_logits(stack_logits(found), shared_oracle.compute_logits(text)[1:])
        arena = weakref.ref(reader.harness.store._arena)
        del loan
        reader.harness.store.clear()
        gc.collect()
        assert arena() is None
        assert reader.decoder.nbytes > 0


@given(
    rows=st.integers(2, 16),
    context=st.integers(1, 5000),
    memory=st.integers(0, 1 << 22),
    token=st.integers(1, 5000),
    fixed=st.integers(0, 1 << 18),
)
@settings(max_examples=300, deadline=None)
def test_a_plan_fits_into_the_memory_that_it_was_made_for(
    rows: int, context: int, memory: int, token: int, fixed: int
) -> None:
    def kv_bytes(tokens: int) -> int:
        return token * (tokens + 1)

    def buffer_bytes(tokens: int) -> int:
        return fixed + 10 * tokens

    plan = plan_arena(
        rows=rows, context=context, memory=memory, kv_bytes=kv_bytes, buffer_bytes=buffer_bytes
    )
    assert 1 <= plan.capacity <= plan.longest <= context
    assert plan.capacity < 64 or plan.capacity == context or plan.capacity % 64 == 0
    count = plan.choose_rows(kv_bytes(plan.capacity))
    assert 1 <= count <= rows
    if count > 1:  # there are two parts for plans, and one for what their slots take
        taken = 3 * count * kv_bytes(plan.capacity) + 2 * buffer_bytes(plan.capacity)
        assert taken <= memory
    if count < rows:  # then so many of a typical sequence do not fit
        typical = min(static_kv_store.TYPICAL_SEQUENCE_TOKENS, context)
        assert 3 * rows * kv_bytes(typical) + 2 * buffer_bytes(typical) > memory
    if plan.longest < context and plan.longest > plan.capacity:
        assert kv_bytes(plan.longest) + buffer_bytes(plan.longest) <= memory
        assert kv_bytes(plan.longest + 1) + buffer_bytes(plan.longest + 1) > memory
    before = 0
    for tokens in range(1, context + 1, max(1, context // 50)):
        capacity = plan.choose_capacity(tokens)
        assert max(tokens, before) <= capacity <= max(plan.longest, tokens)
        before = capacity


def test_without_a_limit_every_row_holds_the_whole_context() -> None:
    plan = plan_arena(
        rows=4, context=99, memory=None, kv_bytes=lambda n: 7 * n, buffer_bytes=lambda n: n
    )
    assert (plan.capacity, plan.longest, plan.choose_rows(7 * 99)) == (99, 99, 4)
