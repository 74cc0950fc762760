"""Whole runs on kernels: the tokens of torch, exact bytes, and bits that depend on nothing else."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from expertctl.cli.run_view import format_turn, read_answer
from expertctl.engine.conversation import Conversation
from expertctl.engine.load_plan import NUMPY_MAX_BYTES
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory import host
from expertctl.engine.request import NamedExpert, RunRequest
from expertctl.engine.result import RunResult
from expertctl.engine_config import AdapterDtype, Dtype
from expertctl.errors import BudgetError, IncompatibleError, UsageError
from expertctl.package.base_model import BaseFacts, read_base
from expertctl.reference import Reference
from expertctl.routing.plan import SavedPlan
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert
from expertctl.user_request import SamplingOverrides
from tests.engine.test_conversation import pattern, say
from tests.engine.test_local_engine import planner, request, run
from tests.factories import make_package, write_base
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["fast", "user_home"]

DTYPES: list[Dtype] = ["float32", "bf16", "int8", "int4"]
BUDGET = 64 << 20
KINDS: dict[str, list[Any]] = {
    "lora": [("lora", {"seed": 1, "scale": 0.4})],
    "dora": [("dora", {"seed": 2, "rank": 3, "scale": 0.4})],
    "ia3": [("ia3", {"seed": 3, "scale": 0.9})],
    "soft": [("soft_prompt", {"seed": 4, "tokens": 5, "scale": 2.0})],
    "half": [("lora", {"seed": 5, "scale": 0.4, "dtype": "bfloat16", "rank": 7})],
}
PLANS: dict[str, tuple[tuple[str, float], ...]] = {
    "base alone": (),
    **{name: ((name, 1.0),) for name in KINDS},
    "several": (("lora", 0.7), ("ia3", 1.0), ("dora", 1.3), ("soft", 1.0), ("half", 1.0)),
}
WISHES = SamplingOverrides(greedy=True, max_tokens=12)


@dataclass(frozen=True)
class PackedPackages:
    """Packages of every kind for a base whose sizes fill the blocks of kernels."""

    base_dir: Path
    base: BaseFacts
    packages: tuple[Path, ...]


@pytest.fixture(scope="module")
def packed_packages(tmp_path_factory: pytest.TempPathFactory) -> PackedPackages:
    folder = tmp_path_factory.mktemp("packed")
    base_dir = write_base(folder / "base", tie=False, seed=2, head_dim=16, intermediate=80)
    base = read_base(base_dir)
    packages = (
        make_package(
            folder / name,
            f"acme/{name}",
            base_dir=base_dir,
            base=base,
            key=make_key("acme"),
            adapters=adapters,
        )
        for name, adapters in KINDS.items()
    )
    return PackedPackages(base_dir, base, tuple(packages))


@pytest.fixture
def home(user_home: HomeFixture, packed_packages: PackedPackages) -> Planner:
    user_home.bases.add(packed_packages.base_dir)
    user_home.trust_keys("acme")
    user_home.install(*packed_packages.packages)
    return planner(user_home)


@pytest.fixture
def packed(home: Planner) -> Iterator[LocalEngine]:
    engine = LocalEngine(home, budget=BUDGET, numpy_below=0)
    yield engine
    engine.close()


@pytest.fixture
def torch_engine(home: Planner) -> LocalEngine:
    return LocalEngine(home, budget=BUDGET)


def plan(name: str) -> tuple[NamedExpert, ...]:
    return tuple(ForcedExpert(Reference.parse(f"acme/{n}"), weight) for n, weight in PLANS[name])


def ask(name: str = "several", **options: Any) -> RunRequest:
    route = {"base_alone": not PLANS[name], **options.pop("route", {})}
    asked = request(*plan(name), route=route, **options)
    return replace(asked, route=replace(asked.route, sampling=WISHES))


def numerics(result: RunResult) -> tuple[object, ...]:
    told = result.to_json()["numerics"]
    assert isinstance(told, dict)
    assert ("kl_divergence" in told) == (told["dtype"] in ("int8", "int4"))
    return tuple(told[name] for name in ("backend", "dtype", "adapter_dtype", "deterministic"))


@pytest.mark.parametrize("name", PLANS)
def test_in_float32_the_tokens_are_those_of_torch(
    name: str, packed: LocalEngine, torch_engine: LocalEngine
) -> None:
    ours, theirs = run(packed, ask(name)), run(torch_engine, ask(name))
    assert numerics(ours) == ("packed", "float32", "published", False)
    assert numerics(theirs) == ("numpy", "float32", "published", False)
    assert ours.generated.tokens == theirs.generated.tokens
    assert len(set(ours.generated.tokens)) > 2, "the answer says too little"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_answers_with_every_plan_and_gives_back_all_it_borrowed(
    dtype: Dtype, home: Planner, packed: LocalEngine
) -> None:
    answers = set()
    for name in PLANS:
        result = run(packed, ask(name, route={"dtype": dtype}))
        assert numerics(result) == ("packed", dtype, "published", False)
        held = result.memory.held
        assert sum(held.values()) <= result.memory.peak <= BUDGET
        assert min(held["base"], held["kv"], held["buffers"]) > 0
        answers.add(result.generated.tokens)
    assert len(answers) > 3
    packed.close()
    assert packed.budget.used == 0


@pytest.mark.parametrize("adapter_dtype", ["fp16", "int8"])
def test_experts_are_held_in_fewer_bytes_when_asked(
    adapter_dtype: AdapterDtype, packed: LocalEngine, home: Planner
) -> None:
    plain = run(packed, ask("lora"))
    small = run(
        LocalEngine(home, budget=BUDGET), ask("lora", route={"adapter_dtype": adapter_dtype})
    )
    assert numerics(small) == ("packed", "float32", adapter_dtype, False)
    assert set(small.warnings) == set(plain.warnings), "what was asked for is no warning"
    assert small.memory.held["experts"] < plain.memory.held["experts"]
    assert small.planned.result.plan.identity != plain.planned.result.plan.identity


@pytest.mark.parametrize("name", PLANS)
def test_what_a_plan_takes_is_foretold_to_the_byte(name: str, home: Planner) -> None:
    whole = run(LocalEngine(home, budget=BUDGET, numpy_below=0), ask(name)).memory
    exact = LocalEngine(home, budget=whole.peak, numpy_below=0)
    assert run(exact, ask(name, on_budget="queue")).memory.peak == whole.peak
    for way in ("refuse", "queue"):
        less = LocalEngine(home, budget=whole.peak - 1, numpy_below=0)
        with pytest.raises(BudgetError):
            run(less, ask(name, on_budget=way))
        less.check_integrity()


def test_turns_of_a_chat_reuse_keys_and_values_and_answer_as_without(
    home: Planner, packed: LocalEngine
) -> None:
    kept = Conversation(packed, pattern(experts=plan("several")))
    for number, prompt in enumerate(("Sort 3, 1, 2", "And now?", "Once more")):
        turn = say(kept, prompt)
        fresh = Conversation(
            LocalEngine(home, budget=BUDGET, numpy_below=0), pattern(experts=plan("several"))
        )
        fresh.turns = kept.turns[:number]
        oracle = say(fresh, prompt).result
        assert turn.result.generated.tokens == oracle.generated.tokens
        before = kept.turns[number - 1].result.prompt_tokens if number else 0
        assert before <= turn.result.kv_reused_tokens < turn.result.prompt_tokens
        assert oracle.kv_reused_tokens == 0
    assert packed.budget.reserved_bytes("kv") > 0
    kept.reset()
    assert packed.budget.reserved_bytes("kv") == 0


def test_experts_that_come_back_find_what_was_kept_of_their_turns(packed: LocalEngine) -> None:
    conversation = Conversation(packed, pattern(experts=plan("lora")))
    first = say(conversation, "Sort 3, 1, 2")
    conversation.use_experts(plan("ia3"))
    changed = say(conversation, "And now?")
    assert (changed.replanned, changed.result.kv_reused_tokens) == (True, 0)
    conversation.use_experts(plan("lora"))
    back = say(conversation, "Once more")
    assert back.replanned
    assert back.result.kv_reused_tokens >= first.result.prompt_tokens
    assert "all read again" in format_turn(read_answer(changed.result), replanned=True)
    assert f"({back.result.kv_reused_tokens} reused)" in format_turn(
        read_answer(back.result), replanned=True
    )


def after(steps: int) -> Callable[[], bool]:
    asked = count()
    return lambda: next(asked) >= steps


def test_an_answer_is_cancelled_between_two_tokens_and_within_a_prompt(packed: LocalEngine) -> None:
    whole = run(packed, ask()).generated
    for steps in (1, 4):
        cut = run(packed, ask(), cancelled=after(steps)).generated
        assert cut.finish_reason == "cancelled"
        assert whole.tokens[: len(cut.tokens)] == cut.tokens
        assert len(cut.tokens) <= steps
    assert run(packed, ask()).generated.tokens == whole.tokens


@pytest.mark.parametrize("dtype", DTYPES)
def test_deterministic_answers_are_the_same_with_any_number_of_threads(
    dtype: Dtype, home: Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    route = {"dtype": dtype, "deterministic": True}
    wanted = ask(route=route)
    warm = replace(wanted, route=replace(wanted.route, sampling=SamplingOverrides(max_tokens=12)))
    answers = set()
    monkeypatch.setattr(host, "SMALL_MODEL", 0)
    for limit in range(1, min(host.count_usable_cores(), 2) + 1):
        monkeypatch.setenv("OMP_NUM_THREADS", str(limit))
        result = run(LocalEngine(home, budget=BUDGET), warm)
        assert result.threads == limit
        assert numerics(result) == ("packed", dtype, "published", True)
        answers.add(result.generated.tokens)
    assert len(answers) == 1


def test_deterministic_plans_are_other_plans_and_replay_only_as_such(home: Planner) -> None:
    engine = LocalEngine(home, budget=BUDGET)
    plain, fixed = (run(engine, ask(route={"deterministic": d})) for d in (False, True))
    assert numerics(plain)[0], numerics(fixed)[0] == ("numpy", "packed")
    plan = fixed.planned.result.plan
    assert plan.identity != plain.planned.result.plan.identity
    saved = SavedPlan(plan, threads=99)
    again = request(saved=saved, route={"deterministic": True})
    result = run(engine, again)
    assert result.generated.tokens == fixed.generated.tokens[:6]
    assert not [w for w in result.warnings if "threads" in w], "kernels do not depend on them"
    with pytest.raises(IncompatibleError, match="the plan was made with --det"):
        run(engine, request(saved=saved))


def test_gains_belong_to_a_base_and_what_it_is_held_in(
    packed: LocalEngine, torch_engine: LocalEngine, user_home: HomeFixture
) -> None:
    for dtype in DTYPES:
        run(packed, ask("dora", route={"dtype": dtype}))
    run(torch_engine, ask("dora"))
    [folder] = user_home.store.paths.derived.iterdir()
    assert len(list(folder.iterdir())) == len(DTYPES)


def test_an_engine_in_the_middle_of_an_answer_refuses_another(packed: LocalEngine) -> None:
    first = packed.run(ask())
    next(first)
    caught: list[BaseException] = []

    def other() -> None:
        try:
            next(packed.run(ask()))
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert "generating another answer" in str(caught[0])
    first.close()
    assert run(packed, ask()).generated.tokens


@pytest.mark.parametrize("numpy_below", [0, NUMPY_MAX_BYTES])
def test_an_engine_in_the_middle_of_an_answer_is_not_closed(
    home: Planner, numpy_below: int
) -> None:
    engine = LocalEngine(home, budget=BUDGET, numpy_below=numpy_below)
    whole = run(engine, ask()).generated.text
    stream = engine.run(ask())
    begun = next(stream)
    with pytest.raises(UsageError, match="generating another answer"):
        engine.close()
    assert begun + "".join(stream) == whole
    engine.close()
    assert engine.budget.used == 0
    assert run(engine, ask()).generated.text == whole


@pytest.mark.parametrize("numpy_below", [0, NUMPY_MAX_BYTES])
def test_a_text_whose_key_is_forgotten_while_it_runs_leaves_nothing(
    home: Planner, numpy_below: int
) -> None:
    engine = LocalEngine(home, budget=BUDGET, numpy_below=numpy_below)
    stream = engine.run(ask("lora", cache_key="chat"))
    next(stream)
    engine.forget("chat")
    for _ in stream:
        pass
    assert engine.budget.reserved_bytes("kv") == 0
    assert run(engine, ask("lora", cache_key="chat")).kv_reused_tokens == 0
    assert run(engine, ask("lora", cache_key="chat")).kv_reused_tokens > 0


def test_transformers_does_not_know_what_only_kernels_do(home: Planner) -> None:
    for route in ({"dtype": "int8"}, {"adapter_dtype": "int8"}, {"deterministic": True}):
        with pytest.raises(UsageError, match="--engine transformers does not support --"):
            run(LocalEngine(home), ask("base alone", route={"engine": "transformers", **route}))
