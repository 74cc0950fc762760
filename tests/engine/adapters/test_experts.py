"""From packages to compiled plans: verified wherever the bytes come from, and paid for once."""

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertctl.engine.adapters.compile import CompiledPlan, CompileSpec
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
    open_local_expert,
)
from expertctl.engine.adapters.load import StoredFiles, load_adapter
from expertctl.engine.adapters.steps import LoraTensors
from expertctl.engine.arrays import AnyArray
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array
from expertctl.engine.torch.weights import load_base_weights
from expertctl.errors import BudgetError, DigestError, IncompatibleError, RevokedError, TrustError
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.package.model_config import read_model_config
from expertctl.reference import Digest, FileDigest
from expertctl.store.disk import DerivedData
from expertctl.trust.keys import PrivateKey
from expertctl.trust.trust_store import TrustStore
from tests.engine.memory_measurement import find_owner
from tests.engine.package_fixtures import (
    list_package_files,
    make_adapter_manifest,
    make_expert_source,
    read_linear_shapes,
)
from tests.factories import make_package, write_base, write_lora

PLAN, BASE = Digest.compute(b"plan"), Digest.compute(b"base")
Source = Callable[..., ExpertSource]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("experts") / "base")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return read_base(base)


@pytest.fixture
def target(base: Path, tmp_path: Path) -> CompileTarget:
    decoder = decoder_of(base)
    form = CompileSpec(read_linear_shapes(base), 32)
    scales = DoraScaleSource(
        BASE,
        lambda module: to_array(decoder.matrix(module)),
        DerivedData(tmp_path / "derived"),
    )
    return CompileTarget(form, scales)


def decoder_of(base: Path) -> Decoder:
    config = read_model_config(base)
    return Decoder(config, load_base_weights(base, config))


@pytest.fixture
def source(tmp_path: Path, base: Path) -> Source:
    def make(name: str = "lora", **options: object) -> ExpertSource:
        return make_expert_source(write_lora(tmp_path / name, base, **options))  # type: ignore[arg-type]  # its own options

    return make


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(1 << 20)


@pytest.fixture
def tiers(budget: MemoryBudget) -> AdapterCache:
    return AdapterCache(ram=budget, device=budget)


def test_no_expert_means_no_delta(tiers: AdapterCache, target: CompileTarget) -> None:
    with borrow_compiled_plan(tiers, [], identity=PLAN, target=target) as plan:
        assert plan == CompiledPlan({}, None, 0)


def test_a_plan_is_compiled_once_and_found_again(
    tiers: AdapterCache, target: CompileTarget, source: Source, budget: MemoryBudget
) -> None:
    one = source(alpha=4, rank=4)
    with borrow_compiled_plan(tiers, [(one, 1.0)], identity=PLAN, target=target) as plan:
        tiers.check_integrity()
        assert budget.used == one.nbytes + plan.nbytes == one.nbytes
    with borrow_compiled_plan(tiers, [(one, 1.0)], identity=PLAN, target=target) as again:
        assert again is plan
    assert (tiers.traffic[Tier.RAM].loads, tiers.traffic[Tier.DEVICE].loads) == (1, 1)
    assert tiers.traffic[Tier.DEVICE].hits == 1


def test_a_plan_that_goes_before_it_is_borrowed_is_compiled_again(
    tiers: AdapterCache, target: CompileTarget, source: Source
) -> None:
    """The other thread has asked for it, and waits for the lock, while this one lets it go."""
    one, found = source(alpha=4, rank=4), list[CompiledPlan]()

    def answer() -> None:
        with borrow_compiled_plan(tiers, [(one, 1.0)], identity=PLAN, target=target) as plan:
            found.append(plan)

    answer()
    other = threading.Thread(target=answer, daemon=True)
    with tiers.lock:
        other.start()
        while not is_within(other, "pin_if_present"):
            pass
        tiers.clear()
    other.join(60)
    [plan, again] = found
    assert again is not None
    assert again is not plan
    assert again.deltas.keys() == plan.deltas.keys()
    tiers.check_integrity()


def is_within(thread: threading.Thread, function: str) -> bool:
    """Tell whether a thread is in a function, or in what that calls."""
    frame = sys._current_frames().get(thread.ident or 0)
    names = []
    while frame is not None:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    return function in names


def test_an_expert_used_in_place_stays_as_long_as_its_plan(
    tiers: AdapterCache, target: CompileTarget, source: Source, budget: MemoryBudget
) -> None:
    one = source()
    with borrow_compiled_plan(tiers, [(one, 1.0)], identity=PLAN, target=target) as plan:
        tiers.clear()
        assert tiers.contains(one.cache_request.key)
        assert budget.used == one.nbytes + plan.nbytes
    tiers.clear()
    assert budget.used == 0


def test_experts_that_were_concatenated_may_go_and_their_memory_is_free(
    tiers: AdapterCache, target: CompileTarget, source: Source, budget: MemoryBudget
) -> None:
    buffers: list[weakref.ref[AnyArray]] = []

    def watched(expert: ExpertSource) -> ExpertSource:
        def load():  # type: ignore[no-untyped-def]  # as ExpertSource.load
            adapter = expert.load()
            [lora] = next(iter(adapter.modules.values()))
            assert isinstance(lora, LoraTensors)
            buffers.append(weakref.ref(find_owner(lora.a)))
            return adapter

        return ExpertSource(expert.manifest, expert.content_digest, expert.nbytes, load)

    chain = [(watched(source("one")), 0.5), (watched(source("two", seed=1)), 2.0)]
    with borrow_compiled_plan(tiers, chain, identity=PLAN, target=target) as plan:
        tiers.clear()
        gc.collect()
        assert budget.used == plan.nbytes > 0
        assert [buffer() for buffer in buffers] == [None, None]


def test_a_tampered_expert_is_refused_and_nothing_stays_held(
    tmp_path: Path, base: Path, tiers: AdapterCache, target: CompileTarget, budget: MemoryBudget
) -> None:
    directory = write_lora(tmp_path / "lora", base)
    manifest, files = make_adapter_manifest(directory), list_package_files(directory)
    wrong = {
        path: (place, FileDigest(path, file.size, Digest.compute(b"other")))
        for path, (place, file) in files.paths.items()
    }
    bad = ExpertSource(
        manifest, PLAN, 100, lambda: load_adapter(manifest, StoredFiles("acme/x@1.0.0", wrong))
    )
    with pytest.raises(DigestError, match=r"acme/x@1\.0\.0"):  # noqa: SIM117 - one thing raises
        with borrow_compiled_plan(tiers, [(bad, 1.0)], identity=PLAN, target=target):
            pass
    assert budget.used == 0


def test_an_expert_of_another_base_is_refused_and_no_plan_stays(
    tiers: AdapterCache, target: CompileTarget, source: Source
) -> None:
    one = source()
    other = replace(target, form=replace(target.form, shapes={"lm_head": (1, 1)}))
    with pytest.raises(IncompatibleError, match="no such linear layer"):  # noqa: SIM117 - one thing raises
        with borrow_compiled_plan(tiers, [(one, 1.0)], identity=PLAN, target=other):
            pass
    assert not tiers.contains((Tier.DEVICE, PLAN))
    tiers.check_integrity()


def test_experts_beyond_the_budget_are_refused_with_the_numbers(
    target: CompileTarget, source: Source
) -> None:
    small = MemoryBudget(1000)
    with pytest.raises(BudgetError, match=r"acme/lora@1\.0\.0: .* of the budget"):  # noqa: SIM117 - one thing raises
        with borrow_compiled_plan(
            AdapterCache(ram=small, device=small), [(source(), 1.0)], identity=PLAN, target=target
        ):
            pass
    assert small.used == 0


def test_an_unsigned_file_is_used_from_memory_as_it_was_hashed(
    tmp_path: Path,
    base: Path,
    facts: BaseFacts,
    tiers: AdapterCache,
    target: CompileTarget,
    budget: MemoryBudget,
) -> None:
    path = make_package(tmp_path, base_dir=base, base=facts)
    expected = load_adapter(
        make_adapter_manifest(tmp_path / "acme-sql-1.0.0.files"),
        list_package_files(tmp_path / "acme-sql-1.0.0.files"),
    )
    with open_local_expert(path, trust=TrustStore(tmp_path / "t"), tiers=tiers) as local:
        held = budget.used
        path.unlink()
        assert held >= local.package.contents.size
        assert local.package.signer is None
        with borrow_compiled_plan(
            tiers, [(local.source, 1.0)], identity=PLAN, target=target
        ) as plan:
            assert budget.used == held + plan.nbytes
            for module, [lora] in expected.modules.items():
                assert isinstance(lora, LoraTensors)
                a = plan.deltas[module].a
                assert a is not None
                np.testing.assert_array_equal(a, lora.a)
    assert budget.used == 0
    assert not tiers.contains(local.source.cache_request.key)
    assert not tiers.contains((Tier.DEVICE, PLAN))
    tiers.check_integrity()


def test_a_file_takes_the_place_of_experts_that_nobody_uses(
    tmp_path: Path, base: Path, facts: BaseFacts, target: CompileTarget, source: Source
) -> None:
    path, other = make_package(tmp_path, base_dir=base, base=facts), source(rank=4, alpha=4)
    small = MemoryBudget(other.nbytes + 6000)
    tiers = AdapterCache(ram=small, device=small)
    with borrow_compiled_plan(tiers, [(other, 1.0)], identity=PLAN, target=target):
        pass
    with open_local_expert(path, trust=TrustStore(tmp_path / "t"), tiers=tiers):
        assert not tiers.contains(other.cache_request.key)
        assert small.used > 6000
    assert small.used == 0


def test_a_signed_file_is_used_only_when_its_key_is_trusted(
    tmp_path: Path, base: Path, facts: BaseFacts, tiers: AdapterCache, budget: MemoryBudget
) -> None:
    key = PrivateKey.generate("ecdsa-p256")
    path = make_package(tmp_path, base_dir=base, base=facts, key=key)
    trust = TrustStore(tmp_path / "trust.json")
    with pytest.raises(TrustError), open_local_expert(path, trust=trust, tiers=tiers):
        pass
    trust.add(key.public, name="acme", namespaces=["acme"])
    with open_local_expert(path, trust=trust, tiers=tiers) as local:
        assert local.package.signer == key.public.key_id
    trust.revoke(key.public.key_id)
    with pytest.raises(RevokedError), open_local_expert(path, trust=trust, tiers=tiers):
        pass
    assert budget.used == 0


def test_no_room_to_compile_a_plan_is_the_fault_of_its_experts(
    target: CompileTarget, source: Source
) -> None:
    ram, device = MemoryBudget(1 << 20), MemoryBudget(0)
    tiers, chain = (
        AdapterCache(ram=ram, device=device),
        [(source("a"), 1.0), (source("b", seed=2), 1.0)],
    )
    with pytest.raises(BudgetError, match=r"the plan of acme/") as caught:  # noqa: SIM117 - one thing raises
        with borrow_compiled_plan(tiers, chain, identity=PLAN, target=target):
            pass
    assert caught.value.hint == "use fewer experts with --max-experts, or raise --memory-budget"
    assert device.used == 0
    tiers.check_integrity()


def test_a_file_too_large_for_the_budget_is_refused(
    tmp_path: Path, base: Path, facts: BaseFacts
) -> None:
    path, small = make_package(tmp_path, base_dir=base, base=facts), MemoryBudget(5000)
    with pytest.raises(BudgetError, match="acme-sql"):  # noqa: SIM117 - one thing raises
        with open_local_expert(
            path, trust=TrustStore(tmp_path / "t"), tiers=AdapterCache(ram=small, device=small)
        ):
            pass
    assert small.used == 0
