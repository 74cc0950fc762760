"""Gains of DoRA are computed once for a package on a base, paid for, and checked when read."""

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from expertctl.digest import Digest
from expertctl.engine.adapters.compile import CompileSpec, DoraScales
from expertctl.engine.adapters.experts import (
    CompileTarget,
    DoraScaleSource,
    ExpertSource,
    borrow_compiled_plan,
    dora_scale_bytes,
    estimate_dora_scratch,
    has_dora,
)
from expertctl.engine.adapters.steps import DoraTensors
from expertctl.engine.arrays import FloatArray
from expertctl.engine.backend import LoadConfig
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.kernels.packed_format import Scheme
from expertctl.engine.memory.adapter_cache import AdapterCache, Tier
from expertctl.engine.memory.budget import MemoryBudget
from expertctl.engine.torch.decoder import Decoder
from expertctl.engine.torch.plan import to_array, to_tensor
from expertctl.engine.torch.reference import reference_dora_scales
from expertctl.engine.torch.weights import load_base_weights
from expertctl.engine_config import Dtype
from expertctl.errors import BudgetError, IncompatibleError
from expertctl.package.model_config import read_model_config
from expertctl.store.disk import DerivedData
from tests.engine.package_fixtures import load_adapters, make_expert_source
from tests.engine.packing import pack_base
from tests.factories import write_base, write_dora, write_ia3, write_lora, write_soft_prompt

PLAN, BASE, PACKAGE = (Digest.compute(text) for text in (b"plan", b"base", b"package"))
DTYPES: dict[Scheme, Dtype] = {
    Scheme.FLOAT32: "float32",
    Scheme.BFLOAT16: "bf16",
    Scheme.INT8: "int8",
    Scheme.INT5: "int4",
}
OBJECTS = 8 << 10
"""What Python objects take that only refer to numbers."""
MODULES = 14
"""Seven projections of two layers."""


class Counting:
    """The matrices of a base, and how often they were asked for."""

    def __init__(self, base: Path, dtype: torch.dtype = torch.float32) -> None:
        config = read_model_config(base)
        self.decoder = Decoder(config, load_base_weights(base, config, dtype=dtype))
        self.form = CompileSpec(config.linear_shapes(), config.hidden_size)
        self.asked = 0

    def matrix(self, module: str) -> FloatArray:
        self.asked += 1
        return to_array(self.decoder.matrix(module))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_base(tmp_path / "base")


@pytest.fixture
def counting(base: Path) -> Counting:
    return Counting(base)


@pytest.fixture
def derived(tmp_path: Path) -> DerivedData:
    return DerivedData(tmp_path / "derived")


@pytest.fixture
def target(counting: Counting, derived: DerivedData) -> CompileTarget:
    return CompileTarget(counting.form, DoraScaleSource(BASE, counting.matrix, derived))


@pytest.fixture
def dora(tmp_path: Path, base: Path) -> ExpertSource:
    return make_expert_source(write_dora(tmp_path / "dora", base, rank=3))


@pytest.fixture
def budget() -> MemoryBudget:
    return MemoryBudget(1 << 20)


@pytest.fixture
def tiers(budget: MemoryBudget) -> AdapterCache:
    return AdapterCache(ram=budget, device=budget)


def use(tiers: AdapterCache, target: CompileTarget, *chain: tuple[ExpertSource, float]) -> Digest:
    """Compile a chain under its own identity."""
    identity = Digest.compute(repr([(s.manifest.name, w) for s, w in chain]).encode())
    with borrow_compiled_plan(tiers, chain, identity=identity, target=target):
        tiers.check_integrity()
    return identity


def equal(one: DoraScales, two: DoraScales) -> bool:
    return one.keys() == two.keys() and all(
        len(one[m]) == len(two[m]) and all(map(np.array_equal, one[m], two[m])) for m in one
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gains_are_those_of_the_weights_that_are_used(
    dtype: torch.dtype, base: Path, derived: DerivedData, dora: ExpertSource
) -> None:
    counting, adapter = Counting(base, dtype), dora.load()
    found = DoraScaleSource(BASE, counting.matrix, derived).make_request(adapter, PACKAGE).load()
    assert len(found) == MODULES
    for module, [gain] in found.items():
        [step] = adapter.modules[module]
        assert isinstance(step, DoraTensors)
        used = counting.decoder.matrix(module)
        assert used.dtype == dtype
        torch.testing.assert_close(to_tensor(gain), reference_dora_scales(used, step))


def test_gains_are_resident_and_paid_for_after_first_use(
    tiers: AdapterCache,
    target: CompileTarget,
    dora: ExpertSource,
    budget: MemoryBudget,
    counting: Counting,
) -> None:
    adapter = dora.load()
    with borrow_compiled_plan(tiers, [(dora, 1.0)], identity=PLAN, target=target) as plan:
        assert (
            budget.reserved_bytes("experts")
            == dora.nbytes + dora_scale_bytes(adapter) + plan.nbytes
        )
        assert budget.reserved_bytes("buffers") == 0
    assert counting.asked == MODULES
    assert tiers.contains(target.dora_scales.make_request(adapter, dora.content_digest).key)
    use(tiers, target, (dora, 0.5))
    assert counting.asked == MODULES
    outputs = [out for out, _ in target.form.shapes.values()][:MODULES]
    assert dora_scale_bytes(adapter) == 4 * sum(outputs)


def test_gains_that_are_there_are_no_traffic_of_experts(
    tiers: AdapterCache, target: CompileTarget, dora: ExpertSource
) -> None:
    use(tiers, target, (dora, 1.0))
    use(tiers, target, (dora, 0.5))
    traffic = tiers.traffic[Tier.RAM]
    assert (traffic.loads, traffic.hits) == (1, 1)


def test_scratch_memory_is_part_of_the_budget(target: CompileTarget, dora: ExpertSource) -> None:
    adapter = dora.load()
    enough = dora.nbytes + dora_scale_bytes(adapter) + estimate_dora_scratch(adapter)
    small = MemoryBudget(enough - dora_scale_bytes(adapter) - 1)
    with pytest.raises(BudgetError, match="the DoRA scales of acme/dora"):
        use(AdapterCache(ram=small, device=small), target, (dora, 1.0))
    assert small.reserved_bytes("buffers") == 0


@pytest.mark.parametrize("scheme", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT5])
@pytest.mark.parametrize("sizes", [(64, 96), (512, 1536)])
def test_what_is_unpacked_of_a_packed_base_is_counted(
    scheme: Scheme, sizes: tuple[int, int], tmp_path: Path
) -> None:
    hidden, wide = sizes
    directory = write_base(tmp_path / "b", hidden=hidden, intermediate=wide, head_dim=16)
    config = read_model_config(directory)
    packed = pack_base(config, load_base_weights(directory, config), scheme)
    adapter = load_adapters(write_dora(tmp_path / "d", directory, rank=2, targets=["down_proj"]))
    form = PackedBackend.choose(config, LoadConfig(DTYPES[scheme])).compile_spec
    counted = estimate_dora_scratch(adapter, form) - 2 * dora_scale_bytes(adapter)
    [first, *_] = adapter.modules
    packed.unpack_weights(first)  # compiles, imports
    tracemalloc.start()
    packed.unpack_weights(first)
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hidden * wide * 4 <= most <= counted + OBJECTS
    merged = estimate_dora_scratch(adapter) - 2 * dora_scale_bytes(adapter)
    assert counted >= merged + hidden * wide * 4, "both are there when rows are merged"


def test_the_next_process_reads_what_this_one_computed(
    tiers: AdapterCache, target: CompileTarget, dora: ExpertSource, derived: DerivedData, base: Path
) -> None:
    use(tiers, target, (dora, 1.0))
    [path] = derived.root.rglob("*/*")
    assert path.parent.name == dora.content_digest.hex
    again = Counting(base)
    source = DoraScaleSource(BASE, again.matrix, DerivedData(derived.root))
    wanted = source.make_request(dora.load(), dora.content_digest)
    here = target.dora_scales.make_request(dora.load(), dora.content_digest)
    assert wanted.key == here.key
    assert equal(wanted.load(), here.load())
    assert again.asked == 0


@pytest.mark.parametrize("damage", [b"", b"short", bytes(4096)])
def test_a_damaged_file_is_computed_again_and_replaced(
    tiers: AdapterCache,
    target: CompileTarget,
    dora: ExpertSource,
    derived: DerivedData,
    base: Path,
    damage: bytes,
) -> None:
    use(tiers, target, (dora, 1.0))
    [path] = derived.root.rglob("*/*")
    good = path.read_bytes()
    path.write_bytes(damage)
    again = Counting(base)
    source = DoraScaleSource(BASE, again.matrix, derived)
    source.make_request(dora.load(), dora.content_digest).load()
    assert again.asked == MODULES
    assert path.read_bytes() == good


def test_another_base_gets_other_gains(
    tiers: AdapterCache,
    target: CompileTarget,
    dora: ExpertSource,
    tmp_path: Path,
    derived: DerivedData,
) -> None:
    use(tiers, target, (dora, 1.0))
    other = Counting(write_base(tmp_path / "other", seed=5))
    source = DoraScaleSource(Digest.compute(b"other"), other.matrix, derived)
    adapter = dora.load()
    theirs = source.make_request(adapter, dora.content_digest)
    ours = target.dora_scales.make_request(adapter, dora.content_digest)
    assert theirs.key != ours.key
    assert not tiers.contains(theirs.key)
    assert not equal(theirs.load(), ours.load())
    assert other.asked == MODULES
    assert len(list(derived.root.rglob("*/*"))) == 2


def test_a_place_that_cannot_be_written_costs_time_and_a_note_only(
    counting: Counting, tiers: AdapterCache, dora: ExpertSource, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    derived = DerivedData(tmp_path / "file" / "derived")
    target = CompileTarget(counting.form, DoraScaleSource(BASE, counting.matrix, derived))
    use(tiers, target, (dora, 1.0))
    [note] = derived.take_notes()
    assert "cannot be written" in note


def test_an_expert_that_does_not_fit_is_refused_before_anything_is_computed(
    tiers: AdapterCache,
    target: CompileTarget,
    counting: Counting,
    tmp_path: Path,
    budget: MemoryBudget,
) -> None:
    deeper = write_base(tmp_path / "deeper", layers=3)
    wrong = make_expert_source(write_dora(tmp_path / "wrong", deeper))
    with pytest.raises(IncompatibleError, match="the base has no such linear layer"):
        use(tiers, target, (wrong, 1.0))
    assert counting.asked == 0
    assert budget.reserved_bytes("buffers") == 0


def test_a_row_without_direction_names_the_expert_and_the_layer(
    tiers: AdapterCache,
    target: CompileTarget,
    counting: Counting,
    dora: ExpertSource,
    derived: DerivedData,
) -> None:
    adapter = dora.load()
    module = "model.layers.1.mlp.up_proj"
    [step] = adapter.modules[module]
    assert isinstance(step, DoraTensors)
    with torch.inference_mode():
        counting.decoder.matrix(module)[5] = 0
    step.b[5] = 0
    broken = replace(dora, load=lambda: adapter)
    with pytest.raises(IncompatibleError, match=rf"acme/dora@1\.0\.0: {module}: row 5"):
        use(tiers, target, (broken, 1.0))
    assert not derived.root.exists()


@pytest.mark.parametrize("write", [write_lora, write_ia3, write_soft_prompt])
def test_other_kinds_need_none(
    write: Callable[..., Path],
    tiers: AdapterCache,
    target: CompileTarget,
    counting: Counting,
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "other", tmp_path / "base")
    assert not has_dora(load_adapters(path))
    assert dora_scale_bytes(load_adapters(path)) == estimate_dora_scratch(load_adapters(path)) == 0
    use(tiers, target, (make_expert_source(path), 1.0))
    assert counting.asked == 0


def test_weight_zero_computes_nothing(
    tiers: AdapterCache, target: CompileTarget, counting: Counting, dora: ExpertSource
) -> None:
    use(tiers, target, (dora, 0.0))
    assert counting.asked == 0
