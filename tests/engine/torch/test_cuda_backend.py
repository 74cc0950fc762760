"""Whole runs as on a CUDA device, with the processor in its place: bytes, plans, kept texts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertctl.engine.adapters.compile import BASE_ONLY
from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.load_plan import choose_backend
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.torch import devices
from expertctl.engine.torch.cuda_backend import CudaBackend
from expertctl.engine.torch.cuda_graph_decoder import CudaGraphDecoder
from expertctl.engine.torch.cuda_graph_step import StaticKVCache
from expertctl.engine_config import EngineConfig
from expertctl.errors import BudgetError, IncompatibleError, NotFoundError, UsageError
from expertctl.package.model_config import read_model_config
from expertctl.routing.plan import SavedPlan
from expertctl.routing.request import ForcedExpert, RouteRequest, check_request
from expertctl.settings import Home
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import SQL, known, planner, request, run
from tests.engine.test_runtime_kinds import OPTIONS, expert, install
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine_packages", "fast", "install", "known", "user_home"]

FREE = 8 << 20
ON_CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the processor, with memory of its own."""
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: FREE + devices.LIBRARY_RESERVE)


@pytest.fixture
def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), device="cuda")


def asked(*experts: ForcedExpert, **options: object) -> RouteRequest:
    return request(*experts, route={**ON_CUDA, **options}).route


def test_a_run_gives_the_tokens_of_a_processor_and_says_what_ran_it(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    there = run(engine, request(SQL, route=ON_CUDA))
    here = run(LocalEngine(planner(user_home), budget=FREE), request(SQL))
    assert there.generated.tokens == here.generated.tokens
    assert there.numerics.backend == "cuda"
    assert there.planned.result.plan.identity != here.planned.result.plan.identity
    assert not any("threads" in warning for warning in there.warnings)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_expert_of_each_kind_answers_as_on_a_processor(
    kind: str, engine: LocalEngine, user_home: HomeFixture, install: Callable[..., None]
) -> None:
    install(kind)
    there = run(engine, request(expert(kind), route=ON_CUDA))
    here = run(LocalEngine(planner(user_home), budget=FREE), request(expert(kind)))
    alone = run(engine, request(route={**ON_CUDA, "base_alone": True}))
    assert there.generated.tokens == here.generated.tokens != alone.generated.tokens


def test_each_memory_has_a_ledger_of_its_own(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    result = run(engine, request(SQL, route=ON_CUDA))
    held, config = result.memory.held, read_model_config(engine_packages.base_dir)
    tokens = result.prompt_tokens + 6
    assert held["kv"] == 2 * config.layers * config.kv_heads * config.head_dim * 4 * (tokens + 1)
    assert held["base"] == CudaBackend(config, "float32").weight_bytes
    assert result.memory.budget == FREE
    assert engine.budget.used == held["base"] + held["experts"]
    files = [f.size for f in installed.expert.files if f.path.endswith("safetensors")]
    ram = engine.tiers._budgets[Tier.RAM]
    assert ram is not engine.budget
    assert ram.reserved_bytes("experts") >= sum(files)
    assert ram.reserved_bytes("base") == ram.reserved_bytes("kv") == 0


def test_what_a_run_needs_is_known_to_the_byte_before(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    peak = run(
        LocalEngine(planner(user_home), device="cuda"), request(SQL, route=ON_CUDA)
    ).memory.peak
    exact = LocalEngine(planner(user_home), budget=peak, device="cuda")
    assert run(exact, request(SQL, route=ON_CUDA)).memory.peak == peak
    with pytest.raises(BudgetError):
        run(
            LocalEngine(planner(user_home), budget=peak - 1, device="cuda"),
            request(SQL, route=ON_CUDA),
        )


def test_a_budget_is_at_most_what_the_device_has_free(user_home: HomeFixture) -> None:
    assert LocalEngine(planner(user_home), budget=1 << 40, device="cuda").budget.limit == FREE
    assert LocalEngine(planner(user_home), budget=1 << 20, device="cuda").budget.limit == 1 << 20


def test_a_text_that_was_kept_is_not_read_again(engine: LocalEngine) -> None:
    first = request(route=ON_CUDA, cache_key="chat")
    before = run(engine, first)
    again = run(engine, first)
    assert before.kv_reused_tokens == 0
    assert again.kv_reused_tokens == again.prompt_tokens - 1
    assert again.generated.tokens == before.generated.tokens
    assert engine.budget.reserved_bytes("kv") > 0
    engine.forget("chat")
    assert engine.budget.reserved_bytes("kv") == 0


def test_what_is_kept_in_each_dtype_is_counted_once(engine: LocalEngine) -> None:
    wanted = [
        request(route={**ON_CUDA, "dtype": dtype}, cache_key=f"chat in {dtype}")
        for dtype in ("float32", "bf16")
    ]
    kept = []
    for each in wanted:
        run(engine, each)
        engine.check_integrity()
        kept.append(engine.budget.reserved_bytes("kv"))
    assert kept[1] == kept[0] + kept[0] // 2
    assert run(engine, wanted[0]).kv_reused_tokens > 0
    engine.forget("chat in float32")
    engine.check_integrity()


def test_bases_of_one_dtype_share_a_store_and_each_gets_a_cache_of_its_own_shape(
    engine: LocalEngine, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "wide", layers=3, kv_heads=4, tie=False, seed=4))
    held = []
    for name in ("market-base", "wide", "market-base"):
        wanted = replace(request(route={**ON_CUDA, "base_alone": True}), base=name)
        result = run(engine, wanted)
        on_processor = replace(request(route={"base_alone": True}), base=name)
        here = run(LocalEngine(planner(user_home), budget=FREE), on_processor)
        assert result.generated.tokens == here.generated.tokens
        held.append(result.memory.held["kv"])
    assert held == [held[0], 3 * held[0], held[0]], "half as many layers again, twice the heads"


def test_a_traced_run_says_the_same_and_tells_each_layer(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    wanted = request(SQL, route=ON_CUDA)
    plain, traced = run(engine, wanted), run(engine, replace(wanted, trace=True))
    assert traced.generated.tokens == plain.generated.tokens
    assert traced.trace is not None
    own = {f"layers.{n}.{part}" for n in range(2) for part in ("attention", "mlp")}
    assert {*own, "head"} == set(traced.trace.prefill.places) == set(traced.trace.decode.places)


def test_fewer_experts_are_counted_without_what_lies_in_the_other_memory(
    user_home: HomeFixture, install: Callable[..., None]
) -> None:
    install("lora")
    wanted = request(expert("lora"), route=ON_CUDA, on_budget="fewer")
    peak = run(LocalEngine(planner(user_home), device="cuda"), wanted).memory.peak
    result = run(LocalEngine(planner(user_home), budget=peak, device="cuda"), wanted)
    assert result.dropped == ()


def test_a_plan_of_one_device_is_refused_on_the_other(
    engine: LocalEngine, user_home: HomeFixture
) -> None:
    here = run(LocalEngine(planner(user_home), budget=FREE), request(route={"base_alone": True}))
    saved = SavedPlan(here.planned.result.plan)
    with pytest.raises(IncompatibleError, match="device"):
        run(engine, request(route=ON_CUDA, saved=saved))


def test_an_engine_answers_on_its_own_device_alone(
    engine: LocalEngine, user_home: HomeFixture
) -> None:
    with pytest.raises(UsageError, match="computes on cuda, not on cpu"):
        run(engine, request())
    with pytest.raises(UsageError, match="computes on cpu, not on cuda"):
        run(LocalEngine(planner(user_home), budget=FREE), request(route=ON_CUDA))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"dtype": "int8"}, "--dtype int8"),
        ({"dtype": "int4", "deterministic": True}, "--dtype int4, --deterministic"),
        ({"adapter_dtype": "fp16"}, "--adapter-dtype fp16"),
        ({"engine": "transformers"}, "--engine transformers"),
    ],
)
def test_what_a_device_cannot_do_is_refused(options: dict[str, object], named: str) -> None:
    with pytest.raises(UsageError, match=f"--device cuda does not support {named}$"):
        check_request(asked(**options))
    for dtype in ("float32", "bf16"):
        check_request(asked(dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_weights_take_what_was_announced(
    dtype: str, engine_packages: EnginePackages, tmp_path: Path
) -> None:
    config = read_model_config(engine_packages.base_dir)
    on_cuda = LoadConfig("bf16" if dtype == "bf16" else "float32", EngineConfig(device="cuda"))
    backend, warnings = choose_backend(config, on_cuda)
    assert warnings == ()
    model = backend.load(LoadContext(directory=engine_packages.base_dir, home=Home(tmp_path)),
                         progress=lambda _: None)  # fmt: skip
    assert backend.name == "cuda"
    assert model.nbytes == backend.weight_bytes
    numbers = torch.bfloat16 if dtype == "bf16" else torch.float32
    arena = StaticKVCache(config, rows=1, capacity=9, dtype=numbers, device=torch.device("cpu"))
    assert arena.nbytes == backend.kv_bytes(9)
    reading = model.start_session(arena.get_row(0), BASE_ONLY)
    assert reading.prefill([1, 2, 3]).tokens == 3
    reading.decode(4)
    assert not model.holds_only_weights
    model.free_buffers()
    assert model.holds_only_weights


@pytest.mark.parametrize(
    ("owner", "name"),
    [(StaticKVCache, "__init__"), (CudaGraphDecoder, "prefill"), (CudaGraphDecoder, "step")],
)
def test_a_device_that_is_full_refuses_a_run_and_answers_the_next(
    owner: type, name: str, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = run(engine, request(route=ON_CUDA)).generated.tokens

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, full)
        with pytest.raises(BudgetError, match="less memory left") as refused:
            run(engine, request(route=ON_CUDA))
    assert "--memory-budget" in refused.value.hint
    engine.check_integrity()
    again = run(engine, request(route=ON_CUDA))
    assert again.generated.tokens == before
    assert again.bytes_read.ssd == 0


def test_without_a_device_no_engine_is_made(
    user_home: HomeFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "is_cuda_available", lambda: False)
    with pytest.raises(NotFoundError) as refused:
        LocalEngine(planner(user_home), device="cuda")
    assert "--device cpu" in refused.value.hint
