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

from expertctl.engine.runtime import Engine
from expertctl.package.base_model import read_base
from expertctl.reference import Reference
from expertctl.routing.request import Dtype, Forced
from tests.engine.kept_code import keep_where_told
from tests.engine.resident_program import Watch, settled
from tests.engine.test_runtime import planner, request
from tests.factories import make_package, write_base
from tests.store.shop import House, a_key

BASE: dict[str, Any] = {"layers": 3, "hidden": 512, "intermediate": 1536, "head_dim": 64}
VOCABULARY = 32_768


def furnished(folder: Path) -> House:
    """A home with a base of 88 MB in float32, and a large LoRA for it."""
    base_dir = write_base(folder / "base", vocab=VOCABULARY, heads=8, dtype="bfloat16", **BASE)
    adapters: Any = [("lora", {"rank": 64, "dtype": "bfloat16"})]
    package = make_package(
        folder / "package",
        "acme/large",
        base_dir=base_dir,
        base=read_base(base_dir),
        key=a_key("acme"),
        adapters=adapters,
    )
    house = House(folder / "home").trusting("acme")
    house.bases.add(base_dir)
    house.install(package)
    return house


def answer(engine: Engine, dtype: Dtype) -> None:
    """Answer one prompt to its end; what is borrowed is not held longer."""
    wanted = request(Forced(Reference.parse("acme/large")), prompt="Sort: " + "3, 1, 2, " * 20)
    for _ in engine.run(replace(wanted, route=replace(wanted.route, dtype=dtype))):
        pass


def main() -> None:
    """Run once to warm everything up, then watched, and once more on what is resident."""
    folder, dtype = Path(sys.argv[1]), cast(Dtype, sys.argv[2])
    torch.set_num_threads(1)
    keep_where_told()
    house = furnished(folder)
    warm = Engine(planner(house), torch_below=0)
    answer(warm, dtype)
    warm.close()
    assert warm.budget.used == 0
    start, watch, engine = settled(), Watch(), Engine(planner(house), torch_below=0)
    watch.start()
    answer(engine, dtype)
    answer(engine, dtype)
    watch.going = False
    watch.join()
    print(json.dumps({"grown": watch.most - start, "ledger": engine.budget.peak}))


if __name__ == "__main__":
    main()
