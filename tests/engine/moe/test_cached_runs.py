"""Whole runs on bases of routed experts that are larger than the memory that they are given."""

import shutil
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from expertctl.engine.adapters.experts import estimate_dora_scratch
from expertctl.engine.backend import LoadConfig, LoadContext
from expertctl.engine.cpu.backend import PackedBackend
from expertctl.engine.cpu.packed_base import make_expert_shape
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.request import RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine_config import Dtype
from expertctl.errors import BudgetError
from expertctl.package.base_model import read_base
from expertctl.package.model_config import read_model_config
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from expertctl.schema.manifest import AdapterKind
from expertctl.settings import Home
from expertctl.user_request import SamplingOverrides
from tests.engine.package_fixtures import EnginePackages, load_adapters
from tests.engine.test_local_engine import planner, request, run
from tests.engine.test_packed_runs import after
from tests.factories import write_base, write_dora
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "user_home"]

pytestmark = pytest.mark.all

LARGE = 256 << 20
SQL = ForcedExpert(Reference.parse("acme/sql"))
PARTS = ("gate_proj", "up_proj", "down_proj")
ENDS = (("model.layers.0", 0), ("model.layers.3", 31))
CHANGED = ("q_proj", *(f"experts.{number}.{part}" for number in range(0, 32, 3) for part in PARTS))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it is routed experts: 4 layers of 32, each 885 KB in float32."""
    return write_base(
        tmp_path_factory.mktemp("routed") / "base",
        arch="qwen3_moe",
        tie=False,
        seed=2,
        layers=4,
        hidden=64,
        head_dim=16,
        num_experts=32,
        num_experts_per_tok=4,
        moe_intermediate_size=1152,
    )


def answer(
    user_home: HomeFixture, budget: int, *experts: ForcedExpert, **route: object
) -> tuple[RunResult, LocalEngine]:
    engine = LocalEngine(planner(user_home), budget=budget, numpy_below=0)
    return run(engine, asked(*experts, **route)), engine


def asked(*experts: ForcedExpert, **route: object) -> RunRequest:
    wishes = SamplingOverrides(temperature=0.0, max_tokens=24)
    prompt = "Sort these numbers: 3, 1, 2"  # one whose answer is no end at once, in any dtype
    wanted = request(*experts, prompt=prompt, route={"base_alone": True, **route})
    return replace(wanted, route=replace(wanted.route, sampling=wishes))


@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_a_base_answers_the_same_in_less_memory_than_it_takes(
    dtype: str, base: Path, user_home: HomeFixture
) -> None:
    user_home.bases.add(base)
    whole, engine = answer(user_home, LARGE, dtype=dtype)
    size = engine.budget.reserved_bytes("base")
    engine.close()
    assert whole.moe is not None
    assert whole.moe.residence.blocks == 4 * 32
    assert len(whole.generated.tokens) == 24
    budget = size * 9 // 10
    partly, engine = answer(user_home, budget, dtype=dtype)
    assert partly.generated.tokens == whole.generated.tokens
    assert partly.moe is not None
    residence, activity = partly.moe.residence, partly.moe.activity
    assert residence.miss == "exact"
    assert 0 < residence.slots < 32
    planned = 4 * residence.slots + 32 - residence.slots
    assert residence.blocks == planned if dtype == "float32" else residence.blocks > 1.3 * planned
    assert activity.loads > 0
    assert 0 < activity.misses <= activity.requests
    assert activity.skipped_weight == 0
    assert engine.budget.peak <= budget
    engine.check_integrity()
    again = run(engine, asked(dtype=dtype))
    assert again.generated.tokens == whole.generated.tokens
    assert again.moe is not None
    assert again.moe.activity.loads < activity.loads, "what was read is still there"
    assert again.moe.activity.misses < again.moe.activity.requests
    engine.close()
    assert engine.budget.used == 0


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_an_expert_changes_routed_experts_that_come_and_go(
    kind: AdapterKind, base: Path, user_home: HomeFixture, tmp_path: Path
) -> None:
    """Torch, with all of it in memory, says what kernels with a part of it must answer."""
    user_home.bases.add(base)
    adapter = (kind, {"targets": CHANGED, "scale": 0.4, "seed": 7})
    user_home.install(
        EnginePackages(tmp_path / "market", base, read_base(base)).package(adapters=[adapter])
    )
    oracle = LocalEngine(planner(user_home), budget=LARGE, numpy_below=LARGE)
    theirs, alone = run(oracle, asked(SQL, base_alone=False)), run(oracle, asked())
    size = oracle.budget.reserved_bytes("base")
    oracle.close()
    assert theirs.generated.tokens != alone.generated.tokens
    for budget in (LARGE, size * 8 // 10):
        shutil.rmtree(user_home.store.paths.derived, ignore_errors=True)  # nobody knows its gains
        ours, engine = answer(user_home, budget, SQL, base_alone=False)
        assert ours.generated.tokens == theirs.generated.tokens
        assert engine.budget.peak <= budget
        engine.check_integrity()
        engine.close()
    assert ours.moe is not None
    assert ours.moe.residence.slots < 32
    assert ours.moe.activity.misses > 0


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_a_matrix_of_a_routed_expert_that_comes_and_goes_is_read_and_what_that_takes_is_counted(
    dtype: Dtype, base: Path, tmp_path: Path
) -> None:
    config = read_model_config(base)
    whole = PackedBackend.choose(config, LoadConfig(dtype))
    partly = PackedBackend.choose(
        config, LoadConfig(dtype, memory_limit=whole.weight_bytes * 8 // 10)
    )
    around = LoadContext(directory=base, home=Home(tmp_path))
    modules = [f"{at}.mlp.experts.{n}.{part}" for at, n in ENDS for part in PARTS]
    with closing(whole.load(around)) as theirs, closing(partly.load(around)) as ours:
        for module in (*modules, "model.layers.1.self_attn.q_proj", "lm_head"):
            np.testing.assert_array_equal(ours.matrix(module), theirs.matrix(module))
    adapter = load_adapters(
        write_dora(tmp_path / "d", base, rank=2, targets=["experts.0.down_proj"])
    )
    more = estimate_dora_scratch(adapter, partly.compile_spec) - estimate_dora_scratch(
        adapter, whole.compile_spec
    )
    assert more == make_expert_shape(config, partly.scheme).nbytes


def test_a_result_tells_of_it_in_its_document(base: Path, user_home: HomeFixture) -> None:
    user_home.bases.add(base)
    result, engine = answer(user_home, LARGE)
    engine.close()
    told = result.to_json()["moe"]
    assert isinstance(told, dict)
    assert (told["miss"], told["experts"], told["slots"], told["loads"]) == ("exact", 32, 32, 0)


def test_memory_for_less_than_one_layer_is_refused_with_a_way_out(
    base: Path, user_home: HomeFixture
) -> None:
    user_home.bases.add(base)
    config = read_model_config(base)
    assert config.experts is not None
    one_layer = 32 * 3 * 64 * config.experts.intermediate_size * 4
    with pytest.raises(BudgetError) as caught:
        answer(user_home, one_layer // 2)
    assert "--memory-budget" in caught.value.hint


def test_what_is_missing_is_left_out_where_that_was_asked_for(
    base: Path, user_home: HomeFixture
) -> None:
    user_home.bases.add(base)
    whole, engine = answer(user_home, LARGE)
    budget = engine.budget.reserved_bytes("base") * 8 // 10
    engine.close()
    skipping, engine = answer(user_home, budget, moe_miss="skip", moe_skip_cap=1.0)
    engine.close()
    assert skipping.moe is not None
    told = skipping.moe.to_json()
    assert told["miss"] == "skip"
    assert 0 < skipping.moe.activity.skipped_weight < skipping.moe.activity.router_weight, (
        "at first none is there"
    )
    assert skipping.planned.result.plan.identity != whole.planned.result.plan.identity
    capped, engine = answer(user_home, budget, moe_miss="skip", moe_skip_cap=0.0)
    engine.close()
    assert capped.moe is not None
    assert capped.moe.activity.skipped_weight == 0
    assert capped.generated.tokens == whole.generated.tokens


def test_a_text_that_was_read_with_larger_gaps_is_no_start_under_a_smaller_cap(
    base: Path, user_home: HomeFixture
) -> None:
    user_home.bases.add(base)
    whole, engine = answer(user_home, LARGE)
    budget = engine.budget.reserved_bytes("base") * 8 // 10
    engine.close()
    engine = LocalEngine(planner(user_home), budget=budget, numpy_below=0)

    def ask(cap: float) -> RunResult:
        return run(engine, replace(asked(moe_miss="skip", moe_skip_cap=cap), cache_key="chat"))

    first, again, capped = ask(1.0), ask(1.0), ask(0.0)
    engine.close()
    assert first.moe is not None
    assert first.moe.activity.skipped_weight > 0
    assert again.kv_reused_tokens > 0
    assert capped.kv_reused_tokens == 0
    assert capped.generated.tokens == whole.generated.tokens


def test_a_small_base_answers_with_the_same_bits_in_any_memory(
    base: Path, user_home: HomeFixture
) -> None:
    """What is chosen by size alone must not depend on how much of a base fits."""
    user_home.bases.add(base)
    results = []
    for budget in (LARGE, 64 << 20):
        engine = LocalEngine(planner(user_home), budget=budget)
        results.append(run(engine, asked(dtype="bf16")))
        engine.close()
    whole, partly = results
    for each, held in ((whole, 4 * 32), (partly, 0)):
        assert each.moe is not None
        assert each.moe.activity.requests > 0, "counted where all fit, too"
        assert each.moe.residence.slots == 32 or held == 0
    assert whole.planned.result.plan.identity == partly.planned.result.plan.identity
    assert whole.generated.tokens == partly.generated.tokens != ()
    assert partly.moe is not None
    assert partly.moe.residence.slots < 32


@pytest.mark.parametrize("tokens", [None, 24])
@pytest.mark.parametrize("dtype", ["bf16", "int4", pytest.param("float32", marks=pytest.mark.all)])
def test_whoever_runs_in_a_memory_runs_in_a_larger_one(
    dtype: Dtype, tokens: int | None, base: Path, user_home: HomeFixture
) -> None:
    """Short texts, and one that is asked for without further wishes, which is as long as can be."""
    user_home.bases.add(base)
    ran, wanted = [], asked(dtype=dtype)
    wishes = replace(wanted.route.sampling, max_tokens=tokens)
    wanted = replace(wanted, route=replace(wanted.route, sampling=wishes))
    for megabytes in range(20, 180, 4):
        engine = LocalEngine(planner(user_home), budget=megabytes * 10**6)
        try:
            result = run(engine, wanted, cancelled=after(3))
        except BudgetError:
            ran.append(False)
        else:
            ran.append(True)
            assert engine.budget.peak <= megabytes * 10**6
            assert result.generated.tokens
        finally:
            engine.close()
    assert ran == sorted(ran)
    assert ran[-1]
