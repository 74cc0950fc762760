"""A store of rows beside a budget, and marks in what it lends."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from expertctl.digest import Digest
from expertctl.engine.kv.kv_cache import KVAllocation, KVRequest
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.cuda_graph_step import StaticKVRow
from expertctl.engine.torch.static_kv_store import ArenaPlan, StaticKVStore
from expertctl.package.model_config import ModelConfig

PLAN, OTHER_PLAN = Digest.compute(b"plan"), Digest.compute(b"other plan")
CPU = torch.device("cpu")
Allocation = KVAllocation[StaticKVRow]


def arena_bytes(config: ModelConfig, rows: int, capacity: int) -> int:
    """Keys and values of every layer and row, with one position more than its capacity."""
    return 2 * config.layers * config.kv_heads * config.head_dim * 4 * rows * (capacity + 1)


@dataclass
class StoreHarness:
    """A store beside a budget of so many rows of the usual capacity."""

    config: ModelConfig
    rows: int = 3
    capacity: int = 24
    longest: int = 72
    room: float | None = None
    """Budget in rows of the usual capacity; None: those of the plan."""
    kept_rows: int | None = None
    device: torch.device = CPU
    now: float = 0.0
    budget: MemoryBudget = field(init=False)
    tiers: AdapterCache = field(init=False)
    store: StaticKVStore = field(init=False)

    def __post_init__(self) -> None:
        self.row = arena_bytes(self.config, 1, self.capacity)
        room = self.rows if self.room is None else self.room
        self.budget = MemoryBudget(int(room * self.row))
        self.tiers = AdapterCache(ram=MemoryBudget(1 << 30), device=self.budget)
        self.store = StaticKVStore(
            self.tiers,
            self.config,
            ArenaPlan(
                rows=self.rows,
                capacity=self.capacity,
                longest=self.longest,
                limit=self.rows * self.row,
            ),
            dtype=torch.float32,
            device=self.device,
            clock=lambda: self.now,
            cached_limit=None if self.kept_rows is None else self.kept_rows * self.row,
        )

    def wanted(self, ids: Sequence[int], *, capacity: int = 24, **options: Any) -> KVRequest:
        values = {"cache_key": "chat", "identity": PLAN, "virtual_tokens": 0, **options}
        return KVRequest(config=self.config, ids=ids, capacity=capacity, **values)

    @contextmanager
    def lend(self, ids: Sequence[int], **options: Any) -> Iterator[Allocation]:
        with self.store.allocate(self.wanted(ids, **options)) as loan:
            self.check()
            yield loan
        self.check()

    def fill(self, ids: Sequence[int], **options: Any) -> int:
        """Write a sequence and keep it; return the number of its row."""
        with self.lend(ids, **options) as loan:
            write(loan, [0] * (len(ids) - loan.reused))
            loan.complete(ids)
            return loan.cache.number

    @property
    def shape(self) -> tuple[int, int]:
        arena = self.store._arena
        assert arena is not None
        return arena.rows, arena.capacity

    def check(self) -> None:
        self.tiers.check_integrity()
        self.store.check_integrity()
        assert self.budget.reserved_bytes("kv") == self.store.nbytes


def write(loan: Allocation, numbers: Sequence[int]) -> None:
    for number in numbers:
        row = torch.full((loan.cache._keys.shape[1], 1, loan.cache._keys.shape[-1]), float(number))
        for layer in range(len(loan.cache._keys)):
            loan.cache.write(layer, row, -row)
        loan.cache.advance(1)


def read(loan: Allocation) -> list[int]:
    """What is in the filled positions of the last layer."""
    cache = loan.cache
    keys, values = (part[-1, :, : cache.length] for part in (cache._keys, cache._values))
    assert torch.equal(keys, -values)
    return [int(number) for number in keys[-1, :, -1]]
