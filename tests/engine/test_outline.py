"""Outlines: what a chain costs is known to the byte before anything of it is loaded."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from expertctl.engine.adapters.experts import borrow_compiled_plan, open_local_expert
from expertctl.engine.load_plan import estimate_plan_memory, read_local_outline
from expertctl.engine.memory.adapter_cache import AdapterCache
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.errors import InvalidPackageError, RevokedError
from expertctl.package.base_model import read_base
from expertctl.package.build import build_package, plan_build
from expertctl.package.directory import WEIGHTS_PATH
from expertctl.package.draft import ManifestOverrides
from tests.engine.memory_measurement import KINDS, PLAN_DIGEST, ExpertKindsHome
from tests.factories import make_package, write_base
from tests.store.fixtures import HomeFixture, make_key


@pytest.fixture(scope="module")
def expert_home(tmp_path_factory: pytest.TempPathFactory) -> ExpertKindsHome:
    return ExpertKindsHome(tmp_path_factory.mktemp("shelf"))


weights = st.sampled_from([1.0, 1.0, 0.5, 0.0, -1.0])
chains = st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=5, unique=True)


@settings(deadline=None, max_examples=40)
@given(chains, st.lists(weights, min_size=5, max_size=5))
def test_the_cost_of_a_chain_is_known_to_the_byte(
    expert_home: ExpertKindsHome, names: list[str], drawn: list[float]
) -> None:
    soft = {"soft", "all"}
    chain = [(name, 1.0 if name in soft else w) for name, w in zip(names, drawn, strict=False)]
    outlines = [(expert_home.estimate(name), weight) for name, weight in chain]
    told = (
        sum(o.nbytes for o, _ in outlines) + estimate_plan_memory(outlines, expert_home.form).nbytes
    )
    assert told == expert_home.measure_load(
        [(expert_home.open_source(name), weight) for name, weight in chain]
    )


@pytest.mark.parametrize("name", sorted(KINDS))
def test_the_cost_of_a_file_is_known_to_the_byte(expert_home: ExpertKindsHome, name: str) -> None:
    path, trust = expert_home.packages[name], expert_home.user_home.trust
    outline = read_local_outline(path, trust=trust)
    told = (
        outline.source.nbytes
        + estimate_plan_memory([(outline.source, 1.0)], expert_home.form).nbytes
    )
    budget = MemoryBudget(1 << 40)
    tiers = AdapterCache(ram=budget, device=budget)
    with open_local_expert(path, trust=trust, tiers=tiers) as local:
        chain = [(local.source, 1.0)]
        with borrow_compiled_plan(tiers, chain, identity=PLAN_DIGEST, target=expert_home.target):
            pass
        assert local.package == outline.package
        assert local.source.content_digest == outline.source.content_digest
        assert local.files.copy_file("expert.json") == outline.files.copy_file("expert.json")
    assert told == budget.peak


def test_an_outline_takes_no_memory_for_weights(
    tmp_path: Path, expert_home: ExpertKindsHome
) -> None:
    """Tens of MB: their pages are never touched, so they are not resident."""
    base = write_base(tmp_path / "wide", hidden=512, heads=8, kv_heads=4, layers=4)
    lora = {"rank": 512, "alpha": 512}
    path = make_package(tmp_path, "acme/wide", base_dir=base, lora=lora)
    assert path.stat().st_size > 20 << 20
    gc.collect()
    before = resident()
    outline = read_local_outline(path, trust=expert_home.user_home.trust)
    adapter = outline.source.load()
    assert adapter.nbytes > 20 << 20
    assert resident() - before < 8 << 20


def rebuilt(expert_home: ExpertKindsHome, folder: Path, change: Callable[[Path], object]) -> Path:
    """A package whose files were changed before it was built."""
    make_package(folder, "acme/odd", base_dir=expert_home.base)
    files = folder / "acme-odd-1.0.0.files"
    change(files)
    plan = plan_build(files, ManifestOverrides(), base=read_base(expert_home.base))
    return build_package(plan, folder / "odd.expert").path


def test_a_header_of_an_odd_length_is_read_as_often_as_it_is_asked_for(
    expert_home: ExpertKindsHome, tmp_path: Path
) -> None:
    """Tensors behind it are moved to where their type may lie, which is done once."""

    def widen(files: Path) -> None:
        weights = files / WEIGHTS_PATH
        data = weights.read_bytes()
        end = 8 + int.from_bytes(data[:8], "little")
        weights.write_bytes((end - 5).to_bytes(8, "little") + data[8:end] + b"   " + data[end:])

    outline = read_local_outline(
        rebuilt(expert_home, tmp_path, widen), trust=expert_home.user_home.trust
    ).source
    first, second = (
        estimate_plan_memory([(outline, 1.0)], expert_home.form).nbytes for _ in range(2)
    )
    assert first == second > 0


def test_a_text_is_whole_whatever_it_begins_with(
    expert_home: ExpertKindsHome, tmp_path: Path
) -> None:
    """Its first bytes would say of weights that eight more describe them."""
    text = b"\x08" + bytes(7) + b"not weights, but a text to the end"
    path = rebuilt(expert_home, tmp_path, lambda files: (files / "README.md").write_bytes(text))
    outline = read_local_outline(path, trust=expert_home.user_home.trust)
    assert outline.files.copy_file("README.md") == text


def resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def test_an_outline_of_what_a_revoked_key_signed_is_refused(
    expert_home: ExpertKindsHome, tmp_path: Path
) -> None:
    trust = HomeFixture(tmp_path / "other").trust_keys("acme").trust
    trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        read_local_outline(expert_home.packages["plain"], trust=trust)


@pytest.mark.parametrize("size", [0, 3, 8, 200])
def test_a_damaged_beginning_is_refused(
    expert_home: ExpertKindsHome, size: int, tmp_path: Path
) -> None:
    stored = expert_home.find_expert("plain")
    blob = expert_home.user_home.store.blob_path(
        stored.find_file("adapter_model.safetensors").digest
    )
    whole, mode = blob.read_bytes(), blob.stat().st_mode
    blob.chmod(0o644)
    try:
        blob.write_bytes(b"\xff" * size + whole[size:] if size else b"")
        with pytest.raises(InvalidPackageError):
            estimate_plan_memory([(expert_home.estimate("plain"), 1.0)], expert_home.form)
    finally:
        blob.write_bytes(whole)
        blob.chmod(mode)
