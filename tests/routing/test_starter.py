"""The experts of the starter pack: held-out prompts reach theirs, unrelated ones reach none."""

from functools import cache
from typing import Any

import pytest

from examples.starter.compositions import COMPOSITIONS, Composition
from examples.starter.experts import EXPERTS
from examples.starter.pack import manifest as packed_manifest
from examples.starter.samples import Task, held_out
from expertctl.routing.candidate import Candidate, Installed, measure, unfit_for_prompt
from expertctl.routing.choice import choose
from expertctl.routing.encoder import Encoder, find_minilm
from expertctl.routing.features import features_of
from expertctl.routing.index import RoutingIndex
from expertctl.routing.lexical import LexicalEncoder
from expertctl.routing.minilm import open_minilm
from expertctl.routing.score import DEFAULT_BUDGET
from tests.routing.experts import installed, manifest

UNRELATED = (
    "What is the capital of France?",
    "Tell me a joke",
    "Write a poem about rain",
    "Who wrote Hamlet?",
    "How do I bake bread?",
    "Explain photosynthesis in simple words",
    "What is the weather like today?",
    "Translate good morning into Spanish",
    "Write a short story about a dragon",
    "Summarise the plot of Moby Dick",
    "Write a function that reverses a string in Python",
    "Give me a recipe for pancakes",
    "What is 12 times 7?",
    "Why is the sky blue?",
    "Hello, how are you?",
    "Write an email to my boss asking for leave",
)
ENCODERS = ["lexical"] + (["minilm"] if find_minilm() else [])


@cache
def encoder(name: str) -> Encoder:
    found = find_minilm()
    return open_minilm(found) if name == "minilm" and found else LexicalEncoder()


@pytest.fixture(scope="module", params=ENCODERS)
def index(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RoutingIndex:
    made = RoutingIndex(tmp_path_factory.mktemp("starter"), encoder(request.param))
    made.add({expert.digest: expert.manifest for expert in INSTALLED})
    return made


def starter(task: Task) -> Installed:
    packed: dict[str, Any] = packed_manifest(task)
    routing, composition = map(with_tuples, (packed["routing"], packed["composition"]))
    made = manifest(task.name, description=task.description, composition=composition, **routing)
    return installed(made, size=200_000)


def with_tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


INSTALLED = [starter(task) for task in EXPERTS]


def routed(index: RoutingIndex, prompt: str) -> list[str]:
    features = features_of(prompt)
    found = index.similarities(prompt)
    measured = [
        measure(e, features, found[e.digest], success=None, budget=DEFAULT_BUDGET)
        for e in INSTALLED
    ]
    judged = [c.refused(why) if (why := unfit_for_prompt(c, features)) else c for c in measured]
    judged.sort(key=order)
    chosen, _ = choose(judged, INSTALLED, max_experts=10, context=2048)
    return [choice.expert.manifest.name for choice in chosen]


def order(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.order


@pytest.mark.parametrize("task", EXPERTS, ids=lambda task: task.name)
def test_held_out_prompts_reach_their_expert(index: RoutingIndex, task: Task) -> None:
    count = 200 if index.encoder.name == "lexical" else 60
    prompts = [sample.prompt for sample in held_out(task, count, seed=11)]
    lost = [p for p in prompts if routed(index, p) != [task.name]]
    assert len(lost) <= 0.03 * count, lost


@pytest.mark.parametrize("composition", COMPOSITIONS, ids=lambda each: each.name)
def test_prompts_that_need_two_experts_reach_both(
    index: RoutingIndex, composition: Composition
) -> None:
    prompts = [sample.prompt for sample in held_out(composition, 60, seed=11)]
    wanted = [task.name for task in composition.plan]
    lost = [p for p in prompts if routed(index, p) != wanted]
    allowed = 0.1 if index.encoder.name == "lexical" else 0.4
    assert len(lost) <= allowed * len(prompts), lost


@pytest.mark.parametrize("prompt", UNRELATED)
def test_unrelated_prompts_reach_none(index: RoutingIndex, prompt: str) -> None:
    assert routed(index, prompt) == []
