"""Outlines: what a chain costs is known to the byte before anything of it is loaded."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.budget import Budget
from expertctl.engine.experts import compiled, local_expert
from expertctl.engine.outline import foretell, local_outline
from expertctl.engine.tiers import Tiers
from expertctl.errors import InvalidPackageError, RevokedError
from expertctl.package.adapter_files import WEIGHTS_PATH
from expertctl.package.base_model import read_base
from expertctl.package.build import build, plan_build
from expertctl.package.draft import Overrides
from tests.engine.shelf import KINDS, PLAN, Shelf
from tests.factories import make_package, write_base
from tests.store.shop import House, a_key


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
    told = sum(o.nbytes for o, _ in outlines) + foretell(outlines, shelf.form).nbytes
    assert told == shelf.cost([(shelf.source(name), weight) for name, weight in chain])


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_cost_of_a_file_is_known_to_the_byte(shelf: Shelf, name: str) -> None:
    path, trust = shelf.packages[name], shelf.house.trust
    outline = local_outline(path, trust=trust)
    told = outline.source.nbytes + foretell([(outline.source, 1.0)], shelf.form).nbytes
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


def rebuilt(shelf: Shelf, folder: Path, change: Callable[[Path], object]) -> Path:
    """A package whose files were changed before it was built."""
    make_package(folder, "acme/odd", base_dir=shelf.base)
    files = folder / "acme-odd-1.0.0.files"
    change(files)
    plan = plan_build(files, Overrides(), base=read_base(shelf.base))
    return build(plan, folder / "odd.expert").path


def test_a_header_of_an_odd_length_is_read_as_often_as_it_is_asked_for(
    shelf: Shelf, tmp_path: Path
) -> None:
    """Tensors behind it are moved to where their type may lie, which is done once."""

    def widen(files: Path) -> None:
        weights = files / WEIGHTS_PATH
        data = weights.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        weights.write_bytes((end - 5).to_bytes(8, "little") + data[8:end] + b"   " + data[end:])

    outline = local_outline(rebuilt(shelf, tmp_path, widen), trust=shelf.house.trust).source
    first, second = (foretell([(outline, 1.0)], shelf.form).nbytes for _ in range(2))
    assert first == second > 0


def test_a_text_is_whole_whatever_it_begins_with(shelf: Shelf, tmp_path: Path) -> None:
    """Its first bytes would say of weights that eight more describe them."""
    text = b"\x08" + bytes(7) + b"not weights, but a text to the end"
    path = rebuilt(shelf, tmp_path, lambda files: (files / "README.md").write_bytes(text))
    outline = local_outline(path, trust=shelf.house.trust)
    assert outline.files.data("README.md") == text


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
            foretell([(shelf.outline("plain"), 1.0)], shelf.form)
    finally:
        blob.write_bytes(whole)
        blob.chmod(mode)
