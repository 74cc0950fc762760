"""A process that runs a packed base with an expert, twice, and watches its own resident set.

`python -m tests.engine.packed_resident_program FOLDER DTYPE` prints, as JSON, the most that the
operating system counted above the start, and the most that the ledger held. All is done once
before, so that code is compiled, libraries are there and the heap has grown.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch

from expertctl.engine.local_engine import LocalEngine
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.request import Dtype, ForcedExpert
from tests.engine.kernel_cache import use_shared_kernel_cache
from tests.engine.resident_program import AnonymousMemoryWatch, read_settled_bytes
from tests.engine.test_local_engine import planner, request
from tests.factories import make_package, write_base
from tests.store.fixtures import HomeFixture, make_key

BASE: dict[str, Any] = {"layers": 3, "hidden": 512, "intermediate": 1536, "head_dim": 64}
VOCABULARY = 32_768


def make_home(folder: Path) -> HomeFixture:
    """A home with a base of 88 MB in float32, and a large LoRA for it."""
    base_dir = write_base(folder / "base", vocab=VOCABULARY, heads=8, dtype="bfloat16", **BASE)
    adapters: Any = [("lora", {"rank": 64, "dtype": "bfloat16"})]
    package = make_package(
        folder / "package",
        "acme/large",
        base_dir=base_dir,
        base=read_base(base_dir),
        key=make_key("acme"),
        adapters=adapters,
    )
    house = HomeFixture(folder / "home").trust_keys("acme")
    house.bases.add(base_dir)
    house.install(package)
    return house


def run_prompt(engine: LocalEngine, dtype: Dtype) -> None:
    """Answer one prompt to its end; what is borrowed is not held longer."""
    wanted = request(
        ForcedExpert(Reference.parse("acme/large")), prompt="Sort: " + "3, 1, 2, " * 20
    )
    for _ in engine.run(replace(wanted, route=replace(wanted.route, dtype=dtype))):
        pass


def main() -> None:
    """Run once to warm everything up, then watched, and once more on what is resident."""
    folder, dtype = Path(sys.argv[1]), cast(Dtype, sys.argv[2])
    torch.set_num_threads(1)
    use_shared_kernel_cache()
    house = make_home(folder)
    warm = LocalEngine(planner(house), torch_below=0)
    run_prompt(warm, dtype)
    warm.close()
    assert warm.budget.used == 0
    start, watch, engine = (
        read_settled_bytes(),
        AnonymousMemoryWatch(),
        LocalEngine(planner(house), torch_below=0),
    )
    watch.start()
    run_prompt(engine, dtype)
    run_prompt(engine, dtype)
    watch.going = False
    watch.join()
    print(json.dumps({"grown": watch.most - start, "ledger": engine.budget.peak}))


if __name__ == "__main__":
    main()
