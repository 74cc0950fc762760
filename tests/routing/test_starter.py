"""The experts of the starter pack: held-out prompts reach theirs, unrelated ones reach none."""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from examples.starter.compositions import COMPOSITIONS, Composition
from examples.starter.experts import EXPERTS
from examples.starter.pack import manifest as packed_manifest
from examples.starter.samples import Task, held_out
from expertctl.routing.candidate import InstalledExpert, find_eligible_experts
from expertctl.routing.encoder import Encoder, LexicalEncoder, find_minilm
from expertctl.routing.index import RoutingIndex
from expertctl.routing.minilm import open_minilm
from expertctl.routing.request import RouteRequest
from expertctl.routing.router import route_prompt
from tests.routing.experts import UNRELATED, make_base, make_installed, make_manifest

pytestmark = pytest.mark.all

ENCODERS = ["lexical"] + (["minilm"] if find_minilm() else [])
Routed = Callable[[str], list[str]]


@cache
def encoder(name: str) -> Encoder:
    found = find_minilm()
    return open_minilm(found) if name == "minilm" and found else LexicalEncoder()


def starter(task: Task) -> InstalledExpert:
    packed: dict[str, Any] = packed_manifest(task)
    routing, composition = map(with_tuples, (packed["routing"], packed["composition"]))
    made = make_manifest(
        task.name, description=task.description, composition=composition, **routing
    )
    return make_installed(made, size=200_000)


def with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


INSTALLED = [starter(task) for task in EXPERTS]


@pytest.fixture(scope="module", params=ENCODERS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoutingIndex:
    return RoutingIndex(tmp_path_factory.mktemp("starter"), encoder(request.param))


@pytest.fixture(scope="module")
def routed(index: RoutingIndex, tmp_path_factory: pytest.TempPathFactory) -> Routed:
    """Routes a prompt among all of them; says the names of those that answer, in order."""
    return router_of(index, INSTALLED, tmp_path_factory.mktemp("starter-base"))


def router_of(index: RoutingIndex, experts: list[InstalledExpert], folder: Path) -> Routed:
    base = make_base(folder)
    roster = find_eligible_experts(RouteRequest(prompt="any"), experts, base=base, index=index)

    def run(prompt: str) -> list[str]:
        result = route_prompt(RouteRequest(prompt=prompt), roster, base=base, index=index)
        return [choice.expert.manifest.name for choice in result.selected]

    return run


@pytest.mark.parametrize("task", EXPERTS, ids=lambda task: task.name)
def test_held_out_prompts_reach_their_expert(
    index: RoutingIndex, routed: Routed, task: Task
) -> None:
    count = 200 if index.encoder.name == "lexical" else 60
    prompts = [sample.prompt for sample in held_out(task, count, seed=11)]
    lost = [p for p in prompts if routed(p) != [task.name]]
    assert len(lost) <= 0.03 * count, lost


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda each: each.name)
def test_prompts_that_need_two_experts_reach_both(
    index: RoutingIndex, routed: Routed, composition: Composition
) -> None:
    prompts = [sample.prompt for sample in held_out(composition, 60, seed=11)]
    wanted = [task.name for task in composition.plan]
    lost = [p for p in prompts if routed(p) != wanted]
    allowed = 0.1 if index.encoder.name == "lexical" else 0.05
    assert len(lost) <= allowed * len(prompts), lost


@pytest.mark.parametrize("prompt", UNRELATED)
def test_unrelated_prompts_reach_none(routed: Routed, prompt: str) -> None:
    assert routed(prompt) == []
