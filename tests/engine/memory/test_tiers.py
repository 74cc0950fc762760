"""Residency: a budget that live bytes never exceed, fair eviction, pins that hold."""

import weakref
from contextlib import ExitStack

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.memory.adapter_cache import AdapterCache, CacheRequest, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError, DigestError
from expertctl.reference import Digest

LIMIT = 1000


def key(name: str, tier: Tier = Tier.RAM) -> tuple[Tier, Digest]:
    return (tier, Digest.compute(name.encode()))


def wanted(name: str, nbytes: int = 100, tier: Tier = Tier.RAM) -> CacheRequest[torch.Tensor]:
    return CacheRequest(
        key(name, tier), nbytes, name, lambda: torch.empty(nbytes, dtype=torch.uint8)
    )


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(LIMIT)


@pytest.fixture
def tiers(budget: MemoryBudget) -> AdapterCache:
    return AdapterCache(ram=budget, device=budget)


def use(tiers: AdapterCache, *names: str, nbytes: int = 100) -> None:
    tiers.begin_request()
    with tiers.pin([wanted(name, nbytes) for name in names]):
        tiers.check_integrity()
    tiers.check_integrity()


def resident(tiers: AdapterCache, names: str) -> str:
    return "".join(name for name in names if tiers.contains(key(name)))


def test_what_was_loaded_stays_and_is_not_loaded_again(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    with tiers.pin([wanted("a")]) as [first]:
        pass
    with tiers.pin([wanted("a")]) as [again]:
        assert again is first
    assert budget.used == 100
    assert (tiers.traffic[Tier.RAM].hits, tiers.traffic[Tier.RAM].loads) == (1, 1)


def test_values_come_in_the_order_asked_for_and_doubles_are_loaded_once(
    tiers: AdapterCache,
) -> None:
    use(tiers, "b")
    with tiers.pin([wanted("a", 1), wanted("b"), wanted("a", 1)]) as values:
        assert [value.nbytes for value in values] == [1, 100, 1]
        assert values[0] is values[2]


def test_the_least_used_goes_first(tiers: AdapterCache) -> None:
    use(tiers, "a", nbytes=400)
    use(tiers, "a", nbytes=400)
    use(tiers, "b", nbytes=400)
    use(tiers, "c", nbytes=400)
    assert resident(tiers, "abc") == "ac"


def test_often_used_long_ago_loses_against_once_used_now(tiers: AdapterCache) -> None:
    """4 uses, 128 requests ago, weigh 4 * 0.25 = 1, and a little later less than one use now."""
    for _ in range(4):
        use(tiers, "a", nbytes=400)
    for _ in range(130):
        tiers.begin_request()
    use(tiers, "b", nbytes=400)
    use(tiers, "c", nbytes=400)
    assert resident(tiers, "abc") == "bc"


def test_among_equals_the_oldest_goes(tiers: AdapterCache) -> None:
    with tiers.pin([wanted("a", 400)]), tiers.pin([wanted("b", 400)]):
        pass
    tiers.begin_request()
    use(tiers, "c", nbytes=400)
    assert resident(tiers, "abc") in {"ac", "bc"}


def test_room_is_made_before_loading(budget: MemoryBudget, tiers: AdapterCache) -> None:
    seen: list[int] = []

    def load() -> torch.Tensor:
        seen.append(budget.reserved_bytes("experts"))
        assert not tiers.contains(key("a"))
        return torch.empty(700, dtype=torch.uint8)

    use(tiers, "a", nbytes=400)
    with tiers.pin([CacheRequest(key("b"), 700, "b", load)]):
        assert seen == [700]


def test_a_pinned_entry_is_never_evicted(tiers: AdapterCache) -> None:
    with tiers.pin([wanted("a", 600)]) as [value]:
        with pytest.raises(BudgetError, match=r"b: .* needed"):
            use(tiers, "b", nbytes=500)
        assert tiers.contains(key("a"))
        assert value.nbytes == 600
    use(tiers, "b", nbytes=500)
    assert resident(tiers, "ab") == "b"


def test_when_it_cannot_fit_nothing_is_evicted(tiers: AdapterCache) -> None:
    use(tiers, "a", "b", nbytes=300)
    with tiers.pin([wanted("a", 300)]), pytest.raises(BudgetError):
        use(tiers, "c", "d", nbytes=400)
    assert resident(tiers, "abcd") == "ab"


def broken(name: str) -> CacheRequest[torch.Tensor]:
    def load() -> torch.Tensor:
        raise DigestError(f"{name} is not what was installed")

    return CacheRequest(key(name), 100, name, load)


def test_a_failed_load_leaves_the_ledger_as_it_was(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    with pytest.raises(DigestError, match="a is not what was installed"), tiers.pin([broken("a")]):
        pass
    assert budget.used == 0
    assert resident(tiers, "a") == ""
    tiers.check_integrity()


def test_beside_a_failed_load_stays_at_most_what_came_and_nothing_is_pinned(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    with pytest.raises(DigestError), tiers.pin([broken("a"), wanted("b")]):
        pass
    assert budget.used == 100 * len(resident(tiers, "ab"))
    assert resident(tiers, "a") == ""
    use(tiers, "c", nbytes=LIMIT)
    assert resident(tiers, "abc") == "c"


def test_what_a_resident_plan_uses_stays_until_the_plan_goes(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    plan = CacheRequest(key("p", Tier.DEVICE), 100, "p", lambda: "plan", depends_on=(key("a"),))
    with tiers.pin([wanted("a", 300)]), tiers.pin([plan]):
        pass
    with tiers.pin([plan]), pytest.raises(BudgetError):
        use(tiers, "b", nbytes=700)
    use(tiers, "b", nbytes=700)
    assert resident(tiers, "ab") == "ab"
    assert not tiers.contains(plan.key)
    use(tiers, "c", nbytes=900)
    assert budget.used == 900


def test_other_memory_makes_room_too(tiers: AdapterCache, budget: MemoryBudget) -> None:
    use(tiers, "a", "b", nbytes=400)
    with tiers.reserve_during(Tier.DEVICE, "kv", 500, what="the KV cache"):
        assert budget.used == 900
        assert len(resident(tiers, "ab")) == 1
    with pytest.raises(BudgetError), tiers.reserve_during(Tier.DEVICE, "kv", 1001, what="KV"):
        pass
    assert len(resident(tiers, "ab")) == 1


def test_forgetting_what_is_pinned_is_our_own_bug(tiers: AdapterCache) -> None:
    with tiers.pin([wanted("a")]), pytest.raises(AssertionError):
        tiers.forget(key("a"))


def test_what_is_reserved_stays_until_it_is_released(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    use(tiers, "a", nbytes=400)
    tiers.reserve(Tier.DEVICE, "base", 700, what="the base")
    assert (resident(tiers, "a"), budget.reserved_bytes("base")) == ("", 700)
    tiers.release(Tier.DEVICE, "base", 700)
    assert budget.used == 0


def test_what_is_resident_can_be_borrowed_by_its_key(tiers: AdapterCache) -> None:
    with tiers.pin([wanted("a", 600)]) as [value]:
        pass
    with tiers.pin_if_present(key("a")) as again:
        assert again is value
        with pytest.raises(BudgetError):
            use(tiers, "b", nbytes=500)
    assert tiers.traffic[Tier.RAM].hits == 1


def test_what_is_not_resident_cannot_be_borrowed_by_its_key(tiers: AdapterCache) -> None:
    with tiers.pin_if_present(key("a")) as nothing:
        assert nothing is None
    assert tiers.traffic[Tier.RAM].hits == 0


def test_bytes_that_were_brought_are_counted(tiers: AdapterCache) -> None:
    use(tiers, "a", "b", nbytes=300)
    use(tiers, "a", "c", nbytes=300)
    assert tiers.traffic[Tier.RAM].nbytes == 900


def test_a_load_that_fails_unpins_what_was_there(tiers: AdapterCache) -> None:
    use(tiers, "a", nbytes=600)
    with pytest.raises(DigestError), tiers.pin([wanted("a", 600), broken("b")]):
        pass
    use(tiers, "c", nbytes=900)
    assert resident(tiers, "abc") == "c"


def test_what_is_forgotten_takes_the_plans_that_use_it_along(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    plan = CacheRequest(key("p", Tier.DEVICE), 100, "p", lambda: "plan", depends_on=(key("a"),))
    with tiers.pin([wanted("a"), wanted("b", 7)]), tiers.pin([plan]):
        pass
    tiers.forget(key("a"))
    tiers.forget(key("never there"))
    assert budget.used == 7
    tiers.check_integrity()


def test_evictions_are_counted(tiers: AdapterCache) -> None:
    use(tiers, "a", nbytes=600)
    use(tiers, "b", nbytes=600)
    assert tiers.traffic[Tier.RAM].evictions == 1
    gains = CacheRequest(key("g"), 100, "g", lambda: "gains", traffic=False)
    with tiers.pin([gains]):
        pass
    Pool(tiers, 300)
    with tiers.reserve_during(Tier.DEVICE, "buffers", LIMIT, what="buffers"):
        assert tiers.traffic[Tier.RAM].evictions == 2  # what follows, or is kept, is no expert


def test_two_memories_have_two_budgets() -> None:
    ram, device = MemoryBudget(500), MemoryBudget(200)
    tiers = AdapterCache(ram=ram, device=device)
    with tiers.pin([wanted("a", 400)]), tiers.pin([wanted("p", 200, Tier.DEVICE)]):
        assert (ram.used, device.used) == (400, 200)
    with tiers.pin([wanted("q", 150, Tier.DEVICE)]):
        assert (ram.used, device.used) == (400, 150)
    tiers.check_integrity()


def test_a_plan_in_another_memory_goes_before_what_it_uses_in_this_one() -> None:
    tiers = AdapterCache(ram=MemoryBudget(500), device=MemoryBudget(200))
    plan = CacheRequest(key("p", Tier.DEVICE), 100, "p", lambda: "plan", depends_on=(key("a"),))
    with tiers.pin([wanted("a", 400)]), tiers.pin([plan]):
        pass
    use(tiers, "b", nbytes=400)
    assert (resident(tiers, "ab"), tiers.contains(plan.key)) == ("b", False)


class Pool:
    """Keeps rows until they are wanted back."""

    def __init__(self, tiers: AdapterCache, nbytes: int = 0) -> None:
        self.tiers, self.nbytes = tiers, 0
        tiers.register_reclaimable(Tier.DEVICE, nbytes=lambda: self.nbytes, reclaim=self.give_up)
        self.keep(nbytes)

    def keep(self, nbytes: int) -> None:
        self.tiers.reserve(Tier.DEVICE, "kv", nbytes, what="rows")
        with self.tiers.lock:
            self.nbytes += nbytes

    def give_up(self, size: int) -> None:
        with self.tiers.lock:
            self.nbytes -= size
            self.tiers.release(Tier.DEVICE, "kv", size)


def test_an_owner_of_rows_gives_up_what_is_beyond_its_share_before_an_expert_goes(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    use(tiers, "a", nbytes=200)
    pool = Pool(tiers, 700)
    use(tiers, "b", nbytes=300)
    assert (resident(tiers, "ab"), pool.nbytes, budget.free) == ("ab", 500, 0)
    use(tiers, "c", nbytes=300)
    assert (resident(tiers, "abc"), pool.nbytes) == ("bc", 400)


def test_what_may_evict_nothing_has_what_is_free_and_what_is_kept(
    tiers: AdapterCache, budget: MemoryBudget
) -> None:
    use(tiers, "a", nbytes=600)
    pool = Pool(tiers, 300)
    assert not tiers.try_reserve(Tier.DEVICE, "kv", 401, what="a copy")
    assert (pool.nbytes, budget.used) == (300, 900)
    assert tiers.try_reserve(Tier.DEVICE, "kv", 50, what="a copy")
    assert (pool.nbytes, budget.used) == (300, 950)
    assert tiers.try_reserve(Tier.DEVICE, "kv", 250, what="a copy")
    assert (pool.nbytes, budget.used, resident(tiers, "a")) == (100, 1000, "a")


def test_an_owner_of_rows_gives_up_all_before_something_is_refused(tiers: AdapterCache) -> None:
    pool = Pool(tiers, 300)
    with tiers.pin([wanted("a", 600)]):
        use(tiers, "b", nbytes=400)
        assert (resident(tiers, "ab"), pool.nbytes) == ("ab", 0)
        with pytest.raises(BudgetError):
            use(tiers, "b", "c", nbytes=400)
        assert resident(tiers, "ab") == "ab"


def test_a_class_with_nothing_left_to_give_leaves_it_to_the_other(tiers: AdapterCache) -> None:
    pool = Pool(tiers, 200)
    with tiers.pin([wanted("a", 700)]):
        use(tiers, "b", nbytes=300)
        assert pool.nbytes == 0
    pool = Pool(tiers, 600)
    assert (resident(tiers, "a"), pool.nbytes) == ("", 600)


def test_within_its_share_an_owner_of_rows_outlives_rare_experts(tiers: AdapterCache) -> None:
    pool = Pool(tiers, 300)
    use(tiers, "a", nbytes=350)
    use(tiers, "b", nbytes=350)
    use(tiers, "c", nbytes=350)
    assert (resident(tiers, "abc"), pool.nbytes) == ("bc", 300)


def test_clear_drops_all_but_what_is_pinned(tiers: AdapterCache, budget: MemoryBudget) -> None:
    use(tiers, "a", "b")
    with tiers.pin([wanted("c", 7)]):
        tiers.clear()
        assert budget.used == 7
        pool = Pool(tiers, 300)
        free = CacheRequest(key("free"), 0, "free", lambda: "of no bytes")
        with tiers.pin([free]):
            pass
    tiers.clear()
    assert (budget.used, pool.nbytes, tiers.contains(free.key)) == (0, 0, False)


class LoadResidencyMachine(RuleBasedStateMachine):
    """Random loads, pins and releases; the bytes counted are those of storages that are alive."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = MemoryBudget(LIMIT)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.storages: list[tuple[weakref.ref[torch.UntypedStorage], int]] = []
        self.pins: list[ExitStack] = []

    def live(self) -> int:
        return sum(nbytes for storage, nbytes in self.storages if storage() is not None)

    def request(self, name: str, nbytes: int) -> CacheRequest[torch.UntypedStorage]:
        def load() -> torch.UntypedStorage:
            assert self.live() + nbytes <= LIMIT
            storage = torch.empty(nbytes, dtype=torch.uint8).untyped_storage()
            self.storages.append((weakref.ref(storage), nbytes))
            return storage

        return CacheRequest(key(f"{name} {nbytes}"), nbytes, name, load)

    @rule(name=st.sampled_from("abcde"), nbytes=st.sampled_from([0, 90, 250, 400, 1001]))
    def pin(self, name: str, nbytes: int) -> None:
        stack = ExitStack()
        try:
            [value] = stack.enter_context(self.tiers.pin([self.request(name, nbytes)]))
        except BudgetError:
            return
        assert value.nbytes() == nbytes
        self.pins.append(stack)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.pins.pop(data.draw(st.integers(0, len(self.pins) - 1))).close()

    @rule(count=st.integers(1, 300))
    def grow_older(self, count: int) -> None:
        for _ in range(count):
            self.tiers.begin_request()

    @rule(size=st.integers(0, LIMIT))
    def hold_other_memory(self, size: int) -> None:
        try:
            with self.tiers.reserve_during(Tier.DEVICE, "kv", size, what="KV"):
                assert self.live() + size <= LIMIT
        except BudgetError:
            assert size > 0

    @rule()
    def clear(self) -> None:
        self.tiers.clear()

    @invariant()
    def live_bytes_are_those_of_the_ledger(self) -> None:
        self.tiers.check_integrity()
        assert self.live() == self.budget.used <= LIMIT

    def teardown(self) -> None:
        for stack in self.pins:
            stack.close()
        self.tiers.clear()
        assert self.live() == 0


TestResidency = LoadResidencyMachine.TestCase
TestResidency.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
