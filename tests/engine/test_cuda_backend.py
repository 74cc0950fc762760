"""Whole runs as on a CUDA device, with the processor in its place: bytes, plans, kept texts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from expertctl.engine import accelerator
from expertctl.engine.backend import Surroundings
from expertctl.engine.compose import BASE_ALONE
from expertctl.engine.cuda_backend import CudaBackend
from expertctl.engine.loaded_base import Wish, backend_of
from expertctl.engine.runtime import Engine
from expertctl.engine.static_decoder import StaticDecoder
from expertctl.engine.static_kv import KVArena
from expertctl.engine.tiers import Tier
from expertctl.errors import BudgetError, IncompatibleError, NotFoundError, UsageError
from expertctl.package.model_config import read_config
from expertctl.routing.plan_file import SavedPlan
from expertctl.routing.request import Forced, RouteRequest, check_request
from expertctl.settings import Home
from tests.engine.market import Market, market
from tests.engine.test_runtime import SQL, known, planner, request, run
from tests.engine.test_runtime_kinds import OPTIONS, expert, install
from tests.store.shop import House, fast, house

__all__ = ["fast", "house", "install", "known", "market"]

FREE = 8 << 20
ON_CUDA = {"device": "cuda"}


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the processor, with memory of its own."""
    monkeypatch.setattr(accelerator, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(accelerator, "has_cuda", lambda: True)
    monkeypatch.setattr(accelerator, "free_bytes", lambda: FREE + accelerator.RESERVE)


@pytest.fixture
def engine(house: House) -> Engine:
    return Engine(planner(house), device="cuda")


def asked(*experts: Forced, **options: object) -> RouteRequest:
    return request(*experts, route={**ON_CUDA, **options}).route


def test_a_run_gives_the_tokens_of_a_processor_and_says_what_ran_it(
    engine: Engine, house: House, market: Market
) -> None:
    house.install(market.package())
    there = run(engine, request(SQL, route=ON_CUDA))
    here = run(Engine(planner(house), budget=FREE), request(SQL))
    assert there.generated.tokens == here.generated.tokens
    assert there.numerics.backend == "cuda"
    assert there.planned.result.plan.identity != here.planned.result.plan.identity
    assert not any("threads" in warning for warning in there.warnings)


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_expert_of_each_kind_answers_as_on_a_processor(
    kind: str, engine: Engine, house: House, install: Callable[..., None]
) -> None:
    install(kind)
    there = run(engine, request(expert(kind), route=ON_CUDA))
    here = run(Engine(planner(house), budget=FREE), request(expert(kind)))
    alone = run(engine, request(route={**ON_CUDA, "base_alone": True}))
    assert there.generated.tokens == here.generated.tokens != alone.generated.tokens


def test_each_memory_has_a_ledger_of_its_own(engine: Engine, house: House, market: Market) -> None:
    [installed] = house.install(market.package())
    result = run(engine, request(SQL, route=ON_CUDA))
    held, config = result.memory.held, read_config(market.base_dir)
    tokens = result.prompt_tokens + 6
    assert held["kv"] == 2 * config.layers * config.kv_heads * config.head_dim * 4 * (tokens + 1)
    assert held["base"] == CudaBackend(config, "float32").weight_bytes
    assert result.memory.budget == FREE
    assert engine.budget.used == held["base"] + held["experts"]
    files = [f.size for f in installed.expert.files if f.path.endswith("safetensors")]
    ram = engine.tiers._budgets[Tier.RAM]
    assert ram is not engine.budget
    assert ram.held("experts") >= sum(files)
    assert ram.held("base") == ram.held("kv") == 0


def test_what_a_run_needs_is_known_to_the_byte_before(house: House, market: Market) -> None:
    house.install(market.package())
    peak = run(Engine(planner(house), device="cuda"), request(SQL, route=ON_CUDA)).memory.peak
    exact = Engine(planner(house), budget=peak, device="cuda")
    assert run(exact, request(SQL, route=ON_CUDA)).memory.peak == peak
    with pytest.raises(BudgetError):
        run(Engine(planner(house), budget=peak - 1, device="cuda"), request(SQL, route=ON_CUDA))


def test_a_budget_is_at_most_what_the_device_has_free(house: House) -> None:
    assert Engine(planner(house), budget=1 << 40, device="cuda").budget.limit == FREE
    assert Engine(planner(house), budget=1 << 20, device="cuda").budget.limit == 1 << 20


def test_a_text_that_was_kept_is_not_read_again(engine: Engine) -> None:
    first = request(route=ON_CUDA, cache_key="chat")
    before = run(engine, first)
    again = run(engine, first)
    assert before.kv_reused_tokens == 0
    assert again.kv_reused_tokens == again.prompt_tokens - 1
    assert again.generated.tokens == before.generated.tokens
    assert engine.budget.held("kv") > 0
    engine.forget("chat")
    assert engine.budget.held("kv") == 0


def test_what_is_kept_in_each_dtype_is_counted_once(engine: Engine) -> None:
    wanted = [
        request(route={**ON_CUDA, "dtype": dtype}, cache_key=f"chat in {dtype}")
        for dtype in ("float32", "bf16")
    ]
    kept = []
    for each in wanted:
        run(engine, each)
        engine.check_integrity()
        kept.append(engine.budget.held("kv"))
    assert kept[1] == kept[0] + kept[0] // 2
    assert run(engine, wanted[0]).kv_reused_tokens > 0
    engine.forget("chat in float32")
    engine.check_integrity()


def test_a_traced_run_says_the_same_and_tells_each_layer(
    engine: Engine, house: House, market: Market
) -> None:
    house.install(market.package())
    wanted = request(SQL, route=ON_CUDA)
    plain, traced = run(engine, wanted), run(engine, replace(wanted, trace=True))
    assert traced.generated.tokens == plain.generated.tokens
    assert traced.trace is not None
    own = {f"layers.{n}.{part}" for n in range(2) for part in ("attention", "mlp")}
    assert {*own, "head"} == set(traced.trace.prefill.places) == set(traced.trace.decode.places)


def test_fewer_experts_are_counted_without_what_lies_in_the_other_memory(
    house: House, install: Callable[..., None]
) -> None:
    install("lora")
    wanted = request(expert("lora"), route=ON_CUDA, on_budget="fewer")
    peak = run(Engine(planner(house), device="cuda"), wanted).memory.peak
    result = run(Engine(planner(house), budget=peak, device="cuda"), wanted)
    assert result.dropped == ()


def test_a_plan_of_one_device_is_refused_on_the_other(engine: Engine, house: House) -> None:
    here = run(Engine(planner(house), budget=FREE), request(route={"base_alone": True}))
    saved = SavedPlan(here.planned.result.plan)
    with pytest.raises(IncompatibleError, match="device"):
        run(engine, request(route=ON_CUDA, saved=saved))


def test_an_engine_answers_on_its_own_device_alone(engine: Engine, house: House) -> None:
    with pytest.raises(UsageError, match="computes on cuda, not on cpu"):
        run(engine, request())
    with pytest.raises(UsageError, match="computes on cpu, not on cuda"):
        run(Engine(planner(house), budget=FREE), request(route=ON_CUDA))


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
    with pytest.raises(UsageError, match=f"--device cuda does not know {named}$"):
        check_request(asked(**options))
    for dtype in ("float32", "bf16"):
        check_request(asked(dtype=dtype))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_weights_take_what_was_announced(dtype: str, market: Market, tmp_path: Path) -> None:
    config = read_config(market.base_dir)
    backend, warnings = backend_of(config, Wish("bf16" if dtype == "bf16" else "float32",
                                                device="cuda"))  # fmt: skip
    assert warnings == ()
    model = backend.load(Surroundings(directory=market.base_dir, home=Home(tmp_path)),
                         progress=lambda _: None)  # fmt: skip
    assert backend.name == "cuda"
    assert model.nbytes == backend.weight_bytes
    numbers = torch.bfloat16 if dtype == "bf16" else torch.float32
    arena = KVArena(config, rows=1, capacity=9, dtype=numbers, device=torch.device("cpu"))
    assert arena.nbytes == backend.kv_bytes(9)
    reading = model.reading(arena.row(0), BASE_ALONE)
    assert reading.prefill([1, 2, 3]).tokens == 3
    reading.decode(4)
    assert not model.is_at_rest
    model.rest()
    assert model.is_at_rest


@pytest.mark.parametrize(
    ("owner", "name"),
    [(KVArena, "__init__"), (StaticDecoder, "prefill"), (StaticDecoder, "decode")],
)
def test_a_device_that_is_full_refuses_a_run_and_answers_the_next(
    owner: type, name: str, engine: Engine, monkeypatch: pytest.MonkeyPatch
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


def test_without_a_device_no_engine_is_made(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "has_cuda", lambda: False)
    with pytest.raises(NotFoundError) as refused:
        Engine(planner(house), device="cuda")
    assert "--device cpu" in refused.value.hint
