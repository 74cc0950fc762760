"""Eviction: `AdapterCache` beside a model that is written from the rules alone."""

from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from math import fsum

from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from expertctl.engine.memory.adapter_cache import AdapterCache, CacheRequest, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError
from expertctl.reference import Digest

LIMIT = 1000
SIZES = {name: 100 + 30 * number for number, name in enumerate("abcdefghijkl")}
PLANS = {"A": "a", "B": "bc", "C": "a"}
"""Plans and the experts whose memory they use."""
SIZES |= {"A": 50, "B": 80, "C": 300}


@dataclass
class ModelEntry:
    pins: int = 0


@dataclass
class EvictionModel:
    """The rules in words: evict before insert, lowest ``count * 0.25 ** (age / 128)`` first.

    The count is a sum over all uses that there ever were, each worth a quarter after 512 requests.
    """

    now: int = 0
    uses: dict[str, list[int]] = field(default_factory=dict)
    """When each was used, whether or not it stayed."""
    entries: dict[str, ModelEntry] = field(default_factory=dict)

    @property
    def used(self) -> int:
        return sum(SIZES[name] for name in self.entries)

    def in_use(self) -> set[str]:
        """What a resident plan refers to."""
        return {used for name in self.entries for used in PLANS.get(name, "")}

    def free_for(self, held: set[str]) -> int:
        """Bytes that could be had without touching what is pinned and what pinned plans use."""
        pinned = {name for name, entry in self.entries.items() if entry.pins} | held
        pinned |= {used for name in pinned for used in PLANS.get(name, "")}
        return LIMIT - sum(SIZES[name] for name in self.entries if name in pinned)

    def worth(self, name: str) -> tuple[float, int]:
        *_, last = uses = self.uses[name]
        count = fsum(0.25 ** ((last - use) / 512) for use in uses)
        return count * 0.25 ** ((self.now - last) / 128), last

    def pin(self, names: str) -> bool:
        """Bring and pin; False when it cannot fit, and then nothing has changed."""
        absent = [name for name in dict.fromkeys(names) if name not in self.entries]
        need = sum(SIZES[name] for name in absent)
        present = set(names) & self.entries.keys()
        for name in present:  # a use counts whether or not the rest can be had
            self.touch(name)
        if need > self.free_for(present):
            self.unpin("".join(present))
            return False
        while absent and LIMIT - self.used < need:
            kept = self.in_use()
            able = [n for n, entry in self.entries.items() if not entry.pins and n not in kept]
            del self.entries[min(able, key=self.worth)]
        for name in absent:
            self.entries[name] = ModelEntry()
            self.touch(name)
        return True

    def touch(self, name: str) -> None:
        self.entries[name].pins += 1
        self.uses.setdefault(name, []).append(self.now)

    def unpin(self, names: str) -> None:
        for name in set(names):
            self.entries[name].pins -= 1


def key(name: str) -> tuple[Tier, Digest]:
    return (Tier.DEVICE if name in PLANS else Tier.RAM, Digest.compute(name.encode()))


def wanted(name: str) -> CacheRequest[str]:
    uses = tuple(key(used) for used in PLANS.get(name, ""))
    return CacheRequest(key(name), SIZES[name], name, lambda: name, uses)


class Eviction(RuleBasedStateMachine):
    """Random requests; after each step the same names are resident in both."""

    def __init__(self) -> None:
        super().__init__()
        budget = MemoryBudget(LIMIT)
        self.tiers, self.model = AdapterCache(ram=budget, device=budget), EvictionModel()
        self.budget = budget
        self.borrowed: list[tuple[str, ExitStack]] = []

    @rule(age=st.one_of(st.integers(1, 5), st.integers(60, 68), st.integers(1, 700)))
    def time_passes(self, age: int) -> None:
        for _ in range(age):
            self.tiers.begin_request()
        self.model.now += age

    @rule(names=st.text("abcdefghijkl", min_size=1, max_size=4), stays=st.booleans())
    def experts_are_used(self, names: str, stays: bool) -> None:
        self.borrow("".join(dict.fromkeys(names)), stays=stays)

    @rule(name=st.sampled_from(sorted(PLANS)), stays=st.booleans())
    def a_plan_is_used(self, name: str, stays: bool) -> None:
        """A plan is compiled while its experts are pinned, as the engine does it."""
        with ExitStack() as experts:
            if not self.hold(PLANS[name], experts):
                return
            self.borrow(name, stays=stays)
        self.model.unpin(PLANS[name])

    @precondition(lambda self: self.borrowed)
    @rule(number=st.integers(0, 9))
    def something_is_given_back(self, number: int) -> None:
        names, stack = self.borrowed.pop(number % len(self.borrowed))
        stack.close()
        self.model.unpin(names)

    def borrow(self, names: str, *, stays: bool) -> None:
        stack = ExitStack()
        if not self.hold(names, stack):
            return
        if stays:
            self.borrowed.append((names, stack))
            return
        stack.close()
        self.model.unpin(names)

    def hold(self, names: str, stack: ExitStack) -> bool:
        try:
            stack.enter_context(self.tiers.pin([wanted(name) for name in names]))
        except BudgetError:
            assert not self.model.pin(names), "the model has room for it"
            return False
        assert self.model.pin(names), "the model has no room for it"
        return True

    @rule()
    def all_is_dropped(self) -> None:
        """What was used before counts when it comes again."""
        if not self.borrowed:
            self.tiers.clear()
            self.model.entries.clear()

    @invariant()
    def the_same_are_resident(self) -> None:
        self.tiers.check_integrity()
        assert {n for n in SIZES if self.tiers.contains(key(n))} == set(self.model.entries)
        assert self.budget.used == self.model.used <= LIMIT


@given(uses=st.tuples(st.integers(1, 8), st.integers(1, 8)), age=st.integers(0, 400))
@example(uses=(2, 1), age=63)  # 0.25 ** (64 / 128) = 1 / 2: the balance of two uses against one
@example(uses=(2, 1), age=64)
@example(uses=(2, 1), age=65)
@example(uses=(1, 1), age=0)
@settings(max_examples=200, deadline=None)
def test_of_two_the_one_of_lower_priority_goes(uses: tuple[int, int], age: int) -> None:
    budget = MemoryBudget(SIZES["a"] + SIZES["b"])
    tiers = AdapterCache(ram=budget, device=budget)
    for name, count in zip("ab", uses, strict=True):
        tiers.begin_request()
        for _ in range(count):
            with tiers.pin([wanted(name)]):
                pass
        for _ in range(age - 1 if name == "a" else 0):
            tiers.begin_request()
    tiers.reserve(Tier.RAM, "buffers", 1, what="one byte")
    first, second = uses
    old = Fraction(first) ** 128 * Fraction(1, 4) ** max(age, 1)
    goes = "a" if old <= Fraction(second) ** 128 else "b"
    assert [name for name in "ab" if not tiers.contains(key(name))] == [goes]


TestEviction = Eviction.TestCase
TestEviction.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
