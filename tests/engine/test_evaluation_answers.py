"""Prompts of an evaluation that are answered at once get what they get one at a time."""

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine import evaluation
from expertctl.engine.evaluation import EvaluationRequest, evaluate
from expertctl.engine.evaluation_result import EvaluationResult
from expertctl.engine.local_engine import LocalEngine
from expertctl.engine.memory.process_registry import list_engines
from expertctl.engine.offline import (
    BATCH_SIZE,
    MIN_BATCH_PROMPTS,
    answer_sequentially,
    can_batch,
    open_batch_answering,
)
from expertctl.engine.request import FileExpert, RunRequest
from expertctl.engine_config import EngineConfig
from expertctl.errors import DigestError, TrustError, UsageError, ignore_notification
from expertctl.package.evaluation import EvaluationData, read_evaluation_data
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import ForcedExpert, RouteRequest
from expertctl.schema.manifest import AdapterKind
from expertctl.settings import Home, Settings
from expertctl.user_request import SamplingOverrides, UserMessage
from tests.engine.package_fixtures import EnginePackages
from tests.engine.serving.harness import engine_packages
from tests.factories import make_package, make_route_request
from tests.store.fixtures import HomeFixture, fast, make_key, user_home

__all__ = ["engine_packages", "fast", "user_home"]

pytestmark = pytest.mark.all

ONE, TWO = (ForcedExpert(Reference.parse(f"acme/{name}")) for name in ("one", "two"))


@pytest.fixture
def planner(user_home: HomeFixture, engine_packages: EnginePackages, tmp_path: Path) -> Planner:
    user_home.bases.add(engine_packages.base_dir)
    user_home.trust_keys("acme")
    for name, seed in (("one", 5), ("two", 6)):
        user_home.install(
            make_package(
                tmp_path,
                f"acme/{name}",
                base_dir=engine_packages.base_dir,
                base=engine_packages.base,
                key=make_key("acme"),
                lora={"seed": seed, "scale": 0.4},
                decoding={"max_tokens": 6},
            )
        )
    return Planner.open(Settings(Home(user_home.root), encoder="lexical"))


def data(folder: Path, count: int, *, longest: int = 40) -> EvaluationData:
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{n} + {'1' * (n * 7 % longest)}", "answer": "7"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_evaluation_data(path, metric="exact_match")


def texts(found: EvaluationResult) -> dict[str, list[str]]:
    return {score.name: [answer.text for answer in score.answers] for score in found.scores}


@pytest.mark.parametrize("compose", [(), (replace(TWO, weight=0.5),)], ids=["one", "a chain"])
def test_answers_at_once_are_those_of_one_at_a_time(
    planner: Planner, tmp_path: Path, compose: tuple[ForcedExpert, ...]
) -> None:
    request = EvaluationRequest(
        data=data(tmp_path, 19),
        expert=ONE,
        compose=compose,
        config=EngineConfig(deterministic=True),
    )
    told, counted = list[str](), list[int]()
    alone = evaluate(planner, replace(request, batch_size=1), notify=told.append)
    assert not [text for text in told if text.startswith("loading ")]
    together = evaluate(planner, request, progress=counted.append, notify=told.append)
    assert [text for text in told if text.startswith("loading market-base, ")]
    assert texts(together) == texts(alone)
    assert len(set(texts(alone)["base"])) > 1
    assert together.scores == alone.scores
    assert together.warnings == alone.warnings
    assert [count for count in counted if count] == [1] * request.answers


def fork(
    folder: Path, engine_packages: EnginePackages, *, kind: AdapterKind = "lora", seed: int = 7
) -> Path:
    """A package that nobody signed or installed."""
    return make_package(
        folder / kind,
        "local/new",
        base_dir=engine_packages.base_dir,
        base=engine_packages.base,
        adapters=[(kind, {"seed": seed, "scale": 0.4})],
        decoding={"max_tokens": 6},
    )


@pytest.mark.parametrize("kind", ["lora", "dora", "ia3", "soft_prompt"])
def test_a_file_measured_at_once_scores_what_it_scores_one_at_a_time(
    planner: Planner, tmp_path: Path, engine_packages: EnginePackages, kind: AdapterKind
) -> None:
    expert = FileExpert(fork(tmp_path, engine_packages, kind=kind))
    request = EvaluationRequest(
        data=data(tmp_path, 11), expert=expert, config=EngineConfig(deterministic=True)
    )
    alone = evaluate(planner, replace(request, batch_size=1))
    told = list[str]()
    together = evaluate(planner, request, notify=told.append)
    assert any(text.startswith("loading market-base, ") for text in told)
    assert together == alone
    assert "local/new@1.0.0 is unsigned, so its publisher is unknown" in together.warnings
    base, expert_texts = texts(together).values()
    assert base != expert_texts


def test_a_chain_of_files_and_installed_experts_is_measured_at_once(
    planner: Planner, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    file = fork(tmp_path, engine_packages)
    for expert, compose in ((ONE, FileExpert(file, 0.5)), (FileExpert(file), TWO)):
        request = EvaluationRequest(
            data=data(tmp_path, 9),
            expert=expert,
            compose=(compose,),
            config=EngineConfig(deterministic=True),
        )
        assert evaluate(planner, request) == evaluate(planner, replace(request, batch_size=1))


def test_sixteen_prompts_at_once_get_the_tokens_of_one_at_a_time(
    planner: Planner, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    wishes = SamplingOverrides(greedy=True, max_tokens=12)
    requests = [
        RunRequest(
            message=UserMessage(prompt=f"{n} + {n * '2'}"),
            route=RouteRequest(
                prompt=f"{n}", sampling=wishes, config=EngineConfig(deterministic=True)
            ),
            experts=(FileExpert(fork(tmp_path, engine_packages)),),
        )
        for n in range(19)
    ]
    [base] = planner.bases.list_bases()
    alone = dict(answer_sequentially(LocalEngine(planner))(requests))
    with open_batch_answering(
        planner, base, requests[0], batch_size=BATCH_SIZE, notify=ignore_notification
    ) as answering:
        together = dict(answering(requests))
    tokens = {number: result.generated.tokens for number, result in together.items()}
    assert tokens == {number: result.generated.tokens for number, result in alone.items()}
    assert len(set(map(tuple, tokens.values()))) > 1


def test_the_engine_reads_no_file_that_it_was_not_started_with(
    planner: Planner, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    [base] = planner.bases.list_bases()
    route = RouteRequest(prompt="x", config=EngineConfig(deterministic=True))
    first = RunRequest(message=UserMessage(prompt="x"), route=route)
    named = replace(first, experts=(FileExpert(fork(tmp_path, engine_packages)),))
    with (
        open_batch_answering(
            planner, base, first, batch_size=2, notify=ignore_notification
        ) as answering,
        pytest.raises(UsageError, match=r"local-new-1\.0\.0\.expert was not read"),
    ):
        list(answering([named]))


def test_a_file_that_is_replaced_before_it_is_read_is_noticed(
    planner: Planner,
    tmp_path: Path,
    engine_packages: EnginePackages,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file, other = (
        fork(tmp_path / "a", engine_packages),
        fork(tmp_path / "b", engine_packages, seed=8),
    )
    request = EvaluationRequest(
        data=data(tmp_path, 9), expert=FileExpert(file), config=EngineConfig(deterministic=True)
    )

    def change(*known: Any, **options: Any) -> bool:
        file.write_bytes(other.read_bytes())
        return can_batch(*known, **options)

    monkeypatch.setattr(evaluation, "can_batch", change)
    with pytest.raises(DigestError, match="changed while it was evaluated"):
        evaluate(planner, request)


def test_a_file_that_a_stranger_signed_is_not_measured(
    planner: Planner, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    stranger = make_package(
        tmp_path,
        "other/new",
        base_dir=engine_packages.base_dir,
        base=engine_packages.base,
        key=make_key("stranger"),
    )
    request = EvaluationRequest(
        data=data(tmp_path, 9), expert=FileExpert(stranger), config=EngineConfig(deterministic=True)
    )
    with pytest.raises(TrustError):
        evaluate(planner, request)


@pytest.mark.parametrize("at", [1, 5])
def test_an_interrupted_evaluation_ends_its_engine(
    at: int, planner: Planner, tmp_path: Path, engine_packages: EnginePackages
) -> None:
    def interrupt(count: int) -> None:
        counted.append(count)
        if sum(counted) == at:
            raise KeyboardInterrupt

    counted, before = list[int](), threading.active_count()
    expert = FileExpert(fork(tmp_path, engine_packages))
    request = EvaluationRequest(
        data=data(tmp_path, 9), expert=expert, config=EngineConfig(deterministic=True)
    )
    with pytest.raises(KeyboardInterrupt):
        evaluate(planner, request, progress=interrupt)
    assert threading.active_count() == before
    assert list_engines(planner.home.engines) == []


def test_a_prompt_that_does_not_fit_is_named_by_its_line(planner: Planner, tmp_path: Path) -> None:
    samples = data(tmp_path, 12)
    long = replace(samples.samples[4], prompt="1" * 2000)
    samples = replace(samples, samples=(*samples.samples[:4], long, *samples.samples[5:]))
    request = EvaluationRequest(data=samples, expert=ONE, config=EngineConfig(deterministic=True))
    with pytest.raises(UsageError, match=r"sums\.jsonl, line 5: the prompt has"):
        evaluate(planner, request)


@pytest.mark.parametrize(("at_once", "fits"), [(16, True), (4096, False)])
def test_in_little_memory_the_answers_are_the_same(
    at_once: int, fits: bool, planner: Planner, tmp_path: Path
) -> None:
    request = EvaluationRequest(
        data=data(tmp_path, 9), expert=ONE, config=EngineConfig(deterministic=True)
    )
    counted, told = list[int](), list[str]()
    whole = evaluate(planner, replace(request, batch_size=1))
    config = replace(request.config, memory_budget=16 << 20)
    little = evaluate(
        planner,
        replace(request, config=config, batch_size=at_once),
        progress=counted.append,
        notify=told.append,
    )
    assert little == whole
    assert sum(counted) == request.answers
    words = "loading market-base, " if fits else "prompts are answered one at a time, "
    assert [text for text in told if text.startswith(words)]


@pytest.mark.parametrize(
    ("route", "expert", "prompts", "batched"),
    [
        ({"deterministic": True}, ONE, BATCH_SIZE, True),
        ({"dtype": "int8"}, ONE, MIN_BATCH_PROMPTS, True),
        ({"dtype": "int8"}, ONE, MIN_BATCH_PROMPTS - 1, False),
        ({"dtype": "int8", "moe_miss": "skip"}, ONE, BATCH_SIZE, False),
        ({"dtype": "int8"}, FileExpert(Path("x.expert")), BATCH_SIZE, True),
        ({}, ONE, BATCH_SIZE, False),
    ],
    ids=["kernels", "enough", "few", "lossy", "a file", "numpy"],
)
def test_a_batch_is_used_only_where_it_gives_the_same_and_is_worth_it(
    route: dict[str, Any], expert: Any, prompts: int, batched: bool, planner: Planner
) -> None:
    asked = make_route_request(**route)
    request = RunRequest(message=UserMessage(prompt="x"), route=asked, experts=(expert,))
    [base] = planner.bases.list_bases()
    assert can_batch(base, request, prompts=prompts) is batched
