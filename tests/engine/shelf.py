"""A home with one expert of each kind on one tiny base, for tests of what memory they take."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from expertctl.digest import Digest
from expertctl.engine.base_weights import load_base
from expertctl.engine.budget import Budget
from expertctl.engine.compose import Form
from expertctl.engine.decoder import Decoder
from expertctl.engine.experts import ExpertSource, Target, compiled, stored_source
from expertctl.engine.gains import GainSource
from expertctl.engine.outline import stored_outline
from expertctl.engine.tiers import Tiers
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_config
from expertctl.store.derived import Derived
from expertctl.store.ref import StoredExpert
from tests.engine.adapter_files import linear_shapes
from tests.factories import make_package, write_base
from tests.store.shop import House, a_key

PLAN = Digest.of(b"plan")
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


class Shelf:
    """A home with one expert of each kind, and the base that they are for."""

    def __init__(
        self, folder: Path, *, kinds: Kinds = KINDS, base: Mapping[str, Any] | None = None
    ) -> None:
        self.base = write_base(folder / "base", **(base or {}))
        facts, key = read_base(self.base), a_key("acme")
        self.house = House(folder / "home").trusting("acme")
        self.house.bases.add(self.base)
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
        self.house.install(*installed.values())
        self.config = config = read_config(self.base)
        decoder = Decoder(config, load_base(self.base, config))
        shapes = linear_shapes(self.base)
        self.form = Form(shapes, config.hidden_size, torch.float32, torch.device("cpu"))
        gains = GainSource(Digest.of(b"base"), decoder.matrix, Derived(folder / "derived"))
        self.target = Target(self.form, gains)

    def expert(self, name: str) -> StoredExpert:
        return next(e for e in self.house.store.experts() if e.package.name == name)

    def outline(self, name: str) -> ExpertSource:
        stored, store = self.expert(name), self.house.store
        return stored_outline(store, stored, store.manifest(stored))

    def source(self, name: str) -> ExpertSource:
        stored, store = self.expert(name), self.house.store
        return stored_source(store, stored, store.manifest(stored))

    def cost(self, chain: Sequence[tuple[ExpertSource, float]]) -> int:
        """What loading and compiling a chain takes at most, measured by doing it."""
        budget = Budget(1 << 40)
        with compiled(Tiers(ram=budget, device=budget), chain, identity=PLAN, target=self.target):
            return budget.peak
