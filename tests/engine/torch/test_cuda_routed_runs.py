"""Whole runs on bases of routed experts as on a CUDA device, with the processor in its place."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from expertctl.cli.process import get_exit_code
from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.load_plan import choose_backend
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.adapter_cache import Tier
from expertctl.engine.moe.cache_plan import estimate_cache_metadata_bytes
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine.torch import devices
from expertctl.engine.torch.cuda_backend import CudaBackend
from expertctl.engine.torch.expert_stack import STAGING_BUFFERS, CopyStream
from expertctl.engine_config import Dtype, EngineConfig, Warmup, WarmupConfig
from expertctl.errors import BudgetError, ExpertError
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_model_config
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from expertctl.settings import Home
from expertctl.user_request import SamplingOverrides
from tests.engine.moe.fakes import at_once
from tests.engine.package_fixtures import EnginePackages
from tests.engine.test_local_engine import planner, request, run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["at_once", "fast", "user_home"]

pytestmark = pytest.mark.all

FREE = 64 << 20
SQL = ForcedExpert(Reference.parse("acme/sql"))
PARTS = ("gate_proj", "up_proj", "down_proj")
ATTENTION = ("q_proj", "o_proj")
ROUTED = ("q_proj", *(f"experts.{number}.{part}" for number in range(0, 12, 3) for part in PARTS))
ONE = 3 * 64 * 320 * 4
"""Bytes of an expert in float32."""


@pytest.fixture(autouse=True)
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is the processor, with memory of its own."""
    monkeypatch.setattr(devices, "CUDA", torch.device("cpu"))
    monkeypatch.setattr(devices, "is_cuda_available", lambda: True)
    monkeypatch.setattr(devices, "find_free_bytes", lambda: FREE + devices.LIBRARY_RESERVE)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it is routed experts: 3 layers of 12."""
    return write_base(
        tmp_path_factory.mktemp("routed") / "base",
        arch="qwen3_moe",
        tie=False,
        seed=2,
        layers=3,
        hidden=64,
        head_dim=16,
        num_experts=12,
        num_experts_per_tok=3,
        moe_intermediate_size=320,
    )


@pytest.fixture
def size(base: Path) -> int:
    """What all of it takes."""
    return CudaBackend(read_model_config(base), "float32").weight_bytes


def asked(*experts: ForcedExpert, **route: object) -> RunRequest:
    wishes = SamplingOverrides(temperature=0.0, max_tokens=24)
    wanted = request(*experts, route={"base_alone": not experts, "device": "cuda", **route})
    return replace(wanted, route=replace(wanted.route, sampling=wishes))


def answer(
    user_home: HomeFixture,
    budget: int,
    *experts: ForcedExpert,
    moe: WarmupConfig | None = None,
    **route: object,
) -> tuple[RunResult, LocalEngine]:
    engine = LocalEngine(
        planner(user_home), budget=budget, device="cuda", moe=moe or WarmupConfig()
    )
    return run(engine, asked(*experts, **route)), engine


@pytest.mark.parametrize("dtype", get_args(Dtype)[:2])
def test_a_base_answers_the_same_in_less_memory_than_it_wants(
    dtype: Dtype, base: Path, user_home: HomeFixture, size: int
) -> None:
    user_home.bases.add(base)
    whole, engine = answer(user_home, FREE, dtype=dtype)
    held = engine.budget.reserved_bytes("base")
    engine.close()
    assert held == size if dtype == "float32" else held < size
    assert whole.numerics.backend == "cuda"
    assert whole.moe is not None
    assert whole.moe.residence.blocks == 3 * 12
    budget = held * {"float32": 85, "bf16": 115}[dtype] // 100  # buffers are not half as large
    partly, engine = answer(user_home, budget, dtype=dtype)
    assert partly.generated.tokens == whole.generated.tokens
    assert partly.moe is not None
    assert whole.moe.activity.requests == partly.moe.activity.requests > 0
    residence, activity = partly.moe.residence, partly.moe.activity
    assert 0 < residence.slots < 12
    assert residence.blocks == 3 * residence.slots + 12 - residence.slots
    assert activity.loads > 0
    assert activity.skipped_weight == 0
    assert engine.budget.peak <= budget
    engine.check_integrity()
    again = run(engine, asked(dtype=dtype))
    assert again.generated.tokens == whole.generated.tokens
    assert again.moe is not None
    assert again.moe.activity.loads < activity.loads, "what was read is still there"
    engine.close()
    assert engine.budget.used == 0


def test_it_answers_as_on_a_processor(base: Path, user_home: HomeFixture) -> None:
    user_home.bases.add(base)
    there, engine = answer(user_home, FREE)
    engine.close()
    here = LocalEngine(planner(user_home), budget=FREE, numpy_below=FREE)
    assert run(here, asked(device="cpu")).generated.tokens == there.generated.tokens
    here.close()


@pytest.mark.parametrize("targets", [ATTENTION, ROUTED], ids=["attention", "routed experts"])
def test_an_expert_changes_attention_and_routed_experts_that_come_and_go(
    targets: tuple[str, ...], base: Path, user_home: HomeFixture, tmp_path: Path, size: int
) -> None:
    user_home.bases.add(base)
    adapter = ("lora", {"targets": targets, "scale": 0.4, "seed": 7})
    user_home.install(
        EnginePackages(tmp_path / "market", base, read_base(base)).package(adapters=[adapter])
    )
    oracle = LocalEngine(planner(user_home), budget=FREE, numpy_below=FREE)
    theirs = run(oracle, asked(SQL, device="cpu"))
    alone = run(oracle, asked(device="cpu"))
    oracle.close()
    assert theirs.generated.tokens != alone.generated.tokens
    for budget in (FREE, size * 95 // 100):
        ours, engine = answer(user_home, budget, SQL)
        assert ours.generated.tokens == theirs.generated.tokens
        assert engine.budget.peak <= budget
        engine.check_integrity()
        engine.close()
    assert ours.moe is not None
    assert ours.moe.residence.slots < 12
    assert ours.moe.activity.misses > 0


def test_what_is_missing_is_left_out_where_that_was_asked_for(
    base: Path, user_home: HomeFixture, size: int
) -> None:
    user_home.bases.add(base)
    wishes = WarmupConfig(warmup="none", learns=False)
    budget = size * 85 // 100
    whole, engine = answer(user_home, FREE, moe=wishes)
    engine.close()
    skipping, engine = answer(user_home, budget, moe=wishes, moe_miss="skip", moe_skip_cap=1.0)
    engine.close()
    assert skipping.moe is not None
    assert skipping.moe.to_json()["miss"] == "skip"
    assert 0 < skipping.moe.activity.skipped_weight < skipping.moe.activity.router_weight, (
        "at first none is there"
    )
    assert skipping.planned.result.plan.identity != whole.planned.result.plan.identity
    capped, engine = answer(user_home, budget, moe=wishes, moe_miss="skip", moe_skip_cap=0.0)
    engine.close()
    assert capped.moe is not None
    assert capped.moe.activity.skipped_weight == 0
    assert capped.generated.tokens == whole.generated.tokens


def test_what_is_held_is_what_was_announced_in_both_memories(
    base: Path, user_home: HomeFixture, size: int
) -> None:
    user_home.bases.add(base)
    budget = size * 85 // 100
    _, engine = answer(user_home, budget)
    held = engine.budget.reserved_bytes("base")
    backend, _ = choose_backend(
        read_model_config(base), LoadConfig(engine=EngineConfig(device="cuda"), memory_limit=budget)
    )
    assert isinstance(backend, CudaBackend)
    assert backend.cache is not None
    asked = 8 * (3 * 12 + 2 * 3 + 1)  # who was chosen, where all are there
    rest = size - 3 * 12 * ONE - asked
    assert rest > ONE, "the dummy is among it"
    copies, numbers = 3 * ONE, 3 * (4 * 320 + 2 * 64 + 8) + 8 * 12  # of who is used, in graphs
    room = 4 * (4 * 64 + 3 * 64 + 3) + 8 * (3 * 3 + 1)  # what stages leave each other
    assert backend.piecewise_bytes == room + copies + 4 * numbers
    assert (
        held == backend.weight_bytes == rest + backend.cache.blocks * ONE + backend.piecewise_bytes
    )
    routed = backend.config.experts
    assert routed is not None
    # 245,760 bytes are pinned as the next power of two: so torch's host allocator gives them.
    assert ONE == 245_760
    # So are 48 bytes of ids and 12 of weights, of three experts that a token uses.
    received = 64 + 16
    ram = engine.tiers._budgets[Tier.RAM]
    assert (
        ram.reserved_bytes("base")
        == STAGING_BUFFERS * 262_144 + estimate_cache_metadata_bytes(routed) + received
    )
    engine.close()
    assert ram.reserved_bytes("base") == 0


def test_what_libraries_keep_is_paid_before_slots_are_given_out(
    base: Path, user_home: HomeFixture, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the usual stream and two owners of graphs; of one where all experts are there."""
    user_home.bases.add(base)
    budget, kept, blocks = size * 105 // 100, 2 * ONE, list[int]()
    for workspace in (0, kept):
        monkeypatch.setattr(devices, "get_workspace_bytes", lambda workspace=workspace: workspace)
        result, engine = answer(user_home, budget)
        assert result.moe is not None
        residence, held = result.moe.residence, engine.budget.reserved_bytes("base")
        backend, _ = choose_backend(
            read_model_config(base),
            LoadConfig(engine=EngineConfig(device="cuda"), memory_limit=budget),
        )
        assert isinstance(backend, CudaBackend)
        rest = backend.min_weight_bytes + backend.piecewise_bytes
        assert held == backend.weight_bytes == rest + residence.blocks * ONE + 3 * workspace
        assert engine.budget.peak <= budget
        engine.check_integrity()
        engine.close()
        blocks.append(residence.blocks)
    assert blocks[1] <= blocks[0] - 3
    whole = CudaBackend(read_model_config(base), "float32")
    assert whole.cache is None
    assert whole.weight_bytes == size + 2 * kept


@pytest.mark.parametrize(
    ("error", "kind", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), BudgetError, "less memory left"),
        (RuntimeError("CUDA error: unspecified launch failure"), ExpertError, "device failed"),
    ],
)
def test_a_copy_that_a_device_cannot_do_is_told_with_its_way_out_and_the_next_run_answers(
    error: RuntimeError,
    kind: type[ExpertError],
    said: str,
    base: Path,
    user_home: HomeFixture,
    size: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    user_home.bases.add(base)

    def fail(*_: object, **__: object) -> None:
        raise error

    for budget in (FREE, size * 85 // 100):  # all are brought; those who are missing
        engine = LocalEngine(planner(user_home), budget=budget, device="cuda")
        with monkeypatch.context() as broken:
            broken.setattr(CopyStream, "copy", fail)
            with pytest.raises(kind, match=said) as told:
                run(engine, asked())
        assert get_exit_code(told.value) == (7 if kind is BudgetError else 1)
        assert "--device cpu" in told.value.hint
        engine.check_integrity()
        assert run(engine, asked()).generated.tokens
        engine.close()


@pytest.mark.usefixtures("at_once")
def test_what_is_learnt_of_a_base_says_who_comes_first(
    base: Path, user_home: HomeFixture, size: int
) -> None:
    user_home.bases.add(base)
    budget, loads = size * 85 // 100, []
    full: Warmup = "full"
    for _ in range(2):
        result, engine = answer(user_home, budget, moe=WarmupConfig(warmup=full))
        assert engine.take_notes() == ()
        engine.close()
        assert result.moe is not None
        loads.append(result.moe.activity)
    assert loads[1].misses < loads[0].misses


@pytest.mark.usefixtures("at_once")
def test_what_a_base_that_is_whole_was_asked_for_says_who_comes_first(
    base: Path, user_home: HomeFixture, size: int
) -> None:
    user_home.bases.add(base)
    full, misses = WarmupConfig(warmup="full"), list[int]()
    for budget in (size * 85 // 100, FREE, size * 85 // 100):
        wishes = full if misses else replace(full, learns=False)
        result, engine = answer(user_home, budget, moe=wishes)
        engine.close()
        assert engine.take_notes() == ()
        assert result.moe is not None
        misses.append(result.moe.activity.misses)
    assert misses[2] < misses[0]


def test_memory_for_less_than_one_layer_is_refused_with_a_way_out(
    base: Path, user_home: HomeFixture
) -> None:
    user_home.bases.add(base)
    with pytest.raises(BudgetError) as caught:
        answer(user_home, 6 * ONE)
    assert "--memory-budget" in caught.value.hint


@pytest.mark.parametrize("room", [None, 20 * ONE])
@pytest.mark.parametrize("dtype", get_args(Dtype)[:2])
def test_weights_take_what_was_announced(
    dtype: Dtype, room: int | None, base: Path, tmp_path: Path
) -> None:
    backend, _ = choose_backend(
        read_model_config(base),
        LoadConfig(dtype, engine=EngineConfig(device="cuda"), memory_limit=room),
    )
    read: list[int] = []
    around = LoadContext(directory=base, home=Home(tmp_path))
    model = backend.load(around, progress=read.append)
    assert model.nbytes == backend.weight_bytes
    assert (backend.cache is None) == (room is None)
    assert (model.experts is None) == (backend.cache is None)
    assert model.counters is not None
    assert sum(read) <= model.nbytes
    gate = "model.layers.1.mlp.experts.5.gate_proj"
    assert tuple(model.matrix(gate).shape) == (320, 64)
    model.close()
