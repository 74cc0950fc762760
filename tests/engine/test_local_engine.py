"""Whole runs in one process: one budget, experts found again, every refusal before any text."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from expertctl.engine.generation import CancelCheck, never_cancelled
from expertctl.engine.load_plan import read_local_outline
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.preparation import (
    Files,
    PreparedRequest,
    estimate_most_bytes,
    list_expert_files,
    list_needs,
    open_planned_base,
    plan_request,
    prepare_for_base,
)
from expertctl.engine.request import FileExpert, NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.errors import (
    BaseMismatchError,
    BudgetError,
    DigestError,
    ExpertError,
    RevokedError,
    TrustError,
    UsageError,
)
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert
from expertctl.routing.session import PlanningSession
from expertctl.schema.validation import find_problems
from expertctl.settings import Home, Settings
from expertctl.user_request import PROMPT_NOT_IN_TEMPLATE, SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.factories import make_route_request, write_base
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["engine_packages", "fast", "user_home"]

PROMPT = "Sort: 3, 1, 2"
WISHES = SamplingOverrides(greedy=True, max_tokens=6)
SQL = ForcedExpert(Reference.parse("acme/sql"))


@pytest.fixture(autouse=True)
def known(user_home: HomeFixture, engine_packages: EnginePackages) -> None:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")


def planner(user_home: HomeFixture) -> Planner:
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


@pytest.fixture
def engine(user_home: HomeFixture) -> LocalEngine:
    return LocalEngine(planner(user_home), budget=8 << 20)


def request(*experts: NamedExpert, prompt: str = PROMPT, **options: Any) -> RunRequest:
    given = {"seed": 0, "sampling": WISHES, **options.pop("route", {})}
    route = make_route_request(prompt=prompt, **given)
    message = UserMessage(prompt=prompt)
    return RunRequest(message=message, route=route, experts=experts, **options)


def run(
    engine: LocalEngine, wanted: RunRequest, *, cancelled: CancelCheck = never_cancelled
) -> RunResult:
    pieces, stream = [], engine.run(wanted, cancelled=cancelled)
    while True:
        try:
            pieces.append(next(stream))
        except StopIteration as end:
            result = end.value
            break
    assert isinstance(result, RunResult)
    assert "".join(pieces) == result.generated.text
    assert find_problems(result.to_json(), "run") == []
    engine.check_integrity()
    return result


def test_a_run_accounts_for_every_byte_and_gives_back_what_it_borrowed(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    result = run(engine, request(SQL))
    held = result.memory.held
    pages = -(-(result.prompt_tokens + 6) // 16)
    assert held["kv"] == 2 * 2 * 2 * 8 * 4 * 16 * pages
    assert min(held.values()) > 0
    assert sum(held.values()) <= result.memory.peak <= result.memory.budget == 8 << 20
    assert engine.budget.used == held["base"] + held["experts"]


def test_an_expert_changes_the_answer_and_is_found_again(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    alone = run(engine, request(route={"base_alone": True}))
    first = run(engine, request(SQL))
    second = run(engine, request(SQL))
    assert first.generated.tokens == second.generated.tokens != alone.generated.tokens
    assert first.planned.result.plan.identity != alone.planned.result.plan.identity
    assert [r.to_json()["cache"] for r in (alone, first, second)] == [
        {"experts_hit": 0, "experts_loaded": 0, "kv_reused_tokens": 0},
        {"experts_hit": 0, "experts_loaded": 1, "kv_reused_tokens": 0},
        {"experts_hit": 1, "experts_loaded": 0, "kv_reused_tokens": 0},
    ]


def test_weights_and_order_reach_the_numbers(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(
        engine_packages.package("acme/one", seed=1), engine_packages.package("acme/two", seed=2)
    )
    one, two = (ForcedExpert(Reference.parse(f"acme/{name}"), 0.5) for name in ("one", "two"))

    def plan(*experts: ForcedExpert) -> tuple[int, ...]:
        return run(engine, request(*experts)).generated.tokens

    assert plan(one, two) == plan(two, one)
    assert (
        plan(replace(one, weight=0.0))
        == run(engine, request(route={"base_alone": True})).generated.tokens
    )


def test_below_the_threshold_the_base_answers_alone_and_says_so(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package(description="Writes SQL queries."))
    result = run(engine, request(prompt="Guten Morgen"))
    assert result.planned.experts == ()
    assert any(w.startswith("the base answers alone: ") for w in result.warnings)
    asked = run(engine, request(route={"base_alone": True}))
    assert asked.warnings == ()
    assert asked.planned.result.notes == ("the base answers alone, as asked",)


def test_uses_are_counted(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    run(engine, request(SQL))
    run(engine, request(SQL))
    usage = user_home.catalogue.history.read_usage_counts().get(installed.expert.content_digest)
    assert usage is not None
    assert usage.uses == 2


def test_a_read_only_home_answers_and_says_that_the_use_was_not_recorded(
    user_home: HomeFixture, engine_packages: EnginePackages, monkeypatch: pytest.MonkeyPatch
) -> None:
    user_home.install(engine_packages.package())
    home = planner(user_home)
    home.catalogue.database.path = Path("/proc/nowhere/index.db")
    result = run(LocalEngine(home, budget=8 << 20), request(SQL))
    assert result.generated.tokens
    assert any("was not recorded" in warning for warning in result.warnings)


def test_a_file_is_used_without_installing_it(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    path = engine_packages.package(key=None)
    before = user_home.read_files()
    from_file = run(engine, request(FileExpert(path, 0.5)))
    assert user_home.read_files() == before
    assert any("unsigned" in warning for warning in from_file.warnings)
    assert engine.budget.reserved_bytes("experts") == 0
    user_home.install(path, allow_unsigned=True)
    installed = run(engine, request(replace(SQL, weight=0.5)))
    assert installed.generated.tokens == from_file.generated.tokens


def test_a_signed_file_of_a_stranger_is_refused(
    engine: LocalEngine, engine_packages: EnginePackages
) -> None:
    with pytest.raises(TrustError):
        run(engine, request(FileExpert(engine_packages.package(key="stranger"))))
    engine.check_integrity()


def test_a_key_revoked_since_the_install_is_refused(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    run(engine, request(SQL))
    user_home.trust.revoke(make_key("acme").public.key_id)
    with pytest.raises(RevokedError):
        run(engine, request(SQL))
    with pytest.raises(RevokedError):
        run(engine, request(FileExpert(engine_packages.package())))


def test_weights_changed_in_the_store_are_refused(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    [installed] = user_home.install(engine_packages.package())
    blob = user_home.store.blob_path(installed.expert.find_file("adapter_model.safetensors").digest)
    data = bytearray(blob.read_bytes())
    data[-1] ^= 1
    blob.chmod(0o644)
    blob.write_bytes(data)
    with pytest.raises(DigestError, match=r"acme/sql@1\.0\.0"):
        run(engine, request(SQL))
    engine.check_integrity()


def test_a_base_changed_on_disk_is_refused(user_home: HomeFixture, tmp_path: Path) -> None:
    directory = write_base(tmp_path / "mine", layers=1)
    user_home.bases.add(directory)
    weights = directory / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(BaseMismatchError, match=r"model\.safetensors"):
        run(LocalEngine(planner(user_home), budget=8 << 20), request(base="mine"))


def prepare_alone(
    user_home: HomeFixture, asked: RunRequest
) -> tuple[Planner, PreparedRequest, Files]:
    home = planner(user_home)
    files = {path: read_local_outline(path, trust=home.trust) for path in list_expert_files(asked)}
    planned = plan_request(PlanningSession(home), asked, files)
    base = open_planned_base(home, asked, planned)
    return home, prepare_for_base(base, home, asked, planned, files), files


def find_least_budget(user_home: HomeFixture, asked: RunRequest) -> int:
    """Return the estimate of a request's memory, in which it is answered; one byte less refuses."""
    home, prepared, files = prepare_alone(user_home, asked)
    least = sum(need.size for need in list_needs(home, prepared, files))
    with pytest.raises(BudgetError):
        run(LocalEngine(home, budget=least - 1), asked)
    assert run(LocalEngine(home, budget=least), asked).memory.peak == least
    return least


@pytest.mark.parametrize("count", [1, 2])
def test_the_most_that_a_run_takes_is_what_it_takes_with_room_for_all(
    count: int, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    names = ["acme/one", "acme/two"][:count]
    user_home.install(*(engine_packages.package(name, seed=n) for n, name in enumerate(names)))
    asked, room = request(*(ForcedExpert(Reference.parse(name)) for name in names)), 64 << 20
    home, prepared, files = prepare_alone(user_home, asked)
    most = estimate_most_bytes(home, prepared, files, limit=room)
    assert run(LocalEngine(home, budget=room), asked).memory.peak == most
    least = sum(need.size for need in list_needs(home, prepared, files))
    assert estimate_most_bytes(home, prepared, files, limit=least) == least


def test_a_run_fits_exactly_and_with_one_byte_less_says_what_does_not(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    memory = run(engine, request(SQL)).memory
    least, base = find_least_budget(user_home, request(SQL)), memory.held["base"]
    assert memory.peak - memory.held["experts"] <= least <= memory.peak, "experts were evicted"
    limits = {
        "the base": base,
        "the KV cache": base + memory.held["kv"],
        "the buffers": least,
    }
    for what, limit in limits.items():
        small = LocalEngine(planner(user_home), budget=limit - 1)
        with pytest.raises(BudgetError, match=f"{what}.* needed, .* of the budget of") as caught:
            run(small, request(SQL))
        assert "--memory-budget" in caught.value.hint
        small.check_integrity()


def test_a_prompt_beyond_the_context_is_refused_or_cut_as_asked(engine: LocalEngine) -> None:
    long = "x" * 600
    with pytest.raises(UsageError, match="the context of the base is 512"):
        run(engine, request(prompt=long))
    result = run(engine, request(prompt=long, truncate=True))
    assert result.prompt_tokens == 512 - 6
    assert any("the prompt was cut" in warning for warning in result.warnings)


def test_max_tokens_end_at_the_context(engine: LocalEngine) -> None:
    long = request(prompt="x" * 480)
    wishes = replace(WISHES, max_tokens=100)
    result = run(engine, replace(long, route=replace(long.route, sampling=wishes)))
    assert result.prompt_tokens + len(result.generated.tokens) == 512
    assert "the answer ended because the context of 512 tokens is full" in result.warnings
    assert not any("is full" in w for w in run(engine, long).warnings)


def test_another_base_takes_the_place_of_the_first(
    engine: LocalEngine, user_home: HomeFixture, tmp_path: Path
) -> None:
    user_home.bases.add(write_base(tmp_path / "mine", layers=2, seed=5))
    one = run(engine, request(base="market-base"))
    other = run(engine, request(base="mine"))
    assert one.generated.tokens != other.generated.tokens
    assert run(engine, request(base="market-base")).generated.tokens == one.generated.tokens


def test_a_refused_run_leaves_the_engine_usable(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    with pytest.raises(ExpertError):
        run(engine, request(SQL))
    user_home.install(engine_packages.package())
    assert run(engine, request(SQL)).generated.tokens


def test_a_run_that_is_given_up_gives_everything_back(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    user_home.install(engine_packages.package())
    threads = torch.get_num_threads()
    stream = engine.run(request(SQL))
    next(stream)
    assert engine.budget.reserved_bytes("kv") > 0
    stream.close()
    engine.check_integrity()
    assert torch.get_num_threads() == threads


def test_a_template_without_the_prompt_is_told(engine: LocalEngine) -> None:
    wanted = replace(request(), message=UserMessage(prompt=PROMPT, template="Hello"))
    assert PROMPT_NOT_IN_TEMPLATE in run(engine, wanted).warnings


def test_one_seed_gives_one_text(engine: LocalEngine) -> None:
    def text(seed: int) -> tuple[int, ...]:
        wanted = request()
        wishes = SamplingOverrides(temperature=1.5, top_p=1.0, max_tokens=20)
        route = replace(wanted.route, seed=seed, sampling=wishes)
        return run(engine, replace(wanted, route=route)).generated.tokens

    assert text(1) == text(1) != text(2)


def test_the_tokens_of_a_prompt_are_counted_while_it_is_read(
    user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    seen = list[tuple[int, int]]()
    engine = LocalEngine(planner(user_home), reading=lambda *count: seen.append(count))
    result = run(engine, request(prompt="x" * 300))
    total = result.prompt_tokens
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert seen == sorted(seen)
    assert {each for _, each in seen} == {total}
