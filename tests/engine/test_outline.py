"""Outlines: what a chain costs is known to the byte before anything of it is loaded."""

import gc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.digest import Digest
from expertctl.engine.base_weights import load_base
from expertctl.engine.budget import Budget
from expertctl.engine.compose import Form
from expertctl.engine.decoder import Decoder
from expertctl.engine.experts import ExpertSource, Target, compiled, local_expert, stored_source
from expertctl.engine.gains import GainSource
from expertctl.engine.outline import compiling_bytes, local_outline, stored_outline
from expertctl.engine.tiers import Tiers
from expertctl.errors import InvalidPackageError, RevokedError
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_config
from expertctl.store.derived import Derived
from expertctl.store.ref import StoredExpert
from tests.engine.adapter_files import linear_shapes
from tests.factories import make_package, write_base
from tests.store.shop import House, a_key

PLAN = Digest.of(b"plan")
KINDS: dict[str, list[tuple[str, dict[str, Any]]]] = {
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

    def __init__(self, folder: Path) -> None:
        self.base = write_base(folder / "base")
        facts, key = read_base(self.base), a_key("acme")
        self.house = House(folder / "home").trusting("acme")
        self.house.bases.add(self.base)
        self.packages = {
            name: make_package(
                folder / name,
                f"acme/{name}",
                base_dir=self.base,
                base=facts,
                key=key,
                adapters=kind,
            )
            for name, kind in KINDS.items()
        }
        self.house.install(*self.packages.values())
        config = read_config(self.base)
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


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Shelf:
    return Shelf(tmp_path_factory.mktemp("shelf"))


weights = st.sampled_from([1.0, 1.0, 0.5, 0.0, -1.0])
chains = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True)


@settings(deadline=None, max_examples=40)
@given(chains, st.lists(weights, min_size=5, max_size=5))
def test_the_cost_of_a_chain_is_known_to_the_byte(
    shelf: Shelf, names: list[str], drawn: list[float]
) -> None:
    soft = {"soft", "all"}
    chain = [(name, 1.0 if name in soft else w) for name, w in zip(names, drawn, strict=False)]
    outlines = [(shelf.outline(name), weight) for name, weight in chain]
    told = sum(o.nbytes for o, _ in outlines) + compiling_bytes(outlines, shelf.form)
    assert told == shelf.cost([(shelf.source(name), weight) for name, weight in chain])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_cost_of_a_file_is_known_to_the_byte(shelf: Shelf, name: str) -> None:
    path, trust = shelf.packages[name], shelf.house.trust
    outline = local_outline(path, trust=trust)
    told = outline.source.nbytes + compiling_bytes([(outline.source, 1.0)], shelf.form)
    budget = Budget(1 << 40)
    tiers = Tiers(ram=budget, device=budget)
    with local_expert(path, trust=trust, tiers=tiers) as local:
        chain = [(local.source, 1.0)]
        with compiled(tiers, chain, identity=PLAN, target=shelf.target):
            pass
        assert local.package == outline.package
        assert local.source.content_digest == outline.source.content_digest
        assert local.files.data("expert.json") == outline.files.data("expert.json")
    assert told == budget.peak


def test_an_outline_takes_no_memory_for_weights(tmp_path: Path, shelf: Shelf) -> None:
    """Tens of MB: their pages are never touched, so they are not resident."""
    base = write_base(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=4)
    lora = {"rank": 512, "alpha": 512}
    path = make_package(tmp_path, "acme/wide", base_dir=base, lora=lora)
    assert path.stat().st_size > 20 << 20
    gc.collect()
    before = resident()
    outline = local_outline(path, trust=shelf.house.trust)
    adapter = outline.source.load()
    assert adapter.nbytes > 20 << 20
    assert resident() - before < 8 << 20


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_an_outline_of_what_a_revoked_key_signed_is_refused(shelf: Shelf, tmp_path: Path) -> None:
    trust = House(tmp_path / "other").trusting("acme").trust
    trust.revoke(a_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        local_outline(shelf.packages["plain"], trust=trust)


@pytest.mark.parametrize("size", [0, 3, 8, 200])
def test_a_damaged_beginning_is_refused(shelf: Shelf, size: int, tmp_path: Path) -> None:
    stored = shelf.expert("plain")
    blob = shelf.house.store.blob_path(stored.file("adapter_model.safetensors").digest)
    whole, mode = blob.read_bytes(), blob.stat().st_mode
    blob.chmod(0o644)
    try:
        blob.write_bytes(b"\xff" * size + whole[size:] if size else b"")
        with pytest.raises(InvalidPackageError):
            compiling_bytes([(shelf.outline("plain"), 1.0)], shelf.form)
    finally:
        blob.write_bytes(whole)
        blob.chmod(mode)
