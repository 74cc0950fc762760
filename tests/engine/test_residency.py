"""The budget against what is really there: bytes are counted from live storages, not the ledger."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import ExitStack
from mmap import mmap
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from expertctl.engine.adapters.experts import borrow_compiled_plan, open_local_expert
from expertctl.engine.kv.kv_cache import KVRequest
from expertctl.engine.memory import host
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.sequence_cache import SequenceKVCache
from expertctl.errors import BudgetError
from expertctl.reference import Digest
from tests.engine.conftest import FLOAT32_CACHE
from tests.engine.memory_measurement import KINDS, ExpertKindsHome

SOFT = {"soft", "all"}


class PlanByteCounter:
    """Counts the bytes that live objects hold: blocks of `memory.allocate`, torch's storages.

    Objects that were there before are not looked at. Nothing is collected first: what only the
    collector of cycles would free is live.
    """

    def __init__(self) -> None:
        self.limit = 1 << 62
        self._blocks: list[tuple[weakref.ref[mmap], int, int]] = []

    def allocated(self, block: mmap) -> mmap:
        """Note a new block, and check that there is room for it at this very moment."""
        address = torch.frombuffer(block, dtype=torch.uint8).data_ptr()
        self._blocks.append((weakref.ref(block), address, len(block)))
        assert self.live() <= self.limit, "loaded before there was room"
        return block

    def live(self) -> int:
        """Bytes held now; each storage counts once, and not beside the block that it lies in."""
        blocks = [(at, at + size) for ref, at, size in self._blocks if ref() is not None]
        storages: dict[int, int] = {}
        for thing in gc.get_objects():
            if issubclass(type(thing), torch.Tensor):  # asking the thing itself could do anything
                storage = thing.untyped_storage()
                at = storage.data_ptr()
                if not any(begin <= at < end for begin, end in blocks):
                    storages[at] = storage.nbytes()
        return int(sum(end - begin for begin, end in blocks) + sum(storages.values()))


@pytest.fixture
def meter(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanByteCounter]:
    meter, anonymous = PlanByteCounter(), host._map_anonymous
    monkeypatch.setattr(host, "_map_anonymous", lambda size: meter.allocated(anonymous(size)))
    gc.collect()
    gc.freeze()
    yield meter
    gc.unfreeze()


@pytest.fixture(scope="module")
def expert_home(tmp_path_factory: pytest.TempPathFactory) -> ExpertKindsHome:
    return ExpertKindsHome(tmp_path_factory.mktemp("residency"))


class PlanResidencyMachine:
    """Random plans of every kind, caches and buffers, held open across steps, under a budget."""

    def __init__(self, expert_home: ExpertKindsHome, meter: PlanByteCounter, limit: int) -> None:
        self.expert_home, self.meter = expert_home, meter
        self.budget = MemoryBudget(limit)
        self.tiers = AdapterCache(ram=self.budget, device=self.budget)
        self.kv = SequenceKVCache(self.tiers, FLOAT32_CACHE)
        self.borrowed: list[ExitStack] = []
        self.meter.limit = limit

    def borrow_a_plan(self, names: list[str], weight: float) -> None:
        self.tiers.begin_request()
        chain = [(self.expert_home.open_source(n), 1.0 if n in SOFT else weight) for n in names]
        identity = Digest.compute(f"{names} {weight}".encode())
        stack = ExitStack()
        try:
            stack.enter_context(
                borrow_compiled_plan(
                    self.tiers, chain, identity=identity, target=self.expert_home.target
                )
            )
        except BudgetError:
            return
        self.borrowed.append(stack)

    def borrow_a_file(self, name: str, weight: float) -> None:
        self.tiers.begin_request()
        path, trust = self.expert_home.packages[name], self.expert_home.user_home.trust
        with ExitStack() as stack:
            try:
                local = stack.enter_context(open_local_expert(path, trust=trust, tiers=self.tiers))
                chain = [(local.source, 1.0 if name in SOFT else weight)]
                identity = Digest.compute(f"file {name} {weight}".encode())
                stack.enter_context(
                    borrow_compiled_plan(
                        self.tiers, chain, identity=identity, target=self.expert_home.target
                    )
                )
            except BudgetError:
                return
            self.used_in_this_step = self.meter.live()
            assert self.used_in_this_step <= self.budget.used

    def borrow_keys_and_values(self, tokens: int, key: str | None, completes: bool) -> None:
        wanted = KVRequest(
            cache_key=key,
            identity=Digest.compute(b"plan"),
            config=self.expert_home.config,
            ids=(1, 2, 3),
            virtual_tokens=0,
            capacity=tokens,
        )
        stack = ExitStack()
        try:
            loan = stack.enter_context(self.kv.allocate(wanted))
        except BudgetError:
            return
        if completes:
            count = max(0, min(tokens, 2) - loan.cache.length)
            rows = torch.zeros(
                self.expert_home.config.kv_heads, count, self.expert_home.config.head_dim
            )
            for layer in range(self.expert_home.config.layers):
                loan.cache.write(layer, rows, rows)
            loan.cache.advance(count)
            loan.complete((1, 2, 3))
        self.borrowed.append(stack)

    def borrow_buffers(self, size: int) -> None:
        stack = ExitStack()
        try:
            stack.enter_context(
                self.tiers.reserve_during(Tier.DEVICE, "buffers", size, what="buffers")
            )
        except BudgetError:
            return
        buffer = [torch.empty(size, dtype=torch.uint8)]
        stack.callback(buffer.clear)
        self.borrowed.append(stack)

    def give_back(self, number: int) -> None:
        if self.borrowed:
            self.borrowed.pop(number % len(self.borrowed)).close()

    def grow_older(self, count: int) -> None:
        for _ in range(count):
            self.tiers.begin_request()

    def clear(self) -> None:
        self.tiers.clear()

    def check(self) -> None:
        self.tiers.check_integrity()
        self.kv.check_integrity()
        assert self.meter.live() <= self.budget.used <= self.budget.limit

    def end(self) -> None:
        """Nothing is pinned when all is given back, so nothing stays."""
        while self.borrowed:
            self.borrowed.pop().close()
        self.tiers.clear()
        assert self.budget.used == 0
        assert self.meter.live() == 0


experts = st.sampled_from(sorted(KINDS))
steps = st.one_of(
    st.tuples(
        st.just("borrow_a_plan"),
        st.lists(experts, min_size=1, max_size=4, unique=True),
        st.sampled_from([1.0, 0.5, 0.0]),
    ),
    st.tuples(st.just("borrow_a_file"), experts, st.sampled_from([1.0, 2.0])),
    st.tuples(
        st.just("borrow_keys_and_values"),
        st.integers(1, 200),
        st.sampled_from([None, "a", "b"]),
        st.booleans(),
    ),
    st.tuples(st.just("borrow_buffers"), st.integers(0, 40_000)),
    st.tuples(st.just("give_back"), st.integers(0, 9)),
    st.tuples(st.just("give_back"), st.integers(0, 9)),
    st.tuples(st.just("grow_older"), st.integers(1, 300)),
    st.tuples(st.just("clear")),
)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    limit=st.sampled_from([9_000, 40_000, 90_000, 300_000]),
    program=st.lists(steps, min_size=5, max_size=40),
)
def test_live_bytes_never_exceed_the_budget(
    expert_home: ExpertKindsHome, meter: PlanByteCounter, limit: int, program: list[tuple[Any, ...]]
) -> None:
    machine = PlanResidencyMachine(expert_home, meter, limit)
    for name, *words in program:
        getattr(machine, name)(*words)
        machine.check()
    machine.end()
