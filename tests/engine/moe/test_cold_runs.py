"""Whole runs of a base whose experts lie on the disk as they were packed, read or mapped."""

from dataclasses import replace
from pathlib import Path

import pytest

from expertctl.engine.cpu import tensor_packing
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.result import RunResult
from expertctl.engine_config import Dtype
from expertctl.store.quantised_cache import QuantisedCache, open_quantised_cache
from tests.engine.test_local_engine import planner, request, run
from tests.factories import write_base
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["fast", "user_home"]

pytestmark = pytest.mark.all

LARGE = 512 << 20


@pytest.fixture(autouse=True)
def one_packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What packing takes besides is small beside such bases, on whatever machine."""
    monkeypatch.setattr(tensor_packing, "_MAX_THREADS", 1)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Nearly all of it is routed experts: 4 layers of 48, each 442 KB."""
    return write_base(
        tmp_path_factory.mktemp("routed") / "base",
        arch="qwen3_moe",
        tie=False,
        seed=2,
        layers=4,
        hidden=64,
        head_dim=16,
        dtype="bfloat16",
        num_experts=48,
        num_experts_per_tok=4,
        moe_intermediate_size=1152,
    )


def answer(user_home: HomeFixture, budget: int, **route: object) -> tuple[RunResult, int]:
    """Run in an engine of its own; return what its base took, too."""
    engine = LocalEngine(planner(user_home), budget=budget, numpy_below=0)
    asked = request(route={"base_alone": True, **route})
    wishes = replace(asked.route.sampling, max_tokens=24)
    result = run(engine, replace(asked, route=replace(asked.route, sampling=wishes)))
    size = engine.budget.reserved_bytes("base")
    engine.close()
    assert engine.budget.peak <= budget
    return result, size


def little(size: int) -> int:
    """Memory that a base of a size does not leave enough of for anything else."""
    return size * 11 // 10


def copies_at(user_home: HomeFixture, base: Path) -> QuantisedCache:
    found = open_quantised_cache(user_home.bases, user_home.bases.add(base))
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("dtype", "deterministic"),
    [("float32", False), ("float32", True), ("bf16", False), ("int8", False), ("int4", False)],
)
def test_tokens_are_the_same_read_mapped_and_whole(
    dtype: Dtype, deterministic: bool, base: Path, user_home: HomeFixture
) -> None:
    copies = copies_at(user_home, base)
    route = {"dtype": dtype, "deterministic": deterministic}
    whole, size = answer(user_home, LARGE, **route)
    budget = little(size)
    for cold in ("read", "map", "map", "direct"):
        partly, _ = answer(user_home, budget, **route, moe_cold=cold)
        assert partly.generated.tokens == whole.generated.tokens
        assert partly.planned.result.plan.identity == whole.planned.result.plan.identity
        assert partly.moe is not None
        told = partly.moe.to_json()
        assert told["cold"] == cold
        assert cold == "map" or partly.moe.activity.mapped == 0
        assert partly.warnings == whole.warnings
    copies.check_integrity()


@pytest.mark.parametrize("cold", ["read", "map"])
def test_a_copy_is_made_once_and_then_only_what_is_no_expert_is_read_to_begin(
    cold: str, base: Path, user_home: HomeFixture
) -> None:
    copies, size = copies_at(user_home, base), answer(user_home, LARGE, dtype="float32")[1]
    dtype = "int8" if cold == "read" else "float32"
    budget = little(size) if cold == "map" else little(size) // 4
    first, _ = answer(user_home, budget, dtype=dtype, moe_cold=cold)
    made = copies.path(dtype).stat()
    again, _ = answer(user_home, budget, dtype=dtype, moe_cold=cold)
    assert copies.path(dtype).stat().st_mtime_ns == made.st_mtime_ns
    assert again.generated.tokens == first.generated.tokens
    begun = []
    for result in (first, again):
        assert result.moe is not None
        begun.append(result.bytes_read.ssd - result.moe.activity.read_bytes)
    assert begun[1] < begun[0] // 4
    assert copies.take_notes() == ()


def test_floats_that_are_only_read_have_no_copy_unless_it_is_shorter(
    base: Path, user_home: HomeFixture
) -> None:
    copies, size = copies_at(user_home, base), answer(user_home, LARGE, dtype="float32")[1]
    for cold in ("read", "auto"):
        answer(user_home, little(size), dtype="float32", moe_cold=cold)
    assert not copies.path("float32").exists()
    answer(user_home, little(size) // 2, dtype="bf16")
    assert copies.path("bfloat16").stat().st_size < 0.75 * base_bytes(base)


def test_the_same_memory_holds_more_of_compact_experts(base: Path, user_home: HomeFixture) -> None:
    """Of bfloat16, whose experts take 11.5 of 16 bits here."""
    copies_at(user_home, base)
    size = answer(user_home, LARGE, dtype="bf16")[1]
    partly, held = answer(user_home, little(size), dtype="bf16")
    assert partly.moe is not None
    expert = 3 * 64 * 1152 * 2
    experts = partly.moe.residence.blocks * expert
    rest = size - 4 * 48 * expert
    assert experts > 1.3 * (held - rest), "more than these bytes hold of others"


def base_bytes(base: Path) -> int:
    return sum(path.stat().st_size for path in base.glob("*.safetensors"))


def test_a_damaged_expert_is_told_in_the_run_that_needs_it_and_mended_by_the_next(
    base: Path, user_home: HomeFixture
) -> None:
    copies, size = copies_at(user_home, base), answer(user_home, LARGE, dtype="int8")[1]
    budget, path = little(size), copies.path("int8")
    whole, _ = answer(user_home, budget, dtype="int8")
    content = bytearray(path.read_bytes())
    for begin in range(len(content) // 2, len(content) - 8192, 8192):
        content[begin] ^= 1
    path.write_bytes(content)
    damaged, _ = answer(user_home, budget, dtype="int8")
    told = f"{path} is not used any more (it is damaged): made again next time"
    assert told in damaged.warnings
    assert damaged.generated.tokens == whole.generated.tokens
    assert not path.exists()
    mended, _ = answer(user_home, budget, dtype="int8")
    assert mended.warnings == whole.warnings
    assert mended.generated.tokens == whole.generated.tokens
    copies.check_integrity()


def test_what_is_found_damaged_in_a_later_run_of_an_engine_is_told_there(
    base: Path, user_home: HomeFixture
) -> None:
    copies, size = copies_at(user_home, base), answer(user_home, LARGE, dtype="int8")[1]
    engine = LocalEngine(planner(user_home), budget=little(size), numpy_below=0)
    first = run(engine, request(route={"base_alone": True, "dtype": "int8"}))
    path = copies.path("int8")
    content = bytearray(path.read_bytes())
    for begin in range(0, len(content) - 8192, 2048):
        content[begin] ^= 1
    with path.open("r+b") as stream:
        stream.write(content)
    other = request(route={"base_alone": True, "dtype": "int8"}, prompt="Other words, 7 of them")
    later = run(engine, other)
    engine.close()
    told = f"{path} is not used any more (it is damaged): made again next time"
    assert told not in first.warnings
    assert told in later.warnings
