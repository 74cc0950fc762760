"""Plans that change routed experts, on kernels: the scores of the torch decoder and of PEFT."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from expertctl.engine.adapters.compile import WeightedAdapter, fold_plan
from expertctl.engine.adapters.load import LoadedAdapter
from expertctl.engine.adapters.steps import Ia3Tensors
from expertctl.engine.cpu.decoder import DecodeRow, PackedDecoder
from expertctl.engine.cpu.decoder_program import build_decoder_program, estimate_program_bytes
from expertctl.engine.cpu.program_cache import estimate_buffer_bytes
from expertctl.engine.cpu.workspace import Workspace, choose_variant
from expertctl.engine.decoding import LayerTimer
from expertctl.engine.kernels.lora import RECORD_WORDS
from expertctl.engine.kernels.packed_format import (
    AdapterDtype,
    PackedDeltas,
    PlanPacking,
    Scheme,
    find_fused_projections,
    is_routed_module,
    list_routed_modules,
)
from expertctl.engine.kernels.thread_pool import ThreadPool
from expertctl.engine.kv.block_pool import PagedKVCache
from expertctl.engine.torch.sequence_cache import KVCache
from expertctl.errors import IncompatibleError
from expertctl.package.model_config import ModelConfig, read_model_config
from tests.engine.conftest import (
    TOLERANCE,
    MakeReferenceModel,
    ReferenceModel,
    build_reference_model,
    stack_logits,
)
from tests.engine.cpu.test_decoder import assert_exact, scores
from tests.engine.memory_measurement import count_fewest_allocations
from tests.engine.moe.test_adapted_experts import WRITERS, fitted, weighted
from tests.engine.moe.test_packed_experts import SIZES, cached, fitting, whole
from tests.engine.random_experts import (
    make_ia3,
    make_lora,
    make_packed_plan,
    make_plan_form,
    make_random_expert,
    make_torch_plan,
)
from tests.engine.reference_models import ALL_MODULES, merge_adapter

pytestmark = pytest.mark.all

IDS = [3, 60, 0, 17, 17, 42, 8, 25, 31, 5, 59, 2, 44, 13, 7, 28, 50, 1, 9, 33, 12, 4, 57, 21]
CHAINS = {
    "lora": ("lora",),
    "several": ("lora", "lora", "lora"),
    "dora": ("dora",),
    "ia3": ("ia3",),
    "mixed": ("lora", "ia3", "dora", "ia3"),
}
Chosen = Callable[[str], bool]


def every(name: str) -> bool:
    return True


def only_shared_gate(name: str) -> bool:
    return name.endswith("shared_expert_gate")


def expert(
    config: ModelConfig,
    kind: str,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    of: Chosen = every,
) -> WeightedAdapter:
    """A random expert without factors of what gate and up of a routed expert read."""
    drawn = make_random_expert(config, kind, seed=seed, dtype=dtype)
    modules = {
        name: steps
        for name, steps in drawn.adapter.modules.items()
        if of(name) and not _is_refused(name, steps)
    }
    return replace(drawn, adapter=replace(drawn.adapter, modules=modules))


def _is_refused(name: str, steps: Sequence[object]) -> bool:
    inner = is_routed_module(name) and not name.endswith("down_proj")
    return inner and any(isinstance(step, Ia3Tensors) and step.on_input for step in steps)


def chain_of(
    config: ModelConfig, kinds: Sequence[str], *, of: Chosen = every
) -> list[WeightedAdapter]:
    return [expert(config, kind, seed=3 * n, of=of) for n, kind in enumerate(kinds)]


def by_torch(model: ReferenceModel, experts: Sequence[WeightedAdapter]) -> Tensor:
    """Scores from the ninth token on."""
    config = read_model_config(model.directory)
    decoder, deltas = model.load_decoder(), make_torch_plan(config, experts).torch_deltas
    cache = KVCache(config, 40)
    rows = [decoder.prefill(IDS[:9], cache, deltas).logits]
    rows += [decoder.decode(token, cache, deltas).logits for token in IDS[9:]]
    return stack_logits(rows)


def assert_changes_alike(
    model: ReferenceModel, crew: ThreadPool, experts: Sequence[WeightedAdapter]
) -> None:
    decoder = whole(model, crew)
    plan = make_packed_plan(decoder.config, experts)
    ours, theirs = scores(decoder, IDS, prefill=9, deltas=plan), by_torch(model, experts)
    alone = scores(decoder, IDS, prefill=9)
    assert float((theirs - alone).abs().max()) > 0.01, "the plan must change something"
    assert float((ours - theirs).abs().max()) <= 2 * TOLERANCE, "either may be 1e-5 off"


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("arch", SIZES)
def test_a_plan_does_to_routed_experts_what_torch_does(
    arch: str, chain: str, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle(arch, **fitting(arch, {}))
    experts = chain_of(read_model_config(model.directory), CHAINS[chain])
    assert_changes_alike(model, crew, experts)


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("arch", SIZES)
def test_an_adapter_on_every_layer_equals_transformers_with_it_in_its_weights(
    kind: str, arch: str, oracle: MakeReferenceModel, crew: ThreadPool, tmp_path: Path
) -> None:
    model = oracle(arch, **fitting(arch, {}))
    decoder, torch_decoder = whole(model, crew), model.load_decoder()
    directory = WRITERS[kind](tmp_path / kind, model.directory, targets=ALL_MODULES)
    adapter = fitted(torch_decoder, directory)
    plan = make_packed_plan(decoder.config, [weighted(torch_decoder, adapter)])
    plain = model.compute_logits(IDS)
    assert merge_adapter(model.model, directory) == len(adapter.modules)
    assert float((model.compute_logits(IDS) - plain).abs().max()) > 0.01
    assert_exact(scores(decoder, IDS, prefill=9, deltas=plan), model, IDS)


@pytest.mark.parametrize("chain", CHAINS)
def test_rows_that_fill_no_blocks_are_changed_too(
    chain: str, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle("mixtral", **{**fitting("mixtral", {}), "hidden_size": 42})
    experts = chain_of(read_model_config(model.directory), CHAINS[chain])
    assert_changes_alike(model, crew, experts)


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3"])
def test_a_plan_that_changes_routed_experts_alone_has_no_width(
    kind: str, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    config = read_model_config(olmoe.directory)
    experts = chain_of(config, (kind,), of=is_routed_module)
    assert_changes_alike(olmoe, crew, experts)
    plan = make_packed_plan(config, experts)
    assert (plan.width, plan.has_scales) == (0, False)


@pytest.mark.parametrize("kinds", [("lora",), ("dora",), ("lora", "ia3")])
def test_the_gate_of_the_shared_expert_is_changed_too(
    kinds: Sequence[str], oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle("qwen2_moe", **fitting("qwen2_moe", {}))
    experts = chain_of(read_model_config(model.directory), kinds, of=only_shared_gate)
    assert_changes_alike(model, crew, experts)


@pytest.mark.parametrize(
    ("base", "adapters", "most"),
    [
        (Scheme.FLOAT32, "fp16", 0.002),
        (Scheme.FLOAT32, "int8", 0.02),
        (Scheme.BFLOAT16, "published", 0.02),
        (Scheme.INT8, "published", 0.04),
        (Scheme.INT4, "int8", 0.2),
    ],
)
def test_fewer_bits_stay_near(
    base: Scheme, adapters: AdapterDtype, most: float, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    """What the plan adds is rounded; beside it is only what rounding does to the base alone."""
    decoder = whole(olmoe, crew, base)
    experts = [expert(decoder.config, "lora", dtype=torch.bfloat16, of=is_routed_module)]
    plan = make_packed_plan(decoder.config, experts, base=base, adapters=adapters)
    ours = scores(decoder, IDS, prefill=9, deltas=plan)
    theirs = by_torch(olmoe, experts)
    lost = scores(decoder, IDS, prefill=9) - by_torch(olmoe, [])
    assert float((ours - theirs).norm()) <= most * float(theirs.norm()) + float(lost.norm())


def plans_of(config: ModelConfig, base: Scheme) -> list[PackedDeltas | None]:
    """Base alone, and plans of every kind and scheme, with routed experts or without."""
    bf16, half, single = torch.bfloat16, torch.float16, torch.float32
    chains = [
        [expert(config, "lora", dtype=bf16)],
        [expert(config, "lora", seed=1, dtype=bf16), expert(config, "dora", seed=2)],
        [expert(config, "ia3", seed=3)],
        [expert(config, "lora", seed=4, dtype=half, of=is_routed_module)],
        [expert(config, "lora", seed=5, dtype=single, of=lambda name: not is_routed_module(name))],
        [expert(config, "ia3", seed=6), expert(config, "lora", seed=7, dtype=bf16)],
        [expert(config, "ia3", seed=8, of=is_routed_module)],
    ]
    return [None, *(make_packed_plan(config, chain, base=base) for chain in chains)]


def prompt_of(number: int) -> list[int]:
    return [(7 * number + 3 * place) % 61 for place in range(3 + number % 11)]


def alone(decoder: PackedDecoder, number: int, plan: PackedDeltas | None) -> Tensor:
    return scores(decoder, [*prompt_of(number), 5, 17], prefill=3 + number % 11, deltas=plan)


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
def test_a_row_has_the_bits_that_it_has_alone(
    base: Scheme, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = whole(olmoe, crew, base, chunk=8)
    kinds = plans_of(decoder.config, base)
    plans = [kinds[3 * number % len(kinds)] for number in range(13)]
    wanted = torch.stack([alone(decoder, number, plan) for number, plan in enumerate(plans)])
    caches = [PagedKVCache(decoder.config, 40) for _ in plans]
    for number, (cache, plan) in enumerate(zip(caches, plans, strict=True)):
        decoder.prefill(prompt_of(number), cache, plan)
    for turn, token in enumerate((5, 17), start=1):
        pairs = zip(caches, plans, strict=True)
        rows = decoder.step([DecodeRow(token, cache, plan) for cache, plan in pairs])
        assert np.array_equal(rows, wanted[:, turn])


@pytest.mark.parametrize("kinds", [("lora", "dora"), ("ia3",)])
def test_neither_stretches_nor_workers_nor_who_times_it_change_a_bit(
    kinds: Sequence[str], olmoe: ReferenceModel, crew: ThreadPool, lone: ThreadPool
) -> None:
    plan = make_packed_plan(
        read_model_config(olmoe.directory), chain_of(read_model_config(olmoe.directory), kinds)
    )
    read = partial(scores, deltas=plan)
    together = read(whole(olmoe, crew), IDS, prefill=20)
    for chunk in (1, 7, 16):
        assert torch.equal(read(whole(olmoe, crew, chunk=chunk), IDS, prefill=20), together)
    assert torch.equal(read(whole(olmoe, lone), IDS, prefill=20), together)
    assert torch.equal(read(whole(olmoe, crew), IDS, prefill=12)[-4:], together[-4:])
    decoder, times = whole(olmoe, crew), LayerTimer()
    with decoder.time_layers(times):
        assert torch.equal(read(decoder, IDS, prefill=20), together)
    assert times.places["layers.0.mlp.experts"] > 0


@pytest.mark.parametrize("slots", [0, 2, 5])
def test_fewer_experts_in_memory_change_no_bit(
    slots: int, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    config = read_model_config(olmoe.directory)
    for kinds in (("lora", "ia3"), ("dora",)):
        plan = make_packed_plan(config, chain_of(config, kinds))
        expected = scores(whole(olmoe, crew), IDS, prefill=9, deltas=plan)
        with cached(olmoe, crew, slots=slots) as (decoder, cache):
            for _ in range(2):
                assert torch.equal(scores(decoder, IDS, prefill=9, deltas=plan), expected)
            cache.check_integrity()


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.BFLOAT16, Scheme.INT8, Scheme.INT4])
def test_experts_that_come_and_go_change_no_bit_of_several_plans(
    base: Scheme, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    """Slots are exchanged between passes, while each row keeps what its own plan has."""
    config = read_model_config(olmoe.directory)
    plans = plans_of(config, base)
    everything = whole(olmoe, crew, base, chunk=8)
    wanted = torch.stack([alone(everything, n, plan) for n, plan in enumerate(plans)])
    with cached(olmoe, crew, base, slots=2) as (decoder, cache):
        for favourite in (5, 33, 50, 12):
            scores(decoder, [favourite] * 38, prefill=1)  # whose experts get slots
            caches = [PagedKVCache(config, 40) for _ in plans]
            for number, (pages, plan) in enumerate(zip(caches, plans, strict=True)):
                logits = decoder.prefill(prompt_of(number), pages, plan).logits
                assert np.array_equal(logits, wanted[number, 0])
            for turn, token in enumerate((5, 17), start=1):
                pairs = zip(caches, plans, strict=True)
                rows = decoder.step([DecodeRow(token, pages, plan) for pages, plan in pairs])
                assert np.array_equal(rows, wanted[:, turn])
            cache.check_integrity()
        assert cache.activity().loads > 0
        swaps = cache.counters.observed_snapshot().summary.swaps
        assert swaps > 0


def test_records_of_routed_experts_stand_behind_all_others(olmoe: ReferenceModel) -> None:
    config = read_model_config(olmoe.directory)
    of_sites = sum(len(site.modules) for site in find_fused_projections(config.linear_shapes()))
    names = list_routed_modules(config.linear_shapes())
    assert config.experts is not None
    assert len(names) == 3 * config.experts.count * len(config.experts.layers)
    assert names[3 * config.experts.count + 4] == "model.layers.1.mlp.experts.1.up_proj"
    plan = make_packed_plan(config, [expert(config, "lora")])
    assert plan.first_routed_record == of_sites
    assert plan.table.shape == (of_sites + len(names), RECORD_WORDS)
    for name, record in zip(names, plan.table[of_sites:], strict=True):
        assert bool(record.any()) == (name in plan.modules)
    without = make_packed_plan(
        config, [expert(config, "lora", of=lambda name: not is_routed_module(name))]
    )
    assert (without.first_routed_record, without.routed_address, len(without.table)) == (
        None,
        0,
        of_sites,
    )


@pytest.mark.parametrize("part", ["gate_proj", "up_proj"])
def test_factors_of_what_gate_and_up_share_are_refused_by_name(
    part: str, olmoe: ReferenceModel
) -> None:
    config = read_model_config(olmoe.directory)
    module = f"model.layers.1.mlp.experts.4.{part}"
    lora = make_lora(torch.ones(1, 64), torch.ones(32, 1), 1.0)
    steps = (lora, make_ia3(torch.ones(64), on_input=True))
    adapter = LoadedAdapter("acme/x@1.0.0", {module: steps}, (), 1, 0)
    with pytest.raises(IncompatibleError, match=f"{module}.*scales its input") as caught:
        make_packed_plan(config, [WeightedAdapter(adapter)])
    assert caught.value.hint is not None


@pytest.mark.parametrize("adapters", ["published", "fp16", "int8"])
def test_a_plan_takes_what_was_announced(
    adapters: AdapterDtype, oracle: MakeReferenceModel
) -> None:
    sizes = {"hidden_size": 128, "moe_intermediate_size": 64, "num_experts": 48}
    model = oracle("qwen3_moe", **{**fitting("qwen3_moe", {}), **sizes}, num_hidden_layers=2)
    config = read_model_config(model.directory)
    chain = chain_of(config, ("lora", "ia3", "lora"))
    composition = fold_plan(chain, make_plan_form(config, PlanPacking(Scheme.BFLOAT16, adapters)))
    plan = composition.compile()
    found = count_fewest_allocations(composition.compile)
    assert plan.packed is not None
    assert plan.nbytes == composition.nbytes == plan.packed.nbytes
    assert found.python_bytes <= composition.nbytes + composition.scratch_bytes


@pytest.mark.parametrize("arch", SIZES)
@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.INT8])
def test_programs_take_no_more_than_is_said(
    arch: str, base: Scheme, oracle: MakeReferenceModel, crew: ThreadPool
) -> None:
    model = oracle(arch, **fitting(arch, {}))
    with cached(model, crew, base, slots=2) as (decoder, _):
        config = decoder.config
        room = Workspace(config, base, tokens=4, rows=4)
        for chosen in plans_of(config, base), plans_of(config, base)[1:2]:
            plans = [plan for plan in chosen if plan is not None]
            kinds = choose_variant(single_sequence=False, numbers=Scheme.FLOAT16, plans=plans)
            build = partial(build_decoder_program, decoder._base, room, kinds, decoder._experts)
            held = build()  # kernels are there from now on
            found = count_fewest_allocations(build)
            assert held.embed.table.nbytes < found.python_bytes
            assert found.python_bytes <= estimate_program_bytes(
                config,
                schemes=len(kinds.adapters),
                scales=kinds.scales,
                routed=len(kinds.routed),
            )


@pytest.mark.parametrize("base", [Scheme.FLOAT32, Scheme.INT8])
def test_what_a_decoder_holds_is_what_was_announced(
    base: Scheme, olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = whole(olmoe, crew, base, chunk=8)
    config, room = decoder.config, partial(PagedKVCache, decoder.config, 40)
    narrow = make_packed_plan(config, [expert(config, "lora", of=is_routed_module)], base=base)

    def read() -> None:
        decoder.prefill(prompt_of(9), room(), narrow)
        decoder.decode(1, room(), narrow)

    found = count_fewest_allocations(read, before=decoder.free_buffers)
    assert decoder.nbytes / 2 <= found.python_bytes <= decoder.nbytes
    assert 0 < decoder.nbytes <= estimate_buffer_bytes(config, base, tokens=12, chunk=8)
    decoder.free_buffers()
    plans = [plan for plan in plans_of(config, base) if plan is not None]
    decoder.step([DecodeRow(1, room(), plan) for plan in plans])
    announced = estimate_buffer_bytes(
        config,
        base,
        tokens=len(plans),
        chunk=8,
        rows=len(plans),
        width=max(plan.width for plan in plans),
        adapters={plan.scheme for plan in plans if plan.width},
    )
    assert decoder.nbytes <= announced


def test_plans_without_routed_experts_add_no_operation(
    olmoe: ReferenceModel, crew: ThreadPool
) -> None:
    decoder = whole(olmoe, crew)
    config = decoder.config
    room = Workspace(config, Scheme.FLOAT32, tokens=4, rows=4)
    plans = [
        make_packed_plan(config, [expert(config, "lora", of=of)]) for of in (every, _is_not_routed)
    ]
    names = []
    for plan in plans:
        kinds = choose_variant(single_sequence=False, numbers=Scheme.FLOAT16, plans=[plan])
        program = build_decoder_program(decoder._base, room, kinds, decoder._experts)
        names.append([name for stage in program.layers for name in stage.program.names])
    assert names[1] == [name for name in names[0] if not name.startswith("routed delta")]
    assert len(names[0]) == len(names[1]) + 2 * config.layers


def _is_not_routed(name: str) -> bool:
    return not is_routed_module(name)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> ReferenceModel:
    return build_reference_model(
        tmp_path_factory.mktemp("olmoe") / "model", "olmoe", **fitting("olmoe", {})
    )


@pytest.fixture(scope="module")
def lone() -> Iterator[ThreadPool]:
    """One who computes."""
    crew = ThreadPool(1)
    yield crew
    crew.close()
