"""Chats in the rows of one arena, in any order, beside others who need memory."""

from contextlib import ExitStack, suppress
from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from expertctl.digest import Digest
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.errors import BudgetError
from tests.engine.kv.test_kv_pool import common, marks
from tests.engine.torch.static_kv_harness import (
    OTHER_PLAN,
    PLAN,
    Allocation,
    StoreHarness,
    arena_bytes,
    read,
    write,
)
from tests.engine.torch.test_kv_cache import config


@dataclass(eq=False)
class RunningText:
    """A sequence that runs, and what it will have read in the end."""

    stack: ExitStack
    loan: Allocation
    key: str | None
    plan: Digest
    text: tuple[int, ...]
    is_forgotten: bool = False


class Chats(RuleBasedStateMachine):
    """Chats of two owners and two plans, several at a time, beside others who need memory.

    A position is marked with a number made from the owner, the plan and all tokens up to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.harness = StoreHarness(config(), rows=4, capacity=16, longest=40, room=5)
        self.open: list[RunningText] = []
        self.completed = set[tuple[str | None, Digest, tuple[int, ...]]]()
        self.others: list[int] = []

    @rule(
        ids=st.lists(st.integers(1, 2), min_size=1, max_size=12).map(tuple),
        answer=st.lists(st.integers(1, 2), max_size=4).map(tuple),
        key=st.sampled_from(["a", "b", None]),
        plan=st.sampled_from([PLAN, OTHER_PLAN]),
        spare=st.sampled_from([0, 0, 0, 20]),
        share=st.sampled_from([0.5, 1.0]),
    )
    def borrow(
        self,
        ids: tuple[int, ...],
        answer: tuple[int, ...],
        key: str | None,
        plan: Digest,
        spare: int,
        share: float,
    ) -> None:
        text, stack = (*ids, *answer), ExitStack()
        wanted = self.harness.wanted(ids, capacity=len(text) + spare, cache_key=key, identity=plan)
        try:
            loan = stack.enter_context(self.harness.store.allocate(wanted))
        except BudgetError:
            self.explain_refusal(wanted.capacity)
            return
        used = {other.loan.cache.number for other in self.open}
        first = min(set(range(loan.cache.arena.rows)) - used)
        assert loan.cache.number == first if not loan.reused else loan.cache.number not in used
        assert loan.cache.capacity >= wanted.capacity
        assert loan.reused <= self.find_most_reusable(key, plan, ids)
        assert read(loan) == marks(key, plan, ids[: loan.reused])
        running = RunningText(stack, loan, key, plan, text)
        self.open.append(running)
        self.write_up_to(running, int(share * len(text)))

    def explain_refusal(self, capacity: int) -> None:
        arena = self.harness.store._arena
        if self.open:
            assert arena is not None
            assert len(self.open) == arena.rows or capacity > arena.capacity
        else:
            needed = arena_bytes(self.harness.config, 1, capacity)
            assert sum(self.others) + needed > self.harness.budget.limit

    def find_most_reusable(self, key: str | None, plan: Digest, ids: tuple[int, ...]) -> int:
        there = [text for *origin, text in self.completed if origin == [key, plan]]
        there += [
            one.text[: one.loan.cache.length]
            for one in self.open
            if (one.key, one.plan) == (key, plan) and not one.is_forgotten
        ]
        most = max((common(text, ids) for text in there), default=0)
        return 0 if key is None else min(most, len(ids) - 1)

    def write_up_to(self, running: RunningText, length: int) -> None:
        numbers = marks(running.key, running.plan, running.text)
        write(running.loan, numbers[running.loan.cache.length : length])

    @rule(place=st.integers(0, 3))
    def complete(self, place: int) -> None:
        for running in self.open[place : place + 1]:
            self.write_up_to(running, len(running.text))
            running.loan.complete(running.text)
            if running.key is not None and not running.is_forgotten:
                self.completed.add((running.key, running.plan, running.text))
            self.end(running)

    @rule(place=st.integers(0, 3))
    def abandon(self, place: int) -> None:
        for running in self.open[place : place + 1]:
            self.end(running)

    @rule(key=st.sampled_from(["a", "b"]))
    def forget(self, key: str) -> None:
        self.harness.store.forget(key)
        self.completed = {one for one in self.completed if one[0] != key}
        for running in self.open:
            running.is_forgotten |= running.key == key

    @rule(rows=st.sampled_from([0.5, 1, 3, 5]))
    def others_reserve(self, rows: float) -> None:
        size = int(rows * self.harness.row)
        with suppress(BudgetError):
            self.harness.tiers.reserve(Tier.DEVICE, "buffers", size, what="others")
            self.others.append(size)

    @rule()
    def others_release(self) -> None:
        for size in self.others:
            self.harness.tiers.release(Tier.DEVICE, "buffers", size)
        self.others.clear()

    @rule()
    def all_that_is_kept_goes(self) -> None:
        self.harness.store.clear()
        self.completed.clear()

    @invariant()
    def the_ledger_is_right(self) -> None:
        self.harness.check()
        store = self.harness.store
        assert self.harness.budget.used == store.nbytes + sum(self.others)
        if self.open:
            rows, capacity = self.harness.shape
            row = arena_bytes(self.harness.config, 1, capacity)
            assert store.cached_bytes == (rows - len(self.open)) * row

    @invariant()
    def what_runs_has_its_own(self) -> None:
        for one in self.open:
            numbers = marks(one.key, one.plan, one.text)
            assert read(one.loan) == numbers[: one.loan.cache.length]

    def end(self, running: RunningText) -> None:
        self.open.remove(running)
        running.stack.close()

    def teardown(self) -> None:
        while self.open:
            self.abandon(0)
        self.others_release()
        self.all_that_is_kept_goes()
        self.harness.store.check_idle()
        assert self.harness.budget.used == 0


TestChats = Chats.TestCase
TestChats.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
