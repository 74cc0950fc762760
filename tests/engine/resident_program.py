"""A process that borrows large plans at random under a budget and watches its own resident set.

`python -m tests.engine.resident_program FOLDER BUDGET SEED` prints, as JSON, the most that the
operating system counted above the start, and the most that the ledger held.
"""

import ctypes
import gc
import json
import random
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from expertctl.digest import Digest
from expertctl.engine.adapters.experts import borrow_compiled_plan
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import BudgetError
from tests.engine.memory_measurement import ExpertKindsHome

STEPS = 40
LARGE = {
    name: [(kind, {"seed": seed, "rank": 256, "dtype": "bfloat16"})]
    for seed, (name, kind) in enumerate(zip("abcde", ["lora", "dora"] * 3, strict=False))
}
BASE = {"layers": 1, "hidden": 1024, "intermediate": 3072}


def read_anonymous_bytes() -> int:
    """Bytes of anonymous memory that the operating system counts for this process."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


def read_settled_bytes() -> int:
    """The same, when what was given back is the operating system's again."""
    gc.collect()
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)
    return read_anonymous_bytes()


class AnonymousMemoryWatch(threading.Thread):
    """Looks every two milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.going = 0, True

    def run(self) -> None:
        while self.going:
            self.most = max(self.most, read_anonymous_bytes())
            time.sleep(0.002)


def borrow_plans(shelf: ExpertKindsHome, budget: MemoryBudget, rng: random.Random) -> int:
    """Borrow and give back; return how many plans there was no room for."""
    tiers = AdapterCache(ram=budget, device=budget)
    borrowed: list[ExitStack] = []
    refused = 0
    for _ in range(STEPS):
        tiers.begin_request()
        if borrowed and rng.random() < 0.6:
            borrowed.pop(rng.randrange(len(borrowed))).close()
            continue
        names = rng.sample(sorted(LARGE), rng.randint(1, 2))
        chain = [(shelf.open_source(name), rng.choice([1.0, 0.5])) for name in names]
        identity = Digest.compute(
            repr([(n, w) for n, (_, w) in zip(names, chain, strict=True)]).encode()
        )
        with ExitStack() as stack:
            try:
                plan = stack.enter_context(
                    borrow_compiled_plan(tiers, chain, identity=identity, target=shelf.target)
                )
                stack.enter_context(
                    tiers.reserve_during(Tier.DEVICE, "buffers", 1 << 20, what="a buffer")
                )
            except BudgetError:
                refused += 1
                continue
            assert plan.deltas
            del plan  # what is borrowed is not held longer
            borrowed.append(stack.pop_all())
    while borrowed:
        borrowed.pop().close()
    return refused


def main() -> None:
    """Run it once to warm everything up, then watched."""
    folder, limit, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    shelf = ExpertKindsHome(folder, kinds=LARGE, base=BASE)
    borrow_plans(shelf, MemoryBudget(limit), random.Random(seed))
    start, watch, budget = read_settled_bytes(), AnonymousMemoryWatch(), MemoryBudget(limit)
    watch.start()
    refused = borrow_plans(shelf, budget, random.Random(seed))
    watch.going = False
    watch.join()
    print(json.dumps({"grown": watch.most - start, "ledger": budget.peak, "refused": refused}))


if __name__ == "__main__":
    main()
