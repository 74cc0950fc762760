"""What a call allocates, whatever other threads of the test process do meanwhile.

A home with one expert of each kind on one tiny base, for tests of what memory they take.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from expertctl.engine.adapters.compile import CompileSpec
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
    make_stored_source,
)
from expertctl.engine.arrays import AnyArray
from expertctl.engine.load_plan import read_stored_outline
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.result import AllocationCounts, count_allocations
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.weights import load_base_weights
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_model_config
from expertctl.reference import Digest
from expertctl.store.disk import DerivedData
from expertctl.store.refs import StoredExpert
from tests.engine.package_fixtures import read_linear_shapes
from tests.factories import make_package, write_base
from tests.store.fixtures import HomeFixture, make_key


def do_nothing() -> None:
    """Do nothing."""


def count_fewest_allocations(
    call: Callable[[], object], *, before: Callable[[], object] = do_nothing, times: int = 4
) -> AllocationCounts:
    """Call so many times; return what was allocated in the quietest one.

    What the call allocates is there each time; threads of others, such as those of a runner of
    tests that reports home, are not. What ``before`` allocates ahead of each call is not counted.
    """
    measured = []
    for _ in range(times):
        before()
        with count_allocations() as found:
            call()
        measured.append(found)
    return min(measured, key=lambda found: found.python_bytes)


def find_owner(array: AnyArray) -> AnyArray:
    """The array that the memory of a view belongs to."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


PLAN_DIGEST = Digest.compute(b"plan")
Kinds = Mapping[str, list[tuple[str, dict[str, Any]]]]
KINDS: Kinds = {
    "plain": [("lora", {"seed": 1, "alpha": 4, "rank": 4})],
    "scaled": [("lora", {"seed": 2, "rank": 2})],
    "half": [("lora", {"seed": 3, "dtype": "float16", "rank": 8})],
    "dora": [("dora", {"seed": 4, "rank": 2})],
    "ia3": [("ia3", {"seed": 5, "dtype": "bfloat16"})],
    "soft": [("soft_prompt", {"seed": 6, "tokens": 5, "dtype": "float16"})],
    "all": [("lora", {}), ("ia3", {}), ("dora", {"rank": 3}), ("soft_prompt", {})],
}


class ExpertKindsHome:
    """A home with one expert of each kind, and the base that they are for."""

    def __init__(
        self, folder: Path, *, kinds: Kinds = KINDS, base: Mapping[str, Any] | None = None
    ) -> None:
        self.base = write_base(folder / "base", **(base or {}))
        facts, key = read_base(self.base), make_key("acme")
        self.user_home = HomeFixture(folder / "home").trust_keys("acme")
        self.user_home.bases.add(self.base)
        installed, self.packages = (
            {
                name: make_package(
                    folder / where / name,
                    f"acme/{where}{name}",
                    base_dir=self.base,
                    base=facts,
                    key=key,
                    adapters=kind,
                )
                for name, kind in kinds.items()
            }
            for where in ("", "file-")
        )
        self.user_home.install(*installed.values())
        self.config = config = read_model_config(self.base)
        decoder = Decoder(config, load_base_weights(self.base, config))
        shapes = read_linear_shapes(self.base)
        self.form = CompileSpec(shapes, config.hidden_size)
        gains = DoraScaleSource(
            Digest.compute(b"base"),
            lambda module: to_array(decoder.matrix(module)),
            DerivedData(folder / "derived"),
        )
        self.target = CompileTarget(self.form, gains)

    def find_expert(self, name: str) -> StoredExpert:
        return next(e for e in self.user_home.store.list_experts() if e.package.name == name)

    def estimate(self, name: str) -> ExpertSource:
        stored, store = self.find_expert(name), self.user_home.store
        return read_stored_outline(store, stored, store.read_manifest(stored))

    def open_source(self, name: str) -> ExpertSource:
        stored, store = self.find_expert(name), self.user_home.store
        return make_stored_source(store, stored, store.read_manifest(stored))

    def measure_load(self, chain: Sequence[tuple[ExpertSource, float]]) -> int:
        """What loading and compiling a chain takes at most, measured by doing it."""
        budget = MemoryBudget(1 << 40)
        with borrow_compiled_plan(
            AdapterCache(ram=budget, device=budget), chain, identity=PLAN_DIGEST, target=self.target
        ):
            return budget.peak
