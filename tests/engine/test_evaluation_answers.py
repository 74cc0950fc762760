"""Prompts of an evaluation that are answered at once get what they get one at a time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from expertctl.engine.evaluation import EvaluationRequest, evaluate
from expertctl.engine.evaluation_answers import AT_ONCE, WORTH, can_batch
from expertctl.engine.evaluation_result import Evaluated
from expertctl.engine.message import UserMessage
from expertctl.engine.request import FileExpert, RunRequest
from expertctl.errors import UsageError
from expertctl.package.evaluation_data import EvaluationData, read_data
from expertctl.reference import Reference
from expertctl.routing.planner import Planner
from expertctl.routing.request import Forced, RouteRequest
from expertctl.settings import Home, Settings
from tests.engine.market import Market
from tests.engine.serving.workshop import market
from tests.factories import make_package
from tests.store.shop import House, a_key, fast, house

__all__ = ["fast", "house", "market"]

ONE, TWO = (Forced(Reference.parse(f"acme/{name}")) for name in ("one", "two"))


@pytest.fixture
def planner(house: House, market: Market, tmp_path: Path) -> Planner:
    house.bases.add(market.base_dir)
    house.trusting("acme")
    for name, seed in (("one", 5), ("two", 6)):
        house.install(
            make_package(
                tmp_path,
                f"acme/{name}",
                base_dir=market.base_dir,
                base=market.base,
                key=a_key("acme"),
                lora={"seed": seed, "scale": 0.4},
                decoding={"max_tokens": 6},
            )
        )
    return Planner.open(Settings(Home(house.root), encoder="lexical"))


def data(folder: Path, count: int, *, longest: int = 40) -> EvaluationData:
    path = folder / "sums.jsonl"
    rows = [{"prompt": f"{n} + {'1' * (n * 7 % longest)}", "answer": "7"} for n in range(count)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return read_data(path, metric="exact_match")


def texts(found: Evaluated) -> dict[str, list[str]]:
    return {score.name: [answer.text for answer in score.answers] for score in found.scores}


@pytest.mark.parametrize("compose", [(), (replace(TWO, weight=0.5),)], ids=["one", "a chain"])
def test_answers_at_once_are_those_of_one_at_a_time(
    planner: Planner, tmp_path: Path, compose: tuple[Forced, ...]
) -> None:
    request = EvaluationRequest(
        data=data(tmp_path, 19), expert=ONE, compose=compose, deterministic=True
    )
    told, counted = list[str](), list[int]()
    alone = evaluate(planner, replace(request, at_once=1), tell=told.append)
    assert not [text for text in told if text.startswith("loading ")]
    together = evaluate(planner, request, progress=counted.append, tell=told.append)
    assert [text for text in told if text.startswith("loading market-base, ")]
    assert texts(together) == texts(alone)
    assert len(set(texts(alone)["base"])) > 1
    assert together.scores == alone.scores
    assert together.warnings == alone.warnings
    assert counted == [1] * request.answers


def test_a_prompt_that_does_not_fit_is_named_by_its_line(planner: Planner, tmp_path: Path) -> None:
    samples = data(tmp_path, 12)
    long = replace(samples.samples[4], prompt="1" * 2000)
    samples = replace(samples, samples=(*samples.samples[:4], long, *samples.samples[5:]))
    request = EvaluationRequest(data=samples, expert=ONE, deterministic=True)
    with pytest.raises(UsageError, match=r"sums\.jsonl, line 5: the prompt has"):
        evaluate(planner, request)


def test_in_little_memory_the_answers_are_the_same(planner: Planner, tmp_path: Path) -> None:
    request = EvaluationRequest(data=data(tmp_path, 9), expert=ONE, deterministic=True)
    whole = evaluate(planner, replace(request, at_once=1))
    assert texts(evaluate(planner, request, budget=16 << 20)) == texts(whole)


@pytest.mark.parametrize(
    ("route", "expert", "prompts", "batched"),
    [
        ({"deterministic": True}, ONE, AT_ONCE, True),
        ({"dtype": "int8"}, ONE, WORTH, True),
        ({"dtype": "int8"}, ONE, WORTH - 1, False),
        ({"dtype": "int8", "moe_miss": "skip"}, ONE, AT_ONCE, False),
        ({"dtype": "int8"}, FileExpert(Path("x.expert")), AT_ONCE, False),
        ({}, ONE, AT_ONCE, False),
    ],
    ids=["kernels", "enough", "few", "lossy", "a file", "torch"],
)
def test_a_batch_is_used_only_where_it_gives_the_same_and_is_worth_it(
    route: dict[str, Any], expert: Any, prompts: int, batched: bool, planner: Planner
) -> None:
    asked = RouteRequest(prompt="x", **route)
    request = RunRequest(message=UserMessage(prompt="x"), route=asked, experts=(expert,))
    [base] = planner.bases.bases()
    assert can_batch(base, request, prompts=prompts) is batched
