"""The pool against a plain model: which rows a text finds, who pays, and who never meets whom.

No decoder is needed for that: the row of a token is marked with a number made from the owner, the
plan and all tokens up to it, so a row that stands in a wrong place is seen.
"""

import threading
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from expertctl.digest import Digest
from expertctl.engine.kernels.packed_format import KV_PAGE_TOKENS, Scheme
from expertctl.engine.kv.block_pool import (
    FLOAT32_PAGES,
    ROW_PAGES,
    BlockPool,
    InterleavedPages,
    PagedKVCache,
    PageLayout,
    estimate_pages_bytes,
)
from expertctl.engine.kv.kv_cache import KVAllocation, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError
from tests.engine.torch.test_kv_cache import config

CONFIG = config(layers=2, kv_heads=2, head_dim=16)
PLAN, OTHER_PLAN = Digest.compute(b"plan"), Digest.compute(b"other plan")
BYTES = estimate_pages_bytes(CONFIG, KV_PAGE_TOKENS, FLOAT32_PAGES)
"""Bytes of a page."""
TEXT = tuple(range(100, 140))
"""Two pages and a half."""


def marks(key: str | None, plan: Digest, tokens: Sequence[int]) -> list[int]:
    """Return a number for each token that depends on all that its row depends on."""
    found, before = [], hash((key, plan))
    for token in tokens:
        before = hash((before, token))
        found.append(before % (1 << 11))  # exact in float16
    return found


def write(cache: PagedKVCache, numbers: Sequence[int]) -> None:
    """Write the rows of the next tokens."""
    for number in numbers:
        cache.ensure_capacity(1)
        keys, values = _rows(cache, cache.length)
        keys[...] = number
        values[...] = -number
        cache.advance(1)


def read(cache: PagedKVCache) -> list[int]:
    """Return the numbers of all rows; each row has one."""
    found = []
    for place in range(cache.length):
        keys, values = _rows(cache, place)
        number = int(keys.flat[0])
        assert (keys == number).all()
        assert (values == -number).all()
        found.append(number)
    return found


def _rows(cache: PagedKVCache, place: int) -> "tuple[np.ndarray[Any, Any], ...]":
    """The key and the value of a token in all layers and heads, [2, 2, 16], as views."""
    page, slot = cache.pages[place // KV_PAGE_TOKENS], place % KV_PAGE_TOKENS
    if not isinstance(cache.layout, InterleavedPages):
        return page[:, 0, :, slot], page[:, 1, :, slot]
    half = cache.layout.numbers is Scheme.FLOAT16
    numbers = page.view(np.float16 if half else np.float32).reshape(2, 2, 2, -1)
    keys = numbers[:, 0].reshape(2, 2, 16, KV_PAGE_TOKENS)[..., slot]
    return keys, numbers[:, 1].reshape(2, 2, KV_PAGE_TOKENS, 16)[..., slot, :]


class BlockPoolHarness:
    """A pool with a budget of so many pages."""

    def __init__(
        self, *, pages: int = 1000, layout: PageLayout = FLOAT32_PAGES, kept: int | None = None
    ) -> None:
        self.budget = MemoryBudget(pages * BYTES)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        limit = None if kept is None else kept * BYTES
        self.pool = BlockPool(self.tiers, layout=layout, cached_limit=limit)

    def wanted(self, ids: Sequence[int], *, room: int = 4, **options: Any) -> KVRequest:
        values = {"cache_key": "chat", "identity": PLAN, "virtual_tokens": 0, **options}
        capacity = values["virtual_tokens"] + len(ids) + room
        return KVRequest(config=CONFIG, ids=ids, capacity=capacity, **values)

    def turn(self, ids: Sequence[int], answer: Sequence[int] = (), **options: Any) -> int:
        """Read a prompt and write an answer; return what was reused."""
        wanted = self.wanted(ids, **{"room": len(answer), **options})
        with self.pool.allocate(wanted) as loan:
            self.check(wanted, loan)
            write(loan.cache, self.rest(wanted, loan, answer))
            loan.complete((*ids, *answer))
        self.pool.check_integrity()
        self.tiers.check_integrity()
        return loan.reused

    def all_marks(self, wanted: KVRequest, answer: Sequence[int] = ()) -> list[int]:
        tokens = (*[-1] * wanted.virtual_tokens, *wanted.ids, *answer)
        return marks(wanted.cache_key, wanted.identity, tokens)

    def rest(
        self, wanted: KVRequest, loan: KVAllocation[PagedKVCache], answer: Sequence[int] = ()
    ) -> list[int]:
        return self.all_marks(wanted, answer)[loan.cache.length :]

    def check(self, wanted: KVRequest, loan: KVAllocation[PagedKVCache]) -> None:
        """What is there is what the text itself would have written."""
        assert loan.cache.capacity == wanted.capacity
        assert 0 <= loan.reused < len(wanted.ids)
        assert loan.cache.length == (wanted.virtual_tokens + loan.reused if loan.reused else 0)
        assert read(loan.cache) == self.all_marks(wanted)[: loan.cache.length]


@pytest.fixture(params=[FLOAT32_PAGES, ROW_PAGES], ids=lambda layout: layout.name)
def pool_harness(request: pytest.FixtureRequest) -> BlockPoolHarness:
    return BlockPoolHarness(layout=request.param)


def test_a_text_finds_the_rows_of_one_that_began_as_it_does(pool_harness: BlockPoolHarness) -> None:
    assert pool_harness.turn(TEXT, (7, 8, 9)) == 0
    assert pool_harness.turn((*TEXT, 7, 8, 9, 10, 11)) == 43
    assert pool_harness.turn((*TEXT, 7, 5)) == 41
    assert pool_harness.turn((*TEXT[:20], 5)) == 20
    assert pool_harness.turn((*TEXT[:16], 5)) == 16
    assert pool_harness.turn((5, *TEXT)) == 0


def test_at_least_one_token_is_always_read(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    assert pool_harness.turn(TEXT) == 39
    assert pool_harness.turn(TEXT[:32]) == 31
    assert pool_harness.turn(TEXT[:17]) == 16
    assert pool_harness.turn(TEXT[:1]) == 0


def test_rows_that_were_never_written_are_not_found(pool_harness: BlockPoolHarness) -> None:
    """The last token of an answer that reached its limit was drawn, not read."""
    wanted = pool_harness.wanted(TEXT)
    with pool_harness.pool.allocate(wanted) as loan:
        write(loan.cache, pool_harness.rest(wanted, loan))
        loan.complete((*TEXT, 33, 34))
    assert pool_harness.turn((*TEXT, 33, 34, 35)) == len(TEXT)


@pytest.mark.parametrize("virtual", [1, 15, 16, 17, 40])
def test_rows_of_a_soft_prompt_are_found_with_the_first_token_or_not_at_all(virtual: int) -> None:
    pool_harness = BlockPoolHarness()
    assert pool_harness.turn(TEXT, virtual_tokens=virtual) == 0
    assert pool_harness.turn((*TEXT, 1, 2), virtual_tokens=virtual) == 40
    assert pool_harness.turn((*TEXT[:3], 1, 2), virtual_tokens=virtual) == 3
    assert pool_harness.turn((1, 2, 3), virtual_tokens=virtual) == 0
    assert pool_harness.turn(TEXT[:1], virtual_tokens=virtual) == 0
    assert pool_harness.turn(TEXT) == 0


def test_another_plan_is_a_miss_that_takes_nothing_away(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    assert pool_harness.turn(TEXT, identity=OTHER_PLAN) == 0
    assert pool_harness.turn(TEXT) == 39
    assert pool_harness.turn(TEXT, identity=OTHER_PLAN) == 39


def test_owners_never_meet(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT, cache_key="a")
    assert pool_harness.turn(TEXT, cache_key="b") == 0
    assert pool_harness.turn(TEXT, cache_key=None) == 0
    assert pool_harness.turn(TEXT, cache_key="") == 0
    assert pool_harness.turn(TEXT, cache_key="a") == 39
    assert pool_harness.turn(TEXT, cache_key="b") == 39


class Colliding(int):
    """A token whose hash is that of every other."""

    def __hash__(self) -> int:
        return 7


def test_tokens_are_compared_and_not_only_their_hash(pool_harness: BlockPoolHarness) -> None:
    one, other = (tuple(Colliding(n) for n in range(start, start + 20)) for start in (0, 50))
    assert hash(one[:16]) == hash(other[:16])
    pool_harness.turn(one)
    assert pool_harness.turn(other) == 0
    assert pool_harness.turn((*one[:16], *other)) == 16


def test_a_text_that_fails_leaves_nothing_and_takes_nothing_away(
    pool_harness: BlockPoolHarness,
) -> None:
    pool_harness.turn(TEXT)
    longer = (*TEXT, *range(20))
    borrowed = pool_harness.pool.allocate(pool_harness.wanted(longer))
    loan = borrowed.__enter__()
    write(loan.cache, [0] * 24)  # rows that are wrong
    failure = ZeroDivisionError()
    assert not borrowed.__exit__(type(failure), failure, None)
    assert pool_harness.budget.used == 3 * BYTES
    assert pool_harness.turn(longer) == len(TEXT)
    assert pool_harness.turn(TEXT) == 39


def test_texts_that_run_at_once_share_pages_and_write_only_their_own(
    pool_harness: BlockPoolHarness,
) -> None:
    pool_harness.turn(TEXT)
    texts = [(*TEXT[:36], *range(start, start + 30)) for start in (0, 50, 0)]
    with ExitStack() as stack:
        wants = [pool_harness.wanted(text) for text in texts]
        loans = [stack.enter_context(pool_harness.pool.allocate(wanted)) for wanted in wants]
        assert [loan.reused for loan in loans] == [36] * 3
        tables = [[page.ctypes.data for page in loan.cache._pages] for loan in loans]
        assert all(table[:2] == tables[0][:2] for table in tables)
        assert len({page for table in tables for page in table}) == 2 + 3 * 3
        for steps in range(30):  # in turns
            for wanted, loan in zip(wants, loans, strict=True):
                write(loan.cache, pool_harness.rest(wanted, loan)[:1])
                assert (
                    read(loan.cache)[36 + steps :]
                    == pool_harness.all_marks(wanted)[36 + steps :][:1]
                )
        for text, loan in zip(texts, loans, strict=True):
            loan.complete(text)
        pool_harness.pool.check_integrity()
    assert [pool_harness.turn(text) for text in texts] == [65] * 3
    assert pool_harness.turn(TEXT) == 39


def test_a_text_finds_the_whole_pages_of_a_prompt_that_runs(pool_harness: BlockPoolHarness) -> None:
    first = pool_harness.wanted(TEXT, room=30)
    with pool_harness.pool.allocate(first) as running:
        write(running.cache, pool_harness.rest(first, running)[:31])
        assert pool_harness.turn(TEXT[:31], cache_key="another chat") == 0
        second = pool_harness.wanted((*TEXT[:35], 5))
        with pool_harness.pool.allocate(second) as loan:
            pool_harness.check(second, loan)
            assert loan.reused == 16
            write(running.cache, pool_harness.rest(first, running, [7] * 30))
            write(loan.cache, pool_harness.rest(second, loan))
            assert pool_harness.turn((*TEXT, *[7] * 20)) == 32, (
                "an answer is not shared before it ends"
            )
            assert read(running.cache) == pool_harness.all_marks(first, [7] * 30)
            assert read(loan.cache) == pool_harness.all_marks(second)
            pool_harness.pool.check_integrity()
        running.complete((*TEXT, *[7] * 30))
    assert pool_harness.turn((*TEXT, *[7] * 30)) == 69


def test_what_two_texts_that_run_wrote_alike_is_one_page_from_then_on(
    pool_harness: BlockPoolHarness,
) -> None:
    wants = [pool_harness.wanted(TEXT, room=0), pool_harness.wanted((*TEXT[:35], 5), room=0)]
    with ExitStack() as stack:
        loans = [stack.enter_context(pool_harness.pool.allocate(wanted)) for wanted in wants]
        for wanted, loan in zip(wants, loans, strict=True):
            write(loan.cache, pool_harness.rest(wanted, loan))
        tables = [loan.cache.table for loan in loans]
        assert pool_harness.budget.used == 6 * BYTES
        with pool_harness.pool.allocate(pool_harness.wanted(TEXT[:33], room=0)) as third:
            assert third.reused == 32
            assert pool_harness.budget.used == pool_harness.pool.nbytes == (2 + 3) * BYTES
        assert [loan.cache.table for loan in loans] == tables, "what reads them looks there"
        for wanted, loan in zip(wants, loans, strict=True):
            loan.cache.check_integrity()
            assert read(loan.cache) == pool_harness.all_marks(wanted)
        loans[1].cache.rewind(31)
        assert loans[1].cache.length == 32, "what several texts share is not written again"
        pool_harness.pool.check_integrity()
    assert pool_harness.budget.used == pool_harness.pool.nbytes == 2 * BYTES


def test_a_prompt_that_fails_leaves_the_pages_that_others_began_with(
    pool_harness: BlockPoolHarness,
) -> None:
    longer = pool_harness.wanted((*TEXT, *range(30)))
    borrowed = pool_harness.pool.allocate(longer)
    running = borrowed.__enter__()
    write(running.cache, pool_harness.rest(longer, running)[:20])
    with pool_harness.pool.allocate(pool_harness.wanted(TEXT)) as loan:
        assert loan.reused == 16
        write(running.cache, [0] * 30)  # rows that are wrong
        failure = ZeroDivisionError()
        assert not borrowed.__exit__(type(failure), failure, None)
        pool_harness.pool.check_integrity()
        write(loan.cache, pool_harness.rest(pool_harness.wanted(TEXT), loan))
        loan.complete(TEXT)
    assert pool_harness.turn(longer.ids) == len(TEXT)


def test_texts_of_a_key_that_is_forgotten_share_nothing_any_more(
    pool_harness: BlockPoolHarness,
) -> None:
    first = pool_harness.wanted(TEXT)
    with pool_harness.pool.allocate(first) as running:
        write(running.cache, pool_harness.rest(first, running))
        with pool_harness.pool.allocate(first) as second:
            assert second.reused == 32
            pool_harness.pool.forget("chat")
            pool_harness.pool.check_integrity()
            assert pool_harness.turn(TEXT) == 0
            pool_harness.pool.check_integrity()
    assert pool_harness.budget.used == pool_harness.pool.nbytes == 3 * BYTES


def test_what_two_texts_wrote_alike_is_kept_once(pool_harness: BlockPoolHarness) -> None:
    with ExitStack() as stack:
        wants = [pool_harness.wanted(TEXT), pool_harness.wanted((*TEXT[:37], 5))]
        loans = [stack.enter_context(pool_harness.pool.allocate(wanted)) for wanted in wants]
        for wanted, loan in zip(wants, loans, strict=True):
            write(loan.cache, pool_harness.rest(wanted, loan))
            loan.complete(wanted.ids)
        assert pool_harness.budget.used == 6 * BYTES
    assert pool_harness.budget.used == pool_harness.pool.nbytes == 4 * BYTES
    pool_harness.turn((*TEXT[:37], 5, 6, 7))
    assert pool_harness.budget.used == 4 * BYTES  # the shorter end went into the longer one


def test_room_that_was_not_needed_is_given_back(pool_harness: BlockPoolHarness) -> None:
    wanted = pool_harness.wanted(TEXT, room=200)
    with pool_harness.pool.allocate(wanted) as loan:
        assert pool_harness.budget.used == 15 * BYTES
        write(loan.cache, pool_harness.rest(wanted, loan))
        loan.complete(TEXT)
    assert pool_harness.budget.used == pool_harness.pool.nbytes == 3 * BYTES


def test_pages_that_a_text_gets_as_it_grows_are_in_the_ledger_and_go_with_it(
    pool_harness: BlockPoolHarness,
) -> None:
    wanted = replace(pool_harness.wanted(TEXT, room=100), initial_tokens=len(TEXT) + 1)
    with pool_harness.pool.allocate(wanted) as loan:
        assert pool_harness.budget.reserved_bytes("kv") == 3 * BYTES
        write(loan.cache, pool_harness.rest(wanted, loan, range(60)))
        assert pool_harness.budget.reserved_bytes("kv") == 7 * BYTES
        pool_harness.pool.check_integrity()
        loan.complete((*TEXT, *range(60)))
    assert pool_harness.budget.reserved_bytes("kv") == pool_harness.pool.cached_bytes == 7 * BYTES
    pool_harness.pool.forget("chat")
    assert pool_harness.budget.used == 0


def test_a_text_that_grows_puts_out_what_is_kept_and_then_stays_as_it_is() -> None:
    pool_harness = BlockPoolHarness(pages=4)
    pool_harness.turn(range(20), cache_key="other")
    wanted = replace(pool_harness.wanted(TEXT[:16], room=100), initial_tokens=17)
    with pool_harness.pool.allocate(wanted) as loan:
        assert pool_harness.budget.reserved_bytes("kv") == 4 * BYTES
        with pytest.raises(BudgetError):
            write(loan.cache, pool_harness.rest(wanted, loan, range(100)))
        assert loan.cache.length == 4 * KV_PAGE_TOKENS
        assert pool_harness.pool.cached_bytes == 0
        pool_harness.pool.check_integrity()
    assert pool_harness.budget.used == 0


def test_what_is_shared_is_paid_once(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    with pool_harness.pool.allocate(pool_harness.wanted((*TEXT, 1), room=0)):
        assert pool_harness.budget.used == 4 * BYTES
        with pool_harness.pool.allocate(pool_harness.wanted((*TEXT[:35], 1), room=0)):
            assert pool_harness.budget.used == 5 * BYTES
    assert pool_harness.budget.used == 3 * BYTES


def test_a_page_and_its_copy_that_do_not_fit_are_one_that_is_read_again() -> None:
    pool_harness = BlockPoolHarness(pages=4)
    pool_harness.turn(TEXT)
    assert pool_harness.turn((*TEXT, 1), room=20) == 32
    assert pool_harness.budget.used == 3 * BYTES
    pool_harness = BlockPoolHarness(pages=2)
    pool_harness.turn(TEXT[:10], virtual_tokens=12)
    assert pool_harness.turn((*TEXT[:10], 1), virtual_tokens=12) == 4
    pool_harness = BlockPoolHarness(pages=2)
    # what is left without the copy has not even all virtual rows
    pool_harness.turn(TEXT[:5], virtual_tokens=20)
    assert pool_harness.turn((*TEXT[:5], 1), virtual_tokens=20) == 0


def test_what_is_kept_is_given_up_before_anything_is_refused(
    pool_harness: BlockPoolHarness,
) -> None:
    pool_harness.turn(TEXT)
    with pool_harness.tiers.reserve_during(
        Tier.DEVICE, "base", pool_harness.budget.limit, what="a base"
    ):
        assert pool_harness.budget.reserved_bytes("kv") == 0
    assert pool_harness.turn(TEXT) == 0
    with pytest.raises(BudgetError, match="KV cache of 16001"):
        pool_harness.turn(TEXT, room=16001 - len(TEXT))
    assert pool_harness.turn(TEXT) == 39, "what cannot fit makes nobody go"


def test_what_was_used_longest_ago_goes_first_and_ends_before_beginnings() -> None:
    pool_harness = BlockPoolHarness(pages=7)
    pool_harness.turn(TEXT, cache_key="old")
    pool_harness.turn(TEXT, cache_key="new")
    with pool_harness.tiers.reserve_during(Tier.DEVICE, "buffers", 2 * BYTES, what="buffers"):
        assert pool_harness.pool.nbytes == 5 * BYTES
    assert pool_harness.turn(TEXT[:32], cache_key="old") == 31
    with pool_harness.tiers.reserve_during(Tier.DEVICE, "buffers", 3 * BYTES, what="buffers"):
        assert pool_harness.pool.nbytes == 4 * BYTES
    assert pool_harness.turn(TEXT[:32], cache_key="old") == 31
    assert pool_harness.turn(TEXT, cache_key="new") == 32


def test_what_is_shared_by_a_text_that_runs_stays(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    with pool_harness.pool.allocate(pool_harness.wanted((*TEXT, 1))) as loan:
        size = pool_harness.budget.limit - 3 * BYTES
        with pool_harness.tiers.reserve_during(Tier.DEVICE, "buffers", size, what="buffers"):
            pool_harness.check(pool_harness.wanted((*TEXT, 1)), loan)
            assert pool_harness.pool.nbytes == 3 * BYTES
        with pytest.raises(BudgetError):
            pool_harness.tiers.reserve(Tier.DEVICE, "buffers", size + 1, what="buffers")


def test_what_is_forgotten_is_gone(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    pool_harness.turn(TEXT, cache_key="another chat")
    pool_harness.pool.forget("a third chat")
    assert pool_harness.budget.used == 6 * BYTES
    pool_harness.pool.forget("chat")
    assert pool_harness.budget.used == 3 * BYTES
    assert pool_harness.turn(TEXT) == 0
    assert pool_harness.turn(TEXT, cache_key="another chat") == 39


def test_a_text_that_runs_while_its_owner_is_forgotten_goes_on_and_leaves_nothing(
    pool_harness: BlockPoolHarness,
) -> None:
    pool_harness.turn(TEXT)
    longer = pool_harness.wanted((*TEXT, 1, 2))
    with pool_harness.pool.allocate(longer) as loan:
        pool_harness.pool.forget("chat")
        pool_harness.pool.check_integrity()
        pool_harness.check(longer, loan)
        pool_harness.turn((9, *TEXT))
        write(loan.cache, pool_harness.rest(longer, loan))
        loan.complete(longer.ids)
    assert pool_harness.turn(longer.ids) == 0
    assert pool_harness.turn((9, *TEXT)) == 40


def test_after_clearing_only_what_runs_is_there(pool_harness: BlockPoolHarness) -> None:
    pool_harness.turn(TEXT)
    pool_harness.turn(TEXT, cache_key="another chat")
    with pool_harness.pool.allocate(pool_harness.wanted(TEXT)) as loan:
        pool_harness.pool.clear()
        pool_harness.check(pool_harness.wanted(TEXT), loan)
        assert pool_harness.budget.used == pool_harness.pool.nbytes == 3 * BYTES
    pool_harness.pool.clear()
    assert pool_harness.budget.used == pool_harness.pool.nbytes == 0
    assert pool_harness.turn(TEXT, cache_key="another chat") == 0


def test_pages_that_were_returned_cannot_be_written(pool_harness: BlockPoolHarness) -> None:
    with pool_harness.pool.allocate(pool_harness.wanted(TEXT)) as loan:
        cache = loan.cache
    assert not hasattr(loan, "cache")
    with pytest.raises(BudgetError):
        cache.ensure_capacity(1)


def test_float16_pages_take_half_and_are_found_as_well() -> None:
    pool_harness = BlockPoolHarness(layout=InterleavedPages(Scheme.FLOAT16))
    pool_harness.turn(TEXT)
    assert pool_harness.budget.used == 3 * BYTES // 2
    assert pool_harness.turn((*TEXT, 1)) == 40


def test_no_byte_is_there_that_is_not_in_the_ledger() -> None:
    big = config(layers=4, kv_heads=2, head_dim=256)
    size, slack = estimate_pages_bytes(big, KV_PAGE_TOKENS, FLOAT32_PAGES), 60_000
    budget = MemoryBudget(40 * size)
    tiers = AdapterCache(ram=budget, device=budget)
    pool = BlockPool(tiers)
    evicted = False
    tracemalloc.start()
    try:
        begin = tracemalloc.get_traced_memory()[0]
        for number in range(60):
            ids = (number % 7, *TEXT, *range(number % 50))
            wanted = KVRequest(
                cache_key="chat", identity=PLAN, config=big, ids=ids, virtual_tokens=0, capacity=120
            )
            before = pool.nbytes
            with pool.allocate(wanted) as loan:
                evicted |= pool.nbytes - loan.cache.nbytes < before
                tracemalloc.reset_peak()
                loan.cache.advance(len(ids) - loan.cache.length)
                loan.complete(ids)
            now, peak = tracemalloc.get_traced_memory()
            assert abs(now - begin - budget.used) < slack
            assert peak - begin <= budget.limit + slack
    finally:
        tracemalloc.stop()
    assert evicted


def test_memory_may_be_needed_by_another_thread_at_any_time() -> None:
    pool_harness, ended = BlockPoolHarness(pages=14), threading.Event()

    def need_memory() -> None:
        pages = 0
        while not ended.is_set():
            pages = pages % 9 + 1
            with (
                suppress(BudgetError),
                pool_harness.tiers.reserve_during(
                    Tier.DEVICE, "buffers", pages * BYTES, what="buffers"
                ),
            ):
                pool_harness.tiers.check_integrity()

    other = threading.Thread(target=need_memory)
    other.start()
    found = 0
    try:
        for number in range(400):
            ids = (*TEXT[: number % 3 * 8], number % 4, *TEXT[: number % 40])
            with suppress(BudgetError):
                found += pool_harness.turn(ids, (1, 2))
    finally:
        ended.set()
        other.join()
    assert 0 < found < 400 * len(TEXT)
    pool_harness.pool.clear()
    assert pool_harness.budget.used == 0


@dataclass(eq=False)
class PooledSequence:
    """A text that runs, and what it will have read in the end."""

    stack: ExitStack
    wanted: KVRequest
    loan: KVAllocation[PagedKVCache]
    answer: tuple[int, ...]
    is_forgotten: bool = field(default=False)


def texts() -> st.SearchStrategy[tuple[int, ...]]:
    """Texts that begin alike more often than not: runs of one of two tokens."""
    run = st.tuples(st.integers(1, 2), st.sampled_from([1, 7, 8, 15, 16, 17]))
    runs = st.lists(run, min_size=1, max_size=4)
    return runs.map(lambda found: tuple(token for token, count in found for _ in range(count)))


class Texts(RuleBasedStateMachine):
    """Texts of two owners and two plans, several at a time, in a budget of so many pages.

    The model is the list of all texts that completed, and of the whole pages of prompts that ran
    while another text began. Where nothing had to go, exactly what agrees with one of them is
    found; where something had to, nothing else.
    """

    pages = 400

    def __init__(self) -> None:
        super().__init__()
        self.pool_harness = BlockPoolHarness(pages=self.pages)
        self.completed: dict[tuple[str, Digest, int], set[tuple[int, ...]]] = {}
        self.open: list[PooledSequence] = []

    @rule(
        ids=texts(),
        answer=st.lists(st.integers(1, 2), max_size=20).map(tuple),
        key=st.sampled_from(["a", "b", None]),
        plan=st.sampled_from([PLAN, OTHER_PLAN]),
        spare=st.integers(0, 40),
        at_once=st.none() | st.integers(0, 20),
    )
    def begin(
        self,
        ids: tuple[int, ...],
        answer: tuple[int, ...],
        key: str | None,
        plan: Digest,
        spare: int,
        at_once: int | None,
    ) -> None:
        virtual = 0 if plan == PLAN else 18  # a plan has its soft prompt, or none
        wanted = self.pool_harness.wanted(
            ids, room=len(answer) + spare, cache_key=key, identity=plan, virtual_tokens=virtual
        )
        if at_once is not None:
            first = virtual + len(ids) + at_once
            wanted = replace(wanted, initial_tokens=min(first, wanted.capacity))
        self.kept(wanted).update(self.shared_by_those_that_run(wanted))
        before, stack = self.pool_harness.budget.used, ExitStack()
        try:
            loan = stack.enter_context(self.pool_harness.pool.allocate(wanted))
        except BudgetError:
            assert self.pages < 400
            # what two that run wrote alike is one now; but what cannot fit makes nobody go
            assert self.pool_harness.budget.used <= before
            return
        self.pool_harness.check(wanted, loan)
        expected = max((common(ids, text) for text in self.kept(wanted)), default=0)
        expected = min(expected, len(ids) - 1)
        assert loan.reused == expected or (self.pages < 400 and loan.reused < expected)
        self.open.append(PooledSequence(stack, wanted, loan, answer))

    @rule(place=st.integers(0, 5), tokens=st.integers(1, 40))
    def write(self, place: int, tokens: int) -> None:
        for text in self.open[place : place + 1]:
            rest = self.pool_harness.rest(text.wanted, text.loan, text.answer)
            try:
                write(text.loan.cache, rest[:tokens])
            except BudgetError:  # it goes on, or ends, where it is
                assert self.pages < 400
                assert text.wanted.initial_tokens is not None

    @rule(place=st.integers(0, 5))
    def begin_a_pass_that_fails(self, place: int) -> None:
        """What it wrote behind the end of the text is nobody's; the next pass writes there."""
        for text in self.open[place : place + 1]:
            if text.loan.cache.length < text.loan.cache.capacity:
                length = text.loan.cache.length
                with suppress(BudgetError):
                    write(text.loan.cache, [1999])
                text.loan.cache.length = length

    @rule(place=st.integers(0, 5), completes=st.booleans())
    def end(self, place: int, completes: bool) -> None:
        for text in self.open[place : place + 1]:
            self.open.remove(text)
            everything = (*text.wanted.ids, *text.answer)
            assert (
                read(text.loan.cache)
                == self.pool_harness.all_marks(text.wanted, text.answer)[: text.loan.cache.length]
            )
            if completes:
                text.loan.complete(everything)
                if text.wanted.cache_key is not None and not text.is_forgotten:
                    rows = max(text.loan.cache.length - text.wanted.virtual_tokens, 0)
                    self.kept(text.wanted).add(everything[:rows])
            text.stack.close()

    @rule(key=st.sampled_from(["a", "b"]))
    def forget(self, key: str) -> None:
        self.pool_harness.pool.forget(key)
        for text in self.open:
            text.is_forgotten |= text.wanted.cache_key == key
        for origin in self.completed:
            if origin[0] == key:
                self.completed[origin].clear()

    @rule(pages=st.integers(1, 10))
    def need_memory(self, pages: int) -> None:
        used, kept = self.pool_harness.budget.used, self.pool_harness.pool.nbytes
        running = sum(text.loan.cache.nbytes for text in self.open)
        try:
            with self.pool_harness.tiers.reserve_during(
                Tier.DEVICE, "buffers", pages * BYTES, what="buffers"
            ):
                assert self.pool_harness.budget.used <= self.pool_harness.budget.limit
        except BudgetError:
            assert self.pool_harness.budget.used == used
            assert running + pages * BYTES + kept > self.pool_harness.budget.limit

    @invariant()
    def nothing_is_lost(self) -> None:
        self.pool_harness.pool.check_integrity()
        self.pool_harness.tiers.check_integrity()
        assert self.pool_harness.budget.reserved_bytes("kv") == self.pool_harness.pool.nbytes

    def teardown(self) -> None:
        for text in self.open:
            text.stack.close()
        for key in ("a", "b"):
            self.pool_harness.pool.forget(key)
        assert self.pool_harness.budget.used == 0

    def shared_by_those_that_run(self, wanted: KVRequest) -> Iterator[tuple[int, ...]]:
        """The tokens in whole pages of prompts of the same owner and plan."""
        for text in self.open:
            other, virtual = text.wanted, text.wanted.virtual_tokens
            if (other.cache_key, other.identity) == (wanted.cache_key, wanted.identity):
                rows = (
                    min(text.loan.cache.length, virtual + len(other.ids))
                    // KV_PAGE_TOKENS
                    * KV_PAGE_TOKENS
                )
                if not text.is_forgotten:
                    yield tuple(other.ids[: max(rows - virtual, 0)])

    def kept(self, wanted: KVRequest) -> set[tuple[int, ...]]:
        if wanted.cache_key is None:
            return set()
        origin = (wanted.cache_key, wanted.identity, wanted.virtual_tokens)
        return self.completed.setdefault(origin, set())


class TextsInLittleMemory(Texts):
    pages = 14


def common(one: Sequence[int], other: Sequence[int]) -> int:
    for place, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return place
    return min(len(one), len(other))


TestTexts = Texts.TestCase
TestTextsInLittleMemory = TextsInLittleMemory.TestCase
TestTexts.settings = TestTextsInLittleMemory.settings = settings(
    max_examples=60, stateful_step_count=30, deadline=None
)


def test_texts_one_after_the_other_leave_no_more_pages_than_may_be_kept() -> None:
    pool_harness = BlockPoolHarness(kept=5)
    for first in range(20):
        pool_harness.turn((first, *TEXT))  # three pages each
        assert pool_harness.pool.cached_bytes == pool_harness.budget.used <= 5 * BYTES
    assert pool_harness.pool.cached_bytes == 5 * BYTES


def test_the_newest_text_stays_and_of_the_one_before_it_the_beginning() -> None:
    pool_harness = BlockPoolHarness(kept=5)
    pool_harness.turn((1, *TEXT))
    pool_harness.turn((2, *TEXT))
    assert pool_harness.turn((2, *TEXT, 9)) == 41
    assert pool_harness.turn((1, *TEXT, 9)) == 32


def test_a_text_that_runs_may_take_more_than_may_be_kept() -> None:
    pool_harness = BlockPoolHarness(kept=1)
    wanted = pool_harness.wanted(TEXT)
    with pool_harness.pool.allocate(wanted) as loan:
        write(loan.cache, pool_harness.rest(wanted, loan))
        loan.complete(TEXT)
        assert pool_harness.budget.used == 3 * BYTES
        pool_harness.pool.check_integrity()
    assert pool_harness.budget.used == pool_harness.pool.cached_bytes == BYTES
    assert (
        pool_harness.turn((*TEXT, 9)) == KV_PAGE_TOKENS
    )  # of a text that is too long its beginning stays


def test_pages_that_a_text_shares_are_kept_beyond_the_limit_only_while_it_runs() -> None:
    pool_harness = BlockPoolHarness(kept=2)
    pool_harness.turn(TEXT[:32])
    with pool_harness.pool.allocate(pool_harness.wanted((*TEXT, 1))) as loan:
        assert loan.reused == 32
        pool_harness.turn((5, *TEXT))
        assert pool_harness.pool.cached_bytes <= 2 * BYTES
        assert read(loan.cache) == pool_harness.all_marks(pool_harness.wanted((*TEXT, 1)))[:32]
    pool_harness.pool.check_integrity()
    assert pool_harness.pool.cached_bytes <= 2 * BYTES


def test_with_no_memory_for_it_nothing_is_kept() -> None:
    pool_harness = BlockPoolHarness(kept=0)
    pool_harness.turn(TEXT)
    assert pool_harness.turn((*TEXT, 7)) == 0
    assert pool_harness.budget.used == 0
