"""Whole runs with every kind of expert, alone and in chains, from packages that were installed."""

from collections.abc import Callable
from typing import Any

import pytest

from expertctl.engine.local_engine import LocalEngine
from expertctl.errors import IncompatibleError
from expertctl.reference import Reference
from expertctl.routing.request import ForcedExpert
from tests.engine.package_fixtures import EnginePackages, engine_packages
from tests.engine.test_local_engine import engine, known, planner, request, run
from tests.store.fixtures import HomeFixture, fast, user_home

__all__ = ["engine", "engine_packages", "fast", "known", "user_home"]

OPTIONS: dict[str, dict[str, Any]] = {
    "lora": {"scale": 0.4},
    "dora": {"scale": 0.4},
    "ia3": {"scale": 0.9},
    "soft_prompt": {"tokens": 5, "scale": 2.0},
}
Install = Callable[..., None]


def expert(name: str, weight: float = 1.0) -> ForcedExpert:
    return ForcedExpert(Reference.parse(f"acme/{name.replace('_', '-')}"), weight)


@pytest.fixture
def install(user_home: HomeFixture, engine_packages: EnginePackages) -> Install:
    def add(*kinds: str, name: str | None = None) -> None:
        adapters = [(kind, {"seed": n, **OPTIONS[kind]}) for n, kind in enumerate(kinds)]
        label = name or kinds[0].replace("_", "-")
        user_home.install(
            engine_packages.package(f"acme/{label}", seed=hash(kinds) % 997, adapters=adapters)
        )

    return add


@pytest.mark.parametrize("kind", OPTIONS)
def test_an_expert_of_each_kind_changes_the_answer(
    kind: str, engine: LocalEngine, install: Install
) -> None:
    install(kind)
    alone = run(engine, request(route={"base_alone": True}))
    result = run(engine, request(expert(kind)))
    assert result.generated.tokens != alone.generated.tokens
    assert [e.kind for e in result.planned.result.plan.experts] == [kind]
    assert run(engine, request(expert(kind))).generated.tokens == result.generated.tokens
    nothing = run(engine, request(expert(kind, 0.0)))
    assert nothing.generated.tokens == alone.generated.tokens


def test_the_order_of_a_chain_counts(engine: LocalEngine, install: Install) -> None:
    for kind in OPTIONS:
        install(kind)
    names = list(OPTIONS)
    texts = {
        run(engine, request(*(expert(kind) for kind in order))).generated.tokens
        for order in (names, names[::-1], [*names[1:], names[0]])
    }
    assert len(texts) > 1


def test_a_package_of_several_kinds_equals_the_chain_of_packages_of_one(
    engine: LocalEngine, user_home: HomeFixture, engine_packages: EnginePackages
) -> None:
    adapters = [("dora", {"seed": 1, "scale": 0.4}), ("soft_prompt", {"tokens": 3, "scale": 2.0})]
    adapters += [("ia3", {"seed": 2, "scale": 0.9})]
    user_home.install(engine_packages.package("acme/all", seed=50, adapters=adapters))
    for n, (kind, options) in enumerate(adapters):
        user_home.install(
            engine_packages.package(f"acme/one{n}", seed=60 + n, adapters=[(kind, options)])
        )
    together = run(engine, request(expert("all")))
    apart = run(engine, request(*(expert(f"one{n}") for n in range(3))))
    assert together.generated.tokens == apart.generated.tokens
    assert [e.kind for e in together.planned.result.plan.experts] == ["dora+soft_prompt+ia3"]


def test_virtual_tokens_take_room_and_are_no_tokens_of_the_prompt(
    engine: LocalEngine, install: Install
) -> None:
    install("soft_prompt")
    alone = run(engine, request(route={"base_alone": True}))
    result = run(engine, request(expert("soft_prompt")))
    assert result.prompt_tokens == alone.prompt_tokens
    for one, virtual in ((alone, 0), (result, 5)):
        pages = -(-(one.prompt_tokens + 6 + virtual) // 16)
        assert one.memory.held["kv"] == 2 * 2 * 2 * 8 * 4 * 16 * pages


@pytest.mark.parametrize("weight", [0.5, -1.0, 1.5])
def test_a_soft_prompt_with_a_weight_is_refused_and_leaves_the_engine_usable(
    weight: float, engine: LocalEngine, install: Install
) -> None:
    install("lora", "soft_prompt", name="both")
    with pytest.raises(IncompatibleError, match="no weight but 1"):
        run(engine, request(expert("both", weight)))
    engine.check_integrity()
    assert run(engine, request(expert("both"))).generated.tokens


def test_the_gains_of_dora_are_kept_in_the_store_until_its_package_is_gone(
    engine: LocalEngine, user_home: HomeFixture, install: Install
) -> None:
    install("dora")
    first = run(engine, request(expert("dora")))
    [folder] = user_home.store.paths.derived.iterdir()
    [kept] = folder.iterdir()
    before = kept.stat().st_mtime_ns
    another = LocalEngine(planner(user_home), budget=8 << 20)
    assert run(another, request(expert("dora"))).generated.tokens == first.generated.tokens
    assert kept.stat().st_mtime_ns == before
    user_home.store.collect_garbage()
    assert kept.exists()
    [stored] = user_home.store.list_experts()
    user_home.store.remove(stored)
    user_home.store.collect_garbage()
    assert not folder.exists()


def test_a_base_in_another_dtype_gets_its_own_gains(
    engine: LocalEngine, user_home: HomeFixture, install: Install
) -> None:
    install("dora")
    run(engine, request(expert("dora")))
    run(engine, request(expert("dora"), route={"dtype": "bf16"}))
    [folder] = user_home.store.paths.derived.iterdir()
    assert len(list(folder.iterdir())) == 2
